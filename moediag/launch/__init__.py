"""Starts the ranks of a trial or a watched job, monitors them and collects evidence."""

__all__ = ["base", "hosts", "launcher", "processes", "record", "settings", "signals", "watched"]
