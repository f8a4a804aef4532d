"""`moediag nightly`: the catalogue on pinned and new releases, held against the nights before.

``model`` is what a night leaves, ``compare`` says what is new in it; both are pure. ``drive`` runs.
"""

__all__ = ["artifacts", "blame", "changes", "drive", "history", "jobs", "summary", "tracks"]
