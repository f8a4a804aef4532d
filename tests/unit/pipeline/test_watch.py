"""`moediag watch` without a job: names, exit codes, unreported ends, the display."""

from __future__ import annotations

import dataclasses
import errno
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from moediag import protocol
from moediag.cli import app
from moediag.diagnosis.end_states.whereabouts import whereabouts
from moediag.errors import ExitCode, UsageError
from moediag.evidence.launch_record import LaunchRecord
from moediag.evidence.model import (
    UNTOLD,
    Evidence,
    ExitStatus,
    Frame,
    Node,
    RankEvidence,
    Stack,
    Stall,
)
from moediag.launch.capture.token_counts import last_loads
from moediag.launch.follow.watched_job import JobSupervisor, Then
from moediag.launch.processes import NEVER, Family, Process, oom_kills
from moediag.launch.rank_sample import RankSample
from moediag.launch.settings import LaunchOptions, Progress
from moediag.launch.watched import WatchedJob
from moediag.pipeline import watch
from moediag.report import terminal, watch_display
from moediag.report.text_layout import plain
from moediag.result import RunResult, TrialResult, Verdict
from tests.unit.trial_results import changed, trial_result


def trial(verdict: str, size: int = 2) -> TrialResult:
    return trial_result("watched", verdict=verdict, launcher="", world_size=size, expected="")


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("torchrun --nproc-per-node 8 train.py --lr 1", "train.py"),
        ("python -m my.train", "my.train"),
        ("accelerate launch scripts/sft.py", "sft.py"),
        ("srun -n 8 ./train.sh", "train.sh"),
        ("torchrun", "torchrun"),
    ],
)
def test_job_name_comes_from_the_command(command: str, name: str) -> None:
    assert watch.title(command.split()) == name


@pytest.mark.parametrize(
    ("choice", "refused"),
    [
        ("abort", False), ("report", False), ("continue", False), ("echo hung | mail me", False),
        ("./notify.sh abort", False), ("abrt", True), ("Abort", True), ("contine", True),
        (" ", True),
    ],
)  # fmt: skip
def test_a_mistyped_word_of_on_hang_is_refused_before_the_start(choice: str, refused: bool) -> None:
    with pytest.raises(UsageError) if refused else nullcontext():
        watch.check_on_hang(choice)


@pytest.mark.parametrize(
    ("verdicts", "code", "expected"),
    [
        ([Verdict.CLEAN], 0, 0),
        ([Verdict.HANG], 0, 1),
        ([Verdict.CRASH], 7, 1),
        ([Verdict.INCONCLUSIVE], 7, 3),
        ([Verdict.INCONCLUSIVE], 0, 0),  # the job reports success, and nothing contradicts it
        ([Verdict.CRASH, Verdict.CLEAN], 0, 0),  # its launcher restarted it
        ([Verdict.CLEAN, Verdict.CRASH], 1, 1),
    ],
)
def test_exit_codes(verdicts: Sequence[str], code: int, expected: int) -> None:
    result = watch.of_job("train.py", [trial(v) for v in verdicts])
    assert watch.Watched(result, Path(), code).exit_code == expected


def test_options_of_the_job_are_not_parsed() -> None:
    given = ["watch", "--debug", "--", "train.py", "--debug", "-h"]
    assert app._without_debug(given) == (["watch", "--", "train.py", "--debug", "-h"], True)
    assert app._without_debug(["run", "x", "--debug"]) == (["run", "x"], True)
    assert app._without_debug(["watch", "--", "x", "--debug"])[1] is False


@pytest.mark.parametrize(
    ("changes", "nodes", "told"),
    [
        ({"cause": "No hang; numbers were not checked."}, 1, True),
        ({"cause": "No hang; no law was broken.", "suspicious": ("a.weight differs",)}, 1, True),
        ({"cause": "No hang; no law was broken in 3 checked steps."}, 1, False),
        ({"cause": "numbers were not checked", "verdict": "inconclusive"}, 1, False),
        ({"cause": "numbers were not checked"}, 2, False),
        ({"cause": "numbers were not checked", "world_size": 1}, 1, False),
    ],
)  # fmt: skip
def test_numbers_that_are_doubtful_are_to_be_compared(
    changes: dict[str, Any], nodes: int, told: bool, tmp_path: Path
) -> None:
    command = ["torchrun", "--nproc-per-node", "2", "t.py", "--token", "hush"]
    job = watch._Watch(command, "t.py", tmp_path, watch.WatchOptions(), lambda *_: None, None)
    evidence = Evidence(2, {}, nodes=tuple(Node(f"node {i}", "host", (i,)) for i in range(nodes)))
    said = job._compare(changed(trial("clean"), **changes), evidence)
    assert said.endswith(f"moediag verify -- {' '.join(command[:-1])} '***'") == told
    assert bool(said) == told


