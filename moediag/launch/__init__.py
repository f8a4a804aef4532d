"""Starts the ranks of a trial or a watched job, monitors them and collects evidence."""

__all__ = ["base", "processes", "settings", "signals", "watched"]
