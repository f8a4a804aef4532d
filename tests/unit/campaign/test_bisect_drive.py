"""The loop over search and state: its answers, Ctrl-C, kills at random moments, several at once."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moediag.errors import EvidenceError, ExitCode, Interrupted, NoEnvironments
from moediag.lab.campaign.bisect import state as states
from moediag.lab.campaign.bisect.drive import drive, with_end
from moediag.lab.campaign.bisect.probe_verdict import Kind, skip
from moediag.lab.campaign.bisect.search.answer import Status
from moediag.lab.campaign.bisect.signature_match import Target
from moediag.lab.campaign.bisect.timeline import ProbeRecord
from moediag.lab.campaign.engine import Display, journal_file
from moediag.lab.campaign.engine.journal import JOURNAL_FILE
from moediag.lab.campaign.executors import Maker
from moediag.lab.families import FAMILIES
from tests.depth import DEEP
from tests.unit.bisect_fakes import Fake, bisect, opened, question
from tests.unit.bisect_worlds import one_stretch, tightest

ROOT = Path(__file__).parents[3]
HISTORY = "GGGGGGGGGGGGGBBBBBBBBBBBGGGGGGGGGGGGGGGGGGGGGGGG"


def bounds(search: object) -> list[tuple[int, int | None]]:
    answer = search.answer  # type: ignore[attr-defined]
    return [(b.bad, b.good) for b in answer.boundaries]


def test_a_window_is_found_and_recorded(tmp_path: Path) -> None:
    said: list[str] = []
    search = bisect(tmp_path, HISTORY, 15, said=said)
    assert bounds(search) == [(13, 12), (23, 24)]
    stored = states.read(tmp_path)
    assert stored.target is not None
    assert len(stored.probes) == len(search.known) == len(said) - 2
    assert stored.probes[0].version == "1.15"


def test_environments_of_the_next_midpoints_are_built_ahead(tmp_path: Path) -> None:
    prober = Fake(HISTORY)
    bisect(tmp_path, HISTORY, 15, prober=prober)
    probed = {p.version for p in states.read(tmp_path).probes} - {"1.15"}
    assert probed <= set(prober.prepared), "each release was guessed before it was wanted"
    assert prober.closed


@pytest.mark.parametrize("jobs", [1, 3])
@pytest.mark.parametrize("seed", range(25))
def test_unrelated_failures_never_change_an_answer(tmp_path: Path, seed: int, jobs: int) -> None:
    """Inserts releases that cannot be imported, fail otherwise or are flaky into a history; what
    is found are the same bounds that looking at every release gives, or, where the search had the
    patience for some only, bounds around them that are true."""
    rng = random.Random(seed)
    letters, bad = one_stretch(rng, 40)
    search = bisect(tmp_path, letters, bad, jobs)
    assert search.answer is not None
    for boundary, sign in zip(search.answer.boundaries, (-1, 1), strict=True):
        true_bad, true_good = tightest(letters, bad, sign)
        assert letters[boundary.bad] == "B"
        assert boundary.good is None or letters[boundary.good] == "G"
        assert (boundary.bad - bad) * sign <= (true_bad - bad) * sign
        if boundary.good is not None:
            assert true_good is not None
            assert (boundary.good - bad) * sign >= (true_good - bad) * sign
        if len(boundary.undecided) < 6:  # patience was not used up
            assert (boundary.bad, boundary.good) == (true_bad, true_good)


def test_the_answer_does_not_depend_on_jobs(tmp_path: Path) -> None:
    letters = HISTORY.replace("GGGG", "GSGO").replace("BBBB", "BOBS")
    found = [bisect(tmp_path / str(jobs), letters, 17, jobs).answer for jobs in (1, 2, 5)]
    assert found[0] == found[1] == found[2]


class Interrupts(Fake):
    """The launch of the first release of ``versions`` fails once."""

    def __init__(self, letters: str, *versions: str) -> None:
        super().__init__(letters)
        self.left = list(versions)

    def of_release(self, version: str, attempt: int) -> ProbeRecord:
        if version not in self.left:
            return super().of_release(version, attempt)
        self.left.remove(version)
        return ProbeRecord(version, skip("the launcher's host died"), attempt, lasting=False)


@pytest.mark.parametrize("version", ["1.15", "1.12", "1.13", "1.24"])
def test_a_probe_whose_launch_failed_is_made_again_on_resume(tmp_path: Path, version: str) -> None:
    prober = Interrupts(HISTORY, version)
    bisect(tmp_path, HISTORY, 15, prober=prober)
    assert prober.left == []
    assert version not in [p.name for p in states.read(tmp_path).probes]
    assert bounds(bisect(tmp_path, HISTORY, 15)) == [(13, 12), (23, 24)]


def test_an_intermittent_result_at_the_boundary_is_retried(tmp_path: Path) -> None:
    letters = HISTORY[:12] + "o" + HISTORY[13:]
    search = bisect(tmp_path, letters, 15)
    assert bounds(search) == [(13, 12), (23, 24)]


@pytest.mark.parametrize(("letter", "status"), [("G", Status.NOT_REPRODUCED), ("O", "undecided")])
def test_nothing_is_searched_if_the_bad_end_does_not_fail(
    tmp_path: Path, letter: str, status: str
) -> None:
    letters = HISTORY[:15] + letter + HISTORY[16:]
    for _ in range(2):  # resumed, it gives the same answer without a probe
        search = bisect(tmp_path, letters, 15, said=(said := []))
        assert search.answer is not None
        assert search.answer.status == status
        assert len(states.read(tmp_path).probes) == 1
    assert said == [
        "expert-starvation: transformers, at most 19 probes, 1 finished by an earlier command"
    ]


# ------------------------------------------------------------------------ interrupted


class Ends(Fake):
    """Raises ``error`` in its ``after``-th probe."""

    error: BaseException = KeyboardInterrupt()
    after = 4

    def of_release(self, version: str, attempt: int) -> ProbeRecord:
        self.after -= 1
        if self.after == 0:
            raise self.error
        return super().of_release(version, attempt)


def test_ctrl_c_prints_the_command_that_resumes(tmp_path: Path) -> None:
    prober = Ends(HISTORY)
    with pytest.raises(Interrupted) as caught:
        bisect(tmp_path, HISTORY, 15, prober=prober)
    assert caught.value.exit_code == ExitCode.INTERRUPTED
    assert "after 3 finished probes" in caught.value.message
    command = f"moediag bisect expert-starvation --out {tmp_path} --resume"
    assert caught.value.help_text == f"Nothing is left running.\nTo resume: {command}"
    assert prober.closed
    before = states.read(tmp_path).probes
    assert bounds(bisect(tmp_path, HISTORY, 15)) == [(13, 12), (23, 24)]
    assert states.read(tmp_path).probes[:3] == before


@pytest.mark.parametrize("jobs", [1, 3])
def test_an_obstacle_to_all_probes_blames_no_release(tmp_path: Path, jobs: int) -> None:
    prober = Ends(HISTORY)
    prober.error = NoEnvironments("no network")
    with pytest.raises(NoEnvironments):
        bisect(tmp_path, HISTORY, 15, jobs, prober)
    assert prober.closed
    assert all(p.verdict.kind != Kind.SKIP for p in states.read(tmp_path).probes)
    assert bounds(bisect(tmp_path, HISTORY, 15)) == [(13, 12), (23, 24)]


class Slow(Fake):
    """Probes of one release wait until they are stopped."""

    def __init__(self, letters: str, slow: str) -> None:
        super().__init__(letters)
        self.slow = slow
        self.event = threading.Event()

    def of_release(self, version: str, attempt: int) -> ProbeRecord:
        if version == self.slow and not self.event.wait(60):
            raise AssertionError("it was never stopped")
        if version == self.slow:
            raise Interrupted("stopped")
        return super().of_release(version, attempt)

    def stop(self) -> None:
        self.event.set()


def test_unneeded_probes_are_stopped(tmp_path: Path) -> None:
    """One release beside the path of the search never answers; the search does not wait."""
    alone = bisect(tmp_path / "alone", HISTORY, 15)
    path = {f"1.{probe.index}" for probe in alone.path}
    beside = bisect(tmp_path / "three", HISTORY, 15, 3)
    extra = [f"1.{p.index}" for p in beside.known if f"1.{p.index}" not in path]
    assert extra, "three at once probe more than one at a time"
    prober = Slow(HISTORY, extra[0])
    search = bisect(tmp_path / "slow", HISTORY, 15, 3, prober)
    assert search.answer == alone.answer


# ------------------------------------------------------------------------ killed


def program(folder: Path, letters: str, bad: int, jobs: int) -> list[str]:
    words = [sys.executable, "-m", "tests.unit.bisect_fakes", str(folder), letters]
    return [*words, str(bad), str(jobs)]


@pytest.mark.parametrize("jobs", [pytest.param(1, marks=pytest.mark.wide), 3])
def test_a_bisect_killed_many_times_gives_the_same_answer(tmp_path: Path, jobs: int) -> None:
    """SIGKILL at random moments. A finished probe is never made again: the state file refuses to
    hold it twice, and it grows by appending alone."""
    letters = "GSGGGOGG" * 8 + "BBOBSBBB" * 4 + "GGGSGGOG" * 12
    bad = letters.index("BBB")
    expected = bisect(tmp_path / "whole", letters, bad).answer
    assert expected is not None
    folder, rng = tmp_path / "killed", random.Random(jobs)
    kills, before, most = 0, b"", 20 if DEEP else 4
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    while True:
        victim = subprocess.Popen(
            program(folder, letters, bad, jobs),
            cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        with victim:
            if kills < most:
                wait_for_growth(folder, len(before), victim)
                time.sleep(rng.random() * 0.03)
                victim.send_signal(signal.SIGKILL)
            out, err = victim.communicate(timeout=120)
        if victim.returncode == 0:
            break
        assert victim.returncode == -signal.SIGKILL, err.decode()
        kills += 1
        now = content(folder)
        assert now.startswith(before[: before.rfind(b"\n") + 1])
        before = now
    assert json.loads(out) == [[b.bad, b.good] for b in expected.boundaries]
    probes = [(p.version, p.attempt) for p in states.read(folder).probes]
    assert len(set(probes)) == len(probes)
    assert kills >= most / 2, "it was killed while it worked"


def content(folder: Path) -> bytes:
    try:
        return (folder / JOURNAL_FILE).read_bytes()
    except OSError:
        return b""


def wait_for_growth(folder: Path, size: int, victim: subprocess.Popen[bytes]) -> None:
    while victim.poll() is None and len(content(folder)) <= size:
        time.sleep(0.002)


def test_a_full_disk_ends_the_bisect_with_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = 0

    def refuses(*_: object) -> None:
        nonlocal written
        written += 1
        if written > 4:
            raise EvidenceError("cannot be written: No space left on device")

    monkeypatch.setattr(journal_file, "append", refuses)
    with pytest.raises(EvidenceError, match="No space"):
        bisect(tmp_path, HISTORY, 15)


def test_new_releases_do_not_change_a_resumed_search(tmp_path: Path) -> None:
    with opened(tmp_path, question(HISTORY, 15)) as state:
        state.learned(Target("unfixed", (), ("x",)))
    search = bisect(tmp_path, HISTORY + "GGGG", 15)
    assert search.count == len(HISTORY)
    assert bounds(search) == [(13, 12), (23, 24)]


def searched(
    letters: str, own: int, folder: Path, other_family: bool = False, **asked: Any
) -> tuple[str, list[str], bool]:
    """The bad end that was found, the releases that were probed for it, and whether it failed."""
    wanted = question(letters, own)
    if other_family:
        changed = wanted.scenario.with_overrides(("model.family=mixtral",))
        wanted = replace(wanted, scenario=changed)
    wanted = replace(wanted, asked=replace(wanted.asked, **asked))
    prober = Fake(letters)
    with opened(folder, wanted) as state:
        drive(wanted, state, Maker(lambda: prober), Display())
        found = with_end(wanted, state).bad
        versions = [record.version for record in state.probes]
        return found, versions, state.target is not None


def test_another_bad_end_is_found_if_the_own_release_lacks_the_family(tmp_path: Path) -> None:
    found, versions, shown = searched("NNNNBBBGG", 1, tmp_path)
    assert (found, shown) == ("1.5", True)
    assert versions[:4] == ["1.1", "1.2", "1.3", "1.5"]
    assert "1.4" in versions  # the search goes on from there, to the first that has the family


def test_a_short_window_after_the_family_appeared_is_found(tmp_path: Path) -> None:
    """Growing steps from 1.1 pass over 1.13 and 1.14; halving back from 1.17 comes to them."""
    found, versions, shown = searched("N" * 13 + "BB" + "G" * 20, 1, tmp_path, other_family=True)
    assert (found, shown) == ("1.13", True)
    assert versions[:7] == ["1.1", "1.2", "1.3", "1.5", "1.9", "1.17", "1.33"]


def test_no_window_is_found_where_there_is_none(tmp_path: Path) -> None:
    _, versions, shown = searched("N" * 13 + "G" * 20, 1, tmp_path, other_family=True)
    assert not shown and {"1.12", "1.13"} <= set(versions)


# Minor releases of transformers with the number of their final releases.
MINORS = (
    "4.31 1 4.32 2 4.33 4 4.34 2 4.35 3 4.36 3 4.37 3 4.38 3 4.39 4 4.40 3 4.41 3 4.42 5 4.43 5 "
    "4.44 3 4.45 3 4.46 3 4.47 2 4.48 4 4.49 1 4.50 4 4.51 4 4.52 4 4.53 4 4.54 2 4.55 5 4.56 3 "
    "4.57 6 5.0 1 5.1 1 5.2 1 5.3 1 5.4 1 5.5 5 5.6 3 5.7 1 5.8 2 5.9 1 5.10 3 5.11 1 5.12 2 "
    "5.13 2 5.14 2 5.15 2 5.16 2 5.17 1 5.18 1 5.19 1 5.20 3 5.21 2 5.22 3 5.23 1 5.24 1"
)
# Family -> the minor releases that first have it and that first show expert starvation, which 5.0
# ends (reports/compatibility.md); "": none shows it.
APPEARED = {
    "qwen3_moe": ("4.51", "4.53"), "mixtral": ("4.36", "4.52"), "qwen2_moe": ("4.40", "4.52"),
    "olmoe": ("4.45", ""), "deepseek_v3": ("4.51", "4.51"), "glm4_moe": ("4.54", "4.54"),
    "glm4v_moe": ("4.55", "4.55"), "gpt_oss": ("4.55", ""), "llama4": ("4.51", ""),
    "qwen3_vl_moe": ("4.57", ""), "qwen3_omni_moe": ("4.57", "4.57"), "internvl": ("4.52", "4.53"),
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_the_window_of_each_family_is_found(tmp_path: Path, family: str) -> None:
    """From the scenario's own 4.53.2, which some families do not have."""
    first, bad = APPEARED[family]
    minors, counts = MINORS.split()[::2], MINORS.split()[1::2]
    letters = ""
    for minor, count in zip(minors, counts, strict=True):
        at = minors.index(minor)
        shows = bad and minors.index(bad) <= at < minors.index("5.0")
        letters += int(count) * ("N" if at < minors.index(first) else "B" if shows else "G")
    own = sum(map(int, counts[: minors.index("4.53")])) + 2
    found, versions, shown = searched(letters, own, tmp_path, other_family=True)
    assert shown == bool(bad) and len(versions) <= 25  # boundaries are probed twice
    if shown:
        ends = {f"1.{letters.index('B')}", f"1.{letters.rindex('B')}"}
        assert ends <= {*versions} and letters[int(found[2:])] == "B"
    else:  # the first release with the family was tried
        assert f"1.{letters.index('G')}" in versions or letters[own] == "G"


