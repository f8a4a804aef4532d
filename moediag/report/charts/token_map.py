"""Tokens per expert and rank: darker is more, a dashed cell is none."""

from __future__ import annotations

from markupsafe import Markup

from moediag.report.charts import svg
from moediag.result import ExpertTokens, wording

ROW = 20  # pixels
MOST_NUMBERS = 12  # experts; numbers of more do not fit on a phone
MOST_NAMED = 4  # rows with an expert without a token that the label lists


def token_map(tokens: ExpertTokens) -> Markup:
    """Returns ranks as rows and experts as columns."""
    experts = max(map(len, tokens.counts), default=0)
    edges, width = svg.columns(experts)
    most = max((max(row, default=0) for row in tokens.counts), default=0) or 1
    titles = experts * len(tokens.counts) <= svg.MOST_TITLES
    every = -(-experts // MOST_NUMBERS) or 1
    parts = [svg.text("expert", 0, 13)]
    parts += [svg.text(str(e), edges[e] + width / 2, 13, "mid") for e in range(0, experts, every)]
    for number, (ranks, counts) in enumerate(zip(tokens.ranks, tokens.counts, strict=False)):
        y = ROW * (number + 1)
        parts.append(svg.text(_short(ranks), 0, y + 14))
        for expert, count in enumerate(counts):
            kind, shade = ("heat", 0.1 + 0.5 * count / most) if count else ("none", 1)
            cell = [svg.rect(kind, edges[expert], y + 1, width * 0.96, ROW - 2, shade)]
            if experts <= MOST_NUMBERS:
                cell.append(svg.text(str(count), edges[expert] + width / 2, y + 14, "mid"))
            named = f"{wording.ranks(ranks)}, expert {expert}: {wording.plural(count, 'token')}"
            parts.append(svg.titled(named, cell) if titles else Markup("").join(cell))
    return svg.chart(label(tokens), ROW * (len(tokens.counts) + 1), parts)


def _short(ranks: tuple[int, ...]) -> str:
    """``rank 3``; ``32-63`` for many."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}" if ranks else ""


def label(tokens: ExpertTokens) -> str:
    """Returns which experts got no token from which ranks."""
    none = []
    for ranks, counts in zip(tokens.ranks, tokens.counts, strict=False):
        if empty := [expert for expert, count in enumerate(counts) if not count]:
            who = f"{'some of ' * (len(ranks) > 1)}{wording.ranks(ranks)}"
            which = "experts" if len(empty) > 1 else "expert"
            none.append(f"{who} sent none to {which} {wording.spans(empty, ', ')}")
    more = len(none) - MOST_NAMED
    none[MOST_NAMED:] = [f"and {wording.plural(more, 'more row')}"] if more > 0 else []
    return f"Tokens per expert: {'; '.join(none) or 'every rank sent some to each expert'}"
