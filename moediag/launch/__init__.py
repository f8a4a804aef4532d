"""Starts the ranks of a trial or a watched job, follows them to their end, collects evidence."""

__all__ = ["base", "hosts", "launcher", "processes", "record", "settings", "signals", "watched"]
