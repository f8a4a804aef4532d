"""All scenarios of the catalogue in one campaign, and their common page."""

__all__ = ["session", "summary"]
