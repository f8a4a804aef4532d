"""The whole catalogue: plan, effect of one broken scenario, summary."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from moediag.cli import app
from moediag.errors import DiskFull, ExitCode, Interrupted, LaunchError, UsageError
from moediag.lab.campaign.engine import Display, opened
from moediag.lab.campaign.engine.display import Line, Lines
from moediag.lab.campaign.engine.journal import JOURNAL_FILE
from moediag.lab.campaign.sweep import session, shared_runs
from moediag.lab.campaign.sweep import summary as view
from moediag.lab.campaign.sweep.session import SweepOptions, plan_all, ranks_for
from moediag.lab.campaign.sweep.summary import Sweep, SweepRow
from moediag.lab.scenario import catalogue, load
from moediag.lab.stacks.environment import Stack
from moediag.report import answer_views
from moediag.report.text_layout import plain
from moediag.result import RunResult, read_result

GOLDEN = read_result(Path(__file__).parent.parent.parent / "golden" / "results" / "hang.json")
NAMES = ["expert-starvation", "expert-starvation-hang", "expert-starvation-silent"]
COMMAND = ("moediag", "run", "--all")
Outcome = Callable[[], RunResult]


def met(value: bool) -> RunResult:
    trials = tuple(dataclasses.replace(t, met=value or t.role != "fix") for t in GOLDEN.trials)
    return dataclasses.replace(GOLDEN, trials=trials)


def failing(error: BaseException) -> Outcome:
    def fail() -> RunResult:
        raise error

    return fail


def swept(
    monkeypatch: pytest.MonkeyPatch, folder: Path, *outcomes: Outcome, said: list[str] | None = None
) -> Sweep:
    """A sweep of three scenarios whose runs end with ``outcomes``."""
    left = list(outcomes)
    monkeypatch.setattr("moediag.lab.campaign.run.run", lambda *_: left.pop(0)())
    monkeypatch.setattr("moediag.lab.stacks.environment.ready", lambda _: None)
    options = SweepOptions(world_size=2)
    planned = plan_all(options, NAMES)
    display = Display() if said is None else Lines(said.append)
    resumed = (folder / JOURNAL_FILE).exists()
    with opened(session.header(planned, options, COMMAND), folder, resumed, "all") as journal:
        return session.sweep(planned, options, journal, display)


def test_the_catalogue_is_planned_grouped_by_release() -> None:
    planned = plan_all(SweepOptions())
    assert sorted(p.name for p in planned) == sorted(catalogue.names())
    assert all(p.plan is not None and p.trials > 0 for p in planned)
    stacks = [tuple(sorted(p.plan.scenario.stack.items())) for p in planned if p.plan]
    assert len(set(stacks)) == sum(a != b for a, b in zip(stacks, [None, *stacks], strict=False))


@pytest.mark.parametrize(
    ("world", "wanted", "device", "ranks"),
    [
        ({"default": 2}, None, "cpu", 2),
        ({"default": 2}, 5, "cpu", 5),
        ({"default": 2, "multiple_of": 2}, 5, "gpu", 4),
        ({"default": 2, "max": 3}, 8, "cpu", 3),
        ({"default": 4, "min": 4, "multiple_of": 4}, 3, "cpu", 4),
        ({"default": 4, "min": 4, "multiple_of": 4}, 3, "gpu", None),
    ],
)
def test_a_scenario_gets_the_largest_possible_number_of_ranks(
    world: dict[str, int], wanted: int | None, device: str, ranks: int | None
) -> None:
    scenario = load.load(catalogue.find("expert-starvation"))
    own = scenario.world.model_copy(update={"min": 1, "max": None, "multiple_of": 1, **world})
    assert ranks_for(scenario.model_copy(update={"world": own}), wanted, device) == ranks


@pytest.mark.parametrize(
    ("launcher", "built", "begun"),
    [("auto", True, True), ("auto", False, False), ("torchrun", True, False)],
)
def test_the_host_of_the_next_scenario_imports_during_this_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, launcher: str, built: bool, begun: bool
) -> None:
    events: list[str] = []

    def run(*_: Any) -> RunResult:
        events.append("run")
        return met(True)

    def ready(request: Mapping[str, str]) -> Stack | None:
        version = request["transformers"]
        return Stack(Path("python"), dict(request), version, 0.0, []) if built else None

    monkeypatch.setattr("moediag.lab.campaign.run.run", run)
    monkeypatch.setattr("moediag.lab.stacks.environment.ready", ready)
    monkeypatch.setattr(shared_runs.Hosts, "begin", lambda _, stack: events.append("host"))
    options = SweepOptions(world_size=2, launcher=launcher)
    planned = plan_all(options, NAMES)
    with opened(session.header(planned, options, COMMAND), tmp_path, False, "all") as journal:
        session.sweep(planned, options, journal, Display())
    assert events == (["host", "run", "host", "run", "run"] if begun else ["run"] * 3)


def test_a_host_that_cannot_start_early_does_not_end_the_sweep(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def begin(_: Any, stack: Stack) -> None:
        raise LaunchError("no such interpreter")

    built = Stack(Path("python"), {}, "key", 0.0, [])
    monkeypatch.setattr("moediag.lab.campaign.run.run", lambda *_: met(True))
    monkeypatch.setattr("moediag.lab.stacks.environment.ready", lambda _: built)
    monkeypatch.setattr(shared_runs.Hosts, "begin", begin)
    options = SweepOptions(world_size=2)
    planned = plan_all(options, NAMES)
    with opened(session.header(planned, options, COMMAND), tmp_path, False, "all") as journal:
        found = session.sweep(planned, options, journal, Display())
    assert [row.status for row in found.rows] == ["as expected"] * 3


def test_a_failing_scenario_affects_only_its_own_row(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = swept(
        monkeypatch, tmp_path,
        lambda: met(True), failing(ValueError("a mistake of ours")), lambda: met(True),
    )  # fmt: skip
    assert [row.status for row in found.rows] == ["as expected", "BUG", "as expected"]
    assert "a bug in moediag: ValueError: a mistake of ours" in found.rows[1].problem
    assert (
        "a mistake" in (tmp_path / found.rows[1].scenario / shared_runs.TRACEBACK_FILE).read_text()
    )
    assert found.state.exit_code == ExitCode.BUG
    assert json.loads((tmp_path / view.SUMMARY_FILE).read_text())["exit_code"] == ExitCode.BUG


@pytest.mark.parametrize(
    ("outcomes", "code"),
    [
        ([met(True), met(True), met(True)], ExitCode.OK),
        ([met(True), met(False), met(True)], ExitCode.FAILURE_FOUND),
        ([LaunchError("no ranks"), met(True), met(True)], ExitCode.INCONCLUSIVE),
        ([LaunchError("no ranks"), met(False), ValueError()], ExitCode.FAILURE_FOUND),
        ([LaunchError("no ranks")] * 3, ExitCode.CANNOT_RUN_HERE),
    ],
)
def test_exit_codes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, outcomes: list[Any], code: int
) -> None:
    calls = [failing(o) if isinstance(o, Exception) else (lambda o=o: o) for o in outcomes]
    assert swept(monkeypatch, tmp_path, *calls).state.exit_code == code


def test_the_summary_is_written_once_for_each_scenario_and_at_the_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    written: list[int] = []
    monkeypatch.setattr(Sweep, "write", lambda self, _: written.append(len(self.rows)))
    swept(monkeypatch, tmp_path, *[lambda: met(True)] * 3)
    assert written == [1, 2, 3, 3]


def statuses(folder: Path) -> list[str]:
    return [row["status"] for row in json.loads((folder / view.SUMMARY_FILE).read_text())["rows"]]


def test_ctrl_c_keeps_finished_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(Interrupted, match="after 1 of 3 scenarios") as caught:
        swept(monkeypatch, tmp_path, lambda: met(True), failing(Interrupted("x")))
    assert caught.value.help_text.endswith(f"moediag run --all --out {tmp_path} --resume")
    assert statuses(tmp_path) == ["as expected"]
    kept = json.loads((tmp_path / view.SUMMARY_FILE).read_text())
    assert kept["exit_code"] == ExitCode.INCONCLUSIVE  # two were not started
    found = swept(monkeypatch, tmp_path, lambda: met(False), lambda: met(True))
    assert [row.status for row in found.rows] == ["as expected", "BROKEN", "as expected"]


def test_a_resumed_sweep_repeats_scenarios_without_a_result(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fine = lambda: met(True)  # noqa: E731
    first = swept(monkeypatch, tmp_path, fine, failing(LaunchError("no ranks")), fine)
    assert first.state.exit_code == ExitCode.INCONCLUSIVE
    again = swept(monkeypatch, tmp_path, fine)
    assert [row.status for row in again.rows] == ["as expected"] * 3
    assert swept(monkeypatch, tmp_path).state.exit_code == ExitCode.OK  # nothing remains


@pytest.mark.parametrize("finished", range(4))
def test_a_sweep_resumed_after_any_scenario_has_the_same_rows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, finished: int
) -> None:
    outcomes: list[Outcome] = [lambda: met(True), lambda: met(False), lambda: met(True)]
    whole = swept(monkeypatch, tmp_path / "whole", *outcomes)
    with contextlib.suppress(KeyboardInterrupt, Interrupted):
        killed = outcomes[:finished] + [failing(KeyboardInterrupt())]
        swept(monkeypatch, tmp_path / "parts", *killed)
    found = swept(monkeypatch, tmp_path / "parts", *outcomes[finished:])
    rows = [[dataclasses.replace(row, seconds=0.0) for row in s.rows] for s in (whole, found)]
    assert rows[0] == rows[1]


def test_another_sweep_is_not_resumed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    swept(monkeypatch, tmp_path, *[lambda: met(True)] * 3)
    options = SweepOptions(world_size=4)
    asked = session.header(plan_all(options, NAMES), options, COMMAND)
    with pytest.raises(UsageError, match="number of ranks: 2, not 4"):
        opened(asked, tmp_path, True, "all")


def test_a_full_disk_ends_the_sweep(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(DiskFull, match="no space") as caught:
        swept(monkeypatch, tmp_path, lambda: met(True), failing(OSError(errno.ENOSPC, "no space")))
    assert caught.value.help_text.endswith("--resume")
    assert statuses(tmp_path) == ["as expected"]


def test_progress_counts_over_all_scenarios(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    said: list[str] = []
    plans = plan_all(SweepOptions(world_size=2), NAMES)
    sizes = [p.trials for p in plans]
    swept(monkeypatch, tmp_path, *[lambda: met(True)] * 3, said=said)
    assert said == [f"3 scenarios, {sum(sizes)} trials"]
    lines = Lines(said.append)
    lines.series("scenario", sizes)
    lines.skip(sizes[0], 10.0)  # an earlier command finished it
    for size in sizes[1:]:
        lines.begin("a scenario", size)
        lines.finished("unfixed", Line("unfixed: hang"))  # and the rest did not run
    assert said[-2] == "3 of 3: a scenario"
    assert said[-1].startswith(f"[{sizes[0] + sizes[1] + 1}/{sum(sizes)}] unfixed: hang; about ")


def test_the_summary_lists_unmet_expectations() -> None:
    rows = (
        SweepRow.of("a", met(True), 0, "", 61.0, 2),
        SweepRow.of("b", met(False), 1, "", 2.0, 4),
        SweepRow.of("c", None, 4, "torch 2.99: no such release", 0.1, 2),
    )
    found = Sweep("2026-01-01T00:00:00+00:00", "0", {}, 63.1, ("a", "b", "c", "d"), rows)
    text = [plain(line) for line in answer_views.lines(view.answer(found, "runs/all"), 100)]
    expected = sum(bool(t.expected) for t in GOLDEN.trials)
    assert text[3].split()[:5] == ["a", "2", f"{expected}", "of", f"{expected}"]
    assert text[3].endswith("as expected")
    assert any(line.startswith(" b") and "expected" in line for line in text[6:])
    assert any("torch 2.99: no such release" in line for line in text)
    told = " ".join(text[-4:])
    assert " WHAT     b: set-reduce-scatter-unused-params: hang, expected hang" in text
    assert told.startswith(" RUN      expectation broken: 4 scenarios (1 as expected, 1 BROKEN,")
    for part in ("1 did not run", "1 not begun", "moediag report runs/all/*/ --html page.html"):
        assert part in told
    assert answer_views.markdown(view.answer(found)).count("| a |") == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["run"], "no scenario was named"),
        (["run", "--all", "ep-clip-norm"], "--all runs the whole catalogue"),
        (["run", "--all", "--variant", "unfixed"], "--variant unfixed applies to one scenario"),
        (["run", "--all", "--set", "model.family=mixtral"], "--set model.family=mixtral"),
    ],
)
def test_options_that_exclude_all_scenarios_are_refused(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert app.main(arguments) == ExitCode.USAGE
    assert says in capsys.readouterr().err
