"""Signals for any process of a command at any moment.

Checked: no process is left after 10 seconds; a process that only looks alike got no signal; what a
command left is readable; a resumed command comes to the answer of one that nobody disturbed; the
job that `attach` looks at goes on. A moment lies in the life of a command that nobody disturbs.
Scheduling is as on a cluster: if moediag still runs a second after the signals, it gets SIGTERM.
If moediag itself was killed, what the campaign stopped is continued, and the job ends by itself.
"""

from __future__ import annotations

import functools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.endurance import cases
from bench.endurance.cases import MOEDIAG
from moediag.launch.processes import all_stats

END = 10.0  # seconds after which no process may be left
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL, signal.SIGSTOP)
_LOOKS_ALIKE = """
import signal, sys, time
for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCONT):
    signal.signal(one, lambda number, _: print(number, file=open(sys.argv[1], "a")))
while True:
    time.sleep(60)
"""


@dataclass(frozen=True, slots=True)
class Command:
    """``share``: of all kills, relative to other commands. ``answer``: the fields of its JSON that
    a resumed command must repeat; () if it has no ``--resume``. ``job``: of a command that looks at
    a job, what runs beside it."""

    words: tuple[str, ...]
    share: int
    answer: tuple[str, ...] = ()
    job: tuple[str, ...] = ()


COMMANDS = {
    "watch, 2 ranks without torch": Command(
        ("watch", "--", sys.executable, "plain.py", "100"), 62
    ),
    "watch, 2 gloo ranks": Command(("watch", "--", *cases.TORCHRUN, "gloo.py", "3000"), 6),
    "attach": Command(
        ("attach", "--patience", "2"), 20, job=(sys.executable, "plain.py", "1000000")
    ),
    "resume": Command(
        ("resume", "--steps", "2", "--resumed", f"{sys.executable} resuming.py {{dir}} again", "--",
         sys.executable, "resuming.py", "{dir}"), 3,
    ),
    "run": Command(
        ("run", "expert-starvation", "--cpu", "2", "--variant", "unfixed"), 5,
        ("trials", "variant", "verdict", "signature"),
    ),
    "hunt": Command(
        ("hunt", "--family", "qwen3_moe", "--relation", "causality", "--relation", "batch"), 3,
        ("cells", "outcome"),
    ),
    "bisect": Command(
        ("bisect", "expert-starvation", "--good", "4.52.4", "--bad", "4.53.2", "--cpu", "2"), 1,
        ("began", "good", "bad"),
    ),
}  # fmt: skip


@dataclass
class Report:
    """Counts. ``slowest``: seconds until the last process had ended."""

    cases: int = 0
    signals: Counter[str] = field(default_factory=Counter)
    roles: Counter[str] = field(default_factory=Counter)
    resumed: int = 0
    slowest: float = 0.0
    failures: list[str] = field(default_factory=list)

    def add(self, other: Report) -> None:
        self.cases += other.cases
        self.signals += other.signals
        self.roles += other.roles
        self.resumed += other.resumed
        self.slowest = max(self.slowest, other.slowest)
        self.failures += other.failures


def run(
    count: int, seed: int = 0, only: str = "", at_once: int = 1
) -> Iterator[tuple[str, Report]]:
    """Yields each command's report; ``count`` kills in all, ``at_once`` at the same time."""
    chosen = {name: command.share for name, command in COMMANDS.items() if only in name}
    for name, share in chosen.items():
        report = Report()
        numbers = range(max(1, round(count * share / sum(chosen.values()))))
        _undisturbed(name)  # once, before others run beside
        with ThreadPoolExecutor(at_once) as pool:
            for one in pool.map(functools.partial(_with_stranger, name, seed), numbers):
                report.add(one)
                for failure in one.failures:
                    print(failure, file=sys.stderr, flush=True)  # noqa: T201
        yield name, report


def _with_stranger(name: str, seed: int, number: int) -> Report:
    report = Report()
    with _stranger() as signalled, cases.folder() as place:
        _case(name, f"{seed} {name} {number}", place, report)
        if said := signalled():
            report.failures.append(f"seed {seed} {number}: a stranger got {said}")
    return report


def _case(name: str, seed: str, place: Path, report: Report) -> None:
    chance = random.Random(seed)  # noqa: S311 - repeatable
    with _job(COMMANDS[name], place) as job:
        _kill(name, seed, chance, place, report, job)


