"""Kinds of silent errors, written by hand, and what is said of them."""
