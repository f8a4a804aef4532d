"""Following a launch or a watched job until it ends: progress, patience, watchdog."""

__all__ = ["several_nodes", "supervise", "watchdog", "watched_job"]
