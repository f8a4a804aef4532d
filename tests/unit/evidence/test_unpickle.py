"""The restricted unpickler reads what pickle writes of plain data, and nothing else."""

from __future__ import annotations

import os
import pickle
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moediag.evidence import unpickle
from moediag.evidence.unpickle import Refused, loads

SAMPLE = Path(__file__).parents[2] / "samples/flight-recorder/gloo-collectives/trace_rank_0"

scalars = (
    st.none() | st.booleans() | st.integers(-(2**100), 2**100) | st.floats(allow_nan=False)
    | st.text() | st.binary()
)  # fmt: skip
keys = st.text() | st.integers(-(2**40), 2**40)
plain = st.recursive(
    scalars | st.sets(keys) | st.frozensets(keys),
    lambda inner: st.lists(inner) | st.dictionaries(keys, inner) | st.lists(inner).map(tuple),
    max_leaves=30,
)


@settings(max_examples=200, deadline=None)
@given(plain, st.sampled_from([2, 3, 4, 5]))
def test_plain_data_comes_back(value: Any, protocol: int) -> None:
    if protocol < 4 and _holds(value, (set, frozenset)):
        return  # before protocol 4 a set is a call of set()
    if protocol < 3 and _holds(value, bytes):
        return  # and bytes are a call of encode()
    assert loads(pickle.dumps(value, protocol)) == value


def _holds(value: Any, kinds: Any) -> bool:
    if isinstance(value, dict):
        return any(_holds(inner, kinds) for inner in value.values())
    if isinstance(value, list | tuple):
        return any(_holds(inner, kinds) for inner in value)
    return isinstance(value, kinds)


def test_shared_and_circular_lists_stay_so() -> None:
    shared = [1]
    ring: list[Any] = [shared, shared]
    ring.append(ring)
    back = loads(pickle.dumps(ring))
    assert back[0] is back[1] and back[2] is back


def test_a_real_dump_reads_as_pickle_reads_it() -> None:
    raw = SAMPLE.read_bytes()
    assert loads(raw) == pickle.loads(raw)
    assert loads(raw)["entries"][0]["profiling_name"] == "gloo:all_reduce"


def test_torchs_own_lists_of_numbers() -> None:
    raw = b"\x80\x02ctorch.jit._pickle\nbuild_intlist\n(](K\x01K\x02etR."
    assert loads(raw) == [1, 2]


class _Touch:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("protocol", range(6))
def test_a_hostile_pickle_is_refused_with_what_it_wanted_and_nothing_runs(
    tmp_path: Path, protocol: int
) -> None:
    raw = pickle.dumps({"entries": [_Touch(tmp_path / "made")]}, protocol)
    with pytest.raises(Refused, match=r"(posix|nt)\.mkdir" if protocol else None):
        loads(raw)
    assert not (tmp_path / "made").exists()
    pickle.loads(raw)  # the same bytes do it where everything is allowed
    assert (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"\x80\x02c__builtin__\neval\n(X\x01\x00\x00\x001tR.", r"__builtin__\.eval"),
        (b"\x80\x04\x8c\x05posix\x8c\x06system\x93.", r"posix\.system"),
        (b"\x80\x02(X\x02\x00\x00\x00lsios\nsystem\n.", r"os\.system"),
        (b"\x80\x02Pkey\n.", "from outside"),
        (b"\x80\x02NQ.", "from outside"),
        (b"\x80\x02\x82\x01.", "extension code"),
        (b"\x80\x02}]b.", "state"),
        (b"\x80\x02N)\x81.", "build an object"),
        (b"\x80\x02N)R.", "call a function"),
        (b"\x80\x02ctorch.jit._pickle\nbuild_intlist\n.", "plain data"),
        (b"\x80\x05\x97.", "buffer"),
        (b"\x80\x09N.", "protocol 9"),
        (b"\x80\x02}(K\x01K\x02K\x03u.", "dictionary"),
        (b"\x80\x02](K\x01K\x02u.", "dictionary"),
        (b"\x80\x02}K\x01a.", "no list"),
        (b"\x80\x02}(](K\x01eK\x01u.", "keys"),
        (b"\x80\x02}(K\x01\x85K\x01u.", "keys"),
        (b"\x80\x02K\x01K\x02.", "plain data"),
        (b"\x80\x04]]\x93.", "breaks off"),
        (b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7f", "claims"),
        (b"\x80\x02X\xff\xff\xff\x7fabc", "claims 2,147,483,647 bytes where 3 are left"),
        (b"\x80\x02\x8a\xff" + b"\xff" * 255 + b".", "number of 255 bytes"),
        (b"\x80\x02h\x07.", "plain data"),
        (b"(lp0\n.", "protocol 2"),
        (b"", "breaks off"),
        (b"\x80", "breaks off"),
        (b"\x80\x02(", "breaks off"),
    ],
)  # fmt: skip
def test_anything_but_plain_data_is_refused(raw: bytes, why: str) -> None:
    with pytest.raises(Refused, match=why):
        loads(raw)


def test_a_memo_slot_of_four_billion_costs_nothing() -> None:
    assert loads(b"\x80\x02Nr\xff\xff\xff\xff.") is None


def test_nesting_needs_no_recursion() -> None:
    depth = 200_000
    value = loads(b"\x80\x02" + b"]" * depth + b"a" * (depth - 1) + b".")
    for _ in range(depth - 1):
        (value,) = value
    assert value == []
    assert type(loads(b"\x80\x02)" + b"\x85" * depth + b".")) is tuple
    with pytest.raises(Refused, match="nested too deeply"):
        loads(b"\x80\x02" + b"(" * 5000 + b".")


def test_a_tuple_with_an_expensive_hash_is_refused_as_a_key() -> None:
    bomb = b"\x80\x02)" + b"q\x00h\x00\x86" * 60  # sixty times a pair of itself
    assert type(loads(bomb + b".")) is tuple
    with pytest.raises(Refused, match="keys"):
        loads(bomb + b"q\x000}(h\x00K\x01u.")


def test_more_objects_or_bytes_than_any_dump_has(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Refused, match="more objects"):
        loads(b"\x80\x02(" + b"}" * 6_000_001 + b"l.")
    monkeypatch.setattr(unpickle, "MAX_BYTES", 10)
    with pytest.raises(Refused, match="at most 10"):
        loads(pickle.dumps(list(range(20))))


def test_every_truncation_is_refused() -> None:
    raw = SAMPLE.read_bytes()
    for end in range(0, len(raw), 3):
        with pytest.raises(Refused):
            loads(raw[:end])


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=60), st.integers(0, 2000))
def test_random_bytes_raise_only_the_documented_error(noise: bytes, at: int) -> None:
    raw = SAMPLE.read_bytes()
    for data in (b"\x80\x04" + noise, raw[:at] + noise + raw[at + len(noise) :]):
        try:
            loads(data)
        except Refused as refused:
            assert str(refused)


def test_a_length_is_read_as_unsigned() -> None:
    with pytest.raises(Refused):
        loads(b"\x80\x02\x8b" + struct.pack("<i", -5) + b".")
