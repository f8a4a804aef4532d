"""Loads programs and fixes: one module each, beside the scenarios or a user's own.

A program is a step that tests more than the sharding of a transformers model. Its module has
``run(collector)``, like :mod:`moediag.lab.step.tasks.step`, and ``OPTIONS`` with their defaults. It
computes the correct result itself, in one process, from the same weights and batches, because only
it knows its model. The recorder is ``paused()`` meanwhile, since that is not part of the job. The
rank has joined a process group.

A fix module has ``SUMMARY`` (one sentence), ``SOURCE`` (who proposed it) and at least one of
``before_wrap(model, anatomy, wrapper)`` and ``after_wrap(model, anatomy, wrapper)``, called around
the sharding of the model under test. A fix changes that model alone, never a class, so that several
fixes can be timed in one process.

Either raises :class:`moediag.recorder.not_applicable.NotApplicable` with a reason if it cannot run
or be applied.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from types import ModuleType
from typing import List

from moediag.lab import content


def program(name: str) -> ModuleType:
    """Returns the module of program ``name``. Raises what importing it raises."""
    return _load(content.PROGRAMS, name)


def fix(name: str) -> ModuleType:
    """Returns the module of the fix ``name``. Raises what importing it raises."""
    return _load(content.FIXES, name)


def _load(kind: str, name: str) -> ModuleType:
    """Imports the file under a name of its own, within a package of its folder: it may import the
    modules beside it (``from . import matrices``), and hides no other module of that name."""
    file = content.file(kind, name)
    if content.is_own(name):
        kind = f"own_{hashlib.sha256(str(file.parent).encode()).hexdigest()[:12]}"
    _package("moediag_scenarios", [])
    _package(f"moediag_scenarios.{kind}", [str(file.parent)])
    full = f"moediag_scenarios.{kind}.{file.stem}"
    if full not in sys.modules:
        spec = importlib.util.spec_from_file_location(full, file)
        assert spec is not None and spec.loader is not None
        module = sys.modules[full] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[full]
            raise
    return sys.modules[full]


def _package(name: str, folders: List[str]) -> None:
    if name not in sys.modules:
        package = sys.modules[name] = ModuleType(name)
        package.__path__ = folders
