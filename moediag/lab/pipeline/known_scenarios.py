"""Scenarios of the catalogue that concern a model, a layout and a release."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping

from moediag.axes import DP_SHARD
from moediag.lab.scenario import catalogue
from moediag.lab.scenario.load import load
from moediag.lab.scenario.schema import Scenario
from moediag.records import dataclass


@dataclass(frozen=True, slots=True)
class Known:
    """A scenario of the same model family and mesh axes."""

    name: str
    title: str
    releases: tuple[str, ...]
    """Its own releases of transformers, where it was measured."""
    measured: bool
    """This release is one of them, so that the failure is known for it."""
    fixes: tuple[str, ...]
    """Titles of its fixes that are expected to be clean."""


def concerning(
    family: str, axes: Collection[str], wrapper: str, stack: Mapping[str, str | None]
) -> tuple[Known, ...]:
    """Returns those with this family, whose axes are all among ``axes``, and with this wrapper."""
    found = []
    for scenario in _catalogue():
        same_model = scenario.model.family == family and scenario.program is None
        own = scenario.wrapper
        same_wrapper = own.kind == wrapper and own.granularity == "layer"
        active = {axis for axis, size in scenario.layout.items() if size != 1} or {DP_SHARD}
        if same_model and same_wrapper and active <= set(axes):
            found.append(_known(scenario, stack))
    return tuple(sorted(found, key=lambda one: not one.measured))


@functools.cache
def _catalogue() -> tuple[Scenario, ...]:
    return tuple(load(catalogue.find(name)) for name in catalogue.names())


def _known(scenario: Scenario, stack: Mapping[str, str | None]) -> Known:
    unfixed = [v for v in scenario.variants.values() if v.role == "unfixed"]
    stacks = [{**scenario.stack, **variant.stack} for variant in unfixed]
    releases = sorted({pins["transformers"] for pins in stacks if "transformers" in pins})
    measured = any(
        pins and all(stack.get(package) == version for package, version in pins.items())
        for pins in stacks
    )
    fixes = [
        variant.title
        for variant in scenario.variants.values()
        if variant.role == "fix" and variant.expect.verdict == "clean"
    ]
    return Known(scenario.name, scenario.title, tuple(releases), measured, tuple(fixes))
