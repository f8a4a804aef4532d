"""How each rank ended, and where it stood."""

__all__ = ["failures", "mixed_optimizer", "whereabouts"]
