"""Runs one case, watched, attached to or bare, within a time limit, and collects what was said."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from bench.abroad import edits, launchers
from bench.abroad.cases import Case
from bench.abroad.programs import Program

STILL = 150.0  # seconds without a step and without a page after which none is expected any more
# The default patience of 30 s would be 120 s for a rank that computes: too long for fifty jobs
# with a fault. Slow jobs are watched with it.
OPTIONS = ("--patience", "5", "--on-hang", "abort")
# For faults, which stand for longer when they are looked at. Healthy jobs, in which a rank may
# sleep for 15 s, are looked at with the default of 30 s.
ATTACH = ("--patience", "5")
STANDS = 10.0  # seconds without a step after which a job with a fault is looked at
NO_STEP = 40.0  # the same, before the first step; later than that, no further look follows
ENDED = "ended by itself"
GONE = "The job ended while it was looked at"
INSIDE = Path(__file__).with_name("inside")
ROOT = Path(__file__).parents[2]
# Ours from this checkout; a variable would make it importable in the job, too.
MOEDIAG = (
    f"import runpy, sys; sys.path.insert(0, {str(ROOT)!r}); sys.argv[0] = 'moediag'; "
    "runpy.run_module('moediag', run_name='__main__')"
)


@dataclass(frozen=True)
class Ended:
    """How a run ended. ``code``: None after the time limit. ``told``: seconds from the newest
    optimizer step of any rank to the page. ``left``: processes of the job that outlived it."""

    code: int | None
    seconds: float
    told: float | None
    left: int


@dataclass(frozen=True)
class Answer:
    """What moediag said of one case. ``refused``: why there is no page. ``places``: the lines of
    the truth as they are numbered in the run, ``file.py:42``. ``changed``: how a healthy program
    ended differently from the same without moediag; "" if it did not."""

    name: str
    version: str
    verdict: str = ""
    ranks: tuple[int, ...] = ()
    cause: str = ""
    page: str = ""
    code: int | None = None
    seconds: float | None = None
    took: float = 0.0
    places: tuple[str, ...] = ()
    changed: str = ""
    refused: str = ""


def place(case: Case, program: Program, folder: Path, checkouts: Path | None) -> tuple[str, ...]:
    """Makes the case's copy of the program at ``folder``; returns the lines of its truth."""
    program.place(folder, checkouts)
    edits.apply(case.faults, folder)
    return tuple(line.place(folder) for line in case.truth.lines)


def watched(
    case: Case, program: Program, python: str, folder: Path, checkouts: Path | None, version: str,
    options: Sequence[str] = (), compared: bool = True, verb: str = "watch",
) -> Answer:  # fmt: skip
    """Returns the answer of `moediag watch` or another ``verb``; its run directory is
    ``folder/run``. ``compared``: how a healthy program ends is compared with a run without
    moediag."""
    copy, run = folder / "program", folder / "run"
    places = place(case, program, copy, checkouts)
    words = ("watch", "--patience", case.patience, *OPTIONS[2:]) if verb == "watch" else (verb,)
    ours = [sys.executable, "-c", MOEDIAG, *words, *options, "--out", str(run), "--"]
    ended = _run(
        [*ours, *program.command(python, case.arguments)], case, program, copy, run / "result.json"
    )
    said = (folder / "said.txt").read_text(errors="replace")
    about = {"code": ended.code, "seconds": ended.told, "took": ended.seconds, "places": places}
    try:
        trial: dict[str, Any] = json.loads((run / "result.json").read_text())["trials"][-1]
    except (OSError, ValueError, IndexError) as error:
        why = f"none after {ended.seconds:.0f} s" if ended.code is None else type(error).__name__
        return Answer(case.name, version, refused=why, page=said[-3000:], **about)
    changed = ""
    if case.truth.healthy:
        if compared:
            changed = _changed(case, program, python, folder, checkouts, ended, said)
        elif ended.code:
            changed = f"exit code {ended.code}"
    elif ended.left:
        changed = f"{ended.left} processes outlived the watcher"
    return Answer(
        case.name, version, trial["verdict"], tuple(trial["culprits"]), trial["cause"],
        page_of(said), changed=changed, **about,
    )  # fmt: skip


