"""moediag: reproduce, watch, diagnose and bisect failures of distributed MoE training.

This package's root imports nothing before it is used: the control side (typer, rich, pydantic) and
the rank side (torch) both start from here, in different environments.
"""

# What mypy and editors know is in __init__.pyi.
__all__ = ["__version__", "check", "diagnose", "laws", "run", "verify"]

__version__ = "0.1.0.dev0"


def __dir__() -> list:  # type: ignore[type-arg]
    return sorted([*globals(), *__all__])


def __getattr__(name: str) -> object:
    import importlib

    if name in ("laws", "verify"):
        return importlib.import_module(f"moediag.{name}")
    if name == "diagnose":
        return importlib.import_module("moediag.api").diagnose
    if name in ("check", "run"):
        from moediag import extension

        extension.require(f"moediag.{name}")
        return extension.provided(name)
    raise AttributeError(f"module 'moediag' has no attribute {name!r}")
