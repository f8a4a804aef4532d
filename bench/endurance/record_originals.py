"""Undamaged records of moediag's own, most of them with all fields that their class has."""

from __future__ import annotations

import dataclasses
import enum
import json
import types
import typing
from collections.abc import Mapping
from typing import Any

from bench.endurance.originals import ROOT, Files, watched
from moediag import protocol
from moediag.lab.campaign.bisect.timeline import ProbeRecord
from moediag.lab.campaign.hunt.findings import HuntCell
from moediag.lab.campaign.hunt.pursued import Pursued
from moediag.lab.campaign.matrix.cells import Cell
from moediag.lab.campaign.nightly.drive import _Done
from moediag.lab.campaign.nightly.night import Night
from moediag.lab.campaign.sweep.summary import SweepRow
from moediag.pipeline import resume
from moediag.protocol import recorded_state as words
from moediag.protocol.checked import MAY_FAIL, Checked
from moediag.protocol.measured import Measured, measured_file
from moediag.protocol.recorded_state import Recorded, RecordedStep, recorded_file, state_file
from moediag.protocol.relations import ReleaseListing

CAMPAIGNS: Mapping[str, type] = {
    "probe": ProbeRecord, "cell": HuntCell, "pursued": Pursued, "listing": ReleaseListing,
    "table cell": Cell, "job": _Done, "scenario": SweepRow,
}  # fmt: skip
"""What a line of a journal holds, by a name of its own."""
_MODULE = "model.layers.0.mlp"
_TEXTS = {"version": "5.0", "axis": "dp_shard", "dtype": "bfloat16"}  # of fields with these names


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


def campaigns() -> list[Files]:
    """Journals of the other campaigns."""
    found = []
    for kind, record in CAMPAIGNS.items():
        value = _plain(_filled(record))
        header = {
            "e": "header", "schema_version": 2, "campaign": kind, "question": {"package": "x"},
            "command": ["moediag", kind], "digests": {}, "kept": {},
        }  # fmt: skip
        lines = [header, {"e": kind.split()[-1], "name": "a", "value": value}]
        if kind == "probe":
            rate = {"shown": 1, "trials": 1}
            target = {"variant": "unfixed", "declared": ["hang"], "signatures": ["hang:x"],
                      "match": "exact", "rate": rate}  # fmt: skip
            header |= {"campaign": "bisect", "kept": {"releases": ["4.0", "5.0"]}}
            lines += [{"e": "learned", "name": "target", "value": target},
                      {"e": "extra", "name": "b", "value": value},
                      {"e": "resumed", "digests": {"a": "0"}}]  # fmt: skip
        found.append({"journal.jsonl": b"".join(_json(one) + b"\n" for one in lines)})
    return found


def nights() -> list[Files]:
    """Two nights, whose entries are the same ones."""
    one = _plain(_filled(Night)) | {"schema_version": 1}
    return [{f"2026112{day}T000000-a.json": _json(one | {"started": f"2026-11-2{day}T00:00:00"})
             for day in (4, 5)}]  # fmt: skip


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


def _filled(hint: Any, name: str = "") -> Any:
    """A value of this type, with one element wherever there may be some."""
    args = typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        hints = typing.get_type_hints(hint)
        fields = [field for field in dataclasses.fields(hint) if field.init]
        known = {"kind"} & {f.name for f in fields if f.default is not dataclasses.MISSING}
        return hint(**{f.name: f.default if f.name in known else _filled(hints[f.name], f.name)
                       for f in fields})  # type: ignore[operator]  # fmt: skip
    match typing.get_origin(hint):
        case typing.Union | types.UnionType:
            return _filled(args[0])
        case origin if origin is list:
            return [_filled(args[0])]
        case origin if origin is tuple:
            return tuple(_filled(one) for one in args if one is not Ellipsis)
        case origin if origin is not None:  # a mapping
            return {"1": _filled(args[1])}
    if isinstance(hint, enum.EnumMeta):
        return next(iter(hint))
    return {str: _TEXTS.get(name, "a"), int: 1, float: 0.5, bool: True}.get(hint)


