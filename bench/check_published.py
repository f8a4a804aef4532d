"""Prints how far `moediag check` is from published figures of memory (bench/published_memory.yaml).

    python -m bench.check_published [--only TEXT]

Each set-up is checked on the transformers release that its source names, else on one newest.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from moediag.lab.launch.launcher import launcher
from moediag.lab.pipeline import check, check_request
from moediag.lab.pipeline.check_fit import GIB
from moediag.lab.pipeline.check_options import CheckOptions
from moediag.lab.pipeline.check_result import CheckResult
from moediag.lab.stacks import environment

FILE = Path(__file__).with_name("published_memory.yaml")
NEWEST = "5.24.0"
STATE, PEAK = 0.03, 0.2  # relative differences that are allowed
STATIC = ("state", "parameters")
NO_ROOM = "out of memory"
_QUESTION = ("layout", "dtype", "param_dtype", "reduce_dtype", "optimizer", "batch", "length",
             "recompute", "accumulate")  # fmt: skip
RESERVED = "reserved"


@dataclass(frozen=True)
class Compared:
    row: Mapping[str, Any]
    told: int = 0
    """Bytes; 0: not told."""
    at: str = ""
    """Where the peak is, or why nothing was told."""

    @property
    def published(self) -> float:
        return float(self.row.get("bytes") or self.row["gib"] * GIB)

    @property
    def ratio(self) -> float:
        return self.told / self.published

    @property
    def good(self) -> bool:
        if self.row["kind"] == NO_ROOM:
            return self.ratio > 1
        return abs(self.ratio - 1) <= (STATE if self.row["kind"] in STATIC else PEAK)


def rows() -> list[dict[str, Any]]:
    """Returns the published figures, each with what its source says of all."""
    data = yaml.safe_load(FILE.read_text())
    return [
        {**data["training"][row["source"]], **row, "fields": data["models"][row["model"]]}
        for row in data["rows"]
    ]


def compared(asked: list[dict[str, Any]], folder: Path) -> Iterator[Compared]:
    """Checks the set-ups, in order of their models. ``folder`` must be empty."""
    for model, newest in dict.fromkeys((row["model"], _release(row)) for row in asked):
        own = [row for row in asked if (row["model"], _release(row)) == (model, newest)]
        release = {"transformers": newest}
        stack = environment.ensure(release)
        config = folder / f"{model}-{newest}" / check_request.CONFIG
        config.parent.mkdir()
        config.write_text(json.dumps(own[0]["fields"]))
        answers: dict[str, CheckResult] = {}
        host = config.parent / "host"
        with launcher("fork", stack, host, check_request.settings(config)) as h:
            for row in own:
                given = {name: row[name] for name in _QUESTION if name in row}
                given["reserved"] = row["kind"] == RESERVED
                key = json.dumps(given)
                if key not in answers:
                    options = CheckOptions(
                        str(config), stack=release, simulate=False, brief=True,
                        **{"batch": 1, **given},
                    )  # fmt: skip
                    options = check_request.completed(options)
                    place = f"{config.parent.name}-{len(answers)}"
                    answers[key] = check.answered(
                        options, h, stack.versions, folder, place, lambda *_: None
                    )
                one = _of(row, answers[key])
                sys.stderr.write(f"{model} {row['kind']} {one.told:,} {one.ratio:.3f} {one.at}\n")
                yield one


def _release(row: Mapping[str, Any]) -> str:
    return str(row.get("transformers", NEWEST))


def _of(row: Mapping[str, Any], found: CheckResult) -> Compared:
    memory, fit = found.memory, found.fit
    if memory is None or fit is None or not fit.measured:
        return Compared(row, at=found.undecided or "; ".join(found.not_seen))
    if row["kind"] == "parameters":
        return Compared(row, memory.parameters, "after loading")
    if row["kind"] == "state":
        return Compared(row, memory.parameters + memory.optimizer, "after a step")
    if row["kind"] == RESERVED and fit.reserved is not None:
        expandable = bool(row.get("expandable"))
        told = fit.reserved.expandable if expandable else fit.reserved.segments
        return Compared(row, told, "expandable segments" if expandable else "segments")
    return Compared(row, fit.peak.total, fit.peak.at)


def page(found: list[Compared]) -> Iterator[str]:
    for name, kinds in (("static", STATIC), ("peaks", None), (NO_ROOM, (NO_ROOM,))):
        own = [
            one for one in found
            if (one.row["kind"] in kinds if kinds else one.row["kind"] not in (*STATIC, NO_ROOM))
        ]  # fmt: skip
        if own:
            yield f"{name}: {sum(one.good for one in own)} of {len(own)} as close as they should be"
            yield ""
    head = ("source", "model", "layout", "dtype", "batch x length", "recompute", "memory",
            "published GiB", "check GiB", "ratio", "where")  # fmt: skip
    yield f"| {' | '.join(head)} |"
    yield "|---" * len(head) + "|"
    for one in found:
        row = one.row
        axes = ",".join(f"{axis}={size}" for axis, size in row["layout"].items())
        dtype = "/".join(filter(None, (row["dtype"], row.get("param_dtype"))))
        size = f"{row.get('batch', '')} x {row['length']:,}" if "length" in row else ""
        told = f"{one.told / GIB:.1f} | {one.ratio:.2f}" if one.told else " | "
        yield (
            f"| {row['source']} | {row['model']} | `{axes}` | {dtype} | {size} "
            f"| {row.get('recompute', '')} | {row['kind']} | {one.published / GIB:.1f} | {told} "
            f"| {one.at} |"
        )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", default="", help="only set-ups whose words contain this text")
    args = parser.parse_args()
    asked = [row for row in rows() if args.only in str(row)]
    with tempfile.TemporaryDirectory() as folder:
        found = list(compared(asked, Path(folder)))
    sys.stdout.write("\n".join(page(found)) + "\n")
    return int(not all(one.good for one in found))


if __name__ == "__main__":
    sys.exit(main())
