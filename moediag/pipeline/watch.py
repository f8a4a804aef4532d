"""`moediag watch`: records and monitors an unmodified command, and reports when it stops.

It uses the same path as a trial: launch, evidence, diagnosis, result. But the program is the
user's: moediag leaves it unchanged unless asked, and it ends as it would without moediag.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import shlex
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import field
from datetime import datetime, timezone
from pathlib import Path
from types import FrameType

import moediag
from moediag import arguments, hardware, protocol
from moediag.diagnosis import LAW_NAMES
from moediag.errors import EvidenceError, ExitCode, Interrupted, UsageError
from moediag.evidence.launch_record import LaunchRecord
from moediag.evidence.model import Evidence
from moediag.evidence.nodes import read_nodes
from moediag.evidence.trial_folder import read_trial
from moediag.launch import shutdown, signals, watched
from moediag.launch.base import Running
from moediag.launch.follow.watched_job import JobSupervisor, Then
from moediag.launch.nodes.declared import NEVER_CAME, declared
from moediag.launch.nodes.usable import unusable
from moediag.launch.processes import Process
from moediag.launch.settings import LaunchOptions, OnProgress, Progress
from moediag.masking import Redaction, masked_command
from moediag.pipeline.attempts import Attempts
from moediag.pipeline.examine import result_of
from moediag.pipeline.hang_command import HangCommand
from moediag.pipeline.live_laws import LiveLaws
from moediag.pipeline.run_folder import run_folder
from moediag.pipeline.single_command import verify_command
from moediag.protocol import Trial, WatchTask, read_json
from moediag.records import dataclass
from moediag.result import (
    FAILURES,
    Conclusion,
    RunResult,
    Seconds,
    TrialResult,
    Verdict,
    read_result,
    wording,
)

REPORT, ABORT, CONTINUE = "report", "abort", "continue"
JOB_FILE = "job.json"
# How a job that hung ended; launch.json keeps what was seen during the hang.
END_FILE = "launch-end.json"
_READS = 3  # of evidence, where a network file system may report a stale handle
_LAUNCHERS = frozenset(
    ("torchrun", "accelerate", "deepspeed", "srun", "mpirun", "env", "python", "python3", "uv")
)


@dataclass(frozen=True, slots=True)
class WatchOptions:
    """The options of a watched job."""

    on_hang: str = REPORT  # report, abort, continue, or a shell command
    out: Path | None = None  # the run directory, which must be new or empty
    shared: Path | None = None  # a folder that the watchers of all nodes of the job can reach
    job: watched.JobOptions = field(default_factory=watched.JobOptions)
    launch: LaunchOptions = field(default_factory=lambda: LaunchOptions(poll=0.2))
    stdout: int | None = None  # the job's file descriptor; default: moediag's own
    stderr: int | None = None  # the job's file descriptor; default: moediag's own
    redact: bool = False  # replace names of hosts, users and folders when the job has ended


@dataclass(frozen=True, slots=True)
class Watched:
    """A finished job."""

    result: RunResult
    """One trial per attempt."""
    folder: Path
    code: int
    """The job's exit code; negative: a signal."""
    commands: tuple[str, ...] = ()
    """How each run of the ``--on-hang`` command ended."""
    lost: str = ""
    """Why evidence is missing, if it could not be written while the job ran."""

    @property
    def exit_code(self) -> int:
        """Returns the exit code of the last attempt: a failure that the job's launcher recovered
        from by a restart does not count."""
        last = self.result.trials[-1]
        if last.verdict in FAILURES:
            return ExitCode.FAILURE_FOUND
        if self.code == 0:
            return ExitCode.OK
        return ExitCode.INCONCLUSIVE

    def exit_code_if(self, strict: bool) -> int:
        """Returns the exit code; ``strict``: what is suspicious is a failure, too."""
        if strict and self.result.trials[-1].diagnosis.suspicious:
            return ExitCode.FAILURE_FOUND
        return self.exit_code


def check_allowed(given: Sequence[str]) -> tuple[str, ...]:
    """Returns ``given``. Raises UsageError for one that names no law."""
    for text in given:
        arguments.law(f"--allow {text}", text, LAW_NAMES)
    return tuple(given)


