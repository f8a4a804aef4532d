"""What to change, or where to look next: one sentence for the user of a job that failed."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from moediag.diagnosis.blame.fork_sides import made_at
from moediag.diagnosis.blame.forks import Fork
from moediag.diagnosis.blame.standings import Standing, caught, dividing
from moediag.diagnosis.end_states.failures import Failure
from moediag.diagnosis.end_states.whereabouts import (
    COMPUTES,
    HOLDS_GIL,
    LOADS_DATA,
    STOPPED,
    busy_workers,
)
from moediag.diagnosis.schedules.diverge import Divergence
from moediag.diagnosis.words.calls import addressed, all_first, first_few
from moediag.diagnosis.words.paths import advice
from moediag.diagnosis.words.places import sends, words
from moediag.diagnosis.words.user_facts import unequal_batches
from moediag.evidence.model import UNTOLD, Collective, Condition, Evidence
from moediag.evidence.program_source import Program
from moediag.result import FAILURES, Verdict
from moediag.result.wording import agreeing, at_line, capital, does, on_each, plural, ranks

_ALL = ("world", "all ranks")  # labels of groups
_LOOPS = 2  # that are told, outermost first
# Raised by torch's handler of SIGCHLD, whatever the main thread does.
_LOADER_DIED = re.compile(r"DataLoader worker \(pid \d+\) is killed by signal")


def next_step(
    evidence: Evidence,
    verdict: Verdict,
    divergence: Divergence | None,
    failure: Failure | None,
    culprits: Sequence[int],
    found: Sequence[Standing],
    forked: Fork | None = None,
) -> str:
    """ "" if nothing more specific than the cause is known. ``found``: culprits first."""
    if verdict not in FAILURES or not (evidence.watched or evidence.foreign):
        return ""
    if failure is not None:
        return _after_failure(failure, culprits, evidence)
    if divergence is not None and divergence.kind in ("peer", "transfer"):
        return _alike(divergence, evidence)
    if divergence is not None:
        sure = forked is not None and len(forked.decisions) == 1 and not culprits
        if {call.op for call in divergence.calls.values() if call is not None} <= {"send", "recv"}:
            # A send and its receive are rightly under different conditions.
            paired = "Pair each send with a receive: these ranks wait for each other."
            if all_first(divergence) is not None:
                paired = "Let some of these ranks begin with the other of send and recv, or use "
                paired += "batch_isend_irecv."
            if culprits:
                paired = f"Find out why {ranks(culprits)} left the usual order of calls."
            return paired if divergence.kind == "order" else _diverged(divergence, found, evidence)
        return (
            (_caught(evidence, found) or _by_batches(evidence) or advice(forked) if sure else "")
            or _either(divergence, found, culprits)
            or _caught(evidence, found)
            or _split(divergence, found)
            or _parted(divergence, found)
            or _by_batches(evidence)
            or advice(forked)
            or _diverged(divergence, found, evidence)
        )
    busy = [one for one in found if {*one.ranks} & {*culprits}]
    waiting = next((one for one in found if one.call is not None), None)
    return _busy(busy[0], waiting, evidence) if busy else ""


# ------------------------------------------------------------------------ by the source


def _caught(evidence: Evidence, found: Sequence[Standing]) -> str:
    """The exception whose handler makes a call that the other ranks do not make."""
    inside = caught(found)
    if inside is None:
        return ""
    one, handler = inside
    error = evidence.ranks[one.ranks[0]].handling
    what = f"the {error.type}" if error is not None else "the exception"
    raised = f" at {error.where.partition(' ')[0]}" if error is not None and error.where else ""
    return (
        f"Fix {what} of {ranks(one.ranks)}{raised}, or make the call at {one.at} on all ranks: it "
        f"is {words(handler)}."
    )


def _parted(divergence: Divergence, found: Sequence[Standing]) -> str:
    """The condition that names a rank around the call that not all make."""
    for one in found:
        told = next((c for c in one.apart if c.names_rank), None)
        if told is not None and one.call is not None and one.line:
            return (
                f"{_every(divergence)} must reach {one.at} ({one.call.op}), or none: it is "
                f"{words(told)}."
            )
    return ""


def _split(divergence: Divergence, found: Sequence[Standing]) -> str:
    """The condition that sends ranks to different calls."""
    split = dividing([one for one in found if one.call is not None and one.line])
    if split is None:
        return ""
    return f"{sends(*split)}: {_all(divergence)} must make the same calls."


def _either(divergence: Divergence, found: Sequence[Standing], culprits: Sequence[int]) -> str:
    """Both sides of a mismatch of which none is known to be wrong, where a condition keeps a rank
    from one of them: the rank may be right not to come there, and the other call superfluous."""
    sides = [(one, one.call) for one in found if one.call is not None and one.line]
    telling = {
        one.ranks: next((c for c in one.apart if c.names_rank or c.side == "handler"), None)
        for one, _ in sides
    }
    if culprits or len(sides) < 2 or not any(telling.values()):
        return ""
    pieces = []
    for one, call in sides:
        condition = telling[one.ranks]
        why = f" ({words(condition)})" if condition is not None else ""
        pieces.append(f"the {call.op} of {ranks(one.ranks)} at {one.at}{why}")
    return _split(divergence, found) or (
        f"Either {' or '.join(first_few(pieces))} is out of place: {_all(divergence)} must make "
        "the same calls in one order."
    )


def _every(divergence: Divergence) -> str:
    label = divergence.group.label
    return "Every rank" if label in _ALL else f"Every rank of {label}"


def _all(divergence: Divergence) -> str:
    label = divergence.group.label
    return "all ranks" if label in _ALL else f"all ranks of {label}"


def _by_batches(evidence: Evidence) -> str:
    found = unequal_batches(evidence)
    if found is None:
        return ""
    at = found.line.partition(" ")[0]
    how = "drop_last, or an even split of the data"
    return f"Give all ranks the same number of batches at {at} ({how})."


# ------------------------------------------------------------------------ by the calls


def _diverged(divergence: Divergence, found: Sequence[Standing], evidence: Evidence) -> str:
    calls = {rank: call for rank, call in divergence.calls.items() if call is not None}
    lines = {rank: one.at for one in found for rank in one.ranks if one.call == calls.get(rank)}
    lines = {r: lines.get(r) or _line(call, evidence) for r, call in calls.items()}
    pair = {call.op for call in calls.values()} == {"send", "recv"}
    op = "send and recv" if pair else next(iter(calls.values())).op
    if divergence.surplus:
        made = next(filter(None, (lines[rank] for rank in calls)), "")
        return f"Make the call{made and f' at {made}'} on all ranks or on none."
    if divergence.kind == "missing":
        away = [one for one in found if {*one.ranks} & {*divergence.absent}]
        waiting = next((o for o in found if {*o.ranks} & {*calls} and o.line), None)
        return _busy(away[0], waiting, evidence) if away else ""
    if divergence.kind == "order":
        return f"Let {_all(divergence)} make these calls in one order: {_sites(calls, lines)}."
    if divergence.kind == "op" or (len(set(lines.values())) > 1 and not pair):
        perhaps = _skips([one for one in found if one.call in calls.values()], evidence)
        return f"Find out why ranks take different paths: {_sites(calls, lines)}.{perhaps}"
    if divergence.kind in _VALUES:
        advice, look = _VALUES[divergence.kind]
        alike = len({*lines.values()}) == 1 and all(lines.values())
        if divergence.kind == "size" and alike and _usual(calls, evidence):
            advice = f"Let {_all(divergence)} {_loop(lines, evidence)} in one order"
        return f"{advice.format(op)}: {_sites(calls, lines, look)}."
    if divergence.kind == "splits":
        at = next(iter(lines.values()))
        return f"Make what each rank sends match what the other expects{at and f', at {at}'}."
    return ""


def _usual(calls: Mapping[int, Collective], evidence: Evidence) -> bool:
    """Whether each rank has made calls of all these sizes in its line before."""
    sizes = {(call.numel_in, call.numel_out) for call in calls.values()}
    return all(
        sizes
        <= {
            (one.numel_in, one.numel_out)
            for one in evidence.ranks[rank].collectives
            if one.index < call.index and (one.op, one.site) == (call.op, call.site)
        }
        for rank, call in calls.items()
    )


def _loop(lines: Mapping[int, str], evidence: Evidence) -> str:
    """``run `for p in parameters` at train.py:10 over the same elements``: the loop around a line
    that makes calls of several sizes, if the source shows it."""
    rank, at = next(iter(lines.items()))
    known = evidence.ranks[rank].conditions.items()
    around = [c for line, those in known if line.partition(" ")[0] == at for c in those]
    loop = next((c for c in reversed(around) if c.side == "loop"), None)
    if loop is None:
        return "make the calls"
    return f"run `{loop.text}` at {loop.file}:{loop.line} over the same elements"


def _alike(divergence: Divergence, evidence: Evidence) -> str:
    """Which transfer to make as the other ranks do."""
    calls = {rank: call for rank, call in divergence.calls.items() if call is not None}
    lines = {rank: _line(call, evidence) for rank, call in calls.items()}
    sites = _sites(calls, lines, lambda call: addressed(call, call.op))
    if divergence.odd is None:
        return f"Use one tag for both: {sites}."
    who, like = f"rank {divergence.odd}", ranks(divergence.agreeing)
    if divergence.kind == "peer":
        return f"Give {who} the peer and tag that {like} have in that line: {sites}."
    return f"Let {who} make as many transfers as {like}: {sites}."


def _line(call: Collective, evidence: Evidence) -> str:
    """The innermost line of the program that made a call; a library's if none is known."""
    made = made_at(call, evidence.source_names)
    return f"{made[-1].file}:{made[-1].line}" if made else call.site.partition(" ")[0]


