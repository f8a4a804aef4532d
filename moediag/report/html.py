"""One self-contained HTML page of one or several runs: no network, no JavaScript needed."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from importlib.resources import files

from jinja2 import Environment, FunctionLoader, StrictUndefined, Template
from markupsafe import Markup, escape

from moediag.report import tables
from moediag.report.charts import bars
from moediag.report.charts.error_map import error_map
from moediag.report.charts.number_bars import number_bars
from moediag.report.charts.rank_grid import LETTERS, rank_grid
from moediag.report.charts.token_map import token_map
from moediag.report.charts.wait_lanes import span, state, wait_lane
from moediag.report.finding import broken
from moediag.report.page import page_of
from moediag.report.printable import printable
from moediag.report.terminal import judgement_style, verdict_style
from moediag.result import RunResult, wording

LONGEST = 60  # characters of ranks that are not folded


def render(results: Sequence[RunResult]) -> str:
    """Returns the page; the template engine escapes everything that came from a run."""
    runs = [(page_of(result), result) for result in results]
    return printable(template("page.html.j2").render(runs=runs))


@functools.cache
def template(name: str) -> Template:
    environment = Environment(
        loader=FunctionLoader(_source), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.globals.update(
        error_size=wording.error_size,
        stack=wording.stack,
        rank_list=rank_list,
        rank_text=wording.ranks,
        style=verdict_style,
        judgement_style=judgement_style,
        broken=broken,
        table_grid=tables.grid,
        number_bars=number_bars,
        grid=rank_grid,
        time_bar=bars.time_bar,
        error_bar=bars.error_bar,
        token_map=token_map,
        error_map=error_map,
        wait_lane=wait_lane,
        wait_state=state,
        wait_span=span,
        letters=LETTERS,
    )
    return environment.get_template(name)


def _source(name: str) -> str:
    return files("moediag.report").joinpath(name).read_text(encoding="utf-8")


def rank_list(ranks: Sequence[int]) -> Markup:
    """Returns the ranks; many are folded, with the first of them and their number."""
    text = wording.ranks(ranks)
    if len(text) <= LONGEST:
        return escape(text)
    first = text[:LONGEST].rpartition(",")[0] or text[:LONGEST]
    return Markup("<details><summary>{} … ({} ranks)</summary>{}</details>").format(
        first, f"{len(set(ranks)):,}", text
    )
