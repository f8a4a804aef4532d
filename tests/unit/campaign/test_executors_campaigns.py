"""`bisect`, `matrix` and `nightly` with an executor: the same results, and what a lost job leaves.

The executor runs jobs at once in this process, with replaced environments and runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from moediag.errors import ExitCode, Interrupted, MachineError, StackError
from moediag.lab.campaign.bisect import elsewhere as probing
from moediag.lab.campaign.bisect.probe_verdict import Kind
from moediag.lab.campaign.bisect.prober import Setting
from moediag.lab.campaign.bisect.question import Asked
from moediag.lab.campaign.engine import Display
from moediag.lab.campaign.executors import Choice, choice, opened
from moediag.lab.campaign.matrix import elsewhere as filling
from moediag.lab.campaign.matrix.cells import COULD_NOT_RUN
from moediag.lab.campaign.matrix.question import MatrixQuestion, Subject
from moediag.lab.campaign.matrix.session import Maker
from moediag.lab.campaign.nightly.elsewhere import Elsewhere as Jobs
from moediag.lab.campaign.sweep.shared_runs import Runs
from moediag.lab.scenario import catalogue, load, plan
from moediag.launch.settings import LaunchOptions
from tests.unit.bisect_fakes import STARVED, TARGET
from tests.unit.campaign.test_bisect_probe import World, prober
from tests.unit.campaign.test_bisect_probe import world as world
from tests.unit.campaign.test_executors import Fake, losing

ENGINE = Choice("slurm")
LOST = "its job was lost twice: node 1 failed; then node 2 failed"


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


def elsewhere(folder: Path) -> probing.Elsewhere:
    made = probing.prober(prober(folder).question, folder, Display(), LaunchOptions(), ENGINE)
    assert isinstance(made, probing.Elsewhere)
    return made


def test_a_probe_runs_as_a_job_and_its_environment_is_built_here(
    world: World, engine: Callable[..., Fake], tmp_path: Path
) -> None:
    fake = engine()
    one = elsewhere(tmp_path)
    learned = one.learn("4.53.2")
    assert learned.target is not None and learned.target.signatures == (STARVED,)
    assert (tmp_path / learned.record.evidence).is_dir()
    world.signatures = ["clean"]
    record = one.probe("4.53.0", 1, learned.target)
    assert (record.verdict.kind, record.lasting) == (Kind.GOOD, True)
    assert fake.names == ["4.53.2", "4.53.0"]
    built = [request["transformers"] for request in world.requests]
    assert built[0] == "4.53.2"  # before the job was submitted
    one.close()
    assert fake.closed


def test_a_probe_whose_job_is_lost_is_made_again_later(
    world: World, engine: Callable[..., Fake], tmp_path: Path
) -> None:
    engine(1, 2)
    one = elsewhere(tmp_path)
    record = one.probe("4.53.0", 2, TARGET)
    assert (record.verdict.kind, record.verdict.text) == (Kind.SKIP, LOST)
    assert (record.attempt, record.lasting) == (2, False)
    engine(1, 2)
    one.close()
    learned = one.learn("4.53.2")
    assert (learned.target, learned.problem, learned.record.lasting) == (None, LOST, False)


def test_an_environment_that_cannot_be_built_is_a_skip(
    world: World, engine: Callable[..., Fake], tmp_path: Path
) -> None:
    engine()
    world.fails = StackError("no wheel")
    record = elsewhere(tmp_path).probe("4.53.0", 1, TARGET)
    assert (record.verdict.kind, record.verdict.text) == (Kind.SKIP, "no wheel")


def test_a_stopped_prober_submits_nothing_until_it_is_closed(
    world: World, engine: Callable[..., Fake], tmp_path: Path
) -> None:
    fake = engine()
    one = elsewhere(tmp_path)
    one.stop()
    with pytest.raises(Interrupted):
        one.probe("4.53.0", 1, TARGET)
    assert not fake.names
    one.close()
    assert one.probe_on(Setting("c1", ({"transformers": "4.53.0"},)), 1, TARGET).version == "c1"
    assert fake.names == ["c1"]


# ------------------------------------------------------------------------ matrix


def maker(folder: Path) -> Maker:
    question = prober(folder).question
    subject = Subject("expert-starvation mixtral", question, "digest")
    asked = MatrixQuestion(
        "transformers", (subject,), ("4.53.0", "4.53.2"), ("4.53.0", "4.53.2"), Asked()
    )
    return filling.maker(asked, folder, Display(), LaunchOptions(), ENGINE)


def test_a_cell_is_made_as_a_job(world: World, engine: Callable[..., Fake], tmp_path: Path) -> None:
    fake = engine()
    one = maker(tmp_path)
    cell = one.make(("expert-starvation mixtral", "4.53.2"))
    assert (cell.verdict, cell.shows) == ("collective-mismatch", True)
    assert (tmp_path / cell.evidence).is_dir()
    assert fake.names == ["expert-starvation mixtral 4.53.2"]
    one.close()
    assert fake.closed


def test_a_cell_whose_job_is_lost_could_not_run(
    world: World, engine: Callable[..., Fake], tmp_path: Path
) -> None:
    engine(1, 2)
    cell = maker(tmp_path).make(("expert-starvation mixtral", "4.53.2"))
    assert (cell.verdict, cell.shows, cell.text) == (COULD_NOT_RUN, None, LOST)


# ------------------------------------------------------------------------ nightly


def test_a_run_of_a_night_is_a_job(
    world: World, engine: Callable[..., Fake], tmp_path: Path
) -> None:
    fake = engine(1, 4, 5)
    planned = plan.plan(load.load(catalogue.find("expert-starvation")), 2, "cpu")
    below = tmp_path / "runs" / "pinned" / "expert-starvation"
    with opened(ENGINE, tmp_path, str) as remote:
        assert remote is not None
        one: Runs = Jobs(tmp_path, LaunchOptions(), remote)
        ran = one.run(planned, below, Display())
        assert ran.result is not None and len(ran.result.trials) == len(planned.trials)
        assert fake.names == ["pinned expert-starvation"] * 2  # the first was lost
        again = one.run(dataclasses.replace(planned), below.with_name("other"), Display())
        assert again.result is not None
        lost = one.run(planned, below.with_name("third"), Display())
        assert (lost.result, lost.exit_code) == (None, ExitCode.INCONCLUSIVE)
        assert lost.problem == "its job was lost twice: node 4 failed; then node 5 failed"
        one.stop()
        with pytest.raises(Interrupted):
            one.run(planned, below.with_name("fourth"), Display())


def test_a_worker_that_does_not_fit_ends_the_campaign(
    world: World, engine: Callable[..., Fake], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine()
    monkeypatch.setattr("moediag.lab.campaign.executors.worker.unfit", lambda *_: "has no disk")
    with pytest.raises(MachineError, match="has no disk"):
        elsewhere(tmp_path).probe("4.53.0", 1, TARGET)