def check_on_hang(choice: str) -> None:
    """Raises UsageError if ``choice`` is neither a known word nor a command: it would be found out
    only when the job hangs."""
    word = choice.split()[0] if choice.split() else ""
    known = (REPORT, ABORT, CONTINUE)
    if choice in known:
        return
    if not word:
        raise UsageError("--on-hang is empty", f"Give {', '.join(known)} or a shell command.")
    near = difflib.get_close_matches(choice, known, n=1)
    if near and shutil.which(word) is None:
        raise UsageError(
            f"--on-hang {choice}: there is no such command",
            f"Did you mean --on-hang {near[0]}? Known words: {', '.join(known)}.",
        )


def no_folder(shared: Path | None) -> str:
    """Why the nodes cannot meet in ``shared``, and where they meet instead; "" if they can."""
    why = unusable(shared) if shared is not None else ""
    store = "the nodes meet through the job's store instead"
    return f"--shared {shared}: {why}; {store}" if why else ""


OnResult = Callable[[TrialResult, Path], None]  # and the run directory


def watch(
    command: Sequence[str],
    options: WatchOptions,
    on_result: OnResult,
    on_progress: OnProgress | None = None,
    on_law: Callable[[str], None] | None = None,
) -> Watched:
    """Runs ``command`` until it ends. Calls ``on_result`` for every failure as soon as it is
    diagnosed, and at the end of each attempt; ``on_law`` once, when a running job broke a law.

    Raises UsageError if there is no such command, and Interrupted on Ctrl-C after the job was ended
    and the evidence written.
    """
    name = title(command)
    folder = run_folder(options.out, f"watch-{name}")
    protocol.write_json(
        folder / JOB_FILE, {"command": masked_command(command), "folder": str(Path.cwd())}
    )
    job = _Watch(command, name, folder, options, on_result, on_progress)
    if on_law is not None and options.job.laws_every is not None:
        job.laws = LiveLaws(on_law)
    try:
        done = job.run()
    finally:
        left = _redacted(folder) if options.redact else []
    if not options.redact:
        return done
    told = [f"{path}: no text, so no name in it was replaced" for path in left]
    return dataclasses.replace(done, result=read_result(folder), commands=(*done.commands, *told))


def _redacted(folder: Path) -> list[Path]:
    """Replaces names in the files of the run; returns those that are no text."""
    attempts = [path for path in folder.glob("attempt-*") if path.is_dir()]
    hosts = [node.host for path in attempts for node in read_nodes(path)[0]]
    return Redaction.of_machine(hosts).folder(folder)


def title(command: Sequence[str]) -> str:
    """Returns a short name of the job: its script, else its command."""
    for word in command:
        if word.endswith(".py"):
            return Path(word).name
    named = (Path(w).name for w in command if not w.startswith("-") and "=" not in w)
    names = list(named)
    return next((n for n in names if n not in _LAUNCHERS and not n.isdigit()), names[0])


