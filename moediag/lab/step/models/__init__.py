"""Tiny models of each MoE family: built, saved, loaded, and with their routing skewed."""

__all__ = ["checkpoint", "moe_configs", "pretrain", "rerouted", "skew", "tiny"]
