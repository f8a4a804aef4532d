"""Runs programs one after the other in the same ranks, each recorded by ``moediag.laws``.

    python tests/victims/law_runs.py FOLDER RANKS NAME...

The ranks are forked after torch was imported; FOLDER/NAME has what ``moediag diagnose`` reads.
With ``MOEDIAG_TEST_BACKEND=nccl`` all ranks make their tensors on one GPU.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

import moediag.laws  # noqa: E402

BACKEND = os.environ.get("MOEDIAG_TEST_BACKEND", "gloo")


def victims(name: str) -> Any:
    """Imports programs, with ``cuda`` for each device that they name if the backend is NCCL."""
    if BACKEND == "gloo":
        return import_module(name)
    file = HERE / f"{name}.py"
    module = sys.modules[name] = ModuleType(name)
    source = file.read_text(encoding="utf-8").replace('"cpu"', '"cuda"')
    exec(compile(source, str(file), "exec", dont_inherit=True), module.__dict__)
    return module


healthy_jobs, law_jobs = victims("healthy_jobs"), victims("law_jobs")
model_jobs, premise_jobs = victims("model_jobs"), victims("premise_jobs")


class OnGpu(TorchFunctionMode):
    """Makes the tensors of programs that name no device on the GPU. What a generator of the CPU
    draws, such as the order of a sampler, stays on the CPU."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        given = kwargs.get("device") or kwargs.get("generator")
        if function in _device_constructors() and given is None:
            kwargs["device"] = "cuda"
        return function(*args, **kwargs)


def program(name: str, rank: int) -> Callable[[], None]:
    healthy: dict[str, Callable[[int], None]]
    healthy = healthy_jobs.PROGRAMS | premise_jobs.PROGRAMS | premise_jobs.OF_FOUR
    if name in healthy:
        return lambda: healthy[name](rank)
    if name in model_jobs.PROGRAMS:
        return lambda: model_jobs.PROGRAMS[name](name, rank)
    return lambda: law_jobs.PROGRAMS.get(name, law_jobs.train)(name, rank)


def run(folder: Path, rank: int, ranks: int, names: list[str]) -> None:
    torch.set_num_threads(1)
    meet = f"file://{folder.absolute() / 'meet'}"
    if BACKEND == "nccl":
        torch.cuda.set_device(0)
        OnGpu().__enter__()
    dist.init_process_group(BACKEND, init_method=meet, rank=rank, world_size=ranks)
    for name in names:
        try:
            with moediag.laws.recording(str(folder / name)):
                program(name, rank)()
        except Exception as error:  # the other programs still run
            os.write(2, f"{name}: rank {rank}: {error!r}\n".encode())
        dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    folder, ranks, names = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    folder.mkdir(parents=True, exist_ok=True)
    children = []
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                run(folder, rank, ranks, names)
                code = 0
            finally:
                sys.stderr.flush()
                os._exit(code)
        children.append(child)
    sys.exit(max(os.waitpid(child, 0)[1] for child in children) and 1)


if __name__ == "__main__":
    main()
