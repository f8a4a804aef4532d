"""`moediag attach` on several machines: asks each for its evidence, and makes one page of it."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from datetime import datetime, timezone
from pathlib import Path

from moediag import protocol
from moediag.errors import EvidenceError, UsageError
from moediag.evidence import looks, nodes
from moediag.launch.attach import archives, machines
from moediag.launch.attach.collecting import AttachOptions
from moediag.launch.attach.machines import Answer, Machine
from moediag.pipeline.attach import Attached, judged
from moediag.pipeline.run_folder import run_folder
from moediag.records import dataclass
from moediag.result.wording import plural


@dataclass(frozen=True, slots=True)
class Part:
    """What one machine knows of one job."""

    machine: str
    folder: Path
    job: str
    """The same on all machines of the job."""


def attach(
    asked: str, of: Sequence[Machine], options: AttachOptions, slurm: str, out: Path | None,
    progress: Callable[[str], None],
) -> Attached:  # fmt: skip
    """Asks the machines ``of`` for their part of a job. ``asked``: the option that named them;
    ``slurm``: only ranks of this Slurm job. Raises UsageError if no machine, or no single job,
    was found."""
    started = datetime.now(timezone.utc)
    wanted = {"patience": options.patience, "local_values": options.local_values, "slurm": slurm}
    with tempfile.TemporaryDirectory(prefix="moediag-") as place:
        seconds = looks.BUSY * options.patience + machines.BEYOND
        answers = machines.ask(of, wanted, seconds, Path(place), progress)
        return page_of(answers, asked, out, [one.name for one in of], started)


def page_of(
    answers: Sequence[Answer], asked: str, out: Path | None, hosts: Sequence[str],
    started: datetime,
) -> Attached:  # fmt: skip
    """Judges what the machines ``hosts`` sent. Raises UsageError as :func:`attach`."""
    parts, lost = _received(answers)
    chosen = _one_job(parts, lost)
    trial = protocol.Trial.read(chosen[0].folder / protocol.TRIAL_FILE)
    folder = run_folder(out, f"attach-{trial.scenario}")
    _keep(chosen, folder / protocol.attempt_folder(0), lost)
    return judged(folder, trial, f"attach {asked}", started, hosts=hosts)


def _received(answers: Sequence[Answer]) -> tuple[list[Part], list[str]]:
    """The parts that were received, and why others were not."""
    parts: list[Part] = []
    lost = []
    for answer in answers:
        if answer.archive is None:
            lost.append(f"{answer.machine}: {answer.lost}")
            continue
        folder = answer.archive.with_suffix("")
        folder.mkdir()
        try:
            archives.extract(answer.archive, folder)
        except EvidenceError as error:
            lost.append(f"{answer.machine}: {error.message}")
            continue
        for file in sorted(folder.glob(f"*/*/{protocol.TRIAL_FILE}")):
            try:
                protocol.Trial.read(file)
                _reckon(file.parent, answer.after)
            except (OSError, ValueError):
                lost.append(f"{answer.machine}: its evidence is damaged")
                continue
            parts.append(Part(answer.machine, file.parent, nodes.job_of(file.parent)))
    return parts, lost


def _reckon(folder: Path, after: float) -> None:
    """Takes ``after``, the seconds between the first machine's answer and this one's, from the time
    for which ranks have waited: what counts is that they waited when the first were looked at.
    Raises ValueError if it is damaged."""
    seen = looks.read(folder)
    if seen is None:
        raise ValueError(protocol.LOOKS_FILE)
    ranks = {
        rank: replace(look, still=max(0.0, round(look.still - after, 1)))
        for rank, look in seen.ranks.items()
    }
    protocol.write_json(folder / protocol.LOOKS_FILE, asdict(replace(seen, ranks=ranks)))


def _one_job(parts: Sequence[Part], lost: Sequence[str]) -> list[Part]:
    """The parts of the only job, or of the only one on several machines."""
    if not parts:
        said = "\n".join(f"  {text}" for text in lost)
        raise UsageError(
            f"no training job was found on {plural(len(lost), 'machine')}:\n{said}",
            "A job of another user can only be read as that user, or as root.",
        )
    together: dict[str, list[Part]] = {}
    for part in parts:
        together.setdefault(part.job, []).append(part)
    several = [group for group in together.values() if len({p.machine for p in group}) > 1]
    candidates = several if len(several) == 1 else list(together.values())
    if len(candidates) > 1:
        said = "\n".join(f"  {_described(group)}" for group in candidates)
        raise UsageError(
            f"{len(candidates)} training jobs run on these machines:\n{said}",
            "Name fewer machines, or run `moediag attach PID` on one of them.",
        )
    return candidates[0]


def _described(group: Sequence[Part]) -> str:
    trial = protocol.Trial.read(group[0].folder / protocol.TRIAL_FILE)
    return f"{trial.scenario} on {', '.join(part.machine for part in group)}"


def _keep(parts: Sequence[Part], attempt: Path, lost: Sequence[str]) -> None:
    """Moves the parts into the folder of an attempt, as `moediag watch` on several nodes leaves
    it."""
    shutil.copytree(parts[0].folder, attempt)
    if lost:
        path = attempt / protocol.NOT_SEEN_FILE
        before = path.read_text("utf-8", "replace").splitlines() if path.exists() else []
        protocol.write_text(path, "\n".join([*lost, *before]))
    told = []
    for number, part in enumerate(parts):
        key = hashlib.sha256(f"{number} {part.machine}".encode()).hexdigest()[:16]
        seen = looks.read(part.folder)
        ranks = sorted({*seen.ranks, *seen.missing}) if seen is not None else []
        told.append({"key": key, "name": part.machine, "host": part.machine, "ranks": ranks,
                     "silent": None, "seen": True})  # fmt: skip
        if number:
            shutil.copytree(part.folder, attempt / protocol.NODES_FOLDER / key)
    if len(parts) > 1:
        raw = {"schema_version": nodes.SCHEMA_VERSION, "nodes": told}
        protocol.write_json(attempt / protocol.NODES_FILE, raw)
