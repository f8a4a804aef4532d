"""The measured sizes, and how many layers of the large one fit. Pure."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from bench.speed import flops
from moediag.protocol import ModelSpec

# fp32 parameter, gradient and two moments of AdamW.
STATE = 16
BF16 = 2
FILL = (
    0.8  # share of the free memory that the large size plans for; fragments take some of the rest
)


@dataclass(frozen=True, slots=True)
class Size:
    """One size. ``rounds`` steps are timed after ``warmup`` steps; ``peak`` is the side of the
    square matrices whose product measures the device's peak."""

    name: str
    model: ModelSpec
    batch: int
    seq_len: int
    rounds: int
    warmup: int
    peak: int

    @property
    def tokens(self) -> int:
        return self.batch * self.seq_len

    @property
    def slots(self) -> int:
        """Returns the number of (token, expert) pairs in a layer."""
        return self.tokens * self.model.top_k


SIZES = {
    "tiny": Size("tiny", ModelSpec(), 1, 32, rounds=3, warmup=1, peak=256),
    # The only one whose activations batched_mm can hold: it copies the weights for every token.
    "small": Size(
        "small",
        ModelSpec(
            layers=4, hidden=512, intermediate=256, experts=16, top_k=2, heads=8, kv_heads=4,
            head_dim=64, vocab=8192,
        ),
        1, 1024, rounds=20, warmup=5, peak=8192,
    ),
    "mid": Size(
        "mid",
        ModelSpec(
            layers=8, hidden=1024, intermediate=512, experts=32, top_k=4, heads=16, kv_heads=4,
            head_dim=64, vocab=32768,
        ),
        4, 2048, rounds=20, warmup=5, peak=8192,
    ),
    # Qwen3-30B-A3B's layer, as many as fit, with a smaller vocabulary.
    "large": Size(
        "large",
        ModelSpec(
            layers=48, hidden=2048, intermediate=768, experts=128, top_k=8, heads=32, kv_heads=4,
            head_dim=128, vocab=32768,
        ),
        4, 4096, rounds=8, warmup=3, peak=8192,
    ),
}  # fmt: skip


def activations(model: ModelSpec, tokens: int) -> int:
    """Returns roughly the bytes that one layer keeps for backward: attention and norms in bf16 and
    fp32 hold about forty times the residual stream per token; the experts hold, per slot, input,
    gate and up, the product, the output and its weighted copy."""
    slot = BF16 * (3 * model.hidden + 4 * model.intermediate)
    return tokens * (40 * model.hidden + model.top_k * slot)


def planned_bytes(size: Size) -> int:
    """Returns roughly the bytes of training on one device: state, activations, logits in bf16 and
    twice in fp32, and three layers gathered in bf16."""
    model = size.model
    layer = (flops.parameters(model) - flops.parameters(_layers(model, 0))) // model.layers
    logits = size.tokens * model.vocab * (BF16 + 4 + 4)
    state = STATE * flops.parameters(model)
    kept = model.layers * activations(model, size.tokens)
    return state + kept + logits + 3 * BF16 * layer


def fitted(size: Size, free: int, ranks: int = 1) -> Size:
    """Returns ``size`` with as many layers (at least one) as fit ``free`` bytes of ``ranks``."""
    for layers in range(size.model.layers, 1, -1):
        one = dataclasses.replace(size, model=_layers(size.model, layers))
        if planned_bytes(one) * ranks <= FILL * free:
            return one
    return dataclasses.replace(size, model=_layers(size.model, 1))


def shorter(size: Size) -> Size:
    """Returns ``size`` with three quarters of the layers."""
    return dataclasses.replace(size, model=_layers(size.model, max(1, size.model.layers * 3 // 4)))


def batched_bytes(size: Size) -> int:
    """Returns the extra bytes of batched_mm: all matrices of an expert per slot, in bf16, and once
    more while backward computes their gradient in one layer."""
    matrices = 3 * size.model.hidden * size.model.intermediate
    return (size.model.layers + 2) * size.slots * matrices * BF16


def _layers(model: ModelSpec, layers: int) -> ModelSpec:
    return dataclasses.replace(model, layers=layers)
