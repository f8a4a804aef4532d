"""The state file of a matrix: survives a kill at every byte, never goes on with another question,
takes more columns."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from moediag.campaign import journal
from moediag.campaign.matrix import state as states
from moediag.campaign.matrix.cells import Cell, Mode
from moediag.campaign.matrix.state import STATE_FILE, State, opened
from moediag.errors import EvidenceError, UsageError

HEADER: dict[str, Any] = {
    "package": "transformers", "Python": "3.11.7", "platform": "linux-x86_64", "torch": "2.13.0",
    "hold": {}, "ranks": 2, "device": "cpu", "launcher": "auto", "timeout": None,
    "command": ["moediag", "matrix", "s"],
}  # fmt: skip
DIGESTS = {"s a": "1"}
CELLS = (
    Cell("s a", "4.52.4", Mode.FAST, "not-susceptible", False, digest="1", seconds=0.5),
    Cell("s a", "4.53.0", Mode.REAL, "collective-mismatch", True, "c:one-rank", digest="1"),
    Cell("s a", "4.53.0", Mode.FAST, "susceptible", True, "step 1: rank 1 \u00b7 w", digest="1"),
)


def begun(folder: Path) -> State:
    return opened(folder, HEADER, DIGESTS, resume=False)


def again(folder: Path, **changes: Any) -> State:
    return opened(folder, {**HEADER, **changes}, DIGESTS, resume=True)


def written(folder: Path) -> bytes:
    with begun(folder) as state:
        for cell in CELLS:
            state.finished(cell)
    return (folder / STATE_FILE).read_bytes()


def test_what_is_written_is_read(tmp_path: Path) -> None:
    written(tmp_path)
    header, cells = states.read(tmp_path)
    assert tuple(cells.values()) == CELLS
    assert {name: header[name] for name in HEADER} == HEADER
    with again(tmp_path, command=["other"]) as state:
        assert tuple(state.cells.values()) == CELLS


def test_ended_at_any_byte_it_goes_on(tmp_path: Path) -> None:
    data = written(tmp_path)
    ends = [i + 1 for i, byte in enumerate(data) if byte == ord("\n")]
    for size in range(len(data) + 1):
        (tmp_path / STATE_FILE).write_bytes(data[:size])
        with again(tmp_path) as state:
            # A line whose newline alone is missing is whole.
            kept = max(0, sum(size >= end - 1 for end in ends) - 1)
            assert tuple(state.cells.values()) == CELLS[:kept]
            for cell in CELLS[kept:]:
                state.finished(cell)
        assert (tmp_path / STATE_FILE).read_bytes() == data


def test_a_cell_is_recorded_once(tmp_path: Path) -> None:
    with begun(tmp_path) as state:
        state.finished(CELLS[0])
        with pytest.raises(ValueError, match="done before"):
            state.finished(CELLS[0])


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("package", "accelerate", "its package is transformers, not accelerate"),
        ("Python", "3.12.1", "its Python is 3.11.7"),
        ("platform", "darwin-arm64", "its platform is"),
        ("torch", "2.15.0", "its torch is 2.13.0, not 2.15.0"),
        ("hold", {"accelerate": "1.15.0"}, "its hold is not given"),
        ("ranks", 4, "its ranks is 2, not 4"),
        ("device", "gpu", "its device is cpu"),
        ("launcher", "torchrun", "its launcher is auto"),
        ("timeout", 5.0, "its timeout is not given, not 5.0"),
    ],
)
def test_another_question_is_refused(tmp_path: Path, name: str, value: Any, text: str) -> None:
    data = written(tmp_path)
    with pytest.raises(UsageError, match=text):
        again(tmp_path, **{name: value})
    assert (tmp_path / STATE_FILE).read_bytes() == data


def test_another_scenario_under_the_same_name_is_refused_and_a_new_one_is_not(
    tmp_path: Path,
) -> None:
    written(tmp_path)
    with pytest.raises(UsageError, match="s a was another then"):
        opened(tmp_path, HEADER, {"s a": "2"}, resume=True)
    with opened(tmp_path, HEADER, {"s b": "2"}, resume=True) as state:
        state.finished(dataclasses.replace(CELLS[0], subject="s b", digest="2"))
    assert len(states.read(tmp_path)[1]) == 4


def test_neither_overwritten_nor_resumed_by_mistake(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no"):
        again(tmp_path)
    written(tmp_path)
    with pytest.raises(UsageError, match="was begun here"):
        begun(tmp_path)
    with again(tmp_path), pytest.raises(UsageError, match="another moediag"):
        again(tmp_path)


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("{}\n", "1: no header"),
        ('{"e":"header","schema_version":99}\n', "1: no header"),
        ("[1]\n{}\n", "1: not a JSON object"),
        ('{"e":"header","schema_version":1}\n{"e":"cell"}\n', "2: "),
    ],
)
def test_a_spoilt_file_is_named_with_its_line(tmp_path: Path, line: str, text: str) -> None:
    (tmp_path / STATE_FILE).write_text(line)
    with pytest.raises(EvidenceError, match=text):
        again(tmp_path)


def test_a_line_of_a_later_moediag_is_passed_over(tmp_path: Path) -> None:
    written(tmp_path)
    with (tmp_path / STATE_FILE).open("a") as file:
        file.write('{"e":"weather"}\n')
    assert len(states.read(tmp_path)[1]) == 3


def test_a_full_disk_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with begun(tmp_path) as state:
        state.finished(CELLS[0])
        real = journal.os.write
        monkeypatch.setattr(journal.os, "write", lambda fd, data: real(fd, data[:5]))
        with pytest.raises(EvidenceError, match="cannot be written"):
            state.finished(CELLS[1])
        monkeypatch.undo()
        assert len(state.cells) == 1
    assert tuple(states.read(tmp_path)[1].values()) == CELLS[:1]
