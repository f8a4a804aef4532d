"""Values that must be equal on several ranks are equal: parameters, and numbers of optimizers."""

from __future__ import annotations

from moediag.diagnosis.facts import Facts
from moediag.diagnosis.laws.breach_words import hyper, of_breach, step_call
from moediag.diagnosis.laws.large_calls import averaged, carried
from moediag.diagnosis.laws.law import Broken, Findings, Suspicious, law, recorded
from moediag.diagnosis.laws.parameters_apart import of_apart, parameters_apart
from moediag.diagnosis.laws.unreduced_calls import lines_of, why_unreduced
from moediag.diagnosis.numbers.law_breaches import Breach, law_facts
from moediag.diagnosis.numbers.law_splits import GRADIENTS, HYPER, LOSS_SCALE, checks_of
from moediag.evidence.law_model import PART
from moediag.result import Verdict
from moediag.result.wording import UNCHECKED, agreeing, counted, plural, ranks


@law(Verdict.REPLICA_DIVERGENCE)
def replicas_apart(facts: Facts) -> Findings:
    """Values that a watched job must keep equal on several ranks differ: parameters of replicas, or
    numbers of their optimizer."""
    found = facts.of(law_facts)
    breach = found.breach
    names = breach.parameters.names if breach is not None and breach.parameters is not None else ()
    averages = facts.of(averaged) and carried(facts.evidence, names)
    alone = breach is not None and bool(why_unreduced(breach, facts))
    if breach is not None and ((averages and alone) or _equal_again(facts, breach)):
        again = "Before later updates of another optimizer they are equal."
        if averages and alone:
            again = "The program also averages or sends its parameters itself."
        yield Suspicious(f"{of_breach(breach)} {why_unreduced(breach, facts)} {again}")
    elif breach is not None:
        reason = breach.reason
        first = reason.what if reason is not None else "weights"
        yield Broken(
            f"{of_breach(breach)} {why_unreduced(breach, facts)} {_owners(facts, breach)}".rstrip(),
            pattern="initial weights" if breach.initial else first,
            next_step=_next_step(breach, facts),
            culprits=breach.odd,
            # A number may still become equal, and a program that reduces no gradients may average
            # the parameters later. One check does not show whether the program writes them itself.
            lasting=len(breach.history.moments) > 1 and breach.parameters is not None and not alone,
            beside=True,
            names=names,
        )
    if found.written is not None and breach is None and found.written.parameters is not None:
        names = found.written.parameters.names
        yield Suspicious(
            f"{counted(names)} of a wrapper without gradients {agreeing('differs', names)} between "
            "ranks: the program itself writes other values on each rank.",
            names,
        )
    apart = parameters_apart(facts)
    if apart is not None:
        yield of_apart(apart, facts)
    elif found.numbers is not None and breach is None:
        yield Suspicious(of_breach(found.numbers))


def _equal_again(facts: Facts, breach: Breach) -> bool:
    """Whether the parameters are equal in later updates of another optimizer: each rank moved them
    for itself, and the program put them back (MAML)."""
    if breach.parameters is None or breach.initial:
        return False
    names, alike = set(breach.parameters.names), list[bool]()
    for (key, step), by_rank in facts.of(checks_of).items():
        rows = [
            {p.name: v for p, v in zip(one.pieces, one.params, strict=False) if p.name in names}
            for rank, one in by_rank.items()
            if rank in breach.history.ranks
        ]
        later = key != breach.history.key and step > breach.step and rows[:1]
        if later and len(rows) == len(breach.history.ranks) and rows[0].keys() == names:
            alike.append(all(row == rows[0] for row in rows))
    return bool(alike) and all(alike)


def _owners(facts: Facts, breach: Breach) -> str:
    """Which optimizers have the first parameter that differs, if only some have it (ZeRO); or that
    FSDP1 reduces nothing."""
    if _in_shards_of_one(breach, facts):
        return (
            "HYBRID_SHARD was given shard groups of one rank: FSDP then takes NO_SHARD, and "
            "reduces gradients within these groups only."
        )
    if breach.parameters is None or breach.history.optimizer:
        return ""
    name = breach.parameters.names[0]
    who = [
        rank
        for rank, own in facts.of(recorded).items()
        if any(name in check.owned for check in own.checks)
    ]
    if not 0 < len(who) < len(breach.history.ranks):
        return ""
    return f"Only the optimizer of {ranks(who)} has {name}: its update did not reach the others."


def _in_shards_of_one(b: Breach, facts: Facts) -> bool:
    """Whether FSDP1 was told to divide the parameters within groups of one rank."""
    names = b.parameters.names if b.parameters is not None and not b.initial else ()
    pieces = (piece for own in facts.of(recorded).values() for piece in own.pieces)
    return {piece.part for piece in pieces if piece.name in names} == {"shard 0 of 1"}


def _next_step(b: Breach, facts: Facts) -> str:
    """What to change."""
    if _in_shards_of_one(b, facts):
        return "Divide over several ranks, or use DistributedDataParallel or FSDP2."
    unreduced = why_unreduced(b, facts)
    if unreduced and lines_of(facts, "bare"):
        return "Call the wrapper, not the model inside it, wherever gradients are computed."
    if unreduced:
        return "Leave no_sync for the last backward before each update."
    if not b.history.optimizer:
        return "Send every updated parameter from the rank that updates it to all others."
    if b.initial:
        return (
            "Load and initialise parameters identically on every rank, or before the model is "
            "wrapped, or broadcast them from one rank."
        )
    if b.counts is not None:
        return f"Call {step_call(b)} the same number of times on every rank."
    if b.reason is None:
        return (
            f"Look for what writes parameters after {step_call(b)}; `--laws-every 1` narrows it "
            "to one step."
        )
    if b.reason.what == HYPER and b.reason.names[0] == LOSS_SCALE:
        return (
            "Make one GradScaler decision on all ranks: use ShardedGradScaler with FSDP1; a plain "
            "GradScaler looks at each rank's own gradients."
        )
    if b.reason.what == HYPER:
        return f"Give {hyper(b.reason)} the same value on every rank."
    if b.reason.large:
        return (
            "Reduce these gradients over the ranks that hold the parameter, or give these ranks "
            "the same inputs and the same random state (dropout on replicated activations)."
        )
    if b.reason.what == GRADIENTS:
        return "Look for what changes gradients after their reduction, or leaves it out."
    return "Restore the optimizer's state in the same way on every rank."


def checked(facts: Facts) -> str:
    """What held, for a job without a failure; "" if no law was checked."""
    steps = facts.of(law_facts).checked
    if steps:
        return f"no law was broken in {plural(steps, 'checked step')}"
    hows = {piece.how for own in facts.of(recorded).values() for piece in own.pieces}
    if not hows:
        return ""
    why = ": no two ranks hold the same parameters" if hows == {PART} else ""
    return f"no law was broken, but {UNCHECKED}{why}"


def not_checked(facts: Facts) -> tuple[str, ...]:
    """Which replicas were not compared, and why."""
    return facts.of(law_facts).not_checked
