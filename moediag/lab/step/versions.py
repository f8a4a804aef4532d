"""Versions of the packages that this rank runs on."""

from __future__ import annotations

import platform
from importlib import metadata
from typing import Dict, Optional

_PACKAGES = ("torch", "transformers", "accelerate", "deepspeed", "trl", "torchtitan", "triton")


def versions() -> Dict[str, Optional[str]]:
    """Returns package -> version or None; ``python`` always has one."""
    found: Dict[str, Optional[str]] = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found
