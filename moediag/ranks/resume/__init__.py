"""Records the state of a user's program at steps after a checkpoint, for `moediag resume`."""

__all__ = ["program_state", "recording"]
