"""Runs the catalogue on pinned and new releases and compares it with past nights."""

__all__ = ["drive", "jobs", "night", "summary", "tracks"]
