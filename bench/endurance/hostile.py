"""Checks that no file and no message from elsewhere runs code, crashes or hangs moediag, takes much
memory, or reaches a page unescaped.

Inputs of each kind are damaged by :mod:`bench.endurance.damage` and read by what reads them in
moediag. Every input is repeatable: it depends on the seed, the kind and the input's number only.
"""

from __future__ import annotations

import faulthandler
import io
import json
import os
import random
import re
import resource
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from html.parser import HTMLParser
from pathlib import Path

from rich.console import Console

from bench.endurance import originals
from bench.endurance.damage import CANARY, EVIL, damaged
from bench.endurance.originals import Files
from moediag.errors import MoediagError
from moediag.evidence import file_loading
from moediag.lab.campaign.engine import journal
from moediag.lab.launch.rendezvous import Meeting
from moediag.lab.pipeline import register
from moediag.lab.scenario import load as loading
from moediag.launch.attach import archives, debug_server, spy
from moediag.launch.attach.machines import Answer
from moediag.launch.nodes import status
from moediag.launch.nodes.peers import Peers
from moediag.pipeline import attach_machines
from moediag.pipeline.examine import examine
from moediag.protocol import parse_json
from moediag.ranks import relay
from moediag.report import html, json_view, junit, markdown, terminal, trace, views
from moediag.report.printable import printable
from moediag.result import RunResult
from moediag.result.result_file import trial_from_json

SECONDS = 20.0  # of CPU time; an input that takes longer counts as a hang
MEMORY = 2 << 30  # bytes beyond those of the interpreter
BLOCK = 500  # inputs of one process
_NOW = datetime(2026, 11, 25, tzinfo=timezone.utc)
_CODE = re.compile(r"(?<!`)(`+)(?!`).*?(?<!`)\1(?!`)")  # a span of code, which is shown as it is
CONTROLS = re.compile(
    r"[^\t\n\x20-\x7e\xa0-\ud7ff\ue000-\U0010ffff]|[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]"
)


@dataclass
class Report:
    """Counts. ``slowest`` is in seconds of CPU time."""

    count: int = 0
    refused: int = 0
    slowest: float = 0.0
    memory: int = 0  # bytes, the most that a process had
    failures: list[tuple[str, int, str]] = field(default_factory=list)
    """Kind, number of the input, what happened."""


class Unescaped(Exception):
    """A view passed on what its reader would obey."""


# ------------------------------------------------------------------------ readers


class _Tags(HTMLParser):
    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("script", "img") or any(name.startswith("on") for name, _ in attrs):
            raise Unescaped(f"html: <{tag}>")


def show(result: RunResult) -> None:
    """Renders every view. Raises Unescaped."""
    stream = io.StringIO()
    terminal.render(result, Console(file=stream, width=80, no_color=True), Path(f"a{EVIL}"))
    page = html.render([result])
    text = printable(markdown.render([result]))
    data = json_view.render(result)
    json.loads(data, parse_constant=_no_number)
    for view in (stream.getvalue(), page, text, data, junit.render([result])):
        if found := CONTROLS.search(view):
            raise Unescaped(
                f"{found[0]!r} after {view[max(0, found.start() - 60) : found.start()]!r}"
            )
    _Tags().feed(page)
    fence = ""
    for line in text.splitlines():
        mark = re.match(r"`{3,}", line)
        if fence or mark:
            fence = "" if fence and line == fence else fence or (mark[0] if mark else "")
        elif re.search("<script|<img", _CODE.sub("", line)):
            raise Unescaped(f"markdown: {line[:200]}")


def _folder(folder: Path) -> None:
    found = examine([folder])
    show(found.result)
    json.loads(trace.render(found.traced()), parse_constant=_no_number)


def _no_number(text: str) -> None:
    raise Unescaped(f"{text} in the JSON of a trace")


def _result(folder: Path) -> None:
    show(views.load(folder / "result.json")[0])


def _journal(folder: Path) -> None:
    header, lines = journal.lines_of(folder)
    with tempfile.TemporaryDirectory() as place:
        again = journal.create(Path(place) / "run", header)
        again.lines += lines
        journal.Records(again, "trial", trial_from_json, lambda _: {})
        again.close()


def _scenario(folder: Path) -> None:
    loading.load(folder / "scenario.yaml")


def _register(folder: Path) -> None:
    register.read(folder / "known.yaml")


