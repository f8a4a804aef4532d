"""The laws' recorder changes no number of a job, and nothing that the job may do without it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from moediag.evidence.law_records import read_laws
from moediag.protocol import ENV_LAWS
from moediag.recorder import install
from tests.victims import same_numbers


def numbers() -> str:
    model = same_numbers.alone()
    losses = same_numbers.train(model)
    return same_numbers.report(model, losses)


def test_losses_weights_and_random_states_are_the_same_to_the_last_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = numbers()
    monkeypatch.setenv(ENV_LAWS, "1")
    recorder = install(str(tmp_path), 0, 1, of_job=True)
    try:
        recorded = numbers()
    finally:
        recorder.uninstall()
    laws, _ = read_laws(tmp_path, 0)
    assert laws is not None
    assert {check.step for check in laws.checks} == set(range(1, 19))
    assert laws.inputs
    assert laws.cleared
    assert recorded == alone


def test_a_parameter_that_gets_another_shape_between_two_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pruning: a node of autograd that was kept would have the old shape."""
    monkeypatch.setenv(ENV_LAWS, "0")
    recorder = install(str(tmp_path), 0, 1, of_job=True)
    try:
        model = nn.Linear(4, 6)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for rows in (5, 4, 3):
            model(torch.randn(2, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            for parameter in model.parameters():
                parameter.data = parameter.data[:rows].clone()
    finally:
        recorder.uninstall()
    laws, _ = read_laws(tmp_path, 0)
    assert laws is not None
    assert [one.kept for one in laws.cleared] == [False, False]


def test_nothing_is_read_while_a_graph_is_captured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copying to the host would break the capture."""
    from moediag.recorder.laws import cleared_gradients, clip_norms

    monkeypatch.setenv(ENV_LAWS, "1")
    recorder = install(str(tmp_path), 0, 1, of_job=True)
    try:
        model = nn.Linear(4, 6)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            if step == 2:
                for module in (cleared_gradients, clip_norms):
                    monkeypatch.setattr(module, "capturing", lambda: True)
            model(torch.randn(2, 4)).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    finally:
        recorder.uninstall()
    laws, _ = read_laws(tmp_path, 0)
    assert laws is not None
    assert [norm.step for norm in laws.norms] == [1, 2]
    assert [one.step for one in laws.cleared] == [1]
