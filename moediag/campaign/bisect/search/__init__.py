"""The search for the release that changed the outcome: pure, without processes or files."""

__all__ = ["answer", "corners", "machine", "rates", "search"]
