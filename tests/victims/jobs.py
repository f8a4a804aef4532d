"""Training jobs that go wrong, under any launcher: ``torchrun … jobs.py NAME``.

Plain user programs that do not know moediag; ``table.py`` says what a diagnosis must find. The line
that it must name ends with ``# HERE``. Blocking functions wait for something that never comes, slow
ones use CPU time. Only those that wait for their test, working in small pieces, sleep between.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import multiprocessing
import os
import pathlib
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

STEPS = 3


class Job:
    """A linear layer with hand-written data-parallel training."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.model = torch.nn.Linear(8, 8)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(4, 8)).sum().backward()
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad)
        self.optimizer.step()

    def steps(self, number: int = STEPS) -> None:
        for _ in range(number):
            self.step()


def burn(seconds: float) -> None:
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass


# ------------------------------------------------------------------------ they disagree


def skips(job: Job) -> None:
    """Rank 1 skips a reduction and continues with the next call."""
    job.steps()
    loss = torch.ones(4)
    if job.rank != 1:
        dist.all_reduce(loss)  # HERE
    dist.barrier()


def other_op(job: Job) -> None:
    job.steps()
    loss = torch.ones(4)
    if job.rank == 1:
        dist.all_gather([torch.empty(4) for _ in range(dist.get_world_size())], loss)  # HERE
    else:
        dist.all_reduce(loss)
    dist.barrier()


def other_order(job: Job) -> None:
    """Rank 1 enters two groups in the other order than everyone else."""
    world = list(range(dist.get_world_size()))
    groups = [dist.new_group(world) for _ in range(2)]
    job.steps()
    for group in reversed(groups) if job.rank == 1 else groups:
        dist.all_reduce(torch.ones(4), group=group)  # HERE


def micro_batches(job: Job) -> None:
    """Rank 1 has a micro-batch more, and FSDP2 gathers for each."""
    from torch.distributed.fsdp import fully_shard

    layers = [torch.nn.Linear(8, 8) for _ in range(2)]
    model = torch.nn.Sequential(*layers)
    for layer in layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(STEPS):
        for _ in range(3 if job.rank == 1 and number == 1 else 2):
            model(torch.randn(4, 8)).sum().backward()  # HERE
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()


def starves(job: Job) -> None:
    """Two experts under FSDP2, of which rank 1 uses one: its reduction is shorter."""
    from torch.distributed.fsdp import fully_shard

    class Experts(torch.nn.Sequential):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            used = 1 if job.rank == 1 else 2
            return sum(self[number](tokens) for number in range(used))

    experts = fully_shard(Experts(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)))
    for _ in range(STEPS):
        experts(torch.randn(4, 8)).sum().backward()  # HERE


def splits(job: Job) -> None:
    """Rank 1 sends rank 0 a row more than rank 0 expects."""
    size = dist.get_world_size()
    sent = [2] * size
    if job.rank == 1:
        sent[0] += 1
    rows = torch.ones(sum(sent), 4)
    out = torch.empty(2 * size, 4)
    job.steps()
    dist.all_to_all_single(out, rows, [2] * size, sent)  # HERE
    dist.barrier()


def receives(job: Job) -> None:
    """Rank 0 receives what rank 1 sends only after a barrier of everyone."""
    job.steps()
    if job.rank == 0:
        dist.recv(torch.empty(4), 1)  # HERE
    dist.barrier()
    if job.rank == 1:
        dist.send(torch.ones(4), 0)


# ------------------------------------------------------------------------ one never comes


class Pipe(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Reads the last item from a pipe without a writer."""

    def __init__(self, blocks: bool) -> None:
        self.blocks = blocks

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.blocks and index == STEPS - 1:
            read, _ = os.pipe()
            os.read(read, 1)
        return torch.ones(4, 8)


def data_loader(job: Job) -> None:
    loader = torch.utils.data.DataLoader(Pipe(job.rank == 1), num_workers=1)
    for _ in loader:  # HERE
        job.step()


def endless(job: Job) -> None:
    job.steps()
    while job.rank == 1:  # HERE
        pass  # HERE
    job.step()


def stopped(job: Job) -> None:
    job.steps()
    if job.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)  # HERE
    job.step()


def holds_gil(job: Job) -> None:
    """A C extension that waits without releasing the interpreter lock."""
    job.steps()
    if job.rank == 1:
        ctypes.PyDLL(None).pause()  # HERE
    job.step()


# ------------------------------------------------------------------------ one dies


def killed(job: Job) -> None:
    job.steps()
    if job.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    job.step()


def out_of_memory(job: Job) -> None:
    """An allocation beyond a limit of the process."""
    job.steps()
    if job.rank == 1:
        resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
        bytearray(1 << 40)  # HERE
    job.step()


def oom_kill(job: Job) -> None:
    """The kernel's own killer. The group with the memory limit is the caller's to make."""
    job.steps()
    if job.rank == 1:
        with open(os.environ["VICTIM_CGROUP"], "w") as group:  # noqa: PTH123
            group.write(str(os.getpid()))
        bytearray(b"x") * (2 << 30)
    job.step()


def pauses(job: Job) -> None:
    """Rank 1 continues once a process writes to the FIFO."""
    job.steps()
    if job.rank == 1:
        with open(os.environ["VICTIM_FIFO"]) as fifo:  # noqa: PTH123
            fifo.read()
    job.steps()


def raises(job: Job) -> None:
    job.steps()
    if job.rank == 1:
        raise ValueError("the batch is empty")  # HERE
    job.step()


# ------------------------------------------------------------------------ they end, and agree not


def swallows(job: Job) -> None:
    """Rank 1 has fewer batches; the others ignore that DDP's reductions then fail."""
    model = DistributedDataParallel(torch.nn.Linear(8, 8))
    for _ in range(STEPS if job.rank == 1 else 2 * STEPS):
        with contextlib.suppress(RuntimeError):
            model(torch.randn(4, 8)).sum().backward()  # HERE


def alone() -> None:
    """Each rank trains a model of its own, because nobody created a process group."""
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()


def unmet() -> None:
    """Each rank has a part of the store of its own, so they never meet."""
    where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.PrefixStore(os.environ["RANK"], dist.TCPStore(*where, is_master=False))
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)


