"""``python -m bench.pasted [NAME…]``: how many pasted texts are answered rightly; with names, the
pages of those texts."""

from __future__ import annotations

import argparse
from collections import Counter

from bench.pasted import OUTCOMES, asked, problems, texts


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.pasted", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME")
    names = parser.parse_args().names
    counts: dict[str, Counter[str]] = {}
    for pasted in texts():
        if names and pasted.name not in names:
            continue
        answer = asked(pasted)
        outcome, why = problems(pasted, answer)
        counts.setdefault(pasted.kind, Counter())[outcome] += 1
        if why or names:
            print(f"{outcome}: {pasted.name}: {'; '.join(why)}")
        if names:
            print(f"{answer.verdict}, exit code {answer.exit}\n{answer.page}\n")
    print(f"| kind | texts | {' | '.join(OUTCOMES)} |\n| --- |{' ---: |' * (len(OUTCOMES) + 1)}")
    counts["all"] = sum(counts.values(), Counter())
    for kind, found in counts.items():
        cells = [kind, found.total(), *(found[outcome] for outcome in OUTCOMES)]
        print(f"| {' | '.join(map(str, cells))} |")


if __name__ == "__main__":
    main()
