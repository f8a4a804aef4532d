"""``make gpu``: runs the scenarios of the GPU suite on the available GPUs and writes one JSON file
and one page below ``reports/gpu/``. Exit code 4 without a GPU, otherwise 0, whatever was found.

Then measures the speed of the real step (bench.speed): kernels, routings, fixes, up to a size that
fills the GPU. Rows that need an unavailable release are listed as not measured, with the reason.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import moediag
from bench.speed import suite as speed
from moediag import hardware
from moediag.errors import MoediagError
from moediag.lab import machine_checks
from moediag.lab.campaign.engine import shown
from moediag.lab.campaign.sweep.shared_runs import Ran, Runs
from moediag.lab.scenario import catalogue
from moediag.lab.scenario import load as loading
from moediag.lab.scenario import plan as planning
from moediag.lab.stacks.base import cache_root, current_base
from moediag.launch.settings import LaunchOptions
from moediag.pipeline.run_folder import run_folder
from moediag.protocol import write_json
from moediag.result import RunResult, devices, wording

FOLDER = Path(__file__).parent.parent / "reports" / "gpu"
STARVATION = (
    "expert-starvation", "expert-starvation-silent", "expert-starvation-late",
    "expert-starvation-hang",
)  # fmt: skip
EXPERT_PARALLEL = (
    "ep-step",
    "ep-router-gradient", "ep-overwrite", "ep-clip-norm", "ep-mixed-optimizer", "ep-partial-load",
    "nonfinite-skip", "metrics-in-flight",
)  # fmt: skip
UNDECIDED = ("inconclusive", "not-applicable")
FOUR_RANKS = ("ep-partial-load",)  # divides two axes


@dataclass(frozen=True, slots=True)
class Question:
    """``device``: one of scenario.gpu.DEVICES."""

    scenario: str
    ranks: int
    device: str

    @property
    def command(self) -> str:
        share = " --share-gpu" if devices.DEVICES[self.device].shared else ""
        return f"moediag run {self.scenario} --gpus {self.ranks}{share}"


@dataclass(frozen=True, slots=True)
class Row:
    """``trials``: one object a trial, the fields of result.json that a reader needs; empty where
    nothing was measured, and then ``problem`` says why."""

    command: str
    scenario: str
    ranks: int
    shared: bool
    exit_code: int
    problem: str = ""
    seconds: float = 0.0
    reproduced: bool | None = None
    trials: tuple[dict[str, Any], ...] = ()

    @property
    def measured(self) -> bool:
        return any(t["verdict"] not in UNDECIDED for t in self.trials)


@dataclass(frozen=True, slots=True)
class Report:
    started: str
    moediag_version: str
    machine: dict[str, Any]
    versions: dict[str, str | None]
    rows: tuple[Row, ...] = ()
    speed: tuple[speed.Measured, ...] = ()
    schema_version: int = field(default=1)

    @property
    def device(self) -> str:
        """Returns the machine's part of the file name: ``1x-nvidia-h200``."""
        found = self.machine["gpus"] or ["unknown gpu"]
        word = "".join(c if c.isalnum() else "-" for c in found[0].lower())
        return f"{len(found)}x-{'-'.join(filter(None, word.split('-')))}"

    @property
    def name(self) -> str:
        return f"{self.started[:10]}-{self.device}"

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "speed": [one.to_json() for one in self.speed]}


def questions(gpus: int, nccl: str | None) -> Iterator[Question]:
    """Yields the suite: one rank per GPU if there are several, and always shared GPUs."""
    shared = devices.shared(nccl)  # as --share-gpu chooses
    for name in (*STARVATION, *EXPERT_PARALLEL):
        if gpus >= 2:
            yield Question(name, 4 if gpus >= 4 else 2, "gpu")
        for ranks in (2, 4) if name in STARVATION else (4,) if name in FOUR_RANKS else (2,):
            yield Question(name, ranks, shared)


def row(question: Question, ran: Ran | None, problem: str = "") -> Row:
    result = ran.result if ran else None
    return Row(
        command=question.command,
        scenario=question.scenario,
        ranks=question.ranks,
        shared=devices.DEVICES[question.device].shared,
        exit_code=ran.exit_code if ran else 4,
        problem=problem or (ran.problem if ran else ""),
        seconds=ran.seconds if ran else 0.0,
        reproduced=result.conclusion.reproduced if result else None,
        trials=tuple(_trials(result)) if result else (),
    )


def _trials(result: RunResult) -> Iterator[dict[str, Any]]:
    for t in result.trials:
        yield {
            "variant": t.variant, "role": t.role, "stack": t.stack, "backend": t.backend,
            "verdict": t.verdict, "expected": t.expected, "met": t.met, "cause": t.cause,
            "gradient_error": t.gradient_error, "worst_parameter": t.diagnosis.worst_parameter,
            "step_time_ratio": t.step_time_ratio, "seconds": t.seconds.total,
            "notes": list(t.notes), "not_seen": list(t.diagnosis.not_seen),
        }  # fmt: skip


