"""Finds what changed between the two releases of a boundary, from their installed packages and the
functions that the probes' trials ran. Offline: no index, no process."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from moediag import protocol
from moediag.errors import MoediagError
from moediag.evidence.model import RankEvidence, Stack
from moediag.evidence.trial_folder import read_trial
from moediag.lab.campaign.bisect.executed import Executed, read_executed
from moediag.lab.campaign.bisect.probe_verdict import Kind
from moediag.lab.campaign.bisect.signature_match import Target
from moediag.lab.campaign.bisect.suspects.functions import ChangedFunction, changed
from moediag.lab.campaign.bisect.suspects.installed_source import Package, compare, installed
from moediag.lab.campaign.bisect.suspects.ranking import Clues, named, ranked
from moediag.lab.campaign.bisect.suspects.suspects import Attribution
from moediag.lab.campaign.bisect.timeline import ProbeRecord
from moediag.lab.stacks import environment
from moediag.result import TrialResult, Verdict, read_result

INNERMOST = 3  # frames of a stack that count: the outer ones are in every stack
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_ROOTS = re.compile(r".*/(?:site-packages|dist-packages|torch-only)/")


def attribute(
    package: str,
    requests: Mapping[str, Mapping[str, str]],
    old: str,
    new: str,
    probes: Sequence[ProbeRecord],
    target: Target,
    folder: Path,
) -> Attribution:
    """Returns what changed between the releases ``old`` and ``new`` of ``package``. ``requests``:
    those of their environments; ``folder``: the bisect's, with the probes' runs. Never raises:
    ``problem`` says what is missing."""
    try:
        before, after = (_package(package, v, requests[v]) for v in (old, new))
        clues = _clues(probes, (old, new), target, folder, {*before.files, *after.files})
    except (MoediagError, OSError) as error:
        return Attribution(package, old, new, problem=getattr(error, "message", str(error)))
    differ = [
        file
        for file in {**after.files, **before.files}
        if after.files.get(file) != before.files.get(file)
    ]
    address = compare(after.repository or before.repository, old, new)
    found = Attribution(package, old, new, len(differ), compare=address)
    if not (clues.old or clues.new):
        return dataclasses.replace(found, problem="no trial noted which functions it ran")
    imported = [f for f in differ if f in clues.old.functions or f in clues.new.functions]
    changes, unread = _changes(before, after, imported)
    suspects = ranked(changes, clues)
    return dataclasses.replace(
        found,
        imported=len(imported),
        functions=len(changes),
        ran=sum(s.ran for s in suspects),
        suspects=tuple(suspects),
        unread=tuple(unread),
    )


def _package(name: str, version: str, request: Mapping[str, str]) -> Package:
    stack = environment.ready(request)
    if stack is None:
        raise MoediagError(f"the environment of {name} {version} is not there any more")
    return installed(stack.python, name)


def _changes(
    before: Package, after: Package, files: Iterable[str]
) -> tuple[list[ChangedFunction], list[str]]:
    found: list[ChangedFunction] = []
    unread = []
    for file in files:
        old = before.text(file) if file in before.files else None
        new = after.text(file) if file in after.files else None
        try:
            found += changed(file, old, new)
        except (SyntaxError, ValueError):  # written for a later Python than this one
            unread.append(file)
    return found, unread


# ------------------------------------------------------------------------ what the trials left


def ran(probes: Sequence[ProbeRecord], version: str, target: Target, folder: Path) -> Executed:
    """Returns what the deciding trial of ``version`` ran."""
    place = _trial(probes, version, target, folder)[2]
    return read_executed(place) if place else Executed()


def _clues(
    probes: Sequence[ProbeRecord],
    versions: tuple[str, str],
    target: Target,
    folder: Path,
    files: Container[str],
) -> Clues:
    sides: list[Executed] = []
    parameters: tuple[str, ...] = ()
    frames: tuple[tuple[str, int], ...] = ()
    for version in versions:
        kind, trial, place = _trial(probes, version, target, folder)
        sides.append(ran(probes, version, target, folder))
        if trial is not None and place is not None and kind == Kind.BAD:
            parameters, frames = _named(trial), tuple(_frames(trial, place, files))
    return Clues(parameters, frames, *sides)


def _trial(
    probes: Sequence[ProbeRecord], version: str, target: Target, folder: Path
) -> tuple[Kind | None, TrialResult | None, Path | None]:
    """Returns the last deciding trial of ``version`` with its folder: a second probe records which
    functions ran."""
    for record in reversed(probes):
        if record.version != version or not (record.verdict.decided and record.evidence):
            continue
        run = folder / record.evidence
        try:
            result = read_result(run)
        except (OSError, ValueError):
            continue
        for trial in result.trials:
            if trial.variant != target.variant or not trial.evidence:
                continue
            bad = record.verdict.kind == Kind.BAD
            if target.matches(trial.signature) if bad else trial.verdict == Verdict.CLEAN:
                return record.verdict.kind, trial, run / trial.evidence
    return None, None, None


def _named(trial: TrialResult) -> tuple[str, ...]:
    divergence = trial.diagnosis.first_divergence
    missing = [
        name
        for side in (divergence.ranks.values() if divergence else ())
        for name in side.parameters_missing
    ]
    module = divergence.module if divergence else ""
    return named(trial.diagnosis.worst_parameter, missing, trial.wrong_parameters, module)


def _frames(trial: TrialResult, folder: Path, files: Container[str]) -> Iterator[tuple[str, int]]:
    """Yields the innermost frames in ``files`` of exceptions and captured stacks: the culprits', or
    all ranks' if there is no culprit."""
    seen = read_trial(folder).ranks
    for rank in trial.culprits or tuple(seen):
        stacks = [[(f.file, f.line) for f in s.frames] for s in _stacks(seen.get(rank))]
        for stack in (*stacks, _raised(folder / protocol.error_file(rank))[::-1]):
            inside = [(_ROOTS.sub("", file), line) for file, line in stack]
            yield from [frame for frame in inside if frame[0] in files][:INNERMOST]


def _stacks(seen: RankEvidence | None) -> tuple[Stack, ...]:
    return seen.stacks if seen else ()


def _raised(path: Path) -> list[tuple[str, int]]:
    """Returns the traceback in torch elastic's error file, outermost first."""
    try:
        raw = protocol.read_json(path)
        text = str(raw["message"]["extraInfo"]["py_callstack"])
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return [(file, int(line)) for file, line in _FRAME.findall(text)]
