"""Detectors of jobs that were only recorded, without measured numbers."""

from __future__ import annotations

from moediag.diagnosis.facts import Facts
from moediag.diagnosis.judgement import Judgement, detector, undecided
from moediag.diagnosis.laws import LAWS, replica_sets
from moediag.diagnosis.laws.law import recorded
from moediag.diagnosis.laws.parameters_apart import samples_divided, trains_own
from moediag.diagnosis.schedules.align import was_recorded
from moediag.diagnosis.words import cause, foreign_jobs, log_sentences
from moediag.diagnosis.words.calls import describe
from moediag.evidence.law_model import PLAIN
from moediag.evidence.model import Collective
from moediag.result import Confidence, Verdict, wording
from moediag.result.wording import plural, ranks


@detector(Verdict.REPLICA_DIVERGENCE)
def trained_alone(facts: Facts) -> Judgement | None:
    """Ranks of a watched job constructed an optimizer but never a process group, or share the
    samples and train models that began different."""
    evidence = facts.evidence
    if not evidence.watched:
        return None
    if any(map(was_recorded, evidence.ranks.values())):
        return _apart_from_the_start(facts)
    # None: the rank did not tell how it ended.
    optimizers = {rank: seen.alone or () for rank, seen in evidence.ranks.items()}
    if len(optimizers) < 2 or not all(optimizers.values()):
        return None
    names = ", ".join(sorted({name for own in optimizers.values() for name in own}))
    return Judgement(
        Confidence.MEDIUM,
        f"{ranks(optimizers).capitalize()} were started as one job (WORLD_SIZE is "
        f"{evidence.world_size}) and each constructed an optimizer ({names}), but none "
        f"created a process group: each rank trained alone, so this was "
        f"{plural(len(optimizers), 'separate training run')}, and nothing averaged their "
        "gradients.",
        pattern="no process group",
    )


def _apart_from_the_start(facts: Facts) -> Judgement | None:
    """That nothing averages models which began different, though the samples are divided."""
    laws = facts.of(recorded)
    told, step = samples_divided(facts)
    if not told or len(laws) < len(facts.evidence.ranks) or facts.of(trains_own):
        return None
    first = [own.checks[0] for own in laws.values() if len(own.checks) > 1]
    if len(first) < len(laws) or len({one.key for one in first}) > 1:
        return None
    # Biases of zeros are equal without any seed.
    pieces = enumerate(first[0].pieces)
    matrices = [at for at, one in pieces if one.how == PLAIN and "x" in one.shape]
    apart = [len({one.params[at] for one in first}) == len(first) for at in matrices]
    if not apart or not all(apart):
        return None
    return Judgement(
        Confidence.MEDIUM,
        f"{ranks(laws).capitalize()} each train a model of their own, with other values from the "
        f"beginning. {told}",
        pattern="not wrapped",
        next_step=step,
    )


@detector(Verdict.INCONCLUSIVE)
def no_records(facts: Facts) -> Judgement | None:
    """A job that was only recorded shows no failure; the evidence is too thin to rule one out."""
    evidence = facts.evidence
    known = sum(map(was_recorded, evidence.ranks.values()))
    if not evidence.foreign:
        text = "No rank was recorded, so nothing is known about this job."
        return undecided(text) if evidence.watched and not known else None
    calls = [call for seen in evidence.ranks.values() for call in seen.collectives]
    if calls and (2 * known > evidence.world_size or not all(call.completed for call in calls)):
        return None
    if calls:
        text = f"Calls of {known} of {evidence.world_size} ranks show no failure; the others were "
        text += "not seen."
    else:
        text = "The evidence shows no failure but is too thin to rule one out. "
        text += log_sentences.stacks(evidence)
    return undecided(text.rstrip(), foreign_jobs.next_step(evidence))


@detector(Verdict.CRASH)
def failed_calls(facts: Facts) -> Judgement | None:
    """Calls of a watched job failed, and the program ended normally all the same."""
    failed = [
        (rank, call)
        for rank, seen in sorted(facts.evidence.ranks.items())
        for call in seen.collectives
        if facts.evidence.watched and call.failed
    ]
    if not failed:
        return None
    firsts: dict[int, Collective] = {}
    for rank, call in failed:
        firsts.setdefault(rank, call)
    rank, call = min(firsts.items(), key=lambda one: one[1].time)
    text = (
        f"On rank {rank}, {describe(call)} on {facts.evidence.ranks[rank].on(call)} failed "
        f"({call.failed}), and the program continued without its result."
    )
    if len(failed) > 1:
        text += f" {plural(len(failed), 'call')} failed in all, on {ranks(firsts)}."
    return Judgement(
        Confidence.MEDIUM,
        f"{text} The evidence does not show which rank caused it.",
        pattern="failed call",
    )


@detector(Verdict.INCONCLUSIVE)
def open_calls(facts: Facts) -> Judgement | None:
    """Other tools recorded incomplete calls in a job that is not known to hang."""
    evidence = facts.evidence
    calls = (call for seen in evidence.ranks.values() for call in seen.collectives)
    if not evidence.foreign or all(call.completed for call in calls):
        return None
    if evidence.stall is None:
        text = "Some calls had not completed when this was recorded."
        return undecided(text, foreign_jobs.next_step(evidence))
    first, told = facts.divergence, ""
    if first is not None:
        told = cause.of_divergence(first, facts.blame, evidence.backend, died=False)
    text = foreign_jobs.under_way(facts.stuck, told, evidence.stall.at_once)
    return undecided(text, foreign_jobs.DUMP_AGAIN)


@detector(Verdict.INCONCLUSIVE)
def unknown_end(facts: Facts) -> Judgement | None:
    """It is not known how ranks of a watched job ended."""
    if not facts.evidence.watched or facts.evidence.foreign:
        return None
    recorded = {r: seen for r, seen in facts.evidence.ranks.items() if was_recorded(seen)}
    found = [
        rank
        for rank, seen in recorded.items()
        if not (seen.finished or (seen.exit is not None and seen.exit.code == 0))
    ]
    return undecided(f"How {ranks(found)} ended is not known.") if found else None


@detector(Verdict.CLEAN)
def healthy_job(facts: Facts) -> Judgement | None:
    """A job that was only recorded ended by itself, and its schedules agree."""
    evidence = facts.evidence
    if evidence.foreign:
        text, whole = foreign_jobs.of_records(evidence)
        return Judgement(Confidence.MEDIUM if whole else Confidence.LOW, text)
    if not evidence.watched:
        return None
    unknown = facts.unrecorded
    recorded = sorted(set(evidence.ranks) - set(unknown))
    laws = replica_sets.checked(facts) or wording.UNCHECKED
    if any(law.suspicious(facts) for law in LAWS):
        laws = "no law was broken, but something is suspicious"
    text = f"No hang, no crash; {laws}. "
    if evidence.world_size == 1:
        return Judgement(Confidence.HIGH, f"{text}The only rank finished normally.")
    steps = max(evidence.ranks[rank].last_step for rank in recorded)
    text += f"{ranks(recorded).capitalize()} finished normally after {plural(steps, 'step')}; "
    text += "their recorded schedules agree."
    if unknown:
        text += f" Nothing was recorded of {ranks(unknown)}."
    return Judgement(Confidence.MEDIUM if unknown else Confidence.HIGH, text)
