"""Lines of a log that tell no rank and that nothing understands."""

from __future__ import annotations

from pathlib import Path

import pytest

from moediag.evidence import console_output, unmarked
from moediag.evidence.model import RankError

WENT_ON = "step 7 loss 2.1"
HUNG = [f"worker {n} is stuck" for n in range(7)]


def said(*numbers: int) -> list[str]:
    return [f'line {n} of job.log says: "worker {n - 1} is stuck"' for n in numbers]


@pytest.mark.parametrize(
    ("lines", "quoted"),
    [
        (["all is well"], []),
        (["all is well", "the run  timed out"], ['line 2 of job.log says: "the run timed out"']),
        (HUNG[:5], said(1, 2, 3, 4, 5)),
        (HUNG, said(1, 4, 5, 6, 7)),  # the first and the last ones
        ([*HUNG, WENT_ON], []),
        ([HUNG[0], WENT_ON, HUNG[2]], said(3)),
        ([f"is stuck {'x' * 400}"], [f'line 1 of job.log says: "is stuck {"x" * 291}"']),
        ([f"{'x' * 2000} is stuck"], []),
    ],
)
def test_lines_after_the_last_progress_are_quoted(
    tmp_path: Path, lines: list[str], quoted: list[str]
) -> None:
    log = tmp_path / "job.log"
    log.write_text("\n".join(lines))
    found = unmarked.quoted(log, log.read_text())
    assert [one.text for one in found] == quoted and {one.kind for one in found} <= {"quoted"}


def test_of_a_log_that_is_read_in_part_no_line_is_numbered(tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    limit = console_output.HEAD_BYTES + console_output.TAIL_BYTES
    log.write_bytes(b"x" * limit)
    assert unmarked.quoted(log, HUNG[0])[0].text.startswith("line 1 of")
    log.write_bytes(b"x" * (limit + 1))
    assert unmarked.quoted(log, HUNG[0])[0].text == 'job.log says: "worker 0 is stuck"'


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (RankError("KeyError", "a\n b.", "t.py:3 f"), "error", "KeyError at t.py:3 f: a b"),
        (RankError("KeyError", "", ""), "error", "KeyError"),
        (RankError("E", "b", "", after="handled"), "handled",
         "E: b; the log goes on with training after it"),
        (RankError("E", "x" * 400, ""), "error", f"E: {'x' * 297}"),
        (RankError("RuntimeError", "[gloo/x.cc:1] Connection reset by peer", ""), "lost",
         "RuntimeError: [gloo/x.cc:1] Connection reset by peer"),
    ],
)  # fmt: skip
def test_an_exception_without_a_rank(error: RankError, kind: str, text: str) -> None:
    found = unmarked.report(error)
    assert (found.kind, found.text) == (kind, text)