class Told:
    """A watched job whose diagnoses are given, and the pages that a user saw."""

    def __init__(self, folder: Path, verdict: str, on_hang: str) -> None:
        options = watch.WatchOptions(on_hang=on_hang)
        self.pages: list[str] = []
        self.job = watch._Watch(
            ["train.py"], "train.py", folder, options,
            lambda found, _: self.pages.append(found.verdict), None,
        )  # fmt: skip
        self.job._diagnose = lambda record, folder: trial(verdict)  # type: ignore[method-assign]

    def trouble(
        self, stands: Callable[[], bool] = lambda: True, early: bool = False, **fields: bool
    ) -> Then:
        stall = Stall(0.5, 3.0, (0,), (1,), early=early)
        record = LaunchRecord(0.0, 1.0, stall=stall, **fields)  # type: ignore[arg-type]
        running = WatchedJob.__new__(WatchedJob)
        then = self.job._trouble(record, self.job.folder, running, stands)
        self.during = list(self.pages)
        self.job._finish(record, self.job.folder, 0)
        return then


@pytest.mark.parametrize(
    ("on_hang", "then", "during"), [("report", Then.LEAVE, ["hang"]), ("abort", Then.END, [])]
)
def test_the_page_of_an_aborted_job_follows_its_last_words(
    on_hang: str, then: Then, during: list[str], tmp_path: Path
) -> None:
    told = Told(tmp_path, "hang", on_hang)
    assert told.trouble() is then
    assert (told.during, told.pages) == (during, ["hang"])


@pytest.mark.parametrize(
    ("on_hang", "then"),
    [
        ("report", Then.LEAVE), ("continue", Then.WATCH), ("abort", Then.AGAIN),
        ("false", Then.AGAIN),
    ],
)  # fmt: skip
def test_an_early_stall_is_told_and_nothing_is_done(
    on_hang: str, then: Then, tmp_path: Path
) -> None:
    told = Told(tmp_path, "hang", on_hang)
    assert told.trouble(early=True) is then
    assert told.during == ["hang"] and told.job.commands == []


@pytest.mark.parametrize("on_hang", ["report", "abort", "continue", "false"])
def test_a_job_that_moves_while_it_is_diagnosed_is_neither_reported_nor_ended(
    on_hang: str, tmp_path: Path
) -> None:
    told = Told(tmp_path, "hang", on_hang)
    assert told.trouble(lambda: False) is Then.WATCH
    assert told.during == [] and told.job.commands == []


@pytest.mark.parametrize("on_hang", ["abort", "false"])
def test_a_job_that_moves_after_its_page_is_not_ended(on_hang: str, tmp_path: Path) -> None:
    told = Told(tmp_path, "hang", on_hang)
    answers = iter((True, False))
    assert told.trouble(lambda: next(answers)) is Then.WATCH
    assert told.job.commands == []


def test_an_interruption_ends_a_job_that_moves_again(tmp_path: Path) -> None:
    assert Told(tmp_path, "hang", "report").trouble(lambda: False, interrupted=True) is Then.END


@pytest.mark.parametrize("on_hang", ["report", "abort", "continue"])
def test_the_page_of_an_interrupted_job_comes_before_its_end(on_hang: str, tmp_path: Path) -> None:
    told = Told(tmp_path, "inconclusive", on_hang)
    assert told.trouble(interrupted=True) is Then.END
    assert (told.during, told.pages) == (["inconclusive"], ["inconclusive"])


