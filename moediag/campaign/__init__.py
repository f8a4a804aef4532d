"""Many runs as one campaign: a run, a sweep of the catalogue, bisect, matrix and nightly."""

__all__ = ["bisect", "engine", "matrix", "nightly", "run", "sweep"]