def resumed() -> list[Files]:
    """What the two ranks of each of the four runs of a resume recorded."""
    files = {}
    for run in ("", resume.RESUMED, resume.STRAIGHT, resume.AGAIN):
        first = 0 if run != resume.RESUMED else 1
        call = words.Transfer(1, "torch.save", "train.py:9 save", "/data/ckpt.pt", ["f1"],
                              {"lr": ["0.1"]}, 8)  # fmt: skip
        place = "/".join(filter(None, (run, resume.RECORDED)))
        for rank in range(2):
            own = Recorded(
                rank, 2, 7, True, 4 - first, saved_after=None if run else 1,
                batches=[f"{7 * step:x}" for step in range(first, 4)],
                losses=[[0.5 / (step + 1)] for step in range(first, 4)],
                saves=[] if run else [call], loads=[call] if first else [], puts=[call],
            )  # fmt: skip
            files[f"{place}/{recorded_file(rank)}"] = _json(dataclasses.asdict(own))
            for step in range(1, 4):
                state = RecordedStep(step, _items(rank, step + first, run == resume.RESUMED))
                files[f"{place}/{state_file(rank, step)}"] = _json(dataclasses.asdict(state))
    other = {path: data for path, data in files.items()
             if not (path.startswith(resume.RESUMED) and "rank-1" in path)}  # fmt: skip
    return [files, other]


def _items(rank: int, step: int, lost: bool) -> words.Items:
    half = words.Part(f"{step * 17 + rank:x}", f"p{rank}", 4, 8, 4 * rank)
    weight = words.Item(f"f{step}", [0.5 * step, 1.0], [f"r{step}{rank}"], half)
    return {
        words.PARAMETER: {f"{_MODULE}.weight": weight, "b": words.Item(f"b{step}", [0.1, 0.2])},
        words.STATE: {f"exp_avg of {_MODULE}.weight": words.Item(f"e{step}", [0.5, 1.0])},
        words.COUNT: {"0": words.Item(str(0 if lost else step))},
        words.SETTING: {"lr of 0": words.Item("0.1")}, words.MODE: {"": words.Item("training")},
        words.COPY: {"0: weight": weight}, words.GENERATOR: {"cpu": words.Item(f"g{step}{lost}")},
        words.SCHEDULER: {"LambdaLR": words.Item(str(step))},
    }  # fmt: skip


def measured() -> list[Files]:
    """What two ranks of a verified job measured."""
    one = dataclasses.replace(_filled(Measured), world_size=2, layout={"dp_shard": 2})
    return [{f"measured/{measured_file(rank)}": _json(_plain(dataclasses.replace(one, rank=rank)))
             for rank in range(2)}]  # fmt: skip


def reported() -> list[Files]:
    """How a test ended on two ranks."""
    said = {"outcome": "failed", "text": "E  assert 1", "line": "test_a.py:7: assert 1",
            "reason": "", "expected": False}  # fmt: skip
    return [{"rank-0.json": _json(said), "rank-1.json": _json(said | {"outcome": "passed"})}]


def settings() -> list[Files]:
    """Configuration files."""
    text = (
        'patience = 60.0\nlaws = true\nallow = ["replicas-apart:model.*", "routers-frozen"]\n'
        'notify = "https://example.org"\n[TABLE]\non-hang = "abort"\nlaws-every = 10\n'
    )
    project = (
        f'[project]\nname = "a"\n[tool.moediag]\n{text.replace("TABLE", "tool.moediag.watch")}'
    )
    return [{"moediag.toml": text.replace("TABLE", "watch").encode()},
            {"pyproject.toml": project.encode()}]  # fmt: skip


def answer_of_check() -> Checked:
    """What the worker of a check writes, with a simulated case in the folder ``case``."""
    one: Checked = _filled(Checked)
    case = dataclasses.replace(one.cases[0], folder="case")
    finding = dataclasses.replace(one.findings[0], level=MAY_FAIL)
    return dataclasses.replace(one, cases=[case], problem="", findings=[finding])


def checked() -> list[Files]:
    """A model's configuration, and the logs of two simulated ranks."""
    (sample,) = watched()
    logs = {f"worker/case/{name.partition('/')[2]}": data for name, data in sample.items()
            if name.startswith("attempt-0/") and "laws" not in name}  # fmt: skip
    config = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}
    return [{"config.json": _json(config), **logs}]


def processes() -> list[Files]:
    """A launcher and two ranks; a launcher of MPI; a task of Ray."""
    found = []
    for command, variables in _LAUNCHED:
        files = {"10.cmdline": _words(command), "10.environ": b"PATH=/bin\0", "10.maps": b""}
        for rank in range(2):
            own = "".join(f"{name}={value or rank}\0" for name, value in variables.items())
            files[f"{11 + rank}.cmdline"] = _words("/usr/bin/python -u train.py --lr 1")
            files[f"{11 + rank}.environ"] = own.encode()
            files[f"{11 + rank}.maps"] = _TORCH
        found.append(files)
    return found


