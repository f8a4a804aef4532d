"""One cell of a hunt: a relation on a family, with bounds on memory and CPU time."""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path

import torch

from moediag.lab.relations import conditions, earlier_checkpoint
from moediag.lab.relations.known_relations import RELATIONS
from moediag.lab.relations.relation import Case, Relation
from moediag.lab.step.models import release_families
from moediag.lab.step.models.tiny_family import NotBuilt
from moediag.protocol import (
    EARLIER_CHECKPOINT,
    SIZES,
    CheckpointTask,
    RelationOutcome,
    RelationTask,
    ReleaseListing,
    Trial,
)
from moediag.recorder.not_applicable import NotApplicable, NotInStack

MEMORY = 6 << 30  # bytes that a cell may use beyond what its imports use


def run(trial: Trial) -> RelationOutcome:
    """Returns the outcome of the trial's relation. A failure of the family is part of it."""
    assert isinstance(trial.task, RelationTask)
    name = trial.task.relation
    family = trial.model.family
    relation = next((r for r in RELATIONS if r.name == name), None)
    if relation is None:
        return RelationOutcome(family, name, problem=f"there is no relation {name}")
    _bound_memory()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        found = release_families.find(family)
        if found is None:
            return RelationOutcome(family, name, applicable="the release has no such family")
        case = Case(found, trial.task.size or SIZES[0], earlier=trial.task.earlier)
        if trial.task.way:
            return _one_way(relation, case, trial.task.way)
        return RelationOutcome(family, name, conditions.outcomes(relation, case))
    except NotInStack as reason:
        return RelationOutcome(family, name, applicable=str(reason), lacks=reason.package)
    except NotApplicable as reason:
        return RelationOutcome(family, name, applicable=str(reason))
    except NotBuilt as reason:
        return RelationOutcome(family, name, built=False, problem=str(reason))
    except Exception as error:
        return RelationOutcome(family, name, problem=f"{type(error).__name__}: {error}")


def saved(trial: Trial) -> RelationOutcome:
    """Saves the checkpoints of a CheckpointTask. Returns why it could not, if so."""
    assert isinstance(trial.task, CheckpointTask)
    family, name = trial.model.family, EARLIER_CHECKPOINT
    _bound_memory()
    try:
        found = release_families.find(family)
        if found is None:
            return RelationOutcome(family, name, applicable="the release has no such family")
        earlier_checkpoint.save(Case(found), Path(trial.task.folder))
    except Exception as error:
        return RelationOutcome(family, name, problem=f"{type(error).__name__}: {error}")
    return RelationOutcome(family, name)


def _one_way(relation: Relation, case: Case, way: str) -> RelationOutcome:
    """Returns whether the way holds, without the conditions, and what the model is built from.
    Raises as :func:`conditions.gap`."""
    if way not in relation.ways(case):
        raise NotApplicable(f"the release has no {way} here")
    first = conditions.outcome(conditions.gap(relation, case, way), way, {})
    config = json.loads(case.config().to_json_string())
    model = case.family.model
    return RelationOutcome(case.family.name, relation.name, [first], model=model, config=config)


def listing() -> ReleaseListing:
    """Returns the families of the installed release and the known relations."""
    return ReleaseListing(list(release_families.listed()), {r.name: r.says for r in RELATIONS})


def _bound_memory() -> None:
    """Makes an allocation fail before the machine runs out of memory."""
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[0]
    used = int(pages) * os.sysconf("SC_PAGE_SIZE")
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, hard))