class Ended:
    """A supervisor of a job whose only rank is gone."""

    def __init__(self, folder: Path) -> None:
        self.process = subprocess.Popen(["true"])
        self.process.wait()
        running = WatchedJob.__new__(WatchedJob)
        running.root, running.family = os.getpid(), Family(self.process.pid, "none")
        self.folder = folder / protocol.attempt_folder(0)
        self.folder.mkdir()
        self.job = JobSupervisor(
            running, folder, 0, LaunchOptions(), None, lambda *_: Then.LEAVE
        )  # fmt: skip
        self.job.seen.processes[0] = Process(self.process.pid, NEVER)

    def status(self, state: str = "running", progress: int = 5) -> ExitStatus | None:
        self.job._note_ends([RankSample(0, alive=False, state=state, progress=progress)])
        return self.job.seen.exits.get(0)


@pytest.fixture
def ended(tmp_path: Path) -> Ended:
    return Ended(tmp_path)


@pytest.fixture
def other(ended: Ended) -> Iterator[subprocess.Popen[bytes]]:
    """A process with the pid that the ended rank recorded."""
    process = subprocess.Popen(["sleep", "60"])
    me = {"pid": process.pid, "started": Process.of(process.pid).started - 1}
    me |= {"host": socket.gethostname(), "time": time.time()}
    protocol.write_json(ended.folder / protocol.pid_file(0), me)
    ended.job.seen.processes.clear()
    yield process
    process.kill()
    process.wait()


def test_another_process_with_the_pid_of_a_rank_is_not_signalled(
    ended: Ended, other: subprocess.Popen[bytes]
) -> None:
    ended.job.ranks = [0]
    (sample,) = ended.job._look()
    assert sample.known and not sample.alive and sample.cpu == 0.0
    assert ended.job.seen.processes[0].pid == other.pid
    ended.job._clear()
    assert ended.job._blocked([0]) == [] and not ended.job._stacks([0], False)
    assert other.poll() is None and Process.of(other.pid).alive


def test_an_orphaned_rank_is_ended(ended: Ended, other: subprocess.Popen[bytes]) -> None:
    ended.job.seen.processes[0] = Process.of(other.pid)
    ended.job._clear()
    assert other.wait(10) == -signal.SIGTERM


def test_a_pid_without_a_start_time_identifies_no_process(
    ended: Ended, other: subprocess.Popen[bytes]
) -> None:
    me = {"pid": other.pid, "host": socket.gethostname(), "time": time.time()}
    protocol.write_json(ended.folder / protocol.pid_file(0), me)
    ended.job.ranks = [0]
    (sample,) = ended.job._look()
    assert not sample.alive
    ended.job._clear()
    assert other.poll() is None


def test_a_signal_is_passed_on_to_the_job_only(other: subprocess.Popen[bytes]) -> None:
    job = Process.of(other.pid)
    with watch.passed_on(Process(job.pid, job.started - 1)):
        os.kill(os.getpid(), signal.SIGUSR1)
    assert other.poll() is None
    with watch.passed_on(job):
        os.kill(os.getpid(), signal.SIGUSR1)
    assert other.wait(10) == -signal.SIGUSR1


def test_an_exception_is_the_end_of_a_rank(ended: Ended) -> None:
    (ended.folder / protocol.error_file(0)).touch()
    assert ended.status() == ExitStatus(code=1)


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("Fatal Python error: Segmentation fault\n", ExitStatus(signal="SIGSEGV")),
        ("Fatal Python error: Aborted\n", ExitStatus(signal="SIGABRT")),
        (
            "Current thread 0x1 (most recent call first):\n",
            ExitStatus(signal="SIGTERM", by_us=True),
        ),
    ],
)
def test_the_last_stacks_show_the_signal(ended: Ended, text: str, status: ExitStatus) -> None:
    (ended.folder / protocol.stacks_file(0)).write_text(text)
    assert ended.status() == status


BY_LAUNCHER = ExitStatus(signal="SIGTERM", by_us=True)


@pytest.mark.parametrize(("code", "status"), [(0, ExitStatus(code=0)), (1, BY_LAUNCHER)])
def test_a_rank_that_its_launcher_ended_is_well_if_the_launcher_is(
    ended: Ended, code: int, status: ExitStatus
) -> None:
    """Ray sends SIGTERM to workers that have reported their result."""
    ended.job.ranks, ended.job._root_code = [0], code
    ended.job.seen.exits[0] = BY_LAUNCHER
    ended.job._end()
    assert ended.job.seen.exits[0] == status


STALL = Stall(4.0, 60.0, (), (0,), early=True)


