"""Faults of the machine below a command of moediag: full disk, no memory, no files, no /dev/shm, no
ptrace, no network, one that is lost in a build, a clock that is set back, renames that are late or
whose answer is lost.

Checked: the command ends and leaves no process; it reports no bug of its own; where the fault
decides, it says so. Mounts are made in a namespace of the command; nobody else sees them.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from bench.endurance import cases, late_files, lost_network
from bench.endurance.cases import MOEDIAG, ROOT, TORCHRUN

LONGEST = 240.0  # seconds; a command that takes longer counts as a hang
RELEASE = "transformers=4.53.2"
WATCH = (*MOEDIAG, "watch", "--out", "out/w", "--", sys.executable, "plain.py", "40")
HANG = (*MOEDIAG, "watch", "--out", "out/h", "--", *TORCHRUN, "gloo.py", "300", "hang")
RUN = (*MOEDIAG, "run", "expert-starvation", "--cpu", "2", "--variant", "unfixed", "--out", "out/r")
DIAGNOSE = (*MOEDIAG, "diagnose", str(ROOT / "tests" / "samples" / "watched"))
RESUME = (*RUN, "--resume")
DIAGNOSE_HANG = (*MOEDIAG, "diagnose", "out/h")
LIST = (*MOEDIAG, "stacks", "list")
BUILD = (*MOEDIAG, "stacks", "build", RELEASE)
DONE = "^step 39$"  # what the watched job prints last: the fault of the watcher is not the job's

_INTERPOSED = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>
int clock_gettime(clockid_t which, struct timespec *now) {
  static int (*real)(clockid_t, struct timespec *);
  if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
  int answer = real(which, now);
  char *at = getenv("ENDURE_SET_BACK");
  if (at && which == CLOCK_REALTIME && now->tv_sec >= atol(at)) now->tv_sec -= 3600;
  return answer;
}
int rename(const char *from, const char *to) {
  static int (*real)(const char *, const char *), count;
  if (!real) real = dlsym(RTLD_NEXT, "rename");
  if (getenv("ENDURE_RENAMES")) usleep(100000);
  int answer = real(from, to);
  if (getenv("ENDURE_RENAMES") && !answer && ++count % 5 == 0) { errno = ENOENT; return -1; }
  return answer;
}
"""
# A filter of system calls for itself and its children: ptrace and process_vm_readv answer EPERM.
_NO_PTRACE = """
import ctypes, os, struct, sys
code = [(0x20, 0, 0, 0), (0x15, 1, 0, 101), (0x15, 0, 1, 310), (0x06, 0, 0, 0x50001),
        (0x06, 0, 0, 0x7FFF0000)]
filter = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *one) for one in code))
program = struct.pack("HxxxxxxQ", len(code), ctypes.addressof(filter))
libc = ctypes.CDLL(None, use_errno=True)
if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, program, 0, 0):
    sys.exit("endure: no seccomp here")
os.execvp(sys.argv[1], sys.argv[1:])
"""


@dataclass(frozen=True, slots=True)
class Fault:
    """``before``: shell commands that make the fault, in the namespace. ``said``: what the output
    must match, whatever the exit code; "" if nothing."""

    name: str
    before: str
    words: tuple[str, ...]
    said: str = ""
    variables: tuple[tuple[str, str], ...] = ()
    network: bool = True
    ptrace: bool = True


@dataclass
class Report:
    cases: int = 0
    codes: list[int | None] = field(default_factory=list)
    slowest: float = 0.0
    said: str = ""
    failures: list[str] = field(default_factory=list)


