"""Stacks as people paste them: without a header, of several ranks in one file, from gdb."""

from __future__ import annotations

import pytest

from moediag.evidence.rank_stacks import (
    in_backward,
    in_collective,
    on_the_device,
    stand,
    that_counts,
)
from moediag.evidence.stack_texts import read

MAIN = """Thread 40 (idle): "MainThread"
    all_reduce (torch/distributed/distributed_c10d.py:29)
    wrapper (torch/distributed/c10d_logger.py:8)
    clip (moe/train.py:41)
    <module> (run.py:7)
Thread 41 (idle)
"""
OTHER = 'Thread 50 (active): "MainThread"\n    load (moe/data.py:3)\n    <module> (run.py:7)\n'


def test_pyspy_without_its_header() -> None:
    (one,) = read(MAIN)
    assert (one.rank, one.process, len(one.stacks)) == (None, "", 1)
    assert in_collective(one.stacks[0])
    assert stand(one.stacks[0]) == "all_reduce, called by clip (train.py:41)"


@pytest.mark.parametrize("title", ["Rank {}", "=== rank {} ===", "# rank{} (node a)", "rank_{}:"])
def test_several_ranks_in_one_file(title: str) -> None:
    text = f"{title.format(3)}\n{MAIN}\n{title.format(11)}\n{OTHER}"
    assert [section.rank for section in read(text)] == [3, 11]
    assert not in_collective(read(text)[1].stacks[0])


def test_several_processes_of_unknown_ranks() -> None:
    text = f"$ py-spy dump\nProcess 40: python run.py\n\n{MAIN}Process 50: python run.py\n\n{OTHER}"
    assert [(one.rank, one.process) for one in read(text)] == [
        (None, "process 40"),
        (None, "process 50"),
    ]


def test_a_second_main_thread_begins_another_process() -> None:
    found = read(f"4 in:\n{MAIN}\n4 in:\n{MAIN}")
    assert [(one.rank, len(one.stacks)) for one in found] == [(None, 1), (None, 1)]
    named = read(f"===== node-0 PID 40 =====\n{MAIN}\n===== node-0 PID 50 =====\n{OTHER}")
    assert [one.process for one in named] == ["process 40", "process 50"]


def test_a_title_also_counts_before_a_header() -> None:
    text = (
        f"rank 3\nProcess 40: python run.py\n\n{MAIN}rank 4\nProcess 50: python run.py\n\n{OTHER}"
    )
    assert [(one.rank, one.process) for one in read(text)] == [(3, "process 40"), (4, "process 50")]


GDB = """(gdb) thread apply all bt
Thread 3 (Thread 0x7f9 (LWP 11)):
#0  0x00007f1 in pthread_cond_wait () from /lib/libc.so.6
#1  0x00007f2 in c10d::ProcessGroupNCCL::ncclCommWatchdog() () from /v/torch/lib/libtorch_cuda.so
Thread 2 (Thread 0x7f1 (LWP 9)):
#0  0x00007f1 in pthread_cond_wait () at ../nptl/x.c:5
#1  0x00007f2 in c10d::ProcessGroupNCCL::WorkNCCL::wait (this=0x1) at /src/ProcessGroupNCCL.cpp:77
#2  0x00007f3 in ?? ()
   from /v/site-packages/torch/lib/libtorch_python.so
#3  Frame 0x5, for file /job/train.py, line 41, in clip (x=1)
"""


def test_gdb_with_python_frames() -> None:
    (one,) = read(GDB)
    (stack,) = one.stacks
    assert [(f.function, f.native) for f in stack.frames] == [
        ("pthread_cond_wait", True),
        ("c10d::ProcessGroupNCCL::WorkNCCL::wait", True),
        ("??", True),
        ("clip", False),
    ]
    assert in_collective(stack) and stack.frames[3].line == 41
    assert stack.frames[2].file.endswith("libtorch_python.so")


