"""The speed runs: which ones, their launch, and their page."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench import torchrun
from bench.speed.words import FIXES, FUSED, KERNELS, LOOP, OFF, RECORDED, ROUTINGS
from moediag.errors import MoediagError
from moediag.lab.stacks import environment

STACK = {"transformers": "5.17.0", "accelerate": "1.15.0"}  # as ep-step's
TRITON = "3.6.0"  # on the CPU, where torch brings none
TIMEOUT = 600.0
NO_GPU = "there is no GPU here"


@dataclass(frozen=True, slots=True)
class Run:
    """One run. ``what`` is one of WHATS, ``device`` cpu or cuda. ``ranks`` share GPUs if there are
    fewer GPUs. Empty ``kernels`` or ``routings`` mean all."""

    what: str
    size: str
    device: str
    ranks: int = 1
    kernels: tuple[str, ...] = ()
    routings: tuple[str, ...] = ()

    @property
    def command(self) -> str:
        """Returns the command for the same run."""
        ranks = f" --ranks {self.ranks}" if self.ranks > 1 else ""
        chosen = "".join(f" --kernel {k}" for k in self.kernels)
        chosen += "".join(f" --routing {r}" for r in self.routings)
        what = f"--what {self.what} --size {self.size} --device {self.device}"
        return f"python -m bench.speed {what}{ranks}{chosen}"


@dataclass(frozen=True, slots=True)
class Measured:
    """The result of one run. ``report`` is that of bench.speed.rank, {} without one; ``problem``
    says why rows are missing."""

    run: Run
    report: dict[str, Any]
    problem: str = ""

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Returns one row per requested measurement; ``reason`` says why it is missing."""
        told = {(r["kernel"], r["routing"]): r for r in self.report.get("rows", [])}
        why = self.problem or "the run ended before it"
        return [
            told.get(key) or {"kernel": key[0], "routing": key[1], "reason": why}
            for key in asked(self.run)
        ]

    def to_json(self) -> dict[str, Any]:
        kept = {k: v for k, v in self.report.items() if k != "rows"}
        own = {"command": self.run.command, "problem": self.problem}
        return {**asdict(self.run), **own, **kept, "rows": self.rows}


def asked(run: Run) -> list[tuple[str, str]]:
    """Returns (kernel or fix, routing) of every row of a run."""
    if run.what == "fixes":
        routings = run.routings or ("balanced", "zero-token")
        return [(name, r) for r in routings for name in (LOOP, *FIXES, *FUSED)]
    if run.what == "recording":
        return [(name, "balanced") for name in (OFF, *RECORDED)]
    return [(k, r) for k in run.kernels or KERNELS for r in run.routings or ROUTINGS]


def runs(device: str) -> Iterator[Run]:
    """Yields the runs. GPU: all sizes on one rank, the middle one on two ranks that divide the
    experts, the fixes on both, the recorder's cost. CPU: the same code with the tiny size, in
    minutes."""
    gpu = device == "cuda"
    for size in ("small", "mid", "large") if gpu else ("tiny",):
        yield Run("kernels", size, device)
    yield Run("kernels", "mid" if gpu else "tiny", device, 2)
    yield Run("fixes", "mid" if gpu else "tiny", device)
    yield Run("fixes", "mid" if gpu else "tiny", device, 2)
    for size in ("small", "mid", "large") if gpu else ("tiny",):
        yield Run("recording", size, device)


def elsewhere() -> list[Measured]:
    """Returns the rows that need a GPU, as missing."""
    return [Measured(run, {}, NO_GPU) for run in runs("cuda")]


def measure(run: Run, timeout: float = TIMEOUT) -> Measured:
    """Launches the ranks and waits. Rows written before a failure count."""
    request = STACK if run.device == "cuda" else {**STACK, "triton": TRITON}
    try:
        stack = environment.ensure(request)
    except MoediagError as error:
        return Measured(run, {}, error.message)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        command, variables = _command(stack, run, out), _variables(stack, run)
        problem = torchrun.launch(command, variables, folder, timeout)
        report = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}
        return Measured(run, report, problem)


