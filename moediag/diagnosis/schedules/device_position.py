"""Where Python noticed, and where the device is stuck: two places, because a program runs ahead.

On an accelerator a call returns once it is queued. A rank whose stack shows ``clip_grad_norm_`` or
``.item()`` stands at the first line that needed a result; what does not complete is an operation
that was queued before, of another layer perhaps. Both are told, and whose line is which.
"""

from __future__ import annotations

from dataclasses import dataclass

from moediag.diagnosis.end_states.whereabouts import program_line
from moediag.evidence.model import ISSUED, STARTED_THERE, Collective, Evidence, RankEvidence
from moediag.evidence.rank_stacks import in_collective, waits_for_device


@dataclass(frozen=True, slots=True)
class Front:
    """One rank of which the device is known. ``stuck``: the call that its device is in (``begun``)
    or has not come to, None where all completed; ``timed``: somewhere torch told that a call began,
    so that here it did not; ``behind``: calls that Python issued after it; ``at``: where Python
    stands, "" where no stack tells; ``waits``: it waits for the device."""

    rank: int
    stuck: Collective | None
    label: str = ""
    begun: bool = False
    timed: bool = False
    behind: int = 0
    at: str = ""
    waits: bool = False


def fronts(evidence: Evidence) -> tuple[Front, ...]:
    """Empty where no device told anything: on the CPU, and without torch's Flight Recorder."""
    known = [
        s for _, s in sorted(evidence.ranks.items()) if any(c.on_device for c in s.collectives)
    ]
    timed = any(c.on_device == STARTED_THERE for s in known for c in s.collectives)
    return tuple(_front(seen, timed) for seen in known)


def _front(seen: RankEvidence, timed: bool) -> Front:
    open_ = [c for c in seen.collectives if c.on_device in (ISSUED, STARTED_THERE)]
    # Streams run side by side: one that began is where it stands, whatever else is queued.
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
