"""Where Python waits and where the device is stuck: these differ, because Python runs ahead.

On an accelerator a call returns once it is queued. A rank whose stack shows ``clip_grad_norm_`` or
``.item()`` is at the first line that needed a result; the operation that does not complete was
queued earlier, perhaps by another layer. Both positions are reported, each with its source line.
"""

from __future__ import annotations

from moediag.diagnosis.end_states.whereabouts import program_line
from moediag.evidence.model import ISSUED, STARTED_THERE, Collective, Evidence, RankEvidence
from moediag.evidence.rank_stacks import in_collective, waits_for_device
from moediag.records import dataclass


@dataclass(frozen=True, slots=True)
class Front:
    """Where Python and the device are on one rank whose device is known."""

    rank: int
    stuck: Collective | None
    """The call that its device runs or has not reached; None where all completed."""
    label: str = ""
    begun: bool = False
    """The device is in that call."""
    timed: bool = False
    """Torch reports when calls begin, so a call without such a report has not begun."""
    behind: int = 0
    """Number of calls that Python issued after it."""
    at: str = ""
    """The line where Python is; "" without a stack."""
    waits: bool = False
    """Python waits for the device."""


def fronts(evidence: Evidence) -> tuple[Front, ...]:
    """One for each rank whose device is known; empty on the CPU or without Flight Recorder."""
    known = [
        s for _, s in sorted(evidence.ranks.items()) if any(c.on_device for c in s.collectives)
    ]
    timed = any(c.on_device == STARTED_THERE for s in known for c in s.collectives)
    return tuple(_front(seen, timed) for seen in known)


def _front(seen: RankEvidence, timed: bool) -> Front:
    open_ = [c for c in seen.collectives if c.on_device in (ISSUED, STARTED_THERE)]
    # Streams run in parallel: a call that began is where the device is, whatever is queued.
    begun = [c for c in open_ if c.on_device == STARTED_THERE]
    stuck = next(iter(begun or open_), None)
    label, behind = "", 0
    if stuck is not None:
        group = seen.groups.get(stuck.group)
        label = group.label if group else stuck.group
        behind = sum(c.index > stuck.index for c in seen.collectives)
    return Front(
        seen.rank, stuck, label, bool(begun), timed, behind,
        program_line(seen), waits_for_device(s for s in seen.stacks if not in_collective(s)),
    )  # fmt: skip
