"""What torch raises in place of an exception of a data loader's worker."""

from __future__ import annotations

import pytest

from moediag.evidence import exits, tracebacks
from moediag.evidence.model import RankError

CHAIN = """  File "/home/me/data.py", line 3, in lookup
    return table[name]
KeyError: 'x'

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
"""
WORKER = """  File "/env/site-packages/torch/utils/data/_utils/worker.py", line 374, in _loop
    data = fetcher.fetch(index)
  File "/home/me/train.py", line 26, in __getitem__
    raise ValueError("no labels")
ValueError: no labels
"""
OUTER = """Traceback (most recent call last):
  File "/home/me/train.py", line 67, in main
    for batch in loader:
"""


def caught(worker: str) -> str:
    head = "Caught ValueError in DataLoader worker process 0."
    return f"{head}\nOriginal Traceback (most recent call last):\n{worker}"


def is_the_worker_s(error: RankError | None) -> bool:
    return error is not None and (error.type, error.message, error.where, error.after) == (
        "ValueError", "no labels (in DataLoader worker process 0)", "train.py:26 __getitem__", "",
    )  # fmt: skip


@pytest.mark.parametrize("worker", [WORKER, CHAIN + WORKER])
def test_the_recorded_exception_is_the_worker_s(worker: str) -> None:
    outer = RankError("RuntimeError", caught(worker), "train.py:67 main", after="KeyError: 'x'")
    assert is_the_worker_s(tracebacks.unwrapped(outer))


@pytest.mark.parametrize("prefix", ["", "[rank1]: "])
def test_so_is_the_one_in_a_log(prefix: str) -> None:
    lines = f"{OUTER}ValueError: {caught(WORKER)}done\n".splitlines()
    assert is_the_worker_s(exits.error_in_output("\n".join(prefix + line for line in lines)))


def test_so_is_the_one_in_torchrun_s_error_file() -> None:
    message = f"ValueError: {caught(WORKER)}"
    extra = {"py_callstack": OUTER + message, "timestamp": "5"}
    error = exits.elastic_error({"message": {"message": message, "extraInfo": extra}})
    assert is_the_worker_s(error)
    assert error is not None and error.frames[0].line == 26


@pytest.mark.parametrize(
    "message",
    [
        "no labels",
        "Caught ValueError in DataLoader worker process 0.",
        caught("  File cut short"),
        "Caught cold in the data.\nOriginal text",
    ],
)
def test_other_messages_stay_as_they_are(message: str) -> None:
    error = RankError("ValueError", message, "train.py:67 main")
    assert tracebacks.unwrapped(error) is error