def _changed(
    case: Case, program: Program, python: str, folder: Path, checkouts: Path | None,
    ended: Ended, said: str,
) -> str:  # fmt: skip
    """Returns how the healthy program ended differently from the same without moediag. How it ends
    alone is kept in a file beside ``folder``: that does not depend on moediag."""
    path = folder.with_name(f"{folder.name}.bare.json")
    if not path.exists():
        alone, printed = bare(case, program, python, folder / "bare", checkouts)
        path.write_text(json.dumps([alone.code, alone.left, _numbers(program, printed)]))
    code, left, numbers = json.loads(path.read_text())
    ways = []
    if code != ended.code:
        ways.append(f"exit code {ended.code}, without moediag {code}")
    if _numbers(program, said) != numbers:
        ways.append("it printed other numbers")
    if ended.left > left:
        ways.append(f"{ended.left} processes outlived it, without moediag {left}")
    return "; ".join(ways)


def _numbers(program: Program, text: str) -> list[str]:
    pattern = program.prints or r"(?!)"
    return sorted(found.group() for found in re.finditer(pattern, text))


def bare(
    case: Case, program: Program, python: str, folder: Path, checkouts: Path | None
) -> tuple[Ended, str]:
    folder.mkdir()
    copy = folder / "program"
    place(case, program, copy, checkouts)
    ended = _run(program.command(python, case.arguments), case, program, copy, None)
    return ended, (folder / "said.txt").read_text(errors="replace")


def attached(
    case: Case, program: Program, python: str, folder: Path, checkouts: Path | None, version: str
) -> Answer:
    """Returns the answer of `moediag attach` on the case, started without moediag. A job with a
    fault is looked at when it stands still, a healthy one from its start; then again and again, and
    the first page that is not "clean" counts."""
    copy, began = folder / "program", time.time()
    places = place(case, program, copy, checkouts)
    pages: list[dict[str, Any]] = []
    with _started(program.command(python, case.arguments), case, program, copy) as (job, steps):
        while job.poll() is None and time.time() - began < program.bound:
            time.sleep(0.5)
            newest = _newest(steps)
            still = time.time() - newest > STANDS if newest else time.time() - began > NO_STEP
            if still or case.truth.healthy:
                before = time.monotonic()
                patience = () if case.truth.healthy else ATTACH
                if (page := _look(job.pid, emptied(folder / "run"), patience)) is not None:
                    pages.append(page | {"seconds": time.monotonic() - before})
            late = not case.truth.healthy and newest and time.time() - newest > NO_STEP
            if pages and (late or pages[-1]["verdict"] != "clean"):
                break
        ended = _ended(job, steps, began, None, program.bound) if case.truth.healthy else None
        code = job.poll()
    about = {"code": code, "took": time.time() - began, "places": places}
    if not pages or (ended is None and code is not None and pages[-1]["verdict"] == "clean"):
        why = f"none after {program.bound:.0f} s" if code is None else f"{ENDED} with {code}"
        return Answer(case.name, version, refused=why, **about)
    changed, trial = "", pages[-1]
    shown = _ours("report", str(folder / "run")).stdout
    if ended is not None:
        said = (folder / "said.txt").read_text(errors="replace")
        changed = _changed(case, program, python, folder, checkouts, ended, said)
    elif code is not None:
        changed = f"the job ended with {code} when it was looked at"
    return Answer(
        case.name, version, trial["verdict"], tuple(trial["culprits"]), trial["cause"],
        shown, seconds=trial["seconds"], changed=changed, **about,
    )  # fmt: skip


def _look(pid: int, run: Path, options: Sequence[str]) -> dict[str, Any] | None:
    """Returns the trial of `moediag attach`; None if the job had no ranks yet, or none any more."""
    done = _ours("attach", str(pid), *options, "--json", "--out", str(run))
    if done.returncode == 2:
        return None
    if not done.stdout:
        return {"verdict": "error", "culprits": (), "cause": done.stderr[-1500:]}
    trial: dict[str, Any] = json.loads(done.stdout)["trials"][-1]
    return None if trial["cause"].startswith(GONE) else trial


