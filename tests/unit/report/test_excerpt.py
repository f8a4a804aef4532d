"""The user's own lines with what ranks did beside them."""

from __future__ import annotations

from moediag.report.excerpt import excerpt_lines, excerpt_of
from moediag.report.text_layout import plain
from moediag.result import PathLine

LINES = (
    PathLine("train.py", 51, "loss = model(batch)", (((0,), "waits in all_gather"),), indent=8),
    PathLine("train.py", 55, "if stop(loss):", (((0,), "false"), ((1,), "true")), indent=8),
    PathLine("train.py", 56, "break", (((1,), "alone came here"),), indent=12),
    PathLine("train.py", 58, "dist.barrier()", (((1,), "waits in barrier"),), indent=4),
)


def shown(lines: tuple[PathLine, ...], width: int) -> list[str]:
    return [plain(line).rstrip() for line in excerpt_lines(excerpt_of(lines), width)]


def test_lines_keep_their_order_and_relative_indentation() -> None:
    assert shown((LINES[3], *LINES[:3]), 80) == [
        " train.py",
        "  51 |      loss = model(batch)  rank 0 waits in all_gather",
        "  55 |      if stop(loss):       false on rank 0; true on rank 1",
        "  56 |          break            rank 1 alone came here",
        "  58 |  dist.barrier()           rank 1 waits in barrier",
    ]


def test_no_line_is_wider_than_the_terminal() -> None:
    long = PathLine("a.py", 1234, "x = " + "y" * 200, (((0, 1, 2), "waits in all_reduce " * 5),))
    for width in (40, 80, 120):
        assert max(map(len, shown((*LINES, long), width))) <= width


def test_a_line_of_both_sides_appears_once_and_files_apart() -> None:
    same = (
        PathLine("a.py", 7, "sync()", (((0,), "waits in barrier"),)),
        PathLine("a.py", 7, "sync()", (((1,), "waits in all_reduce"),)),
        PathLine("b.py", 3, "if x:", (), certain=False),
    )
    assert shown(same, 90) == [
        " a.py",
        "  7 |  sync()  rank 0 waits in barrier; rank 1 waits in all_reduce",
        " b.py",
        "  3 |  if x:  perhaps here",
    ]


def test_nothing_is_shown_without_lines() -> None:
    assert shown((), 80) == []


def test_a_long_line_keeps_its_end() -> None:
    long = PathLine("a.py", 7, f"if {'x and ' * 30}rank == 0:", (((0,), "true"),))
    (line,) = shown((long,), 80)[1:]
    assert "if x and" in line and "rank == 0:  true on rank 0" in line and len(line) <= 80
