"""A small language model with the interface of transformers, and failures that can be planted."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.checkpoint import checkpoint

from moediag.lab.relations.relation import Case, nudge
from moediag.lab.step.models.release_families import ReleaseFamily
from moediag.protocol import VOCAB

WIDTH, HEADS, LONGEST = 16, 2, 64


class Layer(nn.Module):
    """Causal attention with a residual connection."""

    def __init__(self, implementation: str, faults: frozenset[str]) -> None:
        super().__init__()
        self.implementation, self.faults = implementation, faults
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(
        self, hidden: torch.Tensor, seen: torch.Tensor, before: Any
    ) -> tuple[torch.Tensor, Any]:
        rows, length, _ = hidden.shape
        if "recomputed" in self.faults and torch._C._current_graph_task_id() >= 0:
            hidden = hidden * 2
        query, key, value = self.qkv(hidden).view(rows, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        if before is not None:
            if "cache" in self.faults:
                before = before[0].flip(2), before[1]
            key, value = torch.cat([before[0], key], 2), torch.cat([before[1], value], 2)
        if self.implementation == "sdpa":
            scale = (1.1 if "sdpa" in self.faults else 1.0) / math.sqrt(query.shape[-1])
            mixed = nn.functional.scaled_dot_product_attention(
                query, key, value, seen[:, None], scale=scale
            )
        else:
            scores = query @ key.transpose(2, 3) / math.sqrt(query.shape[-1])
            mixed = scores.masked_fill(~seen[:, None], -1e9).softmax(-1) @ value
        out = self.out(mixed.transpose(1, 2).reshape(hidden.shape))
        if "unreached" in self.faults:
            out = out.detach()
        return hidden + out, (key, value)


class Output(SimpleNamespace):
    def __getitem__(self, index: int) -> torch.Tensor:
        found: torch.Tensor = (self.logits, self.past_key_values)[index]
        return found


class Config(SimpleNamespace):
    def __init__(self, faults: frozenset[str] = frozenset()) -> None:
        pattern = "layers.*" if "plan" in faults else "layer.qkv"
        super().__init__(
            faults=faults, router_aux_loss_coef=0.001, base_model_tp_plan={pattern: "colwise"}
        )

    def get_text_config(self) -> Config:
        return self

    def to_json_string(self) -> str:
        return "{}"


class Planted(nn.Module):
    _supports_sdpa = True
    _no_split_modules = ("Layer",)
    supports_gradient_checkpointing = True
    config_class = Config

    def __init__(
        self, faults: frozenset[str], seed: int = 0, attention: str = "eager", experts: str = ""
    ) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.faults = faults
        self.wrong = experts in faults or ("compiled" in faults and "while compiled")
        self.config = Config(faults)
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.places = nn.Embedding(LONGEST, WIDTH)
        self.layer = Layer(attention, faults)
        self.head = nn.Linear(WIDTH, VOCAB)
        self.checkpointing: dict[str, bool] | None = None
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(0.5 * torch.randn(parameter.shape))

    @property
    def base_model(self) -> nn.Module:
        return self

    @property
    def dtype(self) -> torch.dtype:
        return self.head.weight.dtype

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return True

    @classmethod
    def _from_config(cls, config: Any) -> Planted:
        return cls(config.faults)

    def save_pretrained(self, folder: str, max_shard_size: str = "") -> None:
        Path(folder).mkdir(exist_ok=True)
        state = {name: tensor.clone() for name, tensor in self.state_dict().items()}
        if "not saved" in self.faults:
            del state["head.bias"]
        halves = (dict(list(state.items())[::2]), dict(list(state.items())[1::2]))
        for number, part in enumerate(halves if max_shard_size else (state,)):
            save_file(part, Path(folder, f"model-{number}.safetensors"))
        Path(folder, "faults").write_text(",".join(self.faults))

    @classmethod
    def from_pretrained(
        cls, folder: str, output_loading_info: bool = False, config: Any = None, **dtype: Any
    ) -> Any:
        faults = Path(folder, "faults").read_text().split(",")
        model = cls(frozenset(faults), seed=99).to(*dtype.values())
        state = {n: t for f in Path(folder).glob("*.safetensors") for n, t in load_file(f).items()}
        report = model.load_state_dict(state, strict=False)
        if "loaded wrong" in model.faults:
            model.head.bias.data += 1
        if "kept wide" in model.faults:
            model.layer.qkv.bias.data = model.layer.qkv.bias.float()
        model.layer.qkv.bias.requires_grad_("frozen" not in model.faults)
        return (model, report._asdict()) if output_loading_info else model

    def get_input_embeddings(self) -> nn.Module:
        return self.tokens

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict[str, bool]) -> None:
        self.checkpointing = gradient_checkpointing_kwargs

    def enable_input_require_grads(self) -> None:
        self.tokens.register_forward_hook(lambda _m, _i, output: output.requires_grad_())

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Any = None,
        labels: torch.Tensor | None = None,
        use_cache: bool = False,
        output_router_logits: bool = False,
        **more: Any,
    ) -> Any:
        rows, length = input_ids.shape
        past = 0 if past_key_values is None else past_key_values[0].shape[2]
        if position_ids is None:
            position_ids = torch.arange(past, past + length).expand(rows, -1)
        seen = self._seen(position_ids, past, attention_mask)
        hidden = self.tokens(input_ids) + self.places(position_ids)
        if "rows" in self.faults:
            hidden = hidden + hidden.mean(0)
        if "later" in self.faults:
            hidden = hidden + hidden.mean(1, keepdim=True)
        if self.checkpointing is not None:
            hidden, cache = checkpoint(self.layer, hidden, seen, None, **self.checkpointing)
        else:
            hidden, cache = self.layer(hidden, seen, past_key_values)
        if "gradient" in self.faults and hidden.requires_grad:
            hidden.register_hook(lambda gradient: 1.5 * gradient)
        logits = self.head(hidden)
        if self.wrong is True or (self.wrong and torch.compiler.is_compiling()):
            logits = logits * 1.5
        auxiliary = hidden.square().mean() if output_router_logits else None
        loss = None
        if labels is not None:
            loss = self._loss(logits, labels, more.get("num_items_in_batch"))
            if auxiliary is not None:
                share = 1.0
                if "num_items_in_batch" in more and "auxiliary" not in self.faults:
                    share = labels[:, 1:].numel() / float(more["num_items_in_batch"])
                loss = loss + self.config.router_aux_loss_coef * share * auxiliary
        return Output(logits=logits, loss=loss, past_key_values=cache, aux_loss=auxiliary)

    def _seen(self, positions: torch.Tensor, past: int, mask: torch.Tensor | None) -> torch.Tensor:
        """Returns which earlier tokens each token attends to: those of its own document."""
        rows, length = positions.shape
        order = torch.arange(past + length)
        seen = (order[past:, None] >= order[None]).expand(rows, -1, -1)
        if mask is not None and "mask" not in self.faults:
            seen = seen & mask[:, None].bool()
        if past == 0 and mask is None and "documents" not in self.faults:
            document = (positions == 0).cumsum(1)
            seen = seen & (document[:, :, None] == document[:, None])
        # A padded token sees itself: a softmax over nothing is not a number.
        return seen | (order[past:, None] == order[None])

    def _loss(
        self, logits: torch.Tensor, labels: torch.Tensor, items: torch.Tensor | None
    ) -> torch.Tensor:
        flat, wanted = logits[:, :-1].reshape(-1, VOCAB), labels[:, 1:].reshape(-1)
        if items is None or "items" in self.faults:
            return nn.functional.cross_entropy(flat, wanted)
        return nn.functional.cross_entropy(flat, wanted, reduction="sum") / items


@dataclass(frozen=True)
class PlantedCase(Case):
    """A case of :class:`Planted` with these failures."""

    faults: frozenset[str] = frozenset()

    def model(self, train: bool = False, **settings: Any) -> nn.Module:
        attention = settings.get("attn_implementation", "eager")
        experts = settings.get("experts_implementation", "")
        model = Planted(self.faults, self.seed, attention, experts).to(self.dtype)
        if self.nudged:
            nudge(model, self.seed)
        return model.train(train)

    def config(self) -> Any:
        return Config(self.faults)


class Configured:
    """Stands for the configuration's class of a model with these faults."""

    def __init__(self, faults: frozenset[str]) -> None:
        self.faults = faults

    def __call__(self) -> Config:
        return Config(self.faults)

    def from_pretrained(self, folder: str) -> Config:
        return Config(self.faults)


def case(*faults: str) -> Case:
    """Needs ``release_families.model_class`` to return :class:`Planted`."""
    return PlantedCase(
        ReleaseFamily("planted", Configured(frozenset(faults)), "Planted"),
        faults=frozenset(faults),
    )
