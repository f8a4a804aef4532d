"""The block of the tp-router program: its fixes as data, a look-alike in plain torch, and
torchtitan's own MoE with torchtitan's own parallelize plan."""

__all__ = ["look_alike", "plans", "titan", "titan_cpu"]
