"""`moediag bisect` as a program, on real releases: interrupted, resumed by the command it
printed."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import signal
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest

from moediag.errors import EvidenceError, StackError
from moediag.lab.campaign.bisect import answer_page, question
from moediag.lab.campaign.bisect import state as states
from moediag.lab.campaign.bisect.drive import drive
from moediag.lab.campaign.bisect.probe import Releases
from moediag.lab.campaign.bisect.probe_verdict import Kind
from moediag.lab.campaign.engine.display import Lines
from moediag.lab.campaign.executors import Maker
from moediag.lab.scenario import catalogue, load
from moediag.lab.stacks import releases
from moediag.launch.settings import LaunchOptions
from tests.e2e.marked import MARK, eventually, marked
from tests.e2e.pipeline import need

pytestmark = [pytest.mark.e2e, pytest.mark.stack, pytest.mark.wide]
GOOD, BAD = "4.52.4", "4.53.2"
STARVED = "collective-mismatch:size reduce_scatter:dp_shard:backward:starved-expert:one-rank"


def start(folder: Path, words: list[str], mark: str) -> subprocess.Popen[str]:
    assert words[0] == "moediag"
    return subprocess.Popen(
        [sys.executable, "-m", *words],
        cwd=folder, env={**os.environ, MARK: mark}, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def probed(folder: Path) -> list[tuple[str, int]]:
    try:
        return [(p.version, p.attempt) for p in states.read(folder).probes]
    except EvidenceError:  # not there yet
        return []


def test_the_first_bad_release_is_found_after_an_interruption(tmp_path: Path) -> None:
    try:
        releases.releases("transformers")
    except StackError as error:
        pytest.skip(f"no index can be asked: {error.message}")
    for version in (GOOD, BAD):
        need({"transformers": version})
    mark, folder = uuid.uuid4().hex, tmp_path / "out"
    line = f"moediag bisect expert-starvation --good {GOOD} --bad {BAD} --cpu 2 --jobs 2 --out out"
    first = start(tmp_path, shlex.split(line), mark)
    try:
        eventually(
            lambda: started(folder) or first.poll() is not None,
            "no probe was begun after the bad end",
            300,
        )
        first.send_signal(signal.SIGINT)
        out, errors = first.communicate(timeout=90)
    finally:
        first.kill()
    assert (first.returncode, out) == (130, ""), errors
    eventually(lambda: marked(mark) == [], "something was left behind")
    (command,) = [x for x in errors.splitlines() if x.startswith("To resume: ")]
    before = probed(folder)
    again = start(tmp_path, shlex.split(command.removeprefix("To resume: ")) + ["--json"], mark)
    try:
        out, errors = again.communicate(timeout=400)
    finally:
        again.kill()
    assert again.returncode == 0, errors
    result: dict[str, Any] = json.loads(out)
    assert (result["began"]["bad"], result["began"]["good"]) == ("4.53.0", GOOD)
    assert (result["status"], result["confidence"]) == ("found", "high")
    assert result["signatures"] == [STARVED]
    after = probed(folder)
    assert after[: len(before)] == before
    assert len(set(after)) == len(after)
    assert (folder / "report.md").read_text(encoding="utf-8").count(STARVED) >= 3
    eventually(lambda: marked(mark) == [], "something was left behind")


def test_the_first_good_release_and_its_changes_are_found(tmp_path: Path) -> None:
    for version in ("4.57.6", "5.0.0"):
        need({"transformers": version})
    words = "moediag bisect expert-starvation --bad 4.57.6 --good 5.0.0 --cpu 2 --json --out out"
    one = start(tmp_path, shlex.split(words), uuid.uuid4().hex)
    try:
        out, errors = one.communicate(timeout=400)
    finally:
        one.kill()
    assert one.returncode == 0, errors
    ended = json.loads(out)["ended"]
    assert (ended["bad"], ended["good"]) == ("4.57.6", "5.0.0")
    address = "https://github.com/huggingface/transformers/compare/v4.57.6...v5.0.0"
    assert ended["compare"] == address
    report = (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    assert address in report


def test_a_release_that_cannot_be_tried_moves_no_bound(tmp_path: Path) -> None:
    """4.22.0 needs a tokenizers that has no wheel for Pythons from 3.11 on (and where it can be
    built, the release has no Qwen3-MoE). It is not good, although it does not show the failure."""
    need({"transformers": GOOD})
    need({"transformers": BAD})
    words = question.Asked("expert-starvation", good="4.22.0", bad=BAD, world_size=2, calibrate=1)
    scenario = load.load(catalogue.find("expert-starvation"))
    try:
        whole = question.ask(scenario, words)
    except StackError as error:
        pytest.skip(f"no index can be asked: {error.message}")
    chosen = ("4.22.0", GOOD, BAD)
    few = tuple(r for r in whole.releases if r.version in chosen)
    asked = dataclasses.replace(whole, releases=few)
    display = Lines(print)
    with states.create(tmp_path / "out", asked.header(["moediag"])) as state:
        prober = Releases(asked, tmp_path / "out", display, LaunchOptions())
        answer = drive(asked, state, Maker(lambda: prober), display).answer
    assert answer is not None and answer.began is not None
    assert (answer.began.bad, answer.began.good) == (2, 1)
    assert answer.given_good is not None and answer.given_good[1].kind == Kind.SKIP
    kinds = {p.version: p.verdict for p in state.probes}
    assert "tokenizers" in kinds["4.22.0"].text or "qwen3_moe" in kinds["4.22.0"].text
    report = answer_page.sentences("transformers", asked.versions, answer)
    assert any("4.22.0 was given as good; it is not: skipped" in text for text in report)


def started(folder: Path) -> bool:
    """Whether the bad end is recorded and ranks of a further probe have been launched."""
    done = {version for version, _ in probed(folder)}
    begun = {path.parents[1].name for path in folder.glob("probes/*/*/rank-0.pid")}
    return bool(done) and bool(begun - done)