def test_a_stall_of_a_job_that_ended_well_is_a_note(ended: Ended) -> None:
    ended.job.ranks, ended.job._root_code, ended.job.seen.stall = [0], 0, STALL
    ended.job._end()
    assert ended.job.seen.stall is None
    (note,) = ended.job.seen.notes
    assert note.startswith("slow: rank 0 took ")


def test_a_stall_of_a_rank_that_outlives_its_launcher_stays(
    ended: Ended, other: subprocess.Popen[bytes]
) -> None:
    ended.job.ranks, ended.job._root_code, ended.job.seen.stall = [0], 0, STALL
    ended.job.seen.processes[0] = Process.of(other.pid)
    ended.job._end()
    assert other.wait(10) == -signal.SIGTERM
    assert ended.job.seen.stall == STALL


@pytest.mark.parametrize("early", [True, False])
def test_a_stall_that_was_told_early_is_told_again_once_it_is_not(
    ended: Ended, early: bool
) -> None:
    stall = dataclasses.replace(STALL, early=early)
    ended.job._again, ended.job._told_at = True, ()
    ended.job.patience.observe = lambda *_: stall  # type: ignore[method-assign]
    assert not ended.job._died(0.0, [])
    assert ended.job._stalled(0.0, []) == (None if early else stall)


def test_a_rank_that_ended_stands_no_longer(ended: Ended, other: subprocess.Popen[bytes]) -> None:
    """One that had ended before the others stood still does."""
    ended.job.ranks, ended.job.seen.stall = [0], STALL
    ended.job.seen.processes[0] = Process.of(other.pid)
    assert ended.job._stands()
    other.kill()
    other.wait()
    assert not ended.job._stands()
    ended.job._tell_trouble = lambda: True  # type: ignore[method-assign]
    assert ended.job._ends_after_stall(ended.job._look())


def test_a_rank_that_outlives_its_launcher_did_not_end_well(
    ended: Ended, other: subprocess.Popen[bytes]
) -> None:
    ended.job.ranks, ended.job._root_code = [0], 0
    ended.job.seen.processes[0] = Process.of(other.pid)
    ended.job.seen.exits[0] = BY_LAUNCHER
    ended.job._end()
    assert other.wait(10) == -signal.SIGTERM
    assert ended.job.seen.exits[0] == BY_LAUNCHER


def test_an_end_without_a_trace_may_be_normal(ended: Ended) -> None:
    assert ended.status() is None
    ended.job._root_code = 1  # until the job fails
    assert ended.status() == ExitStatus(signal=UNTOLD)


@pytest.mark.parametrize(
    ("told", "others", "expected"),
    [("-9", (), ExitStatus(signal="SIGKILL")), ("3", (), ExitStatus(code=3)),
     ("-15", ("-15",), ExitStatus(signal="SIGTERM")), ("-15", ("-9",), BY_LAUNCHER)],
)  # fmt: skip
def test_a_parent_tells_how_a_rank_ended(
    ended: Ended, told: str, others: tuple[str, ...], expected: ExitStatus
) -> None:
    ended.job._root_code = 1
    for pid, code in zip((ended.process.pid, 1), (told, *others), strict=False):
        (ended.folder / protocol.child_end_file(pid)).write_text(code)
    assert ended.status() == expected


def test_a_finished_rank_is_not_a_death(ended: Ended) -> None:
    ended.job._root_code = 1
    assert ended.status(state="finished") is None


def test_a_program_before_the_training_is_not_a_rank(ended: Ended) -> None:
    ended.job._root_code = 1
    assert ended.status(state="starting", progress=-1) is None


def test_the_report_of_an_elastic_agent_is_preferred(ended: Ended) -> None:
    ended.job._root_code, ended.job.agent = 1, 1
    (ended.folder / protocol.error_file(0)).touch()
    assert ended.status() is None


USER = Frame("/home/me/train.py", 12, "train")
LOADER = Frame("/v/site-packages/torch/utils/data/dataloader.py", 3, "__next__")


