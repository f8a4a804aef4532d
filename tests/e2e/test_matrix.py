"""`moediag matrix` on real releases: a family that is affected and one that is not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moediag.cli import app
from moediag.errors import ExitCode, StackError
from moediag.lab.stacks import releases
from tests.e2e.pipeline import need

pytestmark = [pytest.mark.e2e, pytest.mark.stack]
COMMAND = ["matrix", "expert-starvation", "--cpu", "2", "--json"]


@pytest.fixture(autouse=True)
def index() -> None:
    try:
        releases.releases("transformers")
    except StackError as error:
        pytest.skip(f"no index can be asked: {error.message}")


def test_affected_and_unaffected_families_are_distinguished(
    shared_hosts: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    need({"transformers": "4.53.2"})
    words = [*COMMAND, "--releases", "4.53.2", "--out", str(tmp_path / "out")]
    words += ["--family", "qwen3_moe", "--family", "olmoe"]
    assert app.main(words) == ExitCode.OK
    first = capsys.readouterr().out
    raw = json.loads(first)
    assert {c["subject"]: c["verdict"] for c in raw["cells"]} == {
        "expert-starvation qwen3_moe": "collective-mismatch",
        "expert-starvation olmoe": "clean",
    }
    for cell in raw["cells"]:
        assert list((tmp_path / "out" / cell["evidence"]).iterdir())
    assert app.main([*words, "--resume"]) == ExitCode.OK
    again = capsys.readouterr()
    assert again.out == first
    assert again.err.endswith(", 2 finished by an earlier command\n")


@pytest.mark.wide
def test_an_error_instead_of_silence_is_another_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for version in ("5.12.1", "5.17.0"):
        need({"transformers": version, "accelerate": "1.15.0"})
    words = ["matrix", "ep-overwrite", "--cpu", "2", "--json", "--hold", "accelerate=1.15.0"]
    code = app.main([*words, "--releases", "5.12.1,5.17.0", "--out", str(tmp_path / "out")])
    assert code == ExitCode.OK
    cells = {c["version"]: c for c in json.loads(capsys.readouterr().out)["cells"]}
    assert (cells["5.12.1"]["verdict"], cells["5.12.1"]["shows"]) == ("wrong-weights", True)
    assert (cells["5.17.0"]["verdict"], cells["5.17.0"]["shows"]) == ("crash", None)
