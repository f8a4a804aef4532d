"""The rules that divide parameters: those of the release's plans, and the lines that have them."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from typing import Any, Dict, Iterator, Optional, Tuple

from moediag.axes import DP_REPLICATE, DP_SHARD, EP, TP, Layout
from moediag.lab.check import sharding
from moediag.lab.check.simulated_group import place
from moediag.lab.check.tensor_places import listed
from moediag.lab.step.models import plan_names
from moediag.lab.step.models.plan_names import generic
from moediag.protocol import MAY_FAIL, NOTE, CheckFinding

PLAN = "plan"


class Rules:
    """What divides a parameter, and the lines that say so."""

    def __init__(self, model: Any, layout: Layout, kind: str) -> None:
        self.model, self.native = model, kind == sharding.NATIVE
        self._text, self.path = _source_of(type(model.config.get_text_config()))
        self.file = place(self.path, 1).rpartition(":")[0]
        self.plans: Dict[str, Dict[str, str]] = {}
        if self.native:
            asked = {str(EP): layout.size(EP), str(TP): layout.size(TP)}
            asked["fsdp"] = layout.size(DP_SHARD) * layout.size(DP_REPLICATE) * layout.size(EP)
            self.plans = {
                f"{name}_plan": dict(getattr(model, f"{name}_plan", None) or {})
                for name, size in asked.items() if size > 1
            }  # fmt: skip

    def of(self, name: str) -> Tuple[str, str]:
        """Returns the rule of a parameter by its generic name, and where it is."""
        parents = [name]
        while "." in parents[-1]:
            parents.append(parents[-1].rpartition(".")[0])
        for plan, rules in self.plans.items():
            for parent in parents if plan == "fsdp_plan" else parents[:2]:
                if parent in rules:
                    return f"{plan} {parent}: {rules[parent]}", self.line(plan, parent)
        if self.native:
            return ("fsdp_plan: the root" if "fsdp_plan" in self.plans else "", "")
        return self._by_hand(name)

    def _by_hand(self, name: str) -> Tuple[str, str]:
        import transformers

        class_ = getattr(transformers, type(self.model).__name__.replace("FSDP", "", 1), None)
        text, path = _source_of(class_ or type(self.model).__mro__[1])
        at = _line(text, "_no_split_modules")
        return "fully_shard", place(path, at) if at else ""

    def line(self, plan: str, pattern: str) -> str:
        """Returns the line of the configuration class that has the pattern, which it writes
        relative to a part of the model; "" if the plan is elsewhere."""
        head, found, rest = self._text.partition(f"base_model_{plan} = {{")
        if not found:
            return ""
        own = rest.partition("}")[0]
        while pattern:
            at = _line(own, f'"{pattern}"')
            if at:
                return place(self.path, head.count("\n") + at)
            pattern = pattern.partition(".")[2]
        return ""

    def findings(self) -> Iterator[CheckFinding]:
        known = {generic(name) for name in plan_names.names(self.model)}
        text: Optional[str] = None
        for plan, rules in self.plans.items():
            nothing = [pattern for pattern in rules if pattern not in known]
            if nothing and text is None:
                text = plan_names.source(self.model)
            lost = [p for p in nothing if not plan_names.mentioned(p, text or "")]
            for pattern in lost:
                yield CheckFinding(
                    PLAN, MAY_FAIL, f"{plan} {pattern} names no module or parameter of this model: "
                    "if the rule was meant for one, that one stays whole", self.line(plan, pattern),
                )  # fmt: skip
            spared = [pattern for pattern in nothing if pattern not in lost]
            if spared:
                yield CheckFinding(
                    PLAN, NOTE, f"{plan} {listed(spared)}: names nothing with these settings, but "
                    "the model's source has such modules", self.line(plan, spared[0]),
                )  # fmt: skip
            yield from self._twice(plan, rules, known)

    def _twice(self, plan: str, rules: Dict[str, str], known: Any) -> Iterator[CheckFinding]:
        wild = [pattern for pattern in rules if "*" in pattern]
        for name in sorted(known):
            named = [p for p in wild if _fits(p, name)] if name not in rules else []
            if len({rules[p] for p in named}) > 1:
                yield CheckFinding(
                    PLAN, MAY_FAIL, f"{plan}: {listed(named)} both name {name} and ask for "
                    f"{' and '.join(rules[p] for p in named)}", self.line(plan, named[0]),
                )  # fmt: skip


def _fits(pattern: str, name: str) -> bool:
    """Whether a pattern whose ``*`` stands for any part, or the number ``*``, is the whole name."""
    return re.fullmatch(re.escape(pattern).replace(r"\*", "[^.]+"), name) is not None


def _source_of(class_: Any) -> Tuple[str, str]:
    try:
        path = inspect.getsourcefile(class_) or ""
        return Path(path).read_text(encoding="utf-8"), path
    except (OSError, TypeError):
        module = sys.modules.get(getattr(class_, "__module__", ""), None)
        return "", str(getattr(module, "__file__", "") or "")


def _line(text: str, wanted: str) -> int:
    """Returns the number of the first line with ``wanted``; 0: none."""
    return next((n for n, line in enumerate(text.splitlines(), 1) if wanted in line), 0)
