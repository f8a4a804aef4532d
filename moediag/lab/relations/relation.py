"""What a relation is: two ways to compute the same thing, and a second route that decides."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Dict, List, Optional, Sequence

import torch
from torch import nn

from moediag.lab.step.models import release_families, tiny_family
from moediag.lab.step.models.release_families import ReleaseFamily
from moediag.protocol import SIZES, VOCAB, Size
from moediag.protocol.tolerance import GRADIENT

Tensors = Dict[str, torch.Tensor]
EAGER = "eager"
ZERO = 1e-4  # of the largest value of all tensors
SAFE = 8  # the last token ids, which may be special


class Undecided(Exception):
    """Nothing can be said about this way; the text says why."""


@dataclass(frozen=True)
class Case:
    """One family at one size, seed and dtype. Everything built from it is the same each time."""

    family: ReleaseFamily
    size: Size = SIZES[0]
    seed: int = 0
    dtype: torch.dtype = torch.float32
    nudged: bool = False  # every weight is changed by one rounding
    earlier: str = ""  # folder with what the earlier release saved; "": there is none

    def model(self, train: bool = False, **settings: Any) -> nn.Module:
        """Returns a new model. ``settings``: for ``_from_config``."""
        if self.dtype is torch.float64 and many_experts(self.family):
            settings.setdefault("experts_implementation", EAGER)  # the default may refuse float64
        model = tiny_family.build(self.family, self.size, self.seed, **settings).to(self.dtype)
        if self.nudged:
            nudge(model, self.seed)
        return model.train(train)

    def config(self) -> Any:
        return tiny_family.configuration(self.family, self.size)

    def tokens(self, rows: int = 2, length: int = 12, name: int = 0) -> torch.Tensor:
        """Returns random tokens; ``name`` distinguishes different ones."""
        generator = torch.Generator().manual_seed(1000 * self.seed + name)
        return torch.randint(2, VOCAB - SAFE, (rows, length), generator=generator)


class Relation(ABC):
    """What must hold for every family. Each call builds its own models."""

    name = ""  # in kebab-case
    says = ""  # what must hold, in one sentence
    exact = False  # the same bytes; otherwise up to rounding
    floor = 1e-5  # the least tolerance, as a share of the largest value
    # What the second route is, in words; "": there is none, and nothing is confirmed.
    route = ""

    @abstractmethod
    def ways(self, case: Case) -> Sequence[str]:
        """Returns the ways to compare with the plain one. Raises NotApplicable."""

    @abstractmethod
    def plain(self, case: Case, way: str) -> Tensors:
        """Returns what is right."""

    @abstractmethod
    def other(self, case: Case, way: str) -> Tensors:
        """Returns the same computed in this way. Raises NotApplicable and Undecided."""

    def quantity(self, wrong: Sequence[str]) -> str:
        """Returns what differs if these tensors do, without what depends on the family. "": the
        name of the first."""
        return ""

    def second(self, case: Case, way: str, wrong: Sequence[str]) -> Optional[bool]:
        """Whether another route shows that ``way`` is wrong. ``wrong``: names of the tensors that
        differ, the worst first. None if it cannot say."""
        return None


def nudge(model: nn.Module, seed: int) -> None:
    """Changes each weight by one rounding of its dtype, up or down."""
    generator = torch.Generator().manual_seed(seed + 2)
    with torch.no_grad():
        for parameter in model.parameters():
            sign = torch.randint(0, 2, parameter.shape, generator=generator).to(parameter) * 2 - 1
            parameter.mul_(1 + sign * torch.finfo(parameter.dtype).eps)


def many_experts(family: ReleaseFamily) -> bool:
    """Whether its model has several implementations of the experts."""
    can = getattr(release_families.model_class(family), "_can_set_experts_implementation", None)
    return can is not None and bool(can())


def differ(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors differ by more than rounding can explain."""
    return float((one - other).abs().max()) > ZERO * float(one.abs().max())


def alike(one: torch.Tensor, other: torch.Tensor, least: float) -> bool:
    """Whether two tensors are the same up to rounding. ``least``: a difference that is none."""
    return torch.allclose(one, other, rtol=GRADIENT.floor, atol=least)


def gradients(model: nn.Module) -> Tensors:
    """Returns each parameter's gradient, zeros for one without."""
    return {
        f"gradient of {name}": torch.zeros_like(p) if p.grad is None else p.grad.detach().clone()
        for name, p in model.named_parameters()
    }


def accepts(model: Any, *names: str) -> List[str]:
    """Returns those of ``names`` that the model's forward names among its parameters."""
    import inspect

    known = inspect.signature(model.forward).parameters
    return [name for name in names if name in known]


def logits(model: Any, tokens: torch.Tensor, **inputs: Any) -> torch.Tensor:
    found: torch.Tensor = model(input_ids=tokens, use_cache=False, **inputs).logits
    return found
