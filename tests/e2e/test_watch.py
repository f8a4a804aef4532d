"""`moediag watch` on real jobs; the expected answers are in tests/victims."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moediag.launch.processes import Process
from moediag.protocol import Heartbeat
from tests.e2e.launchers import PLAIN, TORCHRUN
from tests.victims.table import JOBS, VICTIMS, WAITS, Trainer, Victim, marked

pytestmark = pytest.mark.e2e

# One that dies. `make wide` runs the others. Below are tests of one that hangs (`skips`), of one
# that is only late (`comes_late`) and of one that waits in a library; what the watchdog and the
# diagnosis say of every other kind is tested without ranks (launch/test_patience.py, diagnosis/).
DEFAULT = ("raises",)
SECRET = "Zq8vR2mK5xT7pL9wN4bD6hJ1"


def command_line(tmp_path: Path, options: tuple[str, ...], *command: str) -> dict[str, Any]:
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    line = [sys.executable, "-m", "moediag", "watch", *options, "--out", str(tmp_path / "run")]
    return {"args": [*line, "--", *command], "env": environment, "text": True}


def watch(
    tmp_path: Path, options: tuple[str, ...], *command: str
) -> subprocess.CompletedProcess[str]:
    line = command_line(tmp_path, options, *command)
    return subprocess.run(**line, timeout=180, check=False, capture_output=True)


def under(
    launcher: tuple[str, ...], tmp_path: Path, victim: Victim, *options: str
) -> tuple[int, dict[str, object]]:
    launcher = (*launcher, str(victim.ranks)) if victim.name != "ray" else (sys.executable,)
    # The other programs take no further arguments.
    more = ("--api-key", SECRET) if victim.command[0].endswith("victims/jobs.py") else ()
    done = watch(
        tmp_path, ("--json", *victim.options, *options),
        *launcher, *victim.command, *more,
    )  # fmt: skip
    assert done.stdout, done.stderr
    kept = [file for file in (tmp_path / "run").rglob("*") if file.is_file()]
    assert SECRET not in done.stdout
    assert [file for file in kept if SECRET.encode() in file.read_bytes()] == []
    return done.returncode, json.loads(done.stdout)["trials"][-1]


@pytest.mark.parametrize(
    "victim",
    [
        pytest.param(v, id=v.name, marks=() if v.name in DEFAULT else pytest.mark.wide)
        for v in VICTIMS
    ],
)
def test_every_victim_is_diagnosed_correctly(victim: Victim, tmp_path: Path) -> None:
    code, trial = under(TORCHRUN, tmp_path, victim, "--on-hang", "abort")
    assert trial["verdict"] in victim.verdicts, trial["cause"]
    assert trial["culprits"] == list(victim.culprits), trial["cause"]
    assert victim.names_the_line(str(trial["cause"])), trial["cause"]
    assert victim.says in str(trial["cause"])
    assert code == (0 if victim.healthy else 1)


@pytest.mark.wide
@pytest.mark.parametrize("victim", WAITS, ids=lambda v: f"{v.name}-{v.fault}")
def test_a_rank_that_waits_inside_a_library_is_a_victim(victim: Trainer, tmp_path: Path) -> None:
    """Plain DDP waits in C++: the innermost Python frame is autograd's."""
    if victim.name in ("accelerate", "lightning", "ray"):
        pytest.importorskip(victim.name, reason=f"{victim.name} is not installed")
    test_every_victim_is_diagnosed_correctly(victim, tmp_path)


def test_a_hang_is_diagnosed_and_its_command_writes_no_stdout(tmp_path: Path) -> None:
    (victim,) = [v for v in VICTIMS if v.name == "skips"]
    command = "echo not JSON, $MOEDIAG_VERDICT; kill $MOEDIAG_JOB_PID"
    code, trial = under(TORCHRUN, tmp_path, victim, "--on-hang", command)
    assert (code, trial["verdict"], trial["culprits"]) == (1, "hang", [1]), trial["cause"]
    assert victim.names_the_line(str(trial["cause"])), trial["cause"]
    assert "it is under `if job.rank != 1` at jobs.py:" in str(trial["next_step"])
    (written,) = json.loads((tmp_path / "run" / "result.json").read_text())["trials"]
    (note,) = [note for note in written["notes"] if "--on-hang" in note]
    assert "exit code 0 after" in note and written == trial
    assert (tmp_path / "run" / "attempt-0" / "on-hang.log").read_text() == "not JSON, hang\n"


