"""The user's own lines, with what ranks did there beside them: laid out for a terminal here, for a
page by its template."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from moediag.records import dataclass
from moediag.report.text_layout import Line, wrap
from moediag.result import PathLine, wording

_NARROWEST = 16  # columns for code


@dataclass(frozen=True, slots=True)
class ExcerptLine:
    """One line of source."""

    number: int
    code: str
    """With the indentation that it has relative to the others."""
    acts: str
    """What ranks did there."""


@dataclass(frozen=True, slots=True)
class ExcerptFile:
    """Lines of one file, in the order of their numbers."""

    name: str
    lines: tuple[ExcerptLine, ...]


def excerpt_of(lines: Sequence[PathLine]) -> tuple[ExcerptFile, ...]:
    """Returns the files in the order in which ``lines`` name them; a line appears once."""
    files: dict[str, dict[int, list[PathLine]]] = {}
    for one in lines:
        files.setdefault(one.file, {}).setdefault(one.line, []).append(one)
    return tuple(
        ExcerptFile(name, tuple(_file_lines(by_number))) for name, by_number in files.items()
    )


def _file_lines(by_number: dict[int, list[PathLine]]) -> Iterator[ExcerptLine]:
    left = min(same[0].indent for same in by_number.values())
    for number, same in sorted(by_number.items()):
        text = " " * (same[0].indent - left) + same[0].text
        yield ExcerptLine(number, text, "; ".join(_acts(same)))


def _acts(lines: Sequence[PathLine]) -> Iterator[str]:
    """What ranks did in one line, each act once with all its ranks."""
    told: dict[str, set[int]] = {}
    for ranks, did in (act for line in lines for act in line.acts):
        told.setdefault(did, set()).update(ranks)
    for did, found in told.items():
        who, several = wording.ranks(found), sorted(found)
        short = did in ("true", "false")
        yield f"{did} on {who}" if short else f"{who} {wording.agreeing(did, several)}"
    if not all(line.certain for line in lines):
        yield "perhaps here"


def excerpt_lines(files: Iterable[ExcerptFile], width: int, indent: int = 1) -> Iterator[Line]:
    """Yields `` 51 | loss = model(batch)    rank 0 waits in all_gather`` below the file's name;
    what ranks did is wrapped in its own column."""
    for file in files:
        yield ((" " * indent, "plain"), (file.name, "label"))
        digits = max(len(str(line.number)) for line in file.lines)
        head = indent + digits + 5
        longest = max(len(line.code) for line in file.lines)
        code = min(longest, max((width - head) // 2, _NARROWEST))
        beside = width - head - code - 2
        for line in file.lines:
            text = _fitting(line.code, code)
            notes = wrap(line.acts, beside) if line.acts else [""]
            number = f"{line.number:>{indent + digits + 1}} | "
            for at, note in enumerate(notes):
                shown = text if at == 0 else ""
                left = number if at == 0 else " " * (len(number) - 2) + "| "
                yield (left, "faint"), (f" {shown:<{code}}  ", "plain"), (note, "doubt")


def _fitting(code: str, width: int) -> str:
    """``code`` in at most ``width`` columns: its begin and its end, where a condition often names
    the rank."""
    if len(code) <= width:
        return code
    end = (width - 1) // 3
    return f"{code[: width - 1 - end]}…{code[-end:]}"
