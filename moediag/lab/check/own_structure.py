"""What the user's own routing does: a forward of a tiny model that keeps it, and arithmetic.

Only widths and depth shrink. The same tiny model with other routing ran before, so an exception
here comes from the configuration's own experts, choices and groups.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from pathlib import Path
from typing import Any, Dict, Iterator, List, Tuple

import torch

from moediag.lab.check import configured as reading
from moediag.lab.check.configured import Configured
from moediag.lab.check.plan_rules import PLAN
from moediag.lab.check.simulated_group import ChildRaised, in_child
from moediag.lab.check.tensor_places import listed
from moediag.lab.step.models import field_rules, moe_configs, tiny_family
from moediag.lab.step.models.plan_names import generic
from moediag.protocol import FAILS, NOTE, SIZES, VOCAB, CheckFinding

FORWARD = "forward"
_GROUPS = re.compile(r"^(n_group|topk_group|num_expert_group|norm_topk_prob)$")
_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
_TOKENS = 2, 32  # of the forward
_BIAS = re.compile(r"(correction_bias|expert_bias|router_bias)$")


def findings(configured: Configured, notes: bool = True) -> Iterator[CheckFinding]:
    """What the configuration itself says."""
    yield from _capacity(configured)
    if notes:
        yield from _never_updated(configured)


def of_forward(configured: Configured, folder: Path) -> List[CheckFinding]:
    """Runs one forward and backward with the configuration's own routing, in one process."""
    family = configured.family
    if family is None or not configured.experts:
        return []

    def step() -> None:
        config = tiny_family.configuration(family, SIZES[0])
        kept = _routing(configured.text, config.get_text_config())
        for name, value in kept.items():
            setattr(config.get_text_config(), name, value)
        told = ", ".join(f"{name}={value}" for name, value in kept.items())
        asked.write_text(told, encoding="utf-8")
        torch.set_num_threads(1)
        model: Any = reading.of_config(config).build(True).float()
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(2, VOCAB - 8, _TOKENS, generator=generator)
        model(input_ids=tokens, labels=tokens).loss.backward()

    asked = folder / "own-routing"
    try:
        in_child(step, folder)
    except ChildRaised as error:
        why = error.args[0]
        if not why.kind or not asked.is_file():
            return []
        text = (
            f"a forward raises {why.words}, with this configuration's "
            f"{asked.read_text(encoding='utf-8')} (tiny model of the same class, one process)"
        )
        return [CheckFinding(FORWARD, FAILS, text, why.where)]
    return []


def _routing(own: Any, tiny: Any) -> Dict[str, Any]:
    """Returns the user's experts, choices and groups."""
    return {
        name: value for name, value in vars(own).items()
        if type(value) in (int, bool) and hasattr(tiny, name)
        and (moe_configs.counts_experts(name) or field_rules.counts_top_k(name)
             or _GROUPS.search(name))
    }  # fmt: skip


def defaults(configured: Configured) -> Iterator[str]:
    """Sizes that config.json leaves to the class, so that nothing of the user's was read."""
    try:
        raw = json.loads((configured.folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return
    given = {name for part in (raw, *raw.values()) if isinstance(part, dict) for name in part}
    mapped = getattr(configured.text, "attribute_map", None) or {}
    absent = [
        name for name in _SIZES
        if not {name, mapped.get(name, name)} & given
        and type(moe_configs.value(configured.text, name)) is int
    ]  # fmt: skip
    if absent:
        taken = ", ".join(f"{name}={getattr(configured.text, name):,}" for name in absent)
        yield (
            f"your {listed(absent)}: config.json does not give them, and the plan uses the "
            f"defaults of the class ({taken})"
        )


def _capacity(configured: Configured) -> Iterator[CheckFinding]:
    """Groups that do not divide the experts, or have fewer of them than each token chooses."""
    experts, top_k = configured.experts, configured.top_k
    groups, chosen = (moe_configs.value(configured.text, n) for n in ("n_group", "topk_group"))
    if type(groups) is not int or type(chosen) is not int or not 0 < chosen <= groups > 1:
        return
    if "topk_group" not in _source(configured.model):
        return
    allowed = chosen * experts // groups
    if experts % groups:
        yield CheckFinding(
            PLAN, FAILS, f"{experts} experts cannot be divided into n_group={groups} equal groups: "
            "the view by groups raises, or mixes the scores of tokens",
        )  # fmt: skip
    elif top_k > allowed:
        yield CheckFinding(
            PLAN, FAILS, f"topk_group={chosen} of n_group={groups} groups have {allowed} of "
            f"{experts} experts, and each token chooses {top_k}: {top_k - allowed} of its experts "
            "are of groups that were masked",
        )  # fmt: skip


def _never_updated(configured: Configured) -> Iterator[CheckFinding]:
    """Routing biases without a gradient, which only a training program can update."""
    try:
        with torch.device("meta"):
            model = configured.build(True)
    except Exception:  # the plan says what the class raises
        return
    source = _source(configured.model)
    held: List[Tuple[str, Any]] = [*model.named_buffers()]
    held += [(n, p) for n, p in model.named_parameters() if not p.requires_grad]
    names = sorted({generic(name) for name, _ in held if _BIAS.search(name)})
    changed = (
        rf"{name.rpartition('.')[2]}(\.data)?(\.(add|sub|copy)_\(|\s*[+-]=)" for name in names
    )
    if names and not any(re.search(change, source) for change in changed):
        yield CheckFinding(
            PLAN, NOTE, f"{listed(names)}: no gradient, and nothing in the release updates it. "
            "Experts stay as unbalanced as they are unless your program updates it",
        )  # fmt: skip


def _source(class_: Any) -> str:
    try:
        return inspect.getsource(sys.modules[class_.__module__])
    except (OSError, KeyError, TypeError):
        return ""
