"""The scenarios of the catalogue on real ranks: everything that a run decides is as stored in
``tests/golden/catalogue.json``.

CI runs a few variants of some scenarios on two ranks, `make wide` every scenario whole on four.
Environments come from the cache, or from the index once. After an intended change write the file
with ``MOEDIAG_GOLDEN=write``, and read its difference.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from moediag.lab.scenario import catalogue
from moediag.lab.scenario.load import load
from moediag.protocol import Outcome, outcome_file
from moediag.result import wording
from tests.e2e.pipeline import Command, Ran, need
from tests.e2e.result_shape import problems

pytestmark = [pytest.mark.e2e, pytest.mark.stack]

GOLDEN = Path(__file__).parent.parent / "golden" / "catalogue.json"
SMALL = 1e-5  # what rounding makes
FEW_WRONG = 12
NUMBER = re.compile(r"-?\d+\.\d+(e[-+]\d+)?")
FEW = {
    "checkpoint-recompute": ("noise", "preserve-rng", "router-outside-noise", "same-routing"),
    "ep-clip-norm": ("own-pieces", "per-mesh", "no-clipping"),
    "ep-mixed-optimizer": ("unfixed", "group-per-mesh", "no-expert-parallelism"),
    "ep-overwrite": ("unfixed", "unfixed-every-rank-loads", "native", "no-expert-parallelism"),
    "ep-resume": ("unfixed", "dtensor-dcp", "no-expert-parallelism"),
    "expert-starvation": ("unfixed", "touch", "identical-sampler", "identical-batches"),
    "expert-starvation-data": ("unfixed", "unused-params-flag", "distinct-batches"),
    "expert-starvation-hang": ("unfixed", "unused-params-flag", "natural-routing"),
    "expert-starvation-silent": (),
    "expert-starvation-wrappers": ("fsdp2", "ddp", "ddp-without-find-unused"),
    "nonfinite-skip": (
        "unfixed", "own-norm-muon", "own-norm-adamw", "adamw-zeros-then-step", "adamw-agree",
    ),
    "router-logits-guard": ("num-local-experts", "own-switch"),
    "tp-head-norm": ("unfixed", "mixtral"),
    "tp-router-divergence-expert-tp-1-batch-2": (),
    "zero-grad-noop": ("unfixed", "schedule-advances", "set-to-none"),
}  # fmt: skip
"""Scenario -> the variants that CI runs; (): all."""


def decided(ran: Ran, stored: dict[str, Any]) -> dict[str, Any]:
    """Returns what a run decided, by trial and in all, and which of the ``stored`` parts its causes
    and notes still have ("says", written by hand). What differs between runs and machines is left
    out: times, the digits of measured numbers, which of many gradients are just too large."""
    whole: dict[str, Any] = {"claims": {}, "tables": {}}
    found: dict[str, Any] = {"": whole}
    for trial in ran.result["trials"]:
        name = trial["evidence"] or trial["variant"]
        at, wrong = trial["first_divergence"], trial["wrong_parameters"]
        said = " ".join([trial["cause"], *trial["notes"]])
        found[name] = {
            **{name: trial[name] for name in (
                "verdict", "signature", "confidence", "culprits", "victims", "parameters_compared",
                "other_batch",
            )},
            "wrong": wording.compact(wrong) if len(wrong) <= FEW_WRONG else "many",
            "at": at and [at["index"], at["axis"], at["phase"], at["module"]],
            "sides": at and {
                rank: [side["op"], side["numel"], wording.compact(side["parameters_missing"])]
                for rank, side in sorted(at["ranks"].items())
            },
            "says": [text for text in stored.get(name, {}).get("says", []) if text in said],
            "accepted by": accepting(ran.folder / trial["evidence"], trial),
            "tables": {one["title"]: rows(one) for one in trial["tables"]},
        }  # fmt: skip
    conclusion = ran.result["conclusion"]
    for fix in conclusion["fixes"]:
        found[fix["variant"]] |= {"correct": fix["correct"], "effect": fix["effect"]}
    for claim in conclusion["claims"]:
        whole["claims"][claim["variant"]] = claim["reproduced"]
    for one in ran.result["tables"]:  # most have rows of several variants
        for name, *row in rows(one):
            found.get(name, whole)["tables"].setdefault(one["title"], []).append(row)
    return found


def rows(table: dict[str, Any]) -> list[list[Any]]:
    """Returns the rows with one digit of each measured number, 0 for what rounding makes."""

    def cell(column: str, value: Any) -> Any:
        if isinstance(value, str) and NUMBER.fullmatch(value):
            value = float(value)
        if isinstance(value, float):
            return float(f"{value:.1g}") if not abs(value) <= SMALL else 0
        return value > 0 if column == "wrong" and isinstance(value, int) else value

    return [[*map(cell, table["columns"], row)] for row in table["rows"]]


def accepting(folder: Path, trial: dict[str, Any]) -> list[str]:
    """Returns which weaker detectors accept a trial: that every rank ends, that the loss of the
    first step is right, that the ranks' gradient norms are equal."""
    files = sorted(folder.glob(outcome_file(0).replace("0", "*")))
    if len(files) < trial["world_size"]:
        return []
    ranks = [Outcome.read(file) for file in files]
    told = ["exits"]
    if all(one.losses and one.reference_losses for one in ranks):
        mean = sum(one.losses[0] for one in ranks) / len(ranks)
        told += ["loss"] * (abs(mean - ranks[0].reference_losses[0]) < SMALL)
    norms = [[norm or 0.0 for norm in one.gradient_norms] for one in ranks]
    return told + ["norms"] * all(one == pytest.approx(norms[0], rel=1e-6) for one in norms)