def faults(place: Path) -> Iterator[Fault]:
    """All but those that need two commands."""
    full = "mount -t tmpfs -o size={0}k none out"
    for size in (4, 8, 16, 32, 64, 128):
        yield Fault("full disk, watch", full.format(size), WATCH, f"{DONE}|disk is full")
    for size in (4, 64, 256):
        yield Fault(
            "full disk, run", full.format(size), RUN, "disk is full|unfixed: collective-mismatch"
        )
    read_only = "mkdir cache && mount -t tmpfs -o ro none cache"
    cache = (("MOEDIAG_CACHE", "cache"),)
    for words, said in ((BUILD, "error: the cache folder cannot be made"), (LIST, ""), (RUN, "")):
        yield Fault("read-only cache", read_only, words, said, cache)
    for words, said in ((WATCH, DONE), (RUN, ""), (DIAGNOSE, "")):
        yield Fault("64 open files", "ulimit -n 64", words, said)
    for words, said in ((DIAGNOSE, ""), (WATCH, ""), (RUN, "not enough memory")):
        yield Fault("200 MB of memory", "ulimit -v 204800", words, said)
    no_shm = "mount -t tmpfs -o ro none /dev/shm"
    for words, said in ((RUN, "--launcher torchrun"), (HANG, "rank 1")):
        yield Fault("no /dev/shm", no_shm, words, said)
    yield Fault("no ptrace", "true", HANG, "rank 1", ptrace=False)
    empty = (("MOEDIAG_CACHE", "cache"), ("UV_CACHE_DIR", "uv"))
    yield Fault("no network", "true", BUILD, "error: ", empty, network=False)
    if library := _library(place):
        preload = ("LD_PRELOAD", library)
        for words, said in ((WATCH, DONE), (HANG, "rank 1")):
            back = ("ENDURE_SET_BACK", str(int(time.time()) + 6))
            yield Fault("clock set back by an hour", "true", words, said, (preload, back))
        for words, said in ((WATCH, DONE), (HANG, "rank 1"), (RUN, "")):
            late = (preload, ("ENDURE_RENAMES", "1"))
            yield Fault("late and lost renames", "true", words, said, late)


def run(only: str = "", seed: int = 0) -> Iterator[tuple[str, Report]]:
    """Yields a report for each name of a fault."""
    with cases.folder() as libraries:
        for name, some in itertools.groupby(faults(libraries), lambda fault: fault.name):
            if only in name:
                report = Report()
                for fault in some:
                    _attempt(fault, report)
                yield name, report
    for name, check in (
        ("slow files, shown late to others", _late),
        ("stale handles, errors of fsync and close", _failing),
        ("network lost in a build", _lost),
        ("two builds, one killed, then a cache of another version", _builds),
    ):
        if only in name:
            report = Report()
            with cases.folder() as place:
                check(place, random.Random(seed), report)  # noqa: S311 - repeatable
            yield name, report


