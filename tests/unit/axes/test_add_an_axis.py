"""docs/extending/add-an-axis.md followed word for word in a copy of the package, and its table of
axes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from moediag.axes import AXES, Axis
from tests.e2e.test_howto import Checkout, Page

ROOT = Path(__file__).parents[3]
RUN = "import doctest, sys; sys.exit(doctest.testfile('page.txt', module_relative=False).failed)"


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    folder = tmp_path / "checkout"
    unneeded = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "moediag", folder / "moediag", ignore=unneeded)
    return Checkout(folder)


def shown(folder: Path, page: Page) -> subprocess.CompletedProcess[str]:
    """Runs the examples of the page against the package in ``folder``."""
    blocks = re.findall(r"```pycon\n(.*?)\n *```", page.text, re.S)
    (folder / "page.txt").write_text("\n\n".join(map(textwrap.dedent, blocks)), encoding="utf-8")
    return subprocess.run(
        [sys.executable, "-c", RUN], cwd=folder, text=True, capture_output=True, timeout=120,
        env={**os.environ, "PYTHONPATH": str(folder)}, check=False,
    )  # fmt: skip


def test_an_axis_is_one_class(checkout: Checkout) -> None:
    page = Page.read("add-an-axis.md")
    (checkout.folder / "long-sequences.yaml").write_text(
        page.files()["long-sequences.yaml"], encoding="utf-8"
    )
    assert "unknown mesh axis 'sp'" in shown(checkout.folder, page).stdout
    checkout.follow(page)
    done = shown(checkout.folder, page)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("axis", AXES)
def test_the_page_lists_every_axis(axis: Axis) -> None:
    page = Page.read("add-an-axis.md")
    assert f"| `{axis}` | {axis.about} | {axis.alone} |" in page.text
