"""Supervisors: decide from progress and CPU time whether ranks hang, and end hung launches."""

__all__ = ["several_nodes", "supervise", "watched_job"]
