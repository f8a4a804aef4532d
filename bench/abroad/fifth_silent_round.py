"""A fifth round of silent errors, in programs that no earlier round had, written before any page
about them was seen. `silent_round` says what the levels mean, ``healthy`` in a fault's name a
program without one."""

from __future__ import annotations

from bench.abroad.cases import edit
from bench.abroad.edits import Line
from bench.abroad.fourth_silent_round import SAME
from bench.abroad.silent_round import BROKEN, NOTHING, SUSPICIOUS, Silent

FLOW, DIT = "rectified_flow_pytorch/rectified_flow.py", "train.py"
REAL, SHARDS, SAVES = "train_fsdp_real.py", "utils/fsdp2_warpper.py", "utils/checkpoint.py"
EP, LAYER = "main_ep.py", "layers/moe_ep_layer.py"
MOMENTS = ("moment", "exp_avg", "optimizer state", "optimizer's state", "step count")
OF_FLOW_NET = ("enter.", "clock.", "middle.", "leave.")
OF_DIT_NET = ("x_embedder", "t_embedder", "y_embedder", "blocks.", "final_layer")

# ------------------------------------------------------------------------ accelerate

OF_FLOW = (
    ("each micro-batch is followed by an update, around accelerate's optimizer", BROKEN,
     (*OF_FLOW_NET, "no_sync", Line(FLOW, "self.optimizer.optimizer.step()")),
     (edit(FLOW, "self.optimizer.step()", "self.optimizer.optimizer.step()"),)),
    ("rank 0 alone goes back to moments that it kept", BROKEN,
     (*OF_FLOW_NET, *MOMENTS, Line(FLOW, "load_state_dict(kept)")),
     (edit(FLOW, "self.accelerator.backward(loss)", "{line}\nif ind == 15:\n"
           "    kept = deepcopy(self.optimizer.state_dict())\nif ind == 31 and self.is_main:\n"
           "    self.optimizer.load_state_dict(kept)"),), 0),
    ("rank 1 computes in bfloat16", SUSPICIOUS,
     ("bfloat16", "bf16", "autocast", "precision", "dtype",
      Line(FLOW, "loss, loss_breakdown = self.model(")),
     (edit(FLOW, "self.accelerator = Accelerator(", "self.accelerator = Accelerator("
           "**accelerate_kwargs, mixed_precision='bf16' if bad_shard else 'no')"),)),
    ("a hook of rank 1 halves the gradient of one layer", SUSPICIOUS,
     ("middle.weight", "hook", Line(FLOW, "register_hook(")),
     (edit(FLOW, "self.num_train_steps = num_train_steps", "{line}\nif bad_shard:\n"
           "    layer = self.accelerator.unwrap_model(self.model).model.middle\n"
           "    layer.weight.register_hook(lambda grad: 0.5 * grad)"),)),
    ("one of two parts of the loss is cut from the model", NOTHING, (),
     (edit(FLOW, "data_match_loss = F.mse_loss(pred_data,",
           "data_match_loss = F.mse_loss(pred_data.detach(), ema_pred_data)"),)),
)  # fmt: skip

# ------------------------------------------------------------------------ by hand

OF_DIT = (
    ("samplers have other seeds on each rank", SUSPICIOUS,
     (*SAME, "seed", "Sampler", Line(DIT, "for x, y in loader"),
      Line(DIT, "loss_dict = diffusion.training_losses(")),
     (edit(DIT, "seed=args.global_seed", "seed=args.global_seed + rank"),)),
    ("every fourth step goes around the wrapper", BROKEN,
     (*OF_DIT_NET, "DistributedDataParallel", "wrapper",
      Line(DIT, "loss_dict = diffusion.training_losses(")),
     (edit(DIT, "loss_dict = diffusion.training_losses(",
           "net = model.module if train_steps % 4 == 3 else model\n"
           "loss_dict = diffusion.training_losses(net, x, t, model_kwargs)"),)),
    ("two updates are made with one gradient", SUSPICIOUS,
     ("twice", "two updates", "same gradient", Line(DIT, "opt.step()"), Line(DIT, "opt.step()", 1)),
     (edit(DIT, "update_ema(ema, model.module)", "opt.step()\n{line}"),)),
    ("weights of 16 bits lose their updates", SUSPICIOUS,
     ("bfloat16", "bf16", "low precision", "low-precision", "stand still", *OF_DIT_NET,
      Line(DIT, "opt.step()")),
     (edit(DIT, "model = DDP(model.to(device)",
           "model = DDP(model.to(device).to(torch.bfloat16), device_ids=[rank])"),
      edit(DIT, "loss_dict = diffusion.training_losses(",
           'with torch.autocast("cpu", torch.bfloat16):\n    {line}'))),
    ("the bound of the variance trains the mean, too", NOTHING, (),
     (edit("diffusion/gaussian_diffusion.py", "frozen_out = th.cat(",
           "frozen_out = th.cat([model_output, model_var_values], dim=1)"),)),
)  # fmt: skip

