"""The hunt of a night: the newest transformers against the release before it.

A hunt that takes longer than a night is continued the next night, in the folder of the history.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import moediag
from moediag.errors import Interrupted, MoediagError, UsageError
from moediag.lab.campaign.engine import Display
from moediag.lab.campaign.engine.journal import JOURNAL_FILE
from moediag.lab.campaign.executors import HERE, Choice
from moediag.lab.campaign.hunt import session
from moediag.lab.campaign.hunt.findings import Finding, Hunt, State
from moediag.lab.campaign.hunt.findings_page import strongest
from moediag.lab.campaign.hunt.question import PACKAGE, PREVIOUS, Wanted
from moediag.lab.campaign.hunt.release_changes import changes, version
from moediag.lab.campaign.nightly.night import Found, Hunted, Night
from moediag.lab.campaign.nightly.tracks import Track

FOLDER = "hunt"
LONGEST = 120.0  # seconds for one cell


def hunted(
    tracks: Sequence[Track],
    history: Path,
    minutes: float,
    at_once: int,
    display: Display,
    executor: Choice = HERE,
    families: Sequence[str] = (),
) -> Hunted | None:
    """Continues the hunt for ``minutes``; None without a track of transformers. A failure other
    than Ctrl-C, which raises Interrupted, is part of what it returns."""
    releases = [track.version for track in tracks if track.package == PACKAGE and track.version]
    if not releases or minutes <= 0:
        return None
    # The pre-release comes last. accelerate is the same on both sides: one package moves.
    wanted = Wanted(
        releases[-1], tuple(families) or Wanted().families, stack={"accelerate": ""},
        timeout=LONGEST,
        at_once=executor.at_once(at_once), minutes=minutes, against=PREVIOUS,
    )  # fmt: skip
    try:
        found, folder = _continued(wanted, history / FOLDER, display, executor)
    except Interrupted:
        raise
    except MoediagError as error:
        return Hunted(releases[-1], problem=error.message)
    return of(found, str(folder))


def _continued(
    wanted: Wanted, folder: Path, display: Display, executor: Choice
) -> tuple[Hunt, Path]:
    """Resumes the hunt of an earlier night, or begins one if its question was another: other
    releases, another Python, another moediag."""
    for number in itertools.count(1):
        name = f"transformers-{wanted.release}-moediag-{moediag.__version__}-{number}"
        there = (folder / name / JOURNAL_FILE).exists()
        words = ["moediag", "hunt", "--release", wanted.release, "--against", wanted.against]
        words += ["--stack", "accelerate=newest", "--cpu", str(wanted.at_once)]
        try:
            return session.run(wanted, folder / name, there, words, display, executor)
        except UsageError:
            if not there:
                raise
    raise AssertionError


def of(found: Hunt, folder: str) -> Hunted:
    """Returns what a night keeps of a hunt. Pure."""
    assert found.before is not None
    differs = changes(found)
    return Hunted(
        version(found),
        version(found.before),
        _found(differs.appeared),
        _found(differs.gone),
        differs.same,
        len(differs.undecided),
        found.missing + found.before.missing,
        folder,
        added=differs.added,
    )


def _found(findings: Sequence[Finding]) -> tuple[Found, ...]:
    return tuple(
        Found(f.signature, f.families, f.ways, f.state != State.NEW, strongest(f).way.text)
        for f in findings
    )


def news(night: Night, earlier: Sequence[Night]) -> list[Found]:
    """Returns what appeared and is neither in the register nor in an earlier night. Pure."""
    if night.hunt is None:
        return []
    seen = {
        (found.signature, family)
        for before in earlier
        if before.hunt is not None and before.hunt.release == night.hunt.release
        for found in before.hunt.appeared
        for family in found.families
    }
    return [
        found
        for found in night.hunt.appeared
        if not found.registered and any((found.signature, f) not in seen for f in found.families)
    ]