def test_each_gdb_stack_has_its_own_thread() -> None:
    text = GDB.replace("ncclCommWatchdog", "work")  # a helper's stack is left out
    (one,) = read(text)
    assert [(stack.thread, len(stack.frames)) for stack in one.stacks] == [
        ("thread 3", 2), ("thread 2", 4),
    ]  # fmt: skip


def test_autograd_is_recognised() -> None:
    text = 'Thread 4 (idle): "MainThread"\n    _engine_run_backward (torch/autograd/graph.py:7)\n'
    stack = that_counts(read(f"{text}    <module> (run.py:3)\n")[0].stacks)
    assert stack is not None and in_backward(stack) and not in_collective(stack)


@pytest.mark.parametrize("text", ["", "Thread 4 is idle", "#1 of 3: fixed", "rank 3\nloss 2\n"])
def test_other_text_is_no_stack(text: str) -> None:
    assert read(text) == ()


@pytest.mark.parametrize("mark", ["sglang-1  | ", "[pod/moe-0/main] ", "2031-05-06 07:08:09 "])
def test_what_a_container_puts_before_each_line_is_removed(mark: str) -> None:
    text = f"Process 40: python run.py\n\n{MAIN}\nProcess 50: python run.py\n\n{OTHER}"
    found = read("".join(f"{mark}{line}".rstrip() + "\n" for line in text.splitlines()))
    assert [(one.process, len(one.stacks[0].frames)) for one in found] == [
        ("process 40", 4),
        ("process 50", 2),
    ]


def test_ranks_before_each_line_tell_whose_stack_it_is() -> None:
    texts = ((3, MAIN), (5, OTHER))
    found = read("".join(f"[rank{r}]: {line}\n" for r, text in texts for line in text.splitlines()))
    assert [(one.rank, in_collective(one.stacks[0])) for one in found] == [(3, True), (5, False)]


def test_a_process_whose_stack_is_cut_off_is_told() -> None:
    found = read(f"Process 40: python run.py\n\n{MAIN}Process 50: python run.py\nPython v3.12\n")
    assert [(one.process, bool(one.stacks)) for one in found] == [
        ("process 40", True),
        ("process 50", False),
    ]


DEVICE = """Thread 3 (Thread 0x7f11 (LWP 410) "pt_nccl_watchdg"):
#0  0x00007f2a in pthread_cond_timedwait () from /lib/x86_64-linux-gnu/libc.so.6
#1  0x00007f2b in c10d::ProcessGroupNCCL::watchdogHandler() () from /opt/libtorch_cuda.so

Thread 1 (Thread 0x7f22 (LWP 400) "python"):
#0  0x00007f3a in sched_yield () from /lib/x86_64-linux-gnu/libc.so.6
#1  0x00007f3b in {} () from /opt/cuda/lib64/libcudart.so.12
#2  0x00007f3c in {} () from /opt/libtorch_cuda.so
#3  0x00007f3d in _PyEval_EvalFrameDefault () from /usr/lib/libpython3.12.so
"""


@pytest.mark.parametrize(
    ("calls", "waits", "at"),
    [
        (("cudaStreamSynchronize", "at::native::_local_scalar_dense_cuda(at::Tensor)"), True,
         "cudaStreamSynchronize, called by at::native::_local_scalar_dense_cuda (.item())"),
        (("cudaDeviceSynchronize", "THCPModule_cudaSynchronize"), True, "cudaDeviceSynchronize"),
        (("hipStreamSynchronize", "c10::hip::stream_synchronize(hipStream_t)"), True,
         "hipStreamSynchronize, called by c10::hip::stream_synchronize"),
        (("memcpy", "at::native::copy_"), False, "sched_yield"),
    ],
)  # fmt: skip
def test_a_thread_of_python_waits_for_the_device(
    calls: tuple[str, str], waits: bool, at: str
) -> None:
    (one,) = read(DEVICE.format(*calls))
    (stack,) = one.stacks
    assert (on_the_device(stack), stand(stack)) == (waits, at)
    native = DEVICE.replace("_PyEval_EvalFrameDefault", "start_thread").format(*calls)
    assert not on_the_device(read(native)[0].stacks[0])