_TORCH = b"7f00-7f10 r-xp 0 00:00 1 /venv/torch/lib/libtorch_cpu.so\n"
_LAUNCHED: tuple[tuple[str, dict[str, str]], ...] = (
    ("python /venv/bin/torchrun --nproc-per-node 2 train.py",
     {"RANK": "", "WORLD_SIZE": "2", "LOCAL_RANK": "", "LOCAL_WORLD_SIZE": "2",
      "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none"}),
    ("mpirun -n 2 python train.py",
     {"OMPI_COMM_WORLD_RANK": "", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": ""}),
    ("/ray/raylet --node 1", {"RANK": "", "WORLD_SIZE": "2"}),
)  # fmt: skip


def laws() -> list[Files]:
    """The folder of a watched job whose ranks recorded events of every law."""
    (sample,) = watched()
    found = dict(sample)
    for rank in range(2):
        name = f"attempt-0/{protocol.laws_file(rank)}"
        events = [{"e": kind, "t": 1.0, **fields} for kind, fields in _EVENTS]
        found[name] = sample[name] + b"".join(_json(one) + b"\n" for one in events)
    found["attempts.jsonl"] = b'{"attempt": 7, "verdict": "crash"}\n'
    return [found]


_LINE = {"step": 3, "line": "train.py:9 main"}
_SKETCH = [0.5, 1.25]
_EVENTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("allow", {"law": "replicas-apart:model.*"}),
    ("same_order", {**_LINE, "epoch": 0, "sampler": "DistributedSampler"}),
    ("norm", {**_LINE, "names": ["weight"], "norm": 2.0, "max_norm": 1.0, "scale": 0.0}),
    ("declared", {**_LINE, "tensors": [
        {"axes": ["dp"], "ranks": [0, 1], "part": "", "shape": [4, 4], "data": True,
         "line": "a.py:1", "print": None, "sketch": _SKETCH}]}),
    ("load", {**_LINE, "parameters": 3, "missing": ["a"], "unexpected": ["b"], "counts": [1, 1]}),
    ("sharded", {"step": 1, "shards": {"weight": ["f1", True, True]}}),
    ("optimizer_file", _LINE), ("optimizer_load", _LINE),
    ("states_left", {**_LINE, "names": ["weight"], "count": 1}),
    ("losses", {**_LINE, "backwards": [{"direct": True, "of": [[8, 8, 50, 8.0, 1.0, 1.0]]}]}),
    ("source", {"step": 3, "over": [0, 1], "autocast": "", "sampler": "DistributedSampler",
                "line": "a.py:1", "replicas": 2, "number": 0, "seed": 0, "epoch": 0, "drawn": 8,
                "given": 8}),
    ("layers", {"lists": {"model.layers": [[0, "Layer", True], [1, "Layer", True]]}}),
    ("embedding", {"step": 3, "zeros": [5], "tokens": 8, "module": "embed"}),
    ("discarded", {"model": "Linear"}), ("updated", {"step": 3, "names": ["weight"]}),
    ("shared", {"step": 3, "rows": [
        {"function": "_Add", "line": "a.py:1", "op": "all_reduce", "ranks": [0, 1], "calls": 1,
         "gradient": _SKETCH, "bias": "bias", "matrix": "weight"}]}),
    ("scheduled", {**_LINE, "number": 0, "name": "LambdaLR", "calls": 6, "updates": 3,
                   "optimizer": 0, "optimizers": 1}),
    ("rounded", {"step": 3, "matrices": 4, "optimizer": "SGD", "rounded": 4}),
    ("recomputed", {**_LINE, "compared": 3, "apart": [["mlp", _SKETCH, [9.5, 4.0]]]}),
    ("own_gradients", {"step": 3, "names": ["weight"], "made": [_SKETCH], "used": [_SKETCH]}),
    ("unwrapped", {"model": "Linear", "line": "a.py:1"}), ("bare", _LINE), ("unreduced", _LINE),
)  # fmt: skip


def _json(value: object) -> bytes:
    return json.dumps(value).encode()


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(dataclasses.asdict(value), default=str))


def _words(command: str) -> bytes:
    return command.replace(" ", "\0").encode() + b"\0"
