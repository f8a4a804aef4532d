"""The row of docs/extending/add-a-log-format.md, as it stands on the page, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from moediag.diagnosis import diagnose
from moediag.evidence import foreign, log_formats, log_reports, sources
from moediag.evidence.log_formats import FORMATS, Format
from moediag.result import Diagnosis, Verdict

ROOT = Path(__file__).parents[3]
LINE = "[rank0]: health check of rank{} timed out after 9000 ms\n"


def row() -> Format:
    page = (ROOT / "docs" / "extending" / "add-a-log-format.md").read_text(encoding="utf-8")
    code = re.search(r"```python\n(.*?)```", page, re.DOTALL)
    assert code is not None
    (made,) = eval(f"({code[1]})", dict(vars(log_formats)))
    assert isinstance(made, Format)
    return made


@pytest.fixture
def with_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    made = row()
    monkeypatch.setattr(log_reports, "FORMATS", (*FORMATS, made))
    monkeypatch.setitem(log_formats._MEANINGS, made.meaning.kind, made.meaning)


def diagnosed(folder: Path, text: str) -> Diagnosis:
    (folder / "train.log").write_text(f"[rank0]: step 1 loss 4.5\n{text}")
    return diagnose(foreign.evidence(sources.read([folder])))


@pytest.mark.usefixtures("with_the_row")
class TestWithTheRow:
    def test_the_rank_that_the_message_names_is_the_culprit(self, tmp_path: Path) -> None:
        found = diagnosed(tmp_path, LINE.format(" 3"))
        assert (found.verdict, found.culprits, found.victims) == (Verdict.HANG, (3,), (0,))
        assert found.cause == (
            "Rank 3 did not answer the health check within 9 s. Ranks after it were not asked."
        )

    def test_several_ranks(self, tmp_path: Path) -> None:
        found = diagnosed(tmp_path, LINE.format("s 2, 3"))
        assert found.culprits == (2, 3)
        assert "were not asked" not in found.cause

    def test_numbers_within_another_group_name_no_rank(self, tmp_path: Path) -> None:
        other = "[rank0]: [PG ID 2 PG GUID 4(ep) Rank 0] Heartbeat monitor timed out\n"
        found = diagnosed(tmp_path, LINE.format(" 3") + other)
        assert (found.verdict, found.culprits) == (Verdict.HANG, ())

    def test_a_log_without_the_message(self, tmp_path: Path) -> None:
        assert diagnosed(tmp_path, "[rank0]: health check ok\n").verdict == Verdict.INCONCLUSIVE


def test_without_the_row_the_message_says_nothing(tmp_path: Path) -> None:
    assert diagnosed(tmp_path, LINE.format(" 3")).verdict == Verdict.INCONCLUSIVE


def test_a_kind_has_one_meaning() -> None:
    """So a report's kind tells whom it puts at fault."""
    assert len({one.meaning for one in FORMATS}) == len({one.meaning.kind for one in FORMATS})


def test_who_is_named_has_a_sentence() -> None:
    said = {one.meaning.fault: bool(one.meaning.says) for one in FORMATS}
    assert {fault for fault, says in said.items() if says} == {
        "named", "lagging", "unnamed", "suspected",
    }  # fmt: skip
