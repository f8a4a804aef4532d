"""The restricted unpickler reads pickles of plain data and nothing else.

It runs in this process here, so no input harms its reader; inputs that do are in
``test_file_loading.py``.
"""

from __future__ import annotations

import os
import pickle
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moediag.evidence import file_reader
from moediag.evidence.file_reader import Refused, load, plain_data
from tests.depth import cases

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


@settings(max_examples=cases(400), deadline=None)
@given(plain, st.sampled_from([2, 3, 4, 5]))
def test_plain_data_is_read_back(value: Any, protocol: int) -> None:
    if protocol < 4 and _holds(value, (set, frozenset)):
        return  # before protocol 4 a set is a call of set()
    if protocol < 3 and _holds(value, bytes):
        return  # and bytes are a call of encode()
    assert plain_data(pickle.dumps(value, protocol)) == value


def _holds(value: Any, kinds: Any) -> bool:
    if isinstance(value, dict):
        return any(_holds(inner, kinds) for inner in value.values())
    if isinstance(value, list | tuple):
        return any(_holds(inner, kinds) for inner in value)
    return isinstance(value, kinds)


def test_a_real_dump_is_read_as_pickle_reads_it() -> None:
    raw = SAMPLE.read_bytes()
    assert plain_data(raw) == pickle.loads(raw)
    assert plain_data(raw)["entries"][0]["profiling_name"] == "gloo:all_reduce"


def test_torch_int_lists_are_read() -> None:
    raw = b"\x80\x02ctorch.jit._pickle\nbuild_intlist\n(](K\x01K\x02etR."
    assert plain_data(raw) == [1, 2]


class Touch:
    """Its pickle creates a folder if loaded without restrictions."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("protocol", range(6))
def test_a_malicious_pickle_is_refused_and_not_run(tmp_path: Path, protocol: int) -> None:
    raw = pickle.dumps({"entries": [Touch(tmp_path / "made")]}, protocol)
    with pytest.raises(Refused, match=r"asks for (posix|nt)\.mkdir"):
        plain_data(raw)
    assert not (tmp_path / "made").exists()
    pickle.loads(raw)  # the same bytes create it without restrictions
    assert (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"\x80\x02c__builtin__\neval\n(X\x01\x00\x00\x001tR.", r"__builtin__\.eval"),
        (b"\x80\x04\x8c\x05posix\x8c\x06system\x93.", r"posix\.system"),
        (b"\x80\x02(X\x02\x00\x00\x00lsios\nsystem\n.", r"os\.system"),
        (b"\x80\x02Pkey\n.", "external object"),
        (b"\x80\x02NQ.", "external object"),
        (b"\x80\x02\x82\x01.", "plain data"),
        (b"\x80\x02}]b.", "pickle"),
        (b"\x80\x02N)\x81.", "pickle"),
        (b"\x80\x02N)R.", "plain data"),
        (b"\x80\x05\x97.", "pickle"),
        (b"\x80\x09N.", "plain data"),
        (b"\x80\x02}(K\x01K\x02K\x03u.", "pickle"),
        (b"\x80\x02}(](K\x01eK\x01u.", "plain data"),
        # The stand-in for torch's lists: itself, called with something else, built, or changed.
        (b"\x80\x02ctorch.jit._pickle\nbuild_intlist\n.", "plain data"),
        (b"\x80\x02ctorch.jit._pickle\nbuild_intlist\nK\x01\x85R.", "function call"),
        (b"\x80\x02ctorch.jit._pickle\nbuild_intlist\n)\x81.", "pickle"),
        (b"\x80\x02ctorch.jit._pickle\nbuild_intlist\n}(X\x01\x00\x00\x00aK\x01ub.", "plain data"),
        (b"\x80\x02ctorch.jit._pickle\nbuild_intlist\nN}(X\x08\x00\x00\x00__call__Nu\x86b.",
         "plain data"),
        (b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7f", "pickle"),
        (b"\x80\x02X\xff\xff\xff\x7fabc", "truncated"),
        (b"\x80\x02h\x07.", "pickle"),
        (b"", "truncated"),
        (b"\x80", "truncated"),
        (b"\x80\x02(", "truncated"),
    ],
)  # fmt: skip
def test_other_data_is_refused(raw: bytes, why: str) -> None:
    with pytest.raises(Refused, match=why):
        plain_data(raw)


def test_unprintable_text_is_replaced(tmp_path: Path) -> None:
    raw = pickle.loads(SAMPLE.read_bytes())
    for entry in raw["entries"]:
        entry["process_group"] = (entry["process_group"][0], "\ud800pipeline")
        entry["frames"] = [{"filename": "/job/\ud800.py", "line": 3, "name": "f\ud800"}]
    (tmp_path / "trace").write_bytes(pickle.dumps(raw))
    dump = load(tmp_path / "trace").dump
    assert dump is not None
    assert {kind.site for kind in dump.kinds} == {"?.py:3 f?"}
    assert str((dump.kinds, dump.groups)).encode()


def test_a_file_that_is_too_large_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "dump"
    path.write_bytes(b"\x80\x04" + b"N" * (2 << 20))
    monkeypatch.setattr(file_reader, "MAX_PICKLE", 1 << 20)
    assert load(path).refused == "larger than 1 MiB"


def test_every_truncation_is_refused() -> None:
    raw = SAMPLE.read_bytes()
    for end in range(0, len(raw), 3):
        with pytest.raises(Refused):
            plain_data(raw[:end])


def test_a_negative_length_is_refused() -> None:
    with pytest.raises(Refused):
        plain_data(b"\x80\x02\x8b" + struct.pack("<i", -5) + b".")


def test_the_reader_imports_little() -> None:
    """It is started for each core, and an import takes as long as hundreds of entries."""
    code = "import sys; from moediag.evidence import file_reader; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        cwd=Path(__file__).parents[3], capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert not {"dataclasses", "json", "pathlib", "inspect", "subprocess"} & {*done.stdout.split()}
