"""A trainer enables the auxiliary loss only if a guard recognises a model with experts.

Each configuration class of the installed release with experts is examined. A guard that does not
recognise one silently disables its auxiliary loss: the loss's part of the router's gradient is then
missing, and nothing else. Ranks share the classes between them.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional, Tuple

import torch
import torch.distributed as dist
from torch import nn

from moediag.lab.step.collector import Collector, versions
from moediag.lab.step.models import moe_configs, tiny_family
from moediag.lab.step.models.moe_configs import Found
from moediag.lab.step.models.release_families import ReleaseFamily
from moediag.protocol import SIZES, GradientError, OutcomeTable
from moediag.recorder.step.tensor_error import Tolerance

OPTIONS: Dict[str, Any] = {
    # The field of a configuration by which a trainer recognises a mixture of experts.
    "guard": (
        "always",
        "num_experts",
        "num_local_experts",
        "n_routed_experts",
        "any",
        "any-in-text-config",
        "own-switch",
    ),
}

THREE = ("num_experts", "num_local_experts", "n_routed_experts")
SWITCH = "output_router_logits"
NOTE = "each class is a tiny model with random weights, and its auxiliary loss counts fully"
Gradients = Dict[str, torch.Tensor]


def _names(*fields: str) -> Callable[[Any], List[Any]]:
    def guard(config: Any) -> List[Any]:
        return [config] if any(getattr(config, field, 0) for field in fields) else []

    return guard


def _in_text(config: Any) -> List[Any]:
    return _names(*THREE)(moe_configs.text_of(config))


def _own_switch(config: Any) -> List[Any]:
    text = moe_configs.text_of(config)
    return [part for part in (config, text) if hasattr(part, SWITCH)]


# Guard -> the parts of a configuration whose switch it enables.
GUARDS: Dict[str, Callable[[Any], List[Any]]] = {
    **{field: _names(field) for field in THREE},
    "any": _names(*THREE),
    "any-in-text-config": _in_text,
    "own-switch": _own_switch,
}
# The same as columns of a table.
SHORT = ("num", "local", "routed", "any", "text", "switch")
KEY = (
    "gradient: largest element of a router's gradient that comes from the loss alone. on: it is "
    "there with this guard; OFF: it is not. Guards: num_experts, num_local_experts, "
    "n_routed_experts, any of the three, any of the three in the text model's part, and the "
    "configuration's own output_router_logits, where it has one."
)


def run(collector: Collector) -> None:
    """Compares ``guard`` with an enabled loss wherever there is one; ``always`` enables it without
    a check and writes the tables."""
    guard, rank = collector.options["guard"], collector.rank
    # Only the tables need classes without a loss.
    found = list(moe_configs.find(with_loss=guard != "always"))[rank :: collector.trial.world_size]
    measured = {one.name: Measured(one) for one in found if one.has_loss and one.model is not None}
    gradients: Dict[str, GradientError] = {}
    for name, seen in measured.items():
        errors = {} if not seen.proven else seen.errors(guard)
        gradients.update({f"{name}: {fqn}": error for fqn, error in errors.items()})
    tables = _tables(found, measured) if guard == "always" else []
    dist.barrier()
    collector.note(NOTE)
    collector.set(gradients={"1": gradients}, steps_done=1, tables=tables)


class Measured:
    """One class: the gradient of its routers with and without the auxiliary loss.

    ``share``: FQN -> the loss's part of the gradient (only of routers, and only if not zero).
    ``why_not``: why it could not be measured, else "".
    """

    def __init__(self, found: Found) -> None:
        self.share: Gradients = {}
        self.why_not = ""
        self.found = found
        try:
            self._model: Any = build(found)
            self._with, self._without = self.gradients(True), self.gradients(False)
        except Exception as error:
            # Hundreds of classes have requirements of their own. Those that a tiny configuration
            # does not meet are listed in the table, and not judged.
            self.why_not = f"{type(error).__name__}: {str(error).splitlines()[0][:80]}"
            return
        for fqn, gradient in self._with.items():
            alone = gradient - self._without.get(fqn, torch.zeros_like(gradient))
            if _of_router(fqn) and float(alone.abs().max()) > 1e-9:
                self.share[fqn] = alone
        if not self.share:
            self.why_not = "no router has a gradient from it"

    @property
    def proven(self) -> bool:
        return bool(self.share)

    @property
    def largest(self) -> Optional[float]:
        """Returns the loss's largest element in a router's gradient; None if not measured."""
        return max((float(g.abs().max()) for g in self.share.values()), default=None)

    def gradients(self, on: bool, own: bool = False, text: bool = False) -> Gradients:
        """Returns the gradients of one forward and backward with labels. ``on``: the loss is
        enabled in every possible way; else by the switches of the configuration's ``own`` and of
        its text model's part."""
        model: nn.Module = self._model
        config: Any = self._model.config
        setattr(config, SWITCH, on or own)
        if moe_configs.text_of(config) is not config:
            setattr(moe_configs.text_of(config), SWITCH, on or text)
        ids = torch.randint(3, 60, (1, 16), generator=torch.Generator().manual_seed(1))
        asked = {SWITCH: True} if on else {}
        model.zero_grad()
        torch.manual_seed(1)  # same dropout and jitter each time
        out = self._model(
            input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids, use_cache=False, **asked
        )
        out.loss.backward()
        named = model.named_parameters()
        return {fqn: p.grad.clone() for fqn, p in named if p.grad is not None}

    def errors(self, guard: str) -> Dict[str, GradientError]:
        """Returns errors of the routers' gradients under ``guard`` or ``always``."""
        found = self._with if guard == "always" else self._guarded(guard)
        tolerance = Tolerance.of("float32", self.share.values())
        return {
            fqn: tolerance.judge(found.get(fqn), self._with[fqn], float(alone.abs().max()))
            for fqn, alone in self.share.items()
        }

    def answer(self, guard: str) -> str:
        return "OFF" if any(e.wrong for e in self.errors(guard).values()) else "on"

    def _guarded(self, guard: str) -> Gradients:
        # A new one, as released: the model's switch is already set.
        config = configuration(self.found)
        parts = GUARDS[guard](config)
        text = moe_configs.text_of(config)
        own = any(part is config for part in parts)
        return self.gradients(False, own, any(part is text for part in parts))


