"""Hosts that outlive a probe: which are kept and ended; none is left."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moediag.lab.launch import hosts as module
from moediag.lab.launch.hosts import KEPT, Hosts
from moediag.launch.settings import LaunchOptions


class FakeLauncher:
    def __init__(self, kind: str, stack: Any, folder: Path, options: LaunchOptions) -> None:
        self.key, self.kind, self.options = stack.key, kind, options
        self.open = False
        MADE.append(self)

    def __enter__(self) -> FakeLauncher:
        self.open = True
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.open = False


MADE: list[FakeLauncher] = []


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Hosts:
    MADE.clear()
    monkeypatch.setattr(module, "launcher", FakeLauncher)
    return Hosts(tmp_path, LaunchOptions())


def stack(key: str) -> Any:
    return SimpleNamespace(key=key)


def use(hosts: Hosts, key: str, options: LaunchOptions, kind: str = "fork") -> Any:
    with hosts.launcher(kind, stack(key), Path(), options) as found:
        assert found.open
    return found


def test_a_started_host_serves_later_probes(hosts: Hosts) -> None:
    hosts.begin(stack("a"))
    hosts.begin(stack("a"))
    other = LaunchOptions(quiescence=9.0)
    first = use(hosts, "a", LaunchOptions())
    assert use(hosts, "a", other) is first
    assert first.options is other
    assert len(MADE) == 1


def test_the_last_used_hosts_are_kept_until_the_end(hosts: Hosts) -> None:
    for key in "abcdef":
        use(hosts, key, LaunchOptions())
    assert [made.key for made in MADE if made.open] == list("abcdef")[-KEPT:]
    use(hosts, "c", LaunchOptions())
    hosts.begin(stack("g"))
    assert [made.key for made in MADE if made.open] == list("cefg")
    hosts.close()
    assert not any(made.open for made in MADE)


def test_two_probes_of_one_release_at_once_leave_one_host(hosts: Hosts) -> None:
    options = LaunchOptions()
    with hosts.launcher("fork", stack("a"), Path(), options) as one:
        assert use(hosts, "a", options) is not one
    assert [made.open for made in MADE] == [True, False]


def test_torchrun_keeps_no_hosts(hosts: Hosts) -> None:
    assert use(hosts, "a", LaunchOptions(), "torchrun").open is False
    assert use(hosts, "a", LaunchOptions(), "torchrun") is not MADE[0]