def _command(stack: environment.Stack, run: Run, out: Path) -> list[str]:
    command = [*torchrun.command(stack, run.ranks, "bench.speed.rank"), "--out", str(out)]
    command += ["--device", run.device, "--size", run.size, "--what", run.what]
    for kernel in run.kernels:
        command += ["--kernel", kernel]
    for routing in run.routings:
        command += ["--routing", routing]
    return command


def _variables(stack: environment.Stack, run: Run) -> dict[str, str]:
    own = {"TRITON_INTERPRET" if run.device == "cpu" else "NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    return {**torchrun.variables(stack), **own}


# ------------------------------------------------------------------------ the page


def page(measured: Sequence[Measured]) -> list[str]:
    """Returns lines of markdown: a table per run, then what is missing and why."""
    lines = ["## Speed of the real step", ""]
    lines += [
        "FSDP2 in bf16 with fp32 reduction, forward, backward, clip, AdamW; several ranks of a run "
        "of kernels divide the experts. Times are medians (quartiles). TFLOP/s counts the experts "
        "that a token is sent to, and backward as twice forward; its share is relative to a bf16 "
        "matrix product measured in the same run. 'Experts' is that share for the experts of one "
        "layer alone, forward and backward; 'products' that of their matrix products alone. "
        "`within`: where the median ratio lies, with 95 % confidence. `checked` is a step that "
        "laws check, `laws` one that they do not.",
        "",
    ]  # fmt: skip
    for one in measured:
        rows = [row for row in one.rows if not row["reason"]]
        if rows:
            lines += [f"### `{one.run.command}`", "", _about(one.report), "", *_table(rows), ""]
    if any(row["reason"] for one in measured for row in one.rows):
        lines += ["### Speed not measured", "", "| run | row | reason |", "|---|---|---|"]
        lines += [
            f"| `{one.run.command}` | {names} | {reason} |"
            for one in measured
            for reason, names in _by_reason(one)
        ]
        lines.append("")
    return lines


def _by_reason(one: Measured) -> Iterator[tuple[str, str]]:
    reasons: dict[str, dict[str, None]] = {}
    for row in one.rows:
        if row["reason"]:
            reasons.setdefault(row["reason"], {})[f"{row['kernel']} {row['routing']}"] = None
    whole = len(one.rows)
    for reason, names in reasons.items():
        yield reason.replace("|", "\\|"), "all" if len(names) == whole else ", ".join(names)


def _about(report: Mapping[str, Any]) -> str:
    ranks = report["world"]
    shared = ", sharing one GPU" if report["shared"] else ""
    ran = f"{ranks} rank{'s' if ranks > 1 else ''} ({report['backend']}{shared})"
    return (
        f"{report['device']}, {ran}; "
        f"{report['layers']} layers, {report['parameters']:,} parameters, "
        f"{report['tokens']:,} tokens per step; matrix peak {report['peak_tflops']:,.1f} TFLOP/s."
    )


def _table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    ratios = any("ratio" in row for row in rows)
    columns = ["", "routing", "step", "tokens/s", "TFLOP/s", "of peak"]
    base = rows[0]["kernel"]
    columns += [f"against {base}", "within"] if ratios else ["experts", "products", "memory"]
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    for row in rows:
        step = row["step_ms"]
        cells = [
            row["kernel"], row["routing"],
            f"{step['median']:.1f} ms ({step['low']:.1f} to {step['high']:.1f})",
            f"{row['tokens_per_second']:,.0f}", f"{row['tflops']:.3g}",
            f"{100 * row['share_of_peak']:.2g} %",
        ]  # fmt: skip
        if ratios:
            ratio = row.get("ratio")
            spread = f"({ratio['low']:.2f} to {ratio['high']:.2f})" if ratio else ""
            cells.append(f"{ratio['median']:.2f}x {spread}" if ratio else "")
            within = row.get("median_within")
            cells.append("{:.3f} to {:.3f}".format(*within) if within else "")
        else:
            memory = row.get("peak_gib")
            shares = (row.get("experts_share"), row.get("products_share"))
            cells += ["" if share is None else f"{100 * share:.2g} %" for share in shares]
            cells.append("not counted" if memory is None else f"{memory:.1f} GiB")
        lines.append("| " + " | ".join(cells) + " |")
    return lines
