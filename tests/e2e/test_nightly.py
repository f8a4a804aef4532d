"""`moediag nightly`: two nights on different releases."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moediag.errors import ExitCode, StackError
from moediag.lab.campaign.nightly import tracks
from moediag.lab.stacks import releases
from tests.e2e.pipeline import Command, need

pytestmark = [pytest.mark.e2e, pytest.mark.stack]
SCENARIO = "expert-starvation-late"
STARVED = "collective-mismatch:size reduce_scatter:dp_shard:backward:starved-expert:one-rank"


class Nights:
    """Each call is a night on which ``version`` is the newest release of transformers."""

    def __init__(self, command: Command, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.command = command
        self.folder = folder
        self.patch = patch

    def __call__(self, version: str, *more: str) -> tuple[int, str, Path]:
        need({"transformers": version})
        self.patch.setattr(
            tracks.index, "newest", lambda *_: releases.Release(version)
        )  # fmt: skip
        out = self.folder / version
        code, said, errors = self.command.call(
            "nightly", "--scenario", SCENARIO, "--track", "transformers=newest", "--cpu", "2",
            "--history", str(self.folder / "history"), "--out", str(out), *more,
        )  # fmt: skip
        assert code in (ExitCode.OK, ExitCode.FAILURE_FOUND), errors
        return code, said, out


@pytest.fixture
def nights(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Nights:
    return Nights(command, tmp_path, monkeypatch)


def night_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted((folder / "history").iterdir())]


def test_a_failure_is_reported_as_new_and_then_as_fixed(
    nights: Nights, shared_hosts: None, tmp_path: Path
) -> None:
    code, said, _ = nights("5.0.0", "--bisect-minutes", "0")
    assert (code, said.split()[1:6]) == (
        ExitCode.OK, ["as", "expected:", "0", "new", "failures,"]
    )  # fmt: skip
    code, said, out = nights("4.53.2", "--bisect-minutes", "0", "--annotate")
    assert code == ExitCode.FAILURE_FOUND
    assert "1 new failure, 0 fixed" in said
    assert f"::error title={SCENARIO} · unfixed · transformers=newest::" in said
    assert [n["entries"][0]["state"] for n in night_of(tmp_path)] == ["good", "bad"]
    assert night_of(tmp_path)[1]["entries"][0]["signature"] == STARVED
    draft, program = sorted((out / "issues").iterdir())
    assert program.name == draft.with_suffix(".py").name
    compile(program.read_text(), program.name, "exec")
    text = draft.read_text()
    assert text.index("### System Info") < text.index("### Reproduction")
    assert "moediag bisect expert-starvation-late --package transformers --good 5.0.0" in text
    assert "received 0 tokens" in text
    summary = (out / "summary.md").read_text()
    assert summary.index("### New failures (1)") < summary.index("### Everything")
    assert 'failures="1"' in (out / "junit.xml").read_text()


@pytest.mark.wide
def test_a_new_failure_is_bisected_and_tracked_until_fixed(nights: Nights, tmp_path: Path) -> None:
    try:
        releases.releases("transformers")
    except StackError as error:
        pytest.skip(f"no index can be asked: {error.message}")
    assert nights("4.52.4")[0] == ExitCode.OK
    code, said, out = nights("4.53.2")
    assert code == ExitCode.FAILURE_FOUND
    told = " ".join(said.split())
    assert "transformers 4.53.0 is the first bad release; 4.52.4 is the last good one." in told
    draft, _ = sorted((out / "issues").iterdir())
    assert draft.read_text().count(STARVED) >= 3
    code, said, _ = nights("4.57.6")
    assert (code, "0 new failures, 0 fixed, 1 still failing" in said) == (ExitCode.OK, True)
    since = night_of(tmp_path)[1]["started"][:10]
    assert f"since {since} (transformers 4.53.2" in " ".join(said.split())
    code, said, out = nights("5.0.0")
    assert (code, "0 new failures, 1 fixed" in said) == (ExitCode.OK, True)
    assert not (out / "issues").exists()
