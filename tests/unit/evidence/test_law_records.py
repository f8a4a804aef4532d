"""The reader of the laws' log on what the recorder wrote, and on damaged files."""

from __future__ import annotations

import json
from pathlib import Path

from moediag.evidence.law_records import read_laws
from moediag.protocol import laws_file, older_laws_file

PIECES = {
    "e": "pieces", "id": 0, "optimizer": "SGD", "key": "k.0", "names": ["_orig_mod.a", "b"],
    "parts": ["", ""], "hows": ["reduced", "plain"], "in_set": [0, 1], "in_group": [0, 1],
    "sets": [[0, 1], []],
}  # fmt: skip


def event(step: int) -> dict[str, object]:
    return {
        "e": "check", "pieces": 0, "step": step, "count": step - 1, "clocks": [3, None],
        "params": ["1f", None], "grads": ["2f", ""], "state": {"momentum": ["3", None]},
        "hyper": [{"lr": "0.1"}, {"lr": "0.2"}], "nonfinite": ["b"], "nonfinite_grads": [],
        "scaler": False,
    }  # fmt: skip


def write(path: Path, *lines: object) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_checks_refer_to_their_pieces(tmp_path: Path) -> None:
    write(tmp_path / older_laws_file(0), PIECES, event(1))
    write(tmp_path / laws_file(0), PIECES, event(2))
    laws, lost = read_laws(tmp_path, 0)
    assert laws is not None
    assert not lost
    assert [check.step for check in laws.checks] == [1, 2]
    first = laws.checks[0]
    assert [piece.name for piece in first.pieces] == ["a", "b"]
    assert first.pieces[0].ranks == (0, 1)
    assert (first.grads, first.nonfinite) == (("2f", ""), ("b",))


def test_without_a_log_there_is_none(tmp_path: Path) -> None:
    assert read_laws(tmp_path, 0) == (None, ())


def test_a_truncated_line_is_skipped_and_damage_is_told(tmp_path: Path) -> None:
    path = tmp_path / laws_file(0)
    write(path, PIECES, event(1), {**event(2), "params": ["1"]}, {**event(2), "pieces": 7},
          {**event(2), "params": [[], "1"]}, {**event(2), "step": 1e999},
          {**event(2), "clocks": [[], None]}, {**PIECES, "shapes": ["4xa", ""]})  # fmt: skip
    path.write_text(path.read_text() + '{"e":"check","st')
    laws, lost = read_laws(tmp_path, 0)
    assert laws is not None
    assert [check.step for check in laws.checks] == [1]
    assert "unreadable" in lost[0]


def test_names_and_numbers_of_groups_are_text(tmp_path: Path) -> None:
    pieces = {**PIECES, "names": [["a"], "b"]}
    write(tmp_path / laws_file(0), pieces, {**event(1), "hyper": [{"nesterov": True}]})
    laws, _ = read_laws(tmp_path, 0)
    assert laws is not None
    assert laws.checks[0].pieces[0].name == "['a']"
    assert laws.checks[0].hyper == ({"nesterov": "True"},)
