"""Sends the probe to the machines of a job (srun, ssh or kubectl) and receives what it finds.

The package's own modules that the probe needs are sent as one zip file to Python there; its archive
comes back through stdout. Its files are in a temporary folder that it removes, and an alarm ends it
if nothing else does. Machines are asked in parallel up to a limit, each for a limited time.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO

import moediag
from moediag.errors import MachineError, UsageError
from moediag.masking import masked
from moediag.records import dataclass

AT_ONCE = 64  # machines
MOST_BYTES = 64 << 20  # of one machine's archive
BEYOND = 60.0  # seconds beyond the longest look until a machine counts as silent
_LISTING = 30.0  # seconds for squeue, kubectl get
_TELL = 10.0  # seconds between two lines of progress
_PERIOD = 0.05
_END = 5.0  # seconds between SIGTERM and SIGKILL
_PARTS = ("evidence", "launch", "protocol")
_FILES = ("__init__.py", "errors.py", "masking.py", "records.py")
# Runs there. Arguments: the size of the zip file, seconds, what is asked.
_START = """\
import signal, sys, tempfile
for one in (signal.SIGTERM, signal.SIGHUP, signal.SIGALRM):
    signal.signal(one, lambda *_: sys.exit("was ended"))
signal.alarm(int(sys.argv[2]))
with tempfile.TemporaryDirectory(prefix="moediag-") as folder:
    with open(folder + "/probe.zip", "wb") as file:
        file.write(sys.stdin.buffer.read(int(sys.argv[1])))
    sys.path.insert(0, folder + "/probe.zip")
    from moediag.launch.attach import remote_probe
    lost = remote_probe.main(folder, sys.argv[3])
sys.exit(lost or 0)
"""
_PYTHONS = "python3 python3.13 python3.12 python3.11 python3.10"
_IS_NEW = "import sys; sys.exit(sys.version_info < (3, 10))"


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine, or a pod."""

    name: str
    command: tuple[str, ...]
    """Runs a shell command there, which is appended."""
    joins: bool = False
    """The appended words are joined by blanks and read by a shell, as ssh does it."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a machine sent."""

    machine: str
    archive: Path | None
    lost: str = ""
    """Why there is no archive."""
    after: float = 0.0
    """Seconds between the first answer of any machine and this one."""


# ------------------------------------------------------------------------ which machines


def of_slurm(job: str) -> list[Machine]:
    """The nodes of a Slurm job. Raises UsageError if it does not run."""
    if not job.replace("_", "").isdecimal():
        raise UsageError(f"--slurm {job}: not the number of a job", "Find it: squeue --me")
    listed = _output(["squeue", "-h", "-j", job, "-t", "R", "-o", "%N"], f"--slurm {job}")
    names = ",".join(listed.split())
    if not names:
        raise UsageError(f"--slurm {job}: the job does not run", "See: squeue --me")
    nodes = _output(["scontrol", "show", "hostnames", names], f"--slurm {job}").split()
    step = ("srun", "--jobid", job, "--overlap", "--nodes=1", "--ntasks=1", "--quiet",
            "--mpi=none", "--job-name=moediag", "--chdir=/")  # fmt: skip
    return [Machine(one, (*step, f"--nodelist={one}", "sh", "-c")) for one in dict.fromkeys(nodes)]


def of_hosts(hosts: str) -> list[Machine]:
    """The machines in ``a,b,user@c``."""
    names = [name for part in hosts.split(",") if (name := part.strip())]
    if not names or any(name.startswith("-") or " " in name for name in names):
        raise UsageError(f"--hosts {hosts}: not a list of hosts", "Example: --hosts node1,node2")
    options = ("ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10")
    return [Machine(one, (*options, one), joins=True) for one in dict.fromkeys(names)]


def of_pods(selector: str) -> list[Machine]:
    """The pods of ``app=train``; what follows it is given to kubectl: ``app=train -n ml -c main``.
    Raises UsageError if there is none."""
    try:
        label, *more = shlex.split(selector)
    except ValueError as error:
        raise UsageError(
            f"--kubectl {selector!r}: not a selector", "Example: --kubectl app=train"
        ) from error
    container = [word for at, word in enumerate(more) if "-c" in (word, more[at - 1] if at else "")]
    common = [word for word in more if word not in container]
    form = 'jsonpath={range .items[*]}{.metadata.name}{"\\n"}{end}'
    command = ["kubectl", "get", "pods", "-l", label, *common]
    running = ["--field-selector=status.phase=Running", "-o", form]
    names = _output([*command, *running], f"--kubectl {selector}").split()
    if not names:
        raise UsageError(f"--kubectl {selector}: no running pod has these labels",
                         f"See: {shlex.join(command)}")  # fmt: skip
    step = ("kubectl", "exec", "-i", *common, *container)
    return [Machine(one, (*step, one, "--", "sh", "-c")) for one in names]


