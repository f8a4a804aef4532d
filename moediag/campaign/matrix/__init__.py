"""Scenarios x releases as a table: which release has which failure."""
