"""Methods to load, in a process group of one rank: right bytes arrive, and wrong bytes are
found."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bench.load_cost import __main__ as command
from bench.load_cost import methods as ways
from bench.load_cost import model, rank
from bench.load_cost.methods import Job, Missing, buckets
from bench.load_cost.timing import METHODS, RankTimings, Spec, Timing
from moediag.lab.stacks import environment

# torch's own set_model_state_dict uses what torch deprecates.
pytestmark = pytest.mark.filterwarnings(
    "ignore:`_get_pg_default_device`:UserWarning",
    "ignore:Multiple backends are registered:UserWarning",
)
CPU = torch.device("cpu")
ACCELERATE = importlib.util.find_spec("accelerate") is not None
INSTALLED = [name for name in METHODS if ACCELERATE or name != "accelerate"]


@pytest.fixture(scope="module", autouse=True)
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    torch.set_num_threads(1)
    store = dist.FileStore(str(tmp_path_factory.mktemp("group") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def measured(**spec: Any) -> RankTimings:
    return rank.run(Spec(**{"parameters": [5, 20], "numel": 12, "rounds": 2, **spec}), CPU)


def run(**spec: Any) -> dict[tuple[str, int], Timing]:
    return {(one.method, one.parameters): one for one in measured(**spec).timings}


def test_every_named_method_has_a_function() -> None:
    assert tuple(ways.METHODS) == METHODS


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_method_loads_the_correct_bytes(dtype: str) -> None:
    found = run(dtype=dtype)
    assert set(found) == {(method, size) for method in INSTALLED for size in (5, 20)}
    for load in found.values():
        assert load.wrong == []
        assert len(load.seconds) == 2
    width = 4 if dtype == "float32" else 2
    # Every eighth is a vector of 3 instead of a matrix of 3 x 4.
    assert found["local", 20].bytes == width * (18 * 12 + 2 * 3)


def test_collectives_are_counted_by_observation() -> None:
    found = run()
    calls = {method: found[method, 20].calls for method in INSTALLED}
    assert calls["per-parameter"] == {"broadcast": 20}
    assert calls["coalesced"] == {"broadcast": 1}
    assert calls["scatter"] == {"scatter": 20}
    assert calls["local"] == {}
    if ACCELERATE:
        assert calls["accelerate"]["broadcast"] == 20
    assert calls["torch"]["broadcast"] >= 20
    original = dist.ProcessGroup.broadcast
    with rank.counted():
        assert dist.ProcessGroup.broadcast is not original
    assert dist.ProcessGroup.broadcast is original


def test_a_smaller_bucket_makes_more_broadcasts() -> None:
    found = run(methods=["coalesced"], bucket_mb=100e-6)
    assert found["coalesced", 20].calls == {"broadcast": 10}
    assert found["coalesced", 20].wrong == []


def lost_bucket(job: Job) -> None:
    """Skips the broadcast of the last parameter: its memory holds whatever it held."""
    shards = {}
    for name in list(job.targets):
        shards[name] = job.shard(name, job.weights[name])
    name = list(shards)[-1]
    shards[name] = job.shard(name, torch.empty_like(job.weights[name]))
    job.assign(shards)


class Yesterday:
    """Delivers the weights of the load before this one."""

    def __init__(self) -> None:
        self.kept: dict[str, Any] = {}

    def __call__(self, job: Job) -> None:
        old = self.kept or job.weights
        self.kept = {name: full.clone() for name, full in job.weights.items()}
        job.assign({name: job.shard(name, old[name]) for name in job.targets})


def swapped(job: Job) -> None:
    """Two parameters of one shape exchanged."""
    shards = {name: job.shard(name, job.weights[name]) for name in job.targets}
    first, second = list(shards)[:2]
    shards[first], shards[second] = shards[second], shards[first]
    job.assign(shards)


def one_bit(job: Job) -> None:
    """Zero for minus zero: equal as numbers, another bit."""
    shards = {name: job.shard(name, job.weights[name]) for name in job.targets}
    job.assign(shards)
    local = shards[next(iter(shards))].to_local()
    local.view(torch.int32)[0, 0] ^= -(2**31)


def nothing(job: Job) -> None:
    """Loads nothing at all."""


@pytest.mark.parametrize(
    ("method", "bad"),
    [(lost_bucket, 1), (Yesterday(), 20), (swapped, 2), (one_bit, 1), (nothing, 20)],
)
def test_only_the_wrong_method_is_found(
    monkeypatch: pytest.MonkeyPatch, method: Any, bad: int
) -> None:
    monkeypatch.setitem(ways.METHODS, "wrong", (method, None))
    found = run(methods=["per-parameter", "wrong"])
    assert len(found["wrong", 20].wrong) == bad
    assert found["per-parameter", 20].wrong == found["per-parameter", 5].wrong == []


def test_unsupported_methods_are_left_out_with_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(job: Job) -> None:
        raise Missing("distribute_tensor without src_data_rank")

    monkeypatch.setitem(ways.METHODS, "local", (missing, None))
    found = measured(methods=["coalesced", "local"])
    assert {one.method for one in found.timings} == {"coalesced"}
    assert found.notes == [
        "local is left out: this stack has distribute_tensor without src_data_rank"
    ]
    assert measured(methods=["local"]).timings == []


def test_an_unknown_method_is_refused() -> None:
    with pytest.raises(ValueError, match="no method 'telepathy'"):
        run(methods=["telepathy"])


def test_the_first_method_rotates(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    methods = {}
    for name in ("per-parameter", "coalesced", "scatter"):
        work = ways.METHODS[name][0]

        def noted(job: Job, name: str = name, work: Any = work) -> None:
            order.append(name)
            work(job)

        methods[name] = (noted, None)
    monkeypatch.setattr(ways, "METHODS", methods)
    run(methods=list(methods), parameters=[5], rounds=3)
    a, b, c = methods
    assert order == [a, b, c, a, b, c, b, c, a, c, a, b]  # the first round warms


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 8, 33])
@pytest.mark.parametrize("ranks", [1, 2, 4, 5])
def test_shards_equal_those_of_chunk(rows: int, ranks: int) -> None:
    full = torch.arange(rows * 2).view(rows, 2)
    chunks = torch.chunk(full, ranks)
    for own in range(ranks):
        expected = chunks[own] if own < len(chunks) else full[:0]
        assert torch.equal(model.cut(full, own, ranks), expected)


def test_buckets_have_one_dtype_and_a_limited_size() -> None:
    f32, bf16 = torch.float32, torch.bfloat16
    sizes = [("a", f32, 40), ("b", bf16, 60), ("c", f32, 60), ("d", f32, 1), ("e", bf16, 500),
             ("f", bf16, 10)]  # fmt: skip
    assert buckets(sizes, 100) == [["a", "c"], ["b"], ["d"], ["e"], ["f"]]
    assert buckets(sizes, 10_000) == [["a", "c", "d"], ["b", "e", "f"]]
    assert buckets([], 100) == []


def test_weights_differ_from_load_to_load_and_stay_finite() -> None:
    for dtype in ("float32", "bfloat16"):
        weights = model.Weights(Spec([3], 12, dtype=dtype), CPU)
        seen = []
        for _ in range(100):
            weights.renew()
            name = next(iter(weights.full))
            full = weights.full[name]
            assert bool(torch.isfinite(full).all())
            seen.append(full.view(torch.int32 if dtype == "float32" else torch.int16).tolist())
        assert all(seen[i] != seen[j] for i in range(100) for j in range(i))


WRONG_RANK = """
import torch.distributed as dist
from bench.load_cost import methods, rank

