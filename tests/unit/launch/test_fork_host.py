"""How the end of the fork launcher's host is understood; with a stand-in for the host."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from moediag.errors import LaunchError
from moediag.lab.launch.fork import Host
from moediag.launch.base import last_words
from moediag.launch.settings import LaunchOptions

READY = """import signal, sys; print('{"e": "ready"}', flush=True); signal.pause()"""


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    made = Host([sys.executable, "-c", READY], dict(os.environ), tmp_path / "log", LaunchOptions())
    made.wait_ready(60.0)
    yield made
    made.close()


def ended(host: Host, by: signal.Signals) -> None:
    os.kill(host.pid, by)
    while True:
        host.exit_code(1)
        time.sleep(0.01)


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_ends_moediag_too_is_an_interruption(host: Host, by: signal.Signals) -> None:
    with pytest.raises(KeyboardInterrupt):
        ended(host, by)
    with pytest.raises(KeyboardInterrupt):
        host.start({}, 1.0)


def test_another_end_is_a_launch_error_with_its_reason(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(LaunchError, match="ended by SIGKILL: "):
        ended(host, signal.SIGKILL)
    monkeypatch.setattr("moediag.lab.launch.fork.oom_kills", lambda: 1 << 40)
    with pytest.raises(LaunchError, match="ended by SIGKILL for memory"):
        host.start({}, 1.0)


@pytest.mark.parametrize(
    ("log", "said"),
    [
        ("import torch\nImportError: libtorch_cpu.so: failed to map segment from shared object\n",
         "not enough memory: `ulimit -v` shows the shell's limit (ImportError: libtorch_cpu"),
        ("sl = _multiprocessing.SemLock(\nOSError: [Errno 30] Read-only file system\n",
         "type --launcher torchrun, which needs none (OSError: [Errno 30] Read-only"),
        ("one\ntwo\nthree\n", "two\nthree"),
        (None, ""),
    ],
)  # fmt: skip
def test_the_log_of_a_launcher_says_what_the_machine_lacks(
    tmp_path: Path, log: str | None, said: str
) -> None:
    path = tmp_path / "launcher.log"
    if log is not None:
        path.write_text(log)
    found = last_words(path, 2)
    assert said in found if said else not found
