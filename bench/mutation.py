"""``make mutants``: changes one expression at a time in the modules that decide verdicts, and
counts the changes that the tests notice, with mutmut and its configuration in pyproject.toml.

All mutants take hours; ``--every 10`` tries each tenth of every module. mutmut keeps what it has
tried in ``mutants/``, so an interrupted run resumes, and a changed function is tried again.
"""

from __future__ import annotations

import argparse
import collections
import fnmatch
import json
import subprocess
import sys
from pathlib import Path

MUTANTS = Path("mutants")
# What mutmut writes as the exit code of a mutant's tests. A mutant that never ends is noticed too.
KILLED = (1, 3)
TIMEOUT = (36, 24, -24, 152, 255)
SURVIVED = (0,)
UNTESTED = (5, 33)


def tried() -> dict[str, dict[str, int | None]]:
    """Module -> mutant -> exit code, None for a mutant that was not tried, in source order."""
    found = {}
    for meta in sorted((MUTANTS / "moediag").rglob("*.meta")):
        codes = json.loads(meta.read_text(encoding="utf-8"))["exit_code_by_key"]
        if codes:
            module = meta.relative_to(MUTANTS).with_suffix("").with_suffix("")
            found[".".join(module.parts)] = codes
    return found


def mutmut(jobs: int, names: list[str]) -> None:
    command = [sys.executable, "-m", "mutmut", "run", "--max-children", str(jobs), *names]
    subprocess.run(command, check=False)


def table(modules: dict[str, dict[str, int | None]]) -> list[str]:
    """Rows of markdown: what became of the mutants of each module that has one that was tried."""
    rows = [
        "| module | mutants | tried | killed | timeout | survived | no test |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    whole: collections.Counter[str] = collections.Counter()
    for module, codes in modules.items():
        counts = collections.Counter(
            {
                "mutants": len(codes),
                "tried": sum(code is not None for code in codes.values()),
                "killed": sum(code in KILLED for code in codes.values()),
                "timeout": sum(code in TIMEOUT for code in codes.values()),
                "survived": sum(code in SURVIVED for code in codes.values()),
                "no test": sum(code in UNTESTED for code in codes.values()),
            }
        )
        if counts["tried"]:
            whole.update(counts)
            rows.append(_row(f"`{module.removeprefix('moediag.')}`", counts))
    return [*rows, _row("all", whole)]


def _row(name: str, counts: collections.Counter[str]) -> str:
    columns = ("mutants", "tried", "killed", "timeout", "survived", "no test")
    return f"| {name} | " + " | ".join(str(counts[column]) for column in columns) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.mutation", description=__doc__)
    parser.add_argument("modules", nargs="*", default=["*"], help="e.g. 'moediag.lab.judgement.*'")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="try each Nth mutant")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes at a time")
    options = parser.parse_args()
    # Makes the mutants; their names are known only then.
    mutmut(options.jobs, ["no-such-mutant"])
    names = [
        name
        for module, codes in tried().items()
        if any(fnmatch.fnmatch(module, pattern) for pattern in options.modules)
        for name in list(codes)[options.every // 2 :: options.every]
    ]
    mutmut(options.jobs, names)
    modules = tried()
    sys.stdout.write("".join(f"{row}\n" for row in table(modules)))
    survivors = [
        name
        for codes in modules.values()
        for name, code in codes.items()
        if code in (*SURVIVED, *UNTESTED)
    ]
    (MUTANTS / "survived.txt").write_text("".join(f"{name}\n" for name in survivors))
    sys.stdout.write(f"\n{len(survivors)} survived: mutants/survived.txt (`mutmut show NAME`)\n")


if __name__ == "__main__":
    main()
