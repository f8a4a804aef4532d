"""One self-contained HTML page of one or several runs: no network, no JavaScript needed."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from importlib.resources import files

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup, escape

from moediag.report import bars, tables
from moediag.report.finding import broken
from moediag.report.page import page_of
from moediag.report.printable import printable
from moediag.report.terminal import judgement_style, verdict_style
from moediag.result import RankState, RunResult, wording

CELL = 26  # pixels of one rank's square, gap included
PER_ROW = 16
PER_NODE = 8  # ranks in a row, as far as a page has room for so many rows
MOST_LABELLED = 256  # beyond this many ranks, squares have no numbers
LETTERS = {"waiting": "W", "elsewhere": "E", "failed": "X", "finished": "F", "unseen": "?"}


def render(results: Sequence[RunResult]) -> str:
    """Returns the page; the template engine escapes everything that came from a run."""
    runs = [(page_of(result), result) for result in results]
    return printable(_template().render(runs=runs))


@functools.cache
def _template() -> Template:
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.globals.update(
        error_size=wording.error_size,
        stack=wording.stack,
        rank_list=wording.ranks,
        style=verdict_style,
        judgement_style=judgement_style,
        broken=broken,
        table_grid=tables.grid,
        grid=rank_grid,
        time_bar=bars.time_bar,
        error_bar=bars.error_bar,
        letters=LETTERS,
    )
    source = files("moediag.report").joinpath("page.html.j2").read_text(encoding="utf-8")
    return environment.from_string(source)


def rank_grid(
    world_size: int,
    culprits: Sequence[int],
    victims: Sequence[int],
    states: Sequence[RankState] = (),
) -> Markup:
    """Returns the ranks as an inline SVG, row by row, filled by blame, else by final state. Letters
    and colours show both."""
    per_row = PER_NODE if world_size <= 8 * PER_NODE else PER_ROW
    columns = min(world_size, per_row if world_size <= MOST_LABELLED else 64)
    cell = CELL if world_size <= MOST_LABELLED else 10
    rows = -(-world_size // max(columns, 1))
    label = (
        f"{world_size} ranks; culprits: {wording.ranks(culprits)}; "
        f"victims: {wording.ranks(victims)}"
    )
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
