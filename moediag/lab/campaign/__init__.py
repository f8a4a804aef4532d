"""Many runs as one campaign: the engine, and a strategy for each command."""

__all__ = ["bisect", "engine", "matrix", "nightly", "prebuild", "run", "sweep"]