def compared(kind: str, ran: Ran) -> None:
    """Compares with the stored answer, a line for each trial; or stores it."""
    assert problems(ran.result) == []
    assert ran.code == 0, ran.verdicts
    begin = f"{kind} {ran.result['scenario']} "
    every = json.loads(GOLDEN.read_text(encoding="utf-8"))
    stored = {key: value for key, value in every.items() if key.startswith(begin)}
    own = {key.removeprefix(begin): value for key, value in stored.items()}
    found = {begin + name: told for name, told in decided(ran, own).items()}
    if os.environ.get("MOEDIAG_GOLDEN") == "write":
        rest = {key: value for key, value in every.items() if key not in stored}
        lines = (
            f"{json.dumps(key)}: {json.dumps(value, sort_keys=True)}"
            for key, value in sorted((rest | found).items())
        )
        GOLDEN.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    else:
        assert json.loads(json.dumps(found)) == stored


@pytest.fixture(params=FEW)
def few(command: Command, request: pytest.FixtureRequest) -> Ran:
    name, variants = request.param, FEW[request.param]
    scenario = load(catalogue.find(name))
    for variant in variants or scenario.variants:
        need(scenario.merged(variant).stack)
    return command.run(name, "--cpu", "2", "--no-cost", variants=variants)


def test_few_variants_on_two_ranks(few: Ran) -> None:
    compared("few", few)
    assert not list(few.folder.glob("*/saved"))  # what a finished trial saved is deleted


def test_stored_evidence_gives_the_same_diagnosis(few: Ran, command: Command) -> None:
    for trial in few.result["trials"]:
        _, out, _ = command.call("diagnose", str(few.folder / trial["variant"]), "--json")
        (again,) = json.loads(out)["trials"]
        for name in ("verdict", "culprits", "signature", "first_divergence", "wrong_parameters"):
            assert again[name] == trial[name], (trial["variant"], name)


@pytest.mark.wide
@pytest.mark.parametrize("name", catalogue.names())
def test_the_whole_scenario_on_four_ranks(command: Command, name: str) -> None:
    ran = command.run(name, "--cpu", "4", "--no-cost")
    compared("whole", ran)
