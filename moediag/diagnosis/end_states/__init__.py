"""How each rank ended, and where it was."""

__all__ = ["failures", "mixed_optimizer", "whereabouts"]
