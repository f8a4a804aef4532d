"""Runs other libraries' own tests with the pytest plugin and without, or tests with a planted fault
(`planted.py`, `planted_metrics.py`), and writes a section of reports/plug.md.

``python -m bench.plugged accelerate=CHECKOUT torchmetrics=CHECKOUT fabric=CHECKOUT``
``python -m bench.plugged planted planted_metrics``

Run it by the Python that has the libraries; moediag is taken from this folder.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

from bench.sections import replaced

ROOT = Path(__file__).parents[2]
PLANTED = {
    "planted": Path(__file__).parent / "planted.py",
    "planted_metrics": Path(__file__).parent / "planted_metrics.py",
}
PAGE = ROOT / "reports" / "plug.md"
LIBRARIES_TITLE = "Tests of other libraries"
TITLES = {
    "planted": "Planted faults: accelerate",
    "planted_metrics": "Planted faults: torchmetrics",
}
PLANTED_HEAD = "| test | judged | first line of the failure |\n| --- | --- | --- |"
HEADS = {
    LIBRARIES_TITLE: "| library | tests | outcomes | differ | CPU s without | with | change |\n"
    "| --- | --- | --- | --- | --- | --- | --- |",
    **dict.fromkeys(TITLES.values(), PLANTED_HEAD),
}
PLUGIN = "moediag.pytest_plugin"
OPTIONS = (
    "-q", "-o", "addopts=", "-p", "no:cacheprovider", "-p", "no:randomly", "--tb=short",
    "--timeout=1200", "-W", "ignore",
)  # fmt: skip


@dataclass(frozen=True)
class Suite:
    """Tests of one library."""

    folder: str
    """In its repository, from which pytest starts."""
    tests: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


SUITES = {
    "accelerate": Suite(
        ".",
        tuple(
            f"tests/test_{name}.py"
            for name in (
                "accelerator", "optimizer", "scheduler", "data_loader", "hooks", "utils", "cpu",
                "grad_sync", "metrics", "kwargs_handlers", "memory_utils", "logging", "imports",
                "dataclasses", "state_checkpointing", "modeling_utils",
            )
        ),
    ),
    "torchmetrics": Suite("tests", ("unittests/bases",), {"USE_PYTEST_POOL": "1"}),
    "fabric": Suite(
        "tests",
        tuple(f"tests_fabric/{name}" for name in ("plugins/collectives", "plugins/environments")),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Session:
    """How one session of pytest ended."""

    outcomes: Mapping[str, str]
    """Test -> passed, failed, error or skipped."""
    texts: Mapping[str, str]
    """Test -> the text of its failure."""
    cpu: float
    output: str


def session(
    folder: Path, tests: Sequence[str], environment: Mapping[str, str], sources: str = ""
) -> Session:
    """Runs pytest once. ``sources``: a folder of packages."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    paths = [sources, str(ROOT), own.get("PYTHONPATH", "")]
    own |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    own |= {"PYTHONPATH": os.pathsep.join(filter(None, paths)), **environment}
    with tempfile.TemporaryDirectory() as results:
        file = Path(results) / "results.xml"
        line = [sys.executable, "-m", "pytest", *OPTIONS, f"--junitxml={file}", *tests]
        before = _cpu()
        done = subprocess.run(
            line, cwd=folder, env=own, check=False, capture_output=True, text=True,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        cpu = _cpu() - before
        cases = list(ElementTree.parse(file).iter("testcase")) if file.exists() else []  # noqa: S314
    outcomes, texts = {}, {}
    for case in cases:
        name = f"{case.get('classname')}::{case.get('name')}"
        ends = [one for one in case if one.tag in ("failure", "error", "skipped")]
        kind = ends[0].tag if ends else "passed"
        outcomes[name] = {"failure": "failed"}.get(kind, kind)
        texts[name] = (ends[0].text or ends[0].get("message") or "") if ends else ""
    return Session(outcomes, texts, cpu, done.stdout + done.stderr)


def _cpu() -> float:
    """CPU seconds of all processes that ended below this one."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def compared(name: str, checkout: Path, logs: Path, pairs: int) -> str:
    """Runs a suite ``pairs`` times with the plugin and without, each pair in the other order than
    the one before, so that a drift of the machine cancels out; returns its row with the median of
    what the pairs change."""
    suite = SUITES[name]
    kept: dict[bool, list[Session]] = {True: [], False: []}
    for number, on in enumerate(((False, True, True, False) * pairs)[: 2 * pairs]):
        plugin = ("-p", PLUGIN if on else f"no:{PLUGIN}")
        done = session(
            checkout / suite.folder, (*plugin, *suite.tests), suite.environment,
            str(checkout / "src") if (checkout / "src").is_dir() else "",
        )  # fmt: skip
        kept[on].append(done)
        (logs / f"{name}-{number}-{'with' if on else 'without'}.txt").write_text(done.output)
        counts = dict(Counter(done.outcomes.values()))
        _say(f"{name} {'with' if on else 'without'}: {counts} {done.cpu:.1f} CPU s")
    tests = sorted({test for ran in kept.values() for one in ran for test in one.outcomes})
    differ = 0
    for test in tests:
        ends = {side: [one.outcomes.get(test, "not run") for one in kept[side]] for side in kept}
        if len({*ends[True], *ends[False]}) > 1:
            differ += 1
            _say(f"{test}: without {', '.join(ends[False])}; with {', '.join(ends[True])}")
    counts = Counter(kept[False][0].outcomes.values())
    shown = ", ".join(f"{number} {what}" for what, number in sorted(counts.items()))
    spent = {side: [one.cpu for one in kept[side]] for side in kept}
    ratios = [on / off for on, off in zip(spent[True], spent[False], strict=True)]
    change = statistics.median(ratios) - 1
    return (
        f"| {name} | {len(tests)} | {shown} | {differ} | "
        f"{_all(spent[False])} | {_all(spent[True])} | {change:+.1%} |"
    )


def _all(seconds: Sequence[float]) -> str:
    return ", ".join(f"{one:.1f}" for one in seconds)


def planted(file: str, chosen: str) -> None:
    """Runs tests of one of :data:`PLANTED` in one session."""
    path = PLANTED[file]
    lines = path.read_text(encoding="utf-8").splitlines()
    named = [re.match(r"def (test_(?:bad|ok)_\w+)", line) for line in lines]
    names = [found[1] for found in named if found and re.search(chosen, found[1])]
    one = session(ROOT, ("-p", PLUGIN, *(f"{path}::{name}" for name in names)), {})
    ended = {test.rpartition("::")[2]: test for test in one.outcomes}
    for name in names:
        if name not in ended:
            _say(f"{name}: not run")
            continue
        text = one.texts[ended[name]]
        first = text.partition("\n")[0]
        judged = _judged(name, one.outcomes[ended[name]], first, text, lines)
        _say(f"{name}: {judged}. {first[:300]}")
        told = first.replace("|", "\\|")
        _write(TITLES[file], f"| `{name}` | {judged} | {told[:200]}{'…' if told[200:] else ''} |")


def _judged(name: str, outcome: str, first: str, text: str, lines: Sequence[str]) -> str:
    """The truth is the comment of the planted line, `# PLANTED 1`: rank 1; `# PLANTED -`: no rank
    can be told. A line near it, of the same test, counts."""
    if name.startswith("test_ok_"):
        return "healthy, passed" if outcome == "passed" else "FALSE ALARM"
    if outcome != "failed":
        return "missed"
    body = _body(name, lines)
    truth = next(
        found[1] for line in body.values() if (found := re.search(r"# PLANTED (\S)", line))
    )
    named = re.match(r"ranks? ([\d, ]+?)(?: at|:)", first)
    several = re.match(r"ranks? [\d, ]+ at \S+ \w+, rank", first)
    who = "" if several or named is None else named[1]
    if who not in ("", truth):
        return "WRONG RANK"
    if any("train(" in line for line in body.values()):
        body |= _body("train", lines)
    near = {at for at, line in body.items() if re.search("# (PLANTED|WAITS)", line)}
    told = {int(at) for at in re.findall(r"planted\w*\.py:(\d+)", text)}
    place = "" if near & told else ", without the line"
    if who:
        return "right rank" + place
    return ("rightly nobody" if truth == "-" else "nobody named") + place


def _body(name: str, lines: Sequence[str]) -> dict[int, str]:
    """The lines of the function ``name``, by their numbers."""
    begin = next(at for at, line in enumerate(lines, 1) if line.startswith(f"def {name}("))
    rest = enumerate(lines[begin:], begin + 1)
    end = next((at for at, line in rest if line.startswith(("def ", "@"))), len(lines) + 1)
    return dict(list(enumerate(lines, 1))[begin - 1 : end - 1])


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.plugged", description=__doc__)
    parser.add_argument(
        "what", nargs="+", metavar="NAME=CHECKOUT", help="or: planted, planted_metrics"
    )
    parser.add_argument("--only", metavar="PATTERN", default="", help="planted tests to run")
    parser.add_argument("--logs", metavar="DIR", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--pairs", type=int, default=2, help="sessions with, and as many without")
    asked = parser.parse_args()
    for word in asked.what:
        name, _, checkout = word.partition("=")
        if name in PLANTED:
            planted(name, asked.only)
        else:
            row = compared(name, Path(checkout), asked.logs, asked.pairs)
            _write(LIBRARIES_TITLE, row)


def _write(title: str, row: str) -> None:
    """Writes a row; a row of the same test or library is replaced."""
    text = PAGE.read_text(encoding="utf-8") if PAGE.exists() else "# Plugged in\n"
    _, _, section = text.partition(f"## {title}\n")
    rows = re.findall(r"^\|.*$", section.partition("\n## ")[0], re.MULTILINE)[2:]
    kept = {one.split("|")[1]: one for one in (*rows, row)}
    table = "\n".join((HEADS[title], *kept.values()))
    PAGE.write_text(replaced(text, f"## {title}\n\n{table}\n"), encoding="utf-8")


if __name__ == "__main__":
    main()
