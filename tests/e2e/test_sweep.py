"""`moediag run --all`, with a catalogue of two scenarios."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moediag.cli import app
from moediag.lab.launch import fork
from moediag.lab.scenario import catalogue
from tests.e2e.pipeline import need

NAMES = ["expert-starvation-silent", "expert-starvation-late"]


@pytest.mark.e2e
@pytest.mark.stack
@pytest.mark.wide
def test_two_scenarios_share_a_host_and_a_summary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    need({"transformers": "4.53.2"})
    monkeypatch.setattr(catalogue, "names", lambda: NAMES)
    started: list[str] = []

    class Counted(fork.Host):
        def __init__(self, command: list[str], *others: Any) -> None:
            started.append(command[0])
            super().__init__(command, *others)

    monkeypatch.setattr(fork, "Host", Counted)
    assert app.main(["run", "--all", "--cpu", "2", "--out", str(tmp_path / "all")]) == 0
    said = capsys.readouterr()
    summary = json.loads((tmp_path / "all" / "summary.json").read_text())
    assert [(r["scenario"], r["status"]) for r in summary["rows"]] == [
        (name, "as expected") for name in NAMES
    ]
    trials = sum(row["expected"] for row in summary["rows"])
    told = f"as expected: 2 scenarios (2 as expected); {trials} of {trials} expectations met"
    assert told in " ".join(said.out.split())
    assert f"[{trials}/{trials}] " in said.err
    assert all((tmp_path / "all" / name / "result.json").is_file() for name in NAMES)
    (python,) = started  # the libraries of their one stack were imported once
    assert "transformers-4.53.2-" in python
