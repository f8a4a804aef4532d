"""`moediag hunt` on a real release, and on copies of it with one planted fault each."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest

from moediag.cli import app
from moediag.errors import ExitCode
from moediag.lab.campaign.hunt import session
from moediag.lab.campaign.hunt.findings import HuntCell
from moediag.lab.campaign.hunt.question import Wanted
from moediag.lab.scenario import catalogue
from moediag.lab.stacks import environment
from tests.e2e.overlay import overlay
from tests.e2e.pipeline import need

pytestmark = [pytest.mark.e2e, pytest.mark.stack, pytest.mark.wide]

STACK = {"transformers": "5.23.0", "accelerate": "1.15.0"}
MODELING = "models/qwen3_moe/modeling_qwen3_moe.py"
CONFIGURATION = "models/qwen3_moe/configuration_qwen3_moe.py"
EXPERTS = "integrations/moe.py"

# File, text, its replacement, and the relation that must not hold then.
FAULTS = {
    "the mask is ignored": (
        MODELING, "attention_mask=causal_mask,", "attention_mask=None,", "padding",
    ),
    "the router gets no gradient": (
        MODELING, "router_scores = router_top_value\n",
        "router_scores = router_top_value.detach()\n", "gradient",
    ),
    "the router is not reached": (
        MODELING, "router_scores = router_top_value\n",
        "router_scores = router_top_value.detach()\n", "reached-parameters",
    ),
    "num_items_in_batch is not passed on": (
        MODELING, "self.loss_function(logits, labels, self.vocab_size, **kwargs)",
        "self.loss_function(logits, labels, self.vocab_size)", "accumulation",
    ),
    "grouped_mm takes the rows of other tokens": (
        EXPERTS, "selected_hidden_states_g = hidden_states[perm // num_top_k]",
        "selected_hidden_states_g = hidden_states[perm % num_tokens]", "expert-implementations",
    ),
    "the eager loop leaves out an expert": (
        MODELING, "if expert_idx == self.num_experts:", "if expert_idx == self.num_experts - 1:",
        "expert-implementations",
    ),
    "a plan names nothing": (
        CONFIGURATION, '"layers.*.mlp.experts.down_proj": "grouped_gemm"',
        '"layers.*.mlp.expertz.down_proj": "grouped_gemm"', "plans",
    ),
    "the cache keeps other keys": (
        MODELING, "past_key_values.update(key_states, value_states, self.layer_idx)",
        "past_key_values.update(key_states.flip(2), value_states, self.layer_idx)", "use-cache",
    ),
    "a row sees the others": (
        MODELING, "return final_hidden_states.reshape(batch_size, sequence_length, hidden_dim)",
        "return final_hidden_states.reshape(batch_size, sequence_length, hidden_dim) + "
        "hidden_states.mean()", "batch",
    ),
    "a token sees later ones": (
        MODELING, "return final_hidden_states.reshape(batch_size, sequence_length, hidden_dim)",
        "return final_hidden_states.reshape(batch_size, sequence_length, hidden_dim) + "
        "hidden_states.mean(1, keepdim=True)", "causality",
    ),
    "a weight is not saved": (
        MODELING, "    _supports_sdpa = True\n",
        "    _supports_sdpa = True\n"
        '    _keys_to_ignore_on_save = ["model.layers.1.mlp.gate.weight"]\n', "save-and-load",
    ),
    "loading makes the router trainable that the class freezes": (
        MODELING, "torch.zeros(self.num_experts, self.hidden_dim))",
        "torch.zeros(self.num_experts, self.hidden_dim), requires_grad=False)",
        "trainable-parameters",
    ),
    "recomputing a layer computes something else": (
        MODELING, "        _, routing_weights, selected_experts = self.gate(",
        "        if torch._C._current_graph_task_id() >= 0:\n"
        "            hidden_states_reshaped = hidden_states_reshaped * 2\n"
        "        _, routing_weights, selected_experts = self.gate(",
        "checkpointing",
    ),
    "eager attention has another scale": (
        MODELING, "* scaling", "* (1.1 * scaling)", "attention-implementations",
    ),
    "a compiled layer computes something else": (
        MODELING, "        _, routing_weights, selected_experts = self.gate(",
        "        if torch.compiler.is_compiling():\n"
        "            hidden_states_reshaped = hidden_states_reshaped * 2\n"
        "        _, routing_weights, selected_experts = self.gate(",
        "compile",
    ),
}  # fmt: skip
# Such faults in families drawn by lot (random.Random(15).sample) among those whose file has the
# text: families, file, text, its replacement, relation.
BY_LOT = {
    "the mask is ignored": (
        ("granitemoe", "axk1", "hunyuan_v1_moe", "mixtral"), "modeling",
        "attention_mask=causal_mask,", "attention_mask=None,", "padding",
    ),
    "the cache keeps other keys": (
        ("cohere2_moe", "flex_olmo", "granitemoe", "afmoe"), "modeling",
        "past_key_values.update(key_states, value_states, self.layer_idx)",
        "past_key_values.update(key_states.flip(2), value_states, self.layer_idx)", "use-cache",
    ),
    "eager attention has another scale": (
        ("axk1", "qwen2_moe", "dots1", "solar_open"), "modeling",
        "torch.matmul(query, key_states.transpose(2, 3)) * scaling",
        "torch.matmul(query, key_states.transpose(2, 3)) * (1.1 * scaling)",
        "attention-implementations",
    ),
    "the eager loop leaves out an expert": (
        ("granitemoeshared", "flex_olmo", "deepseek_v3", "granitemoe"), "modeling",
        "if expert_idx == self.num_experts:", "if expert_idx == self.num_experts - 1:",
        "expert-implementations",
    ),
    "num_items_in_batch is not passed on": (
        ("olmoe", "minimax_m2", "mellum", "laguna"), "modeling",
        "self.loss_function(logits, labels, self.vocab_size, **kwargs)",
        "self.loss_function(logits, labels, self.vocab_size)", "accumulation",
    ),
    "a plan names nothing": (
        ("kolibri1", "minimax_m2", "exaone_moe", "olmoe"), "configuration",
        '"layers.*.self_attn.o_proj"', '"layers.*.self_attn.o_prof"', "plans",
    ),
    "the eager experts drop the routing weight": (
        ("exaone_moe", "granitemoeshared", "granitemoe", "flex_olmo"), "modeling",
        " * top_k_weights[token_idx, top_k_pos, None]", "", "expert-implementations",
    ),
}  # fmt: skip
DRAWN = [(fault, family) for fault, (families, *_) in BY_LOT.items() for family in families]
# Faults in PEFT: file, text, its replacement, the way of the relation "lora".
PEFT = {**STACK, "peft": "0.21.2"}
ADAPTER_FAULTS = {
    "a module that was named is left out": (
        "tuners/tuners_utils.py", "                elif not result:\n",
        '                elif not result or key.endswith("layers.1.self_attn.q_proj"):\n',
        "named-modules",
    ),
    "an adapter of experts gets no gradient": (
        "tuners/lora/layer.py", "return lhs.to(param.dtype), rhs.to(param.dtype), self.scaling",
        "return lhs.to(param.dtype).detach(), rhs.to(param.dtype), self.scaling", "gradients",
    ),
    "merging subtracts the adapters of experts": (
        "tuners/lora/layer.py", "param.data += delta_weight", "param.data -= delta_weight",
        "merged",
    ),
    "an adapter is not saved": (
        "utils/save_and_load.py",
        "_remove_adapter_name_from_key(k, adapter_name): v for k, v in to_return.items()}",
        "_remove_adapter_name_from_key(k, adapter_name): v for k, v in to_return.items()\n"
        '                 if "layers.1.self_attn.q_proj.lora_B" not in k}', "loaded",
    ),
}  # fmt: skip
# Faults in Trainer's resume: text of trainer.py, its replacement, what differs.
RESUME_FAULTS = {
    "the optimizer's state is not loaded": (
        "            self._load_optimizer_and_scheduler(resume_from_checkpoint)\n",
        "            pass\n", "optimizer state after loading",
    ),
    "the scheduler begins again": (
        "self.lr_scheduler.load_state_dict(", "(lambda state: None)(", "weights at the end",
    ),
    "the data begins again": (
        "skip_first_batches(train_dataloader, steps_trained_in_current_epoch)", "train_dataloader",
        "weights at the end",
    ),
    "the weights are not loaded": (
        "load_result = model.load_state_dict(state_dict, False)",
        "load_result = model.load_state_dict(model.state_dict(), False)", "weights after loading",
    ),
}  # fmt: skip
# Edits that change nothing.
HARMLESS = {
    "a local name": (EXPERTS, "sample_weights_g", "weights_in_order"),
    "another spelling": (MODELING, "hidden_states.view(-1, hidden_dim)",
                         "hidden_states.reshape(-1, hidden_dim)"),
    "a comment": (MODELING, "self.top_k = config.num_experts_per_tok",
                  "self.top_k = config.num_experts_per_tok  # experts of a token"),
    "another order of parameters": (
        MODELING, "        self.experts = Qwen3MoeExperts(config)\n"
        "        self.gate = Qwen3MoeTopKRouter(config)\n",
        "        self.gate = Qwen3MoeTopKRouter(config)\n"
        "        self.experts = Qwen3MoeExperts(config)\n",
    ),
}  # fmt: skip


def ways(found: HuntCell) -> set[str]:
    """Returns the confirmed ways."""
    return {way.way for way in found.outcome.ways if way.confirmed}


def cells(
    stack: environment.Stack, folder: Path, *relations: str, family: str = "qwen3_moe"
) -> list[HuntCell]:
    wanted = Wanted("5.23.0", (family,), relations, timeout=300.0)
    with contextlib.closing(session.Workers(wanted, stack, folder)) as workers:
        return [workers.make((family, relation)) for relation in relations]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_and_confirmed(fault: str, tmp_path: Path) -> None:
    need(STACK)
    file, old, new, relation = FAULTS[fault]
    stack = environment.ensure(STACK)
    with overlay(stack, tmp_path / "overlay", "transformers", file, (old, new)) as stack:
        (found,) = cells(stack, tmp_path / "hunt", relation)
    assert any(way.confirmed for way in found.outcome.ways), found


@pytest.mark.parametrize("fault", ADAPTER_FAULTS)
def test_a_planted_fault_in_peft_is_found_and_confirmed(fault: str, tmp_path: Path) -> None:
    need(PEFT)
    file, old, new, way = ADAPTER_FAULTS[fault]
    stack = environment.ensure(PEFT)
    with overlay(stack, tmp_path / "overlay", "peft", file, (old, new)) as stack:
        (found,) = cells(stack, tmp_path / "hunt", "lora")
    assert way in ways(found), found


def test_peft_adapts_what_it_was_asked_or_what_upstream_knows(tmp_path: Path) -> None:
    need(PEFT)
    stack = environment.ensure(PEFT)
    (right,) = cells(stack, tmp_path / "one", "lora")
    assert [way.way for way in right.outcome.ways if not way.holds] == []
    assert len(right.outcome.ways) == 7
    (shared,) = cells(stack, tmp_path / "two", "lora", family="deepseek_v3")
    assert ways(shared) == {"all-linear", "named-modules"}
    need(STACK)
    (absent,) = cells(environment.ensure(STACK), tmp_path / "three", "lora")
    assert absent.outcome.lacks == "peft"


@pytest.mark.parametrize("fault", RESUME_FAULTS)
def test_a_planted_fault_in_a_resume_is_found_and_confirmed(fault: str, tmp_path: Path) -> None:
    need(STACK)
    old, new, what = RESUME_FAULTS[fault]
    stack = environment.ensure(STACK)
    with overlay(stack, tmp_path / "overlay", "transformers", "trainer.py", (old, new)) as stack:
        (found,) = cells(stack, tmp_path / "hunt", "resume", family="gpt_oss")
    assert {way.what for way in found.outcome.ways if way.confirmed} == {what}, found


def test_a_resume_is_right_unless_the_checkpoint_has_other_names(tmp_path: Path) -> None:
    need(STACK)
    stack = environment.ensure(STACK)
    (right,) = cells(stack, tmp_path / "one", "resume", family="gpt_oss")
    assert [way.holds for way in right.outcome.ways] == [True, True]
    (converted,) = cells(stack, tmp_path / "two", "resume")
    assert ways(converted) == {"new-model"}, "transformers issue 48805"


@pytest.mark.parametrize(("fault", "family"), DRAWN)
def test_a_fault_in_a_family_drawn_by_lot_is_found(fault: str, family: str, tmp_path: Path) -> None:
    need(STACK)
    _, kind, old, new, relation = BY_LOT[fault]
    file = f"models/{family}/{kind}_{family}.py"
    stack = environment.ensure(STACK)
    with overlay(stack, tmp_path / "overlay", "transformers", file, (old, new)) as stack:
        (found,) = cells(stack, tmp_path / "hunt", relation, family=family)
    assert any(way.confirmed for way in found.outcome.ways), found


@pytest.mark.parametrize("edit", HARMLESS)
def test_a_harmless_edit_confirms_nothing(edit: str, tmp_path: Path) -> None:
    need(STACK)
    relations = ("save-and-load", "trainable-parameters", "expert-implementations", "padding",
                 "gradient", "use-cache", "compile")  # fmt: skip
    file, old, new = HARMLESS[edit]
    stack = environment.ensure(STACK)
    with overlay(stack, tmp_path / "overlay", "transformers", file, (old, new)) as stack:
        found = cells(stack, tmp_path / "hunt", *relations)
    assert not any(way.confirmed for cell in found for way in cell.outcome.ways), found
    assert all(cell.outcome.built and not cell.outcome.problem for cell in found), found


def test_two_ranks_show_what_is_wrong_in_accelerate_trainer_and_an_advice(tmp_path: Path) -> None:
    need(STACK)
    stack = environment.ensure(STACK)
    of_layouts, of_trainer, of_generate = cells(
        stack, tmp_path / "hunt", "layouts", "trainer", "generate"
    )
    assert len(of_generate.outcome.ways) == 5
    assert all(way.holds for way in of_generate.outcome.ways), of_generate
    confirmed = {way.way: way.what for way in of_layouts.outcome.ways if way.confirmed}
    assert confirmed == {
        "accelerate-ram-efficient-ignored-experts": "wrong-weights:not-left-out:no-rank",
        "ep-size-empty-tp-plan": "crash:ValueError:mixin.py _resolve_parallel_plans:several-ranks",
        "accelerate-ep-size": "crash:TypeError:fsdp_utils.py fsdp2_prepare_model:several-ranks",
    }
    holding = [way.way for way in of_layouts.outcome.ways if way.holds]
    assert {"fully-shard", "accelerate", "fsdp-size", "tp-size", "fsdp-size-ep-size"} <= {*holding}
    assert sum(name.endswith("-saved") for name in holding) == 5
    shown = {way.way for way in of_trainer.outcome.ways if way.confirmed}
    assert shown == {"data-parallel", "accumulation"}
    assert len(of_trainer.outcome.ways) == 4


def test_a_fault_in_what_is_saved_under_a_layout_is_found(tmp_path: Path) -> None:
    need(STACK)
    stack = environment.ensure(STACK)
    turned = '{n: t.flip(0) if "layers.1.self_attn.q_proj" in n else t for n, t in %s.items()}'
    gathered = "gather_full_state_dict(model_to_save)"
    edits = [
        (f"return {gathered}", f"return {turned % gathered}"),
        ("                state_dict = {}\n            return state_dict\n",
         f"                state_dict = {{}}\n            return {turned % 'state_dict'}\n"),
    ]  # fmt: skip
    file = "distributed/mixin.py"
    with overlay(stack, tmp_path / "overlay", "transformers", file, *edits) as stack:
        (found,) = cells(stack, tmp_path / "hunt", "layouts")
    wrong = {w.way for w in found.outcome.ways if w.confirmed and w.what == "wrong-weights:saved"}
    assert wrong == {f"{n}-saved" for n in ("fsdp-size", "tp-size", "ep-size", "fsdp-size-ep-size")}


@pytest.mark.parametrize("renamed", [False, True])
def test_a_checkpoint_of_the_release_before_loads_or_its_lost_names_are_found(
    renamed: bool, tmp_path: Path
) -> None:
    before = {**STACK, "transformers": "5.22.0"}
    need(STACK)
    need(before)
    stack = environment.ensure(STACK)
    # The name in the checkpoint that a conversion expects, as if a release had changed it.
    edit = ("self.q_norm", "self.queries_norm") if renamed else ("self.q_norm", "self.q_norm")
    wanted = Wanted("5.23.0", timeout=300.0)
    with (
        overlay(stack, tmp_path / "overlay", "transformers", MODELING, edit) as stack,
        contextlib.closing(
            session.Workers(wanted, environment.ensure(before), tmp_path / "hunt", "5.22.0")
        ) as earlier,
        contextlib.closing(
            session.Workers(wanted, stack, tmp_path / "hunt", "", environment.ensure(before))
        ) as later,
    ):
        found = later.make(("qwen3_moe", "earlier-checkpoint"))
        assert "earlier-checkpoint" in later.listing().relations
        assert "earlier-checkpoint" not in earlier.listing().relations
        absent = later.make(("no_such_family", "earlier-checkpoint"))
        alone = earlier.make(("qwen3_moe", "earlier-checkpoint"))
    assert ways(found) == ({"from-pretrained"} if renamed else set()), found
    assert [way.holds for way in found.outcome.ways] == [not renamed]
    assert absent.outcome.applicable == "the earlier release: the release has no such family"
    assert alone.outcome.applicable == "there is no earlier release (--against)"
    assert not list((tmp_path / "hunt").rglob("checkpoints")), "what was saved is removed"


def test_a_release_is_listed_and_a_family_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    need(STACK)
    words = ["hunt", "--release", "5.23.0", "--stack", "accelerate=1.15.0", "--json"]
    words += ["--family", "qwen3_moe", "--relation", "causality", "--relation", "batch"]
    assert app.main([*words, "--out", str(tmp_path / "out")]) == ExitCode.OK
    raw = json.loads(capsys.readouterr().out)
    assert raw["families"] == {"qwen3_moe": "moe"}
    assert len(raw["cells"]) == 2
    assert not list((tmp_path / "out" / "cells").iterdir()), "cells that hold leave no files"


# Release, its accelerate, and the ways that are wrong there, with the scenario that has the bug.
OLDER = [
    ("5.17.0", "1.15.0", {"ep-size-batched-mm": "ep-router-gradient"}),
    ("5.12.1", "1.15.0", {
        "accelerate-ram-efficient-ignored-experts": "ep-ignored-modules",
        "accelerate-ep-size": "ep-overwrite",
    }),
    ("4.53.2", "1.8.1", {
        "tp-size": "tp-head-norm", "fully-shard-one-token": "expert-starvation",
    }),
]  # fmt: skip


@pytest.mark.parametrize(("release", "accelerate", "ways"), OLDER)
def test_bugs_of_older_releases_are_found_without_being_told(
    release: str, accelerate: str, ways: dict[str, str], tmp_path: Path
) -> None:
    assert set(ways.values()) <= set(catalogue.names())
    request = {"transformers": release, "accelerate": accelerate}
    need(request)
    wanted = Wanted(release, timeout=300.0)
    with contextlib.closing(
        session.Workers(wanted, environment.ensure(request), tmp_path)
    ) as workers:
        found = workers.make(("qwen3_moe", "layouts"))
    assert set(ways) <= {one.way for one in found.outcome.ways if one.confirmed}, found
