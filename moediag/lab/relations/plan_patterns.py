"""The patterns of a family's plans name something."""

from __future__ import annotations

from typing import Any, Dict, Sequence

import torch

from moediag.lab.relations.relation import Case, Relation, Tensors
from moediag.lab.step.models import plan_names, release_families
from moediag.recorder.not_applicable import NotApplicable

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
        names, source = plan_names.names(model), plan_names.source(model)
        found: Tensors = {}
        for pattern in _plan(case, way):
            there = plan_names.matches_any(pattern, names) or plan_names.mentioned(pattern, source)
            found[pattern] = torch.tensor(float(there))
        return found

    def second(self, case: Case, way: str, wrong: Sequence[str]) -> bool:
        with torch.device("meta"):
            whole = release_families.model_class(case.family)._from_config(case.family.config())
        names = plan_names.names(whole)
        return not any(plan_names.matches_any(pattern, names) for pattern in wrong)


def _plan(case: Case, way: str) -> Dict[str, Any]:
    config = case.config()
    text = config.get_text_config()
    return dict(getattr(text, PLANS[way], None) or getattr(config, PLANS[way], None) or {})
