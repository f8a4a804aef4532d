"""Scenarios x releases as a table: which release has which failure."""

__all__ = ["cells", "question", "session", "table_page", "work"]
