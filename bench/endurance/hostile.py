"""Checks that no file and no message from elsewhere runs code, crashes or hangs moediag, takes much
memory, or reaches a page unescaped.

Inputs of each kind are damaged by :mod:`bench.endurance.damage` and read by what reads them in
moediag. Every input is repeatable: it depends on the seed, the kind and the input's number only.
"""

from __future__ import annotations

import faulthandler
import json
import os
import random
import resource
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.endurance import originals, readers, record_originals
from bench.endurance.damage import CANARY, EVIL, damaged
from bench.endurance.originals import Files
from moediag.errors import MoediagError
from moediag.evidence import file_loading

SECONDS = 20.0  # of CPU time; an input that takes longer counts as a hang
MEMORY = 2 << 30  # bytes beyond those of the interpreter
BLOCK = 500  # inputs of one process


@dataclass
class Report:
    """Counts. ``slowest`` is in seconds of CPU time."""

    count: int = 0
    refused: int = 0
    slowest: float = 0.0
    memory: int = 0  # bytes, the most that a process had
    failures: list[tuple[str, int, str]] = field(default_factory=list)
    """Kind, number of the input, what happened."""


@dataclass(frozen=True, slots=True)
class Kind:
    """``share``: of all inputs, relative to other kinds."""

    originals: Callable[[], list[Files]]
    read: Callable[[Path], None]
    share: int


KINDS = {
    "dumps, stacks and logs": Kind(originals.evidence_folders, readers.folder, 20),
    "pasted texts": Kind(originals.pasted_texts, readers.folder, 10),
    "tools": Kind(originals.tools, readers.folder, 10),
    "attached": Kind(originals.attached, readers.attached, 10),
    "processes": Kind(record_originals.processes, readers.processes, 5),
    "watched job": Kind(originals.watched, readers.folder, 10),
    "laws": Kind(record_originals.laws, readers.folder, 10),
    "trial of a run": Kind(record_originals.trials, readers.folder, 10),
    "resumed runs": Kind(record_originals.resumed, readers.resumed, 10),
    "measured runs": Kind(record_originals.measured, readers.measured, 5),
    "tests on ranks": Kind(record_originals.reported, readers.reported, 5),
    "result.json": Kind(
        lambda: originals.files("tests/golden/results/*.json", "result.json"), readers.result, 15
    ),
    "journal": Kind(record_originals.journals, readers.journal, 10),
    "campaigns": Kind(record_originals.campaigns, readers.campaign, 10),
    "nights": Kind(record_originals.nights, readers.nights, 5),
    "checks": Kind(record_originals.checked, readers.checked, 10),
    "settings": Kind(record_originals.settings, readers.settings, 10),
    "scenario": Kind(
        lambda: originals.files("scenarios/*.yaml", "scenario.yaml"), readers.scenario, 10
    ),
    "known.yaml": Kind(originals.register, readers.register, 5),
    "safetensors": Kind(originals.checkpoints, readers.checkpoint, 10),
    "messages of nodes": Kind(originals.messages, readers.messages, 10),
}


# ------------------------------------------------------------------------ campaign


def run(
    count: int, seed: int = 0, kinds: Sequence[str] = tuple(KINDS)
) -> Iterator[tuple[str, Report]]:
    """Yields each kind's report; ``count`` inputs in all."""
    every = sum(KINDS[name].share for name in kinds)
    for name in kinds:
        report = Report()
        share = max(1, count * KINDS[name].share // every)
        for begin in range(0, share, BLOCK):
            _block(name, seed, range(begin, min(begin + BLOCK, share)), report)
        yield name, report


def _block(name: str, seed: int, numbers: range, report: Report) -> None:
    """Reads inputs in this order, in a process that may be lost."""
    left = list(numbers)
    while left:
        for number, end, seconds, memory in _in_process(name, seed, left, apart=False):
            left.remove(number)
            if end not in ("", "refused"):
                # Pickles are read by a process that may be lost; here it was this one.
                ((_, end, seconds, memory),) = _in_process(name, seed, [number], apart=True)
            report.count += 1
            report.refused += end == "refused"
            report.slowest = max(report.slowest, seconds)
            report.memory = max(report.memory, memory)
            if end not in ("", "refused"):
                report.failures.append((name, number, end))


def _in_process(
    name: str, seed: int, numbers: Sequence[int], apart: bool
) -> list[tuple[int, str, float, int]]:
    """Returns (number, end, CPU seconds, bytes) of each input, up to the one that ends the
    process. ``apart``: pickles are read as `moediag diagnose` reads them."""
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(receive)
        try:
            _read_all(name, seed, numbers, apart, send)
        finally:
            os._exit(0)
    os.close(send)
    with os.fdopen(receive) as lines:
        found = [tuple(json.loads(line)) for line in lines]
    _, code = os.waitpid(child, 0)
    if len(found) < len(numbers) and not (found and found[-1][1] not in ("", "refused")):
        found.append((numbers[len(found)], f"ended by {os.waitstatus_to_exitcode(code)}", 0.0, 0))
    return found


def _read_all(name: str, seed: int, numbers: Sequence[int], apart: bool, send: int) -> None:
    _limit()
    if not apart:
        file_loading._must_be_read_apart = lambda _: False  # type: ignore[assignment]
    samples = KINDS[name].originals()
    with os.fdopen(send, "w") as out:
        for number in numbers:
            began = time.process_time()
            end = _one(name, random.Random(f"{seed} {name} {number}"), samples)  # noqa: S311
            used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            out.write(json.dumps((number, end, time.process_time() - began, used)) + "\n")
            out.flush()
            if end not in ("", "refused"):
                return


def _limit() -> None:
    def expired(*_: object) -> None:
        raise TimeoutError

    faulthandler.disable()
    signal.signal(signal.SIGPROF, expired)
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[0]
    most = int(pages) * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _one(name: str, chance: random.Random, samples: list[Files]) -> str:
    """Returns how reading an input ended: "" well, "refused", or what is wrong."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        _write(folder, chance, chance.choice(samples))
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        try:
            KINDS[name].read(folder)
            end = ""
        except MoediagError:
            end = "refused"
        except TimeoutError:
            end = f"more than {SECONDS:g} s"
        except BaseException as error:  # this is what is looked for
            end = f"{type(error).__name__}: {error}"[:300]
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    return "code ran" if CANARY in os.environ or os.getenv(CANARY) else end


def _write(folder: Path, chance: random.Random, files: Files) -> None:
    chosen = chance.sample(sorted(files), chance.randint(1, min(len(files), 4)))
    for name, data in files.items():
        if chance.random() < 0.01:
            continue  # some ranks leave nothing
        place = folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        if chance.random() < 0.01:
            place = folder / f"{name}{EVIL.replace('/', '')}"
        elif chance.random() < 0.005:
            place.symlink_to(chance.choice(("/etc/passwd", "/dev/zero", ".", name)))
            continue
        place.write_bytes(damaged(data, chance) if name in chosen else data)
