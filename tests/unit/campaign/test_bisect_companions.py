"""Blame when the companions changed too: every answer, against a known truth."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moediag.errors import StackError
from moediag.lab.campaign.bisect import state as states
from moediag.lab.campaign.bisect.companions import companions as module
from moediag.lab.campaign.bisect.companions.companion_answer import CompanionAnswer
from moediag.lab.campaign.bisect.companions.companions import Sides, who_is_to_blame
from moediag.lab.campaign.bisect.follow import Follow
from moediag.lab.campaign.bisect.probe_verdict import BAD, GOOD, ProbeVerdict, other, skip
from moediag.lab.campaign.bisect.question import Setting
from moediag.lab.campaign.bisect.search.corners import Blame
from moediag.lab.campaign.bisect.timeline import ProbeRecord
from moediag.lab.campaign.engine import Display
from moediag.lab.campaign.engine.journal import JOURNAL_FILE
from moediag.lab.campaign.executors import Maker
from moediag.lab.stacks.releases import Release
from tests.unit.bisect_fakes import TARGET, Fake, question

OLD = {"transformers": "4.1", "accelerate": "1.2.0", "tokenizers": "0.1", "idle": "1", "same": "7"}
NEW = {"transformers": "4.2", "accelerate": "1.8.0", "tokenizers": "0.2", "idle": "2", "same": "7"}
RELEASES = ("1.1.0", "1.2.0", "1.3.0", "1.4.0", "1.5.0rc1", "1.5.0", "1.6.0", "1.8.0", "1.9.0")

Truth = Callable[[Mapping[str, str]], ProbeVerdict]


class Lab(Fake):
    """``truth``: the verdict on an environment, by its pins; what they leave open is as in NEW."""

    def __init__(self, truth: Truth) -> None:
        super().__init__("GB")
        self.truth = truth

    def probe_on(self, setting: Setting, attempt: int) -> ProbeRecord:
        self.asked.append(setting)
        verdicts = [self.truth({**NEW, **request}) for request in setting.requests]
        first = next((v for v in verdicts if not v.text.startswith("no environment")), verdicts[0])
        return ProbeRecord(setting.name, first, attempt)


class World:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.old, self.new = dict(OLD), dict(NEW)
        self.lab: Lab | None = None
        self.ran = frozenset({"accelerate/a.py", "tokenizers/t.py"})

    def only_accelerate(self) -> None:
        """Only accelerate changes among the companions."""
        self.new["tokenizers"] = self.old["tokenizers"]

    def ready(self, request: Mapping[str, str]) -> Any:
        versions = self.old if request["transformers"] == self.old["transformers"] else self.new
        pins = tuple(f"{name}=={version}" for name, version in versions.items())
        return SimpleNamespace(resolution=pins, python=None)

    def installed(self, python: object, name: str) -> Any:
        file = {"accelerate": "a", "tokenizers": "t", "idle": "i"}.get(name)
        if file is None:
            raise StackError("not installed")
        return SimpleNamespace(files={f"{name}/{file}.py": "x"})

    def blame(self, truth: Truth, fixed: Mapping[str, str] | None = None) -> CompanionAnswer:
        old, new = truth(self.old), truth(self.new)
        turns = "bad" if new.kind == BAD.kind else "good"
        requests = tuple({"transformers": v["transformers"]} for v in (self.old, self.new))
        sides = Sides(
            "transformers", self.old["transformers"], self.new["transformers"], turns,
            (requests[0], requests[1]), (old, new), (self.ran, self.ran), fixed or {},
        )  # fmt: skip
        header = question("GB", 1).header(["moediag"])
        self.lab = lab = Lab(truth)
        there = (self.folder / JOURNAL_FILE).exists()
        opened = states.resume if there else states.create
        with opened(self.folder, header) as state:
            follow = Follow(state, Maker(lambda: lab), Display(), TARGET)
            return who_is_to_blame(sides, follow)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    found = World(tmp_path)
    monkeypatch.setattr(module.environment, "ready", found.ready)
    monkeypatch.setattr(module, "installed", found.installed)
    listed = [Release(v, prerelease="rc" in v) for v in RELEASES]
    monkeypatch.setattr(module.index, "releases", lambda name: listed)
    return found


def at_least(name: str, version: str) -> Callable[[Mapping[str, str]], bool]:
    wanted = [int(x) for x in version.split(".")]
    return lambda v: [int(x) for x in v[name].split(".")] >= wanted


package_new = at_least("transformers", "4.2")
accelerate_new = at_least("accelerate", "1.5.0")
tokenizers_new = at_least("tokenizers", "0.2")


def bad_if(condition: Callable[[Mapping[str, str]], bool]) -> Truth:
    return lambda versions: BAD if condition(versions) else GOOD


def good_if(condition: Callable[[Mapping[str, str]], bool]) -> Truth:
    return lambda versions: GOOD if condition(versions) else BAD


def test_the_package_alone_takes_two_probes(world: World) -> None:
    answer = world.blame(bad_if(package_new))
    assert answer.corners is not None and answer.corners.blame == Blame.PACKAGE
    assert answer.probes == 2 and answer.blamed == ()
    (text,) = answer.sentences()
    assert text.startswith("To blame: transformers alone; between the two environments accelerate")
    assert "idle" not in text and "same" not in text
    raw = answer.to_json()
    assert raw["blame"] == "package alone" and raw["changed_but_idle"] == ["idle"]
    assert len(raw["corners"]) == 4


@pytest.mark.parametrize(("truth", "turns"), [(bad_if, "bad"), (good_if, "good")])
def test_a_companion_alone_is_blamed_with_its_boundary(
    world: World, truth: Callable[..., Truth], turns: str
) -> None:
    world.only_accelerate()
    answer = world.blame(truth(accelerate_new))
    assert answer.corners is not None and answer.corners.blame == Blame.COMPANION
    assert [c.name for c in answer.blamed] == ["accelerate"]
    text = " ".join(answer.sentences())
    assert text.startswith("To blame: accelerate alone;")
    own = f"accelerate 1.5.0 is the first {turns} one beside transformers 4.1; 1.4.0 is not yet."
    assert own in text
    boundary = answer.to_json()["companion_boundary"]
    bad, good = ("1.5.0", "1.4.0") if turns == "bad" else ("1.4.0", "1.5.0")
    assert (boundary["bad"], boundary["good"], boundary["exact"]) == (bad, good, True)


def test_package_and_companion_are_blamed_together(world: World) -> None:
    world.only_accelerate()
    answer = world.blame(bad_if(lambda v: package_new(v) and accelerate_new(v)))
    assert answer.corners is not None and answer.corners.blame == Blame.TOGETHER
    text = " ".join(answer.sentences())
    assert "only transformers and accelerate together" in text
    assert "accelerate 1.5.0 is the first bad one beside transformers 4.2" in text


def test_either_package_or_companion_is_blamed(world: World) -> None:
    world.only_accelerate()
    answer = world.blame(bad_if(lambda v: package_new(v) or accelerate_new(v)))
    assert answer.corners is not None and answer.corners.blame == Blame.EITHER
    assert "either of transformers and accelerate" in answer.sentences()[0]


def test_several_companions_are_probed_together(world: World) -> None:
    answer = world.blame(bad_if(accelerate_new))
    assert answer.corners is not None and answer.corners.blame == Blame.COMPANION
    assert [c.name for c in answer.blamed] == ["accelerate", "tokenizers"]
    assert answer.boundary is None and answer.probes == 2
    first, second = answer.sentences()
    assert first.startswith("To blame: accelerate and tokenizers alone;")
    assert second == "The companions were tried together; which of them it takes is not known."
    assert (answer.to_json()["guilty"], answer.to_json()["minimal"]) == (
        ["accelerate", "tokenizers"], False,
    )  # fmt: skip


def test_another_failure_of_a_mixed_environment_is_undecided(world: World) -> None:
    def truth(versions: Mapping[str, str]) -> ProbeVerdict:
        if package_new(versions) != accelerate_new(versions):
            return other("crash:AttributeError")
        return BAD if package_new(versions) else GOOD

    answer = world.blame(truth)
    assert answer.corners is not None and answer.corners.blame == Blame.UNDECIDED
    assert "decided nothing (other (crash:AttributeError))" in answer.sentences()[0]


def test_conflicting_pins_are_left_to_the_resolver(world: World) -> None:
    """The new release cannot be installed beside old tokenizers, as releases often cannot."""

    def truth(versions: Mapping[str, str]) -> ProbeVerdict:
        if package_new(versions) != tokenizers_new(versions):
            return skip("no environment: transformers 4.2 needs tokenizers 0.2")
        return BAD if package_new(versions) else GOOD

    answer = world.blame(truth)
    assert answer.corners is not None
    verdicts = dict(answer.corners.verdicts)
    assert world.lab is not None
    mixed = next(s for s in world.lab.asked if s.requests[0]["transformers"] == "4.2")
    assert mixed.requests[0] == {**OLD, "transformers": "4.2"}
    assert mixed.requests[1] == {"transformers": "4.2", "accelerate": "1.2.0"}
    assert verdicts[module.Corner(True, False)] == BAD


def test_packages_without_a_function_that_ran_are_not_tried(world: World) -> None:
    world.ran = frozenset({"transformers/x.py"})
    world.new["accelerate"] = world.old["accelerate"]
    answer = world.blame(bad_if(package_new))
    assert answer.corners is None and answer.probes == 0
    (text,) = answer.sentences()
    assert text.startswith("To blame: transformers alone; of idle (1 to 2), tokenizers")
    assert text.endswith("no function ran.")
    world.new = {**OLD, "transformers": "4.2"}
    assert "nothing else differs" in world.blame(bad_if(package_new)).sentences()[0]
    world.ran, world.new = frozenset(), dict(NEW)  # the functions that ran are unknown
    assert len(world.blame(bad_if(package_new)).others) == 3


def test_a_finished_probe_is_not_repeated(world: World) -> None:
    world.only_accelerate()
    first = world.blame(bad_if(accelerate_new))
    assert world.lab is not None and world.lab.asked
    names = [s.name for s in world.lab.asked]
    assert len(set(names)) >= len(names) - 2, "but for the neighbours of the boundary"
    again = world.blame(bad_if(accelerate_new))
    assert world.lab.asked == []
    assert again == first


def test_held_companions_are_kept_and_a_missing_environment_is_reported(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.blame(bad_if(package_new), {"python": "3.12"})
    assert world.lab is not None
    assert all(r["python"] == "3.12" for s in world.lab.asked for r in s.requests)
    monkeypatch.setattr(module.environment, "ready", lambda request: None)
    (text,) = world.blame(bad_if(package_new)).sentences()
    assert "the environment of transformers 4.1 is not there any more" in text
