"""Compares every family's loss and gradients with the Triton experts and with its eager loop, in
one process; run in an environment of transformers >= 5 with triton, TRITON_INTERPRET set. Prints
one JSON object."""

from __future__ import annotations

import json
from typing import Any

import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from moediag.lab.families import FAMILIES
from moediag.lab.step import kernels
from moediag.lab.step.kernels import experts
from moediag.lab.step.models import tiny
from moediag.protocol import ModelSpec

calls = 0


def counted(*arguments: Any) -> torch.Tensor:
    global calls
    calls += 1
    return experts.forward(*arguments)


def trained(family: str, kernel: str) -> tuple[torch.Tensor, dict[str, Any]]:
    model: Any = tiny.build(ModelSpec(family=family), 0, experts=kernel)
    tokens = torch.arange(24).view(1, 24)
    mask = torch.ones_like(tokens)
    logits = model(input_ids=tokens, attention_mask=mask).logits.float()
    logits.square().mean().backward()
    return logits.detach(), {n: p.grad for n, p in model.named_parameters()}


def main() -> None:
    global calls
    kernels.register()
    ALL_EXPERTS_FUNCTIONS.register(kernels.NAME, counted)
    found = {}
    for family in FAMILIES:
        calls = 0
        right, gradients = trained(family, "eager")
        logits, others = trained(family, kernels.NAME)
        apart = [float((logits - right).abs().max() / right.abs().max())]
        largest = max(float(g.abs().max()) for g in gradients.values() if g is not None)
        for name, gradient in gradients.items():
            other = others[name]
            # The loop leaves an expert without tokens zeros as well: it is a row of one parameter.
            assert (gradient is None) == (other is None), (family, name)
            if gradient is not None:
                apart.append(float((other - gradient).abs().max()) / largest)
        found[family] = {"calls": calls, "apart": max(apart)}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