def test_an_older_bad_end_is_found_if_newer_releases_lack_the_family(tmp_path: Path) -> None:
    assert searched("GBBBNNN", 4, tmp_path)[0] == "1.3"


def test_a_given_bad_end_is_not_replaced(tmp_path: Path) -> None:
    found, versions, shown = searched("NNBBGG", 1, tmp_path, bad="1.1")
    assert (found, versions, shown) == ("1.1", ["1.1"], False)


def test_without_any_bad_end_nothing_is_searched(tmp_path: Path) -> None:
    found, versions, shown = searched("NNNNNNN", 3, tmp_path)
    assert (found, shown) == ("1.3", False)
    assert len(versions) == len({*versions}) == 7


def test_a_resumed_bisect_keeps_the_end_that_it_found(tmp_path: Path) -> None:
    letters = "NNNNBBBGG"
    wanted = question(letters, 1)
    whole = searched(letters, 1, tmp_path / "whole")
    (tmp_path / "part").mkdir()
    lines = (tmp_path / "whole" / JOURNAL_FILE).read_text(encoding="utf-8").splitlines(True)
    for kept in range(1, len(lines)):
        (tmp_path / "part" / JOURNAL_FILE).write_text("".join(lines[:kept]), encoding="utf-8")
        assert searched(letters, 1, tmp_path / "part")[::2] == whole[::2]
    assert wanted.bad == "1.1"