# ------------------------------------------------------------------------ nothing is wrong


def clean(job: Job) -> None:
    job.steps()


def late() -> None:
    """Rank 1 joins the others after the patience of its test."""
    if os.environ["RANK"] == "1":
        burn(6.0)
    dist.init_process_group("gloo")
    Job().steps()
    dist.destroy_process_group()


def comes_late() -> None:
    """Rank 1 waits for its test before it joins the others."""
    if os.environ["RANK"] == "1":
        pathlib.Path(os.environ["VICTIM_FIFO"]).read_text()  # HERE
    dist.init_process_group("gloo")
    Job().steps()
    dist.destroy_process_group()


def ends_late(job: Job) -> None:
    """A thread of rank 1, which is no daemon, waits for its test."""
    job.steps()
    if job.rank == 1:
        wait = pathlib.Path(os.environ["VICTIM_FIFO"]).read_text
        threading.Thread(target=lambda: wait(), name="uploader").start()  # HERE


def slow(job: Job) -> None:
    """Longer than the patience of its test in every step."""
    for _ in range(2):
        if job.rank == 1:
            burn(1.5)
        job.step()


def compiles(job: Job) -> None:
    """Longer than a rank that computes may take."""

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        burn(6.0)
        return graph.forward

    job.steps()
    if job.rank == 1:
        torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
    job.steps()


def until_told() -> Iterator[None]:
    """Yields, with pauses between, until a process makes the file VICTIM_END."""
    while not pathlib.Path(os.environ["VICTIM_END"]).exists():
        yield
        time.sleep(0.1)


def evaluates(job: Job) -> None:
    """Rank 1 alone evaluates the model inside its wrapper."""
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(8, 8)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
    with torch.no_grad():
        for _ in until_told() if job.rank == 1 else ():
            model.module(torch.randn(4, 8))
    job.step()


def tokenize(text: str) -> int:
    return sum(len(text.split()) for _ in until_told())


def tokenizes(job: Job) -> None:
    """Rank 1 alone waits for two child processes."""
    job.steps()
    if job.rank == 1:
        with multiprocessing.get_context("spawn").Pool(2) as pool:
            pool.map(tokenize, ["a few words"] * 2, chunksize=1)
    job.step()


def uploads(job: Job) -> None:
    """Rank 1 alone sends a few kB a second."""
    job.steps()
    if job.rank == 1:
        with socket.create_server(("127.0.0.1", 0)) as server:
            to = socket.create_connection(server.getsockname())
            with to, server.accept()[0] as there:
                for _ in until_told():
                    to.send(bytes(1000))
                    there.recv(1000)
    job.step()


def goes_on(job: Job) -> None:
    """Until it is ended; says when it trains, by a file."""
    job.steps()
    if job.rank == 0:
        pathlib.Path(sys.argv[2]).touch()
    while True:
        job.step()  # HERE


class SlowDisk(io.BytesIO):
    def write(self, data: object) -> int:
        burn(0.1)
        return super().write(data)  # type: ignore[arg-type]


def saves(job: Job) -> None:
    """A checkpoint that takes longer than a rank that computes may."""
    job.steps()
    if job.rank == 1:
        disk, began = SlowDisk(), time.process_time()
        while time.process_time() - began < 6.0:
            torch.save({"weights": [torch.ones(2)] * 100}, disk)
    job.steps()


def main() -> None:
    if without_a_group := {one.__name__: one for one in (alone, unmet, late, comes_late)}.get(
        sys.argv[1]
    ):
        without_a_group()
        return
    dist.init_process_group("gloo")
    globals()[sys.argv[1]](Job())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
