"""The backend of a group that was made without naming one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from moediag.recorder import groups


@pytest.fixture
def unnamed() -> Iterator[None]:
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("unnamed")
def test_the_backend_is_that_of_the_machines_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert dist.get_backend() == "undefined"
    assert groups._backend(None) == "gloo"
    monkeypatch.setattr(dist, "get_backend_config", lambda _: "cpu:gloo,cuda:nccl")
    assert groups._backend(None) == "gloo"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert groups._backend(None) == "nccl"
