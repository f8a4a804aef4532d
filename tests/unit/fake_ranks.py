"""One rank of a simulated world: meshes and DTensors without any other process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def fake_rank(rank: int, world_size: int) -> Iterator[None]:
    """torch's fake process group: collectives return at once and do nothing."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
