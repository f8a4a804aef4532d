"""The relations that a hunt checks, in their order. A new one is one module and one line here."""

from __future__ import annotations

from typing import Tuple

from moediag.lab.relations.accumulation import Accumulation
from moediag.lab.relations.adapters import Adapters
from moediag.lab.relations.attention_implementations import AttentionImplementations
from moediag.lab.relations.batch_order import BatchOrder
from moediag.lab.relations.cached_steps import CachedSteps
from moediag.lab.relations.causality import Causality
from moediag.lab.relations.compiled import Compiled
from moediag.lab.relations.directional import Directional
from moediag.lab.relations.earlier_checkpoint import EarlierCheckpoint
from moediag.lab.relations.expert_implementations import ExpertImplementations
from moediag.lab.relations.one_dtype import OneDtype
from moediag.lab.relations.packing import Packing
from moediag.lab.relations.padding import Padding
from moediag.lab.relations.plan_patterns import PlanPatterns
from moediag.lab.relations.reached_parameters import ReachedParameters
from moediag.lab.relations.recomputation import Recomputation
from moediag.lab.relations.relation import Relation
from moediag.lab.relations.resumed_training import ResumedTraining
from moediag.lab.relations.saved_bytes import SavedBytes
from moediag.lab.relations.trainable_parameters import TrainableParameters

RELATIONS: Tuple[Relation, ...] = (
    SavedBytes(),
    TrainableParameters(),
    OneDtype(),
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
