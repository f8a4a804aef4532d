"""Files are read by expendable processes in a quick way, and nothing that they hold changes what
comes out, ends the reading or runs."""

from __future__ import annotations

import os
import pickle
import random
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moediag.evidence import file_loading, quickpickle, unpickle
from moediag.evidence.file_loading import load, loaded
from tests.unit.evidence.test_unpickle import SAMPLE, _Touch

RAW = SAMPLE.read_bytes()
keys = st.text() | st.integers(-(2**40), 2**40)
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**100), 2**100) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(keys, inner) | st.lists(inner).map(tuple),
    max_leaves=30,
)


@settings(max_examples=100, deadline=None)
@given(plain, st.sampled_from([2, 3, 4, 5]))
def test_both_machines_read_the_same(value: Any, protocol: int) -> None:
    assert quickpickle.loads(pickle.dumps(value, protocol)) == value


def test_a_real_dump_is_not_left_to_the_slow_one(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = unpickle.loads(RAW)
    monkeypatch.setattr(unpickle, "loads", None)
    assert quickpickle.loads(RAW) == expected
    lists = b"\x80\x02ctorch.jit._pickle\nbuild_intlist\n(](K\x01K\x02etR."
    assert quickpickle.loads(lists) == [1, 2]


@pytest.mark.parametrize("protocol", range(2, 6))
def test_nothing_runs(tmp_path: Path, protocol: int) -> None:
    raw = pickle.dumps({"entries": [_Touch(tmp_path / "made")]}, protocol)
    with pytest.raises(unpickle.Refused, match=r"(posix|nt)\.mkdir"):
        quickpickle.loads(raw)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    "raw",
    [
        b"\x80\x02Pkey\n.", b"\x80\x02NQ.", b"\x80\x02\x82\x01.", b"\x80\x02}]b.",
        b"\x80\x02N)\x81.",
        # The stand-in for torch's lists: called with something else, built, or given attributes.
        b"\x80\x02ctorch.jit._pickle\nbuild_intlist\nK\x01\x85R.",
        b"\x80\x02ctorch.jit._pickle\nbuild_intlist\n)\x81.",
        b"\x80\x02ctorch.jit._pickle\nbuild_intlist\n}(X\x01\x00\x00\x00aK\x01ub.",
        b"\x80\x02ctorch.jit._pickle\nbuild_intlist\nN}(X\x08\x00\x00\x00__call__Nu\x86b.",
    ],
)  # fmt: skip
def test_anything_but_plain_data_is_refused(raw: bytes) -> None:
    with pytest.raises(unpickle.Refused):
        quickpickle.loads(raw)


def test_text_that_nobody_can_print_is_mended_as_the_slow_one_does() -> None:
    raw = b"\x80\x02X\x03\x00\x00\x00\xed\xa0\x80."
    value = quickpickle.loads(raw)
    assert value == unpickle.loads(raw)
    value.encode()


# ------------------------------------------------------------------------ processes


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the size of the files, and as on a machine with two cores."""
    monkeypatch.setattr(file_loading, "_MUCH", 0)
    monkeypatch.setattr(file_loading, "_SECONDS", 0.5)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1})
    monkeypatch.setattr(threading, "active_count", lambda: 1)  # a test runner has its own


def files(folder: Path, *contents: bytes) -> list[Path]:
    paths = [folder / f"rank_{number}" for number in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    return paths


def damaged(seed: int) -> bytes:
    chance = random.Random(seed)
    data = bytearray(RAW)
    for _ in range(chance.randrange(1, 6)):
        data[chance.randrange(2, len(data))] = chance.randrange(256)
    return bytes(data[: chance.randrange(len(data))] if seed % 3 == 0 else data)


def test_damaged_dumps_give_the_same_result_as_in_one_process(
    tmp_path: Path, processes: None
) -> None:
    paths = files(tmp_path, RAW, *map(damaged, range(60)), b"a log\n", b'{"a": 1}')
    found = list(loaded(paths))
    assert found == [load(path) for path in paths]
    assert found[0].dump is not None and sum(bool(one.refused) for one in found) > 20


_PAIRS = b"\x80\x02)" + b"q\x00h\x00\x86" * 60 + b"q\x00}(h\x00K\x01u."
KILLERS = {
    "keys that take for ever to hash": _PAIRS,
    "keys nested deeper than any stack": b"\x80\x02)"
    + b"\x85" * 3_000_000
    + b"q\x00}(h\x00K\x01u.",
    "a memo slot of four billion": b"\x80\x02Nr\xff\xff\xff\xff.",
}


@pytest.mark.parametrize("killer", KILLERS.values(), ids=KILLERS)
def test_a_file_that_harms_its_reader_is_refused_and_the_others_are_read(
    tmp_path: Path, processes: None, killer: bytes
) -> None:
    paths = files(tmp_path, RAW, killer, *[RAW] * 4)
    found = list(loaded(paths))
    assert found[1].refused
    whole = load(paths[0])
    assert [found[0], *found[2:]] == [whole] * 5


def test_a_lost_reader_loses_no_file(
    tmp_path: Path, processes: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    unlucky = RAW[:-1]

    def dies(data: bytes) -> Any:
        if data == unlucky:
            os.kill(os.getpid(), signal.SIGKILL)
        return unpickle.loads(data)

    monkeypatch.setattr(quickpickle, "loads", dies)
    paths = files(tmp_path, *[RAW] * 5, unlucky, *[RAW] * 5)
    found = list(loaded(paths))
    assert [bool(one.refused) for one in found] == [path == paths[5] for path in paths]