def _sites(
    calls: Mapping[int, Collective],
    lines: Mapping[int, str],
    look: Callable[[Collective], str] | None = None,
) -> str:
    """``all_reduce at train.py:9 on rank 0, barrier at train.py:12 on ranks 1, 2``."""
    told = {
        rank: f"{look(call) if look is not None else call.op}{at_line(lines[rank])}"
        for rank, call in calls.items()
    }
    return ", ".join(first_few(on_each(told)))


_VALUES: Mapping[str, tuple[str, Callable[[Collective], str]]] = {
    "members": (
        "Make the same groups in one order on all ranks",
        lambda call: f"{call.op} of {ranks(call.members or ())}",
    ),
    "size": (  # of what the rank passes, not of what it gets
        "Pass {} tensors of equal size on all ranks",
        lambda call: plural(call.numel_in or call.numel_out, "element"),
    ),
    "dtype": ("Use one dtype in {} on all ranks", lambda call: call.dtype),
    "reduce": ("Use one reduction in {} on all ranks", lambda call: call.reduce or "none"),
    "root": ("Use one root in {} on all ranks", lambda call: f"rank {call.peer}"),
}


# ------------------------------------------------------------------------ by what ranks do


def _busy(one: Standing, waiting: Standing | None, evidence: Evidence) -> str:
    """What to look at on ranks that others wait for."""
    who, at = ranks(one.ranks), f" at {one.at}" if one.line else ""
    if one.what == "finished":
        if waiting is None:
            end = capital(does(one.ranks, "ends earlier"))
            return f"Do all ranks run the same number of steps? {end}."
        return (
            f"Make the call at {waiting.at} on all ranks or on none: "
            f"{does(one.ranks, 'ends without it')}. Do all ranks {_repeats(waiting, evidence)}?"
        )
    if one.call is None and one.exact:
        wait = f" while others wait at {waiting.at}" if waiting is not None else ""
        return f"Do not end {who}{at}{wait}, or end all ranks there."
    if one.what == STOPPED:
        return f"Find out what stopped {who}; SIGCONT continues it."
    if one.what == LOADS_DATA:
        workers = busy_workers(evidence.ranks[one.ranks[0]])
        return f"Find out why {who} gets no batch{at}. {workers}".rstrip()
    if one.what == HOLDS_GIL:
        return f"Look at the native code that {who} runs{at}: it never releases the GIL."
    reach = f"comes to {waiting.at}" if waiting is not None and waiting.line else "continues"
    doing = one.what if one.what == COMPUTES else "stays"
    slow = "; if it just takes long, raise --patience" if one.what == COMPUTES else ""
    return f"Find out why {who} {doing}{at} and never {reach}{slow}."


