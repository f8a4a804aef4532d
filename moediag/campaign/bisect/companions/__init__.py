"""Which packages that changed together with the bisected one matter."""

__all__ = ["companion_answer", "companions"]
