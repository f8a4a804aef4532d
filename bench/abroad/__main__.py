"""``python -m bench.abroad``: runs each program of others healthy and with a fault in it under
`moediag watch`, and writes the figures into ``reports/accuracy.md``; with --attach it runs them
without moediag, looks at them with `moediag attach`, and writes ``reports/attach.md``. Answers are
kept in --work; a later run measures only what is missing or was measured with other sources of
moediag."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from datetime import datetime, timezone
from pathlib import Path

from rich.console import Console

from bench import sections
from bench.abroad import launchers, page, running
from bench.abroad.cases import Case
from bench.abroad.edits import AnchorError
from bench.abroad.programs import Program
from bench.abroad.running import Answer
from bench.abroad.table import CASES, EVERY_PROGRAM
from tests import cluster

ROOT = Path(__file__).parents[2]
REPORTS = ROOT / "reports"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.abroad", description=__doc__)
    parser.add_argument(
        "--only", action="append", metavar="NAME", help="only cases whose name contains NAME"
    )
    parser.add_argument(
        "--checkouts", type=Path, metavar="DIR",
        help="a folder with checkouts of pytorch/examples (as examples), karpathy/nanoGPT (as "
        "nanoGPT) and so on; without it only packages are run",
    )  # fmt: skip
    parser.add_argument(
        "--python", default=sys.executable, metavar="FILE", help="a Python that has the packages"
    )
    parser.add_argument(
        "--work", type=Path, default=ROOT / "moediag-runs" / "abroad", metavar="DIR"
    )
    parser.add_argument("--fresh", action="store_true", help="measure all chosen cases again")
    parser.add_argument(
        "--first", action="store_true",
        help="count answers in --work whatever sources of moediag they were measured with, and "
        "measure nothing again: the table of first runs",
    )  # fmt: skip
    parser.add_argument("--no-held-out", action="store_true", help="leave the held-out cases alone")
    parser.add_argument("--laws", action="store_true", help="watch with --laws")
    parser.add_argument(
        "--once", action="store_true",
        help="do not run healthy programs again without moediag, to compare how they end",
    )  # fmt: skip
    parser.add_argument("--attach", action="store_true", help="run without moediag, and attach")
    parser.add_argument("--bare", action="store_true", help="run without moediag, to check faults")
    parser.add_argument(
        "--minutes", type=float, default=240.0, metavar="M", help="start no case after M minutes"
    )
    parser.add_argument("--note", default="", metavar="TEXT", help="a sentence for the report")
    parser.add_argument("--out", type=Path, metavar="FILE")
    options = parser.parse_args()
    options.out = options.out or REPORTS / ("attach.md" if options.attach else "accuracy.md")
    return options


def chosen(options: argparse.Namespace) -> Iterator[tuple[Case, Program]]:
    programs = {program.name: program for program in EVERY_PROGRAM}
    for case in CASES:
        if options.only and not any(word in case.name for word in options.only):
            continue
        left_out = (case.held_out and options.no_held_out) or (case.laws and not options.laws)
        if left_out or (case.launcher and not options.attach):
            continue
        program = programs[case.program]
        yield case, replace(program, launcher=case.launcher or program.launcher)


def absent(program: Program, options: argparse.Namespace) -> str:
    """Returns why the program cannot be run here, or ""."""
    if program.tree and options.checkouts is None:
        return "no --checkouts"
    if program.tree and not (options.checkouts / program.tree).is_dir():
        return f"no {options.checkouts / program.tree}"
    if program.launcher == "srun" and (why := cluster.no_slurm()):
        return why
    if program.launcher == "mpirun" and shutil.which("mpirun") is None:
        return "no mpirun (Debian: openmpi-bin)"
    needs = (*program.needs, *launchers.NEEDS.get(program.launcher, ()))
    look = "import sys, importlib.util as u; sys.exit(not all(map(u.find_spec, sys.argv[1:])))"
    # As a job has it: without this session's PYTHONPATH.
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [options.python, "-c", look, "torch", *needs], check=False, capture_output=True, env=own
    )
    return f"{options.python} lacks {', '.join(needs)}" if done.returncode else ""


def version() -> str:
    """Returns a hash of moediag's sources."""
    found = hashlib.sha256()
    for path in sorted((ROOT / "moediag").rglob("*.py")):
        found.update(path.read_bytes())
    return found.hexdigest()[:12]