def _output(command: Sequence[str], asked: str) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_LISTING, check=False,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except FileNotFoundError as error:
        raise MachineError(
            f"{asked}: {command[0]} was not found", f"Run this where {command[0]} works."
        ) from error
    except subprocess.TimeoutExpired as error:
        raise MachineError(f"{asked}: {command[0]} did not answer in {_LISTING:.0f} s") from error
    if done.returncode != 0:
        raise UsageError(f"{asked}: {_last_line(done.stderr) or 'refused'}")
    return done.stdout


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1][:200]


# ------------------------------------------------------------------------ asking them


def payload(target: Path) -> None:
    """Writes the modules that the probe needs into a zip file."""
    root = Path(moediag.__file__).parent
    paths = [root / name for name in _FILES]
    paths += [path for part in _PARTS for path in sorted((root / part).rglob("*.py"))]
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in paths:
            archive.write(path, Path("moediag") / path.relative_to(root))


def ask(
    machines: Sequence[Machine], asked: Mapping[str, object], seconds: float, folder: Path,
    progress: Callable[[str], None],
) -> list[Answer]:  # fmt: skip
    """Runs the probe on each machine for at most ``seconds``; archives and errors are files in
    ``folder``."""
    probe = folder / "probe.zip"
    payload(probe)
    start = _command(probe.stat().st_size, asked, seconds)
    waiting, running, found = list(machines), dict[Machine, _Running](), list[Answer]()
    told, first = time.monotonic(), 0.0
    try:
        while waiting or running:
            while waiting and len(running) < AT_ONCE:
                one = waiting.pop(0)
                running[one] = _Running(one, start, probe, folder / str(len(found) + len(running)))
            for one, process in list(running.items()):
                answer = process.answer(seconds + 2 * _END)
                if answer is not None:
                    del running[one]
                    first = first or time.monotonic()
                    found.append(replace(answer, after=round(time.monotonic() - first, 1)))
            if running and time.monotonic() - told > _TELL:
                told = time.monotonic()
                names = [one.name for one in running]
                more = f" and {len(names) - 4} more" if len(names) > 4 else ""
                progress(f"{len(found)} of {len(machines)} machines have answered; waiting for "
                         f"{', '.join(names[:4])}{more}")  # fmt: skip
            time.sleep(_PERIOD)
    finally:
        for process in running.values():
            process.end()
    order = [one.name for one in machines]
    return sorted(found, key=lambda answer: order.index(answer.machine))


def _command(size: int, asked: Mapping[str, object], seconds: float) -> str:
    """A command for any shell. Python of the same path is preferred: py-spy may be beside it."""
    words = (str(size), str(int(seconds)), json.dumps(asked))
    pythons = f"{shlex.quote(sys.executable)} {_PYTHONS}"
    return (
        f"for p in {pythons}; do "
        f'if "$p" -c {shlex.quote(_IS_NEW)} >/dev/null 2>&1 </dev/null; then '
        f'exec "$p" -I -c {shlex.quote(_START)} {shlex.join(words)}; fi; done; '
        "echo 'no Python 3.10 or newer was found there' >&2; exit 1"
    )


class _Running:
    """The probe on one machine."""

    def __init__(self, machine: Machine, start: str, probe: Path, place: Path) -> None:
        self.machine = machine
        self.archive = place.with_suffix(".tgz")
        self.errors = place.with_suffix(".txt")
        self.begun = time.monotonic()
        word = f"exec sh -c {shlex.quote(start)}" if machine.joins else start
        with contextlib.ExitStack() as files:

            def opened(path: Path, mode: str) -> IO[bytes]:
                return files.enter_context(path.open(mode))

            self.process = subprocess.Popen(
                [*machine.command, word], stdin=opened(probe, "rb"),
                stdout=opened(self.archive, "wb"), stderr=opened(self.errors, "wb"),
                start_new_session=True,
            )  # fmt: skip

    def answer(self, seconds: float) -> Answer | None:
        """None as long as it runs; it is ended after ``seconds``, or if it sends too much."""
        name, code = self.machine.name, self.process.poll()
        if code is None:
            if time.monotonic() - self.begun > seconds:
                self.end()
                return Answer(name, None, f"did not answer in {seconds:.0f} s")
            if self.archive.stat().st_size > MOST_BYTES:
                self.end()
                return Answer(name, None, f"sent more than {MOST_BYTES >> 20} MiB")
            return None
        if code == 0 and self.archive.stat().st_size:
            return Answer(name, self.archive)
        said = _last_line(self.errors.read_bytes()[-4096:].decode("utf-8", "replace"))
        return Answer(name, None, masked(said) or f"exit code {code}")

    def end(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(_END)
                return
