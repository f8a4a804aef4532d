"""`moediag verify`: compares the first steps of a distributed job with those of one process.

All runs are watched jobs whose ranks also measure. The distributed one runs first. The reference
then runs three times from its weights: twice alike, and once from weights that are changed by a
rounding error, which shows what rounding does in this model.
"""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from moediag.errors import UsageError
from moediag.evidence.trial_folder import read_trial
from moediag.launch import comparing
from moediag.masking import masked_command
from moediag.pipeline import watch as watcher
from moediag.pipeline.examine import result_of
from moediag.pipeline.measured_jobs import Compared, MeasuringOptions, measured_job
from moediag.pipeline.run_folder import run_folder
from moediag.pipeline.single_command import one_process, verify_command
from moediag.protocol import (
    Measured,
    MeasuredStep,
    MeasureRequest,
    Outcome,
    Trial,
    VerifyTask,
    read_measured,
)
from moediag.protocol.measured import IN_TURN, JOINED, coarsest_dtype, split_alike
from moediag.records import dataclass
from moediag.result import FAILURES, RunResult, TrialResult, Verdict

REFERENCES = ("reference-1", "reference-2", "reference-rounded")
MEASURED = "measured"  # in the folder of each run
_TRIED = "reference-tried"  # the first run of a reference that is made here
_Ran = tuple[str, Mapping[int, Measured]]  # why it measured nothing, or "", and what it measured
ATTEMPT = "attempt-0"  # in the folder of a step: its outcomes
EXAMPLE = "moediag verify --reference 'python train.py' -- torchrun --nproc-per-node 8 train.py"


def verify(command: Sequence[str], reference: Sequence[str], options: MeasuringOptions) -> Compared:
    """Runs ``command``, then ``reference``, and compares them. Without a reference it is the same
    command with one process. Raises UsageError if there is no such command, and Interrupted on
    Ctrl-C after the running job was ended."""
    made = not reference
    reference = list(reference) or one_process(command)
    if not reference:
        raise UsageError(
            "no reference can be made from this command: it starts with no known launcher",
            f"Give the command that trains in one process: {EXAMPLE}",
        )
    name = watcher.title(command)
    folder = run_folder(options.out, f"verify-{name}")
    options.tell(f"running the distributed job, {shlex.join(command)}")
    done = _run(command, folder, MeasureRequest(str(folder / MEASURED), options.steps), options)
    last = done.result.trials[-1]
    if last.verdict in FAILURES:
        return Compared(_written(folder, name, command, reference, last), folder)
    attempt = folder / last.evidence
    problem = _no_answer("the distributed run", folder, done)
    how = _How()
    if not problem:
        options.tell(_size(read_measured(folder / MEASURED)))
        problem, how = _references(reference, folder, options)
    if not problem:
        options.tell("comparing")
        problem = _compare(folder, attempt)
    found = _judge(folder, attempt, name, problem, last)
    if problem.startswith("the reference"):
        alone = shlex.join(masked_command(reference))
        advice = f"Run the reference by itself until it trains: {alone}"
        found = dataclasses.replace(
            found, diagnosis=dataclasses.replace(found.diagnosis, next_step=advice)
        )
    if made or how != _How():
        found = _told(found, reference, command, how)
    return Compared(_written(folder, name, command, reference, found), folder)


def conclude(folder: Path, name: str, problem: str) -> Compared:
    """Compares what `moediag.verify.step` has measured in ``folder``, and writes the result.
    ``problem``: why nothing can be compared, or ""."""
    attempt = folder / ATTEMPT
    attempt.mkdir()
    problem = problem or _compare(folder, attempt)
    result = watcher.of_job(name, [_judge(folder, attempt, name, problem)])
    result.write(folder)
    return Compared(result, folder)


def _run(
    command: Sequence[str], folder: Path, request: MeasureRequest, options: MeasuringOptions
) -> watcher.Watched:
    return measured_job(command, folder, request, options, EXAMPLE)


def _no_answer(who: str, folder: Path, done: watcher.Watched) -> str:
    """Why a run measured nothing; "" if it did, or says itself why it could not."""
    if any(one.steps or one.problems for one in read_measured(folder / MEASURED).values()):
        return ""
    last = done.result.trials[-1]
    if last.verdict in FAILURES:
        return f"{who} failed before its first step ({folder.name}): {last.cause}"
    if done.code:
        return f"{who} ended with exit code {done.code} before its first step"
    return (
        f"{who} took no step that moediag could see: it must train with an optimizer of "
        "torch.optim, under a Python that reads PYTHONPATH"
    )


@dataclass(frozen=True, slots=True)
class _How:
    """How the reference is made to see the samples that all ranks see together."""

    merged: int = 1
    """So many of its steps are made one."""
    replayed: str = ""
    """How it is given the samples of the ranks; "": it draws its own."""


def _ways(job: Mapping[int, Measured], tried: Mapping[int, Measured]) -> list[_How]:
    """Returns the ways to try, the best one first, by the first steps of the ranks and of the
    reference as it is; none if that does."""
    ranks = [one.steps[0] for one in job.values() if one.steps]
    single = next((one.steps for one in tried.values() if one.steps), [])
    alone = single[0] if single else None
    if alone is None or len(ranks) < len(job) or split_alike([r.total for r in ranks], alone.total):
        return []
    every, own = {row for one in ranks for row in one.samples}, {*alone.samples}
    fixed = any(one.clears for one in job.values())
    merged = _merged(ranks, single)
    if merged > 1 and not fixed and not _repeats(job):
        return [_How(merged)]
    # Ranks that saw the same samples share a model, or repeat each other's work.
    shared = sum(len({*one.samples}) for one in ranks) > len(every)
    drawn = {one.drawn for one in job.values()}
    if own == every or shared or len(drawn) > 1 or "" in drawn:
        return []
    merged, rest = divmod(len(job) * len(ranks[0].losses), len(alone.losses) or 1)
    found = [_How(merged, IN_TURN)] if merged and not rest and not fixed else []
    by_batch = any(one.across_samples for one in job.values())
    same = len({one.form for one in job.values()}) == 1
    if same and not by_batch and len(ranks[0].losses) == len(alone.losses):
        return [_How(1, JOINED), *found]
    return found


def _merged(ranks: Sequence[MeasuredStep], single: Sequence[MeasuredStep]) -> int:
    """Returns how many steps of one process have as many samples as one of the ranks: 1 if these
    are neither among the ranks' samples nor longer, or others as far as they are known."""
    counted, alone = Counter(row for one in ranks for row in one.samples), single[0]
    own = {*alone.samples}
    if not own or not counted or own >= counted.keys():
        return 1
    times, rest = divmod(len(counted), len(own))
    if own.isdisjoint(counted):
        copies = math.gcd(*counted.values())  # on ranks that share a model
        times, rest = divmod(sum(one.elements for one in ranks), (copies * alone.elements) or 1)
        if counted.total() * alone.elements <= sum(o.elements for o in ranks) * len(alone.samples):
            return 1  # their rows are not shorter than those of one process
        total = f"{sum(int(one.total or '0', 16) for one in single[:times]) % (1 << 64):x}"
        if times <= len(single) and not split_alike([one.total for one in ranks], total):
            return 1
    elif not own < counted.keys():
        return 1
    return times if not rest and times <= len(ranks) else 1


def _repeats(job: Mapping[int, Measured]) -> bool:
    """Whether ranks that average their gradients saw the same samples."""
    return any(
        job[rank].steps[0].samples == one.steps[0].samples
        for own, one in job.items()
        for rank in one.averages_over
        if rank != own and rank in job
    )


def _told(
    found: TrialResult, reference: Sequence[str], command: Sequence[str], how: _How
) -> TrialResult:
    """Says which reference was made, and what to type if it does not do."""
    text = f"the reference is {shlex.join(masked_command(reference))}"
    if how.replayed:
        text += "; it draws different samples, so it is given those of the ranks"
        text += ", in one batch" if how.replayed == JOINED else ""
    if how.merged > 1:
        text += f"; {how.merged} of its steps are made one, because a step of it has as many "
        text += "samples as that of one rank"
    diagnosis = dataclasses.replace(found.diagnosis, notes=(*found.diagnosis.notes, text))
    if found.verdict == Verdict.INCONCLUSIVE and "samples" in found.cause:
        advice = "Give a reference whose steps see the samples of all ranks (often a larger batch "
        advice += f"size): {verify_command(command, reference)}"
        diagnosis = dataclasses.replace(diagnosis, next_step=advice)
    return dataclasses.replace(found, diagnosis=diagnosis)


