"""accelerate's FSDP2 shards modules that ignored_modules names, if cpu_ram_efficient_loading is on.

Needs torch and accelerate, one process (torch's fake process group). Exit code 1 if it shows, 0 if
not.
"""

import os
import sys

import accelerate
import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
from accelerate.utils import DistributedType
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

os.environ.update(
    RANK="0", LOCAL_RANK="0", WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT="0"
)
os.environ.update(ACCELERATE_USE_FSDP="true", FSDP_VERSION="2")
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(8, 8)
        self.ignored = nn.Linear(8, 8)

    def forward(self, x):
        return self.ignored(self.dense(x))


def prepared(ram_efficient):
    """Returns the model after Accelerator.prepare, and the ignored weight's type."""
    model = nn.Sequential(Layer(), Layer())
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Layer"],
        cpu_ram_efficient_loading=ram_efficient,
        ignored_modules=[layer.ignored for layer in model],
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    # accelerate enters its FSDP path on GPUs only. After these lines, all is the released code.
    accelerator.state.distributed_type = DistributedType.FSDP
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, _ = accelerator.prepare(model, optimizer)
    return {name: hasattr(p, "placements") for name, p in model.named_parameters()}


print(f"accelerate {accelerate.__version__}, torch {torch.__version__}")
sharded = {}
for ram_efficient in (False, True):
    sharded[ram_efficient] = [n for n, s in prepared(ram_efficient).items() if s and "ignored" in n]
    print(f"cpu_ram_efficient_loading={ram_efficient}: sharded, ignored: {sharded[ram_efficient]}")
assert not sharded[False], "the control must hold"
sys.exit(1 if sharded[True] else 0)
