"""Files are recognised by their content, alone and together; others are noted."""

from __future__ import annotations

import json
import os
import pickle
import random
from dataclasses import replace
from pathlib import Path

import pytest

from bench import jobs
from moediag.evidence import file_loading, foreign, sources
from moediag.evidence.console_output import ends, gave_up_waiting, torchrun_summary
from moediag.evidence.model import ExitStatus
from moediag.evidence.sources import Found, read

SAMPLES = Path(__file__).parents[2] / "samples"
TRACEBACK = 'Traceback (most recent call last):\n  File "/job/t.py", line 3, in f\nValueError: x\n'
SPY = 'Process 25: python t.py\nPython v3.11.7\n\nThread 25 (idle): "MainThread"\n    f (t.py:3)\n'
SPY_JSON = json.dumps([{"thread_name": "MainThread", "frames": [
    {"name": "f", "filename": "t.py", "line": 3}]}])  # fmt: skip
PYSTACK = (
    "Traceback for thread 25 (python) [] (most recent call last):\n"
    '    (Python) File "/job/t.py", line 9, in g\n        wait()\n'
)
FAULT = 'Thread 0x00007fb5 (most recent call first):\n  File "/job/t.py", line 9 in g\n'
ERROR = json.dumps({"message": {"message": "ValueError: no", "extraInfo": {"timestamp": "17"}}})


def put(folder: Path, **files: str | bytes) -> None:
    for name, data in files.items():
        path = folder / name.replace("__", "/").replace("DOT", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data if isinstance(data, bytes) else data.encode())


