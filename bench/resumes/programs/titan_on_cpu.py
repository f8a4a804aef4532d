"""Imports torchtitan for ranks without an accelerator, with a tokenizer and texts of its own."""

from __future__ import annotations

import random
import types
from dataclasses import dataclass
from typing import Any

import torch
import torch._utils

torch._utils._get_available_device_type = lambda: "cpu"
for name, answer in {
    "get_device_name": "cpu",
    "get_device_properties": types.SimpleNamespace(total_memory=1 << 33),
    "memory_stats": {},
    "reset_peak_memory_stats": None,
    "empty_cache": None,
}.items():
    setattr(torch.cpu, name, lambda *_, answer=answer: answer)

from datasets import Dataset  # noqa: E402
from torch.distributed.fsdp import FSDPModule  # noqa: E402
from torch.nn.attention import flex_attention as flex  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.distributed import utils as dist_utils  # noqa: E402
from torchtitan.hf_datasets import DatasetConfig  # noqa: E402
from torchtitan.hf_datasets.text_datasets import DATASETS  # noqa: E402
from torchtitan.models.common.attention import FlexAttention  # noqa: E402
from torchtitan.models.llama3.config_registry import llama3_debugmodel  # noqa: E402

# Compiled, its backward is for other devices only.
flex._validate_device = lambda *_: None
FlexAttention._compiled_flex_attn = staticmethod(flex.flex_attention)

_divide = FSDPModule.set_gradient_divide_factor


def _sum(self: Any, factor: float) -> None:
    """gloo only adds; the division follows."""
    self.set_force_sum_reduction_for_comms(True)
    _divide(self, factor)


FSDPModule.set_gradient_divide_factor = _sum
dist_utils.set_pg_timeouts = lambda **_: None  # its barrier names a device

LETTERS = "abcdefghijklmnopqrstuvwxyz "


class Letters(BaseTokenizer):
    """One token for each letter."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, **_: Any) -> None:
        super().__init__()
        self.eos_id, self.bos_id = 28, 29

    def encode(self, text: str, **_: Any) -> list[int]:
        return [LETTERS.index(letter) for letter in text]

    def decode(self, tokens: list[int], **_: Any) -> str:
        return "".join(LETTERS[token] for token in tokens)

    def get_vocab_size(self) -> int:
        return 32


def _texts(_path: str) -> Any:
    draw = random.Random(3)  # noqa: S311
    return Dataset.from_dict({"text": ["".join(draw.choices(LETTERS, k=90)) for _ in range(64)]})


DATASETS["letters"] = DatasetConfig("none", _texts, lambda sample: sample["text"])


def config(folder: str, steps: int, save_at: int, excluded: list[str]) -> Any:
    """torchtitan's debug model with two layers, on texts of letters."""
    found = llama3_debugmodel()
    del found.model_spec.model.layers[2:]
    found.dump_folder, found.tokenizer = folder, Letters.Config()
    found.dataloader.dataset = "letters"
    found.training.local_batch_size, found.training.seq_len = 2, 32
    found.training.steps, found.validator.enable = steps, False
    found.parallelism.spmd_backend = "partial_dtensor"  # the others need a newer torch
    found.debug.seed = 3
    found.checkpoint.enable, found.checkpoint.interval = True, save_at
    found.checkpoint.exclude_from_loading = excluded
    return found
