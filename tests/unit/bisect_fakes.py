"""A bisect without releases, environments and ranks: known histories, probed by a
prober that only looks them up. Run as a program it is a bisect that can be killed."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from moediag.lab.campaign.bisect import state as states
from moediag.lab.campaign.bisect.drive import drive
from moediag.lab.campaign.bisect.probe_verdict import GOOD, ProbeVerdict
from moediag.lab.campaign.bisect.prober import Probed
from moediag.lab.campaign.bisect.question import Asked, Question, Setting
from moediag.lab.campaign.bisect.search.rates import Rate
from moediag.lab.campaign.bisect.search.search import Search
from moediag.lab.campaign.bisect.signature_match import Target
from moediag.lab.campaign.bisect.state import State
from moediag.lab.campaign.bisect.timeline import ProbeRecord
from moediag.lab.campaign.engine.display import Lines
from moediag.lab.campaign.engine.journal import JOURNAL_FILE
from moediag.lab.campaign.executors import Maker
from moediag.lab.scenario import catalogue, load
from moediag.lab.stacks.releases import Release
from tests.unit.bisect_worlds import KINDS

STARVED = "collective-mismatch:size reduce_scatter:one-rank"
TARGET = Target("unfixed", ("collective-mismatch",), (STARVED,), rate=Rate(3, 3))


def question(letters: str, bad: int, window: bool = True) -> Question:
    """Release ``1.N`` for letter N."""
    scenario = load.load(catalogue.find("expert-starvation"))
    releases = tuple(Release(f"1.{number}") for number in range(len(letters)))
    asked = Asked(window=window)
    return Question(
        scenario, "unfixed", "transformers", {}, releases, f"1.{bad}", None, "3.11", asked
    )


class Fake:
    """``seconds``: what a probe takes."""

    def __init__(self, letters: str, seconds: float = 0.0) -> None:
        self.letters = letters
        self.seconds = seconds
        self.prepared: list[str] = []
        self.asked: list[Setting] = []
        self.closed = self.stopped = False

    def probe(self, setting: Setting, attempt: int, target: Target | None) -> Probed:
        if setting.release is None:
            return Probed(self.probe_on(setting, attempt), target)
        record = self.of_release(setting.name, attempt)
        bad = self.letters[int(setting.name.split(".")[1])] == "B"
        found = target or (TARGET if bad else None)
        return Probed(record, found, "" if found else "it does not show")

    def of_release(self, version: str, attempt: int) -> ProbeRecord:
        verdict = self.look(int(version.split(".")[1]), attempt)
        time.sleep(self.seconds)
        return ProbeRecord(version, verdict, attempt, seconds=self.seconds)

    def look(self, index: int, attempt: int) -> ProbeVerdict:
        """Lower case: clean the second time it is probed, an intermittent failure."""
        letter = self.letters[index]
        return GOOD if letter.islower() and attempt > 1 else KINDS[letter.upper()]

    def probe_on(self, setting: Setting, attempt: int) -> ProbeRecord:
        """By the first letter of the source's file, see :mod:`tests.unit.tiny_clone`."""
        self.asked.append(setting)
        assert setting.source is not None
        (file,) = setting.source.glob("*/__init__.py")
        letter = file.read_text(encoding="utf-8").strip("# \n")[0]
        return ProbeRecord(setting.name, KINDS[letter], attempt, seconds=0.0)

    def prepare(self, settings: Sequence[Setting], hosts: bool = True) -> None:
        assert hosts
        self.prepared += [setting.name for setting in settings]

    def stop(self) -> None:
        self.stopped = True

    def close(self) -> None:
        self.closed = True


def opened(folder: Path, asked: Question) -> State:
    header = asked.header(["moediag", "bisect", "expert-starvation"])
    resume = (folder / JOURNAL_FILE).exists()
    return states.resume(folder, header) if resume else states.create(folder, header)


def bisect(
    folder: Path,
    letters: str,
    bad: int,
    jobs: int = 1,
    prober: Fake | None = None,
    said: list[str] | None = None,
) -> Search:
    """Runs to the answer, continuing from the state file in ``folder``."""
    asked = question(letters, bad)
    display = Lines((said if said is not None else []).append)
    with opened(folder, asked) as state:
        return drive(asked, state, Maker(lambda: prober or Fake(letters)), display, jobs)


def main(arguments: Sequence[str]) -> None:
    """FOLDER LETTERS BAD JOBS: prints the answer as the versions at its boundaries."""
    folder, letters, bad, jobs = arguments
    prober = Fake(letters, seconds=0.01)
    answer = bisect(Path(folder), letters, int(bad), int(jobs), prober).answer
    assert answer is not None
    print(json.dumps([[b.bad, b.good] for b in answer.boundaries]))


if __name__ == "__main__":
    main(sys.argv[1:])
