"""The relations that a hunt checks, in their order. A new one is one module and one line here."""

from __future__ import annotations

from typing import Tuple

from moediag.worker.relations.accumulation import Accumulation
from moediag.worker.relations.adapters import Adapters
from moediag.worker.relations.attention_implementations import AttentionImplementations
from moediag.worker.relations.batch_order import BatchOrder
from moediag.worker.relations.cached_steps import CachedSteps
from moediag.worker.relations.causality import Causality
from moediag.worker.relations.compiled import Compiled
from moediag.worker.relations.directional import Directional
from moediag.worker.relations.earlier_checkpoint import EarlierCheckpoint
from moediag.worker.relations.expert_implementations import ExpertImplementations
from moediag.worker.relations.packing import Packing
from moediag.worker.relations.padding import Padding
from moediag.worker.relations.plan_patterns import PlanPatterns
from moediag.worker.relations.reached_parameters import ReachedParameters
from moediag.worker.relations.recomputation import Recomputation
from moediag.worker.relations.relation import Relation
from moediag.worker.relations.resumed_training import ResumedTraining
from moediag.worker.relations.saved_bytes import SavedBytes
from moediag.worker.relations.trainable_parameters import TrainableParameters

RELATIONS: Tuple[Relation, ...] = (
    SavedBytes(),
    TrainableParameters(),
    ExpertImplementations(),
    AttentionImplementations(),
    Recomputation(),
    Padding(),
    Packing(),
    BatchOrder(),
    Causality(),
    CachedSteps(),
    Accumulation(),
    Directional(),
    ReachedParameters(),
    PlanPatterns(),
    ResumedTraining(),
    Compiled(),
    EarlierCheckpoint(),
    Adapters(),
)
