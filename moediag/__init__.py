"""moediag: reproduce, watch, diagnose and bisect failures of distributed MoE training.

This package's root imports nothing: the control side (typer, rich, pydantic) and the rank
side (torch) both start from here, in different environments.
"""

__all__ = ["__version__"]

__version__ = "0.1.0.dev0"