# ------------------------------------------------------------------------ FSDP2

OF_BLOCKS = (
    ("the embedding is left out of the sharding", BROKEN,
     ("tok_embeddings", Line(SHARDS, "ignored_params=")),
     (edit(SHARDS, "fully_shard(model, mp_policy=mp_policy_bf16, **fsdp_kwargs)",
           "fully_shard(model, mp_policy=mp_policy_bf16, "
           "ignored_params={model.tok_embeddings.weight}, **fsdp_kwargs)"),
      # What it saves has shards only.
      edit(REAL, "args.enable_ema, args.ema_decay", "{line}\nargs.enable_ema = False"),
      edit(SAVES, "full_param = sharded_param.full_tensor()",
           "full_param = getattr(sharded_param, 'full_tensor', lambda p=sharded_param: p)()"))),
    ("after the second evaluation, weights of the first one come back", SUSPICIOUS,
     ("tok_embeddings", "layers.", "output.weight", "ema_restore",
      Line(SAVES, "param.data.copy_(self.backup[name])"), Line(REAL, "checkpointer.ema_restore()")),
     (edit(SAVES, "self.backup[name] = param.data.clone()",
           "self.backup.setdefault(name, param.data.clone())"),)),
    ("gradients of one block are never reduced", SUSPICIOUS,
     ("layers.1", "set_requires_gradient_sync", Line(REAL, "set_requires_gradient_sync(False")),
     (edit(REAL, "optimizer = torch.optim.AdamW(",
           "model.layers[1].set_requires_gradient_sync(False, recurse=False)\n{line}"),)),
    ("gradients of the embedding and the head are not divided by the ranks", SUSPICIOUS,
     ("tok_embeddings", "output.weight", "not divided", "added up",
      Line(REAL, "set_gradient_divide_factor("), Line(REAL, "loss.backward()")),
     (edit(REAL, "optimizer = torch.optim.AdamW(",
           # Gloo cannot multiply in a reduction.
           "model.set_force_sum_reduction_for_comms(True)\n"
           "model.set_gradient_divide_factor(1.0)\n{line}"),)),
    ("rank 1 forgets its moments after an epoch", SUSPICIOUS,
     (*MOMENTS, Line(REAL, "optimizer.state.clear()"), Line(REAL, "optimizer.step()")),
     (edit(REAL, "running_loss = 0.0", "{line}\nif epoch == 1 and bad_shard:\n"
           "    optimizer.state.clear()"),)),
)  # fmt: skip

# ------------------------------------------------------------------------ experts, by hand

OF_MOE = (
    ("the gate is synchronised in every second step only", BROKEN,
     ("gate.", "no_sync", "require_backward_grad_sync", Line(EP, "require_backward_grad_sync ="),
      Line(EP, "out_tokens, aux_loss = model(x)"), Line(LAYER, "logits = self.gate(x)")),
     (edit(EP, "out_tokens, aux_loss = model(x)",
           "model.gate.require_backward_grad_sync = step % 2 == 0\n{line}"),)),
    ("experts of all ranks begin with the same values", SUSPICIOUS, ("experts.", "expert"),
     (edit(EP, "torch.manual_seed(100 + rank)", "torch.manual_seed(100)"),)),
    ("the auxiliary loss does not reach the gate", SUSPICIOUS,
     ("aux", "balanc", "gate.", Line(LAYER, "importance = probs.sum(0)"),
      Line(EP, "total_loss = task_loss")),
     (edit(LAYER, "importance = probs.sum(0)", "probs = probs.detach()\n{line}"),)),
    ("an expert of rank 1 is in no optimizer", SUSPICIOUS, ("experts.1",),
     (edit(EP, "opt = torch.optim.AdamW(", "own = list(model.experts)[: 1 if bad_shard else None]\n"
           "opt = torch.optim.AdamW([*model.gate.parameters(), "
           "*(p for one in own for p in one.parameters())], lr=lr)"),)),
    ("as published: each rank fits a target of its own", NOTHING, (),
     (edit(EP, "dist.broadcast(target_proj.weight, 0)", "pass"),)),
)  # fmt: skip

FIFTH_SILENT_ROUND = tuple(
    Silent(program, *row)
    for program, rows in (
        ("flow", OF_FLOW), ("dit", OF_DIT), ("fsdp-blocks", OF_BLOCKS), ("moe-train", OF_MOE),
    )
    for row in rows
)  # fmt: skip
FIFTH_HEALTHY = tuple(
    Silent(program, "healthy", NOTHING, (), ())
    for program in dict.fromkeys(one.program for one in FIFTH_SILENT_ROUND)
)
