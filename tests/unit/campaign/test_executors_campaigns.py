"""`bisect`, `hunt`, `matrix` and `nightly` with an executor: the same results, and what a lost job
leaves.

The executor runs jobs at once in this process, with replaced environments and runs."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from moediag.errors import ExitCode, Interrupted, MachineError, StackError
from moediag.lab.campaign.bisect.probe import Releases
from moediag.lab.campaign.bisect.probe_verdict import Kind
from moediag.lab.campaign.bisect.prober import Probed, Prober, made
from moediag.lab.campaign.bisect.prober import probe as probed
from moediag.lab.campaign.bisect.question import Asked, Setting
from moediag.lab.campaign.bisect.signature_match import Target
from moediag.lab.campaign.engine import Display, opened
from moediag.lab.campaign.executors import Choice, Maker, choice
from moediag.lab.campaign.hunt import findings_page
from moediag.lab.campaign.hunt import session as hunting
from moediag.lab.campaign.hunt.findings import Hunt, HuntCell, Key
from moediag.lab.campaign.hunt.question import Wanted
from moediag.lab.campaign.matrix import session as filling
from moediag.lab.campaign.matrix.cells import COULD_NOT_RUN
from moediag.lab.campaign.matrix.question import MatrixQuestion, Subject
from moediag.lab.campaign.nightly import jobs
from moediag.lab.campaign.nightly.drive import Result, header
from moediag.lab.campaign.nightly.drive import run as run_night
from moediag.lab.campaign.nightly.night import History
from moediag.lab.campaign.nightly.tracks import Track
from moediag.lab.stacks.environment import Stack
from moediag.launch.settings import LaunchOptions
from moediag.protocol import ListedFamily, RelationOutcome, ReleaseListing, WayOutcome
from tests.unit.bisect_fakes import STARVED, TARGET
from tests.unit.campaign.test_bisect_probe import World, prober
from tests.unit.campaign.test_bisect_probe import world as world
from tests.unit.campaign.test_executors import Fake, losing

ENGINE = Choice("slurm")
LOST = "not run, because its job was lost twice: node 1 failed; then node 2 failed"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEDIAG_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Fake]:
    def use(*lost: int) -> Fake:
        fake = Fake(losing(*lost))
        monkeypatch.setattr(choice, "_executor", lambda *_: fake)
        return fake

    return use


# ------------------------------------------------------------------------ bisect


QUESTION = prober(Path()).question


def probe(one: Maker[Prober], version: str, attempt: int, target: Target | None) -> Probed:
    return probed(one, QUESTION.setting(version), attempt, target)


@contextlib.contextmanager
def elsewhere(folder: Path) -> Iterator[Maker[Prober]]:
    make = functools.partial(Releases, launch=LaunchOptions())
    with made(make, QUESTION, folder, Display(), ENGINE) as one:
        yield one


def test_a_probe_runs_as_a_job_and_its_environment_is_built_here(
    world: World, engine: Callable[..., Fake], tmp_path: Path
) -> None:
    fake = engine()
    with elsewhere(tmp_path) as one:
        learned = probe(one, "4.53.2", 1, None)
        assert learned.target is not None and learned.target.signatures == (STARVED,)
        assert (tmp_path / learned.record.evidence).is_dir()
        world.signatures = ["clean"]
        record = probe(one, "4.53.0", 1, learned.target).record
        assert (record.verdict.kind, record.lasting) == (Kind.GOOD, True)
        assert fake.names == ["4.53.2, learning", "4.53.0"]
        built = [request["transformers"] for request in world.requests]
        assert built[0] == "4.53.2"  # before the job was submitted
        assert not fake.closed
    assert fake.closed


def test_a_probe_whose_job_is_lost_is_made_again_later(
    world: World, engine: Callable[..., Fake], tmp_path: Path
) -> None:
    engine(1, 2)
    with elsewhere(tmp_path) as one:
        record = probe(one, "4.53.0", 2, TARGET).record
    assert (record.verdict.kind, record.verdict.text) == (Kind.SKIP, LOST)
    assert (record.attempt, record.lasting) == (2, False)
    engine(1, 2)
    with elsewhere(tmp_path) as one:
        learned = probe(one, "4.53.2", 1, None)
    assert (learned.target, learned.problem, learned.record.lasting) == (None, LOST, False)


def test_an_environment_that_cannot_be_built_is_a_skip(
    world: World, engine: Callable[..., Fake], tmp_path: Path
) -> None:
    engine()
    world.fails = StackError("no wheel")
    with elsewhere(tmp_path) as one:
        record = probe(one, "4.53.0", 1, TARGET).record
    assert (record.verdict.kind, record.verdict.text) == (Kind.SKIP, "no wheel")


def test_a_stopped_prober_submits_nothing_until_it_is_closed(
    world: World, engine: Callable[..., Fake], tmp_path: Path
) -> None:
    fake = engine()
    with elsewhere(tmp_path) as one:
        one.stop()
        with pytest.raises(Interrupted):
            probe(one, "4.53.0", 1, TARGET)
        assert not fake.names
        one.close()
        setting = Setting("c1", ({"transformers": "4.53.0"},))
        assert probed(one, setting, 1, TARGET).record.version == "c1"
    assert fake.names == ["c1"]


# ------------------------------------------------------------------------ matrix


def table(folder: Path, resume: bool = False) -> filling.Matrix:
    subject = Subject("expert-starvation mixtral", QUESTION, "digest")
    asked = MatrixQuestion("transformers", (subject,), ("4.53.2",), ("4.53.2",), Asked())
    found, _ = filling.run(asked, folder, resume, ["m"], Display(), LaunchOptions(), ENGINE)
    return found


def test_a_cell_that_did_not_run_is_no_result(
    world: World, engine: Callable[..., Fake], tmp_path: Path
) -> None:
    engine(1, 2)
    (cell,) = table(tmp_path / "out").cells.values()
    assert (cell.verdict, cell.shows, cell.text) == (COULD_NOT_RUN, None, LOST)
    page = (tmp_path / "out" / filling.PAGE_FILE).read_text(encoding="utf-8")
    assert "inconclusive" in page and LOST in page
    fake = engine()
    (cell,) = table(tmp_path / "out", resume=True).cells.values()
    assert (cell.verdict, cell.shows) == ("collective-mismatch", True)
    assert (tmp_path / "out" / cell.evidence).is_dir()
    assert fake.names == ["expert-starvation mixtral 4.53.2"] and fake.closed


# ------------------------------------------------------------------------ hunt


STACK = Stack(Path("python"), {"transformers": "5.0.0", "python": "3.11"}, "key", 0.0, [])


class Cells:
    """In place of Workers."""

    def __init__(self, *_: object) -> None: ...

    def listing(self) -> ReleaseListing:
        return ReleaseListing([ListedFamily("alpha", "moe")], {"padding": "it changes nothing"})

    def make(self, key: Key) -> HuntCell:
        return HuntCell(RelationOutcome(*key, [WayOutcome("left", True)]), 0.1)

    def stop(self) -> None: ...

    def close(self) -> None: ...


def test_a_cell_of_a_hunt_that_did_not_run_is_no_result(
    engine: Callable[..., Fake], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hunting.environment, "ensure", lambda *_: STACK)
    monkeypatch.setattr(hunting, "Workers", Cells)

    def run(resume: bool) -> Hunt:
        asked = Wanted("5.0.0", families=("alpha",), stack={})
        return hunting.run(asked, tmp_path / "out", resume, ["m"], Display(), ENGINE)[0]

    engine(1, 2)
    found = run(resume=False)
    assert found.undecided == {("alpha", "padding"): LOST}
    assert findings_page.answer(found).state.exit_code == ExitCode.INCONCLUSIVE
    fake = engine()
    assert not run(resume=True).undecided
    assert fake.names == ["alpha padding"]


# ------------------------------------------------------------------------ nightly


ASKED = jobs.Asked(("expert-starvation",), 2)


def night(folder: Path, resume: bool = False) -> Result:
    planned = jobs.plan_all([Track()], ASKED)
    with opened(header(planned, ASKED, ["m"]), folder / "out", resume, "night") as journal:
        history = History(folder / "history")
        return run_night(
            planned, ASKED, [], history, journal, 60, Display(), LaunchOptions(), executor=ENGINE
        )


def test_a_run_of_a_night_is_a_job_and_a_lost_one_is_run_again(
    world: World, engine: Callable[..., Fake], tmp_path: Path
) -> None:
    fake = engine(1, 2)
    (job,) = night(tmp_path).night.jobs
    assert (job.finished, job.problem) == (False, LOST)
    assert fake.names == ["pinned expert-starvation"] * 2
    engine(1)
    ran = night(tmp_path, resume=True)
    (job,) = ran.night.jobs
    assert (job.finished, job.problem) == (True, "")
    assert {entry.state for entry in ran.night.entries} <= {"good", "bad"}


def test_a_worker_that_does_not_fit_ends_the_campaign(
    world: World, engine: Callable[..., Fake], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine()
    monkeypatch.setattr("moediag.lab.campaign.executors.worker.unfit", lambda *_: "has no disk")
    with elsewhere(tmp_path) as one, pytest.raises(MachineError, match="has no disk"):
        probe(one, "4.53.0", 1, TARGET)
