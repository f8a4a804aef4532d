"""Sentences about a job that does not train the same parameters as one process."""

from __future__ import annotations

from collections import defaultdict

from moediag.evidence.model import Evidence
from moediag.result.wording import listed, ranks


def of_otherwise(evidence: Evidence) -> str:
    """Which parameters are frozen or in no optimizer on one side only; "" where none is."""
    sentences = _sentences()
    found: dict[tuple[str, tuple[int, ...]], list[str]] = defaultdict(list)
    for how in sentences:
        on: dict[str, list[int]] = defaultdict(list)
        for rank, seen in sorted(evidence.ranks.items()):
            told = seen.outcome.trained_otherwise if seen.outcome is not None else {}
            for name in told.get(how, ()):
                on[name].append(rank)
        for name, where in on.items():
            found[how, tuple(where)].append(name)
    return " ".join(
        sentences[how].format(
            who=listed(names), do="do" if len(names) > 1 else "does", where=ranks(where)
        )
        for (how, where), names in found.items()
    )


def _sentences() -> dict[str, str]:
    from moediag.protocol.outcome import FROZEN, LEFT_OUT, THAWED

    return {
        FROZEN: "{who} {do} not require a gradient (requires_grad is False) on {where}, and {do} "
        "in one process.",
        THAWED: "{who} {do} not require a gradient in one process (requires_grad is False), and "
        "{do} on {where}.",
        LEFT_OUT: "No optimizer that stepped has {who}, on {where}; in one process one has.",
    }
