"""The positions of Python and of the device, from simulated logs."""

from __future__ import annotations

from dataclasses import replace

from moediag.diagnosis import diagnose
from moediag.diagnosis.schedules import device_frontier
from moediag.diagnosis.schedules.device_frontier import Front
from moediag.diagnosis.words import device_sentences
from moediag.evidence import device_progress, flight_dump
from moediag.evidence.model import Evidence, Frame, Stack, Stall
from moediag.evidence.rank_stacks import on_the_device, parse_pystack, waits_for_device
from tests.unit.device_dumps import dump, in_clip, on_nccl
from tests.unit.evidence_builder import fsdp2_job

# Rank 1 starves expert 3 of layer 0, so the reductions of layer 0, the fifth call, do not fit.
PUZZLE = on_nccl(fsdp2_job(set(), {(0, 3)}).whole(), waiting=(0, 1))
AGREE = on_nccl(fsdp2_job(set(), set()).whole(), waiting=(0, 1))


def seen(
    evidence: Evidence, done: dict[int, int], native: bool = True, begun: bool = True
) -> Evidence:
    """Adds the dumps taken during the stall."""
    ranks = {}
    for rank, own in evidence.ranks.items():
        ranks[rank] = replace(own, finished=False, stacks=(in_clip(native),))
        if rank in done:
            raw = dump(own.collectives, done[rank], begun)
            calls = device_progress.told(own.collectives, flight_dump.read(raw), rank).calls
            ranks[rank] = replace(ranks[rank], collectives=calls)
    return replace(evidence, ranks=ranks)


def test_table_shows_the_positions_of_python_and_the_device() -> None:
    found = diagnose(seen(PUZZLE, {0: 4, 1: 4}))
    assert (found.verdict, found.culprits) == ("hang", (1,))
    assert "expert 3 of layer 0 received 0 tokens" in found.cause
    assert (
        "The devices of ranks 0, 1 are stuck in reduce_scatter of model.layers.0, operation 4 on "
        "dp_shard. "
    ) in found.cause
    assert "Python issued it at train.py:24 step, then queued 2 more operations" in found.cause
    assert "and waits for the device at train.py:31 step." in found.cause
    assert "clip_grad" not in found.cause.replace("clip_grad_norm_", "")
    (table,) = [t for t in found.tables if t.title.startswith("Where Python")]
    assert [row[0] for row in table.rows] == ["rank 0", "rank 1"], "sizes differ"
    assert table.rows[0][1] == "train.py:31 step" and table.rows[0][3:] == (
        "begun", "train.py:24 step", 2,
    )  # fmt: skip


def test_table_is_omitted_without_device_data() -> None:
    found = diagnose(seen(PUZZLE, {}))
    assert (found.verdict, found.culprits) == ("hang", (1,))
    assert "device" not in found.cause
    assert not any(t.title.startswith("Where Python") for t in found.tables)


def test_cause_distinguishes_calls_not_begun_and_not_completed() -> None:
    found = diagnose(seen(PUZZLE, {0: 4, 1: 4}, begun=False))
    assert "The devices of ranks 0, 1 have not completed reduce_scatter" in found.cause, "untimed"
    one = seen(PUZZLE, {0: 4, 1: 3})
    assert (
        "The device of rank 1 is stuck in reduce_scatter of model.layers.1" in diagnose(one).cause
    )
    calls = tuple(
        replace(c, on_device="issued") if c.on_device == "started" else c
        for c in one.ranks[0].collectives
    )
    late = replace(one, ranks={**one.ranks, 0: replace(one.ranks[0], collectives=calls)})
    assert "The device of rank 0 has not begun reduce_scatter" in diagnose(late).cause


def test_cause_gives_only_the_line_without_native_frames() -> None:
    found = diagnose(seen(PUZZLE, {0: 4, 1: 4}, native=False))
    assert "and is at train.py:31 step." in found.cause
    assert "waits for the device" not in found.cause


def test_stuck_devices_with_equal_schedules_are_not_a_code_mismatch() -> None:
    found = diagnose(seen(AGREE, {0: 4, 1: 4}))
    assert (found.verdict, found.culprits) == ("hang", ())
    assert "All members issued reduce_scatter of model.layers.0" in found.cause
    assert "not a mismatch of code" in found.cause
    (table,) = [t for t in found.tables if t.title.startswith("Where Python")]
    assert [row[0] for row in table.rows] == ["ranks 0, 1"]
    assert found.next_step == "", "this was our own recorder"


def test_a_lagging_device_is_the_culprit() -> None:
    four = on_nccl(fsdp2_job(set(), set(), set(), set()).whole(), waiting=(0, 1, 2, 3))
    found = diagnose(seen(four, {0: 5, 1: 5, 2: 4, 3: 5}))
    assert (found.verdict, found.culprits) == ("hang", (2,))
    assert "a device or a link that is stuck" in found.cause


