"""Links the base's torch, and nothing else of the base, into an overlay.

A ``.pth`` to the base's whole site-packages would expose everything installed there, and
transformers changes its behaviour depending on installed packages.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from moediag.errors import StackError
from moediag.lab.stacks.base import Part

FOLDER = "torch-only"
PTH = "zz_moediag_torch.pth"


def site_packages(environment: Path) -> Path:
    """Returns the environment's site-packages folder. Raises StackError if there is none."""
    for folder in sorted((environment / "lib").glob("python3*/site-packages")):
        return folder
    raise StackError(f"{environment} is not a virtual environment")


def link_torch(environment: Path, parts: Iterable[Part], installed: set[str]) -> list[str]:
    """Links torch and its requirements into ``environment``; returns the linked names.

    ``installed`` has the canonical names of the environment's own packages, which are not linked.
    The ``.pth`` is relative, so that the complete environment can be renamed.
    """
    folder = environment / FOLDER
    folder.mkdir()
    linked = []
    for part in parts:
        if part.name not in installed:
            linked.append(part.name)
            for name, target in part.links.items():
                _link(folder / name, Path(target))
    site = site_packages(environment)
    (site / PTH).write_text(os.path.relpath(folder, site) + "\n", encoding="utf-8")
    return linked


def _link(link: Path, target: Path) -> None:
    """Creates a link. A folder shared by distributions in different places (``nvidia``) becomes a
    real folder."""
    if not link.is_symlink() and not link.exists():
        link.symlink_to(target, target_is_directory=target.is_dir())
        return
    if link.is_symlink():
        present = link.readlink()
        if present == target or not (present.is_dir() and target.is_dir()):
            return
        link.unlink()
        link.mkdir()
        for child in present.iterdir():
            _link(link / child.name, child)
    if link.is_dir() and target.is_dir():
        for child in target.iterdir():
            _link(link / child.name, child)