def _repeats(waiting: Standing, evidence: Evidence) -> str:
    """What ranks must do alike: the loops around a call that other ranks ended without, and the
    conditions by which ranks leave a loop whose turns are the same on all."""
    loops = [c for c in waiting.conditions or () if c.side == "loop"]
    program = Program(evidence.sources, evidence.one_node)
    repeated, decided = [], []
    for loop in loops:
        even, leaves = _leaves(loop, program)
        if even:
            decided += leaves
        elif loop.text != "while True":
            repeated.append(f"`{loop.text}` at {loop.file}:{loop.line}")
    if not repeated and not decided:
        return "run the same number of steps"
    kinds = (
        ("decide {} the same way", [*dict.fromkeys(decided)]),
        (f"run the loop{'s' * (len(repeated) > 1)} {{}} the same number of times", repeated),
    )
    return " and ".join(text.format(" and ".join(of[:_LOOPS])) for text, of in kinds if of)


def _skips(sides: Sequence[Standing], evidence: Evidence) -> str:
    """The conditions on which a rank leaves a loop that all sides are in, or skips the rest of one
    of its turns: a rank may have done so long before its calls differed from those of others."""
    around = [[c for c in one.conditions or () if c.side == "loop"] for one in sides]
    shared = [c for c in around[0] if all(c in other for other in around)] if around else []
    program = Program(evidence.sources, evidence.one_node)
    told = [*dict.fromkeys(leaf for loop in shared for leaf in _leaves(loop, program)[1])]
    return (
        f" Do all ranks decide {' and '.join(told)} the same way?"
        if 0 < len(told) <= _LOOPS
        else ""
    )