def _ours(*words: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"COLUMNS": "80", "NO_COLOR": "1"}
    return subprocess.run(
        [sys.executable, "-c", MOEDIAG, *words], check=False, capture_output=True, text=True,
        timeout=240, env=env,
    )  # fmt: skip


def _run(
    command: Sequence[str], case: Case, program: Program, copy: Path, page: Path | None
) -> Ended:
    began = time.time()
    with _started(command, case, program, copy) as (process, steps):
        return _ended(process, steps, began, page, program.bound)


@contextmanager
def _started(
    command: Sequence[str], case: Case, program: Program, copy: Path
) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """Yields the running case and the folder of its steps; ends what is left of it."""
    steps = copy.parent / "steps"
    steps.mkdir()
    log = (copy.parent / "said.txt").open("wb"), (copy.parent / "log.txt").open("wb")
    with launchers.environment(program.launcher) as more, log[0] as said, log[1] as errors:
        env = {**_environment(case, program, steps), **more}
        process = subprocess.Popen(
            list(command), cwd=copy, env=env, stdin=subprocess.DEVNULL, stdout=said, stderr=errors
        )
        try:
            yield process, steps
        finally:
            if process.poll() is None:
                _end(process)
            _left(str(steps))


def _ended(
    process: subprocess.Popen[bytes], steps: Path, began: float, page: Path | None, bound: float
) -> Ended:
    """Waits for the end of a case, for ``page``, or until none of them is expected any more."""
    shown = None
    while process.poll() is None and time.time() - began < bound:
        time.sleep(0.05)
        if shown is None and page is not None and page.exists():
            shown = page.stat().st_mtime
        stood = _newest(steps) or time.time()
        if shown is None and time.time() - stood > STILL:
            break
    code = process.poll()
    if shown is None and page is not None and page.exists():
        shown = page.stat().st_mtime
    took = time.time() - began
    if code is None:
        _end(process)
    newest = _newest(steps)
    told = shown - newest if shown is not None and newest is not None else None
    return Ended(code, took, told, _left(str(steps)))


def _newest(steps: Path) -> float | None:
    """Returns when a rank last made an optimizer step, None before the first."""
    return max((file.stat().st_mtime for file in steps.iterdir()), default=None)


def _environment(case: Case, program: Program, steps: Path) -> Mapping[str, str]:
    env = dict(os.environ, OMP_NUM_THREADS="1", NO_COLOR="1", COLUMNS="80", HF_HUB_OFFLINE="1")
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    more = dict(program.env)
    paths = [str(INSIDE), more.pop("PYTHONPATH", "")]
    env.update(more, PYTHONPATH=os.pathsep.join(filter(None, paths)), ABROAD_STEPS=str(steps))
    env["ABROAD_RANK"] = ",".join(map(str, case.truth.ranks))
    if case.signal:
        env["ABROAD_SIGNAL"] = case.signal
    return env


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kills the launcher and its descendants, parents first, so that none is restarted."""
    root = psutil.Process(process.pid)
    for one in (root, *root.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            one.kill()
    process.wait()


def _left(steps: str) -> int:
    """Kills the processes of the job that are still there; returns their number."""
    found = 0
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.environ().get("ABROAD_STEPS") == steps:
                if process.status() != psutil.STATUS_ZOMBIE:
                    found += 1
                    with (Path(steps).parent / "left.txt").open("a") as file:
                        print(process.ppid(), process.pid, *process.cmdline(), file=file)
                process.kill()
    return found


def page_of(said: str) -> str:
    """Returns the last page in the output of `moediag watch`."""
    rows = said.splitlines()
    starts = [at for at, row in enumerate(rows) if " · watched · " in row]
    return "\n".join(rows[starts[-1] :]) if starts else said[-3000:]


def emptied(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder
