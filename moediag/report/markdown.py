"""Markdown for a step summary or an issue: the answer, the tables of the run, then each finding
folded, with its own tables.

GitHub drops a step summary beyond 1 MiB whole and refuses an issue body beyond 65,536 characters.
So blocks are omitted from the end to stay below ``LIMIT``, and the text says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from moediag.report import tables
from moediag.report.finding import Finding, broken
from moediag.report.page import Page, page_of
from moediag.report.terminal import finding_lines
from moediag.report.text_layout import plain
from moediag.result import RunResult, wording

LIMIT = 65_000  # characters; below the 65,536 of an issue body
MOST_OPEN = 16  # rows; a longer table of the run is folded
MOST_ATTACHED = 4_000  # characters of another program's output


def render(results: Sequence[RunResult], limit: int = LIMIT) -> str:
    """Returns at most ``limit`` characters, and never more bytes than a step summary takes."""
    pages = [page_of(result) for result in results]
    parts = [_summary(page, result) for page, result in zip(pages, results, strict=True)]
    blocks = [(i, *block) for i, page in enumerate(pages) for block in _blocks(page)]
    note = "\n*{} left out here; `moediag report RUN… --html FILE` has them.*\n"
    used = sum(len(part) for part in parts) + len(note) + 20
    kept: dict[int, list[str]] = {}
    left = Counter(kind for _, kind, _ in blocks)
    for i, kind, text in blocks:
        if used + len(text) > limit:
            break
        kept.setdefault(i, []).append(text)
        left[kind] -= 1
        used += len(text)
    out = "".join(part + "".join(kept.get(i, ())) for i, part in enumerate(parts))
    if +left:
        out += note.format(" and ".join(wording.plural(n, kind) for kind, n in (+left).items()))
    return out if len(out) <= limit else out[: limit - 30] + "\n\n*cut at the size limit*\n"


def _summary(page: Page, result: RunResult) -> str:
    lines = [f"## {page.state.mark} {wording.inline(page.scenario)}", ""]
    lines += [wording.inline(" · ".join(page.conclusion)), ""]
    if page.overrides:
        lines += [f"With {wording.code(' '.join(page.overrides))}.", ""]
    lines += ["| trial | stack | verdict | expected | culprits | gradient error |"]
    lines += ["|---|---|---|---|---|---|"]
    for t in result.trials:
        cells = (
            t.variant,
            ", ".join(wording.stack(t.stack)),
            t.verdict + (" ❌" if broken(t) else ""),
            t.expected,
            wording.ranks(t.culprits) if t.culprits else "",
            wording.error_size(t.gradient_error),
        )
        lines.append("| " + " | ".join(wording.inline(cell) for cell in cells) + " |")
    if page.claims:
        lines += ["", "| claim | | |", "|---|---|---|"]
        for claim in page.claims:
            texts = (claim.variant, claim.judgement, claim.what)
            lines.append("| " + " | ".join(wording.inline(text) for text in texts) + " |")
    if page.fixes:
        lines += ["", "| fix | judgement | step time [quartiles] | |", "|---|---|---|---|"]
        for row in page.fixes:
            mark = "**cheapest correct**" if row.cheapest else ""
            remark = "; ".join(
                wording.inline(text) for text in (row.remark, row.described, *row.notes) if text
            )
            judgement = f"{row.judgement} ({row.verdict})"
            fix = (wording.inline(row.variant), wording.inline(judgement), row.cost)
            lines.append(f"| {' | '.join(fix)} | {' '.join(filter(None, (mark, remark)))} |")
    return "\n".join([*lines, "", ""])


def _blocks(page: Page) -> Iterator[tuple[str, str]]:
    """Yields what may be omitted, with its name, most important first."""
    for table in page.tables:
        if len(table.rows) <= MOST_OPEN:
            yield "table", tables.markdown(table)
        else:
            yield "table", _folded(table.title, tables.markdown(replace(table, title="")))
    for finding in page.findings:
        yield "finding", _folded(_title(finding), _finding(finding))
    for finding in page.tabled:
        yield "trial with tables", _folded(_title(finding), _markdown_tables(finding))


def _title(finding: Finding) -> str:
    return f"{finding.title[1]}: {finding.found.verdict}"


def _finding(finding: Finding) -> str:
    """Returns a finding in a fence longer than its backticks, with its tables below."""
    words = replace(finding, tables=())
    text = "\n".join(plain(line) for line in finding_lines(words, 110, None))
    return f"{fenced(text)}\n" + _markdown_tables(finding) + _attached(finding)


def _attached(finding: Finding) -> str:
    return "".join(
        _folded(title, f"{fenced(text[:MOST_ATTACHED])}\n")
        for title, text in finding.found.attached.items()
    )


def fenced(text: str, language: str = "text") -> str:
    """Returns ``text`` in a fence longer than its backticks."""
    fence = wording.backticks(text, 3)
    return f"{fence}{language}\n{text}\n{fence}\n"


def _markdown_tables(finding: Finding) -> str:
    return "".join(map(tables.markdown, finding.tables))


def _folded(title: str, text: str) -> str:
    head = wording.html(" ".join(title.split()))
    return f"<details><summary>{head}</summary>\n\n{text}</details>\n\n"
