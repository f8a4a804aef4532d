"""Writes the reference pages and the schemas of docs/reference. moediag itself does not need it."""
