"""The plan of a small model, as `moediag check` computes it in a process of its own."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import transformers

from moediag.lab import check
from moediag.protocol import Checked, CheckTask, Trial, WrapperSpec

SMALL: dict[str, Any] = dict(
    vocab_size=64, hidden_size=32, intermediate_size=32, moe_intermediate_size=16,
    num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=8,
    num_experts_per_tok=2, decoder_sparse_step=1,
)  # fmt: skip


def checked(
    tmp_path: Path, layout: dict[str, int], wrapper: str = "fsdp2", length: int = 0,
    asked: dict[str, Any] | None = None, **changes: Any,
) -> Checked:  # fmt: skip
    """Returns the plan. No simulation: its backward needs a process that ran none before.
    ``asked``: other fields of the task."""
    config = transformers.Qwen3MoeConfig(**{**SMALL, **changes})
    config.save_pretrained(tmp_path / "model")
    folder = tmp_path / "out"
    folder.mkdir()
    trial = Trial(
        name="check", scenario="check", variant="check", layout=layout, record=False,
        task=CheckTask(str(tmp_path / "model"), simulate=False, length=length, **(asked or {})),
        world_size=math.prod(layout.values()), wrapper=WrapperSpec(kind=wrapper),
    )  # fmt: skip
    return check.run(trial, folder)
