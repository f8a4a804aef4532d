"""The search alone: pure functions of the known verdicts, without processes or files."""

__all__ = ["answer", "corners", "rates", "search"]
