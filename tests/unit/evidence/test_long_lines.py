"""Logs with very long lines, and with many short ones, are read in a time that grows with their
length. A quadratic reader needs far more CPU time for each of these texts than it gets here."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator

import pytest

from moediag.diagnosis.end_states import crash_reasons, failures
from moediag.evidence import (
    console_output,
    exits,
    frtrace,
    horovod,
    log_lines,
    log_reports,
    nccl_calls,
    nccl_ras,
    rank_stacks,
    rank_words,
    ray_train,
    stack_texts,
    tracebacks,
)
from moediag.evidence.model import Evidence, RankError

SIZE = 20_000
SECONDS = 2.0  # of CPU time for a text; a linear reader needs a tenth of a second
# What each reader looks for, begun again and again and never ended.
BEGINNINGS = (
    "x", " ", "\n", "1", "a ", "wait", "waitcollective", "collective timed ", "Thread x (idle",
    "Traceback (most recent call last):", 'File "x", line 1, in a     ', "rank : ", "operands in ",
    "#1 f from a:1 ", "#1 from ", "Traceback for thread 1 (", '(C) File "x", line 1, in a ( (',
    ' (Python) File "x", line 1, in a (/x.so ', "    f (a.py:1", "[PG 0 (", "[PG ID 1 PG GUID 1(",
    "WorkNCCL(SeqNum=1, OpType=A", "CollectiveFingerPrint(OpType=A, TensorShape=[", "[rank1]:",
    "Detected mismatch between collectives on ranks. Rank 1 is running collective: ", "> ",
    "last enqueued work: 1, ", "Ranks 1, 2, failed to pass monitoredBarrier in ", "[1, 2, ",
    "#1 joined but didn't finish collective #", "ChildFailedError", "] Work", "CCL(", "parallel_",
    "a:1:1 [0] NCCL INFO A: opCount 1 ", "a:1:1 [0] NCCL INFO comm 1 rank 1 nranks 1 ",
    "a [ready ranks: 1",
    "`a` has not been called by all 1 workers in the group {1: 1, ",
    "1: [a, b", "tensors were submitted to be ", "Rank 1 has ",
    "Culprit rank 1; ",
    "  + Exception Group Traceback (most recent call last):", "  +---------------- 1 ------------",
    "ray::a (", "-- Process 1 terminated with the following error:", "RemoteTraceback: ", "a.b-",
    "  traceback : Traceback (most recent call last):", "#0-0 (a) MISMATCH", "timed out ",
    " at x:1 from ", "#0 0x0 in f (", "terminate called after throwing an instance of '", "'",
)  # fmt: skip


def _reports(text: str) -> object:
    return log_reports.read(log_lines.read(text))


def _mixed(text: str) -> object:
    return crash_reasons.mixed_group(Evidence(0, {}), [failures.Failure(0, "RuntimeError", text)])


def _words(text: str) -> object:
    return [
        pattern.search(text)
        for pattern in (failures._COMMUNICATION, failures._OF_DEVICE, failures._MISMATCH)
    ]


READERS: Iterable[Callable[[str], object]] = (
    _reports,
    _mixed,
    _words,
    rank_words.named,
    exits.error_in_output,
    tracebacks.group_in,
    nccl_ras.read,
    horovod.read,
    ray_train.read,
    frtrace.read,
    nccl_calls.read,
    lambda text: list(nccl_calls._CALL.finditer(text)),
    lambda text: list(nccl_calls._INIT.finditer(text)),
    lambda text: list(horovod._TENSOR.finditer(text)),
    console_output.summary_errors,
    lambda text: console_output.gave_up_waiting(RankError("E", text)),
    console_output.torchrun_summary,
    console_output.is_log,
    stack_texts.read,
    stack_texts.parse_gdb,
    rank_stacks.parse_pystack,
    rank_stacks.parse_pyspy_text,
    rank_stacks.parse_faulthandler,
)


@pytest.fixture
def bounded() -> Iterator[Callable[[float], object]]:
    """Sets the CPU time after which the test fails."""

    def fail(*_: object) -> None:
        raise AssertionError(f"more than {SECONDS} s of CPU time")

    before = signal.signal(signal.SIGVTALRM, fail)
    yield lambda seconds: signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    signal.signal(signal.SIGVTALRM, before)


@pytest.mark.parametrize("end", ["", "\n"])
def test_time_grows_with_the_length(end: str, bounded: Callable[[float], object]) -> None:
    for beginning in BEGINNINGS:
        piece = beginning + end
        text = f"ChildFailedError {piece * (SIZE // len(piece))}"
        for read in READERS:
            bounded(SECONDS)
            read(text)


def test_a_number_that_is_no_number_is_not_read() -> None:
    digits = "7" * 5000
    for text in (
        f"#{digits} started ranks:", f"[rank{digits}]: x", f"Ranks {digits} failed to pass x",
        f'  File "a.py", line {digits}, in f', f"#1 0x0 in f () at a.c:{digits}",
        f"    f (a.py:{digits})", f'(C) File "a", line {digits}, in f ()',
        f"Detected mismatch between collectives on ranks. Rank {digits} is running collective: x",
    ):  # fmt: skip
        for read in READERS:
            found = read(f"Traceback (most recent call last):\n{text}\nValueError: x")
            assert digits not in repr(found), read
