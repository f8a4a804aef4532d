"""Samples of what py-spy, pystack and faulthandler print, and of how exceptions are left behind."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from moediag.evidence.exits import (
    error_in_output,
    last_lines,
    read_error_file,
    tail,
)
from moediag.evidence.model import Frame, RankError, Stack
from moediag.evidence.rank_stacks import (
    parse_faulthandler,
    parse_pyspy,
    parse_pyspy_text,
    parse_pystack,
)
from moediag.evidence.tracebacks import user_frame

PYSPY_JSON = json.dumps(
    [
        {
            "pid": 25,
            "thread_id": 140671354399616,
            "thread_name": "MainThread",
            "os_thread_id": 25,
            "frames": [
                {
                    "name": "poll",
                    "filename": "/lib/libc.so.6",
                    "module": "/lib/libc.so.6",
                    "line": 0,
                },
                {"name": "wait", "filename": "/x/distributed_c10d.py", "module": None, "line": 31},
                {"name": "<module>", "filename": "<string>", "module": None, "line": 1},
            ],
        },
        {"thread_name": None, "os_thread_id": 26, "frames": []},
    ]
)
PYSPY_TEXT = """Process 25: python train.py
Python v3.11.7 (/usr/bin/python3.11)

Thread 25 (idle): "MainThread"
    clock_nanosleep (/usr/lib/libc.so.6)
    gloo::transport::tcp::(anonymous namespace)::wait(int) (libtorch_cpu.so)
    wait (/x/distributed_c10d.py:31)
    <module> (<string>:1)
Thread 0x7F12 (active)
    run (threading.py:982)
"""
PYSTACK = """Traceback for thread 11218 (python) [] (most recent call last):
    (C) File "./nptl/pthread_create.c", line 442, in start_thread (/usr/lib/libc.so.6)
    (Python) File "/x/threading.py", line 982, in run
        self._target(*self._args)
    (C) File "./Modules/timemodule.c", line 2159, in pysleep (inlined) (/x/libpython3.11.so.1.0)
    (C) File "???", line 0, in _start (/x/bin/python3.11)

Traceback for thread 11216 (python) [Has the GIL] (most recent call last):
    (Python) File "/tmp/s.py", line 5, in <module>
        main()
    (Python) File "/tmp/s.py", line 4, in main
        time.sleep(20)
"""
FAULT = """Thread 0x00007fb5aaefc6c0 (most recent call first):
  File "/x/threading.py", line 982 in run

Current thread 0x00007fb5aba38b80 (most recent call first):
  File "<string>", line 4 in f
  File "<string>", line 5 in <module>
Fatal Python error: Aborted

Current thread 0x00007fb5aba38b80 [python] (most recent call first):
  File "/x/distributed_c10d.py", line 31 in wait
  File "<string>", line 5 in <module>