def configuration(found: Found) -> Any:
    """Returns a tiny configuration with full auxiliary losses. Raises NotBuilt."""
    assert found.model is not None
    family = ReleaseFamily(found.name, found.config, found.model.__name__)
    config = tiny_family.configuration(family, SIZES[0])
    for part in (config, moe_configs.text_of(config)):
        part.use_cache = False
        for name in [n for n in vars(part) if n.endswith("aux_loss_coef")]:
            setattr(part, name, 1.0)
    return config


def build(found: Found, seed: int = 0) -> nn.Module:
    """Returns the model in training mode. Raises what the class raises."""
    assert found.model is not None
    torch.manual_seed(seed)
    model: nn.Module = found.model(configuration(found))
    return model.train()


def _of_router(fqn: str) -> bool:
    return "router" in fqn or "gate." in fqn or fqn.endswith("gate")


def _tables(found: List[Found], measured: Dict[str, Measured]) -> List[OutcomeTable]:
    release = f"transformers {versions().get('transformers')}"
    judged: List[List[Any]] = []
    rest: List[List[Any]] = []
    for one in found:
        named, seen = _where_named(one), measured.get(one.name)
        if seen is not None and seen.proven:
            judged.append([one.name, named, seen.largest, *map(seen.answer, GUARDS)])
        else:
            why = seen.why_not if seen is not None else "no auxiliary loss"
            if one.has_loss and one.model is None:
                why = "a part of another class"
            rest.append([one.name, named, why])
    head = ["class", "experts named by"]
    return [
        OutcomeTable(
            f"Auxiliary loss under each guard, {release}", [*head, "gradient", *SHORT], judged, KEY
        ),
        OutcomeTable(f"Classes that no guard was tried on, {release}", [*head, "why"], rest),
    ]


def _where_named(one: Found) -> str:
    made = one.config()
    own: Tuple[str, ...] = tuple(moe_configs.experts_named(made))
    parts = [
        f"{name}.{field}"
        for name, value in vars(made).items()
        if hasattr(value, "model_type")
        for field in moe_configs.experts_named(value)
    ]
    return ", ".join([*own, *parts])
