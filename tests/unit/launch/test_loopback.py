"""A machine without a loopback is an error and not a hang."""

import errno
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moediag import doctor
from moediag.errors import MachineError
from moediag.lab.launch.launcher import launcher, require_loopback
from moediag.launch.settings import LaunchOptions

STACK = SimpleNamespace(python=Path("python"), pythonpath=[], key="k")


@pytest.fixture
def no_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: Any) -> None:
        raise OSError(errno.ENETUNREACH, "Network is unreachable")

    class Unconnected(socket.socket):
        connect = unreachable

    monkeypatch.setattr("moediag.lab.launch.launcher.socket.socket", Unconnected)


def test_a_launch_works_with_a_loopback() -> None:
    require_loopback()
    assert next(c for c in doctor.checks(network=False) if c.name == "loopback").status == "ok"


@pytest.mark.usefixtures("no_loopback")
@pytest.mark.parametrize("kind", ["fork", "torchrun"])
def test_a_launch_is_refused_without_a_loopback(kind: str, tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="Network is unreachable") as caught:
        launcher(kind, STACK, tmp_path)
    assert "ip link set lo up" in caught.value.help_text


@pytest.mark.usefixtures("no_loopback")
def test_several_nodes_do_not_need_a_loopback(tmp_path: Path) -> None:
    options = LaunchOptions(nnodes=2, shared=tmp_path)
    assert type(launcher("torchrun", STACK, tmp_path, options)).__name__ == "TorchrunLauncher"


@pytest.mark.usefixtures("no_loopback")
def test_the_doctor_checks_the_loopback() -> None:
    check = next(c for c in doctor.checks(network=False) if c.name == "loopback")
    assert check.status == "fail"
    assert "ip link set lo up" in check.advice
