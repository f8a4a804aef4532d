"""A night without ranks: tracks, jobs, order, time limit, saved files and reports."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from moediag.cli import app
from moediag.errors import ExitCode, Interrupted, NoEnvironments, UsageError
from moediag.lab.campaign.engine import Display, opened
from moediag.lab.campaign.engine.journal import JOURNAL_FILE
from moediag.lab.campaign.hunt.findings import Hunt
from moediag.lab.campaign.nightly import artifacts, blame, drive, judged, tracks
from moediag.lab.campaign.nightly import hunted as hunts
from moediag.lab.campaign.nightly import jobs as planning
from moediag.lab.campaign.nightly import summary as pages
from moediag.lab.campaign.nightly.blame import Blame
from moediag.lab.campaign.nightly.changes import Change, compare
from moediag.lab.campaign.nightly.jobs import Asked, Planned
from moediag.lab.campaign.nightly.night import Found, History, Hunted, Night, from_json
from moediag.lab.campaign.nightly.summary import Summary
from moediag.lab.campaign.nightly.tracks import Track
from moediag.lab.scenario import catalogue
from moediag.lab.scenario import load as loading
from moediag.lab.stacks.releases import Release
from moediag.launch.settings import LaunchOptions
from moediag.report import answer_views
from moediag.result import RunResult, TrialResult, read_result
from tests.junit_reader import as_read
from tests.unit.nightly_nights import entry, job, night
from tests.unit.trial_results import changed

GOLDEN = read_result(Path(__file__).parent.parent.parent / "golden" / "results" / "hang.json")
NAMES = ("expert-starvation-late", "expert-starvation-data")
ASKED = Asked(NAMES, 2, torch="2.13.0+cpu")
MOVED = Track("transformers", "newest", "5.23.0")


# ------------------------------------------------------------------------ tracks


def test_tracks_are_parsed_from_the_command_line() -> None:
    assert [t.name for t in tracks.parse([])] == [
        "pinned",
        *(f"{name}=newest" for name in tracks.PACKAGES),
        *(f"{name}=pre" for name in tracks.PACKAGES),
    ]
    assert [t.name for t in tracks.parse(["trl=newest", "pinned", "newest"])][:2] == [
        "pinned", "trl=newest",
    ]  # fmt: skip
    for wrong in ("nightly", "torch=pinned", "=newest", "torch=2.13"):
        with pytest.raises(UsageError, match=f"--track {wrong}"):
            tracks.parse([wrong])


def test_versions_of_tracks_are_found_or_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    served = {
        "transformers": [
            Release("5.22.0"),
            Release("5.23.0"),
            Release("5.24.0rc1", prerelease=True),
        ],
        "torch": [Release("2.12.0rc1", prerelease=True), Release("2.13.0+cpu")],
        "accelerate": [Release("1.15.0"), Release("1.16.0", yanked=True)],
    }

    def releases(package: str, _: object = None) -> list[Release]:
        if package not in served:
            raise NoEnvironments("no network")
        return served[package]

    monkeypatch.setattr(tracks.index, "releases", releases)
    notes: list[str] = []
    wanted = tracks.parse(["pinned", "newest", "pre", "trl=newest"])
    found = {t.name: t.version for t in tracks.resolved(wanted, "3.11.7", notes.append)}
    assert found == {
        "pinned": "", "transformers=newest": "5.23.0", "accelerate=newest": "1.15.0",
        "torch=newest": "2.13.0", "transformers=pre": "5.24.0rc1",
    }  # fmt: skip
    assert notes[0] == "trl=newest: no network"
    assert len(notes) == 3
    assert all("no pre-release is newer" in text for text in notes[1:])


# ------------------------------------------------------------------------ jobs


def planned(*of: Track, asked: Asked = ASKED) -> list[Planned]:
    return planning.plan_all([Track(), *of], asked)


def test_a_track_moves_packages_that_the_scenario_uses() -> None:
    found = planned(MOVED, Track("accelerate", "newest", "1.15.0"))
    assert [(p.name, p.moved) for p in found] == [
        (name, moved) for name in NAMES for moved in ({}, {"transformers": "5.23.0"})
    ]
    data = found[3].plan
    assert data is not None
    assert data.scenario.stack == {"transformers": "5.23.0"}
    # `upgrade` has its own version and would not change from night to night; no step times.
    assert [t.trial.variant for t in data.trials] == [
        "unfixed", "unused-params-flag", "touch", "distinct-batches",
    ]  # fmt: skip
    (full, *_) = planned(asked=dataclasses.replace(ASKED, scenarios=("expert-starvation",)))
    assert full.plan is not None
    assert "cost" not in {t.trial.task.kind for t in full.plan.trials}


def test_an_already_pinned_release_is_run_once_for_both_tracks() -> None:
    same = Track("transformers", "newest", "4.53.2")
    torch = Track("torch", "newest", "2.13.0")
    found = planned(same, torch, Track("torch", "pre", "2.14.0rc1"))
    assert [[t.name for t in p.tracks] for p in found[:2]] == [
        ["pinned", "transformers=newest", "torch=newest"], ["torch=pre"],
    ]  # fmt: skip


def test_omitted_jobs_are_first_next_time() -> None:
    all_of_them = planned(MOVED)
    first = planning.ordered(all_of_them, [])
    assert [p.moved for p in first] == [{}, {}, {"transformers": "5.23.0"}] + [first[3].moved]
    done = [job(p.name, p.tracks[0].name) for p in first[:3]]
    earlier = night(1, jobs=(*done, job(first[3].name, MOVED.name, finished=False)))
    assert planning.ordered(all_of_them, [earlier]) == [first[3], *first[:3]]
    assert planning.seconds(first[0], [earlier]) == 10.0


# ------------------------------------------------------------------------ one result


def trial(**changes: object) -> TrialResult:
    base = next(t for t in GOLDEN.trials if t.role == "unfixed")
    values: dict[str, object] = {"met": True, "expected": "hang", "verdict": "hang", **changes}
    return changed(base, **values)


def states(track: Track, *trials: TrialResult) -> dict[str, str]:
    result = dataclasses.replace(GOLDEN, trials=trials)
    return {e.variant: e.state for e in judged.entries(result, track, "runs/x")}


def test_an_expected_failure_is_good_if_pinned_and_bad_if_moved() -> None:
    assert states(Track(), trial()) == {"unfixed": "good"}
    assert states(MOVED, trial()) == {"unfixed": "bad"}
    gone = trial(verdict="clean", met=False)
    assert states(Track(), gone) == {"unfixed": "bad"}
    assert states(MOVED, gone) == {"unfixed": "good"}


def test_a_known_wrong_fix_may_fail_only_as_expected() -> None:
    wrong = trial(variant="f", role="fix", expected="hang or crash")
    right = trial(variant="g", role="fix", expected="clean")
    assert states(MOVED, wrong, right) == {"f": "good", "g": "bad"}
    other = changed(wrong, verdict="wrong-gradients")
    assert states(MOVED, other) == {"f": "bad"}


def test_state_is_unknown_with_a_failing_control() -> None:
    control = trial(variant="c", role="control", expected="clean", verdict="crash", met=False)
    for track in (Track(), MOVED):
        assert states(track, trial(), control) == {"unfixed": "unknown", "c": "bad"}
    skipped = changed(control, verdict="not-applicable")
    assert states(MOVED, trial(), skipped) == {"unfixed": "bad", "c": "unknown"}


def test_a_failing_repeat_decides() -> None:
    shown = [trial(verdict=v, repeat=n) for n, v in enumerate(("clean", "inconclusive", "hang"))]
    assert states(MOVED, *shown) == {"unfixed": "bad"}
    assert states(MOVED, *shown[:2]) == {"unfixed": "good"}
    assert states(MOVED, shown[1]) == {"unfixed": "unknown"}


# ------------------------------------------------------------------------ a night

ONE = dataclasses.replace(GOLDEN, trials=(trial(),))  # of a variant that every scenario has

COMMAND = ("moediag", "nightly")
Outcome = Callable[[], RunResult]


def writing(outcome: Callable[[str], RunResult]) -> Callable[..., RunResult]:
    """Returns a run function that writes its result file."""

    def run(plan: Any, journal: Any, *_: object) -> RunResult:
        result = outcome(plan.scenario.name)
        result.write(journal.folder)
        return result

    return run


def nightly(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, outcome: Callable[[str], RunResult],
    minutes: float = 5.0,
) -> tuple[drive.Result, History]:  # fmt: skip
    monkeypatch.setattr("moediag.lab.campaign.run.run", writing(outcome))
    kept = History(tmp_path / "history")
    nights = [night for night in kept.nights if night.complete]
    folder = tmp_path / f"out-{len(nights)}"
    return night_in(folder, kept, minutes), kept


def night_in(folder: Path, kept: History, minutes: float) -> drive.Result:
    """Runs a night, or resumes the one in ``folder``."""
    resumed = (folder / JOURNAL_FILE).exists()
    jobs = planned(MOVED)
    with opened(drive.header(jobs, ASKED, COMMAND), folder, resumed, "nightly") as journal:
        return drive.run(jobs, ASKED, ["a note"], kept, journal, minutes, Display())


def test_a_night_is_saved_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ran, _ = nightly(monkeypatch, tmp_path, lambda _: ONE)
    assert ran.night.complete
    assert [j.finished for j in ran.night.jobs] == [True] * 4
    assert ran.night.entries[0].command == (
        f"moediag run {ran.night.jobs[0].scenario} --variant unfixed --cpu 2"
    )
    assert ran.night.entries[-1].command.endswith("--stack transformers=5.23.0")
    (path,) = (tmp_path / "history").iterdir()
    before = path.read_bytes()
    assert from_json(json.loads(before)).entries == ran.night.entries
    again, kept = nightly(monkeypatch, tmp_path, lambda _: ONE)
    assert path.read_bytes() == before
    assert len(list((tmp_path / "history").iterdir())) == 2
    assert kept.nights == [ran.night]
    assert {c.change for c in compare(again.night, kept.nights)} == {Change.SAME, Change.STILL}


def test_the_night_is_written_once_for_each_job_and_at_the_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    written: list[tuple[int, bool]] = []
    keep = lambda _, path, night: written.append((len(night.jobs), night.complete))  # noqa: E731
    monkeypatch.setattr(History, "keep", keep)
    nightly(monkeypatch, tmp_path, lambda _: ONE)
    assert written == [(1, False), (2, False), (3, False), (4, False), (4, False), (4, True)]


def test_the_time_limit_applies_between_jobs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Clock(drive.Clock):
        """Each reading advances the clock by a minute."""

        @property
        def left(self) -> float:
            self._end -= 60
            return super().left

    monkeypatch.setattr(drive, "Clock", Clock)
    monkeypatch.setattr(planning, "seconds", lambda *_: 100.0)
    ran, _ = nightly(monkeypatch, tmp_path, lambda _: ONE, minutes=4.0)
    assert [j.finished for j in ran.night.jobs] == [True, True, False, False]
    assert ran.night.jobs[-1].problem == "did not fit: it took 100 s before"
    assert Summary(ran.night, ()).state.exit_code == ExitCode.OK


def test_a_job_stopped_by_the_time_limit_is_distinguished_from_ctrl_c(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stops = []

    def until_stopped(
        plan: object, journal: object, options: object, observer: object
    ) -> RunResult:
        launch: LaunchOptions = options.launch  # type: ignore[attr-defined]
        assert launch.stop is not None
        stops.append(launch.stop.wait(60))
        raise Interrupted("x")

    monkeypatch.setattr("moediag.lab.campaign.run.run", until_stopped)
    kept = History(tmp_path / "history")
    ran = night_in(tmp_path / "o", kept, 0.002)
    assert stops == [True]
    assert "did not fit: ended after" in ran.night.jobs[0].problem
    assert [j.finished for j in ran.night.jobs] == [False] * 4
    assert ran.night.jobs[1].problem == "did not fit: no time was left"


def test_ctrl_c_keeps_finished_jobs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    names = []

    def second_is_interrupted(name: str) -> RunResult:
        names.append(name)
        if len(names) > 1:
            raise Interrupted("x")
        return ONE

    with pytest.raises(Interrupted, match="after 1 of 4 jobs") as caught:
        nightly(monkeypatch, tmp_path, second_is_interrupted)
    assert caught.value.help_text.endswith(f"moediag nightly --out {tmp_path / 'out-0'} --resume")
    (kept,) = History(tmp_path / "history").nights
    assert [j.finished for j in kept.jobs] == [True]
    assert not kept.complete


@pytest.mark.parametrize("finished", range(4))
def test_a_resumed_night_equals_an_uninterrupted_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, finished: int
) -> None:
    names: list[str] = []

    def interrupted(name: str) -> RunResult:
        names.append(name)
        if len(names) > finished:
            raise KeyboardInterrupt
        return ONE

    monkeypatch.setattr("moediag.lab.campaign.run.run", writing(lambda _: ONE))
    whole = night_in(tmp_path / "whole", History(tmp_path / "other"), 5.0)
    monkeypatch.setattr("moediag.lab.campaign.run.run", writing(interrupted))
    with pytest.raises(Interrupted):
        night_in(tmp_path / "parts", History(tmp_path / "history"), 5.0)
    names.clear()
    monkeypatch.setattr(
        "moediag.lab.campaign.run.run", writing(lambda name: (names.append(name), ONE)[1])
    )
    kept = History(tmp_path / "history")
    again = night_in(tmp_path / "parts", kept, 5.0)
    assert len(names) == 4 - finished
    assert again.night.entries == whole.night.entries
    assert [j.scenario for j in again.night.jobs] == [j.scenario for j in whole.night.jobs]
    assert again.results.keys() == whole.results.keys()
    assert kept.nights == [], "a resumed night is not compared with its own beginning"
    (night,) = History(tmp_path / "history").nights
    assert night.complete and night.entries == whole.night.entries


def test_omitted_jobs_run_when_the_night_is_resumed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("moediag.lab.campaign.run.run", writing(lambda _: ONE))
    kept = History(tmp_path / "history")
    first = night_in(tmp_path / "out", kept, 0.0)
    assert [j.finished for j in first.night.jobs] == [False] * 4
    again = night_in(tmp_path / "out", kept, 5.0)
    assert [j.finished for j in again.night.jobs] == [True] * 4


@pytest.mark.parametrize("text", ["{", "[]", '{"schema_version": 2}', '{"schema_version": 1}'])
def test_an_unreadable_night_is_skipped_and_reported(tmp_path: Path, text: str) -> None:
    (tmp_path / "broken.json").write_text(text)
    kept = History(tmp_path)
    assert kept.nights == []
    assert kept.unreadable[0].startswith("broken.json: ")


def test_exit_codes() -> None:
    def code(tonight: Night, *news: Found) -> int:
        return pages.answer(Summary(tonight, (), news=news)).exit_code

    done = night(1, entry("good"), jobs=(job(),))
    assert code(done) == ExitCode.OK
    assert code(done, APPEARED) == ExitCode.FAILURE_FOUND
    assert pages.answer(summary(night(1, entry(), jobs=(job(),)))).exit_code == (
        ExitCode.FAILURE_FOUND
    )
    assert code(night(1, entry("unknown"), jobs=(job(),))) == ExitCode.INCONCLUSIVE
    nothing = night(1, jobs=(job(finished=False, seconds=0.0),))
    assert code(nothing) == ExitCode.CANNOT_RUN_HERE
    assert code(night(1, jobs=(job(finished=False),))) == ExitCode.INCONCLUSIVE


# ------------------------------------------------------------------------ pages


def summary(tonight: Night, *earlier: Night, **changes: object) -> Summary:
    return Summary(tonight, compare(tonight, earlier), **changes)  # type: ignore[arg-type]


@pytest.fixture
def week() -> Summary:
    first = night(
        1, entry("good", "4.0", scenario="a"), entry("bad", "4.0", scenario="b"),
        entry("bad", "4.0", scenario="c"), entry("good", scenario="d"),
    )  # fmt: skip
    tonight = night(
        2, entry("good", scenario="b"), entry(scenario="d"), entry(scenario="c"),
        entry("unknown", scenario="e", why="its control fails", seconds=2.5),
        entry(scenario="a", why="rank 1: 50% | <gone>\nfor good"),
        jobs=(job("a"), job("z", finished=False, problem="did not fit: it took 99 s before")),
        notes=("torch=pre: no pre-release is newer than the newest release",),
    )  # fmt: skip
    found = summary(tonight, first, unreadable=("x.json: broken",))
    key = ("a", "unfixed", "transformers=newest")
    said = "transformers 4.9 is the first bad release; 4.8 is the last good one."
    return dataclasses.replace(found, blames={key: Blame(said, "### the bisect\n")})


def test_the_summary_lists_new_failures_first(week: Summary) -> None:
    text = answer_views.markdown(pages.answer(week))
    assert text.startswith("## moediag nightly: cpu-2, 2026-03-02 ")
    assert "❌ **failure found**: 1 new failure, 1 fixed, 1 still failing, 1 flaky" in text
    heads = [line for line in text.splitlines() if line.startswith("### ")]
    assert heads == [
        "### New failures (1)", "### Fixed (1)", "### Still failing (1)", "### Flaky (1)",
        "### Could not be judged (1)", "### Left out", "### Notes", "### Everything",
    ]  # fmt: skip
    for part in (
        "good on 2026-03-01 with transformers 4.0", "4.9 is the first bad release",
        "since 2026-03-01 (transformers 4.0", "2026-03-01 clean, 2026-03-02 hang",
        "it took 99 s before", "torch=pre", "x.json: broken", "50% \\| &lt;gone&gt;",
    ):  # fmt: skip
        assert part in text, part


def test_a_truncated_summary_is_marked() -> None:
    many = [entry(scenario=f"scenario-{n}", why="x" * 400) for n in range(4000)]
    text = answer_views.markdown(pages.answer(summary(night(1, *many))))
    assert len(text.encode()) <= answer_views.LIMIT < 2**20
    assert text.endswith("have everything.*\n")
    assert "4,000 new failures" in text.splitlines()[2]
    short = answer_views.markdown(pages.answer(summary(night(1, *many[:3]))))
    assert "Cut at the size limit" not in short


@pytest.mark.parametrize(("new", "lines"), [(0, 0), (10, 10), (11, 10), (40, 10)])
def test_at_most_ten_annotations_of_one_line_are_written(new: int, lines: int) -> None:
    many = [entry(scenario=f"s{n}", why="a: 100%\nb") for n in range(new)]
    found = pages.workflow_commands(summary(night(1, *many)))
    assert len(found) == lines
    assert all(text.startswith("::error title=") and "\n" not in text for text in found)
    if new:
        assert "transformers=newest::hang on" in found[0]
        assert found[0].endswith("a: 100%25%0Ab")
    if new > 10:
        assert f"{new - 9} more new failures" in found[-1]


def test_junit_has_a_case_for_every_variant(week: Summary) -> None:
    own, suite = ElementTree.fromstring(answer_views.junit(pages.answer(week)))
    assert own.get("failures") == "1"
    counts = ("tests", "failures", "errors", "skipped", "time")
    assert [suite.get(name) for name in counts] == ["5", "1", "1", "2", "2.500"]
    kinds = {str(c.get("classname"))[0]: [(x.tag, x.get("message", "").split(":")[0]) for x in c]
             for c in suite}  # fmt: skip
    assert kinds == {
        "a": [("failure", "new")], "b": [], "c": [("skipped", "still")],
        "d": [("skipped", "flaky")], "e": [("error", "unknown")],
    }  # fmt: skip


def test_a_reader_of_junit_sees_one_failure_that_fails_the_night(week: Summary) -> None:
    own, night = as_read(answer_views.junit(pages.answer(week))).values()
    assert own == ["failure"] and sorted(night) == [
        "error", "failure", "passed", "skipped", "skipped",
    ]  # fmt: skip
    (continues,) = (c for c in week.compared if c.change is Change.STILL)
    calm = dataclasses.replace(week, compared=(continues,))
    own, night = as_read(answer_views.junit(pages.answer(calm))).values()
    assert (own, night) == (["passed"], ["skipped"])


def tonight(week: Summary) -> Summary:
    return dataclasses.replace(
        week,
        compared=tuple(
            dataclasses.replace(c, entry=dataclasses.replace(c.entry, evidence="runs/a"))
            for c in week.compared
        ),
    )


def test_only_new_failures_have_a_draft_issue(week: Summary, tmp_path: Path) -> None:
    result = dataclasses.replace(GOLDEN, trials=(trial(),))
    found = artifacts.drafts(tonight(week), {"runs/a": result}, tmp_path)
    assert list(found) == ["a-unfixed-transformers-newest.md"]
    text = found["a-unfixed-transformers-newest.md"]
    order = ["not filed", "huggingface/transformers", "### System Info",
             "### Reproduction", "FIRST DIVERGENCE", "### the bisect", "### Expected behavior",
             ]  # fmt: skip
    places = [text.index(part) for part in order]
    assert places == sorted(places)
    assert len(text) < 65_000


def test_the_exported_file_is_written_beside_its_draft(week: Summary, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "a"
    folder.mkdir(parents=True)
    scenario = loading.load(catalogue.find("expert-starvation"))
    (folder / "scenario.yaml").write_text(scenario.to_yaml())
    failed = changed(trial(), variant="unfixed", world_size=2,
                                 stack={"torch": "2.13.0", "transformers": "4.53.2"})  # fmt: skip
    result = dataclasses.replace(GOLDEN, trials=(failed,))
    found = artifacts.drafts(tonight(week), {"runs/a": result}, tmp_path)
    assert list(found) == ["a-unfixed-transformers-newest.md", "a-unfixed-transformers-newest.py"]
    program = found["a-unfixed-transformers-newest.py"]
    assert "import transformers" in program
    assert program.rstrip() in found["a-unfixed-transformers-newest.md"]


def test_a_fixed_expected_failure_has_no_draft(week: Summary, tmp_path: Path) -> None:
    gone = dataclasses.replace(GOLDEN, trials=(changed(trial(), verdict="clean"),))
    assert artifacts.drafts(tonight(week), {"runs/a": gone}, tmp_path) == {}
    assert artifacts.drafts(tonight(week), {}, tmp_path) == {}


# ------------------------------------------------------------------------ the command


def test_a_wrong_command_line_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for words, says in (
        (["--track", "newer"], "--track newer: no such track"),
        (["--annotate", "--json"], "--annotate and --json exclude each other"),
        (["--cpu", "2", "--gpus", "2"], "exclude each other"),
        (["--scenario", "nothing", "--track", "pinned"], "no scenario is called 'nothing'"),
    ):
        assert app.main(["nightly", "--history", str(tmp_path / "h"), *words]) == ExitCode.USAGE
        assert says in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    line = ["nightly", "--history", str(tmp_path / "file"), "--track", "pinned"]
    assert app.main(line) == ExitCode.USAGE
    assert "--history" in capsys.readouterr().err


def test_a_bisect_without_time_left_prints_its_command() -> None:
    (new,) = compare(night(2, entry("bad", "5.0.0")), [night(1, entry("good", "4.57.6"))])
    said = blame.blame(new, "starve", ASKED, Path("x"), 1.0, None, LaunchOptions())  # type: ignore[arg-type]
    assert said.command == (
        "moediag bisect starve --package transformers --good 4.57.6 --bad 5.0.0 --variant unfixed "
        "--cpu 2"
    )
    assert said.command in said.said


# ------------------------------------------------------------------------ the hunt


APPEARED = Found("padding:wrong:logits", ("alpha",), ("left",), text="logits differ by 0.3")
HUNTED = Hunted("5.23.0", "5.22.0", (APPEARED,), same=3, left=2, folder="h/hunt/a")


def test_the_hunt_of_a_night_is_kept_and_shown() -> None:
    tonight = dataclasses.replace(night(2), hunt=HUNTED)
    assert from_json(json.loads(json.dumps(tonight.to_json()))).hunt == HUNTED
    page = pages.answer(Summary(tonight, (), news=(APPEARED, APPEARED)))
    assert "0 new failures, " in page.sentence and "; the hunt: 2 new findings" in page.sentence
    assert {row.label: row.text for row in page.rows} == {
        "WHAT": "the hunt: padding:wrong:logits (left) in alpha (and 1 more finding)",
        "WHY": "logits differ by 0.3",
        "NEXT": "moediag hunt --release 5.23.0 --family alpha --relation padding "
        "--stack accelerate=newest --pursue",
    }
    text = answer_views.markdown(page)
    assert "5.23.0 against 5.22.0: 1 appeared, 0 went away, 3 ways of a relation" in text
    assert "2 cells left for the next night" in text
    assert "  - appeared: padding:wrong:logits (left) in alpha\n  - logits differ by 0.3\n" in text
    assert "every finding in full: h/hunt/a/hunt.md" in text
    fresh = dataclasses.replace(tonight, hunt=dataclasses.replace(HUNTED, added=("alpha", "beta")))
    assert from_json(json.loads(json.dumps(fresh.to_json()))) == fresh
    text = answer_views.markdown(pages.answer(Summary(fresh, ())))
    assert "(left) in alpha, which 5.22.0 lacks\n" in text


def test_only_what_no_earlier_night_had_is_news() -> None:
    tonight = dataclasses.replace(night(2), hunt=HUNTED)
    earlier = dataclasses.replace(night(1), hunt=HUNTED)
    assert hunts.news(tonight, [night(1)]) == [APPEARED]
    assert hunts.news(tonight, [earlier]) == []
    other = dataclasses.replace(HUNTED, release="5.22.0")
    assert hunts.news(tonight, [dataclasses.replace(earlier, hunt=other)]) == [APPEARED]
    known = dataclasses.replace(APPEARED, registered=True)
    quiet = dataclasses.replace(tonight, hunt=dataclasses.replace(HUNTED, appeared=(known,)))
    assert hunts.news(quiet, []) == []


def test_a_hunt_is_continued_in_its_folder_or_begun_again_for_another_question(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[tuple[str, bool]] = []
    families: list[tuple[str, ...]] = []

    def run(wanted: Any, out: Path, resume: bool, *_: object) -> tuple[Hunt, Path]:
        asked.append((out.name[-2:], resume))
        assert (wanted.release, wanted.against) == ("5.23.0", "previous")
        families.append(wanted.families)
        if resume and out.name.endswith("-1"):
            raise UsageError("another question")
        out.mkdir(parents=True, exist_ok=True)
        (out / JOURNAL_FILE).touch()
        before = Hunt({"transformers": "5.22.0"}, {}, (), {})
        return Hunt({"transformers": "5.23.0"}, {}, (), {}, before=before), out

    monkeypatch.setattr(hunts.session, "run", run)
    first = hunts.hunted([Track(), MOVED], tmp_path, 5.0, 2, Display())
    assert first is not None
    assert (first.release, first.against, first.left) == ("5.23.0", "5.22.0", 0)
    hunts.hunted([Track(), MOVED], tmp_path, 5.0, 2, Display())
    hunts.hunted([Track(), MOVED], tmp_path, 5.0, 2, Display(), families=["alpha"])
    assert families == [("moe",)] * 3 + [("alpha",)] * 2
    assert asked == [("-1", False), ("-1", True), ("-2", False), ("-1", True), ("-2", True)]
    assert hunts.hunted([Track()], tmp_path, 5.0, 2, Display()) is None


def test_a_hunt_that_cannot_run_is_part_of_the_night(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def no_network(*_: object) -> None:
        raise NoEnvironments("no network")

    monkeypatch.setattr(hunts.session, "run", no_network)
    found = hunts.hunted([MOVED], tmp_path, 5.0, 1, Display())
    assert found is not None
    assert pages.hunt_sentence(found) == "transformers 5.23.0: no hunt, no network"
