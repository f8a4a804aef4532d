"""Which ranks hold the same, as wrappers and placements declare it. One process plays rank 1 of
four; torch's fake backend communicates nothing."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor  # noqa: E402

from moediag.evidence.law_records import read_laws  # noqa: E402
from moediag.protocol import ENV_LAWS  # noqa: E402
from moediag.recorder import install  # noqa: E402
from moediag.recorder.laws.replica_sets import ReplicaSets  # noqa: E402
from tests.unit.fake_ranks import fake_rank  # noqa: E402


@pytest.fixture
def sets(tmp_path: Path) -> Iterator[ReplicaSets]:
    recorder = install(str(tmp_path), 1, 4)
    with fake_rank(1, 4):
        yield ReplicaSets(recorder)
    recorder.uninstall()


def placed(sets: ReplicaSets, *placements: object) -> tuple[str, str, tuple[int, ...]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    tensor = distribute_tensor(torch.zeros(4, 4), mesh, placements)
    found = sets.pieces([nn.Parameter(tensor)])[0]
    return found.part, found.how, found.ranks


def test_a_replicated_tensor_is_on_all_ranks_of_the_mesh(sets: ReplicaSets) -> None:
    assert placed(sets, Replicate(), Replicate()) == ("", "placed", (0, 1, 2, 3))


def test_a_tensor_that_one_axis_shards_is_on_the_ranks_of_the_other(sets: ReplicaSets) -> None:
    part, how, ranks = placed(sets, Replicate(), Shard(0))
    assert (how, ranks) == ("placed", (1, 3))
    assert "1/2" in part


def test_a_tensor_that_all_axes_shard_has_no_replica(sets: ReplicaSets) -> None:
    part, how, ranks = placed(sets, Shard(0), Shard(1))
    assert (how, ranks) == ("part", (0, 1, 2, 3))
    assert "0/2" in part and "1/2" in part


def test_a_plain_tensor_belongs_to_no_other_rank(sets: ReplicaSets) -> None:
    found = sets.pieces([nn.Parameter(torch.zeros(2))])[0]
    assert (found.how, found.ranks) == ("plain", ())


@pytest.mark.parametrize("sends", [True, False])
def test_buffers_that_a_wrapper_sends(sets: ReplicaSets, sends: bool) -> None:
    sets.install()
    wrapped = nn.parallel.DistributedDataParallel(nn.BatchNorm1d(2))
    wrapped.broadcast_buffers = sends
    assert (id(wrapped.module) in sets.sent_buffers()) is sends


def test_a_warning_of_ddp_names_the_line_of_the_program(sets: ReplicaSets) -> None:
    sets.install()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        ddp = nn.parallel.DistributedDataParallel(nn.Linear(2, 2), check_reduction=True)
    assert {warning.filename for warning in found} == {__file__}
    assert sets.wrapped() == [ddp.module]


@pytest.mark.parametrize(("reduces", "how"), [(True, "reduced"), (False, "local")])
def test_fsdp2_reduces_over_its_replicate_dimension(
    sets: ReplicaSets, reduces: bool, how: str
) -> None:
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    model = nn.Linear(4, 4)
    fully_shard(model, mesh=mesh)
    model(torch.zeros(1, 4))  # the recorder has seen its group
    model.reshard()
    model.set_requires_all_reduce(reduces)
    sets.stepped()
    found = sets.pieces(list(model.parameters()))[0]
    assert (found.how, found.ranks) == (how, (1, 3))
    assert sets.data_parallel(model) == (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("sizes", "flat", "known"),
    [((1, 4, 1), "fs", True), ((2, 2, 1), "fs", True), ((1, 4, 1), "tp", True),
     ((1, 2, 2), "fs", False), ((1, 2, 2), "tp", False)],  # ranks of "tp" share samples
)  # fmt: skip
def test_axes_of_one_rank_share_no_samples(
    sets: ReplicaSets, sizes: tuple[int, int, int], flat: str, known: bool
) -> None:
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "fs", "tp"))
    mesh["dp", flat]._flatten()
    model = nn.Linear(4, 4)
    fully_shard(model, mesh=mesh["dp", "fs"])
    model(torch.zeros(1, 4))
    assert sets.data_parallel(model) == ((0, 1, 2, 3) if known else ())


@pytest.mark.parametrize(
    ("sizes", "part", "how", "ranks"),
    [
        ((4, 1), "shard 0 of 1", "reduced", (0, 1, 2, 3)),  # FSDP takes NO_SHARD instead
        ((2, 2), "shard 1 of 2", "reduced", (1, 3)),
        ((1, 4), "shard 1 of 4", "part", (0, 1, 2, 3)),
        ((4,), "shard 1 of 4", "part", (0, 1, 2, 3)),
    ],
)
def test_fsdp1_declares_replicas_over_the_first_axis_of_its_mesh(
    sets: ReplicaSets, sizes: tuple[int, ...], part: str, how: str, ranks: tuple[int, ...]
) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard")[-len(sizes) :])
    strategy = ShardingStrategy.HYBRID_SHARD if len(sizes) > 1 else ShardingStrategy.FULL_SHARD
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = FullyShardedDataParallel(
            nn.Linear(4, 4), device_mesh=mesh, sharding_strategy=strategy,
            device_id=torch.device("cpu"),
        )  # fmt: skip
        model(torch.zeros(1, 4))
    found = sets.pieces(list(model.parameters()))[0]
    assert (found.part, found.how, found.ranks) == (part, how, ranks)


class Task(nn.Module):
    """A model that is called, with the wrapper inside, and perhaps parameters outside it."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)