def _kill(
    name: str, seed: str, chance: random.Random, place: Path, report: Report, job: _Job
) -> None:
    command, mark, out = COMMANDS[name], cases.new_mark(), place / "out"
    words = _words(command, job)
    moment = chance.uniform(0.05, _undisturbed(name)[0])
    process = cases.start(words, place, mark)
    time.sleep(moment)
    sent, stopped = [], []
    for _ in range(chance.choice((1, 1, 2, 3))):
        pids = {_role(pid, process.pid): pid for pid in sorted(cases.marked(mark))}
        if not pids:
            break
        role, one = chance.choice(sorted(pids)), chance.choice(SIGNALS)
        with suppress(ProcessLookupError):
            os.kill(pids[role], one)
        if one is signal.SIGSTOP:
            stopped.append(pids[role])
        sent.append(f"{one.name} to {role}")
        report.signals[one.name] += 1
        report.roles[role] += 1
    time.sleep(1.0)
    # A stopped moediag can do nothing; a scheduler kills it in the end.
    last = signal.SIGKILL if "SIGSTOP to moediag" in sent else signal.SIGTERM
    with suppress(ProcessLookupError):
        os.kill(process.pid, last)
    # Of a job whose root is dead, moediag ends the ranks that recorded something.
    ends = [f"{one.name} to launcher" for one in SIGNALS if one is not signal.SIGSTOP]
    unknown = "plain.py" in words and not set(ends).isdisjoint(sent)
    if last is signal.SIGKILL or "SIGKILL to moediag" in sent or unknown:
        for pid in stopped:  # nobody is left who could
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
    left: list[str] = []
    seconds = cases.gone(mark, END, left)
    end = cases.ended(process, place, 5.0)
    report.cases += 1
    report.slowest = max(report.slowest, seconds or END)
    what = f"seed {seed!r}, after {moment:.2f} s, {', '.join(sent) or 'only SIGTERM'}"
    if seconds is None:
        report.failures.append(f"{what}: left after {END:.0f} s: {left}; {end.text[-300:]!r}")
    if cases.BUG.search(end.text):
        report.failures.append(f"{what}: {end.text[-300:]}")
    if out.is_dir() and (why := cases.unreadable(out)):
        report.failures.append(f"{what}: unreadable: {why}")
    if harm := job.harm():
        report.failures.append(f"{what}: the job {harm}")
    if command.answer and (out / "journal.jsonl").is_file():
        report.resumed += 1
        _, answer = _undisturbed(name)
        again = _answer([*words, "--resume"], place, command.answer)
        if again != answer:
            report.failures.append(f"{what}: resumed to {again}, not {answer}")


@functools.cache
def _undisturbed(name: str) -> tuple[float, Any]:
    """The seconds that a command takes, and its answer."""
    command = COMMANDS[name]
    with cases.folder() as place, _job(command, place) as job:
        began = time.monotonic()
        answer = _answer(_words(command, job), place, command.answer or ("trials", "verdict"))
        return time.monotonic() - began, answer


def _words(command: Command, job: _Job) -> list[str]:
    first, *rest = command.words
    return [*MOEDIAG, first, "--out", "out", *rest, *job.pid]


class _Job:
    """A job that a command looks at, or none."""

    def __init__(self, process: subprocess.Popen[bytes] | None, output: Path) -> None:
        self.process, self.output = process, output
        self.pid = [str(process.pid)] if process is not None else []

    def harm(self) -> str:
        """What the command did to it; "" if it goes on."""
        if self.process is None:
            return ""
        before, ends = self.output.stat().st_size, time.monotonic() + END
        while time.monotonic() < ends:
            if self.process.poll() is not None:
                return f"ended: {self.process.returncode}"
            ranks = [one for one in all_stats().values() if one.ppid == self.process.pid]
            stopped = [one for one in ranks if one.state in "Tt"]
            if len(ranks) == 2 and not stopped and self.output.stat().st_size > before:
                return ""
            time.sleep(0.05)
        return f"does not go on: {ranks}"


@contextmanager
def _job(command: Command, place: Path) -> Iterator[_Job]:
    output = place / "job.txt"
    if not command.job:
        yield _Job(None, output)
        return
    with output.open("wb") as out:
        process = subprocess.Popen(command.job, cwd=place, stdout=out, start_new_session=True)
    try:
        ends = time.monotonic() + 60.0
        while not output.stat().st_size and time.monotonic() < ends:
            time.sleep(0.05)
        yield _Job(process, output)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _answer(words: list[str], place: Path, names: tuple[str, ...]) -> Any:
    done = subprocess.run(
        [*words[:4], "--json", *words[4:]], cwd=place, env=cases.variables(cases.new_mark()),
        timeout=900, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False,
    )  # fmt: skip
    raw = json.loads(done.stdout or b"{}")
    if names[0] not in raw:
        return f"nothing, with exit code {done.returncode}"
    found = raw[names[0]]
    if isinstance(found, list):
        return sorted(tuple(str(one.get(name)) for name in names[1:]) for one in found)
    return tuple(str((found or {}).get(name)) for name in names[1:])


def _role(pid: int, moediag: int) -> str:
    if pid == moediag:
        return "moediag"
    with suppress(OSError):
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        if any(one.startswith(b"RANK=") for one in environment):
            return "rank"
        if b"ranks/host" in command or b"ranks.host" in command:
            return "host"
        if b"py-spy" in command:
            return "py-spy"
        jobs = (b"distributed.run", b"plain.py", b"resuming.py")
        return "launcher" if any(one in command for one in jobs) else "other"
    return "other"


@contextmanager
def _stranger() -> Iterator[Any]:
    """A process that looks like a launcher and like a rank of another job. Yields what says which
    signals it got."""
    with tempfile.TemporaryDirectory() as place:
        log = Path(place) / "signals"
        alike = ("-m", "torch.distributed.run", "gloo.py")
        words = [sys.executable, "-c", _LOOKS_ALIKE, str(log), *alike]
        variables = {"RANK": "0", "WORLD_SIZE": "2", "MOEDIAG_LAUNCH": "of-another-launch"}
        process = subprocess.Popen(words, env={**os.environ, **variables})
        try:
            yield lambda: (
                f"ended by {process.returncode}" if process.poll() is not None
                else log.read_text() if log.exists() else ""
            )  # fmt: skip
        finally:
            process.kill()
            process.wait()
