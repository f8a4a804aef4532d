"""Undamaged files of every kind that moediag reads, as file name -> content."""

from __future__ import annotations

import dataclasses
import html
import json
import pickle
from pathlib import Path

from bench import jobs, pasted
from moediag import protocol

Files = dict[str, bytes]
ROOT = Path(__file__).parents[2]
KEY = "0123456789abcdef"  # of the other node
JOB = "ab" * 16


def files(pattern: str, name: str) -> list[Files]:
    """Each file of the repository that matches ``pattern``, as a folder with one file ``name``."""
    return [{name or path.name: path.read_bytes()} for path in sorted(ROOT.glob(pattern))]


def register() -> list[Files]:
    """The register of hunt's findings, an entry each: a small file takes less time."""
    text = (ROOT / "moediag" / "lab" / "pipeline" / "known.yaml").read_bytes()
    return [{"known.yaml": b"- " + entry} for entry in text.split(b"\n- ")[1:]]


def watched() -> list[Files]:
    """The folder of a watched job of two ranks, whose rank 1 entered another all-reduce."""
    root = ROOT / "tests" / "samples" / "watched"
    return [
        {p.relative_to(root).as_posix(): p.read_bytes() for p in root.rglob("*") if p.is_file()}
    ]


def checkpoints() -> list[Files]:
    """Headers of safetensors files, with their index."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    for layer in range(3):
        header[f"model.layers.{layer}.mlp.experts.0.weight"] = {
            "dtype": "F32", "shape": [8, 16], "data_offsets": [0, 512],
        }  # fmt: skip
    text = json.dumps(header).encode()
    whole = len(text).to_bytes(8, "little") + text
    index = {"weight_map": dict.fromkeys(header, "model.safetensors")}
    return [{"model.safetensors": whole,
             "model.safetensors.index.json": json.dumps(index).encode()}]  # fmt: skip


def messages() -> list[Files]:
    """What another node sends: a pulse, the values in the store, its file at the rendezvous."""
    sample = {"alive": True, "state": "S", "progress": 4, "step": 1, "cpu": 0.5, "runnable": False,
              "stopped": False, "at": 5.0, "work": "", "on_device": False, "blocked": False,
              "looked": True}  # fmt: skip
    pulse = {"schema_version": 1, "key": KEY, "host": "b", "number": 1, "seq": 3, "look": 2,
             "period": 0.5, "samples": {"2": sample, "3": sample}, "heard": {"ab" * 8: 2},
             "has": {"ab" * 8: 1}, "deaths": [2], "published": 1, "over": False,
             "stood": {"progress": {"2": 4}, "waiting": [2], "elsewhere": [3]}}  # fmt: skip
    word = {"node": 1, "host": "b", "token": "cd" * 16, "plan": "ef" * 8, "count": 2, "stage": 1,
            "problems": {"1": "no torch"}, "over": False}  # fmt: skip
    chunk = json.dumps(["rank-2.log", "eJwDAAAAAAE="])
    return [{"pulse": json.dumps(pulse).encode(), "chunk": chunk.encode(), "count": b"1",
             "word": json.dumps(word).encode()}]  # fmt: skip


def tools() -> list[Files]:
    """What other tools than the ranks print: NCCL's RAS as text and as JSON, Horovod, Ray Train,
    torchfrtrace, stacks of py-spy and gdb."""
    status = {"init_state": 0, "async_error": 0, "finalize_called": False, "abort_flag": False}
    ranks = [
        {"rank": rank, "host": "10.0.0.4", "pid": 480 + rank, "cuda_dev": rank, "nvml_dev": rank,
         "status": dict(status), "collective_counts": {"AllReduce": 9 - rank, "AllGather": 2}}
        for rank in range(3)
    ]  # fmt: skip
    gone = {"rank": 3, "host": "10.0.0.5", "pid": 9, "status": {"considered_dead": True}}
    comm = {"hash": "0xae94", "size": 4, "ranks": ranks, "missing_ranks": [gone]}
    ras = {"nccl_version": "2.29.1", "timestamp": "2025-12-19 13:06:53", "communicators": [comm]}
    stall = (
        "[1,0]<stderr>:One or more tensors were submitted to be reduced by subset of ranks and are "
        "waiting for remainder of ranks for more than 60 seconds.\n"
    )
    ray = (
        "(Actor pid=71) `ray.train.report` has not been called by all 4 workers in the group.\n"
        "(Actor pid=71) so far and how long they have been waiting in seconds:\n"
        "(Actor pid=71) {0: 61.2, 1: 60.0, 2: 59.5}\n"
    )
    trace = (
        "Not all ranks joining collective, sequence number: 38\ninternal record id: 38\n"
        "group info: 0:default_pg\ncollective: nccl:all_reduce\nmissing ranks: {1}\n"
        "input sizes: [[4]]\noutput sizes: [[4]]\nworld size: 2\nexpected ranks: {0, 1}\n"
        "collective state: scheduled\n"
    )
    gdb = (
        "Thread 1 (Thread 0x7f11 (LWP 71)):\n#0  0x00007f11 in futex_wait (a=0x1) at futex.c:7\n"
        "#1  0x00007f12 in c10d::Store::wait () from /lib/libtorch_cpu.so\n"
        "#2  Frame 0x7f, for file /job/train.py, line 9, in main ()\n"
    )
    spy = _others()["rank_0.pyspy.json"]
    texts = {
        "ras.txt": _RAS + _RAS.replace("0.00s", "2.05s"),
        "horovod.log": f"{stall}[1,0]<stderr>:Missing ranks:\n[1,0]<stderr>:3: [grad.0, grad.1]\n",
        "stalled.log": f"{stall}Stalled ops: loss [ready ranks: 3], grad.0 [missing ranks: 2, 0]\n",
        "ray.log": ray, "torchfrtrace.txt": trace, "gdb.txt": f"rank 3\n{gdb}",
    }  # fmt: skip
    files = {"ras.json": json.dumps(ras).encode(), "rank_1.json": spy}
    files |= {name: text.encode() for name, text in texts.items()}
    return [files, *({name: data} for name, data in files.items())]


_RAS = """NCCL version 2.29.3 compiled with CUDA 13.0
  Nodes  Processes         GPUs  Processes     GPUs
      1          8            1          8        8

