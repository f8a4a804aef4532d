"""A hunt on copies of transformers with one edit each: faults in loading and training on two ranks,
and harmless edits. The families were drawn by lot."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from moediag.lab.campaign.hunt import layouts
from moediag.lab.stacks import environment
from tests.e2e.overlay import overlay
from tests.e2e.pipeline import need
from tests.e2e.test_hunt import EXPERTS, STACK, cells

pytestmark = [pytest.mark.e2e, pytest.mark.stack, pytest.mark.wide]

SHARDING = "distributed/sharding_utils.py"
TENSOR = "distributed/tensor_parallel.py"
EXPERT = "distributed/expert_parallel.py"
FSDP = "distributed/fsdp.py"
TRAINER = "trainer.py"
# Families, file, text, its replacement, relation, way. What the release itself does wrong in a way
# is no answer: the way that must fail holds without the edit.
FAULTS = {
    "each rank loads the other's slice": (
        ("deepseek_v3", "minimax"), SHARDING,
        "sub_mesh.get_local_rank(), sub_mesh.size()\n                dim_idx",
        "1 - sub_mesh.get_local_rank(), sub_mesh.size()\n                dim_idx",
        "layouts", "tp-size",
    ),
    "the rows of experts are read from the other rank's place": (
        ("axk1", "cohere2_moe"), SHARDING,
        "planned_ops_by_source_dim[source_dim].append((rank, world_size))",
        "planned_ops_by_source_dim[source_dim].append((1 - rank, world_size))",
        "layouts", "tp-size",
    ),
    "experts are kept in reverse order": (
        ("exaone_moe", "minimax"), SHARDING,
        "owns_tensor_idx = self._axis0_offset <= tensor_idx",
        "tensor_idx = self._axis0_size - 1 - tensor_idx\n        "
        "owns_tensor_idx = self._axis0_offset <= tensor_idx", "layouts", "ep-size",
    ),
    "the router's gradient is not summed": (
        ("exaone_moe", "glm4_moe"), TENSOR,
        "top_k_weights = _AllReduceBackward.apply(top_k_weights, tp_group)",
        "top_k_weights = top_k_weights", "layouts", "tp-size",
    ),
    "the gradient below the experts is not summed": (
        ("minimax_m2", "flex_olmo"), TENSOR,
        "hidden_states = _AllReduceBackward.apply(hidden_states, tp_group)",
        "hidden_states = hidden_states", "layouts", "tp-size",
    ),
    "the gradient of the norms of heads is not summed": (
        ("hy_v3", "mellum"), TENSOR, "dist.all_reduce(param.grad, group=mesh.get_group())",
        "pass", "layouts", "tp-size",
    ),
    "outputs are not put back in the order of the tokens": (
        ("qwen3_next", "minimax"), EXPERT, "token_outputs[state.order] = recv_out",
        "token_outputs[:] = recv_out", "layouts", "ep-size",
    ),
    "received rows go to other experts": (
        ("granitemoe", "deepseek_v3"), EXPERT, ".repeat(ep_size)", ".flip(0).repeat(ep_size)",
        "layouts", "ep-size",
    ),
    "the routing weights are dropped": (
        ("exaone_moe", "granitemoeshared"), EXPERT,
        "(token_outputs * state.top_k_weights.unsqueeze(-1)).sum(dim=1)",
        "token_outputs.sum(dim=1)", "layouts", "fsdp-size-ep-size",
    ),
    "a plan has a wrong style": (
        ("exaone_moe", "qwen2_moe"), "configuration", '"layers.*.self_attn.o_proj": "rowwise"',
        '"layers.*.self_attn.o_proj": "colwise"', "layouts", "tp-size",
    ),
    "a plan leaves out that the experts' outputs are summed": (
        ("deepseek_v3", "exaone_moe"), "configuration",
        '"layers.*.mlp.experts": "moe_tp_experts",', "", "layouts", "tp-size",
    ),
    "the loss is not rescaled by the ranks": (
        ("ernie4_5_moe", "afmoe"), TRAINER,
        "loss_scale = self.accelerator.num_processes // self.get_tp_size()", "loss_scale = 1",
        "trainer", "data-parallel-cross-entropy",
    ),
    "the tokens of other ranks are not counted": (
        ("flex_olmo", "glm4_moe"), TRAINER,
        "num_items_in_batch = self.accelerator.gather(num_items_in_batch.to(device)).sum()",
        "pass", "trainer", "data-parallel-cross-entropy",
    ),
    "a micro-batch is divided twice": (
        ("deepseek_v2", "minimax_m2"), TRAINER, "if not loss_is_scaled_for_ga:",
        "if loss_is_scaled_for_ga:", "trainer", "accumulation-cross-entropy",
    ),
    "ranks do not wait for those that still generate": (
        ("laguna", "flex_olmo"), FSDP, 'if getattr(module, "_is_fsdp_managed_module", False):',
        "if False:", "generate", "fsdp-size",
    ),
    "the outputs of a row-wise layer are not summed without gradients": (
        ("kolibri1", "mellum"), TENSOR, "dist.all_reduce(output, group=process_group)", "pass",
        "generate", "tp-size",
    ),
    "each rank runs the experts that it lacks": (
        ("minimax", "axk1"), EXPERT, "!= self.ep_mesh.get_local_rank()",
        "== self.ep_mesh.get_local_rank()", "generate", "ep-size",
    ),
}  # fmt: skip
DRAWN = [(fault, family) for fault, (families, *_) in FAULTS.items() for family in families]
# Families, (text, its replacement) in their modeling files.
HARMLESS = {
    "another name of the mixture": (
        ("deepseek_v3", "kolibri1", "qwen3_moe", "dots1"), "final_hidden_states", "mixed_states",
    ),
    "reshape for view": (
        ("mixtral", "ernie4_5_moe", "minimax_m2", "hy_v3"), "hidden_states.view(-1, ",
        "hidden_states.reshape(-1, ",
    ),
    "another order of a sum": (
        ("deepseek_v3", "phimoe", "mixtral", "granitemoe"),
        "hidden_states = residual + hidden_states", "hidden_states = hidden_states + residual",
    ),
    "another name of a loop's variable": (
        ("olmoe", "hy_v3", "phimoe", "qwen3_next"), "expert_idx", "number_of_expert",
    ),
    "an operator for a function": (
        ("afmoe", "qwen3_next", "dots1", "olmoe"),
        "attn_output = torch.matmul(attn_weights, value_states)",
        "attn_output = attn_weights @ value_states",
    ),
    "the longer name of a module": (
        ("solar_open", "lfm2_moe", "mellum", "qwen2_moe"), " nn.functional.softmax(",
        " torch.nn.functional.softmax(",
    ),
    "another name of a dtype": (
        ("mixtral", "hy_v3", "afmoe", "laguna"), "input_dtype", "dtype_of_input",
    ),
    "another name of an expert's rows": (
        ("exaone_moe", "minimax", "mellum", "qwen2_moe"), "current_state", "rows_of_expert",
    ),
    "another name of a norm's variance": (
        ("deepseek_v3", "mixtral", "qwen3_next", "cohere2_moe"), "variance", "mean_square",
    ),
}  # fmt: skip
UNCHANGED = [(edit, family) for edit, (families, *_) in HARMLESS.items() for family in families]


@pytest.mark.parametrize(("fault", "family"), DRAWN)
def test_a_fault_on_two_ranks_is_found(
    fault: str, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need(STACK)
    _, file, old, new, relation, way = FAULTS[fault]
    whole = layouts.RELATIONS[relation]
    chosen = tuple(one for one in whole.ways if one.name == way)
    monkeypatch.setitem(layouts.RELATIONS, relation, dataclasses.replace(whole, ways=chosen))
    if file == "configuration":
        file = f"models/{family}/{file}_{family}.py"
    stack = environment.ensure(STACK)
    with overlay(stack, tmp_path / "overlay", "transformers", file, (old, new)) as stack:
        (found,) = cells(stack, tmp_path / "hunt", relation, family=family)
    assert any(way.confirmed for way in found.outcome.ways), found


@pytest.mark.parametrize(("edit", "family"), UNCHANGED)
def test_a_harmless_edit_confirms_nothing(edit: str, family: str, tmp_path: Path) -> None:
    need(STACK)
    relations = ("save-and-load", "expert-implementations", "padding", "gradient", "use-cache")
    _, old, new = HARMLESS[edit]
    file = f"models/{family}/modeling_{family}.py"
    stack = environment.ensure(STACK)
    with overlay(stack, tmp_path / "overlay", "transformers", file, (old, new)) as stack:
        found = cells(stack, tmp_path / "hunt", *relations, family=family)
    assert not any(way.confirmed for cell in found for way in cell.outcome.ways), found
    assert all(cell.outcome.built and not cell.outcome.problem for cell in found), found


@pytest.mark.parametrize(
    ("file", "old", "new", "relation"),
    [
        (EXPERTS, "sample_weights_g", "weights_in_order", "layouts"),
        (EXPERT, "recv_expert_ids", "ids_of_received", "layouts"),
        (TENSOR, "top_k_weights", "weights_of_top_k", "layouts"),
        (TRAINER, "loss_scale", "factor_of_the_loss", "trainer"),
    ],
)
def test_a_harmless_edit_changes_nothing_on_two_ranks(
    file: str, old: str, new: str, relation: str, tmp_path: Path
) -> None:
    need(STACK)
    stack = environment.ensure(STACK)
    (plain,) = cells(stack, tmp_path / "plain", relation)
    with overlay(stack, tmp_path / "overlay", "transformers", file, (old, new)) as stack:
        (edited,) = cells(stack, tmp_path / "hunt", relation)
    shown = [
        {way.way: (way.confirmed, way.kind, way.what) for way in cell.outcome.ways}
        for cell in (plain, edited)
    ]
    assert shown[0] == shown[1]
