"""Undamaged files of every kind that moediag reads, as file name -> content."""

from __future__ import annotations

import dataclasses
import json
import pickle
import typing
from pathlib import Path
from typing import Any

from bench import jobs
from moediag import protocol

Files = dict[str, bytes]
ROOT = Path(__file__).parents[2]
KEY = "0123456789abcdef"  # of the other node
JOB = "ab" * 16


def files(pattern: str, name: str) -> list[Files]:
    """Each file of the repository that matches ``pattern``, as a folder with one file ``name``."""
    return [{name or path.name: path.read_bytes()} for path in sorted(ROOT.glob(pattern))]


def journals() -> list[Files]:
    """Journals of a run, with finished trials."""
    header = {"e": "header", "schema_version": 2, "campaign": "run", "question": {"set": ["a=1"]},
              "command": ["moediag"], "digests": {"scenario": "0" * 64}, "kept": {}}  # fmt: skip
    found = []
    for path in sorted(ROOT.glob("tests/golden/results/*.json")):
        trials = json.loads(path.read_text(encoding="utf-8"))["trials"]
        lines = [
            header,
            *({"e": "trial", "name": str(n), "value": t} for n, t in enumerate(trials)),
        ]
        found.append({"journal.jsonl": b"\n".join(json.dumps(one).encode() for one in lines)})
    return found


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


def trials() -> list[Files]:
    """Folders of trials whose ranks measured all that an outcome may have, a folder for each kind
    of trial, and then one for each thing that is measured."""
    whole = dataclasses.replace(
        _filled(protocol.Outcome), applicable=None, incomparable="", repeats=""
    )
    names = [field.name for field in dataclasses.fields(whole)]
    apart = [protocol.Outcome(**{"rank": 0, name: getattr(whole, name)}) for name in names]
    return [
        *(_trial(_filled(task), whole) for task in typing.get_args(protocol.Task)),
        *(_trial(protocol.StepTask(), outcome) for outcome in apart),
    ]


def _trial(task: protocol.Task, outcome: protocol.Outcome) -> Files:
    exits = {str(rank): {"code": 0} for rank in range(2)}
    trial = protocol.Trial("t", "s", "unfixed", task=task)
    files = {
        protocol.TRIAL_FILE: dataclasses.asdict(trial),
        protocol.LAUNCH_FILE: {"schema_version": 1, "started": 1.0, "exits": exits},
    }
    for rank in range(2):
        one = dataclasses.replace(outcome, rank=rank)
        files[protocol.outcome_file(rank)] = dataclasses.asdict(one)
    return {name: json.dumps(raw).encode() for name, raw in files.items()}


def _filled(hint: Any) -> Any:
    """A value of this type, with one element wherever there may be some."""
    args = typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        hints = typing.get_type_hints(hint)
        fields = [field for field in dataclasses.fields(hint) if field.init]
        return hint(**{f.name: f.default if f.name == "kind" else _filled(hints[f.name])
                       for f in fields})  # type: ignore[operator]  # fmt: skip
    match typing.get_origin(hint):
        case typing.Union:
            return _filled(args[0])
        case origin if origin is list:
            return [_filled(args[0])]
        case origin if origin is tuple:
            return tuple(_filled(one) for one in args if one is not Ellipsis)
        case origin if origin is not None:  # a mapping
            return {"1": _filled(args[1])}
    return {str: "a", int: 1, float: 0.5, bool: True}.get(hint)


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
