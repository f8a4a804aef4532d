"""What Megatron's attributes say about a parameter. A stand-in has its module and its group."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
from torch import distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

from moediag.evidence.law_model import PART, PLACED, PLAIN  # noqa: E402
from moediag.evidence.law_records import read_laws  # noqa: E402


class Group:
    """The tensor-parallel group of ranks 0 and 1."""

    def __init__(self, size: int = 2) -> None:
        self.size = lambda: size
        self.rank = lambda: 1


@pytest.fixture(autouse=True)
def ranks_of_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [*range(group.size())])


def megatron(monkeypatch: pytest.MonkeyPatch, group: Group | None) -> None:
    state = types.ModuleType("megatron.core.parallel_state")
    state.model_parallel_is_initialized = lambda: group is not None  # type: ignore[attr-defined]
    state.get_tensor_model_parallel_group = lambda: group  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, state.__name__, state)


def hows(folder: Path, optimizer: torch.optim.Optimizer, net: nn.Module) -> dict[str, str]:
    net(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    laws, _ = read_laws(folder, 0)
    assert laws is not None
    return {piece.name: piece.how for piece in laws.checks[0].pieces}


def model(sharded: str = "0.weight", expert: str = "") -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    for name, parameter in net.named_parameters():
        if name == sharded:
            parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
        if name.startswith(expert) and expert:
            parameter.allreduce = False  # type: ignore[attr-defined]
    return net


@pytest.mark.usefixtures("recorder")
def test_what_is_not_sharded_is_a_duplicate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    megatron(monkeypatch, Group())
    net = model(expert="1.")
    found = hows(tmp_path, torch.optim.SGD(net.parameters(), lr=0.1), net)
    assert found == {"0.weight": PART, "0.bias": PLACED, "1.weight": PLAIN, "1.bias": PLAIN}


@pytest.mark.usefixtures("recorder")
def test_the_copies_of_its_optimizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    megatron(monkeypatch, Group())
    net = model()
    copies = []
    for name, parameter in net.named_parameters():
        copy = parameter.detach().clone()
        copy.grad = torch.ones_like(copy)
        parameter.main_param = copy  # type: ignore[attr-defined]
        if name.startswith("1."):  # without a distributed optimizer it has no such attribute
            parameter.main_param_sharded = name == "1.bias"  # type: ignore[attr-defined]
        copies.append(copy)
    found = hows(tmp_path, torch.optim.SGD(copies, lr=0.1), net)
    assert found == {"0.weight": PART, "0.bias": PLACED, "1.weight": PLACED}


@pytest.mark.usefixtures("recorder")
@pytest.mark.parametrize(
    ("group", "sharded"), [(None, "0.weight"), (Group(1), "0.weight"), (Group(), "none")]
)
def test_nothing_is_declared_without_tensor_parallelism(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: Group | None, sharded: str
) -> None:
    megatron(monkeypatch, group)
    net = model(sharded)
    found = hows(tmp_path, torch.optim.SGD(net.parameters(), lr=0.1), net)
    assert set(found.values()) == {PLAIN}
