"""Finds experts that received no token on a rank, by linking parameters to the routing.

``model.layers.1.mlp.experts.3.up_proj.weight`` belongs to expert 3 of the MoE block
``model.layers.1.mlp``, whose token counts the recorder wrote for each forward.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import field

from moediag.evidence.model import Evidence
from moediag.records import dataclass

_EXPERT = re.compile(r"^(?P<layer>.+)\.experts\.(?P<expert>\d+)(?:\.|$)")
_NUMBER = re.compile(r"(?:^|\.)(?:layers|layer|h|blocks|block)\.(\d+)(?=\.|$)")


@dataclass(frozen=True, slots=True)
class Starved:
    """``expert`` of ``layer`` received no token on ``rank``."""

    rank: int
    layer: str
    expert: int
    others: tuple[tuple[int, int], ...]
    """(rank, tokens) of the other ranks of the same schedule, where they are known."""


@dataclass(slots=True)
class Tokens:
    """Counts by (step, block): rank -> tokens per expert, summed over the step's forwards."""

    counts: dict[tuple[int, str], dict[int, list[int]]] = field(default_factory=dict)
    layers: set[str] = field(default_factory=set)

    def of(self, step: int, layer: str, expert: int) -> dict[int, int]:
        """Tokens of one expert by rank; empty when nothing was recorded."""
        by_rank = self.counts.get((step, self.block(layer)), {})
        return {rank: counts[expert] for rank, counts in by_rank.items() if expert < len(counts)}

    def block(self, layer: str) -> str:
        """The recorded name of the block ``layer``. Ranks may name their roots differently, and a
        module inside or around the block may record it."""
        if layer in self.layers:
            return layer
        near = [b for b in self.layers if b.startswith(layer + ".") or layer.startswith(b + ".")]
        near = near or [
            b for b in self.layers if b.endswith("." + layer) or layer.endswith("." + b)
        ]
        return near[0] if len(near) == 1 else layer

    def starved(
        self, rank: int, step: int, parameters: Iterable[str], among: Iterable[int]
    ) -> tuple[Starved, ...]:
        """The owners of ``parameters`` that got no token on ``rank`` in ``step`` while another rank
        of ``among`` sent them some."""
        members = set(among)
        found = []
        for layer, expert in experts_of(parameters):
            by_rank = self.of(step, layer, expert)
            others = tuple(sorted((r, n) for r, n in by_rank.items() if r != rank and r in members))
            if by_rank.get(rank) == 0 and any(n > 0 for _, n in others):
                found.append(Starved(rank, layer, expert, others))
        return tuple(found)

    def all_starved(self, step: int, layer: str, among: Iterable[int]) -> tuple[Starved, ...]:
        """Every expert of one block that some ranks of ``among`` starve and others do not."""
        members = set(among)
        by_rank = self.counts.get((step, self.block(layer)), {})
        width = max((len(counts) for counts in by_rank.values()), default=0)
        names = [f"{layer}.experts.{expert}" for expert in range(width)]
        return tuple(
            s for rank in sorted(members) for s in self.starved(rank, step, names, members)
        )


def tokens_of(evidence: Evidence) -> Tokens:
    tokens = Tokens()
    summed: dict[tuple[int, str], dict[int, list[int]]] = defaultdict(dict)
    for rank, seen in evidence.ranks.items():
        for line in seen.tokens:
            by_rank = summed[line.step, line.layer]
            before = by_rank.get(rank)
            if before is None or len(before) != len(line.counts):
                by_rank[rank] = list(line.counts)
            else:
                by_rank[rank] = [a + b for a, b in zip(before, line.counts, strict=True)]
            tokens.layers.add(line.layer)
    tokens.counts = dict(summed)
    return tokens


def expert_of(fqn: str) -> tuple[str, int] | None:
    """(block, expert) that owns a parameter; None if no single expert owns it."""
    match = _EXPERT.match(fqn)
    return (match["layer"], int(match["expert"])) if match else None


def experts_of(parameters: Iterable[str]) -> list[tuple[str, int]]:
    """The experts that own ``parameters``, each once, in order of appearance."""
    return list(dict.fromkeys(e for fqn in parameters if (e := expert_of(fqn)) is not None))


def layer_name(layer: str) -> str:
    """``model.layers.1.mlp`` -> ``layer 1``; the name itself if it has no layer number."""
    numbers = _NUMBER.findall(layer)
    return f"layer {numbers[-1]}" if numbers else layer
