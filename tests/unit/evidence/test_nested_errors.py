"""Errors of other processes and ranks that arrive as text inside an exception, groups and notes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from moediag.evidence import exits
from moediag.evidence.model import RankError

MAIN = """Traceback (most recent call last):
  File "/home/me/train.py", line 67, in main
    run()
"""
INSIDE = """Traceback (most recent call last):
  File "/env/site-packages/torch/multiprocessing/spawn.py", line 87, in _wrap
    fn(i, *args)
  File "/home/me/child.py", line 20, in read
    raise RuntimeError("cannot open /data/index.bin")
RuntimeError: cannot open /data/index.bin
"""
SPAWN = f"\n\n-- Process 3 terminated with the following error:\n{INSIDE}"
OF_TORCH = """  File "/env/site-packages/torch/distributed/checkpoint/planner.py", line 9, in create
    raise RuntimeError(f"Missing key in checkpoint state_dict: {fqn}.")
RuntimeError: Missing key in checkpoint state_dict: optimizer.state.w.exp_avg.
"""
CHECKPOINT = "CheckpointException ranks:dict_keys([0, 1])\n" + "".join(
    f"Traceback (most recent call last): (RANK {rank})\n{OF_TORCH}" for rank in (0, 1)
)
OF_RAY = """ray::Reader.load() (pid=7, ip=10.0.0.1, actor_id=a1, repr=<Reader object at 0x7f>)
  File "/home/me/reader.py", line 5, in load
    return table[name]
KeyError: 'shard-7'"""
CHAINED = "\nThe above exception was the direct cause of the following exception:\n\n"


def filed(text: str, message: str) -> RankError | None:
    """The error in torchrun's error file."""
    extra = {"py_callstack": text, "timestamp": "5"}
    return exits.elastic_error({"message": {"message": message, "extraInfo": extra}})


def both(kind: str, message: str, before: str = "", module: str = "") -> list[RankError | None]:
    """From torchrun's error file and from a log with torchrun's prefixes."""
    text = f"{before}{MAIN}{module}{kind}: {message}\n"
    log = "\n".join(f"[rank1]: {line}" for line in (text + "done").splitlines())
    return [filed(text, f"{kind}: {message}"), exits.error_in_output(log)]


def seen(error: RankError | None) -> tuple[str, str, str, str]:
    assert error is not None
    return error.type, error.message, error.where, error.after


def test_the_error_of_a_spawned_process() -> None:
    for error in both("ProcessRaisedException", SPAWN, module="torch.multiprocessing.spawn."):
        assert seen(error) == (
            "RuntimeError", "cannot open /data/index.bin (in process 3)", "child.py:20 read", "",
        )  # fmt: skip


def test_the_error_of_a_checkpoint_stands_at_the_call_of_the_user() -> None:
    reason = "Missing key in checkpoint state_dict: optimizer.state.w.exp_avg"
    for error in both("CheckpointException", CHECKPOINT, module="torch.distributed.api."):
        assert seen(error) == (
            "RuntimeError", f"{reason} (on rank 1, and others)", "train.py:67 main", "",
        )  # fmt: skip


def test_the_error_of_a_task_of_ray() -> None:
    for error in both("RayTaskError(KeyError)", OF_RAY, module="ray.exceptions."):
        assert seen(error) == (
            "KeyError", "'shard-7' (in ray::Reader.load)", "reader.py:5 load", "",
        )  # fmt: skip
    within = f'ray::train() (pid=8)\n  File "/home/me/t.py", line 1, in f\nX(KeyError): {OF_RAY}'
    for error in both("RayTaskError(KeyError)", within):
        assert seen(error)[2] == "reader.py:5 load"


@pytest.mark.parametrize(
    "pool",
    ["concurrent.futures.process._", "multiprocessing.pool.", "joblib.externals.loky.executor._"],
)
def test_the_line_in_a_pool_that_raised(pool: str) -> None:
    remote = f'{pool}RemoteTraceback: \n"""\n{INSIDE}"""\n{CHAINED}'
    for error in both("RuntimeError", "cannot open /data/index.bin", before=remote):
        assert seen(error) == (
            "RuntimeError",
            "cannot open /data/index.bin",
            "child.py:20 read",
            "",
        )
    other = both("ValueError", "pool failed", before=remote)
    assert [seen(error)[:3] for error in other] == [
        ("ValueError", "pool failed", "train.py:67 main")
    ] * 2


GROUP = """  + Exception Group Traceback (most recent call last):
  |   File "/home/me/train.py", line 67, in main
  |     raise ExceptionGroup("two readers failed", errors)
  | ExceptionGroup: two readers failed (2 sub-exceptions)
  +-+---------------- 1 ----------------
    | Traceback (most recent call last):
    |   File "/home/me/child.py", line 16, in work
    |     raise KeyError("no tokenizer")
    | KeyError: 'no tokenizer'
    +---------------- 2 ----------------
    | ExceptionGroup: inner (1 sub-exception)
    +-+---------------- 1 ----------------
      | ValueError: shard 7 is empty
      +------------------------------------
"""


def test_the_members_of_a_group_are_told() -> None:
    before = (
        'Traceback (most recent call last):\n  File "/home/me/x.py", line 1, in f\nKeyError: 1\n'
    )
    message = "ExceptionGroup: two readers failed (2 sub-exceptions)"
    for error in (
        filed(GROUP, message),
        filed(f"{before}\nDuring handling …:\n\n{GROUP}", message),
        exits.error_in_output(f"step 7\n{GROUP}done\n"),
        exits.error_in_output("\n".join(f"[rank1]: {line}" for line in GROUP.splitlines())),
    ):
        kind, text, where, _ = seen(error)
        assert (kind, where) == ("ExceptionGroup", "train.py:67 main")
        assert "KeyError at child.py:16 work: 'no tokenizer'" in text
        assert "inner (1 sub-exception)" in text
    many = GROUP.replace(
        "+---------------- 2",
        "+---------------- 2 ----------------\n    | E: x\n" * 5 + "    +---------------- 2",
    )
    assert "; and " in seen(filed(many, message))[1]


def test_notes_are_told() -> None:
    noted = f"{MAIN}KeyError: 'xx'\nwhile reading documents/0007.jsonl line 412\n"
    assert seen(filed(noted, "KeyError: 'xx'"))[1] == (
        "'xx' (while reading documents/0007.jsonl line 412)"
    )
    plain = f"{MAIN}ValueError: two\nlines\n"
    assert seen(filed(plain, "ValueError: two\nlines"))[1] == "two\nlines"


@pytest.mark.parametrize(
    "cut",
    [
        lambda text: text[: text.index("child.py")],
        lambda text: text.replace("RuntimeError: cannot open /data/index.bin\n", ""),
    ],
)
def test_a_text_that_is_cut_leaves_the_outer_error(cut: Callable[[str], str]) -> None:
    error = filed(f"{MAIN}X: {cut(SPAWN)}", f"ProcessRaisedException: {cut(SPAWN)}")
    assert seen(error)[0] == "ProcessRaisedException" and seen(error)[2] == "train.py:67 main"


def test_an_error_that_only_mentions_a_traceback_stays() -> None:
    error = filed(f"{MAIN}ValueError: no Traceback\n", "ValueError: no Traceback")
    assert seen(error) == ("ValueError", "no Traceback", "train.py:67 main", "")
    chain = f"{INSIDE}{CHAINED}{MAIN}ValueError: bad\n"
    assert seen(filed(chain, "ValueError: bad"))[3].endswith("child.py:20 read")
