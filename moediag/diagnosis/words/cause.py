"""Writes the sentence about a divergence or wrong gradients, with the names of the user's model.

Every function returns sentences about facts; unknown facts are not stated.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from moediag.diagnosis.blame.culprits import Blame
from moediag.diagnosis.end_states.whereabouts import program_line
from moediag.diagnosis.numbers.gradients import GradientFacts
from moediag.diagnosis.schedules.align import POINT_TO_POINT
from moediag.diagnosis.schedules.diverge import Divergence
from moediag.diagnosis.schedules.matching import wire_numel
from moediag.diagnosis.schedules.starvation import Starved, layer_name
from moediag.diagnosis.schedules.usual_order import Departure
from moediag.diagnosis.words.calls import (
    FEW,
    addressed,
    all_first,
    describe,
    first_few,
    sentence,
    sides,
)
from moediag.diagnosis.words.places import words
from moediag.evidence.model import Collective, Evidence
from moediag.protocol.tolerance import SAME_LOSS
from moediag.result.wording import (
    agreeing,
    by_value,
    capital,
    does,
    each_does,
    error_size,
    listed,
    on_each,
    plural,
    ranks,
)


def of_divergence(
    divergence: Divergence, blame: Blame, backend: str, died: bool, guarded: bool = False
) -> str:
    """Why the ranks' schedules diverged, and the consequence on this backend, or what the guard
    prevented."""
    calls = {rank: c for rank, c in divergence.calls.items() if c is not None}
    if divergence.kind == "missing":
        text = _missing(divergence, calls, blame, died)
    elif divergence.kind == "order":
        text = _order(divergence, calls, blame)
    elif divergence.kind == "splits":
        text = _splits(divergence, calls)
    elif divergence.kind in ("peer", "transfer"):
        text = _transfer(divergence, calls)
    elif blame.basis == "left-out":
        text = _left_out(calls, blame)
    elif blame.basis == "skipped":
        text = _skipped(calls, blame)
    else:
        text = _differing(divergence, calls, blame)
    step = min((c.step for c in calls.values()), default=0)
    if step > 1:
        text = f"In step {step}: {text[:1].lower() + text[1:]}"
    if blame.condition is not None:
        caught = blame.condition.side == "handler"
        apart = ranks(blame.culprits)
        why = f"where {apart} caught an exception" if caught else f"which singles out {apart}"
        text += f" One call is {words(blame.condition)}, {why}."
    if blame.contradicted:
        text += " Most ranks do the same; leaving them out is still wrong."
    if blame.excuse:
        text += f" {blame.excuse} It is not known which rank is at fault."
    return f"{text} {_consequence(divergence, calls, backend, died, guarded)}".rstrip()


def _left_out(calls: Mapping[int, Collective], blame: Blame) -> str:
    some = calls[blame.culprits[0]]
    by_fsdp = any(c.parameters_missing for c in calls.values()) and some.op == "reduce_scatter"
    if blame.starved:
        several = len({(s.rank, s.layer, s.expert) for s in blame.starved}) > 1
        text = (
            f"{starvation(blame.starved)}, so {'their' if several else 'its'} parameters have no "
        )
        text += "gradient there and "
        left = "FSDP2 leaves them out of the reduction"
        return sentence(
            text + (left if by_fsdp else f"{some.op} goes without them") + _share(calls, blame)
        )
    pieces = [
        f"{ranks([rank])} leaves {len(fqns)} of {plural(_whole(calls, rank), 'parameter')} out of "
        f"its {some.op}: {listed(fqns)}"
        for rank, fqns in first_few(sorted(blame.missing.items()))
    ]
    if by_fsdp:
        pieces.append(
            "they have no gradient there, and FSDP2 reduces only parameters that have one"
        )
    return sentence("; ".join(pieces))


def _share(calls: Mapping[int, Collective], blame: Blame) -> str:
    """``: 3 of 41 parameters, 1,536 elements``, if one rank differs from the others."""
    if len(blame.culprits) != 1:
        return ""
    rank = blame.culprits[0]
    most = max(wire_numel(c) for c in calls.values())
    shorter = most - wire_numel(calls[rank])
    text = f": {len(blame.missing[rank])} of {plural(_whole(calls, rank), 'parameter')}"
    return text + (f", {plural(shorter, 'element')} fewer" if shorter > 0 else "")


def _whole(calls: Mapping[int, Collective], rank: int) -> int:
    call = calls[rank]
    return max(
        len(call.parameters or ()) + len(call.parameters_missing),
        max(len(c.parameters or ()) for c in calls.values()),
    )


def _skipped(calls: Mapping[int, Collective], blame: Blame) -> str:
    text = f"{starvation(blame.starved)}, so {ranks(blame.culprits)} "
    text += "skips that expert" if len(blame.starved) == 1 else "each skip their own"
    return sentence(f"{text} and {agreeing('goes on', blame.culprits)}: {sides(calls)}")


def _differing(divergence: Divergence, calls: Mapping[int, Collective], blame: Blame) -> str:
    differ = {
        "op": "different operations meet",
        "members": "the members of a new group differ",
        "size": "sizes differ",
        "dtype": "dtypes differ",
        "reduce": "reductions differ",
        "root": "roots differ",
        "parameters": "different parameters meet in one operation",
    }[divergence.kind]
    on = "" if divergence.kind == "members" else f" on {divergence.group.label}"
    text = sentence(f"{differ}{on}: {sides(calls)}")
    return text + _inputs(divergence, calls) + _basis(blame)


def _inputs(divergence: Divergence, calls: Mapping[int, Collective]) -> str:
    """What each rank passes to an all-gather whose sizes differ, because the size above is the
    output's; or which root each rank takes."""
    if divergence.kind == "root":
        told = on_each({rank: f"rank {call.peer}" for rank, call in calls.items()})
        return f" The root is {', '.join(first_few(told))}."
    gathers = all(call.op == "all_gather" and not call.parameters for call in calls.values())
    passed = {rank: call.numel_in for rank, call in calls.items()}
    sizes = {*passed.values()}
    if divergence.kind != "size" or not gathers or len(sizes) < 2 or 0 in sizes:
        return ""
    told = each_does({rank: f"passes {n:,}" for rank, n in passed.items()})
    but = ", ".join(first_few(told))
    return f" all_gather needs inputs of equal size on all ranks, but {but} elements."


