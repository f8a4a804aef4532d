"""Starts everything that records for the laws in one rank."""

from __future__ import annotations

from moediag.recorder.core import Recorder
from moediag.recorder.laws import clip_norms, returned_weights, rounded_gradients
from moediag.recorder.laws.checkpointed_inputs import CheckpointedInputs
from moediag.recorder.laws.cleared_gradients import ClearedGradients
from moediag.recorder.laws.context import LawContext
from moediag.recorder.laws.declared_equal import DeclaredEqual
from moediag.recorder.laws.hand_reduction import HandReduction
from moediag.recorder.laws.loading import Loading
from moediag.recorder.laws.loss_scale import LossScale
from moediag.recorder.laws.loss_weights import LossWeights
from moediag.recorder.laws.model_inputs import ModelInputs
from moediag.recorder.laws.model_modes import ModelModes
from moediag.recorder.laws.model_structure import ModelStructure
from moediag.recorder.laws.model_values import ModelValues
from moediag.recorder.laws.optimizer_checks import OptimizerChecks
from moediag.recorder.laws.schedulers import Schedulers
from moediag.recorder.laws.shared_values import SharedValues
from moediag.recorder.laws.whole_models import WholeModels
from moediag.recorder.laws.wrapping import Wrapping


def record(recorder: Recorder, folder: str) -> None:
    """Records into the laws' log of the rank in ``folder`` from now on."""
    context = LawContext(recorder, folder)
    recorder.on_uninstall.append(context.log.close)
    context.sets.install()
    scale = LossScale(context)
    clip_norms.install(context, scale)
    checks = OptimizerChecks(context, scale)
    WholeModels(context, checks)
    ModelValues(context)
    ModelModes(context)
    rounded_gradients.install(context)
    returned_weights.install(context)
    for watcher in (
        ClearedGradients, DeclaredEqual, Loading, ModelInputs, Wrapping, Schedulers,
        ModelStructure, LossWeights, HandReduction, SharedValues, CheckpointedInputs,
    ):  # fmt: skip
        watcher(context)