Extension modules: numpy (total: 1)
"""


def test_pyspy_json_is_parsed() -> None:
    main, other = parse_pyspy(PYSPY_JSON)
    assert main == Stack(
        "MainThread",
        "py-spy",
        (
            Frame("/lib/libc.so.6", 0, "poll", native=True),
            Frame("/x/distributed_c10d.py", 31, "wait"),
            Frame("<string>", 1, "<module>"),
        ),
    )
    assert (other.thread, other.frames) == ("26", ())


def test_pyspy_text_is_parsed() -> None:
    main, other = parse_pyspy_text(PYSPY_TEXT)
    assert [(f.function, f.line, f.native) for f in main.frames] == [
        ("clock_nanosleep", 0, True),
        ("gloo::transport::tcp::(anonymous namespace)::wait(int)", 0, True),
        ("wait", 31, False),
        ("<module>", 1, False),
    ]
    assert (other.thread, other.frames[0].line) == ("0x7F12", 982)


def test_pystack_output_is_parsed() -> None:
    spawned, main = parse_pystack(PYSTACK)
    assert [(f.function, f.native) for f in spawned.frames] == [
        ("_start", True),
        ("pysleep", True),
        ("run", False),
        ("start_thread", True),
    ]
    assert main.frames == (Frame("/tmp/s.py", 4, "main"), Frame("/tmp/s.py", 5, "<module>"))


def test_faulthandler_keeps_the_latest_dump_of_each_thread() -> None:
    spawned, main = parse_faulthandler(FAULT)
    assert spawned.frames == (Frame("/x/threading.py", 982, "run"),)
    assert [f.function for f in main.frames] == ["wait", "<module>"]
    assert main.thread == "python"


@pytest.mark.parametrize(
    "parse", [parse_pyspy, parse_pyspy_text, parse_pystack, parse_faulthandler]
)
@pytest.mark.parametrize(
    "text", ["", "{}", "[1]", "null", "Error: permission denied\n", "\x00\xff"]
)
def test_text_without_a_stack_gives_none(parse: object, text: str) -> None:
    assert parse(text) == ()  # type: ignore[operator]


TRACEBACK = """step 1
[rank1]: Traceback (most recent call last):
[rank1]:   File "/job/train.py", line 40, in main
[rank1]:     load(model)
[rank1]:   File "/x/site-packages/torch/nn/module.py", line 9, in __call__
[rank1]:     return fn()
[rank1]: torch.distributed.DistBackendError: NCCL error
more output
"""
NATIVE = """terminate called after throwing an instance of 'gloo::EnforceNotMet'
  what():  [enforce fail at pair.cc:456] op.preamble.length <= op.nbytes. 15696 vs 14160.
"""


def test_a_traceback_in_the_output_is_parsed() -> None:
    assert error_in_output(TRACEBACK) == RankError(
        "DistBackendError", "NCCL error", "train.py:40 main"
    )


def test_the_last_error_is_used() -> None:
    error = error_in_output(TRACEBACK + NATIVE)
    assert error is not None
    assert error.type == "gloo::EnforceNotMet"
    assert error.message.startswith("[enforce fail")


@pytest.mark.parametrize("text", ["", "all is well", "Traceback (most recent call last):\n  File"])
def test_output_without_an_error_has_none(text: str) -> None:
    assert error_in_output(text) is None


def test_a_cut_traceback_ends_with_its_exception() -> None:
    frame = '  File "/job/t.py", line 3, in f\n    g()\n'
    found = error_in_output(f"{frame}ValueError: x\nlater\n")
    assert found is not None
    assert (found.type, found.message, found.where) == ("ValueError", "x", "t.py:3 f")
    assert error_in_output(f"{frame}step 7\nConnectionError: retrying\n") is None


def test_user_frame_is_the_innermost_frame_outside_libraries() -> None:
    inside = 'File "/x/site-packages/torch/a.py", line 2, in deep'
    assert user_frame(f'File "/w/train.py", line 1, in step\n{inside}') == "train.py:1 step"
    assert user_frame(inside) == "a.py:2 deep"
    assert user_frame("no frames") == ""


def test_torch_elastic_error_files_are_read(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.error.json"
    callstack = 'Traceback:\n  File "/w/train.py", line 3, in f\nIndexError: 9: out'
    extra = {"py_callstack": callstack, "timestamp": "1700000000"}
    path.write_text(json.dumps({"message": {"message": "IndexError: 9: out", "extraInfo": extra}}))
    found = read_error_file(path)
    assert found is not None and [frame.line for frame in found.frames] == [3]
    assert replace(found, frames=()) == RankError("IndexError", "9: out", "train.py:3 f", 1.7e9)
    path.write_text(json.dumps({"message": "something broke"}))
    assert read_error_file(path) == RankError("Exception", "something broke")
    for broken in ("", "{", "[]", "{}"):
        path.write_text(broken)
        assert read_error_file(path) is None
    assert read_error_file(tmp_path / "nowhere") is None


def test_only_the_end_of_a_long_log_is_read(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.log"
    path.write_text("x" * 300_000 + "\n" + "\n".join(f"line {n}" for n in range(30)) + "\n\n")
    text = tail(path)
    assert len(text) <= 256 * 1024
    assert last_lines(text) == tuple(f"line {n}" for n in range(10, 30))
    assert tail(tmp_path / "nowhere") == ""