def test_a_wrapper_inside_the_model_that_is_called(sets: ReplicaSets) -> None:
    from torch.nn.parallel import DistributedDataParallel

    sets.install()
    wrapped = DistributedDataParallel(nn.Linear(2, 2))
    outside, frozen = nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(requires_grad=False)
    for root, over in (
        (wrapped, (0, 1, 2, 3)),
        (Task(wrapped), (0, 1, 2, 3)),
        (Task(wrapped, frozen), (0, 1, 2, 3)),
        (Task(wrapped, outside), ()),
        (outside, ()),
    ):
        assert sets.averaged(root) == over
    assert sets.data_parallel(Task(wrapped)) == ()  # buffers outside the wrapper may differ


def test_what_a_program_declares_equal_is_recorded_with_its_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENV_LAWS, "0")
    recorder = install(str(tmp_path), 1, 4, of_job=True)
    ones, numbers = torch.ones(4, 4), torch.arange(4)
    weight = nn.Parameter(torch.ones(1))
    with fake_rank(1, 4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        single = init_device_mesh("cpu", (4, 1), mesh_dim_names=("pp", "ep"))
        optimizer = torch.optim.SGD([weight])
        for given, on, placements in [
            (ones, mesh, [Replicate(), Shard(0)]),
            (numbers, mesh, [Replicate(), Replicate()]),
            (ones, mesh, [Shard(0), Shard(1)]),
            (ones, single, [Shard(0), Replicate()]),  # no other rank has it
            (weight, mesh, [Replicate(), Replicate()]),  # its optimizer is checked
            (ones.to(torch.complex64), mesh, [Shard(0), Replicate()]),
        ]:
            DTensor.from_local(given, on, placements, run_check=False)
        with torch.no_grad():
            DTensor.from_local(ones, mesh, [Replicate(), Replicate()], run_check=False)
        weight.sum().backward()
        optimizer.step()
    recorder.uninstall()
    laws, _ = read_laws(tmp_path, 1)
    assert laws is not None
    found = [(d.axes, d.ranks, d.part, d.shape, d.data, d.sketch) for d in laws.declared]
    assert found == [
        (("dp",), (1, 3), "S(0)=1/2", "4x4", True, (-6.0, 4.0)),
        (("dp", "tp"), (0, 1, 2, 3), "", "4", True, None),
        (("tp",), (0, 1), "S(0)=0/2", "4x4", False, None),
    ]
    assert [bool(d.digest) for d in laws.declared] == [False, True, False]
    assert {d.line.partition(":")[0] for d in laws.declared} == {"test_replica_sets.py"}


@pytest.mark.parametrize(("gradient", "kept"), [(torch.ones(2), True), (None, False)])
def test_a_flat_parameter_with_a_gradient_keeps_it_for_the_next_micro_batch(
    sets: ReplicaSets, gradient: object, kept: bool
) -> None:
    handle = SimpleNamespace(flat_param=SimpleNamespace(grad=gradient))
    sets._recorder.fsdp1_handles = lambda: [(None, handle)]
    assert sets.keep_gradients() is kept
