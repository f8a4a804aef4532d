"""Dataclasses from JSON files: types are checked, null and numbers that are not finite are kept."""

from __future__ import annotations

import errno
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import pytest

from moediag.protocol import build, natural, stored


@dataclass(frozen=True)
class Part:
    size: float
    name: str | None = "default"


@dataclass(frozen=True)
class Whole:
    rank: int
    parts: list[Part] = field(default_factory=list)
    by_rank: dict[int, tuple[str, ...]] = field(default_factory=dict)
    cell: str | bool | int | None = None


@pytest.mark.parametrize("times", [stored._STALE, stored._STALE + 1])
def test_a_stale_handle_is_opened_again(
    times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").write_bytes(b"content")
    left = [OSError(errno.ESTALE, "Stale file handle")] * times
    opened = stored.open_stored

    def opens(path: Path) -> BinaryIO:
        if left:
            raise left.pop()
        return opened(path)

    monkeypatch.setattr(stored, "open_stored", opens)
    if times > stored._STALE:
        with pytest.raises(OSError, match="Stale"):
            stored.read_stored(tmp_path / "a")
    else:
        assert stored.read_stored(tmp_path / "a") == b"content"


@pytest.mark.parametrize(
    ("text", "number"),
    [("12", 12), ("007", 7), ("", None), ("-1", None), ("²", None), ("9" * 5000, None)],
)
def test_a_short_text_of_digits_is_a_number(text: str, number: int | None) -> None:
    assert natural(text) == number


def test_nested_dataclasses_are_built() -> None:
    raw = {"rank": 1, "parts": [{"size": 2}], "by_rank": {"3": ["a"]}, "cell": True, "new": 0}
    assert build(Whole, raw) == Whole(1, [Part(2)], {3: ("a",)}, True)


def test_null_is_kept_where_a_field_allows_it_and_is_the_default_elsewhere() -> None:
    assert build(Part, {"size": 1.0, "name": None}).name is None
    assert build(Whole, {"rank": 0, "parts": None}).parts == []
    with pytest.raises(ValueError, match="size: None is not a number"):
        build(Part, {"size": None})


@pytest.mark.parametrize("text", ["nan", "inf", "-inf"])
def test_a_number_that_is_not_finite_is_text_in_json(text: str) -> None:
    found = build(Part, {"size": text}).size
    assert type(found) is float and not math.isfinite(found)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({}, "rank is missing"),
        ([], r"the file: \[\] is not an object"),
        ({"rank": True}, "rank: True is not a whole number"),
        ({"rank": "x" * 200}, "rank: 'x{59}… is not a whole number"),
        ({"rank": 0, "parts": [{"size": "1"}]}, r"parts\[0\].size: '1' is not a number"),
        ({"rank": 0, "cell": []}, r"cell: \[\] is not text or true or false or a whole number"),
        ({"rank": 0, "by_rank": {"x": []}}, "by_rank: 'x' is not a whole number"),
    ],
)
def test_a_wrong_value_is_named(raw: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(Whole, raw)


def test_a_file_without_an_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link may lead to a device, and a pipe may have no writer."""
    (tmp_path / "device").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "pipe")
    for name in ("device", "pipe", "."):
        with pytest.raises(OSError, match="not a regular file"):
            stored.read_json(tmp_path / name)
    (tmp_path / "large").write_bytes(b"1" * 9)
    assert stored.read_json(tmp_path / "large") == 111_111_111
    monkeypatch.setattr(stored, "MOST_BYTES", 8)
    with pytest.raises(OSError, match="larger than"):
        stored.read_json(tmp_path / "large")


def test_a_rename_that_was_done_and_reported_lost_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a network file system answers a repeated request."""
    rename = Path.replace

    def lost(self: Path, target: Path) -> None:
        rename(self, target)
        raise FileNotFoundError(2, "No such file or directory")

    def undone(self: Path, target: Path) -> None:
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(Path, "replace", lost)
    stored.write_json(tmp_path / "one", 1)
    monkeypatch.setattr(Path, "replace", undone)
    with pytest.raises(FileNotFoundError):
        stored.write_json(tmp_path / "one", 2)
    with pytest.raises(FileNotFoundError):
        stored.write_json(tmp_path / "other", 2)
    assert stored.read_json(tmp_path / "one") == 1
