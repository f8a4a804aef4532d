"""Counts the floating-point operations of one token of a Qwen3-MoE, from its sizes.

A multiplication and an addition are two. This counts the matrix products of the forward pass, with
the experts a token is sent to and no others, and the whole square of attention (as PaLM's
utilisation does, although a causal kernel leaves half of it out). Not counted: embeddings,
norms, softmax, activations, sorting, the optimizer. Backward is twice forward, so a step is three
times forward; what a fix computes for nothing makes a step longer, not its count higher.
"""

from __future__ import annotations

from moediag.protocol import ModelSpec

STEP = 3  # forward and backward, in forwards


def forward(model: ModelSpec, seq_len: int) -> dict[str, int]:
    """Returns operations per token, by part of the model."""
    hidden, heads, layers = model.hidden, model.heads * model.head_dim, model.layers
    keys = model.kv_heads * model.head_dim
    return {
        "projections": layers * 2 * hidden * (2 * heads + 2 * keys),  # q and o, k and v
        "attention": layers * 2 * 2 * seq_len * heads,  # scores, and values by scores
        "router": layers * 2 * hidden * model.experts,
        "experts": layers * model.top_k * 2 * 3 * hidden * model.intermediate,  # gate, up, down
        "head": 2 * hidden * model.vocab,
    }


def step(model: ModelSpec, batch: int, seq_len: int) -> int:
    """Returns the operations of one training step on ``batch`` sequences."""
    return STEP * batch * seq_len * sum(forward(model, seq_len).values())


def experts(model: ModelSpec, tokens: int) -> int:
    """Returns the operations of the experts of one layer for ``tokens``, forward and backward."""
    return STEP * tokens * model.top_k * 2 * 3 * model.hidden * model.intermediate


def parameters(model: ModelSpec) -> int:
    """Returns the number of parameters, with separate input and output embeddings and norms."""
    hidden, heads = model.hidden, model.heads * model.head_dim
    keys = model.kv_heads * model.head_dim
    attention = hidden * (2 * heads + 2 * keys) + 2 * model.head_dim
    experts = model.experts * 3 * hidden * model.intermediate
    layer = attention + experts + hidden * model.experts + 2 * hidden
    return model.layers * layer + 2 * model.vocab * hidden + hidden
