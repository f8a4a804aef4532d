"""``python -m bench.pasted [NAME…]``: how many pasted texts are answered rightly, at first and now;
with names, the pages of those texts."""

from __future__ import annotations

import argparse
from collections import Counter

from bench.pasted import OUTCOMES, RIGHT, asked, first_run, problems, texts


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.pasted", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME")
    names = parser.parse_args().names
    before = {name: outcome for outcome, those in first_run().items() for name in those}
    first: dict[str, Counter[str]] = {}
    now: dict[str, Counter[str]] = {}
    for pasted in texts():
        if names and pasted.name not in names:
            continue
        answer = asked(pasted)
        outcome, why = problems(pasted, answer)
        for kind in (pasted.kind, "all"):
            first.setdefault(kind, Counter())[before.get(pasted.name, RIGHT)] += 1
            now.setdefault(kind, Counter())[outcome] += 1
        if why or names:
            print(f"{outcome}: {pasted.name}: {'; '.join(why)}")
        if names:
            print(f"{answer.verdict}, exit code {answer.exit}\n{answer.page}\n")
    print(f"| texts | first run: {' | '.join(OUTCOMES)} | now: {' | '.join(OUTCOMES)} |")
    print(f"| --- |{' ---: |' * 2 * len(OUTCOMES)}")
    for kind in sorted(now, key=lambda kind: kind == "all"):
        cells = [counts[kind][outcome] for counts in (first, now) for outcome in OUTCOMES]
        print(f"| {kind} ({now[kind].total()}) | {' | '.join(map(str, cells))} |")


if __name__ == "__main__":
    main()
