"""How each rank ended, and where it was."""

__all__ = ["crash_reasons", "failures", "whereabouts"]