class _Watch:
    def __init__(
        self,
        command: Sequence[str],
        name: str,
        folder: Path,
        options: WatchOptions,
        on_result: OnResult,
        on_progress: OnProgress | None,
    ) -> None:
        self.command = command
        self.name = name
        self.folder = folder
        self.options = options
        self.started = datetime.now(timezone.utc)
        self.on_result = on_result
        self.on_progress = on_progress
        self.laws: LiveLaws | None = None
        self.attempts = Attempts(folder)
        self.told: TrialResult | None = None  # of the current attempt
        self.held_back = False  # ``told`` is shown once the job's own last words are
        self.commands: list[HangCommand] = []
        self.lost = ""

    def run(self) -> Watched:
        self._new_attempt(0)  # a full disk is found before the job begins
        with signals.held() as came:
            running = watched.start(
                self.command, self.folder, self.options.job, self.options.stdout,
                self.options.stderr,
            )  # fmt: skip
        interrupted = True
        try:
            if came:
                raise KeyboardInterrupt
            with passed_on(Process.of(running.root)):
                record = self._attempts(running)
            interrupted = record.interrupted
        except BaseException:  # nobody follows the job then, so it must not go on
            with signals.held() as further:
                graces = shutdown.of_job(self.options.launch.end, came, hangs=False)
                shutdown.end(running.family, graces, further)
            raise
        finally:
            said = self._commands_ended(wait=not interrupted)
        result = self._write(record)
        if record.interrupted:
            raise Interrupted(
                f"interrupted; the job was ended, evidence is in {self.folder}",
                f"`moediag diagnose {self.folder}` tells what it shows.",
            )
        return Watched(result, self.folder, running.poll() or 0, said, self.lost)

    def _attempts(self, running: Running) -> LaunchRecord:
        attempt = 0
        while True:
            folder = self.folder / protocol.attempt_folder(attempt)
            self._keep(lambda number=attempt: self._new_attempt(number))  # type: ignore[misc]
            self.told = None
            supervisor = JobSupervisor(
                running,
                self.folder,
                attempt,
                self.options.launch,
                lambda progress, folder=folder: self._progress(progress, folder),  # type: ignore[misc]
                lambda record, stands, folder=folder: self._trouble(  # type: ignore[misc]
                    record, folder, running, stands
                ),
                self.options.shared,
            )
            supervisor.declared = declared(self.command, os.environ)
            try:
                record = supervisor.run("watch")
                self._finish(record, folder, attempt)
            finally:
                supervisor.nodes.close()
            if not supervisor.again:
                return record
            self._write(record)
            attempt += 1

    def _new_attempt(self, attempt: int) -> None:
        folder = self.folder / protocol.attempt_folder(attempt)
        folder.mkdir(parents=True, exist_ok=True)
        self._trial(folder).write(folder)  # readable even if moediag is killed

    def _keep(self, write: Callable[[], object]) -> None:
        """Writes evidence of a job that has begun. A disk that is full or fails must not decide how
        the job ends."""
        try:
            write()
        except OSError as error:
            self.lost = str(error)

    def _progress(self, progress: Progress, folder: Path) -> None:
        if self.laws is not None:
            with suppress(OSError):
                self.laws.look(folder)
        if self.on_progress is not None:
            self.on_progress(progress)

    def _trouble(
        self, record: LaunchRecord, folder: Path, running: Running, stands: Callable[[], bool]
    ) -> Then:
        """Handles a rank that hangs or died, or an interruption, while the job still exists.
        ``stands``: whether a job that stopped making progress is still stopped; if not, nothing is
        reported or done."""
        found = self._diagnose(record, folder)
        choice = self.options.on_hang
        if found.verdict not in FAILURES and not record.interrupted:
            return Then.WATCH
        sure = record.stall is None or record.interrupted
        if not sure and not stands():
            return Then.WATCH
        self.told = found
        early = record.stall is not None and record.stall.early and not sure
        self.held_back = choice == ABORT and not record.interrupted and not early
        if not self.held_back:
            self.on_result(found, self.folder)
        self._write(record)
        if choice == CONTINUE and not record.interrupted:
            return Then.WATCH
        if early and choice != REPORT:
            return Then.AGAIN
        if not sure and not stands():
            self.held_back = False
            return Then.WATCH
        if choice == ABORT or record.interrupted:
            return Then.END
        if choice != REPORT:
            self._command(choice, found, running, folder)
        return Then.LEAVE

    def _finish(self, record: LaunchRecord, folder: Path, number: int) -> None:
        """Handles the end of an attempt. An earlier result stays unless the job continued."""
        told = self.told
        went_on = told is not None and told.verdict == "hang" and record.stall is None
        if told is None or went_on:
            found = self._diagnose(record, folder)
            if not record.interrupted or self.told is None:
                self.on_result(found, self.folder)
        else:
            end = dataclasses.asdict(record)
            self._keep(lambda: protocol.write_json(folder / END_FILE, end))
            found = told
            if self.held_back:
                self.on_result(told, self.folder)
        self._keep(lambda: self.attempts.add(number, found, record))
        self.held_back = False
        self.told = None

    def _diagnose(self, record: LaunchRecord, folder: Path) -> TrialResult:
        trial = self._trial(folder)
        self._keep(lambda: record.write(folder))
        self._keep(lambda: trial.write(folder))
        evidence = self._read(folder)
        if not any(NEVER_CAME in text for text in evidence.not_seen):
            lost = (*evidence.not_seen, *self._not_recorded(evidence.ranks))
            evidence = dataclasses.replace(evidence, not_seen=lost)
        found = result_of(trial, evidence, folder.name)
        step = found.diagnosis.next_step or self._compare(found, evidence)
        return dataclasses.replace(
            found.diagnosed(notes=(*record.notes, *found.notes), next_step=step),
            seconds=Seconds(
                launch=record.until_progress,
                stall_to_verdict=record.since_stall(),
                total=round(record.ended - record.started, 3),
            ),
        )

    def _compare(self, found: TrialResult, evidence: Evidence) -> str:
        """What shows whether numbers are right that no law has checked or that are suspicious; ""
        for others, and on several nodes, where it cannot run."""
        doubtful = wording.UNCHECKED in found.cause or found.diagnosis.suspicious
        if found.verdict != Verdict.CLEAN or not doubtful:
            return ""
        if found.world_size < 2 or len(evidence.nodes) > 1:
            return ""
        return f"Compare the first steps with one process: {verify_command(self.command)}"

    def _read(self, folder: Path) -> Evidence:
        """Reads what the ranks left; again if the file system fails in the middle."""
        error: Exception | None = None
        for _ in range(_READS):
            try:
                return read_trial(folder)
            except (OSError, EvidenceError) as failed:
                error = failed
        self.lost = str(error)
        return Evidence(0, {}, watched=True, not_seen=(f"all evidence ({error})",))

    def _trial(self, folder: Path) -> Trial:
        """Returns the trial of a job of unknown size, as its ranks describe it."""
        size = 0
        for path in folder.glob("rank-*.pid"):
            with suppress(OSError, ValueError):
                size = max(size, read_json(path).get("world_size") or 0)
        size = size or len(list(folder.glob("rank-*.pid")))
        variant = "watched" if folder.name == protocol.attempt_folder(0) else folder.name
        return Trial(
            name=folder.name, scenario=self.name, variant=variant, task=WatchTask(),
            world_size=size, backend="", launcher="",
        )  # fmt: skip

    def _not_recorded(self, ranks: object) -> Iterator[str]:
        with suppress(OSError):
            text = (self.folder / protocol.NOT_RECORDED_FILE).read_text("utf-8", "replace")
            yield from text.splitlines()[:20]
        if not ranks:
            alone = "a program of one process is recorded with --laws"
            if self.options.job.laws_every is not None:
                alone = "a program of one process is recorded once it makes an optimizer of torch"
            yield (
                "no process of this job called init_process_group under a Python that reads "
                "PYTHONPATH (python -I or -E, a container, or an environment that is not passed "
                f"on); {alone}"
            )

    def _command(self, command: str, found: TrialResult, running: Running, folder: Path) -> None:
        env = dict(
            os.environ,
            MOEDIAG_RUN=str(self.folder),
            MOEDIAG_VERDICT=found.verdict,
            MOEDIAG_CULPRITS=",".join(map(str, found.culprits)),
            MOEDIAG_CAUSE=found.cause,
            MOEDIAG_JOB_PID=str(running.root),
        )
        self._keep(lambda: self.commands.append(HangCommand(command, env, folder)))

    def _commands_ended(self, wait: bool) -> tuple[str, ...]:
        """Records how each command ended, in the result of its attempt."""
        said = []
        for command in self.commands:
            said.append(command.finish(wait))
            self.attempts.results = [
                found.diagnosed(notes=(*found.notes, said[-1]))
                if found.evidence == command.folder.name
                else found
                for found in self.attempts.results
            ]
        return tuple(said)

    def _write(self, record: LaunchRecord) -> RunResult:
        told = [self.told] if self.told is not None else []
        result = of_job(self.name, (*self.attempts.results, *told), self.started)
        result = dataclasses.replace(
            result,
            overrides=(f"watch -- {shlex.join(masked_command(self.command))}",),
            incomplete="interrupted" if record.interrupted else "",
            removed=self.attempts.removed,
        )
        self._keep(lambda: result.write(self.folder))
        return result


def of_job(name: str, trials: Sequence[TrialResult], started: datetime | None = None) -> RunResult:
    """Returns the result of a job called ``name`` with these attempts."""
    return RunResult(
        scenario=name,
        started=(started or datetime.now(timezone.utc)).isoformat(timespec="seconds"),
        moediag_version=moediag.__version__,
        machine=hardware.machine(),
        trials=tuple(trials),
        conclusion=Conclusion(reproduced=None),
    )


def tells(found: TrialResult, folder: Path) -> bool:
    """Whether this watcher sends a message about ``found``, a failure: of several nodes, the first
    that is alive does."""
    nodes, _ = read_nodes(folder / found.evidence)
    others = [one.ranks[:1] for one in nodes[1:] if one.silent is None and one.seen and one.ranks]
    own = nodes[0].ranks[:1] if nodes else ()
    return found.verdict in FAILURES and all(own and own < other for other in others)


@contextmanager
def passed_on(job: Process) -> Iterator[None]:
    """Forwards signals that are meant for the job, for the duration of the context."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def send(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        job.send(number)

    previous = [(sig, signal.signal(sig, send)) for sig in watched.PASSED_ON]
    try:
        yield
    finally:
        for sig, handler in previous:
            signal.signal(sig, handler)