def _basis(blame: Blame) -> str:
    return {
        "peers": parted(blame),
        "habit": parted(blame),
        "none": " The evidence does not show which of them is wrong." + parted(blame),
    }.get(blame.basis, "")


def parted(blame: Blame) -> str:
    """Where culprits departed from the job's usual order."""
    pieces: dict[str, list[int]] = {}
    for one in blame.departures:
        pieces.setdefault(_departure(one), []).append(one.rank)
    return "".join(text.format(ranks(who)) for text, who in first_few(pieces.items()))


def _departure(one: Departure) -> str:
    """A sentence about it, with {} for the ranks."""
    call, usual = (describe(c).replace("{", "{{").replace("}", "}}") for c in (one.call, one.usual))
    if one.line:
        return f" In that line, {ranks(one.peers)} only ever called {usual}; {{}} called {call}."
    if one.peers:
        return (
            f" After the same calls, {ranks(one.peers)} called {usual}, where {{}} called {call}."
        )
    if one.after > one.every:
        often = f"{one.every} times in a row" if one.every > 1 else "once"
        return f" Until then, {call} always came {often} before {usual}; {{}} made it once more."
    return (
        f" Until then, {call} always came after {plural(one.every, 'call')} of {usual}; {{}} made "
        f"it after {one.after}."
    )


def _missing(
    divergence: Divergence, calls: Mapping[int, Collective], blame: Blame, died: bool
) -> str:
    waiting = ranks(calls)
    what = describe(next(iter(calls.values())))
    here = does(calls, f"{'was' if died else 'waits'} in {what} on {divergence.group.label}")
    if divergence.surplus:
        text = sentence(f"{waiting} called {what} on {divergence.group.label}, which "
                        f"{ranks(divergence.absent)} did not call")  # fmt: skip
        return f"{text} It met another call of equal size; from there on the ranks are out of step."
    if divergence.counts:
        return _left_over(divergence, calls, what)
    gone = ranks(divergence.absent)
    if blame.basis == "majority":
        return sentence(f"{here}; {gone} ended without that call, which no other rank makes")
    if blame.elsewhere:
        return sentence(f"{here}, but {gone} called it on {blame.elsewhere}, a group without it")
    if divergence.inferred and not blame.culprits:
        text = f"{here}; {gone} had no call open. It is not known which side is wrong"
        return sentence(text) + parted(blame)
    if divergence.inferred and blame.basis in ("peers", "habit"):
        return sentence(f"{here}, which {gone} did not reach") + parted(blame)
    if divergence.left and {*divergence.absent} == {*divergence.left}:
        how = " and ".join(dict.fromkeys(left.text for left in divergence.left.values()))
        return sentence(f"{here}, but {gone} ended by {how} without that call")
    if set(divergence.absent) == set(divergence.ended):
        return sentence(f"{here}, but {gone} reached the end without that call")
    return sentence(f"{here}, but {gone} never reached that call")


