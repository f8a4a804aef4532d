"""What the law of docs/extending/add-a-law.md records, as one line in ``watchers.record``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from moediag.evidence.law_records import read_laws
from moediag.protocol import ENV_LAWS
from moediag.recorder import install
from moediag.recorder.laws import watchers
from tests.unit.recorder.laws import example_law


def test_each_checked_step_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Watchers(watchers.ModelModes):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            example_law.install(self._context)

    monkeypatch.setenv(ENV_LAWS, "0")
    monkeypatch.setattr(watchers, "ModelModes", Watchers)
    recorder = install(str(tmp_path), 0, 1, of_job=True)
    try:
        net = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(5):
            net(torch.ones(1, 2)).sum().backward()
            optimizer.step()
    finally:
        recorder.uninstall()
    laws, lost = read_laws(tmp_path, 0)
    assert laws is not None and not lost
    assert [one["step"] for one in laws.others["default_dtype"]] == [1, 2, 3]
    assert {one["dtype"] for one in laws.others["default_dtype"]} == {"torch.float32"}
