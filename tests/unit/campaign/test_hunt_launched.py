"""Relations between several ranks and one process: what is run, what counts."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from moediag.evidence.launch_record import LaunchRecord
from moediag.lab.campaign.hunt import family_trials, launched, layouts
from moediag.lab.campaign.hunt.layouts import LAYOUTS, TRAINER
from moediag.protocol import (
    SIZES,
    TRIAL_FILE,
    Outcome,
    ReferenceTask,
    SaveTask,
    SequenceTask,
    Trial,
    outcome_file,
    output_file,
)
from moediag.result import Confidence, Diagnosis, Verdict

WAY = LAYOUTS.ways[0]
SAVED = "-saved"


def diagnosis(verdict: Verdict, what: str = "") -> Diagnosis:
    return Diagnosis(verdict, f"{verdict}:{what}" if what else str(verdict), Confidence.HIGH,
                     cause="because")  # fmt: skip


CLEAN = diagnosis(Verdict.CLEAN)
GRADIENTS = diagnosis(Verdict.WRONG_GRADIENTS, "all-ranks")
OTHER = diagnosis(Verdict.WRONG_GRADIENTS, "one-rank")


@dataclass
class World:
    """Replaces the launches: each trial has the diagnosis of its name's first matching start; with
    ``together-`` before it, only beside others in one launch."""

    shows: dict[str, Diagnosis]
    refused: str | None = None
    ends: str = ""
    """The trial that ends a launch of several."""
    raises: str = ""
    """The trial that raises on all ranks of a launch of several."""
    trials: list[Trial] = field(default_factory=list)
    launches: int = 0

    def run(self, trial: Trial, folder: Path, *_: Any) -> LaunchRecord:
        self.launches += 1
        folder.mkdir(parents=True, exist_ok=True)
        if not isinstance(trial.task, SequenceTask):
            self.one(trial, folder)
            return LaunchRecord(0.0, 0.0)
        for name in trial.task.trials:
            if name == self.ends:
                break
            self.one(Trial.read(folder / name / TRIAL_FILE), folder / name)
        return LaunchRecord(0.0, 0.0)

    def one(self, trial: Trial, folder: Path) -> None:
        self.trials.append(trial)
        for rank in range(trial.world_size):
            if trial.name == self.raises:
                (folder / output_file(rank)).write_text("ValueError: no\n")
            else:
                Outcome(rank, applicable=self.applicable(trial)).write(folder)

    def applicable(self, trial: Trial) -> str | None:
        return self.refused if isinstance(trial.task, ReferenceTask) else None

    def diagnose(self, folder: Path) -> Diagnosis:
        together = folder.parent.parent.name == family_trials.TOGETHER
        for name in (f"together-{folder.name}",) * together + (folder.name,):
            saves = SAVED in name  # tp-size is no start of tp-size-saved
            starts = [s for s in self.shows if name.startswith(s) and (SAVED in s) is saves]
            if starts:
                return self.shows[max(starts, key=len)]
        return CLEAN

    @property
    def names(self) -> list[str]:
        return [t.name for t in self.trials if not isinstance(t.task, ReferenceTask)]


def check(
    monkeypatch: pytest.MonkeyPatch, folder: Path, shows: dict[str, Diagnosis],
    listed: str = "", **more: Any,
) -> tuple[World, dict[str, Any]]:  # fmt: skip
    world = World(shows, **more)
    monkeypatch.setattr(family_trials, "read_trial", lambda folder: folder)
    monkeypatch.setattr(family_trials, "diagnose", world.diagnose)
    launcher: Any = world
    found = launched.check(LAYOUTS, "alpha", launcher, folder, 60.0, lambda way: way.what == listed)
    return world, {way.way: way for way in found.ways}


def test_a_family_that_is_right_is_run_once_a_way(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    world, ways = check(monkeypatch, tmp_path, {})
    assert len(world.names) == len(LAYOUTS.ways) == len(ways)
    assert world.launches == 2, "the references, then all ways"
    assert all(way.holds for way in ways.values())
    assert not list(tmp_path.iterdir()), "ways that hold leave nothing"


def test_a_difference_that_meets_every_condition_is_confirmed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    world, ways = check(monkeypatch, tmp_path, {"tp-size": GRADIENTS})
    assert ways["tp-size"].confirmed
    assert ways["tp-size"].what == GRADIENTS.signature
    assert {"tp-size-11", "one-rank-tp-size-00", "ddp-tp-size-00"} <= set(world.names)
    assert world.names.count("tp-size-00") == 2, "beside others and alone"
    assert (tmp_path / "tp-size-00").is_dir(), "its evidence is kept"


@pytest.mark.parametrize(
    ("shows", "condition"),
    [
        ({"one-rank": GRADIENTS}, "control"),
        ({"together-tp-size": OTHER, "tp-size-00-again": CLEAN}, "twice"),
        ({"tp-size-11": CLEAN, "tp-size-10": OTHER}, "other-seed"),
        ({"tp-size-11": CLEAN, "tp-size-01": CLEAN}, "other-size"),
        ({"ddp": GRADIENTS}, "second-route"),
    ],
)
def test_a_difference_that_misses_a_condition_is_not_confirmed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, shows: dict[str, Diagnosis], condition: str
) -> None:
    _, ways = check(monkeypatch, tmp_path, {"tp-size": GRADIENTS, **shows})
    assert ways["tp-size"].failed == condition
    assert not ways["tp-size"].confirmed


def test_what_the_register_lists_only_has_to_show_twice(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shows = {"tp-size": GRADIENTS, "ep-size-00": OTHER, "ep-size-11": CLEAN, "ep-size-10": CLEAN}
    world, ways = check(monkeypatch, tmp_path, shows, GRADIENTS.signature)
    assert ways["tp-size"].confirmed and ways["tp-size"].conditions["other-seed"] is None
    assert [n for n in world.names if "tp-size-" in n and SAVED not in n] == ["tp-size-00"] * 2
    assert ways["ep-size"].failed == "other-seed", "another difference meets every condition"

    once = {"tp-size": GRADIENTS, "together-tp-size": OTHER, "tp-size-00-again": CLEAN}
    _, ways = check(monkeypatch, tmp_path, once, GRADIENTS.signature)
    assert ways["tp-size"].failed == "twice" and not ways["tp-size"].confirmed


def test_what_shows_only_beside_others_in_one_launch_is_no_difference(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    world, ways = check(monkeypatch, tmp_path, {"together-tp-size": GRADIENTS})
    assert ways["tp-size"].holds
    assert world.names.count("tp-size-00") == 2


def test_a_way_that_ends_the_launch_of_all_is_run_alone_and_the_rest_together(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    world, ways = check(monkeypatch, tmp_path, {}, ends="fsdp-size-00")
    assert all(way.holds for way in ways.values()) and len(ways) == len(LAYOUTS.ways)
    assert world.names.count("fsdp-size-00") == 1
    assert world.launches == 4, "the references, the ways before it, those after it, and it alone"


def test_a_way_that_raises_on_all_ranks_does_not_end_the_launch_of_all(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    crash = diagnosis(Verdict.CRASH, "ValueError")
    world, ways = check(monkeypatch, tmp_path, {"fsdp-size": crash}, raises="fsdp-size-00")
    assert ways["fsdp-size"].confirmed
    assert world.names.count("fsdp-size-00") == 2, "beside others and alone"


def test_ways_share_their_control(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    world, ways = check(monkeypatch, tmp_path, {"ep-size": GRADIENTS, "tp-size": GRADIENTS})
    assert ways["ep-size"].confirmed and ways["tp-size"].confirmed
    assert sum(name.startswith("one-rank") for name in world.names) == 1


def test_weights_are_decided_by_their_bytes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wrong = diagnosis(Verdict.WRONG_WEIGHTS, "other-weights")
    world, ways = check(monkeypatch, tmp_path, {"fsdp-size": wrong})
    assert ways["fsdp-size"].confirmed
    assert not any(name.startswith("ddp") for name in world.names)


def test_what_cannot_be_judged_is_undecided_or_does_not_apply(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shows = {
        "tp-size": diagnosis(Verdict.NOT_APPLICABLE),
        "ep-size": diagnosis(Verdict.INCONCLUSIVE),
    }
    _, ways = check(monkeypatch, tmp_path, shows)
    assert "tp-size" not in ways
    assert (ways["ep-size"].holds, ways["ep-size"].text) == (None, "because")


def test_without_a_reference_nothing_applies(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    world, ways = check(monkeypatch, tmp_path, {}, refused="it draws random numbers")
    assert not ways and not world.names


def test_ways_that_share_batches_share_a_reference(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    world, _ = check(monkeypatch, tmp_path, {})
    references = [t for t in world.trials if isinstance(t.task, ReferenceTask)]
    assert len(references) == 5, (
        "shared batches, with batched_mm too, one token, or distinct ones with and without clipping"
    )


RIGHT = {0: [5, 2], 1: [7, 3, 2]}


@pytest.mark.parametrize(
    ("tokens", "error", "holds"),
    [
        (RIGHT, 1e-6, True),
        ({0: [5, 2], 1: [7, 7, 2]}, 0.1, False),
        (RIGHT, 0.1, False),
        (RIGHT, float("nan"), False),
        ({0: [5, 2]}, 1e-6, None),
    ],
)
def test_generated_tokens_and_logits_are_compared_with_those_of_one_process(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    tokens: dict[int, list[int]],
    error: float,
    holds: bool | None,
) -> None:
    class Generating(World):
        def one(self, trial: Trial, folder: Path) -> None:
            if trial.variant != "fsdp-size" or isinstance(trial.task, ReferenceTask):
                super().one(trial, folder)
                return
            for rank, given in tokens.items():
                Outcome(rank, tokens=given, reference_tokens=RIGHT[rank], logit_error=error).write(
                    folder
                )

    world = Generating({"fsdp-size": diagnosis(Verdict.INCONCLUSIVE)})
    monkeypatch.setattr(family_trials, "read_trial", lambda folder: folder)
    monkeypatch.setattr(family_trials, "diagnose", world.diagnose)
    launcher: Any = world
    outcome = launched.check(layouts.GENERATE, "alpha", launcher, tmp_path, 60.0)
    (way,) = [one for one in outcome.ways if one.way == "fsdp-size"]
    assert way.holds is holds
    assert way.confirmed is (holds is False)


@pytest.mark.parametrize(
    ("outcome", "holds"),
    [
        (Outcome(0, saved_compared=9), True),
        (Outcome(0, saved={"lm_head.weight": "holds rows 1, 0"}, saved_compared=9), False),
        (Outcome(0), None),  # nothing was compared
        (None, None),  # rank 0 left nothing
    ],
)
def test_what_ranks_saved_is_compared_with_the_checkpoint(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, outcome: Outcome | None, holds: bool | None
) -> None:
    class Saving(World):
        def one(self, trial: Trial, folder: Path) -> None:
            super().one(trial, folder)
            if trial.variant == "tp-size-saved" and not isinstance(trial.task, ReferenceTask):
                (folder / outcome_file(0)).unlink()
                if outcome is not None:
                    outcome.write(folder)

    world = Saving({"tp-size-saved": diagnosis(Verdict.INCONCLUSIVE)})
    monkeypatch.setattr(family_trials, "read_trial", lambda folder: folder)
    monkeypatch.setattr(family_trials, "diagnose", world.diagnose)
    launcher: Any = world
    found = launched.check(LAYOUTS, "alpha", launcher, tmp_path, 60.0)
    (way,) = [one for one in found.ways if one.way == "tp-size-saved"]
    assert way.holds is holds
    assert way.confirmed is (holds is False)
    controls = [t for t in world.trials if t.variant == "one-rank-tp-size-saved"]
    assert all(isinstance(t.task, (SaveTask, ReferenceTask)) for t in controls)
    if holds is False:
        assert way.what == "wrong-weights:saved"
        assert "1 of what was saved differ" in way.text and "holds rows 1, 0" in way.text
        assert controls, "one rank saves and loads"


def test_a_hang_of_generate_is_a_finding_whatever_was_generated(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    world = World({"fsdp-size": diagnosis(Verdict.HANG, "one-rank")})
    monkeypatch.setattr(family_trials, "read_trial", lambda folder: folder)
    monkeypatch.setattr(family_trials, "diagnose", world.diagnose)
    launcher: Any = world
    outcome = launched.check(layouts.GENERATE, "alpha", launcher, tmp_path, 60.0)
    (way,) = [one for one in outcome.ways if one.way == "fsdp-size"]
    assert (way.kind, way.confirmed) == ("hang", True)


def test_the_two_sizes_differ_and_the_trainer_repeats_its_batch() -> None:
    small, large = (WAY.trial("alpha", 0, size, 60.0).model for size in SIZES)
    assert small.by_rules and (small.hidden, large.hidden) == (32, 64)
    for way in TRAINER.ways:
        trial = way.trial("alpha", 0, SIZES[0], 60.0)
        assert trial.skew.batches == "repeated"
        cross_entropy = way.name.endswith("cross-entropy")
        assert trial.model.config.get("output_router_logits", False) is not cross_entropy


def test_names_of_ways_are_unique() -> None:
    for relation in layouts.RELATIONS.values():
        names = [way.name for way in (*relation.ways, relation.alone, relation.route)]
        assert len(set(names)) == len(names)
