"""Simulated ranks of a user's program: what is real there, and what only looks so."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed import fake_pg  # noqa: F401 - once, before the forks

from moediag.lab.check import simulated_group
from moediag.lab.simulation.answers import RootPayloads
from moediag.lab.simulation.unreal_data import UnrealData
from moediag.lab.simulation.unreal_number import UnrealNumber
from moediag.lab.simulation.written_files import WrittenFiles


@contextmanager
def followed(rank: int, size: int, known: Any = None) -> Iterator[tuple[UnrealData, list[str]]]:
    """A simulated rank with the mode and its replacements, and the reads that it tells of."""
    reads: list[str] = []
    data = UnrealData(reads.append, known)
    before = []
    with simulated_group.joined(rank, size):
        for owner, name, new in data.replacements():
            before.append((owner, name, getattr(owner, name)))
            setattr(owner, name, new)
        try:
            with data:
                yield data, reads
        finally:
            for owner, name, old in reversed(before):
                setattr(owner, name, old)


def test_marks_follow_views_operators_and_overwriting(tmp_path: Path) -> None:
    def work() -> list[bool]:
        with followed(0, 4) as (data, _):
            own, sum_ = torch.ones(4), torch.ones(4)
            dist.all_reduce(sum_)
            parts = [torch.empty(4) for _ in range(4)]
            dist.all_gather(parts, own)
            into = torch.zeros(4)
            into[0] = sum_[0]
            overwritten = sum_.clone()
            overwritten.zero_()
            grad = torch.ones(4, requires_grad=True)
            (grad * sum_).sum().backward()
            marked = (sum_[:2], sum_ + own, parts[1], into, grad.grad, sum_.to(torch.float64))
            real = (own, own * 2, overwritten, grad.detach())
            return [*map(data.marked, marked), *(not data.marked(t) for t in real)]

    assert all(simulated_group.in_child(work, tmp_path))


def test_marks_follow_sharded_tensors(tmp_path: Path) -> None:
    def work() -> list[bool]:
        with followed(0, 4) as (data, _):
            mesh = dist.device_mesh.init_device_mesh("cpu", (4,))
            sharded = DTensor.from_local(torch.ones(2), mesh, [Shard(0)])
            own = torch.nn.Parameter(sharded)
            total = (own * 2).sum()
            before = data.marked(own.to_local())
            whole = total.full_tensor()
            whole.backward()
            return [not before, data.marked(whole)]

    assert all(simulated_group.in_child(work, tmp_path))


def test_a_group_of_one_rank_changes_nothing(tmp_path: Path) -> None:
    def work() -> list[str]:
        with followed(0, 1) as (_, reads):
            sum_ = torch.ones(1)
            dist.all_reduce(sum_)
            assert sum_.item() == 1.0
            return reads

    assert simulated_group.in_child(work, tmp_path) == []


READS = {
    "bool": lambda t: bool(t > 0),
    "float": lambda t: float(t),
    "list": lambda t: t.tolist(),
    "numpy": lambda t: t.numpy(),
    "equal": lambda t: torch.equal(t, t),
    "mask": lambda t: t.reshape(1)[t.reshape(1) > 0],
    "nonzero": lambda t: t.nonzero(),
    "compared number": lambda t: t.item() < 2,
    "int": lambda t: int(t.item()),
    "a number for math": lambda t: math.sin(t.item()),
}
NO_READS = {
    "printed": lambda t: f"{t.item():.2f} {t}",
    "an average": lambda t: str(sum([t.item(), 1.0]) / 2),
    "perplexity": lambda t: f"{math.exp(t.item())}",
    "finite": lambda t: bool(torch.isnan(t)) or not math.isfinite(t.item()),
    "indexed": lambda t: torch.arange(3)[torch.tensor([1])] + t,
}


def test_what_may_decide_is_a_read_and_what_is_shown_is_none(tmp_path: Path) -> None:
    def work() -> dict[str, list[int]]:
        found = {}
        with followed(1, 4) as (_, reads):
            for name, use in {**READS, **NO_READS}.items():
                own = torch.tensor(1.0)
                use(own)
                before = len(reads)
                other = torch.tensor(1.0)
                dist.all_reduce(other)
                use(other)
                found[name] = [before, len(reads) - before]
                reads.clear()
        return found

    found = simulated_group.in_child(work, tmp_path)
    for name, (own, other) in found.items():
        assert own == 0 and (other > 0) == (name in READS), name


def test_memory_that_numpy_shares_is_read_at_once(tmp_path: Path) -> None:
    def work() -> list[str]:
        with followed(0, 2) as (_, reads):
            shared = torch.ones(2)
            shared.numpy()
            before = list(reads)
            dist.all_reduce(shared)
            return [*before, "|", *reads]

    told = simulated_group.in_child(work, tmp_path)
    assert told[0] == "|" and len(told) == 2


def test_a_number_says_what_a_float_says() -> None:
    told: list[str] = []
    number = UnrealNumber(1.5, told.append)
    assert isinstance(number, float) and f"{-number * 2 + 1:.1f}" == "-2.0" and not told
    assert number > 1 and told


def test_ranks_get_what_their_root_sends(tmp_path: Path) -> None:
    """The second rank holds other values; after the broadcast it has those of rank 0, and reads
    them as real ones."""

    def work(rank: int) -> list[Any]:
        recorder = _Recorder()
        held: list[UnrealData] = []
        payloads = RootPayloads(
            tmp_path,
            recorder,
            lambda ts: not any(held[0].marked(t) for t in ts),  # type: ignore[arg-type]
        )
        with followed(rank, 4, payloads.known) as (data, reads):
            held.append(data)
            values: list[Any] = [f"from {rank}", rank]
            dist.broadcast_object_list(values, src=0)
            other = torch.full((3,), float(rank))
            dist.all_reduce(other)
            dist.broadcast(other, src=0)  # not real at the root either
            return [values, reads, data.marked(other)]

    for rank in (0, 2):
        values, reads, unreal = simulated_group.in_child(lambda rank=rank: work(rank), tmp_path)
        assert values == ["from 0", 0] and reads == [] and unreal


def test_a_file_of_another_rank_is_unreal_until_both_made_a_call(tmp_path: Path) -> None:
    ours, run = tmp_path / "snapshot.pt", tmp_path / "run"
    run.mkdir()

    def files(rank: int, calls: list[int], reads: list[str]) -> WrittenFiles:
        found = WrittenFiles(run, rank, lambda: calls[0], reads.append)
        for owner, name, new in found.replacements():
            setattr(owner, name, new)
        return found

    def writer() -> None:
        found = files(0, [3], [])
        torch.save(1, ours)
        (tmp_path / "own.txt").write_text("x")
        found.keep()

    def reader(calls: int) -> list[str]:
        reads: list[str] = []
        files(1, [calls], reads)
        if ours.exists():
            torch.load(ours)
        (tmp_path / "mine.txt").write_text("x")
        return [*reads, *(str(one) for one in (tmp_path / "mine.txt",) if not one.exists())]

    before = simulated_group.in_child(lambda: reader(0), tmp_path)
    simulated_group.in_child(writer, tmp_path)
    early = simulated_group.in_child(lambda: reader(3), tmp_path)
    later = simulated_group.in_child(lambda: reader(4), tmp_path)
    assert before == later == [] and "snapshot.pt" in early[0]


class _Recorder:
    """Counts the calls as the recorder of a rank does."""

    class _Info:
        def __init__(self) -> None:
            self.name, self.ranks, self.issued = "0", [0, 1, 2, 3], 0

    def __init__(self) -> None:
        self._info = self._Info()
        self.groups = self

    def info(self, _group: Any) -> Any:
        self._info.issued += 1
        return self._info
