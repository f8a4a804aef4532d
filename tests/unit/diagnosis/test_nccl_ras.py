"""Pages about what NCCL's RAS prints, in the text of several releases and in JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moediag.diagnosis import diagnose
from moediag.evidence import foreign, nccl_ras, sources
from moediag.result import Diagnosis

JOB = """NCCL version 2.29.3 compiled with CUDA 13.0
CUDA runtime version 13000, driver version 13000

Job summary
===========

  Nodes  Processes         GPUs  Processes     GPUs
(total)   per node  per process    (total)  (total)
      1          8            1          8        8

Communicators... ({took}s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
    0         1         1         8         {size}         8   RUNNING  {errors}
"""
AHEAD = """
Warnings
========

#0-0 (27a079b828ff1a75) MISMATCH
  Communicator ranks have different AllReduce operation counts
  7 ranks have launched up to operation 6650
  Rank 3 has launched up to operation 6649 -- GPU 3 managed by process 483 on node 172.16.64.210

"""
# 2.24 counts all operations together.
OLD = AHEAD.replace("AllReduce operation counts", "collective operation counts")
STATUS = """
#0-0 (9e17999afaa87dbb) MISMATCH
  Communicator ranks have different status
  7 ranks have status RUNNING
  Rank 3 has status NOCOMM -- GPU 3 managed by process 483 on node 172.16.64.210
"""
DEAD = """
Errors
======

DEAD
  1 job process is considered dead (unreachable via the RAS network)
  Process 3487984 on node 172.16.64.213 managing GPU 5

#0-0 (cf264af53edbe986) INCOMPLETE
  Missing communicator data from 1 rank
  {missing}
"""
ERROR = """
#0-0 (cf264af53edbe986) ERROR
  Asynchronous errors on 3 ranks
  2 ranks reported Remote process error
  Rank 1 -- GPU 1 managed by process 481 on node 172.16.64.210
  Rank 2 -- GPU 2 managed by process 482 on node 172.16.64.210
  Rank 5 reported Unhandled CUDA error -- GPU 5 managed by process 485 on node 172.16.64.210
"""


def text(*parts: str, took: str = "0.00", size: int = 8, errors: str = "MISMATCH") -> str:
    return JOB.format(took=took, size=size, errors=errors) + "".join(parts)


def page(folder: Path, **files: str) -> Diagnosis:
    for old in folder.iterdir():
        old.unlink()
    for name, content in files.items():
        (folder / f"{name}.{'json' if content.startswith('{') else 'txt'}").write_text(content)
    found = sources.read([folder])
    assert found.files == len(files) and not found.refused
    return diagnose(foreign.evidence(found))


def raw(counts: dict[int, int], **changed: Any) -> dict[str, Any]:
    status = {"init_state": 0, "async_error": 0, "finalize_called": False,
              "destroy_flag": False, "abort_flag": False}  # fmt: skip
    ranks = [
        {"rank": rank, "host": "10.0.0.4", "pid": 480 + rank, "cuda_dev": rank, "nvml_dev": rank,
         "status": dict(status), "collective_counts": {"AllReduce": count, "AllGather": 2}}
        for rank, count in counts.items()
    ]  # fmt: skip
    comm = {"hash": "0xae94", "size": len(ranks), "ranks": ranks, "missing_ranks": []} | changed
    return {"nccl_version": "2.29.1", "timestamp": "2025-12-19 13:06:53", "communicators": [comm]}


@pytest.mark.parametrize("difference", [AHEAD, OLD, STATUS])
def test_one_reading_names_nobody(tmp_path: Path, difference: str) -> None:
    found = page(tmp_path, one=text(difference))
    assert (found.verdict, found.culprits, found.victims) == ("inconclusive", (), ())
    assert "ank 3 has" in found.cause and "process 483 on node 172.16.64.210" in found.cause
    assert "ncclras` again" in found.next_step


@pytest.mark.parametrize("one_file", [True, False])
def test_two_equal_readings_show_that_the_job_stands(tmp_path: Path, one_file: bool) -> None:
    first, second = text(AHEAD, took="0.00"), text(AHEAD, took="2.05")
    files = {"one": first + second} if one_file else {"one": first, "two": second}
    found = page(tmp_path, **files)
    assert (found.verdict, found.culprits) == ("hang", (3,)) and 0 in found.victims
    moved = second.replace("6650", "6700").replace("6649", "6699")
    assert page(tmp_path, one=first, two=moved).verdict == "inconclusive"
    assert page(tmp_path, one=first, two=first).verdict == "inconclusive"  # the same file twice


@pytest.mark.parametrize(
    ("difference", "size"),
    [
        # ranks of a communicator with other numbers than the job's
        (AHEAD, 4),
        # who is ahead may be the one that is wrong
        (AHEAD.replace("up to operation 6649", "up to operation 6651"), 8),
        (STATUS, 8),
    ],
)
def test_nobody_is_named_where_the_ranks_may_be_others(
    tmp_path: Path, difference: str, size: int
) -> None:
    files = {took: text(difference, took=f"0.0{took[-1]}", size=size) for took in ("t1", "t2")}
    found = page(tmp_path, **files)
    assert (found.verdict, found.culprits, found.victims) == ("hang", (), ())


def test_a_rank_that_differs_in_two_ways_is_not_named(tmp_path: Path) -> None:
    other = AHEAD.replace("AllReduce", "AllGather").replace("operation 6649", "operation 6651")
    files = {took: text(AHEAD, other, took=f"0.0{took[-1]}") for took in ("t1", "t2")}
    found = page(tmp_path, **files)
    assert (found.verdict, found.culprits) == ("hang", ())
    assert "AllReduce 6649" in found.cause and "AllGather 6651" in found.cause


@pytest.mark.parametrize(
    "missing",
    ["The missing rank: 5", "Rank 5 -- GPU 5 managed by process 3487984 on node 172.16.64.213"],
)
def test_a_dead_process_is_told(tmp_path: Path, missing: str) -> None:
    found = page(tmp_path, one=text(DEAD.format(missing=missing), errors="INCOMPLETE"))
    assert (found.verdict, found.culprits) == ("crash", ())
    assert "process 3487984 on node 172.16.64.213" in found.cause and "rank 5 of" in found.cause
    monitor = (
        "RAS Monitor Mode\n[2025-12-19 13:07:07] PEER_DEAD: Process 15 on node 10.0.0.4 managing"
    )
    assert "process 15 on node 10.0.0.4" in page(tmp_path, one=monitor).cause


def test_a_process_that_does_not_answer_is_not_yet_dead(tmp_path: Path) -> None:
    silent = DEAD.partition("#0-0")[2].format(missing="The missing ranks: 2, 5")
    found = page(tmp_path, one=text("\n#0-0", silent, errors="INCOMPLETE"))
    assert found.verdict == "inconclusive" and "ranks 2, 5 of communicator" in found.cause


def test_errors_of_ranks_are_told(tmp_path: Path) -> None:
    found = page(tmp_path, one=text(ERROR, errors="ERROR"))
    assert (found.verdict, found.culprits) == ("crash", ())
    reports = nccl_ras.read(text(ERROR))
    assert [one.about for one in reports] == [(1, 2), (5,)]
    assert "Unhandled CUDA error" in reports[1].text


def test_a_healthy_job_names_nobody(tmp_path: Path) -> None:
    for healthy in (text(errors="OK"), json.dumps(raw(dict.fromkeys(range(8), 641)))):
        found = page(tmp_path, one=healthy)
        assert (found.verdict, found.culprits) == ("inconclusive", ())
        assert "no rank differs" in found.cause


def test_json_tells_the_same(tmp_path: Path) -> None:
    behind = raw({rank: 640 if rank == 3 else 641 for rank in range(8)})
    found = page(tmp_path, one=json.dumps(behind))
    assert found.verdict == "inconclusive"
    assert (
        "rank 3 has launched up to AllReduce 640" in found.cause and "AllGather" not in found.cause
    )
    later = json.dumps(behind | {"timestamp": "2025-12-19 13:08:00"})
    again = page(tmp_path, one=json.dumps(behind), two=later)
    assert (again.verdict, again.culprits) == ("hang", (3,))


def test_json_tells_dead_and_broken_ranks(tmp_path: Path) -> None:
    dead = {"rank": 5, "host": "10.0.0.9", "pid": 77, "nvml_dev": 5,
            "status": {"unresponsive": True, "considered_dead": True}}  # fmt: skip
    found = page(tmp_path, one=json.dumps(raw(dict.fromkeys(range(5), 6), missing_ranks=[dead])))
    assert found.verdict == "crash" and "process 77 on node 10.0.0.9" in found.cause
    broken = raw(dict.fromkeys(range(4), 6))
    broken["communicators"][0]["ranks"][2]["status"]["async_error"] = 1
    assert (
        "rank 2 of communicator 0xae94 reported: Unhandled CUDA error"
        in page(tmp_path, one=json.dumps(broken)).cause
    )


@pytest.mark.parametrize("kept", [560, 700, 900, 1000])
def test_a_text_that_is_cut_names_nobody(tmp_path: Path, kept: int) -> None:
    assert page(tmp_path, one=text(AHEAD)[:kept]).culprits == ()


@pytest.mark.parametrize(
    "damaged",
    [
        {"nccl_version": 2, "communicators": [7, {"ranks": [{"rank": "x"}, 5], "size": "8"}]},
        {"nccl_version": "2.29", "communicators": {}},
        raw({0: 1, 1: 2}, ranks=[{"rank": 0, "collective_counts": [], "status": 3}]),
    ],
)
def test_damaged_json_names_nobody(tmp_path: Path, damaged: dict[str, Any]) -> None:
    found = page(tmp_path, one=json.dumps(damaged))
    assert found.verdict == "inconclusive" and not found.culprits


def test_other_texts_are_no_reading() -> None:
    for other in ("NCCL version 2.26.2+cuda12.6\nstep 1\n", "Group of ranks\n", "[rank0]: x\n"):
        assert nccl_ras.read(other) == ()
    assert nccl_ras.of_json({"a": 1}) is None and nccl_ras.of_json([1]) is None
