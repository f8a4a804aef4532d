"""Megatron-Core's tensor-parallel layers and gradient all-reduce on CPU: 2 x 2 ranks."""

import torch
import torch.distributed as dist
from megatron.core import ModelParallelConfig, parallel_state
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear


class Block(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        init = torch.nn.init.xavier_normal_
        self.up = ColumnParallelLinear(
            16, 32, config=config, init_method=init, bias=True, gather_output=False
        )
        self.down = RowParallelLinear(
            32,
            16,
            config=config,
            init_method=init,
            bias=True,
            input_is_parallel=True,
            skip_bias_add=False,
        )

    def forward(self, x):
        hidden, _ = self.up(x)
        out, _ = self.down(torch.relu(hidden))
        return x + out


def reduce_gradients(model):
    group = parallel_state.get_data_parallel_group()
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad, group=group)
            parameter.grad /= dist.get_world_size(group)


def evaluate(model):
    with torch.no_grad():
        return model(torch.ones(4, 16)).pow(2).mean()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    config = ModelParallelConfig(
        tensor_model_parallel_size=2, use_cpu_initialization=True, params_dtype=torch.float32
    )
    torch.manual_seed(0)
    model = torch.nn.Sequential(Block(config), Block(config))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    replica = parallel_state.get_data_parallel_rank()
    for step in range(12):
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(10 * step + replica))
        loss = model(x).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        reduce_gradients(model)
        optimizer.step()
        if step % 4 == 3:
            score = evaluate(model)
            if rank == 0:
                print(f"step {step}: loss {loss.item():.4f}, score {score.item():.4f}", flush=True)
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