def first_rows_for_all(job):
    mine, shards = job.rank, {}
    for name in job.targets:
        full = job.full(name)
        dist.broadcast(full, src=0)
        job.rank = 0
        shards[name] = job.shard(name, full)
        job.rank = mine
    job.assign(shards)

def nothing_sent(job):
    job.assign({name: job.shard(name, job.full(name)) for name in job.targets})

methods.METHODS["local"] = (first_rows_for_all, None)
methods.METHODS["torch"] = (nothing_sent, None)
rank.main()
"""


@pytest.mark.e2e
@pytest.mark.wide
def test_two_ranks_load_correct_bytes_and_find_wrong_methods(tmp_path: Path) -> None:
    here = environment.Stack(Path(sys.executable), {}, "here", 0.0, [tmp_path])
    spec = Spec([8, 24], 64, ["per-parameter", "coalesced", "scatter", "local", "torch"], 2)
    (tmp_path / "wrong_rank.py").write_text(WRONG_RANK)
    by_rank, problem = command.measure(spec, here, 2, 300, "wrong_rank")
    assert problem == ""
    wrong = {(r, one.method) for r, told in by_rank.items() for one in told.timings if one.wrong}
    assert wrong == {(1, "local"), (1, "torch")}
    calls = {one.method: one.calls for one in by_rank[0].timings if one.parameters == 24}
    assert calls["per-parameter"] == {"broadcast": 24}
    assert calls["coalesced"] == {"broadcast": 1}
    assert calls["scatter"] == {"scatter": 24}
