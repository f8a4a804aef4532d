"""Makes `.cuda()` and the settings of a GPU do nothing, and random numbers the same in each run.
The first import of an adapted program."""

import torch


def same(self, *_, **__):
    return self


torch.manual_seed(1)
torch.Tensor.cuda = torch.nn.Module.cuda = same
for name in ("set_device", "synchronize", "empty_cache", "max_memory_allocated"):
    setattr(torch.cuda, name, lambda *_, **__: None)