def _left_over(divergence: Divergence, calls: Mapping[int, Collective], what: str) -> str:
    """The counts of calls in a job that ended, and the first call that not all ranks made."""
    made = by_value(divergence.counts)
    counts = [
        f"{ranks(who)} {'made' if at == 0 else 'only'} {plural(count, 'call') if not at else count}"
        for at, (count, who) in enumerate(sorted(made.items(), reverse=True))
    ]
    text = sentence(f"on {divergence.group.label}, {', '.join(first_few(counts))}")
    text += f" The first that {ranks(divergence.absent)} did not make is {what}."
    failed = {rank: call.failed for rank, call in calls.items() if call.failed}
    for rank, message in first_few(failed.items()):
        text += f" It failed on rank {rank} ({message}), and the program continued."
    return text


def _order(divergence: Divergence, calls: Mapping[int, Collective], blame: Blame) -> str:
    return (
        sentence(f"ranks wait for each other in a circle: {sides(calls, with_group=divergence)}")
        + _whose_order(divergence, blame)
        + parted(blame)
    )


def _whose_order(divergence: Divergence, blame: Blame) -> str:
    if (first := all_first(divergence)) is not None:
        return f" All of them {first} first."
    if divergence.batched:
        return " That line sends and receives at once: one of them did not make the other's call."
    unknown = "" if blame.culprits else " The evidence does not show whose order is wrong."
    return f" They disagree about which of these comes first.{unknown}"


def _transfer(divergence: Divergence, calls: Mapping[int, Collective]) -> str:
    """A send or receive with another peer or tag, or made more or less often, than the others."""
    (one, mine), (two, theirs) = calls.items()
    like = ranks(divergence.agreeing)
    if divergence.kind == "transfer":
        made = divergence.counts
        few = f"{like.capitalize()} agree on {max(made.values())}"
        if divergence.odd == one:
            few = f"{like.capitalize()} agree on {made[two]}"
        if mine.op in POINT_TO_POINT:
            text = sentence(
                f"rank {one} waits in {addressed(mine)}: in this step its line made "
                f"{plural(made[one], 'call')}, and rank {two} made {made[two]} of "
                f"{addressed(theirs)}"
            )
        else:
            text = sentence(
                f"rank {one} waits in {describe(mine)} on {divergence.group.label}: that line made "
                f"{plural(made[one], 'call')} there, and {made[two]} on rank {two}, which is in "
                f"{describe(theirs)}"
            )
        return f"{text} {few}; rank {divergence.odd} alone differs."
    text = f"rank {one} called {addressed(mine)}, while rank {two} waits in {addressed(theirs)}"
    if divergence.odd is None:
        return sentence(f"{text}: their tags differ, so they never meet")
    usual = f"rank {two}" + (f" with tag {theirs.tag}" if mine.tag != theirs.tag else "")
    should = "send to" if mine.op == "send" else "receive from"
    text += f". Judging by what {like} do in that line"
    return sentence(f"{text}, rank {one} should {should} {usual}")


def _splits(divergence: Divergence, calls: Mapping[int, Collective]) -> str:
    order = divergence.group.ranks
    if not divergence.pairs:
        sent = sum(c.numel_in for c in calls.values())
        wanted = sum(c.numel_out for c in calls.values())
        return (
            f"In an all-to-all on {divergence.group.label} all ranks together send "
            f"{plural(sent, 'element')} and expect {wanted:,}. Which rank is wrong is not recorded."
        )
    if not any(calls[r].splits_in or calls[r].splits_out for p in divergence.pairs for r in p):
        totals = by_value({rank: made.numel_in for rank, made in calls.items()})
        (first, who), *others = totals.items()
        if others:
            text = does(who, f"sends {plural(first, 'element')} in all")
            text += "".join(f", {ranks(them)} {count:,}" for count, them in first_few(others))
            return sentence(f"{text}: equal splits need equal totals on {divergence.group.label}")
    pieces = [
        f"rank {i} sends rank {j} {_part(calls[i].splits_in, order.index(j))}, "
        f"but rank {j} expects {_part(calls[j].splits_out, order.index(i))} from it"
        for i, j in first_few(divergence.pairs)
    ]
    return sentence("; ".join(pieces))


def _part(splits: tuple[int, ...] | None, at: int) -> str:
    return plural(splits[at], "row") if splits and at < len(splits) else "an equal share"


def _consequence(
    divergence: Divergence,
    calls: Mapping[int, Collective],
    backend: str,
    died: bool,
    guarded: bool,
) -> str:
    ops = {c.op for c in calls.values()}
    if divergence.kind == "parameters":
        sizes = {wire_numel(c) for c in calls.values()}
        count = f" ({sizes.pop():,} elements each)" if len(sizes) == 1 else ""
        mixed = "parameters are mixed"
        if ops == {"reduce_scatter"} or ops == {"all_reduce"}:
            mixed = "gradients of different parameters are summed into each other"
        elif ops == {"all_gather"}:
            mixed = "shards of different parameters are put together as one weight"
        if guarded and ops <= {"reduce_scatter", "all_reduce"}:
            return f"The sizes agree{count}, so without the guard nothing would report an error."
        return f"The sizes agree{count}, so nothing reports an error here: {mixed}."
    if backend == "gloo" and died and divergence.kind in ("size", "op", "splits"):
        return "With gloo a rank aborts; on NCCL a hang is expected (not run here)."
    return ""