def _leaves(loop: Condition, program: Program) -> tuple[bool, list[str]]:
    """See :meth:`.ProgramFile.leaves`."""
    file = program.file(loop.file)
    even, leaves = file.leaves(loop.line) if file is not None else (False, [])
    return even, [
        f"`{file.head(one)}` at {loop.file}:{one.lineno}" for one in leaves if file is not None
    ]


def _after_failure(failure: Failure, culprits: Sequence[int], evidence: Evidence) -> str:
    who = ranks(culprits) if culprits else "every rank"
    if _LOADER_DIED.search(failure.message):
        passes = evidence.ranks[failure.rank].batches
        at = f" at {passes[-1].line.partition(' ')[0]}" if passes and passes[-1].line else ""
        return (
            f"Find out what killed a worker of {who}'s data loader{at}: memory, /dev/shm or a "
            "crash. The exception was raised wherever the rank happened to be."
        )
    if failure.message or failure.where:
        at = f" at {failure.where.partition(' ')[0]}" if failure.where else ""
        return f"Fix the {failure.name} of {who}{at}."
    if failure.name == "SIGKILL":
        return f"Find out what killed {who}: see the kernel's log and the scheduler's."
    if failure.name == UNTOLD or failure.name.startswith("exit code"):
        left = evidence.ranks[failure.rank].left
        if left is not None:
            around = evidence.ranks[failure.rank].conditions.get(left.lines[0], ())
            why = [words(c) for c in around if c.side in ("under", "else", "handler")][-1:]
            ends = agreeing("ends there", culprits)
            return f"Find out why {who} {ends}: {', '.join([left.text, *why])}."
        return f"Look for os._exit or a kill from outside, and at the last output of {who}."
    return f"Look at the native stack of {who} in its output: {failure.name} left no exception."