def _checkpoint(folder: Path) -> None:
    from moediag.lab.check import checkpoint_names

    try:
        checkpoint_names.shapes(folder)
    except checkpoint_names.NotRead as no:
        raise MoediagError(str(no)) from no


class _Store:
    """A job's store as another program may have filled it."""

    def __init__(self, values: dict[str, bytes]) -> None:
        self.values = {f"moediag/{originals.JOB}/{name}": value for name, value in values.items()}

    def check(self, names: Sequence[str]) -> bool:
        return all(name in self.values for name in names)

    def get(self, name: str) -> bytes:
        return self.values[name]

    def set(self, name: str, text: str) -> None:
        self.values[name] = text.encode()

    def add(self, _name: str, _by: int) -> int:
        return 2


def _messages(folder: Path) -> None:
    """Nothing in the store, in another node's file or in its pulse ends the reader of it."""
    sent = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    them, own = originals.KEY, "f" * 16
    store = _Store({
        "node/1": own.encode(), "node/2": sent.get("node", them.encode()),
        f"pulse/{them}": sent.get("pulse", b""), f"evidence/{them}/1": sent.get("count", b""),
        f"evidence/{them}/1/0": sent.get("chunk", b""),
    })  # fmt: skip
    (folder / "job" / own).mkdir(parents=True)
    (folder / "job" / own / "want").touch()
    one = relay.Relay(store, originals.JOB, own, folder / "job", relay.Names("p", "want", "link"))
    for _ in range(2):
        one.turn()
    (folder / "node-1.json").write_bytes(sent.get("word", b""))
    meeting = Meeting(folder, 0, 2, "plan", 1.0)
    meeting._hear(time.monotonic())
    meeting._is_there(1, 1)
    try:
        pulse = status.of_json(parse_json(sent.get("pulse", b"")))
    except ValueError as no:
        raise MoediagError(str(no)) from no
    peers = Peers(own, 5.0, True, 0.0)
    peers.hear(1.0, [pulse])
    peers.stood(peers.samples(1.0, (0, 1), 4))
    peers.lacking(1)


def _attached(folder: Path) -> None:
    """Machine ``a`` sends a whole archive; ``b`` one whose bytes are damaged, too."""
    for path in filter(Path.is_file, folder.iterdir()):
        found = path.read_bytes()
        dict(debug_server.dumps(found.decode("utf-8", "replace")))
        for read in (spy.rank_of, spy.places, spy.values, spy.without_text):
            read(found)  # type: ignore[operator]
    with tempfile.TemporaryDirectory() as place:
        answers = []
        for name in ("a", "b"):
            archive = Path(place) / f"{name}.tgz"
            if (folder / "evidence").is_dir():
                archives.pack(folder / "evidence", archive, redact=False)
            else:
                archive.write_bytes(b"")
            answers.append(Answer(name, archive, after=1.5))
        data = answers[1].archive.read_bytes()
        answers[1].archive.write_bytes(damaged(data, random.Random(data[-8:])))  # noqa: S311
        done = attach_machines.page_of(answers, "--hosts a,b", Path(place) / "out", "ab", _NOW)
        show(done.result)


@dataclass(frozen=True, slots=True)
class Kind:
    """``share``: of all inputs, in percent."""

    originals: Callable[[], list[Files]]
    read: Callable[[Path], None]
    share: int


KINDS = {
    "dumps, stacks and logs": Kind(originals.evidence_folders, _folder, 20),
    "tools": Kind(originals.tools, _folder, 10),
    "attached": Kind(originals.attached, _attached, 10),
    "watched job": Kind(originals.watched, _folder, 10),
    "trial of a run": Kind(originals.trials, _folder, 10),
    "result.json": Kind(
        lambda: originals.files("tests/golden/results/*.json", "result.json"), _result, 15
    ),
    "journal": Kind(originals.journals, _journal, 10),
    "scenario": Kind(lambda: originals.files("scenarios/*.yaml", "scenario.yaml"), _scenario, 10),
    "known.yaml": Kind(originals.register, _register, 5),
    "safetensors": Kind(originals.checkpoints, _checkpoint, 10),
    "messages of nodes": Kind(originals.messages, _messages, 10),
}


# ------------------------------------------------------------------------ campaign


def run(
    count: int, seed: int = 0, kinds: Sequence[str] = tuple(KINDS)
) -> Iterator[tuple[str, Report]]:
    """Yields each kind's report; ``count`` inputs in all, where all kinds are read."""
    for name in kinds:
        report = Report()
        share = max(1, count * KINDS[name].share // 100)
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
