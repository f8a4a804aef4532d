"""Backend, launcher and environment variables of CPU and GPU launches. Pure."""

from __future__ import annotations

from moediag.records import dataclass

SHARED = "shared-gpu"  # several ranks on one GPU: gloo, which accepts CUDA tensors
SHARED_NCCL = "shared-gpu-nccl"  # the same with NCCL, if it allows that
_NCCL_SHARES_FROM = (2, 30)  # the first release in which ranks may share a GPU
FLIGHT_RECORDER = 20_000  # entries; torch's default is 2,000


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of device that ranks run on."""

    backend: str
    launcher: str  # used for ``auto``
    shared: bool = False


DEVICES = {
    "cpu": Kind("gloo", "fork"),
    "gpu": Kind("nccl", "torchrun"),
    SHARED: Kind("gloo", "torchrun", shared=True),
    SHARED_NCCL: Kind("nccl", "torchrun", shared=True),
}


def options(device: str, ranks: int) -> list[str]:
    """Returns the options for ``ranks`` on ``device``: ``--gpus 2 --share-gpu``."""
    return ["--cpu" if device == "cpu" else "--gpus", str(ranks), *["--share-gpu"] * shares(device)]


def shared(nccl: str | None) -> str:
    """Returns the device of ranks that share GPUs. ``nccl``: its version, None if unknown."""
    release = tuple(int(part) for part in (nccl or "").split(".")[:2] if part.isdigit())
    return SHARED_NCCL if release >= _NCCL_SHARES_FROM else SHARED


def shares(device: str) -> bool:
    """Whether several ranks compute on one GPU."""
    return DEVICES[device].shared


def environment(kind: Kind, timeout: float) -> dict[str, str]:
    """Returns the environment variables of a rank. ``timeout`` is the launch's, in seconds.

    The Flight Recorder is large enough and is dumped when a collective times out; torch names
    ranks that fell behind; an error ends the process instead of leaving it in a broken
    communicator. torch's own watchdog fires last, so that the ranks still exist when evidence is
    collected."""
    if kind.backend != "nccl":
        return {}
    longest = str(round(2 * timeout))
    found = {
        "TORCH_FR_BUFFER_SIZE": str(FLIGHT_RECORDER),
        "TORCH_NCCL_TRACE_BUFFER_SIZE": str(FLIGHT_RECORDER),  # its name until torch 2.8
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_NCCL_DESYNC_DEBUG": "1",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": longest,
    }
    if kind.shared:
        found["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    return found
