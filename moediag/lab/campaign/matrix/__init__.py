"""Shows which release has which failure, as a table of scenarios and releases."""

__all__ = ["question", "session", "table_page"]
