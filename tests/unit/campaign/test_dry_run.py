"""What `--dry-run` of `run` and `nightly` prints."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from moediag.cli import main
from moediag.errors import ExitCode, StackError
from moediag.lab.campaign import dry_run


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> None:
    def ready(request: Mapping[str, str]) -> object | None:
        if request["transformers"] == "5.0.0":
            raise StackError("the cache cannot be read")
        return object() if request["transformers"] == "4.53.2" else None

    monkeypatch.setattr(dry_run.environment, "ready", ready)


@pytest.mark.usefixtures("built")
def test_each_trial_is_told_and_what_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["-v", "unfixed", "-v", "upgrade", "--cpu", "4"]
    assert main(["run", "expert-starvation", "--dry-run", *words]) == ExitCode.OK
    assert capsys.readouterr().out.splitlines() == [
        "expert-starvation: 2 trials on 4 ranks, gloo",
        "  unfixed  transformers 4.53.2",
        "  upgrade  transformers 5.0.0 (to be built)",
        "1 environment to build; nothing was run.",
    ]


@pytest.mark.usefixtures("built")
def test_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "expert-starvation", "--dry-run", "--json", "-v", "unfixed"]) == 0
    (trial,) = json.loads(capsys.readouterr().out)["trials"]
    assert (trial["trial"], trial["built"]) == ("unfixed", True)


@pytest.mark.usefixtures("built")
def test_of_a_night(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["--scenario", "expert-starvation", "--scenario", "empty-ep-rank", "--gpus", "1"]
    where = ["--history", str(tmp_path / "history"), "--out", str(tmp_path / "out")]
    assert main(["nightly", *words, "--track", "pinned", "--dry-run", *where]) == ExitCode.OK
    first, *_, last = capsys.readouterr().out.splitlines()
    assert first == "cannot run: expert-starvation on pinned: needs 2 ranks or more"
    assert last.endswith("nothing was run.")
    assert not [*tmp_path.iterdir()]
