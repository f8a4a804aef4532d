"""Makes `.cuda()`, devices of a GPU, its backend and its settings do nothing, and random numbers
the same in each run. The first import of an adapted program."""

import os

import torch
import torch.distributed as dist

RANKS = int(os.environ.get("WORLD_SIZE", "1"))
DDP = torch.nn.parallel.DistributedDataParallel


def same(self, *_, **__):
    return self


def on_gpu(device):
    return "cuda" in str(device) if isinstance(device, (str, torch.device)) else type(device) is int


def moved(move):
    """``.to`` without the devices of a GPU."""

    def to(self, *where, **how):
        where = tuple(one for one in where if not on_gpu(one))
        how = {name: one for name, one in how.items() if name != "device" or not on_gpu(one)}
        return move(self, *where, **how) if where or how.keys() - {"non_blocking"} else self

    return to


def by_gloo(start):
    def started(*words, **more):
        words = ["gloo" if one == "nccl" else one for one in words]
        more = {name: "gloo" if one == "nccl" else one for name, one in more.items()}
        more.pop("device_id", None)
        return start(*words, **more)

    return started


def without_devices(build):
    def built(self, module, device_ids=None, output_device=None, **more):
        build(self, module, **more)

    return built


torch.manual_seed(1)
torch.Tensor.cuda = torch.nn.Module.cuda = same
torch.Tensor.to, torch.nn.Module.to = moved(torch.Tensor.to), moved(torch.nn.Module.to)
for name in ("set_device", "synchronize", "empty_cache", "max_memory_allocated", "manual_seed"):
    setattr(torch.cuda, name, lambda *_, **__: 0)
torch.cuda.device_count = lambda: RANKS
torch.cuda.current_device = lambda: "cpu"
dist.init_process_group = by_gloo(dist.init_process_group)
torch.nn.SyncBatchNorm.convert_sync_batchnorm = lambda module, *_: module  # needs a GPU
DDP.__init__ = without_devices(DDP.__init__)
