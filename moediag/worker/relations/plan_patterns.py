"""The patterns of a family's plans name something."""

from __future__ import annotations

import inspect
import re
import sys
from typing import Any, Dict, List, Sequence

import torch

from moediag.worker.models import release_families
from moediag.worker.not_applicable import NotApplicable
from moediag.worker.relations.relation import Case, Relation, Tensors

PLANS = {"tp-plan": "base_model_tp_plan", "ep-plan": "base_model_ep_plan"}


class PlanPatterns(Relation):
    name = "plans"
    says = "each pattern of a tensor- or expert-parallel plan names a module or parameter"
    exact = True
    route = "no name of the model with the default configuration matches"

    def ways(self, case: Case) -> Sequence[str]:
        found = [way for way in PLANS if _plan(case, way)]
        if not found:
            raise NotApplicable("the family has no plan")
        return found

    def plain(self, case: Case, way: str) -> Tensors:
        return {pattern: torch.ones(()) for pattern in _plan(case, way)}

    def other(self, case: Case, way: str) -> Tensors:
        """A tiny model may lack what the family has with other settings, so that a pattern whose
        parts the source assigns as attributes counts as matching too."""
        model: Any = case.model()
        names, source = _names(model), _source(model)
        found: Tensors = {}
        for pattern in _plan(case, way):
            there = _matches_any(pattern, names) or _mentioned(pattern, source)
            found[pattern] = torch.tensor(float(there))
        return found

    def second(self, case: Case, way: str, wrong: Sequence[str]) -> bool:
        with torch.device("meta"):
            whole = release_families.model_class(case.family)._from_config(case.family.config())
        names = _names(whole)
        return not any(_matches_any(pattern, names) for pattern in wrong)


def _plan(case: Case, way: str) -> Dict[str, Any]:
    config = case.config()
    text = config.get_text_config()
    return dict(getattr(text, PLANS[way], None) or getattr(config, PLANS[way], None) or {})


def _names(model: Any) -> List[str]:
    """Returns the names of modules and parameters."""
    names = [name for name, _ in model.named_modules()]
    names += [name for name, _ in model.named_parameters()]
    return names


def _matches_any(pattern: str, names: Sequence[str]) -> bool:
    return any(_matches(pattern, name) for name in names)


def _matches(pattern: str, name: str) -> bool:
    """Plans are written relative to the base model."""
    relative = re.escape(pattern).replace(r"\*", "[^.]+")
    return re.search(rf"(^|\.){relative}$", name) is not None


def _source(model: Any) -> str:
    modules = {type(module).__module__ for module in model.modules()}
    return "".join(
        inspect.getsource(sys.modules[name]) for name in modules if name.startswith("transformers.")
    )


def _mentioned(pattern: str, source: str) -> bool:
    """Whether each part of the pattern is assigned as an attribute somewhere."""
    parts = [part for part in pattern.split(".") if part not in ("*", "weight", "bias")]
    return all(re.search(rf"self\.{re.escape(part)}\s*=", source) is not None for part in parts)
