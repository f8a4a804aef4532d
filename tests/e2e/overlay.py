"""A copy of an installed package with one edited file, put before the installed one."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from collections.abc import Iterator
from pathlib import Path

from moediag.lab.stacks.environment import Stack


@contextlib.contextmanager
def overlay(
    stack: Stack, folder: Path, package: str, file: str, *edits: tuple[str, str]
) -> Iterator[Stack]:
    """Yields ``stack`` with ``file`` of ``package`` edited: (text, its replacement) pairs."""
    (packages,) = stack.python.parent.parent.glob("lib/python*/site-packages")
    copy = folder / package
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(packages / package, copy, copy_function=linked, ignore=ignored)
    edit(copy / file, *edits)
    yield dataclasses.replace(stack, pythonpath=[folder, *stack.pythonpath])


def edit(file: Path, *edits: tuple[str, str]) -> None:
    """Replaces a link of the copy by an edited file."""
    text = file.read_text(encoding="utf-8")
    for old, new in edits:
        assert old in text, f"{file.name} of this release has no text {old!r}"
        text = text.replace(old, new)
    file.unlink()
    file.write_text(text, encoding="utf-8")


def linked(source: str, target: str) -> None:
    Path(target).symlink_to(source)
