"""``python -m bench.labelled [DIMENSION…]``: counts answers on simulated jobs in each dimension and
lists the cases that are not right. This is for tuning: seeds from TESTING on and other layouts are
for ``bench.accuracy`` only. The unit tests use seed 11 and small seeds; use others (``--first``)
for cases that were not used."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench import jobs
from bench.accuracy import simulated
from bench.accuracy.counting import GOOD, Outcome, outcome


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.labelled", description=__doc__)
    parser.add_argument("dimension", nargs="*", help="only those whose name contains this")
    parser.add_argument("--seeds", type=int, default=1, metavar="N")
    parser.add_argument("--first", type=int, default=100, metavar="SEED")
    parser.add_argument("--layouts", type=int, default=3, metavar="N", help="of the seven")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the dumps of wrong answers")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    seeds = range(options.first, options.first + options.seeds)
    if seeds.stop > simulated.TESTING:
        sys.exit(f"seeds from {simulated.TESTING} on are kept for `make accuracy`")
    words = options.dimension or [""]
    chosen = [d for d in jobs.DIMENSIONS if any(word in d.name for word in words)]
    console = Console()
    found: dict[str, Counter[Outcome]] = {d.name: Counter() for d in chosen}
    for case in simulated.cases(seeds, simulated.LAYOUTS[: options.layouts], chosen):
        folder = case.folder()
        if folder is None:
            continue
        with tempfile.TemporaryDirectory(prefix="moediag-labelled-") as place:
            answer = simulated.ours(folder.write(Path(place)), case.taken_at(folder))
        kind = outcome(case.truth(folder), answer)
        found[case.dimension.name][kind] += 1
        if kind not in GOOD:
            layout = case.spec[0]
            console.print(f"{kind.value}: {case.name}: {layout}, culprits {folder.job.culprits}, "
                          f"answer {answer.verdict} {answer.culprits}: {answer.text}")  # fmt: skip
            if options.keep:
                name = f"{layout.world}-{case.name}".replace(": ", "-").replace(", ", "-")
                folder.write(options.keep / name.replace(" ", "_"))
    shown = [kind for kind in Outcome if any(kinds[kind] for kinds in found.values())]
    table = Table("dimension", *(kind.value for kind in shown), title=f"seeds from {seeds.start}")
    for name, kinds in found.items():
        table.add_row(name, *(str(kinds[kind] or "") for kind in shown))
    console.print(table)


if __name__ == "__main__":
    main()
