"""Which ends that a launcher tells explain a failure, and which only followed it."""

from __future__ import annotations

import pytest

from moediag.evidence import log_lines, log_reports
from moediag.evidence.console_output import tasks_are_ranks
from moediag.evidence.told_ends import exits, is_cause

MPIRUN = "mpirun noticed that process rank {} with PID 7 on node n1 exited on signal {} (Killed)."
SRUN = "srun: error: n{0}: task {0}: {1}"


def ends(*lines: str, others_failed: bool = False) -> dict[int, str | int | None]:
    reports = log_reports.read(log_lines.read("\n".join(lines)))
    return {r: e.signal or e.code for r, e in exits(reports, others_failed).items()}


@pytest.mark.parametrize(
    ("line", "end"),
    [
        (MPIRUN.format(3, 9), {3: "SIGKILL"}),
        (MPIRUN.format(3, 11), {3: "SIGSEGV"}),
        ("  Process name: [[27,1],6]\n  Exit code:    3", {6: 3}),
        (
            "MPI_ABORT was invoked on rank 7 in communicator MPI_COMM_WORLD\nwith errorcode 2.",
            {7: 2},
        ),
        ("MPI_ABORT was invoked on rank 7 in communicator A SPLIT\nwith errorcode 2.", {}),
        ("=   RANK 3 PID 7 RUNNING AT n1\n=   KILLED BY SIGNAL: 7 (Bus error)", {3: "SIGBUS"}),
        ("=   RANK 3 PID 7 RUNNING AT n1\n=   EXIT CODE: 4", {3: 4}),
        (SRUN.format(5, "Out Of Memory"), {5: "SIGKILL"}),
        (SRUN.format(5, "Segmentation fault (core dumped)"), {5: "SIGSEGV"}),
        (SRUN.format(5, "Exited with exit code 2"), {5: 2}),
        (SRUN.format(5, "Terminated"), {}),
        ("srun: error: n1: tasks 0-3: Killed", {}),
        ("[rank: 3] Child process with PID 7 terminated with code -9. Forcefully", {3: "SIGKILL"}),
        ("Child process with PID 7 terminated with code -9. Forcefully", {}),
        ("ERROR:composer.cli.launcher:Rank 2 crashed with exit code -7.", {2: "SIGBUS"}),
        ("Global rank 3 (PID 71) exited with code -9", {3: "SIGKILL"}),
        ("Global rank 3 (PID 71) exited with code -15", {}),  # as the launcher ends the others
        ("Rank 2 crashed with exit code -7.", {}),  # of whom it is not known
    ],
)
def test_an_end_that_a_launcher_tells(line: str, end: dict[int, str | int]) -> None:
    assert ends(line) == end


def test_the_strongest_end_counts() -> None:
    killed, died = SRUN.format(0, "Killed"), SRUN.format(2, "Bus error")
    assert ends(killed, died, SRUN.format(1, "Exited with exit code 1")) == {2: "SIGBUS"}
    assert ends(killed, SRUN.format(1, "Exited with exit code 1")) == {0: "SIGKILL"}
    assert ends(SRUN.format(0, "Killed"), SRUN.format(1, "Out Of Memory")) == {1: "SIGKILL"}


def test_several_plain_kills_show_nothing() -> None:
    assert ends(SRUN.format(0, "Killed"), SRUN.format(1, "Killed")) == {}
    assert ends(SRUN.format(0, "Aborted"), SRUN.format(1, "Aborted")).keys() == {0, 1}


def test_what_followed_an_exception_of_another_rank_is_no_failure() -> None:
    assert ends(SRUN.format(0, "Killed"), others_failed=True) == {}
    assert ends(SRUN.format(0, "Segmentation fault"), others_failed=True) == {0: "SIGSEGV"}


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("failed (exitcode: -9) local_rank: 2 (pid: 7)", True),
        ("failed (exitcode: -6) local_rank: 2 (pid: 7)", False),
        ("failed (exitcode: 1) local_rank: 2 (pid: 7)", False),
        ("process 1 terminated with signal SIGSEGV", True),
        ("process 1 terminated with signal SIGABRT", False),
        ("exits with return code = -11", True),
        ("srun: error: n1: tasks 0-3: Terminated", False),
    ],
)
def test_an_abort_or_an_exit_code_is_no_cause_of_a_wait(text: str, cause: bool) -> None:
    assert is_cause(text) is cause


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("0: step\n1: step\n", True),
        ("0: [rank0]: a\n1: [rank1]: b\n", True),
        ("0: [rank3]: a\n1: [rank9]: b\n", False),
        ("[1,2]<stderr>: [rank9]: b\n", False),
        ("File torch/distributed/elastic/agent.py\nsrun: error: n1: task 1: Killed\n", False),
    ],
)
def test_tasks_are_ranks_unless_the_log_contradicts_it(text: str, same: bool) -> None:
    assert tasks_are_ranks(text) is same
