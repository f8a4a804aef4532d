"""``make accuracy``: prints how often the diagnosis is right and writes ``reports/accuracy.md``.
The exit code is always 0. Takes 15 minutes, mostly because hanging jobs wait for their
diagnosis."""

from __future__ import annotations

import argparse
import platform
import random
import shlex
import sys
import tempfile
import time
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

from rich.console import Console
from rich.table import Table

import moediag
from bench import jobs, sections
from bench.accuracy import page, simulated, victims
from bench.accuracy.frtrace import TorchFrTrace
from tests.victims.table import VICTIMS, Victim

REPORT = Path(__file__).parents[2] / "reports" / "accuracy.md"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.accuracy", description=__doc__)
    parser.add_argument("--victim", action="append", metavar="NAME", help="only these victims")
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="of each simulated fault")
    parser.add_argument(
        "--every", type=int, default=1, metavar="N", help="only every N-th of these"
    )
    parser.add_argument("--minutes", type=float, default=1e9, metavar="N", help="of these at most")
    parser.add_argument("--out", type=Path, default=REPORT, metavar="FILE")
    parser.add_argument("--no-victims", action="store_true")
    parser.add_argument("--no-simulated", action="store_true")
    return parser.parse_args()


def of_victim(victim: Victim, tool: TorchFrTrace, folder: Path) -> page.Judged:
    ours = victims.watched(victim, folder)
    written, helped = victims.frtraced(victim, folder, tool)
    answers = {
        page.MOEDIAG: ours,
        page.FRTRACE: written,
        page.HELPED: helped,
        page.DETAIL: victims.detailed(victim, folder),
    }
    return page.Judged(victims.truth(victim), answers)


def of_simulated(
    seeds: range, options: argparse.Namespace, tool: TorchFrTrace
) -> list[page.Judged]:
    """Counts simulated cases in an order drawn by chance, so that a limit of time leaves a sample;
    returns them in the order of the table."""
    wanted = [*simulated.cases(seeds)]
    random.Random(0).shuffle(wanted)  # noqa: S311 - repeatable
    made = []
    end = time.monotonic() + 60 * options.minutes
    for case in wanted[:: options.every]:
        folder = case.folder()
        if folder is None:
            continue
        with tempfile.TemporaryDirectory(prefix="moediag-accuracy-") as place:
            made.append(simulated.judged(case, folder, tool, Path(place)))
        if time.monotonic() > end:
            break
    order = [dimension.name for dimension in jobs.DIMENSIONS]
    return sorted(made, key=lambda case: order.index(case.dimension))


def head(command: list[str]) -> str:
    when = datetime.now(timezone.utc).date().isoformat()
    return (
        f"`{shlex.join(command)}` on {when}: moediag {moediag.__version__}, torch "
        f"{metadata.version('torch')}, Python {platform.python_version()}, gloo, no GPU.\n"
    )


def show(console: Console, title: str, rows: list[page.Row]) -> None:
    table = Table(*rows[0], title=title, show_lines=True)
    for row in rows[1:]:
        table.add_row(*row)
    console.print(table)


def main() -> None:
    options = arguments()
    progress = Console(stderr=True)
    real: list[page.Judged] = []
    chosen = [v for v in VICTIMS if not options.victim or v.name in options.victim]
    seeds = range(simulated.TESTING, simulated.TESTING + options.seeds)
    with TorchFrTrace() as tool:
        for victim in chosen if not options.no_victims else ():
            with tempfile.TemporaryDirectory(prefix="moediag-accuracy-") as folder:
                real.append(of_victim(victim, tool, Path(folder)))
            told = {name: real[-1].outcome(name).value for name in real[-1].answers}
            progress.print(f"{victim.name}: {told}")
        made = [] if options.no_simulated else of_simulated(seeds, options, tool)
    console = Console()
    if real:
        show(console, "victims, real jobs on gloo", page.of_victims(real))
        show(console, "victims", page.summary({"victims": real}))
    if made:
        show(console, f"simulated jobs, seeds from {seeds.start}", page.by_dimension(made))
        show(console, "simulated jobs", page.summary(page.by_layout(made)))
    text = options.out.read_text("utf-8") if options.out.exists() else ""
    text = sections.replaced(text, page.INTRODUCTION)  # what is not measured now is kept
    command = head(["python", "-m", "bench.accuracy", *sys.argv[1:]])
    if real:
        text = sections.replaced(text, page.victims_section(real, command))
    if made:
        found = page.simulated_section(made, command, seeds, simulated.EVERY_FAULT)
        text = sections.replaced(text, found)
    options.out.write_text(text, encoding="utf-8")
    progress.print(f"written: {options.out}")


if __name__ == "__main__":
    main()
