"""Finds the release that broke a scenario and the release that fixed it."""

__all__ = ["answer_page", "question", "session"]
