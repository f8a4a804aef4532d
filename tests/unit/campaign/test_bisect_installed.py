"""What a boundary's environments say: installed packages, their repositories, what ran."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from email.message import Message
from pathlib import Path
from types import SimpleNamespace

import pytest

from moediag.errors import StackError
from moediag.lab.campaign.bisect import afterwards as module
from moediag.lab.campaign.bisect import answer_page
from moediag.lab.campaign.bisect.beyond import Beyond
from moediag.lab.campaign.bisect.installed_source import compare, installed, repository
from moediag.lab.campaign.bisect.probe_verdict import BAD, GOOD, skip
from moediag.lab.campaign.bisect.search.answer import Answer, Boundary, Status
from moediag.lab.campaign.bisect.timeline import ProbeRecord
from moediag.protocol import executed_file


def environment(folder: Path, version: str, files: Mapping[str, str]) -> Path:
    """A virtual environment in which ``mini`` is installed; its interpreter."""
    site = folder / "lib" / "python3.11" / "site-packages"
    about = site / f"mini-{version}.dist-info"
    about.mkdir(parents=True)
    home = "https://github.com/someone/mini"
    (about / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: mini\nVersion: {version}\nHome-page: {home}\n", "utf-8"
    )
    rows = []
    for name, text in files.items():
        (site / name).parent.mkdir(exist_ok=True)
        (site / name).write_text(text, encoding="utf-8")
        rows.append(f"{name},sha256={hashlib.sha256(text.encode()).hexdigest()},{len(text)}")
    rows += ["../../../bin/mini,,", "mini/data.bin,,", f"mini-{version}.dist-info/RECORD,,"]
    (about / "RECORD").write_text("\n".join(rows) + "\n", encoding="utf-8")
    return folder / "bin" / "python"


def test_an_installed_package_is_read(tmp_path: Path) -> None:
    python = environment(
        tmp_path, "1.0", {"mini/__init__.py": "", "mini/m.py": "x = 1", "one.py": ""}
    )
    package = installed(python, "mini")
    assert package.files == {"mini/__init__.py", "mini/m.py", "one.py"}
    assert (package.tops, package.compiled) == (("mini", "one"), False)
    assert package.repository == "https://github.com/someone/mini"
    with pytest.raises(StackError, match="has no other"):
        installed(python, "other")


GITHUB = "https://github.com"
ADDRESSES: list[tuple[list[tuple[str, str]], str]] = [
    ([("Home-page", f"{GITHUB}/huggingface/transformers")], f"{GITHUB}/huggingface/transformers"),
    (
        [
            ("Project-URL", "Homepage, https://pytorch.org"),
            ("Project-URL", f"Repository, {GITHUB}/pytorch/pytorch"),
        ],
        f"{GITHUB}/pytorch/pytorch",
    ),
    (
        [
            ("Project-URL", f"Documentation, {GITHUB}/a/docs/tree/x"),
            ("Project-URL", f"Source Code, {GITHUB}/a/b.git"),
        ],
        f"{GITHUB}/a/b",
    ),
    ([("Home-page", "https://example.org")], ""),
    ([], ""),
]


@pytest.mark.parametrize(("fields", "address"), ADDRESSES)
def test_repository_is_read_from_the_metadata(fields: list[tuple[str, str]], address: str) -> None:
    about = Message()
    for name, value in fields:
        about[name] = value
    assert repository(about) == address  # type: ignore[arg-type]


def test_compare_links_to_the_difference_of_two_tags() -> None:
    assert (
        compare("https://github.com/a/b", "1.0", "2.0")
        == "https://github.com/a/b/compare/v1.0...v2.0"
    )
    assert compare("https://gitlab.com/a/b", "1", "2") == "https://gitlab.com/a/b/-/compare/v1...v2"


# ------------------------------------------------------------------------ of a boundary

ADDRESS = "https://github.com/someone/mini/compare/v1.0...v1.1"


def test_the_changes_are_linked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = environment(tmp_path, "1.1", {"mini/m.py": ""})
    ready = {"1.0": None, "1.1": SimpleNamespace(python=python)}
    monkeypatch.setattr(module.environment, "ready", lambda request: ready[request["mini"]])
    requests = ({"mini": "1.0"}, {"mini": "1.1"})
    assert module._compare("mini", ("1.0", "1.1"), requests) == ADDRESS
    assert module._compare("other", ("1.0", "1.1"), requests) == ""
    boundary = Boundary(bad=1, good=0, limit=0, confirmed=True)
    report = answer_page.Report(
        "mini", "s", Answer(Status.FOUND, 1, BAD, began=boundary), ("1.0", "1.1"),
        {0: GOOD, 1: BAD}, beyond={"began": Beyond(compare=ADDRESS)},
    )  # fmt: skip
    assert f"All changes: {ADDRESS}" in answer_page.answer(report).sections[0].blocks
    assert answer_page.to_json(report)["began"]["compare"] == ADDRESS
    assert Beyond().sentences() == []


def test_what_ran_is_that_of_the_deciding_probes(tmp_path: Path) -> None:
    for name, file in (("1", "a.py"), ("2", "b.py"), ("3", "c.py"), ("4", "d.py")):
        folder = tmp_path / "probes" / name / "unfixed"
        folder.mkdir(parents=True)
        (folder / executed_file(0)).write_text(f"{file}\n", encoding="utf-8")
    probes = [
        ProbeRecord("1.0", GOOD, 1, evidence="probes/1"),
        ProbeRecord("1.0", GOOD, 2, evidence="probes/2"),
        ProbeRecord("1.0", skip("no environment"), 3, evidence="probes/3"),
        ProbeRecord("1.1", BAD, 1, evidence="probes/4"),
    ]
    assert module._ran(probes, "1.0", tmp_path) == {"a.py", "b.py"}
    assert module._ran(probes, "0.9", tmp_path) == frozenset()
