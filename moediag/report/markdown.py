"""Markdown for a step summary or an issue: the answer first, each finding folded below it.

GitHub drops a step summary beyond 1 MiB whole and refuses an issue body beyond 65,536
characters, so the text is kept below ``LIMIT`` by leaving out findings from the end, and says so.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from moediag.report import names
from moediag.report.finding import broken
from moediag.report.layout import plain
from moediag.report.model import RunResult
from moediag.report.page import Page, page_of
from moediag.report.terminal import finding_lines

LIMIT = 65_000  # characters; below the 65,536 of an issue body
MARKS = {"met": "✅", "broken": "❌", "inconclusive": "❔"}


def render(results: Sequence[RunResult], limit: int = LIMIT) -> str:
    """At most ``limit`` characters, and never more bytes than a step summary takes."""
    pages = [page_of(result) for result in results]
    parts = [_summary(page, result) for page, result in zip(pages, results, strict=True)]
    details = [(i, text) for i, page in enumerate(pages) for text in _details(page)]
    note = "\n*{} left out here; `moediag report RUN… --html FILE` has them.*\n"
    used = sum(len(part) for part in parts) + len(note) + 20
    kept: dict[int, list[str]] = {}
    for i, text in details:
        if used + len(text) > limit:
            break
        kept.setdefault(i, []).append(text)
        used += len(text)
    out = "".join(part + "".join(kept.get(i, ())) for i, part in enumerate(parts))
    left = len(details) - sum(len(texts) for texts in kept.values())
    if left:
        out += note.format(names.plural(left, "finding"))
    return out if len(out) <= limit else out[: limit - 30] + "\n\n*cut at the size limit*\n"


def _summary(page: Page, result: RunResult) -> str:
    lines = [f"## {MARKS[page.status]} {_inline(page.scenario)}", ""]
    lines += [_inline(" · ".join(page.conclusion)), ""]
    if page.overrides:
        lines += [f"With `{' '.join(page.overrides)}`.", ""]
    lines += ["| trial | stack | verdict | expected | culprits | gradient error |"]
    lines += ["|---|---|---|---|---|---|"]
    for t in result.trials:
        cells = (
            t.variant,
            ", ".join(names.stack(t.stack)),
            t.verdict + (" ❌" if broken(t) else ""),
            t.expected,
            names.ranks(t.culprits) if t.culprits else "",
            names.error_size(t.gradient_error),
        )
        lines.append("| " + " | ".join(_inline(cell) for cell in cells) + " |")
    if page.fixes:
        lines += ["", "| fix | judgement | step time [quartiles] | |", "|---|---|---|---|"]
        for row in page.fixes:
            mark = "**cheapest correct**" if row.cheapest else ""
            remark = "; ".join(filter(None, (_inline(row.remark), *map(_inline, row.notes))))
            judgement = f"{row.judgement} ({row.verdict})"
            fix = (_inline(row.variant), _inline(judgement), row.cost)
            lines.append(f"| {' | '.join(fix)} | {' '.join(filter(None, (mark, remark)))} |")
    return "\n".join([*lines, "", ""])


def _details(page: Page) -> list[str]:
    """Each finding as a folded block, fenced by more backticks than it holds."""
    blocks = []
    for finding in page.findings:
        text = "\n".join(plain(line) for line in finding_lines(finding, 110, None))
        longest = max((len(run) for run in re.findall("`+", text)), default=0)
        fence = "`" * max(3, longest + 1)
        title = _html(f"{finding.title[1]}: {finding.verdict}")
        blocks.append(
            f"<details><summary>{title}</summary>\n\n{fence}text\n{text}\n{fence}\n\n</details>\n\n"
        )
    return blocks


def _html(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _inline(text: str) -> str:
    """Text that stays text in a table cell: no cell border, no tag, no emphasis."""
    flat = _html(" ".join(text.split()))
    return re.sub(r"([\\`*_\[\]|])", r"\\\1", flat)
