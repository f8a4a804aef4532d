"""Ranks by blame and final state."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup, escape

from moediag.result import RankState, wording

CELL = 26  # pixels of one rank's square, gap included
PER_ROW = 16
PER_NODE = 8  # ranks in a row, as far as a page has room for so many rows
MOST_LABELLED = 256  # beyond this many ranks, squares have no numbers
MOST_DRAWN = 32_768  # a square takes about 130 bytes of the page
LETTERS = {"waiting": "W", "elsewhere": "E", "failed": "X", "finished": "F", "unseen": "?"}


def rank_grid(
    world_size: int,
    culprits: Sequence[int],
    victims: Sequence[int],
    states: Sequence[RankState] = (),
) -> Markup:
    """Returns the ranks as an inline SVG, row by row, filled by blame, else by final state. Letters
    and colours show both. More than ``MOST_DRAWN`` ranks are a sentence."""
    per_row = PER_NODE if world_size <= 8 * PER_NODE else PER_ROW
    columns = min(world_size, per_row if world_size <= MOST_LABELLED else 64)
    cell = CELL if world_size <= MOST_LABELLED else 10
    rows = -(-world_size // max(columns, 1))
    label = (
        f"{world_size} ranks; culprits: {wording.ranks(culprits)}; "
        f"victims: {wording.ranks(victims)}"
    )
    if world_size > MOST_DRAWN:
        return Markup("<p>{}; too many ranks to draw</p>").format(label)
    width, height = columns * cell, rows * cell
    parts = [
        f'<svg class="grid" role="img" aria-label="{label}" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}">'
    ]
    guilty, waiting = set(culprits), set(victims)
    stood = {rank: state for state in states for rank in state.ranks}
    for rank in range(world_size):
        kind = "culprit" if rank in guilty else "victim" if rank in waiting else "other"
        state = stood.get(rank)
        x, y = rank % columns * cell, rank // columns * cell
        size = cell - 2
        classes = f"{kind} {state.kind}" if state is not None else kind
        title = f"rank {rank}: {kind}" + (f", {state.text}" if state is not None else "")
        parts.append(
            f'<g class="{escape(classes)}"><title>{escape(title)}</title>'
            f'<rect x="{x + 1}" y="{y + 1}" width="{size}" height="{size}" rx="3"/>'
        )
        if world_size <= MOST_LABELLED:
            mark = {"culprit": "C", "victim": "V", "other": ""}[kind]
            parts.append(
                f'<text x="{x + cell // 2}" y="{y + cell // 2 + 3}">{rank}</text>'
                f'<text class="mark" x="{x + cell - 6}" y="{y + 9}">{mark}</text>'
            )
            if state is not None:
                letter = LETTERS.get(state.kind, "")
                parts.append(f'<text class="mark" x="{x + 6}" y="{y + 9}">{letter}</text>')
        parts.append("</g>")
    # Only numbers, moediag's own words, and what is escaped above.
    return Markup("".join([*parts, "</svg>"]))  # noqa: S704
