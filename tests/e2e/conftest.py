from __future__ import annotations

from collections.abc import Iterator

import pytest

from moediag.lab.campaign.matrix import session
from moediag.lab.campaign.sweep import shared_runs
from moediag.lab.pipeline import check, trials
from tests.e2e.pipeline import Command, Hosts


@pytest.fixture(scope="session")
def command(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Command]:
    """The command line, with hosts shared by all tests of the session."""
    hosts = Hosts(tmp_path_factory.mktemp("hosts"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trials, "launcher", hosts.launcher)
        patch.setattr(check, "launcher", hosts.launcher)
        try:
            yield Command(tmp_path_factory.mktemp("runs"))
        finally:
            hosts.close()


@pytest.fixture
def shared_hosts(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """Campaigns run on the session's hosts too."""

    class Shared:
        launcher = staticmethod(trials.launcher)

        def __init__(self, *_: object) -> None: ...

        def close(self) -> None: ...

    for campaign in (session, shared_runs):
        monkeypatch.setattr(campaign, "Hosts", Shared)