def _library(place: Path) -> str:
    """The interposed layer; "" without a C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return ""
    (place / "layer.c").write_text(_INTERPOSED)
    words = [compiler, "-shared", "-fPIC", "-o", "layer.so", "layer.c", "-ldl"]
    return str(place / "layer.so") if not subprocess.run(words, cwd=place).returncode else ""


def _attempt(fault: Fault, report: Report) -> None:
    with cases.folder() as place:
        (place / "out").mkdir()
        own = ["unshare", "--map-root-user", "--mount", *(["--net"] if not fault.network else [])]
        words = [*own, "sh", "-c", f'{fault.before} && exec "$@"', "sh"]
        words += [] if fault.ptrace else [sys.executable, "-c", _NO_PTRACE]
        end = _ended([*words, *fault.words], place, fault, report)
        report.said = end.said
    what = f"{fault.name}: {fault.before}: {cases.shown(fault.words)}"
    _check(what, end, report)
    if fault.said and not re.search(fault.said, end.text, re.MULTILINE):
        report.failures.append(f"{what}: not said: {fault.said}: {end.text[-300:]!r}")


def _ended(words: list[str], place: Path, fault: Fault, report: Report) -> cases.Ended:
    mark = cases.new_mark()
    variables = {
        name: str(place / value) if name.endswith(("_CACHE", "_DIR")) else value
        for name, value in fault.variables
    }
    process = cases.start(words, place, mark, **variables)
    end = cases.ended(process, place, LONGEST)
    if cases.gone(mark, 10.0) is None:
        report.failures.append(f"{fault.name}: {shlex.join(fault.words[3:])}: processes left")
    return end


def _check(what: str, end: cases.Ended, report: Report) -> None:
    report.cases += 1
    report.codes.append(end.code)
    report.slowest = max(report.slowest, end.seconds)
    if end.code is None:
        report.failures.append(f"{what}: no end in {LONGEST:.0f} s: {end.text[-300:]!r}")
    elif end.code == 5 or cases.BUG.search(end.text):
        report.failures.append(f"{what}: exit {end.code}: {end.text[-600:]!r}")


def _late(place: Path, chance: random.Random, report: Report) -> None:
    """The answers are those of a disk without faults. Ranks may write on other nodes; a `run` of
    one node sees its own files at once."""
    _on_files(place / "watch", "delay,hide", (WATCH, HANG, DIAGNOSE_HANG), chance, report)
    _on_files(place / "run", "delay", (RUN, RESUME), chance, report)


def _failing(place: Path, chance: random.Random, report: Report) -> None:
    """Evidence may be missing, but jobs end as they would, and nothing is a bug of moediag."""
    words = (WATCH, HANG, DIAGNOSE_HANG, RUN, RESUME)
    _on_files(place, "delay,stale,close", words, chance, report)


# What a command ends with and says where no evidence is missing.
_ANSWERS = {WATCH: (0, DONE), HANG: (1, "rank 1"), DIAGNOSE_HANG: (1, "rank 1"),
            RESUME: (0, "reproduced")}  # fmt: skip


def _on_files(
    place: Path, faults: str, commands: Sequence[tuple[str, ...]], chance: random.Random,
    report: Report,
) -> None:  # fmt: skip
    if why := late_files.missing():
        report.said = f"not tried: {why}"
        return
    place.mkdir(exist_ok=True)
    for name, text in (("plain.py", cases.PLAIN_JOB), ("gloo.py", cases.GLOO_JOB)):
        (place / name).write_text(text)
    with late_files.mounted(place / "back", place / "out", faults, chance.randrange(1000)):
        for words in commands:
            mark = cases.new_mark()
            process = cases.start(words, place, mark)
            if words is RUN:  # it is killed in the middle, and then resumed
                with suppress(subprocess.TimeoutExpired):
                    process.wait(chance.uniform(2.0, 8.0))
                process.kill()
            end = cases.ended(process, place, LONGEST)
            what = f"{faults}: {cases.shown(words)}"
            if cases.gone(mark, 10.0) is None:
                report.failures.append(f"{what}: processes left")
            if words is not RUN:
                _check(what, end, report)
            code, said = _ANSWERS.get(words, (end.code, ""))
            exact = words is WATCH or "stale" not in faults
            if exact and (end.code != code or not re.search(said, end.text, re.MULTILINE)):
                report.failures.append(f"{what}: exit {end.code}: {end.text[-600:]!r}")
            report.said = end.said
            (place / "output.txt").unlink()


def _lost(place: Path, chance: random.Random, report: Report) -> None:
    """The index is lost after some megabytes of 60; once it does not answer, else it refuses. The
    same command builds the stack when the network is back."""
    for number, silent in enumerate((False, False, False, False, True)):
        own = place / str(number)
        own.mkdir()
        cache = {"MOEDIAG_CACHE": str(own / "cache"), "UV_CACHE_DIR": str(own / "uv")}
        budget = int(chance.uniform(0.1e6, 45e6))
        what = f"network lost after {budget / 1e6:.1f} MB{', silent' * silent}"
        with lost_network.proxy(budget, silent) as index:
            given = {"HTTPS_PROXY": index.url, "PIP_DEFAULT_TIMEOUT": "15", **cache}
            end = cases.ended(cases.start(BUILD, own, cases.new_mark(), **given), own, LONGEST)
        _check(what, end, report)
        if end.code != 4 or not end.said.startswith("error: "):
            report.failures.append(f"{what}: exit {end.code}: {end.text[-300:]!r}")
        report.said = end.said
        again = cases.ended(cases.start(BUILD, own, cases.new_mark(), **cache), own, LONGEST)
        _check(f"{what}, again", again, report)
        if again.code:
            report.failures.append(f"{what}, again: {again.text[-300:]!r}")


def _builds(place: Path, chance: random.Random, report: Report) -> None:
    """One of two builds is killed; the other one finishes. Then the records in the cache are those
    of another moediag, cut, or no records."""
    cache = {"MOEDIAG_CACHE": str(place / "cache")}
    mark = cases.new_mark()
    one = cases.start(BUILD, place, mark, **cache)
    time.sleep(chance.uniform(0.5, 4.0))
    other = cases.start(BUILD, place, cases.new_mark(), **cache)
    time.sleep(chance.uniform(0.5, 6.0))
    for pid in cases.marked(mark):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    one.wait()
    end = cases.ended(other, place, LONGEST)
    _check("the build beside the killed one", end, report)
    if end.code:
        report.failures.append(f"the build beside the killed one: {end.text[-300:]!r}")
    for damage in (_older, _cut, _empty):
        for record in (place / "cache" / "stacks" / "requests").glob("*.json"):
            damage(record)
        for words in (LIST, BUILD):
            (place / "output.txt").unlink()
            end = cases.ended(cases.start(words, place, mark, **cache), place, LONGEST)
            _check(f"{damage.__name__} records: {cases.shown(words)}", end, report)
            if end.code:
                report.failures.append(f"{damage.__name__} records: {end.text[-300:]!r}")
    report.said = end.said


def _older(record: Path) -> None:
    raw = json.loads(record.read_text())
    record.write_text(json.dumps({**raw, "format": 0, "resolution": None}))


def _cut(record: Path) -> None:
    record.write_bytes(record.read_bytes()[:40])


def _empty(record: Path) -> None:
    record.write_bytes(b"")