def test_the_guard_raises_one_named_error_on_every_rank(tmp_path: Path) -> None:
    (victim,) = [v for v in VICTIMS if v.name == "starves"]
    code, trial = under(PLAIN, tmp_path, victim, "--guard")
    assert (code, trial["verdict"], trial["culprits"]) == (1, "crash", [1]), trial["cause"]
    assert "The guard stopped ranks 0, 1 before that reduction" in str(trial["cause"])
    assert victim.says in str(trial["cause"])


@pytest.fixture
def half_a_gigabyte(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A control group (Linux, version 1 or 2) with a memory limit that the kernel enforces."""
    one = Path("/sys/fs/cgroup/memory")
    group = (one if one.is_dir() else one.parent) / f"moediag-{os.getpid()}"
    limits = ("memory.limit_in_bytes",) if one.is_dir() else ("memory.max", "memory.swap.max")
    try:
        group.mkdir()
        for name in limits:
            (group / name).write_text("0" if "swap" in name else str(1 << 29))
    except OSError as error:
        pytest.skip(f"no control group with a memory limit can be made here: {error}")
    monkeypatch.setenv("VICTIM_CGROUP", str(group / "cgroup.procs"))
    yield
    group.rmdir()


@pytest.mark.wide
def test_a_rank_killed_for_memory_is_reported(tmp_path: Path, half_a_gigabyte: None) -> None:
    victim = Victim("oom_kill", ("crash",), (1,))
    code, trial = under(TORCHRUN, tmp_path, victim, "--on-hang", "abort")
    assert (code, trial["verdict"], trial["culprits"]) == (1, "crash", [1]), trial["cause"]
    assert "SIGKILL (out of memory: the kernel's OOM killer ran once" in str(trial["cause"])


@pytest.mark.wide
def test_a_killed_rank_is_the_culprit(tmp_path: Path) -> None:
    (victim,) = [v for v in VICTIMS if v.name == "killed"]
    _, trial = under(TORCHRUN, tmp_path, victim, "--on-hang", "abort")
    assert "killed from outside: the kernel's OOM killer did not run" in str(trial["cause"])


@pytest.mark.parametrize(
    ("name", "on_hang"),
    [
        pytest.param("pauses", "continue", marks=pytest.mark.wide),
        pytest.param("pauses", "report", marks=pytest.mark.wide),
        # Such a stall is early: the job is not ended.
        ("comes_late", "abort"),
        pytest.param("ends_late", "abort", marks=pytest.mark.wide),
    ],
)
def test_a_job_that_recovers_from_a_stall_has_two_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, on_hang: str
) -> None:
    """The page of the stall is followed by one of a clean job."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    monkeypatch.setenv("VICTIM_FIFO", str(fifo))
    options = ("--json", "--on-hang", on_hang, "--patience", "1")
    line = command_line(tmp_path, options, *PLAIN, "2", str(JOBS), name)
    job = subprocess.Popen(**line, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        told = wait_for(tmp_path / "run" / "result.json")
        with fifo.open("w") as go:
            go.write("go")
        output, _ = job.communicate(timeout=120)
    finally:
        job.kill()
    (then,) = told["trials"]
    assert (then["verdict"], then["culprits"]) == ("hang", [1]), then["cause"]
    (trial,) = json.loads(output)["trials"]
    assert (job.returncode, trial["verdict"], trial["culprits"]) == (0, "clean", [])
    assert any("went on" in note for note in trial["notes"]), trial["notes"]
    assert all(f"{line} " in then["cause"] for line in marked(name)), then["cause"]


@pytest.mark.parametrize(
    "name",
    [
        "evaluates",
        pytest.param("tokenizes", marks=pytest.mark.wide),
        pytest.param("uploads", marks=pytest.mark.wide),
    ],
)
def test_a_rank_that_works_in_small_pieces_is_slow_not_hung(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """It works until moediag has said that others wait for it for longer than the patience."""
    end = tmp_path / "end"
    monkeypatch.setenv("VICTIM_END", str(end))
    options = ("--json", "--on-hang", "abort", "--patience", "5")
    line = command_line(tmp_path, options, *PLAIN, "2", str(JOBS), name)
    said = []
    with (
        (tmp_path / "answer").open("w") as answer,
        subprocess.Popen(**line, stdout=answer, stderr=subprocess.PIPE) as job,
    ):
        for text in job.stderr or ():
            said.append(text)
            if "rank 1 may be slow: others have waited" in text:
                end.touch()
    assert job.returncode == 0, said
    (trial,) = json.loads((tmp_path / "answer").read_text())["trials"]
    assert (trial["verdict"], trial["culprits"]) == ("clean", []), trial["cause"]
    assert end.exists(), said


def test_on_sigterm_the_page_comes_first_and_no_rank_is_left(tmp_path: Path) -> None:
    """As a scheduler ends a job, before a wait counts as a hang. Rank 1 is stopped by SIGSTOP."""
    (victim,) = [v for v in WAITS if (v.name, v.fault) == ("ddp_without_buffers", "stopped")]
    options = ("--quiescence", "600", "--patience", "600")
    line = command_line(tmp_path, options, *TORCHRUN, "2", *victim.command)
    job = subprocess.Popen(**line, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        attempt = tmp_path / "run" / "attempt-0"
        ranks = [wait_for(attempt / f"rank-{rank}.pid")["pid"] for rank in (0, 1)]
        for _ in range(600):
            beat = Heartbeat.read(attempt / "rank-0.heartbeat")
            if beat is not None and beat.state == "in-collective" and beat.step == 4:
                break
            time.sleep(0.1)
        job.send_signal(signal.SIGTERM)
        output, _ = job.communicate(timeout=120)
    finally:
        job.kill()
    assert job.returncode == 130
    said = " ".join(output.split())
    assert (
        "The run was interrupted before it ended. Rank 1 is stopped by a signal (SIGSTOP)" in said
    )
    assert not any(Process.of(pid).alive for pid in ranks)


_ASKED = """
import signal, sys
def told(number, _):
    print("got", signal.Signals(number).name, flush=True)
    if sys.argv[1] == "obeys":
        sys.exit(0)
for one in (signal.SIGINT, signal.SIGTERM):
    signal.signal(one, told)
print("ready", flush=True)
while True:
    signal.pause()
"""


@pytest.mark.parametrize(
    ("sig", "job", "told"),
    [
        (signal.SIGTERM, "obeys", ["SIGTERM"]),
        (signal.SIGINT, "obeys", ["SIGINT"]),
        (signal.SIGTERM, "refuses", ["SIGTERM"]),
        (signal.SIGINT, "refuses", ["SIGINT", "SIGTERM"]),
    ],
)
def test_a_job_gets_the_signal_of_its_watcher_and_is_killed_after_the_grace(
    tmp_path: Path, sig: signal.Signals, job: str, told: list[str]
) -> None:
    options = ("--grace", "600" if job == "obeys" else "2")
    line = command_line(tmp_path, options, sys.executable, "-c", _ASKED, job)
    process = subprocess.Popen(**line, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(sig)
        output, _ = process.communicate(timeout=120)
    finally:
        process.kill()
    # Python ends by SIGINT, 130 in a shell, if it came while a class was made by exec().
    assert process.returncode in (130, -sig)
    assert [one.split()[1] for one in output.splitlines() if one.startswith("got")] == told


def wait_for(path: Path) -> dict[str, Any]:
    """Waits for the JSON file and returns it; fails after a minute."""
    for _ in range(600):
        if path.exists():
            return dict(json.loads(path.read_text("utf-8")))
        time.sleep(0.1)
    raise AssertionError(f"{path} was not written within a minute")


def test_a_job_without_ranks_keeps_its_output_and_its_exit_code(tmp_path: Path) -> None:
    done = watch(tmp_path, (), sys.executable, "-c", "print('mine')")
    assert (done.returncode, done.stdout.splitlines()[0]) == (0, "mine")


def test_a_missing_command_is_an_error(tmp_path: Path) -> None:
    done = watch(tmp_path, (), "no-such-launcher")
    assert done.returncode == 2
    assert "there is no command 'no-such-launcher'" in done.stderr
    assert "Traceback" not in done.stderr