def _references(
    command: Sequence[str], folder: Path, options: MeasuringOptions
) -> tuple[str, _How]:
    """Runs the reference three times, and once before that to see its samples. Returns why it
    cannot be used, or "", and how it was run."""
    job = read_measured(folder / MEASURED)

    def run(
        name: str, how: _How, rounding: str | None = None
    ) -> tuple[str, Mapping[int, Measured]]:
        own = folder / name
        request = MeasureRequest(
            str(own / MEASURED), options.steps, str(folder / MEASURED), rounding, how.merged,
            how.replayed,
        )  # fmt: skip
        problem = _no_answer("the reference", own, _run(command, own, request, options))
        return problem, read_measured(own / MEASURED)

    first, how = folder / REFERENCES[0], _How()
    options.tell("running the reference, 1 of 3")
    problem, found = run(first.name, how)
    for number, way in enumerate(_ways(job, found)):
        first.rename(folder / f"{_TRIED}-{number}")
        options.tell("running the reference, 1 of 3, with the samples of all ranks in a step")
        how = way
        problem, found = run(first.name, way)
        if not problem and not any(one.problems for one in found.values()):
            break
    if problem or any(one.problems for one in found.values()) or not found:
        return problem, how
    rounding = coarsest_dtype([*job.values(), *found.values()])
    for number, change in ((2, None), (3, rounding)):
        options.tell(f"running the reference, {number} of 3")
        problem, found = run(REFERENCES[number - 1], how, change)
        if problem:
            break
    return problem, how


def _compare(folder: Path, attempt: Path) -> str:
    """Compares; returns why that failed, or ""."""
    job = folder / MEASURED
    runs = [folder / name / MEASURED for name in REFERENCES]
    python = next(one.python for one in read_measured(job).values())
    failed = comparing.compare(python, attempt, job, runs)
    return f"the comparison failed: {failed}" if failed else ""


def _judge(
    folder: Path, attempt: Path, name: str, problem: str, job: TrialResult | None = None
) -> TrialResult:
    """The diagnosis of the distributed run with what was measured. ``job``: what was found while it
    ran."""
    answers = read_measured(folder / MEASURED)
    ran_with = job.world_size if job is not None else 1
    size = max((one.world_size for one in answers.values()), default=ran_with) or 1
    if problem:
        for rank in range(size):
            Outcome(rank, incomparable=f"{problem.rstrip('.')}.").write(attempt)
    trial = Trial(
        name=attempt.name, scenario=name, variant="distributed", task=VerifyTask(),
        world_size=size, layout=_layout(answers, size), backend="", launcher="",
    )  # fmt: skip
    trial.write(attempt)
    evidence = read_trial(attempt)
    found = result_of(trial, evidence, attempt.name)
    seconds = job.seconds if job is not None else found.seconds
    return dataclasses.replace(found, backend=evidence.backend, world_size=size, seconds=seconds)


def _layout(answers: Mapping[int, Measured], size: int) -> dict[str, int]:
    """The axes of the meshes that parameters lie on, where they make up all ranks."""
    layout = {axis: n for one in answers.values() for axis, n in one.layout.items()}
    product = 1
    for n in layout.values():
        product *= n
    return layout if product == size else {}


def _size(answers: Mapping[int, Measured]) -> str:
    total = sum(one.size for one in answers.values())
    return f"the measurements take {total / 1e6:.1f} MB in the run directory"


def _written(
    folder: Path,
    name: str,
    command: Sequence[str],
    reference: Sequence[str],
    found: TrialResult,
) -> RunResult:
    asked = verify_command(command, reference).removeprefix("moediag ")
    result = dataclasses.replace(watcher.of_job(name, [found]), overrides=(asked,))
    result.write(folder)
    return result
