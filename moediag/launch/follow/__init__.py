"""Supervisors: decide from progress and CPU time whether ranks hang, and end hung launches."""

__all__ = ["supervise", "watched_job"]
