"""Pickles are read in separate processes: a file can neither end the reading, run code, nor
change the results of other files."""

from __future__ import annotations

import os
import pickle
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from moediag.evidence import file_loading, file_reader
from moediag.evidence.file_loading import loaded
from moediag.evidence.file_reader import Loaded, load
from tests.unit.evidence.test_file_reader import SAMPLE, Touch

RAW = SAMPLE.read_bytes()


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The pids of the readers that were started; checks that none is left at the end."""
    pids: list[int] = []
    popen = subprocess.Popen

    def counted(*args: Any, **options: Any) -> Any:
        process = popen(*args, **options)
        pids.append(process.pid)
        return process

    monkeypatch.setattr(subprocess, "Popen", counted)
    yield pids
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


def on_cores(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(number)))


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


def test_one_reader_reads_all_pickles_of_a_call(tmp_path: Path, starts: list[int]) -> None:
    paths = files(tmp_path, RAW, b"a log\n", RAW, b'{"a": 1}', RAW[:-1])
    found = list(loaded(paths))
    whole = load(paths[0])
    assert whole.dump is not None and len(whole.dump.kind)
    assert found == [whole, Loaded(), whole, Loaded(json={"a": 1}), load(paths[4])]
    assert found[4].refused == "truncated or not a pickle"
    assert len(starts) == 1


def test_text_and_json_need_no_reader(tmp_path: Path, starts: list[int]) -> None:
    assert list(loaded(files(tmp_path, b"a log\n", b"[1]"))) == [Loaded(), Loaded(json=[1])]
    assert list(loaded([])) == []
    assert starts == []


def test_several_readers_give_equal_results_for_damaged_dumps(
    tmp_path: Path, starts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_loading, "_MUCH", 0)
    on_cores(2, monkeypatch)
    paths = files(tmp_path, RAW, *map(damaged, range(60)), b"a log\n", b'{"a": 1}')
    found = list(loaded(paths))
    assert found[0].dump is not None and sum(bool(one.refused) for one in found) > 20
    assert found[-2:] == [Loaded(), Loaded(json={"a": 1})]
    monkeypatch.setattr(file_loading, "_MUCH", 1 << 30)
    assert list(loaded(paths)) == found


def test_equal_members_of_large_groups_are_one_object(
    tmp_path: Path, starts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of several readers, and of a reader that took the place of a lost one."""
    monkeypatch.setattr(file_loading, "_MUCH", 0)
    on_cores(2, monkeypatch)

    def dump(ranks: Any) -> bytes:
        world = {"name": "0", "desc": "default_pg", "ranks": ranks}
        own = {"name": "1", "desc": "own", "ranks": "[0, 1]"}
        return pickle.dumps({"version": "2.10", "pg_config": {"0": world, "1": own}, "entries": []})

    everyone = [*range(100)]
    killer, _ = KILLERS["keys nested deeper than any stack"]
    paths = files(
        tmp_path, dump(str(everyone)), dump(everyone), killer, dump(everyone),
        dump(str(everyone)), dump(str(everyone[1:])),
    )  # fmt: skip
    *same, other = [one.dump.groups for one in loaded(paths) if one.dump is not None]
    assert len(starts) == 3  # one anew
    assert len(same) == 4 and len({id(groups["0"].ranks) for groups in same}) == 1
    assert same[0]["0"].ranks == tuple(everyone) and same[0]["1"].ranks == (0, 1)
    assert other["0"].ranks == tuple(everyone[1:])


def test_a_reader_does_not_run_code_of_a_pickle(tmp_path: Path, starts: list[int]) -> None:
    (found,) = loaded(files(tmp_path, pickle.dumps({"entries": [Touch(tmp_path / "made")]})))
    assert found.refused == "asks for posix.mkdir; only plain data is read"
    assert not (tmp_path / "made").exists()


_PAIRS = b"\x80\x02)" + b"q\x00h\x00\x86" * 60 + b"q\x00}(h\x00K\x01u."
KILLERS = {
    "keys that take forever to hash": (_PAIRS, "takes more than 1 s to read"),
    "keys nested deeper than any stack": (
        b"\x80\x02)" + b"\x85" * 3_000_000 + b"q\x00}(h\x00K\x01u.",
        "reading it ended the reader (SIGSEGV)",
    ),
    "a memo slot of four billion": (b"\x80\x02Nr\xff\xff\xff\xff.", "memory"),
}


@pytest.mark.parametrize(("killer", "why"), KILLERS.values(), ids=KILLERS)
@pytest.mark.parametrize("cores", [1, 3])
def test_only_the_file_that_harms_its_reader_is_refused(
    tmp_path: Path,
    starts: list[int],
    monkeypatch: pytest.MonkeyPatch,
    killer: bytes,
    why: str,
    cores: int,
) -> None:
    monkeypatch.setattr(file_loading, "_MUCH", 0)
    main = file_loading._MAIN.replace("; main()", "; import moediag.evidence.file_reader as r")
    main += "; r.SECONDS = 1; main()"
    monkeypatch.setattr(file_loading, "_COMMAND", (*file_loading._COMMAND[:-1], main))
    monkeypatch.setattr(file_reader, "SECONDS", 1)
    on_cores(cores, monkeypatch)
    paths = files(tmp_path, RAW, killer, *[RAW] * 4, killer)
    found = list(loaded(paths))
    assert why in found[1].refused and why in found[6].refused
    whole = load(paths[0])
    assert [found[0], *found[2:6]] == [whole] * 5


def test_a_killed_reader_loses_one_file(tmp_path: Path, starts: list[int]) -> None:
    paths = files(tmp_path, *[RAW] * 3)
    found = loaded(paths)
    first = next(found)
    os.kill(starts[0], 9)
    rest = list(found)
    assert first == load(paths[0])
    assert {one.refused for one in rest} <= {"", "reading it ended the reader (SIGKILL)"}
    assert sum(bool(one.refused) for one in rest) <= 1


def test_closing_the_iterator_ends_the_readers(tmp_path: Path, starts: list[int]) -> None:
    found = loaded(files(tmp_path, *[RAW] * 3))
    next(found)
    found.close()  # type: ignore[attr-defined]
    assert len(starts) == 1