@pytest.mark.parametrize(
    ("state", "frames", "gil", "mute", "text"),
    [
        ("T", (USER,), False, True, "Rank 1 is stopped by a signal (SIGSTOP) at train.py:12 "
                                    "train."),
        ("T", (), False, True, "Rank 1 is stopped by a signal (SIGSTOP)."),
        ("S", (USER,), True, True, "Rank 1 holds the GIL in native code at train.py:12 train: no "
                                   "other thread of it can run."),
        ("S", (LOADER, USER), False, False, "Rank 1 waits for data at train.py:12 train."),
        ("R", (USER,), True, False, "Rank 1 computes at train.py:12 train."),
        ("S", (USER,), False, False, "Rank 1 is at train.py:12 train."),
        ("S", (LOADER.__class__("/v/site-packages/x.py", 1, "f"),), False, False, ""),
        ("S", (), False, False, ""),
    ],
)  # fmt: skip
def test_position_of_a_rank_is_shown(
    state: str, frames: tuple[Frame, ...], gil: bool, mute: bool, text: str
) -> None:
    stacks = (Stack("MainThread", "py-spy", frames, gil),) if frames else ()
    missed = ("rank 1: Flight Recorder (the rank did not answer)",) if mute else ()
    seen = RankEvidence(1, stacks=stacks, os_state=state)
    evidence = Evidence(2, {1: seen}, not_seen=missed)
    assert whereabouts(evidence, [1, 5]) == text


@pytest.mark.parametrize(("active", "what"), [(True, "computes"), (False, "is")])
def test_a_program_in_another_thread_computes_if_that_thread_runs(active: bool, what: str) -> None:
    """Ray trains outside the main thread, which sleeps."""
    main = Stack("MainThread", "py-spy", (Frame("/v/site-packages/ray/worker.py", 9, "run"),))
    train = Stack("Thread-2", "py-spy", (USER,), active=active)
    seen = RankEvidence(1, stacks=(main, train), os_state="S")
    assert whereabouts(Evidence(2, {1: seen}), [1]) == f"Rank 1 {what} at train.py:12 train."


def test_step_rates_and_the_slowest_rank_are_shown() -> None:
    pulse = watch_display.Pulse()
    for second in range(5):
        progress = Progress(
            "running", {0: "running", 1: "in-collective"}, {0: second, 1: 2 * second},
            float(second), {0: 10, 1: 14}, {}, {"moe": [6, 1, 1]},
        )  # fmt: skip
        views = pulse.ranks(progress, {0: 2_000_000_000, 1: 3_000_000_000})
    assert [(v.speed, v.behind) for v in views] == [(1.0, 4), (2.0, 0)]
    text = watch_display.summary(views, "running", watch_display.balance_of(progress))
    assert text == (
        "2 ranks at steps 4 to 8, 1 steps/s, behind: rank 0, 2.0 to 3.0 GB, "
        "busiest expert 2.2x the mean (moe), rank 0 running, rank 1 in-collective"
    )


def test_a_job_without_ranks_has_nothing_to_show() -> None:
    assert watch_display.summary([], "running") == "waiting for ranks"
    assert watch_display.summary([], "ending") == "ending: no rank runs"


def test_a_node_that_is_awaited_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    view = watch_display.View(10.0)
    for seconds in (1.0, 20.0, 22.0, 40.0):
        text = f"waiting for node 1 of 2 since {seconds:.0f} s" if seconds > 10 else ""
        view.progress(Progress("launching", {}, {}, seconds, awaited=text))
    assert capsys.readouterr().err.splitlines() == [
        f"moediag: waiting for node 1 of 2 since {seconds} s" for seconds in (20, 40)
    ]