def test_a_clean_run_has_no_table() -> None:
    done = seen(replace(AGREE, stall=None), {0: 7, 1: 7})
    done = replace(done, ranks={r: replace(s, finished=True) for r, s in done.ranks.items()})
    assert not any(t.title.startswith("Where Python") for t in diagnose(done).tables)


def test_cause_says_that_the_missing_rank_waits_for_its_device() -> None:
    """Rank 1 skips the reduction of layer 0 and waits for its device."""
    gone = seen(AGREE, {0: 4})
    short = replace(gone.ranks[1], collectives=gone.ranks[1].collectives[:4])
    short = replace(short, collectives=tuple(replace(c, completed=True) for c in short.collectives))
    found = diagnose(
        replace(gone, ranks={0: gone.ranks[0], 1: short}, stall=Stall(1.0, 3.0, (0,), (1,)))
    )
    assert found.culprits == (1,)
    assert "Rank 1 waits for its device at train.py:31 step." in found.cause


# ------------------------------------------------------------------------ as a table


def test_table_merges_ranks_at_the_same_position() -> None:
    (table,) = [
        t for t in diagnose(seen(AGREE, {0: 4, 1: 4})).tables if t.title.startswith("Where Python")
    ]
    assert table.title == "Where Python and the device are"
    assert table.columns == ("ranks", "Python", "device", "state", "issued at", "issued after it")
    assert table.note == (
        "The device's side is what torch's Flight Recorder says: an operation is begun once the "
        "event before its kernel completed. Where torch does not time events "
        "(TORCH_NCCL_ENABLE_TIMING; it does in moediag's own trials), one that runs is issued."
    )
    (row,) = table.rows
    assert row[2].startswith("reduce_scatter of model.layers.0")
    assert row[2].endswith(" on dp_shard")


def test_a_finished_device_has_a_row_without_a_call() -> None:
    found = device_sentences.table(
        [Front(0, None), device_frontier.fronts(seen(AGREE, {0: 4, 1: 4}))[1]]
    )
    assert found is not None
    assert found.rows[0] == ("rank 0", None, "all completed", None, None, None)
    assert device_sentences.table([Front(0, None), Front(1, None)]) is None
    assert device_sentences.sentence([Front(0, None)]) == ""


# ------------------------------------------------------------------------ stacks

PYSTACK = """Traceback for thread 77 (python) [] (most recent call last):
    (C) File "???", line 0, in _start (/usr/bin/python3.12)
    (Python) File "/home/me/train.py", line 44, in <module>
        step(model)
    (Python) File "/home/me/train.py", line 31, in step
        loss.item()
    (C) File "???", line 0, in at::native::item(at::Tensor const&) (/env/libtorch_cpu.so)
    (C) File "???", line 0, in {} (/usr/lib/x86_64-linux-gnu/libcuda.so.1)
    (C) File "???", line 0, in {} (/usr/lib/x86_64-linux-gnu/libcuda.so.1)
"""


def waits(*functions: str) -> bool:
    (stack,) = parse_pystack(PYSTACK.format(*functions))
    return on_the_device(stack)


def test_waiting_for_the_device_is_recognised_by_its_native_frames() -> None:
    for name in ("cudaStreamSynchronize", "cuEventSynchronize", "cudaDeviceSynchronize",
                 "cuStreamSynchronize", "cuCtxSynchronize", "hipStreamSynchronize"):  # fmt: skip
        assert waits(name, "0x7f12"), name
    assert in_clip().frames[0].function.startswith("0x") and on_the_device(in_clip())


def test_computation_is_not_a_wait_for_the_device() -> None:
    for name in ("cudaLaunchKernel", "cuMemcpyAsync", "cudaEventQuery", "at::native::mm"):
        assert not waits(name, "0x7f12"), name
    assert not on_the_device(in_clip(native=False))


def test_threads_started_by_the_program_are_ignored() -> None:
    frames = (*in_clip().frames[:-1], Frame("/usr/lib/python3.12/threading.py", 995, "_bootstrap"))
    logger = Stack("Thread-1", "py-spy", frames)
    assert waits_for_device([in_clip()])
    assert on_the_device(logger) and not waits_for_device([logger])


def test_nccl_threads_are_ignored() -> None:
    watchdog = Stack("pt_nccl_watchdg", "py-spy", (
        Frame("libcuda.so.1", 0, "cuEventSynchronize", True),
        Frame("libtorch_cuda.so", 0, "c10d::ProcessGroupNCCL::watchdogHandler()", True),
    ))  # fmt: skip
    assert not on_the_device(watchdog)
