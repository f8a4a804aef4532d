from __future__ import annotations

from collections.abc import Iterator

import pytest

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