@pytest.mark.parametrize(
    "name",
    ["rank_3.log", "rank3.out", "job-rank-03.txt", "rank3/stderr.txt", "attempt_0/3/stderr.log",
     "node1/rank_3/log"],
)  # fmt: skip
def test_rank_is_taken_from_the_name_of_a_log(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text(TRACEBACK)
    assert list(read([tmp_path]).outputs) == [3]


@pytest.mark.parametrize("name", ["{}.log", "out_{}.txt", "slurm-123456_{}.out", "00{}.log"])
def test_files_that_count_from_0_are_of_ranks(tmp_path: Path, name: str) -> None:
    for number in range(3):
        (tmp_path / name.format(number)).write_text(TRACEBACK)
    (tmp_path / "seed42.log").write_text(TRACEBACK)
    assert sorted(read([tmp_path]).outputs) == [0, 1, 2]


@pytest.mark.parametrize("numbers", [(3,), (1, 2, 3), (0, 2), (0,)])
def test_other_numbers_in_names_are_no_ranks(tmp_path: Path, numbers: tuple[int, ...]) -> None:
    for number in numbers:
        (tmp_path / f"run_{number}.log").write_text(TRACEBACK)
    assert not read([tmp_path]).outputs


@pytest.mark.parametrize(
    "name",
    ["train.log", "train.log.1", "events-20240101.txt", "train_2025-11-03.log", "slurm-991.out",
     "seed42.log", "sft_v2.log", "issue-369.txt", "3.log", "lora_rank16.log", "frank3.log"],
)  # fmt: skip
def test_an_exception_of_an_unknown_rank_is_kept_and_noted(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(TRACEBACK)
    found = read([tmp_path])
    assert name in found.refused[0] and "shows the rank" in found.refused[0]
    assert [(one.kind, one.rank) for one in found.reports] == [("error", None)]
    assert not found.outputs and found.files == 1


@pytest.mark.parametrize("name", ["node3.log", "worker-3.txt", "host_03.out", "epoch3.log"])
def test_numbers_of_other_things_are_not_ranks(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(TRACEBACK)
    assert not read([tmp_path]).outputs


def test_each_kind_of_file_is_recognised(tmp_path: Path) -> None:
    cases = {
        "rank_1.json": (SPY_JSON, "stacks"), "a_rank_1": (SPY, "stacks"),
        "rank_1.txt": (PYSTACK, "stacks"), "rank-1.stacks": (FAULT, "stacks"),
        "rank_1.error.json": (ERROR, "errors"), "rank_1.log": (TRACEBACK, "outputs"),
    }  # fmt: skip
    for name, (text, where) in cases.items():
        folder = tmp_path / name.replace(".", "-")
        folder.mkdir()
        (folder / name).write_text(text)
        found = read([folder])
        assert (list(getattr(found, where)), found.refused, found.files) == ([1], [], 1), name


def test_files_and_folders_are_read_together(tmp_path: Path) -> None:
    put(tmp_path, aDOTrank_0=SPY, rank_0DOTerrorDOTjson=ERROR, sub__rank_0DOTlog=TRACEBACK)
    job = jobs.write(jobs.healthy(jobs.Layout(dp=2), 1), tmp_path / "dumps")
    found = read([tmp_path / "a.rank_0", tmp_path / "sub", job, job / "nccl_trace_rank_0"])
    assert (list(found.stacks), list(found.outputs), sorted(found.dumps)) == ([0], [0], [0, 1])
    assert found.files == 4  # the dump given twice is read once
    assert read([tmp_path]).errors[0].type == "ValueError"


def test_only_the_last_attempt_of_torchrun_is_read(tmp_path: Path) -> None:
    tree = tmp_path / "none_abc"
    put(tree, attempt_0__0__stderrDOTlog=TRACEBACK, attempt_0__1__stdoutDOTlog="step 1\n")
    put(tree, attempt_1__0__stderrDOTlog="step 1 loss 2\n", attempt_1__1__errorDOTjson=ERROR)
    put(tree, attempt_1__1__stdoutDOTlog="")
    found = read([tmp_path])
    assert "Traceback" not in found.outputs[0] and list(found.errors) == [1]
    assert found.refused == []  # an empty output is not reported


def test_one_log_with_lines_of_all_ranks_is_split() -> None:
    found = read([SAMPLES / "torchrun" / "launcher.log"])
    assert found.exits == {
        0: ExitStatus(signal="SIGTERM", by_us=True), 1: ExitStatus(signal="SIGABRT"),
    }  # fmt: skip
    assert found.first == (1,) and sorted(found.outputs) == [0, 1]
    assert found.outputs[1].startswith("Traceback") and "boom" in found.outputs[1]


def test_missing_fields_in_torchrun_output_are_ignored() -> None:
    assert torchrun_summary("exitcode: 1") == ({}, ())


@pytest.mark.parametrize(
    ("text", "waited"),
    [
        ("Timed out waiting 1800000ms for recv operation to complete", True),
        ("[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(…)", True),
        ("wait timeout after 5000ms, collective timed out", True),
        ("Connection reset by peer", False),
        ("dataset download timed out", False),
    ],
)
def test_timeout_errors_are_recognised(text: str, waited: bool) -> None:
    from moediag.evidence.model import RankError

    assert gave_up_waiting(RankError("RuntimeError", text)) is waited


def test_a_very_long_log_is_read_at_both_ends(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"begin\n" + b"y" * 99 + b"\n" + b"middle line\n" * 400_000 + b"end\n")
    text = ends(path)
    assert text.startswith("begin\n") and text.endswith("end\n") and len(text) < 1_300_000
    assert set(text.splitlines()) == {"begin", "y" * 99, "middle line", "end"}


def test_a_failure_in_the_middle_of_a_very_long_log_is_read(tmp_path: Path) -> None:
    path, filler = tmp_path / "x", b"middle line\n" * 200_000
    path.write_bytes(
        filler + TRACEBACK.encode() + filler + b"srun: error: n1: task 3: Killed\n" + filler
    )
    text = ends(path)
    assert TRACEBACK in text and "task 3: Killed" in text and len(text) < 1_300_000
    assert all(line for line in text.splitlines())  # no line is cut


# ------------------------------------------------------------------------ refused


def test_a_refused_file_is_reported(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> object:
            return os.system, ("true",)

    put(
        tmp_path, rank_0=pickle.dumps(Evil()), rank_1=b"", rank_2=b"\x80\x04]",
        rank_3=b"\x7fELF\0\0", rank_4DOTjson='{"entries": [{"record',
        rank_5DOTjson="[" * 100_000, rank_6DOTjson='{"a": 1}', README="see the wiki\n",
        rank_7=pickle.dumps({"version": "9.0", "entries": [], "pg_config": {}}),
        rank_8=pickle.dumps([1, 2]),
    )  # fmt: skip
    os.mkfifo(tmp_path / "pipe")
    found = read([tmp_path])
    said = {Path(text.partition(" (")[0]).name: text.partition(" (")[2] for text in found.refused}
    assert said["rank_0"].startswith("asks for posix.system")
    assert "empty" in said["rank_1"] and "truncated" in said["rank_2"]
    assert "neither text" in said["rank_3"] and "truncated" in said["rank_4.json"]
    assert said["rank_5.json"] and "unrecognised" in said["rank_6.json"]
    assert "unrecognised" in said["README"] and "format 9.0" in said["rank_7"]
    assert "neither entries" in said["rank_8"] and "not a regular file" in said["pipe"]
    assert found.files == 0


def test_the_newer_of_two_dumps_of_a_rank_is_used(tmp_path: Path) -> None:
    old, new = jobs.healthy(jobs.Layout(dp=2), 1), jobs.healthy(jobs.Layout(dp=2), 2)
    jobs.write(old, tmp_path / "b")
    jobs.write(new, tmp_path / "a")
    found = read([tmp_path])
    assert len(found.dumps[0].kind) == 10 and len(found.refused) == 2
    assert "younger" in found.refused[0]


def test_random_bytes_are_refused_and_their_rank_is_not_seen(tmp_path: Path) -> None:
    jobs.write(jobs.healthy(jobs.Layout(dp=4), 2), tmp_path)
    for seed in range(40):
        chance = random.Random(seed)
        (tmp_path / "nccl_trace_rank_3").write_bytes(chance.randbytes(5000))
        found = read([tmp_path])
        assert sorted(found.dumps) == [0, 1, 2] and found.unread == {3}
        assert "nccl_trace_rank_3" in found.refused[0] and not found.outputs
    seen = foreign.evidence(found)
    assert "rank 3: no evidence found" in seen.not_seen and seen.world_size == 4


def test_two_dumps_of_a_rank_show_whether_it_moved(tmp_path: Path) -> None:
    job = jobs.faulty(jobs.healthy(jobs.Layout(dp=4), 3), "stuck", 1)
    jobs.write(job, tmp_path / "first")
    jobs.write(job, tmp_path / "second")
    found = read([tmp_path])
    assert found.stood and not found.moved
    jobs.write(replace(job, stuck={}), tmp_path / "second")
    found = read([tmp_path])
    assert found.moved and not found.stood


def test_the_rank_in_the_content_is_preferred_to_the_name(tmp_path: Path) -> None:
    raw = dict(jobs.dumps(jobs.healthy(jobs.Layout(pp=2, dp=2), 1)))
    (tmp_path / "rank_0").write_bytes(pickle.dumps(raw[3]))
    (tmp_path / "dump").write_bytes(pickle.dumps(raw[2]))  # the rank is in its content
    found = read([tmp_path])
    assert sorted(found.dumps) == [2, 3] and "says rank 3" in found.refused[0]


def test_many_files_of_unknown_ranks_are_counted(tmp_path: Path) -> None:
    for letter in "abcdefghijkl":
        (tmp_path / f"{letter}.txt").write_text(TRACEBACK)
    found = read([tmp_path])
    assert len(found.refused) == 9 and "4 more files" in found.refused[-1]


def test_the_number_of_files_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "MAX_FILES", 2)
    put(tmp_path, rank_0=TRACEBACK, rank_1=TRACEBACK, rank_2=TRACEBACK)
    assert sorted(read([tmp_path]).outputs) == [0, 1]


def test_several_readers_give_equal_evidence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = jobs.write(jobs.healthy(jobs.Layout(dp=4), 3), tmp_path / "d")
    put(folder, rank_9DOTlog=TRACEBACK, rank_8=b"\x80\x04]")
    alone = read([folder])
    monkeypatch.setattr(file_loading, "_MUCH", 1)
    together = read([folder])
    assert _facts(alone) == _facts(together)
    assert together.files == 5 and len(together.refused) == 1


def _facts(found: Found) -> tuple[object, ...]:
    kinds = {rank: (dump.kinds, list(dump.kind)) for rank, dump in found.dumps.items()}
    return kinds, found.outputs, found.refused
