"""Ctrl-C, SIGTERM and SIGHUP are equivalent, are never lost, and do not interrupt cleanup."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from moediag.cli import app
from moediag.errors import ExitCode
from moediag.lab.launch.launcher import follow
from moediag.launch import signals
from moediag.launch.base import Running
from moediag.launch.follow import supervise
from moediag.launch.settings import LaunchOptions
from moediag.protocol import Trial


@pytest.mark.parametrize("sig", signals.ENDING)
def test_each_signal_interrupts(sig: signal.Signals) -> None:
    before = signal.getsignal(sig)
    with pytest.raises(KeyboardInterrupt) as raised, signals.as_interrupts():
        os.kill(os.getpid(), sig)
    assert signals.of_interrupt(raised.value) == sig
    assert signal.getsignal(sig) == before


def test_nohup_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals.as_interrupts(), signals.held() as came:
            os.kill(os.getpid(), signal.SIGHUP)
        assert came == []
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("sig", signals.ENDING)
def test_deferred_signals_are_reported(sig: signal.Signals) -> None:
    before = signal.getsignal(sig)
    with signals.as_interrupts():
        inside = signal.getsignal(sig)
        with signals.held() as came:
            os.kill(os.getpid(), sig)
        assert came == [sig]
        assert signal.getsignal(sig) == inside
    assert signal.getsignal(sig) == before


@pytest.mark.parametrize("sig", signals.ENDING)
def test_an_inherited_ignored_signal_stays_ignored(sig: signal.Signals) -> None:
    """As under ``nohup``, or in a background job of a script; the others still interrupt."""
    others = [other for other in signals.ENDING if other != sig]
    program = IGNORANT.format(sig=int(sig), others=list(map(int, others)))
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False,
        preexec_fn=lambda: signal.signal(sig, signal.SIG_IGN),
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("goes on\ninterrupted\ninterrupted\n", "")


IGNORANT = """
import os
from moediag.launch import signals
for sig in ({sig}, *{others}):
    try:
        with signals.as_interrupts(), signals.held() as came:
            os.kill(os.getpid(), sig)
        print("interrupted" if came else "goes on")
    except KeyboardInterrupt:
        print("interrupted")
"""
IMPATIENT = """
import os, signal, sys
from moediag.errors import Interrupted
from moediag.launch import signals
try:
    with signals.as_interrupts(for_good=True):
        raise {error}
except BaseException:
    for sig in signals.ENDING:
        os.kill(os.getpid(), sig)
"""


@pytest.mark.parametrize(
    ("error", "code"),
    [
        ("KeyboardInterrupt", 0),
        ("Interrupted('x')", 0),
        ("SystemExit(130)", 0),
        ("ValueError", -signal.SIGTERM),
    ],
)
def test_cleanup_after_an_interrupt_is_not_interrupted(error: str, code: int) -> None:
    """After an ordinary error SIGINT raises and SIGTERM has its default action again."""
    program = IMPATIENT.format(error=error)
    if code:
        program = program.replace("signals.ENDING", "[signal.SIGTERM]")
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (code, b"")
    assert ExitCode.INTERRUPTED == 130


def test_ctrl_c_during_the_cleanup_of_a_launch_is_not_lost(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def impatient(self: supervise.Supervisor) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(supervise.Supervisor, "_follow", lambda self: None)
    monkeypatch.setattr(supervise.Supervisor, "_end", impatient)
    record = follow(
        NoTrial(), Trial("t", "s", "unfixed"), tmp_path, 1, LaunchOptions(), "fork", None
    )
    assert record.interrupted


class NoTrial(Running):
    def poll(self) -> None: ...


@pytest.mark.parametrize("sig", signals.ENDING)
def test_the_command_reports_the_interrupt(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], sig: signal.Signals
) -> None:
    def slow(*_: Any) -> None:
        os.kill(os.getpid(), sig)

    monkeypatch.setattr("moediag.lab.scenario.catalogue.names", slow)
    assert app.main(["list"]) == ExitCode.INTERRUPTED
    said = capsys.readouterr()
    assert said.err.strip() == "error: interrupted"
