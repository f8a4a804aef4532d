"""Stacks as py-spy wrote them of a real job: accelerate's local SGD example on torch 2.13.0 and
gloo, at its end."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from moediag.diagnosis import diagnose
from moediag.evidence.model import Evidence, Stack, Stall
from moediag.evidence.rank_stacks import parse_pyspy, parse_pyspy_text
from tests.unit.evidence_builder import Job, Op

PYTHON = [{"name": "main", "filename": "/home/me/local_sgd.py", "line": 231, "module": None}]
TORCH = "/env/lib/python3.11/site-packages/torch/lib"
HOLDS = f"""Thread 15733 (idle): "MainThread"
    0x7f77306a3f16 (/usr/lib/x86_64-linux-gnu/libc.so.6)
    0x7f77306a8ce3 (/usr/lib/x86_64-linux-gnu/libc.so.6)
    std::thread::join (/usr/lib/x86_64-linux-gnu/libstdc++.so.6.0.30)
    c10d::ProcessGroupGloo::~ProcessGroupGloo ({TORCH}/libtorch_cpu.so)
    c10d::Reducer::~Reducer ({TORCH}/libtorch_cpu.so)
    pybind11_object_dealloc ({TORCH}/libtorch_python.so)
    main (/home/me/local_sgd.py:231)
"""
COMPUTES = """Thread 15733 (active+gil): "MainThread"
    gc_collect_main (/env/lib/libpython3.11.so.1.0)
    main (/home/me/local_sgd.py:231)
"""
ASKS = f"""Thread 16603 (idle)
    0x7f77306a3f16 (/usr/lib/x86_64-linux-gnu/libc.so.6)
    pthread_cond_timedwait (/usr/lib/x86_64-linux-gnu/libc.so.6)
    pybind11::gil_scoped_acquire::gil_scoped_acquire ({TORCH}/libtorch_python.so)
    c10d::(anonymous namespace)::AsyncAllgatherWork::~AsyncAllgatherWork ({TORCH}/libtorch_cpu.so)
    c10d::ProcessGroupGloo::runLoop ({TORCH}/libtorch_cpu.so)
    0x7f772d0d44a3 (/usr/lib/x86_64-linux-gnu/libstdc++.so.6.0.30)
"""
MONITOR = """Thread 16608 (idle): "tqdm_monitor"
    pthread_cond_timedwait (/usr/lib/x86_64-linux-gnu/libc.so.6)
    take_gil (/env/lib/libpython3.11.so.1.0)
    TMonitor.run (/env/lib/python3.11/site-packages/tqdm/_monitor.py:69)
"""
LOOP, OTHER = "c10d::ProcessGroupGloo::runLoop", "lib::Reader::loop"
JOIN = "std::thread::join"


def stacks(native: str, gil: bool = True) -> tuple[Stack, ...]:
    main = {"thread_name": "MainThread", "owns_gil": gil, "frames": PYTHON}
    return parse_pyspy(json.dumps([main])) + parse_pyspy_text(native)


def job(found: tuple[Stack, ...]) -> Evidence:
    """Both ranks made all their calls; rank 0 does not end."""
    ops = [Op("a"), Op("a")]
    evidence = Job({"a": ((0, 1), None)}, [ops, ops]).run()
    ranks = {**evidence.ranks, 0: replace(evidence.ranks[0], stacks=found, finished=False)}
    stall = Stall(at=20.0, window=3.0, waiting=(0,))
    return replace(evidence, ranks=ranks, watched=True, stall=stall)


def test_two_threads_that_wait_for_each_other_are_named() -> None:
    found = diagnose(job(stacks(HOLDS + ASKS)))
    assert (found.verdict, found.culprits, found.victims) == ("hang", (0,), ())
    assert found.confidence == "high"
    assert "MainThread holds Python's interpreter lock at local_sgd.py:231 main" in found.cause
    assert "in the destructor of ProcessGroupGloo" in found.cause
    assert "before `destroy_process_group()`" in found.next_step


@pytest.mark.parametrize(
    ("why", "native", "gil"),
    [
        ("it waits for nobody", COMPUTES + ASKS, True),
        ("it joins, but without the lock", HOLDS + ASKS, False),
        ("a destructor joins no Python thread", HOLDS + MONITOR, True),
        ("a thread of another library need not be joined", HOLDS + ASKS.replace(LOOP, OTHER), True),
        ("it joins outside a destructor", HOLDS.replace("~", "") + ASKS, True),
        (
            "it is already past the join",
            HOLDS.replace(JOIN, f"free (libc)\n    {JOIN}") + ASKS,
            True,
        ),
    ],
)
def test_no_deadlock(why: str, native: str, gil: bool) -> None:
    assert "wait for each other" not in diagnose(job(stacks(native, gil))).cause, why


def test_nothing_is_said_without_native_frames() -> None:
    found = diagnose(job(stacks("")))
    assert (found.verdict, found.culprits) == ("hang", ())
    assert "not known which rank" in found.cause
