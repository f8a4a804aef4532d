"""``python -m bench.fuzz [COUNT] [SEED]``: checks that damaged evidence never crashes or hangs
`moediag diagnose` and never runs code.

Each input is a folder of what ranks leave (dumps as pickle and JSON, stacks, logs, error files), of
which some files were damaged: bits flipped, pieces cut out, doubled or swapped, lengths blown up,
values replaced by others of wrong types, instructions that would build objects put in between.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import jobs
from moediag.errors import MoediagError
from moediag.pipeline.examine import examine
from moediag.report import json_view, page

SECONDS = 20  # an input that takes longer counts as a hang
CANARY = "MOEDIAG_FUZZ_CANARY"


class _Runs:
    """An object whose unpickling would run code."""

    def __reduce__(self) -> Any:
        return os.putenv, (CANARY, "ran")


class _Evil(dict):  # type: ignore[type-arg]
    def __reduce__(self) -> Any:
        return exec, (f"import os; os.environ[{CANARY!r}] = 'ran'",)


@dataclass
class Report:
    """Counts. ``slowest`` is in seconds; ``failures`` has (seed of the input, what happened)."""

    count: int = 0
    refused: int = 0
    slowest: float = 0.0
    failures: list[tuple[int, str]] = field(default_factory=list)


def run(count: int, seed: int = 0) -> Report:
    """Runs ``count`` damaged inputs. Raises nothing; failures are in the report."""
    report = Report()
    originals = _originals()
    for number in range(count):
        chance = random.Random(f"{seed} {number}")  # noqa: S311 - repeatable
        with tempfile.TemporaryDirectory() as folder:
            _write(Path(folder), chance, originals)
            _one(Path(folder), number, report)
        report.count += 1
    return report


def _one(folder: Path, number: int, report: Report) -> None:
    began = time.perf_counter()
    try:
        with _limit(SECONDS):
            result = examine([folder]).result
            json.loads(json_view.render(result))
            page.page_of(result)
    except MoediagError:
        report.refused += 1
    except TimeoutError:
        report.failures.append((number, f"more than {SECONDS} s"))
    except Exception as error:  # this is what is looked for
        report.failures.append((number, f"{type(error).__name__}: {error}"))
    if CANARY in os.environ or os.getenv(CANARY):
        report.failures.append((number, "code ran"))
        os.environ.pop(CANARY, None)
    report.slowest = max(report.slowest, time.perf_counter() - began)


@contextmanager
def _limit(seconds: int) -> Iterator[None]:
    def expired(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, expired)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


# ------------------------------------------------------------------------ what ranks leave


def _originals() -> list[dict[str, bytes]]:
    """Returns undamaged folders: file name -> content."""
    base = jobs.healthy(jobs.Layout(2, 2, 1, 2), steps=3)
    folders = []
    for fault in ("none", "skip", "stuck", "size", "skip-p2p"):
        job = jobs.faulty(base, fault, 1) if fault != "none" else base
        for frames, ring in ((True, 2000), (False, 20)):
            raw = dict(jobs.dumps(job, frames=frames, ring=ring))
            folders += (
                {f"trace_{r}": pickle.dumps(d, protocol) for r, d in raw.items()}
                for protocol in (2, 4)
            )
            folders.append({f"rank_{r}.json": json.dumps(d).encode() for r, d in raw.items()})
    for folder in folders[::3]:
        folder |= _others()
    return [*folders, _others()]


def _others() -> dict[str, bytes]:
    spy = [{"thread_name": "MainThread", "frames": [
        {"name": "all_reduce", "filename": "/x/torch/distributed/distributed_c10d.py", "line": 3},
        {"name": "main", "filename": "/job/train.py", "line": 7}]}]  # fmt: skip
    error = {"message": {"message": "ValueError: no", "extraInfo": {"timestamp": "1700000000"}}}
    watchdog = (
        "[rank2]:[E1121 ProcessGroupNCCL.cpp:632] [PG ID 1 PG GUID 1(tp) Rank 0] Watchdog caught "
        "collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE, NumelIn=8, "
        "NumelOut=8, Timeout(ms)=600000) ran for 600029 milliseconds before timing out.\n"
    )
    traceback = (
        'Traceback (most recent call last):\n  File "/job/t.py", line 3, in f\nValueError: x'
    )
    summary = (
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \nFailures:\n"
        "  rank      : 0 (local_rank: 0)\n  exitcode  : -15 (pid: 1)\n"
        "Root Cause (first observed failure):\n  rank      : 1 (local_rank: 1)\n"
        "  exitcode  : 1 (pid: 2)\n"
    )
    fault = 'Thread 0x00007fb5 (most recent call first):\n  File "/job/t.py", line 9 in g\n'
    pystack = (
        "Traceback for thread 25 (python) [] (most recent call last):\n"
        '    (Python) File "/job/t.py", line 9, in g\n        wait()\n'
    )
    text = 'Process 25: python t.py\n\nThread 25 (idle): "MainThread"\n    wait (t.py:3)\n'
    return {
        "rank_0.pyspy.json": json.dumps(spy).encode(),
        "rank_1.error.json": json.dumps(error).encode(),
        "all.log": (watchdog + traceback).encode(), "launcher.log": summary.encode(),
        "rank_3.log": fault.encode(), "rank_2.stack.txt": pystack.encode(),
        "rank_1.spy.txt": text.encode(),
    }  # fmt: skip


# ------------------------------------------------------------------------ damage


def _write(folder: Path, chance: random.Random, originals: list[dict[str, bytes]]) -> None:
    files = dict(chance.choice(originals))
    for name in chance.sample(sorted(files), chance.randint(1, len(files))):
        data = files[name]
        # Values first: it reads the file, which then must not be hostile yet.
        damage = chance.choices(_DAMAGE, k=chance.choice((1, 1, 2, 5)))
        for one in sorted(damage, key=lambda one: one is not _retype):
            data = one(data, chance)
        files[name] = data
    for name, data in files.items():
        if chance.random() > 0.05:  # some ranks leave nothing
            (folder / name).write_bytes(data)


def _flip(data: bytes, chance: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(chance.choice((1, 1, 3, 30))):
        if changed:
            changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def _cut(data: bytes, chance: random.Random) -> bytes:
    return data[: chance.randrange(len(data) + 1)]


def _splice(data: bytes, chance: random.Random) -> bytes:
    """Removes, repeats or moves a piece."""
    a, b = sorted(chance.randrange(len(data) + 1) for _ in range(2))
    piece = data[a : min(b, a + 400)]
    at = chance.randrange(len(data) + 1)
    return chance.choice((data[:a] + data[b:], data[:at] + piece * 3 + data[at:]))


def _huge(data: bytes, chance: random.Random) -> bytes:
    """Inserts huge lengths and numbers."""
    at = chance.randrange(len(data) + 1)
    blown = chance.choice((
        b"X\xff\xff\xff\x7f", b"\x8d" + b"\xff" * 8, b"\x8e" + b"\xff" * 7 + b"\x7f",
        b"r\xff\xff\xff\xff",
        b"\x8b\xff\xff\xff\x7f", b"\x95" + b"\xff" * 8, b"\x8a\xff", b"9" * 5000, b"[" * 3000,
        b"{" * 3000,
        b"(" * 3000, b"]" * 3000, b"\x85" * 3000, b"1e999", b"-1", b"18446744073709551616",
    ))  # fmt: skip
    return data[:at] + blown + data[at + chance.choice((0, len(blown))) :]


def _hostile(data: bytes, chance: random.Random) -> bytes:
    """Inserts pickle instructions that import or build, or replaces everything by them."""
    whole = chance.choice((
        pickle.dumps(_Runs(), chance.randint(0, 5)),
        pickle.dumps({"entries": [_Evil()], "pg_config": {}}, chance.randint(0, 5)),
        b"\x80\x02cposix\nputenv\n(X\x01\x00\x00\x00aX\x01\x00\x00\x00btR.",
        b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x04true\x85R.",
    ))  # fmt: skip
    at = chance.randrange(len(data) + 1)
    piece = chance.choice((b"cposix\nsystem\n", b"i__builtin__\neval\n", b"\x93", b"R", b"b",
                           b"\x81", b"\x82\x01", b"Q", b"Px\n", b"\x97", b"o"))  # fmt: skip
    return chance.choice((whole, data[:at] + piece + data[at:]))


def _retype(data: bytes, chance: random.Random) -> bytes:
    """Replaces some values; the file itself stays valid."""
    is_pickle = data[:1] == b"\x80"
    try:
        raw = pickle.loads(data) if is_pickle else json.loads(data)  # noqa: S301 - undamaged
    except ValueError:
        return data  # a log
    for _ in range(chance.choice((1, 3, 20))):
        raw = _replaced(raw, chance)
    try:
        return pickle.dumps(raw) if is_pickle else json.dumps(raw).encode()
    except (TypeError, ValueError, RecursionError):
        return data


_OTHERS: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2**31, 2**63, 2**100, 0.5, float("nan"), "", "x", "0", "nccl:",
    "recv 1<-0", "nccl:send 9->9", [], [[]], [None], [[2**62, 4]], {}, {"a": 1}, [1, "x", None],
    "completed",
    "2.10", "99.1", "[0, 1, 99999999]", "default_pg", ["0", "1"], ["0"],
)  # fmt: skip


def _replaced(raw: Any, chance: random.Random) -> Any:
    """Replaces one value in the tree."""
    if isinstance(raw, dict) and raw and chance.random() < 0.9:
        key = chance.choice(list(raw))
        if chance.random() < 0.05:
            return {k: v for k, v in raw.items() if k != key}
        return {**raw, key: _replaced(raw[key], chance)}
    if isinstance(raw, list) and raw and chance.random() < 0.9:
        at = chance.randrange(len(raw))
        return [*raw[:at], _replaced(raw[at], chance), *raw[at + 1 :]]
    return chance.choice(_OTHERS)


def _same(data: bytes, _: random.Random) -> bytes:
    return data


_DAMAGE = (_flip, _flip, _cut, _splice, _huge, _hostile, _retype, _retype, _retype, _same)


def main() -> int:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    began = time.perf_counter()
    report = run(count, seed)
    took = time.perf_counter() - began
    for number, what in report.failures[:20]:
        print(f"input {number} of seed {seed}: {what}")  # noqa: T201
    print(  # noqa: T201
        f"{report.count:,} inputs in {took:.0f} s, {report.refused:,} refused whole, slowest "
        f"{report.slowest:.2f} s, {len(report.failures)} failures"
    )
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
