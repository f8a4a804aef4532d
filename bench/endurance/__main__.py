"""``python -m bench.endurance``: kills, hostile input, faults of the machine, several nodes,
campaigns on clusters, and hours of a watched job. Prints a table for each part that is asked for;
the exit code is 1 if anything failed."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from bench.endurance import campaigns, faults, hostile, hours, kills, nodes

_HOURS = (
    "minutes", "restarts", "watcher MiB", "files", "threads", "rank MiB", "files", "threads",
    "disk MiB",
)  # fmt: skip


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.endurance", description=__doc__)
    parser.add_argument("--kills", type=int, default=0, metavar="N", help="kill commands N times")
    parser.add_argument("--hostile", type=int, default=0, metavar="N", help="read N damaged inputs")
    parser.add_argument("--faults", action="store_true", help="run commands on a faulty machine")
    parser.add_argument("--hours", type=float, default=0.0, metavar="H", help="watch a job H hours")
    parser.add_argument("--light", action="store_true",
                        help="with --hours: ranks that do not import torch")  # fmt: skip
    parser.add_argument("--nodes", type=int, default=0, metavar="N",
                        help="watch a job on N nodes, which are network namespaces")  # fmt: skip
    parser.add_argument("--campaigns", type=int, default=0, metavar="N",
                        help="run N items here, on Ray and on Slurm")  # fmt: skip
    parser.add_argument("--rounds", type=int, default=1, metavar="N", help="campaigns of each kind")
    parser.add_argument("--rest", type=float, default=0.0, metavar="S",
                        help="seconds that an item of a campaign sleeps")  # fmt: skip
    parser.add_argument("--every", type=float, default=180.0, metavar="S",
                        help="restart the watched job, or kill something of a campaign, every S "
                        "seconds; 0: no kill (default: 180)")  # fmt: skip
    parser.add_argument("--at-once", type=int, default=1, metavar="N", help="N kills at a time")
    parser.add_argument("--only", default="", metavar="TEXT", help="only what has TEXT in its name")
    parser.add_argument("--seed", type=int, default=0, help="another campaign of the same kind")
    wanted = parser.parse_args(words)
    failures: list[str] = []
    if wanted.kills:
        failures += _kills(wanted)
    if wanted.hostile:
        failures += _hostile(wanted)
    if wanted.faults:
        failures += _faults(wanted)
    if wanted.hours:
        _hours(wanted)
    if wanted.nodes:
        _head("fault", "pages of the living nodes", "exit codes", "until all had ended")
        for ended in nodes.run(wanted.nodes, wanted.only):
            _row(*nodes.row(ended))
    if wanted.campaigns:
        failures += _campaigns(wanted)
    for line in failures:
        print(f"- {line}")  # noqa: T201
    return 1 if failures else 0


def _head(*names: str) -> None:
    _row(*names)
    _row(*("---" for _ in names))


def _row(*values: object) -> None:
    print(f"| {' | '.join(map(str, values))} |", flush=True)  # noqa: T201


def _kills(wanted: argparse.Namespace) -> list[str]:
    _head("command", "kills", "signals", "to", "resumed", "slowest end", "failures")
    found = []
    for name, one in kills.run(wanted.kills, wanted.seed, wanted.only, wanted.at_once):
        signals, roles = (
            ", ".join(f"{count} {what}" for what, count in counts.most_common())
            for counts in (one.signals, one.roles)
        )
        _row(
            name, one.cases, signals, roles, one.resumed, f"{one.slowest:.1f} s", len(one.failures)
        )
        found += one.failures
    return found


def _hostile(wanted: argparse.Namespace) -> list[str]:
    _head("input", "read", "refused", "slowest (CPU)", "most memory", "failures")
    found = []
    kinds = [name for name in hostile.KINDS if wanted.only in name]
    for name, one in hostile.run(wanted.hostile, wanted.seed, kinds):
        _row(
            name, f"{one.count:,}", f"{one.refused:,}", f"{one.slowest:.2f} s",
            f"{one.memory >> 20} MiB", len(one.failures),
        )  # fmt: skip
        found += [f"{kind}, input {number} of seed {wanted.seed}: {what}"
                  for kind, number, what in one.failures]  # fmt: skip
    return found


def _faults(wanted: argparse.Namespace) -> list[str]:
    _head("fault", "commands", "exit codes", "slowest", "the last one said", "failures")
    found = []
    for name, one in faults.run(wanted.only, wanted.seed):
        codes = ", ".join(map(str, one.codes))
        _row(name, one.cases, codes, f"{one.slowest:.0f} s", one.said[:120], len(one.failures))
        found += one.failures
    return found


def _campaigns(wanted: argparse.Namespace) -> list[str]:
    _head(*campaigns.HEAD)
    failures = []
    for one in campaigns.run(
        wanted.campaigns, wanted.every, wanted.rounds, wanted.rest, wanted.only, wanted.seed
    ):
        _row(*campaigns.row(one))
        failures += [f"{one.engine}: {text}" for text in one.failures]
    return failures


def _hours(wanted: argparse.Namespace) -> None:
    _head(*_HOURS)
    for row in hours.run(wanted.hours, wanted.every, wanted.light):
        watcher, ranks = row.watcher, row.ranks
        _row(
            f"{row.minutes:.0f}", row.restarts, f"{watcher[0]:.1f}", *watcher[1:],
            f"{ranks[0]:.0f}", *ranks[1:], f"{row.disk:.1f}",
        )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
