"""Runs the catalogue on pinned and new releases and compares it with past nights."""

__all__ = ["drive", "history", "jobs", "summary", "tracks"]
