"""One rank of bench.check_memory: an ordinary training program, and the most that lived in a step.

    torchrun --nproc-per-node N -m bench.check_memory_rank ASKED.json

torch's own tracker counts real tensors in the second step; nothing of `moediag check` is used.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils import checkpoint


def main() -> int:
    asked = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = made(asked)
    model.train()
    options: dict[str, Any] = {"use_reentrant": False}
    if asked["recompute"] == "selective":
        kept = [torch.ops.aten.mm.default, torch.ops.aten.bmm.default]
        kept += [torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default]
        kept += [torch.ops.aten._grouped_mm.default]
        options["context_fn"] = partial(checkpoint.create_selective_checkpoint_contexts, kept)
    if asked["recompute"] != "none":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    step(model, optimizer, asked)
    tracker: Any
    if hasattr(model, "set_requires_gradient_sync"):
        tracker = FSDPMemTracker(model, optimizer)
    else:
        tracker = MemTracker()
        tracker.track_external(model, optimizer)
    with tracker:
        step(model, optimizer, asked)
    peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
    told = {getattr(kind, "value", kind): size for kind, size in peak.items()}
    (Path(asked["folder"]) / f"peak-{rank}.json").write_text(json.dumps(told))
    dist.barrier()
    dist.destroy_process_group()
    return 0


def made(asked: dict[str, Any]) -> Any:
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    config = CONFIG_MAPPING[asked["family"]](**asked["fields"])
    dtype = getattr(torch, asked["dtype"])
    if asked["arguments"]:
        from transformers.distributed import DistributedConfig

        if dist.get_rank() == 0:
            AutoModelForCausalLM.from_config(config).save_pretrained(asked["model"])
        dist.barrier()
        parts = DistributedConfig(**asked["arguments"])
        return AutoModelForCausalLM.from_pretrained(
            asked["model"], distributed_config=parts, dtype=dtype
        )
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def step(model: Any, optimizer: torch.optim.Optimizer, asked: dict[str, Any]) -> None:
    batches = torch.Generator().manual_seed(dist.get_rank())
    tokens = torch.randint(2, asked["vocab"], (asked["batch"], asked["length"]), generator=batches)
    optimizer.zero_grad()
    model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    optimizer.step()


if __name__ == "__main__":
    sys.exit(main())
