"""A short text that is equal for the same failure and different for another one.

``verdict : what happened : axis : phase : why : pattern of ranks``. No part contains anything that
changes between repeats, world sizes, library releases or model sizes: no rank numbers, element
counts, line numbers, layer or expert numbers. Empty parts are left out.

- what happened: the kind of the first divergence and the operations on its sides; for a crash the
  exception's type (or the signal) with the user's file and function; for replicas what differs
  first;
- why: ``starved-expert``, ``left-out-parameters``, a decision on which ranks differed, or empty;
- pattern: ``one-rank``, ``several-ranks`` (both where "all" of two are "some" of four) or
  ``no-rank``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from moediag.diagnosis.blame.culprits import Blame
from moediag.diagnosis.end_states.failures import Failure
from moediag.diagnosis.schedules.diverge import Divergence
from moediag.result import FAILURES, Verdict


def signature(
    verdict: Verdict,
    divergence: Divergence | None,
    blame: Blame,
    failure: Failure | None,
    culprits: Sequence[int],
    pattern: str = "",
    decision: str = "",
) -> str:
    """The signature. ``divergence`` and ``failure`` are those that explain the verdict, else None;
    ``pattern`` is the word for the failure where neither does; ``decision`` is what ranks decided
    differently before the divergence."""
    parts = [str(verdict)]
    if pattern:
        parts.append(pattern)
    elif failure is not None:
        # ``modeling.py:120 forward`` -> ``modeling.py forward``: lines move between releases.
        parts += [failure.name, re.sub(r":\d+ ", " ", failure.where)]
    elif divergence is not None:
        operations = sorted({c.op for c in divergence.calls.values() if c is not None})
        parts += [f"{divergence.kind} {'|'.join(operations)}", divergence.group.axis or ""]
        phases = {c.phase for c in divergence.calls.values() if c is not None} - {"other"}
        parts += ["|".join(sorted(phases)), _why(blame) or decision]
    elif verdict in (Verdict.HANG, Verdict.WRONG_GRADIENTS, Verdict.COLLECTIVE_MISMATCH):
        parts.append("no divergence seen")
    if verdict in FAILURES:
        parts.append(
            ("no-rank", "one-rank")[len(culprits)] if len(culprits) < 2 else "several-ranks"
        )
    return ":".join(part for part in parts if part)


def _why(blame: Blame) -> str:
    if blame.starved:
        return "starved-expert"
    return "left-out-parameters" if blame.basis == "left-out" else ""