def page(report: Report) -> str:
    """Returns the page: each measurement with its command, then what is missing and why."""
    machine = report.machine
    versions = ", ".join(f"{n} {v}" for n, v in report.versions.items() if v)
    gpus = ", ".join(machine["gpus"]) or "no GPU"
    lines = [f"# GPU suite, {report.started[:10]}: {gpus}", ""]
    lines += [
        f"Driver {machine['driver']}, {versions}, moediag {report.moediag_version}. "
        "Rows of `make gpu`; the JSON file beside this one has every field.",
        "",
    ]
    for one in report.rows:
        if not one.measured:
            continue
        said = {True: "reproduced", False: "not reproduced", None: "undecided"}[one.reproduced]
        lines += [f"## `{one.command}`", "", f"{said}, {wording.seconds(one.seconds)}", ""]
        lines += [
            "| variant | stack | backend | verdict | expected | gradient error |",
            "|---" * 6 + "|",
        ]
        for t in one.trials:
            cells = (
                t["variant"], ", ".join(wording.stack(t["stack"])),
                wording.backend(t["backend"], one.shared),
                t["verdict"] + ("" if t["met"] or t["verdict"] in UNDECIDED else " ❌"),
                t["expected"], wording.error_size(t["gradient_error"]),
            )  # fmt: skip
            lines.append("| " + " | ".join(map(wording.inline, cells)) + " |")
        lines.append("")
    if report.speed:
        lines += speed.page(report.speed)
    missing = [one for one in report.rows if not one.measured]
    if missing:
        lines += ["## Not measured", "", "| command | reason |", "|---|---|"]
        lines += [f"| `{one.command}` | {wording.inline(_why(one))} |" for one in missing]
    return "\n".join(lines).rstrip("\n") + "\n"


def _why(one: Row) -> str:
    causes = dict.fromkeys(str(t["cause"]) for t in one.trials)
    return one.problem or "; ".join(filter(None, causes)) or "no reason was given"


def measure(asked: Sequence[Question], folder: Path, timeout: float | None) -> Iterator[Row]:
    """Runs each scenario in its own folder; a failing one affects only its own row."""
    with contextlib.closing(Runs(folder, LaunchOptions())) as runs, shown() as observer:
        for number, question in enumerate(asked):
            try:
                scenario = loading.load(catalogue.find(question.scenario))
                plan = planning.plan(scenario, question.ranks, question.device, timeout=timeout)
            except MoediagError as error:
                yield row(question, None, error.message)
                continue
            below = folder / f"{number}-{question.scenario}"
            yield row(question, runs.run(plan, below, observer))


def versions() -> dict[str, str | None]:
    base = current_base(cache_root())
    found: dict[str, str | None] = {"python": base.python, "torch": base.torch}
    return {**found, "nccl": hardware.nccl()}


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    try:
        machine_checks.require_gpus(1, shared=True)
    except MoediagError as error:
        sys.stderr.write(f"make gpu: {error.message}\n{error.help_text}\n")
        return error.exit_code
    asked = [] if options.speed else [
        q
        for q in questions(
            len(hardware.gpus()) or len(hardware.driver_gpus()), hardware.nccl()
        )
        if q.scenario in (options.scenario or [q.scenario])
        and q.ranks in (options.ranks or [q.ranks])
    ]  # fmt: skip
    started = datetime.now(timezone.utc).isoformat(timespec="seconds")
    report = Report(started, moediag.__version__, hardware.machine(), versions())
    with tempfile.TemporaryDirectory() as scratch:
        folder = run_folder(options.evidence or Path(scratch) / "runs", "gpu")
        for one in measure(asked, folder, options.timeout):
            report = dataclasses.replace(report, rows=(*report.rows, one))
            write(report, options.out)
        for run in () if options.scenario or options.ranks else speed.runs("cuda"):
            found = speed.measure(run, options.timeout or speed.TIMEOUT)
            report = dataclasses.replace(report, speed=(*report.speed, found))
            write(report, options.out)
    sys.stdout.write(f"wrote {options.out / report.name}.json and .md\n")
    return 0


def write(report: Report, folder: Path) -> None:
    """Writes both files. Called after each row, so an early end keeps what was measured."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / f"{report.name}.json", report.to_json())
    (folder / f"{report.name}.md").write_text(page(report), encoding="utf-8")


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__)
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--scenario", action="append", help="run only this scenario; repeatable")
    parser.add_argument(
        "--ranks", type=int, action="append", help="run only with so many ranks; repeatable"
    )
    only.add_argument(
        "--speed", action="store_true", help="measure only the speed of the real step"
    )
    parser.add_argument("--out", type=Path, default=FOLDER, help="default: reports/gpu")
    parser.add_argument("--evidence", type=Path, help="keep the run directories here")
    parser.add_argument("--timeout", type=float, help="limit of one launch in seconds")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
