"""The laws, in order: the first one that is broken decides the verdict."""

from __future__ import annotations

from moediag.diagnosis.laws.cleared_gradients import gradients_kept
from moediag.diagnosis.laws.clip_norms import local_norms, scaled_gradients_clipped
from moediag.diagnosis.laws.declared_equal import declared_inputs_apart, declared_tensors_apart
from moediag.diagnosis.laws.law import Law
from moediag.diagnosis.laws.loading import (
    optimizer_forgotten,
    other_names,
    part_loaded,
    states_left_out,
)
from moediag.diagnosis.laws.model_inputs import constant_samples, same_order, same_part
from moediag.diagnosis.laws.model_modes import left_in_evaluation
from moediag.diagnosis.laws.model_values import (
    averages_apart,
    buffers_apart,
    gradients_absent,
    model_without_optimizer,
    parameters_left_out,
    routers_frozen,
)
from moediag.diagnosis.laws.optimizer_checks import (
    adapters_untrained,
    copies_apart,
    learning_rate_zero,
    parameters_not_finite,
    parameters_not_initialised,
    parameters_still,
)
from moediag.diagnosis.laws.replica_sets import replicas_apart
from moediag.diagnosis.laws.restarts import restart_forgets
from moediag.diagnosis.laws.schedulers import schedulers_ahead
from moediag.diagnosis.laws.stage_matrices import stage_matrices_apart

LAWS: tuple[Law, ...] = (
    # Wrong weights make other numbers wrong.
    part_loaded,
    states_left_out,
    replicas_apart,
    declared_inputs_apart,
    local_norms,
    gradients_kept,
    scaled_gradients_clipped,
    parameters_not_finite,
    same_part,
    constant_samples,
    same_order,
    adapters_untrained,
    learning_rate_zero,
    parameters_not_initialised,
    parameters_still,
    model_without_optimizer,
    copies_apart,
    gradients_absent,
    left_in_evaluation,
    # All that these find may be deliberate.
    buffers_apart,
    parameters_left_out,
    routers_frozen,
    averages_apart,
    stage_matrices_apart,
    schedulers_ahead,
    restart_forgets,
    other_names,
    optimizer_forgotten,
    declared_tensors_apart,
)