Communicators... (0.00s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    0         1         1         8         8         8   RUNNING  MISMATCH

#0-0 (27a079b828ff1a75) MISMATCH
  Communicator ranks have different AllReduce operation counts
  7 ranks have launched up to operation 6650
  Rank 3 has launched up to operation 6649 -- GPU 3 managed by process 483 on node 172.16.64.210

DEAD
  1 job process is considered dead (unreachable via the RAS network)
  Process 3487984 on node 172.16.64.213 managing GPU 5

#0-0 (cf264af53edbe986) INCOMPLETE
  Missing communicator data from 1 rank
  The missing rank: 5
"""


def attached() -> list[Files]:
    """What the probes of attach bring: torch's debug server, py-spy with local variables, the
    archive of another machine (its files, which are packed after they are damaged)."""
    look = {"pid": 7, "does": "waits", "still": 44.0, "words": "", "held": "", "cpu": 0.1,
            "state": "S", "values": {"step": "4"}}  # fmt: skip
    ranks = {"0": look, "1": look | {"does": "idle"}}
    looks = {"seconds": 31.0, "patience": 30.0, "ranks": ranks, "world_size": 2, "host": "a",
             "missing": [], "launcher": "torchrun", "job": JOB}  # fmt: skip
    trial = dataclasses.asdict(
        protocol.Trial("0", "train.py", "attached", task=protocol.AttachTask(), world_size=2)
    )
    values = [{"name": "rank", "addr": 1, "arg": False, "repr": "1"}]
    spy = [{"thread_name": "MainThread", "pid": 7, "os_thread_id": 7, "active": False, "frames": [
        {"name": "all_reduce", "filename": "/x/torch/distributed/distributed_c10d.py", "line": 3},
        {"name": "main", "filename": "/job/train.py", "line": 7, "locals": values}]}]  # fmt: skip
    dump = json.dumps(dict(jobs.dumps(jobs.healthy(jobs.Layout(2, 1, 1, 1), steps=1)))[0])
    page = f"<h2>Rank 0: host</h2><pre>{html.escape(dump)}</pre><h2>Rank 1: b</h2><pre>{{}}</pre>"
    job = {"job": JOB, "node": None, "store": None, "python": ""}
    files = {
        "fr_trace_json": page.encode(), "pyspy.json": json.dumps(spy).encode(),
        "evidence/0/looks.json": json.dumps(looks).encode(),
        "evidence/0/trial.json": json.dumps(trial).encode(),
        "evidence/0/not-seen.txt": b"rank 0: Flight Recorder (no answer)",
    }  # fmt: skip
    for rank in range(2):
        files[f"evidence/0/rank-{rank}.job.json"] = json.dumps(job).encode()
        files[f"evidence/0/capture/rank-{rank}.pyspy.json"] = json.dumps(spy).encode()
    return [files]


def evidence_folders() -> list[Files]:
    """Returns undamaged folders of what ranks leave."""
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


def _others() -> Files:
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


def pasted_texts() -> list[Files]:
    """Texts in the forms of public reports."""
    return [{name: text.encode() for name, text in one.files.items()} for one in pasted.texts()]
