"""The laws, in order: the first one that is broken decides the verdict."""

from __future__ import annotations

from moediag.diagnosis.laws.checkpointed_inputs import recomputed_otherwise
from moediag.diagnosis.laws.cleared_gradients import (
    gradients_kept,
    gradients_mixed,
    gradients_used_twice,
)
from moediag.diagnosis.laws.clip_norms import (
    clipped_before_backward,
    clipped_before_reduction,
    local_norms,
    norm_incomplete,
    scaled_gradients_clipped,
)
from moediag.diagnosis.laws.declared_equal import declared_inputs_apart, declared_tensors_apart
from moediag.diagnosis.laws.hand_reduction import (
    divisors_apart,
    gradients_stale,
    parameters_averaged,
    reduced_again,
    starts_apart,
)
from moediag.diagnosis.laws.law import Law
from moediag.diagnosis.laws.loading import (
    optimizer_forgotten,
    other_names,
    part_loaded,
    states_left_out,
)
from moediag.diagnosis.laws.loss_weights import (
    accumulation_not_entered,
    gradients_scaled,
    loss_constant,
    loss_parts_detached,
    micro_batches_unequal,
    parts_unequal,
    targets_of_first_rank,
)
from moediag.diagnosis.laws.model_inputs import constant_samples, same_order, same_part
from moediag.diagnosis.laws.model_modes import (
    autocast_removed,
    dropout_beside_training,
    left_in_evaluation,
)
from moediag.diagnosis.laws.model_structure import layers_missing, tokens_embedded_as_zeros
from moediag.diagnosis.laws.model_values import (
    averages_apart,
    buffers_apart,
    gradients_absent,
    model_without_optimizer,
    parameters_left_out,
    parameters_replaced,
    routers_frozen,
    ties_lost,
)
from moediag.diagnosis.laws.optimizer_checks import (
    adapters_untrained,
    copies_apart,
    exchanges_one_way,
    learning_rate_zero,
    parameters_not_finite,
    parameters_not_initialised,
    parameters_still,
    updates_undone,
    weights_returned,
)
from moediag.diagnosis.laws.renewed_optimizers import moments_dropped
from moediag.diagnosis.laws.replica_sets import replicas_apart
from moediag.diagnosis.laws.restarts import restart_forgets
from moediag.diagnosis.laws.rounded_gradients import gradients_rounded, updates_rounded
from moediag.diagnosis.laws.sample_sources import ranks_unlike, samplers_apart
from moediag.diagnosis.laws.schedulers import (
    schedulers_ahead,
    schedulers_misplaced,
    schedulers_unused,
)
from moediag.diagnosis.laws.shared_values import biases_added_again, shared_gradients_lost
from moediag.diagnosis.laws.stage_matrices import expert_replicas_apart, stage_matrices_apart
from moediag.diagnosis.laws.unreduced_calls import last_backward_unreduced
from moediag.diagnosis.laws.update_counts import updates_left_out

LAWS: tuple[Law, ...] = (
    # Wrong weights make other numbers wrong.
    part_loaded,
    states_left_out,
    replicas_apart,
    updates_left_out,
    declared_inputs_apart,
    last_backward_unreduced,
    local_norms,
    gradients_kept,
    clipped_before_reduction,
    scaled_gradients_clipped,
    norm_incomplete,
    gradients_stale,
    recomputed_otherwise,
    parameters_not_finite,
    same_part,
    constant_samples,
    same_order,
    adapters_untrained,
    learning_rate_zero,
    parameters_not_initialised,
    model_without_optimizer,
    parameters_replaced,
    ties_lost,
    copies_apart,
    updates_undone,
    gradients_absent,
    left_in_evaluation,
    # All that these find may be deliberate.
    parameters_still,
    weights_returned,
    buffers_apart,
    parameters_left_out,
    routers_frozen,
    averages_apart,
    stage_matrices_apart,
    expert_replicas_apart,
    gradients_mixed,
    gradients_used_twice,
    clipped_before_backward,
    exchanges_one_way,
    dropout_beside_training,
    autocast_removed,
    schedulers_ahead,
    schedulers_misplaced,
    schedulers_unused,
    starts_apart,
    parameters_averaged,
    reduced_again,
    divisors_apart,
    moments_dropped,
    micro_batches_unequal,
    parts_unequal,
    gradients_scaled,
    targets_of_first_rank,
    accumulation_not_entered,
    loss_parts_detached,
    loss_constant,
    gradients_rounded,
    updates_rounded,
    shared_gradients_lost,
    biases_added_again,
    samplers_apart,
    ranks_unlike,
    layers_missing,
    tokens_embedded_as_zeros,
    restart_forgets,
    other_names,
    optimizer_forgotten,
    declared_tensors_apart,
)
