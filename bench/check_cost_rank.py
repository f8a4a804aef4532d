"""One rank of bench.check_cost: an ordinary training program, recorded, and what it holds.

    torchrun --nproc-per-node N -m bench.check_cost_rank ASKED.json
    python -m bench.check_cost_rank ASKED.json --save

It uses nothing of `moediag check`: it calls fully_shard or from_pretrained as a user does.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

STEPS = 3
ROWS, LENGTH = 2, 16  # tokens of a batch


def main() -> int:
    asked = json.loads(Path(sys.argv[1]).read_text())
    if "--save" in sys.argv:
        return save(asked)
    folder = Path(asked["folder"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    from moediag.recorder import install

    rank, world = dist.get_rank(), dist.get_world_size()
    recorder = install(str(folder), rank, world)
    torch.manual_seed(0)
    model = by_release(asked) if asked["wrapper"] == "transformers" else by_hand(asked)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    batches = torch.Generator().manual_seed(rank // asked["tp"])  # ranks of tp share a batch
    for step in range(1, STEPS + 1):
        recorder.set_step(step)
        tokens = torch.randint(2, asked["vocab"], (ROWS, LENGTH), generator=batches)
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        optimizer.step()
    held = held_by(model, optimizer)
    recorder.finish()
    (folder / f"held-{rank}.json").write_text(json.dumps(held))
    dist.barrier()
    dist.destroy_process_group()
    return 0


def save(asked: dict[str, Any]) -> int:
    """Saves the model that all ranks load."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    torch.manual_seed(0)
    config = CONFIG_MAPPING[asked["family"]](**asked["fields"])
    AutoModelForCausalLM.from_config(config).save_pretrained(asked["model"])
    return 0


def by_release(asked: dict[str, Any]) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    config = DistributedConfig(**asked["arguments"])
    return AutoModelForCausalLM.from_pretrained(
        asked["model"], distributed_config=config, dtype=torch.float32
    )


def by_hand(asked: dict[str, Any]) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(asked["model"], dtype=torch.float32)
    layout = asked["layout"]
    mesh = init_device_mesh("cpu", tuple(layout.values()), mesh_dim_names=tuple(layout))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def held_by(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Returns the bytes of this rank, and the elements of each parameter."""
    parameters = list(model.parameters())
    states = [v for p in parameters for v in optimizer.state[p].values() if torch.is_tensor(v)]
    return {
        "parameters": sum(map(_bytes, parameters)),
        "gradients": sum(_bytes(p.grad) for p in parameters if p.grad is not None),
        "optimizer": sum(map(_bytes, states)),
        "elements": {
            re.sub(r"\.\d+(?=\.)", ".*", name): _local(p).numel()
            for name, p in model.named_parameters()
        },
    }


def _local(tensor: Any) -> torch.Tensor:
    found: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found


def _bytes(tensor: Any) -> int:
    return int(_local(tensor).nbytes)


if __name__ == "__main__":
    sys.exit(main())