def test_a_rank_that_may_be_slow_is_shown_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Not with the next line of the log, which may come after the wait."""
    view = watch_display.View(60.0)
    text = "rank 0 may be slow: others have waited for 30 s"
    for seconds, awaited in ((1.0, ""), (32.0, text), (33.0, text), (40.0, ""), (70.0, text)):
        view.progress(Progress("running", {0: "running"}, {0: 3}, seconds, awaited=awaited))
    assert capsys.readouterr().err.splitlines()[1:] == [f"moediag: {text}"] * 2


def test_latest_tokens_per_expert_are_summed_over_ranks(tmp_path: Path) -> None:
    for rank, counts in ((0, [4, 0]), (1, [1, 3])):
        lines = [
            '{"e":"tokens","layer":"moe","counts":[9,9]}',
            f'{{"e":"tokens","layer":"moe","counts":{counts}}}',
            '{"e":"tokens","lay',
        ]
        (tmp_path / protocol.events_file(rank)).write_text("\n".join(lines))
    assert last_loads(tmp_path, range(3)) == {"moe": [5, 3]}


def test_out_of_memory_kills_are_counted() -> None:
    count = oom_kills()
    assert count is None or count >= 0


def test_the_output_of_a_job_ends_with_the_answer() -> None:
    hung = changed(trial("hang"), culprits=(1,))
    of = watch.of_job

    def end(*trials: TrialResult) -> list[str]:
        return [plain(line) for line in terminal.closing(of("train.py", trials), 80, Path("run"))]

    assert end(trial("clean")) == ["moediag: evidence in run"]
    compare = changed(trial("clean"), next_step="Compare: moediag verify -- job")
    assert end(compare)[0] == " NEXT     Compare: moediag verify -- job"
    last = end(trial("crash"), hung)
    assert "hang" in last[0] and "CULPRIT  rank 1" in last[0] and len(last) <= 8
    assert last[-1] == " AGAIN    moediag report run"
    assert "CULPRIT" not in end(trial("hang"))[0]


# ------------------------------------------------------------------------ a full disk


@pytest.mark.parametrize(("code", "expected"), [(0, ExitCode.OK), (7, ExitCode.INCONCLUSIVE)])
def test_a_full_disk_does_not_decide_how_a_job_ends(
    code: int, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(LaunchRecord, "write", full)
    monkeypatch.setattr(RunResult, "write", full)
    command = [sys.executable, "-c", f"raise SystemExit({code})"]
    options = watch.WatchOptions(out=tmp_path / "run")
    done = watch.watch(command, options, lambda *_: None)
    assert (done.code, done.exit_code) == (code, expected)
    assert "No space left" in done.lost
    monkeypatch.undo()
    done = watch.watch(command, dataclasses.replace(options, out=tmp_path / "two"), lambda *_: None)
    assert (done.code, done.lost) == (code, "")


def test_a_file_system_that_fails_for_a_moment_does_not_end_a_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS: handles are stale, and closing a file may fail."""
    calls: dict[str, int] = {}

    def failing(where: Any, name: str, times: int) -> None:
        original = getattr(where, name)

        def fails(*words: Any, **named: Any) -> Any:
            calls[name] = calls.get(name, 0) + 1
            if calls[name] <= times:
                raise OSError(errno.ESTALE, "Stale file handle")
            return original(*words, **named)

        monkeypatch.setattr(where, name, fails)

    failing(JobSupervisor, "_look", 2)
    failing(JobSupervisor, "_note_ends", 1)
    failing(watch, "read_trial", watch._READS - 1)
    failing(LaunchRecord, "write", 2)
    command = [sys.executable, "-c", "raise SystemExit(7)"]
    options = watch.WatchOptions(out=tmp_path / "run")
    done = watch.watch(command, options, lambda *_: None)
    assert (done.code, done.exit_code) == (7, ExitCode.INCONCLUSIVE)
    assert "Stale" in done.lost
    assert calls["read_trial"] == watch._READS


def test_a_job_whose_evidence_cannot_be_read_ends_as_without_moediag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> Evidence:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(watch, "read_trial", fails)
    options = watch.WatchOptions(out=tmp_path / "run")
    done = watch.watch([sys.executable, "-c", ""], options, lambda *_: None)
    assert (done.code, done.exit_code) == (0, ExitCode.OK)
    assert any("all evidence" in text for text in done.result.trials[0].diagnosis.not_seen)


@pytest.mark.parametrize("at", ["start", "_new_attempt"])
def test_an_interruption_before_the_job_is_followed_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    begun: list[WatchedJob] = []
    start, new_attempt = watch.watched.start, watch._Watch._new_attempt

    def interrupted(*words: Any) -> WatchedJob:
        begun.append(start(*words))
        if at == "start":
            os.kill(os.getpid(), signal.SIGINT)
        return begun[0]

    def attempt(self: Any, number: int) -> Path:
        if begun and at == "_new_attempt":
            raise KeyboardInterrupt
        return new_attempt(self, number)

    monkeypatch.setattr(watch.watched, "start", interrupted)
    monkeypatch.setattr(watch._Watch, "_new_attempt", attempt)
    options = watch.WatchOptions(out=tmp_path / "out", stdout=subprocess.DEVNULL)
    with pytest.raises(KeyboardInterrupt):
        watch.watch(
            [sys.executable, "-c", "import signal; signal.pause()"], options, lambda *_: None
        )
    assert begun[0].poll() is not None
    assert not begun[0].family.alive()
