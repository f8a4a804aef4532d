"""Fixes as modules, one each.

A fix module has ``SUMMARY`` (one sentence), ``SOURCE`` (who proposed it) and at least one of
``before_wrap(model, anatomy, wrapper)`` and ``after_wrap(model, anatomy, wrapper)``, called around
the sharding of the model under test. A fix changes that model alone, never a class, so that several
fixes can be timed in one process. It raises :class:`moediag.recorder.not_applicable.NotApplicable`
with a reason if it cannot be applied.
"""

from __future__ import annotations

import importlib
from types import ModuleType

__all__ = ["load"]


def load(name: str) -> ModuleType:
    """Returns the module of the fix ``name`` (kebab-case). Raises ImportError."""
    return importlib.import_module(f"moediag.lab.step.fixes.{name.replace('-', '_')}")
