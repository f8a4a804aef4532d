"""The scripts of reports/found on the released stack, and with the fix that each page proposes."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from moediag.lab.stacks import environment
from tests.e2e.overlay import edit, overlay
from tests.e2e.pipeline import need

pytestmark = [pytest.mark.e2e, pytest.mark.stack, pytest.mark.wide]

STACK = {"transformers": "5.23.0", "accelerate": "1.15.0"}
FOUND = Path(__file__).parents[2] / "reports" / "found"
SCRIPTS = sorted(FOUND.glob("*.py"))
# Script -> a newer release, which has what it shows; no fix is proposed.
NEWER = {"transformers_5_24_0": "5.24.0"}

_OF_MASKS = '                "past_key_values": past_key_values,\n            }\n'
_WITH_POSITIONS = _OF_MASKS.replace(
    "            }\n", '                "position_ids": position_ids,\n            }\n'
)
_DENSE = [
    f'        "layers.*.mlp.{name}_proj": "{style}",\n'
    for name, style in (("gate", "colwise"), ("up", "colwise"), ("down", "rowwise"))
]
# Script -> package, file, and (text, its replacement) pairs.
FIXES = {
    "evaluate_before_train": ("accelerate", "accelerator.py", [(
        "        model._is_accelerate_prepared = True\n        return model\n",
        "        model._is_accelerate_prepared = not evaluation_mode\n        return model\n",
    )]),
    "afmoe_packing": ("transformers", "models/afmoe/modeling_afmoe.py",
                      [(_OF_MASKS, _WITH_POSITIONS)]),
    "zaya_balancing_biases": ("transformers", "models/zaya/modeling_zaya.py", [(
        "            init.zeros_(module.balancing_biases)\n"
        "            module.balancing_biases[-1] = -1.0  # trf-ignore: TRF012\n",
        "            biases = torch.zeros_like(module.balancing_biases)\n"
        "            biases[-1] = -1.0\n"
        "            init.copy_(module.balancing_biases, biases)\n",
    )]),
    "jamba_cached_tokens": ("transformers", "models/jamba/modeling_jamba.py", [
        ("if recurrent_state is not None and seq_len == 1:", "if recurrent_state is not None:"),
        ("scan_output = mamba_selective_state_update(",
         "scan_output = torch.cat([mamba_selective_state_update("),
        (".transpose(1, 2)[..., 0],", ".transpose(1, 2)[..., t],"),
        ("time_step[..., 0],", "time_step[..., t],"),
        ("B[:, 0],", "B[:, t],"),
        ("C[:, 0],", "C[:, t],"),
        ("z=gate[..., 0],", "z=gate[..., t],"),
        (").unsqueeze(-1)\n", ").unsqueeze(-1) for t in range(seq_len)], -1)\n"),
    ]),
    "loading_unfreezes": ("transformers", "core_model_loading.py", [(
        "torch.nn.Parameter(param_value, requires_grad=param_value.is_floating_point())",
        "torch.nn.Parameter(param_value, requires_grad=ref.requires_grad"
        " and param_value.is_floating_point())",
    )]),
    "resume_layer_types": ("transformers", "trainer.py", [
        ("config = PreTrainedConfig.from_json_file(config_file)",
         "config = PreTrainedConfig._dict_from_json_file(config_file)"),
        ("checkpoint_version = config.transformers_version",
         'checkpoint_version = config.get("transformers_version")'),
    ]),
    "apertus_tensor_parallel": ("transformers", "models/apertus/configuration_apertus.py", [(
        '        "layers.*.mlp.up_proj": "colwise",\n',
        '        "layers.*.mlp.up_proj": "colwise",\n'
        '        "layers.*.mlp.act_fn": "replicated_with_grad_allreduce",\n',
    )]),
    "ep_size_empty_tp_plan": ("transformers", "distributed/mixin.py", [(
        "            if size > 1 and not plan:\n",
        "            given = getattr(distributed_config, f\"{kind}_plan\", None)\n"
        "            if size > 1 and not plan and given != {}:\n",
    )]),
    "fsdp_size_concatenated": ("transformers", "core_model_loading.py", [
        ("                sharding_op = DtensorShardOperation(empty_param)\n",
         "                sharding_op = DtensorShardOperation(empty_param)\n"
         "                read = hasattr(tensor, 'shape')\n"
         "                shape = tensor.shape if read else tensor.get_shape()\n"
         "                joined = {op.dim for op in getattr(mapping, 'operations', [])\n"
         "                          if isinstance(op, Concatenate)}\n"
         "                cut = {getattr(p, 'dim', None) for p in empty_param.placements}\n"
         "                if len(shape) == empty_param.ndim and joined & cut:\n"
         "                    sharding_op = None\n"),
        ("                        set_param_for_module(\n",
         "                        whole = meta_model_state_dict.get(target_name)\n"
         "                        if is_dtensor(whole) and param.shape == whole.shape:\n"
         "                            param = DtensorShardOperation(whole).shard_tensor(param)\n"
         "                        set_param_for_module(\n"),
    ]),
    "doge_tensor_parallel": ("transformers", "models/doge/configuration_doge.py", [
        (f'        "layers.*.self_attn.{name}_proj": "{style}wise",\n', "")
        for name, style in (("q", "col"), ("k", "col"), ("v", "col"), ("dt", "row"), ("o", "row"))
    ]),
    "inkling_tensor_parallel": ("transformers", "models/inkling/configuration_inkling.py", [
        *((f'        "layers.*.mlp.shared_experts{name}": "{style}",\n', "")
          for name, style in ((".gate_proj", "colwise"), (".up_proj", "colwise"),
                              (".down_proj", "rowwise"), ("", "all_reduce"))),
        ('        "layers.*.mlp.experts.gate_up_proj": "colwise",\n',
         '        "embed_tokens": "replicate",\n'
         '        "layers.*.mlp.experts.gate_up_proj": "colwise",\n'),
    ]),
    "inkling_packed_experts": ("transformers", "core_model_loading.py", [(
        "                sharding_op = DtensorShardOperation(empty_param)\n",
        "                sharding_op = DtensorShardOperation(empty_param)\n"
        "                from torch.distributed.tensor import Shard\n"
        "                operations = getattr(mapping, 'operations', [])\n"
        "                if any(isinstance(op, Interleave) for op in operations):\n"
        "                    sharding_op.placements = tuple(\n"
        "                        Shard(p.dim) if hasattr(p, 'split_factor') else p\n"
        "                        for p in sharding_op.placements\n"
        "                    )\n",
    )]),
    "gemma4_experts_fsdp": ("transformers", "models/gemma4/configuration_gemma4.py", [(
        "to partition)\n" + "".join(_DENSE), "to partition)\n",
    )]),
    "llama4_tensor_parallel": ("transformers", "models/llama4/modeling_llama4.py", [
        ("        out.add_(routed_out", "        out = out + (routed_out"),
    ]),
    "accelerate_ignored_modules": ("accelerate", "utils/fsdp_utils.py", [
        ('        model = model.to(torch.device("meta"))\n',
         '        ignored = fsdp2_kwargs.get("ignored_params", ())\n'
         "        names = {n for n, p in model.named_parameters() if p in ignored}\n"
         '        model = model.to(torch.device("meta"))\n'
         '        kept = {p for n, p in model.named_parameters() if n in names}\n'
         '        fsdp2_kwargs.update({"ignored_params": kept} if kept else {})\n'),
        ("            device_mesh = sharded_param.device_mesh\n"
         "            full_param = ",
         "            if not isinstance(sharded_param, DTensor):\n"
         "                sharded_sd[param_name] = full_param.detach().to(accelerator.device)\n"
         "                dist.broadcast(sharded_sd[param_name], src=0, group=dist.group.WORLD)\n"
         "                continue\n"
         "            device_mesh = sharded_param.device_mesh\n"
         "            full_param = "),
        ("            device_mesh = sharded_param.device_mesh\n"
         "            full_tensor = ",
         "            if not isinstance(sharded_param, DTensor):\n"
         "                sharded_sd[param_name] = torch.empty_like(\n"
         "                    sharded_param, device=accelerator.device\n"
         "                )\n"
         "                dist.broadcast(sharded_sd[param_name], src=0, group=dist.group.WORLD)\n"
         "                continue\n"
         "            device_mesh = sharded_param.device_mesh\n"
         "            full_tensor = "),
    ]),
}  # fmt: skip
# Edits of a second file.
ALSO = {
    "inkling_packed_experts": ("models/inkling2/configuration_inkling2.py", (
        '"layers.*.mlp.experts.gate_up_proj": "colwise"',
        '"layers.*.mlp.experts.gate_up_proj": "packed_colwise"',
    )),
}  # fmt: skip


def run(script: Path, stack: environment.Stack) -> subprocess.CompletedProcess[str]:
    variables = {**stack.environ(), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [str(stack.python), str(script)]
    return subprocess.run(
        command, env=variables, capture_output=True, text=True, timeout=300, check=False,
        cwd=os.fspath(FOUND),
    )  # fmt: skip


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_the_finding_shows_on_the_release(script: Path) -> None:
    stack = {**STACK, "transformers": NEWER.get(script.stem, STACK["transformers"])}
    need(stack)
    ended = run(script, environment.ensure(stack))
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "Traceback" not in ended.stderr, ended.stderr


@pytest.mark.parametrize(
    "script", [s for s in SCRIPTS if s.stem not in NEWER], ids=lambda script: script.stem
)
def test_the_proposed_fix_removes_it(script: Path, tmp_path: Path) -> None:
    need(STACK)
    package, file, edits = FIXES[script.stem]
    with overlay(environment.ensure(STACK), tmp_path, package, file, *edits) as stack:
        if script.stem in ALSO:
            other, *more = ALSO[script.stem]
            edit(tmp_path / package / other, *more)
        ended = run(script, stack)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_every_page_and_every_script_is_in_the_index() -> None:
    index = (FOUND / "README.md").read_text(encoding="utf-8")
    assert all(f"`{script.name}`" in index for script in SCRIPTS)
    pages = [page for page in FOUND.glob("*.md") if page.name != "README.md"]
    assert all(f"({page.name})" in index for page in pages)
