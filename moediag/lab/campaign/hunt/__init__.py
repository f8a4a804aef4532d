"""Checks relations on every family of a release: finds bugs that no scenario describes."""

__all__ = ["findings", "findings_page", "question", "session"]
