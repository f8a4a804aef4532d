"""What lives during a step, from steps of a few layers on fake tensors."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch.distributed import _functional_collectives as funcol  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from moediag.lab.check import simulated_group  # noqa: E402
from moediag.lab.check.activations import chosen, extended, shorten  # noqa: E402
from moediag.lab.check.fused_attention import fused_attention  # noqa: E402
from moediag.lab.check.simulated_group import in_child  # noqa: E402
from moediag.lab.check.traffic import Sent  # noqa: E402
from moediag.protocol import MemoryPhase, Traffic  # noqa: E402
from moediag.recorder.not_applicable import NotApplicable  # noqa: E402


def test_the_first_and_the_last_layer_of_each_kind_are_kept() -> None:
    assert chosen("aaaa") == ([0, 3], [(1, 2)])
    assert chosen("aabbbb") == ([0, 1, 2, 5], [(3, 2)])
    assert chosen("abab") == ([0, 1, 2, 3], [])
    assert chosen("a") == ([0], [])
    with pytest.raises(NotApplicable, match="5 kinds"):
        chosen("abcde")


@pytest.mark.parametrize(
    ("told", "left"),
    [
        ({"layer_types": list("abcd"), "num_hidden_layers": 4},
         {"layer_types": list("ad"), "num_hidden_layers": 2}),
        ({"layer_types": list("abc"), "num_hidden_layers": 6}, None),  # of another tower
        ({"layer_types": None}, None),
        ({}, None),
    ],
)  # fmt: skip
def test_a_configuration_tells_the_layers_that_are_left(told: Any, left: Any) -> None:
    text, model = SimpleNamespace(**told), torch.nn.Module()
    model.config = SimpleNamespace(get_text_config=lambda: text)  # type: ignore[assignment]
    model.layers = torch.nn.ModuleList(torch.nn.Linear(1, n) for n in range(1, 5))
    assert [number for number, _ in shorten(model, "layers", [0, 3])] == [0, 3]
    assert [one.out_features for one in model.layers] == [1, 4]  # type: ignore[union-attr]
    assert vars(text) == (told if left is None else left)


def test_each_layer_more_adds_what_one_more_added() -> None:
    base = [MemoryPhase("loss", parameters=4, activations=10), MemoryPhase("start", parameters=4)]
    one = [MemoryPhase("loss", parameters=5, activations=13), MemoryPhase("start", parameters=5)]
    found = extended(base, [(one, 10)])
    assert found[0] == MemoryPhase("loss", parameters=14, activations=40)
    assert found[1] == MemoryPhase("start", parameters=14) and found[0].total == 54
    assert extended(base, []) == base


@pytest.mark.parametrize(("dropout", "width"), [(0.1, 8), (0.0, 4), (0.0, 8)])
def test_attention_makes_no_score_matrices(dropout: float, width: int) -> None:
    """Neither in forward nor where backward computes it again."""
    sizes: list[int] = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            made = func(*args, **(kwargs or {}))
            sizes.extend(one.numel() for one in [made] if isinstance(one, torch.Tensor))
            return made

    def attend(value: torch.Tensor) -> torch.Tensor:
        query = torch.ones(1, 2, 64, 8)
        return functional.scaled_dot_product_attention(query, query, value, dropout_p=dropout)

    value = torch.ones(1, 2, 64, width, requires_grad=True)
    with Seen(), fused_attention():
        found = checkpoint(attend, value, use_reentrant=False)
        found.sum().backward()
    assert found.shape == (1, 2, 64, width) and value.grad is not None
    assert max(sizes) < 2 * 64 * 64


@pytest.mark.filterwarnings("ignore::FutureWarning")  # names of collectives that torch renames
def test_what_a_rank_sends_is_counted_by_group(tmp_path: Path) -> None:
    def work() -> list[Traffic]:
        with simulated_group.joined(0, 8):
            mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp_shard", "tp"))
            shards, tp = mesh["dp_shard"].get_group(), mesh["tp"].get_group()
            small, large = torch.zeros(10), torch.zeros(40)
            counted = Sent("everyone")
            with counted:
                dist.all_gather_into_tensor(large, small, group=shards)  # as FSDP2 does
                funcol.all_gather_tensor(small, 0, shards)
                funcol.reduce_scatter_tensor(large, "sum", 0, shards)
                dist.all_reduce(small, group=tp)
                funcol.all_to_all_single(large, None, None, dist.group.WORLD)
                dist.barrier()
            return counted.traffic()

    assert in_child(work, tmp_path) == [
        Traffic("dp_shard", 4, 6, calls=2, bytes=2 * 120),
        Traffic("tp", 2, 1, calls=1, bytes=40),
        Traffic("everyone", 8, 7, calls=1, bytes=140),
    ]