def kept(path: Path, ours: str) -> Answer | None:
    """Returns a kept answer; one of other sources than ``ours`` only if that is ""."""
    try:
        raw = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    if ours and raw["version"] != ours:
        return None
    return Answer(**raw | {"ranks": tuple(raw["ranks"]), "places": tuple(raw["places"])})


def measured(case: Case, program: Program, options: argparse.Namespace, ours: str) -> Answer:
    folder = running.emptied(options.work / case.name.replace("/", "--").replace(" ", "-"))
    try:
        if options.attach:
            return running.attached(case, program, options.python, folder, options.checkouts, ours)
        return running.watched(
            case, program, options.python, folder, options.checkouts, ours,
            ("--laws",) if options.laws else (), not options.once,
        )  # fmt: skip
    except AnchorError as error:
        return Answer(case.name, ours, refused=f"another version of the program: {error}")


def head(options: argparse.Namespace) -> str:
    """Returns what was run where, without the paths of this machine."""
    words = [f"--only {shlex.quote(word)}" for word in options.only or ()]
    words += ["--checkouts DIR"] if options.checkouts is not None else []
    words += ["--laws"] if options.laws else []
    words += ["--once"] if options.once else []
    words += ["--attach"] if options.attach else []
    words += ["--first"] if options.first else []
    command = " ".join(["python -m bench.abroad", *words])
    when = datetime.now(timezone.utc).date().isoformat()
    asked = [options.python, "-c", "import torch; print(torch.__version__)"]
    torch = subprocess.run(asked, check=False, capture_output=True, text=True).stdout.strip()
    return f"`{command}` on {when}: torch {torch}, {os.cpu_count()} cores. {options.note}".rstrip()


def main() -> None:
    options, progress, began = arguments(), Console(stderr=True), time.monotonic()
    ours, judged, unable = version(), list[page.Judged](), dict[str, str]()
    options.work.mkdir(parents=True, exist_ok=True)
    if options.checkouts is not None:
        options.checkouts = options.checkouts.resolve()
    for case, program in chosen(options):
        started = f"{program.name} {program.launcher}"
        if started not in unable:
            unable[started] = absent(program, options)
        if unable[started]:
            progress.print(f"{case.name}: not run: {unable[started]}")
            continue
        if options.bare:
            with tempfile.TemporaryDirectory() as folder:
                ended, said = running.bare(
                    case, program, options.python, Path(folder) / "bare", options.checkouts
                )
            progress.print(f"{case.name}: {ended}", said[-1500:] if case.held_out else "")
            continue
        path = options.work / (case.name.replace("/", "--").replace(" ", "-") + ".json")
        answer = None if options.fresh else kept(path, "" if options.first else ours)
        if answer is None and options.first:
            continue
        if answer is None and time.monotonic() - began > 60 * options.minutes:
            progress.print(f"{case.name}: left for a later run")
            continue
        if answer is None:
            answer = measured(case, program, options, ours)
            path.write_text(json.dumps(asdict(answer), indent=1))
        if answer.refused.startswith(running.ENDED):
            progress.print(f"{case.name}: {answer.refused}, nothing to attach to")
            continue
        judged.append(page.Judged(case, answer))
        progress.print(page.line(judged[-1]), soft_wrap=True)
    if judged:
        text = options.out.read_text("utf-8") if options.out.exists() else ""
        section = page.markdown(judged, head(options), attached=options.attach)
        options.out.write_text(sections.replaced(text, section), "utf-8")
        progress.print(page.line_of_all(judged), f"written: {options.out}")


if __name__ == "__main__":
    main()