def out_of_step(evidence: Evidence, stopped: Iterable[int]) -> str:
    """Where ranks stopped after a divergence that was at first unnoticed."""
    last = {
        rank: evidence.ranks[rank].collectives[-1]
        for rank in stopped
        if rank in evidence.ranks and evidence.ranks[rank].collectives
    }
    if len({describe(call) for call in last.values()}) < 2:
        return " From there on the ranks are out of step."
    return f" From there on the ranks are out of step, and stopped where {sides(last)}."


def called_at(divergence: Divergence, blame: Blame, evidence: Evidence, told: str) -> str:
    """The lines that made the culprits' calls, or all ranks' calls if none is named, in a user's
    own job. Lines in ``told`` are left out. For a library's lines, also the program's lines that
    called it."""
    if not evidence.watched:
        return ""
    calls = {r: c for r, c in divergence.calls.items() if c is not None}
    chosen = {r: c for r, c in calls.items() if r in blame.culprits} or calls
    return _made_at(chosen, told) + _came_from(chosen, evidence, told)


def _made_at(chosen: Mapping[int, Collective], told: str) -> str:
    lines = {r: call.site for r, call in chosen.items() if call.site and call.site not in told}
    return "".join(
        f" {capital(ranks(who))} made {'that call' if len(who) == 1 else 'those calls'} at {site}."
        for site, who in first_few(by_value(lines).items())
    )


def _came_from(chosen: Mapping[int, Collective], evidence: Evidence, told: str) -> str:
    """The lines, by the stacks of ranks that still wait in the call."""
    waiting = evidence.stall.waiting if evidence.stall is not None else ()
    lines = {}
    for rank, call in chosen.items():
        line = program_line(evidence.ranks[rank])
        waits = rank in waiting and not call.completed
        if waits and line and line != call.site and line not in told:
            lines[rank] = f"got there from {line}"
    return "".join(f" {sentence(text)}" for text in first_few(each_does(lines)))


# ------------------------------------------------------------------------ pieces


def starvation(starved: Sequence[Starved]) -> str:
    """``on rank 1 expert 3 of layer 1 received 0 tokens (rank 0: 7)``, for each rank and block."""
    together: dict[tuple[int, str], list[Starved]] = {}
    for one in starved:
        together.setdefault((one.rank, one.layer), []).append(one)
    pieces = []
    for (rank, layer), those in first_few(list(together.items())):
        numbers = ", ".join(str(n) for n in sorted({s.expert for s in those}))
        noun = "expert" if len(those) == 1 else "experts"
        pieces.append(f"on rank {rank} {noun} {numbers} of {layer_name(layer)} received 0 tokens "
                      f"({_elsewhere(those)})")  # fmt: skip
    text = "; ".join(pieces)
    more = len(together) - FEW
    return f"{text}; and so on for {plural(more, 'more block')}" if more > 0 else text


def _elsewhere(starved: Sequence[Starved]) -> str:
    """What the other ranks sent: by rank where that is short, else the range."""
    if len(starved) == 1 and len(starved[0].others) <= FEW:
        return ", ".join(f"rank {rank}: {tokens:,}" for rank, tokens in starved[0].others)
    numbers = [tokens for one in starved for _, tokens in one.others]
    ends = {min(numbers), max(numbers)}
    who = {rank for one in starved for rank, _ in one.others}
    where = ranks(who) if len(who) == 1 else "other ranks"
    return f"{where}: " + " to ".join(f"{n:,}" for n in sorted(ends))


def of_gradients(facts: GradientFacts) -> str:
    """``18 of 69 parameters have wrong gradients in step 1, worst …``."""
    verb = "has a wrong gradient" if len(facts.wrong) == 1 else "have wrong gradients"
    own = "has" if len(facts.missing) == 1 else "have"
    text = f"in step {facts.step}, {len(facts.wrong)} of {plural(facts.compared, 'parameter')} "
    text += f"{verb} against the reference"
    if facts.missing:
        text += f" ({len(facts.missing)} {own} none on some rank)"
    if facts.worst is not None:
        text += f"; largest error {error_size(facts.error)} in {facts.worst}"
    text = sentence(text)
    if facts.loss_error is not None and facts.loss_error < SAME_LOSS:
        text += " The loss of that step is correct to five digits, so it does not show this."
    return text
