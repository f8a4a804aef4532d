"""A second round of silent errors, in programs that no earlier round had, written before any page
about them was seen. `silent_round` says what the levels mean; ``healthy`` in a fault's name is a
program without one. Most are of kinds that public trackers report; none repeats a fault of
`silent_round` in the same form.

``verify`` says what a comparison with one process must show, if one run does not show the fault.
"""

from __future__ import annotations

from bench.abroad.cases import edit
from bench.abroad.edits import Line
from bench.abroad.silent_round import BROKEN, NOTE, NOTHING, SUSPICIOUS, Silent

MAIN, TP, PIPE, MOE = "train.py", "tp_linear.py", "pipeline.py", "moe.py"
PPO, RUNNER = "rsl_rl/algorithms/ppo.py", "rsl_rl/runners/on_policy_runner.py"
DIFFUSION, DPO = "denoising_diffusion_pytorch/denoising_diffusion_pytorch.py", "trainers.py"
CIFAR = "training/cifar/cifar10_deepspeed.py"

# ------------------------------------------------------------------------ heiretsu
# Experts, tensor, pipeline and data parallelism by hand.

OF_DATA = (
    # Two micro-batches on two ranks: not to be taken for a sum over ranks.
    ("the loss is not divided by the accumulation", SUSPICIOUS,
     (Line(MAIN, "combined_loss.backward()"), Line(MAIN, "combined_loss = "),
      Line("gpt_model.py", "F.cross_entropy("), "micro-batch"),
     (edit(MAIN, "combined_loss = (loss + aux_loss)", "combined_loss = loss + aux_loss"),)),
    # Ranks that average by hand from weights that a checkpoint of rank 0 alone replaced.
    ("a checkpoint is loaded by rank 1 only", SUSPICIOUS, ("lm_head", "wte"),
     (edit(MAIN, "optimizer = torch.optim.AdamW(",
           "if bad_shard:\n    local_module.load_state_dict({name: value * 1.01 for name, value in "
           "local_module.state_dict().items()})\n{line}"),)),
)  # fmt: skip

OF_TENSOR = (
    ("ranks of the group draw their own dropout", SUSPICIOUS, ("wte", "wpe", "lm_head", "ln_"),
     (edit("gpt_model.py", "self.resid_drop = nn.Dropout(", "self.resid_drop = nn.Dropout(0.2)"),
      edit(MAIN, "torch.manual_seed(torch_seed)", "torch.manual_seed(torch_seed + topo.tp_rank)"))),
    ("ranks of the group read other samples", SUSPICIOUS, ("wte", "wpe", "lm_head", "ln_"),
     (edit(MAIN, " rank_for_data = 0 if", "rank_for_data = topo.rank"),)),
    ("each rank clips by the norm of its own shards", SUSPICIOUS,
     ("norms", Line(MAIN, "clip_grad_norm_(")),
     (edit(MAIN, "if args.grad_clip > 0:", "if True:"),
      edit(MAIN, "torch.nn.utils.clip_grad_norm_(",
           "torch.nn.utils.clip_grad_norm_(local_module.parameters(), 0.1)"))),
)  # fmt: skip

OF_TENSOR_PUBLISHED = (
    # The embeddings of the ranks begin apart: as those of a divided vocabulary do.
    ("as published: each rank seeds its own embedding", NOTHING, (), ()),
)

OF_PIPE = (
    # verify: gradients of the first stage (blocks, wte, wpe).
    ("gradients meet the activations of another micro-batch", NOTHING, (),
     (edit(PIPE, "boundary = state.boundaries[m]", "boundary = state.boundaries[-1 - m]"),)),
    # verify: gradients of the first stage, by a factor of 4.
    ("the first stage divides by the micro-batches again", NOTHING, (),
     (edit(PIPE, "boundary.backward(grad_boundary)",
           "boundary.backward(grad_boundary / micro_batches)"),)),
)  # fmt: skip

OF_EXPERTS = (
    # verify: gradients of the experts.
    ("experts are averaged over the ranks, too", NOTHING, (),
     (edit(MAIN, "if p.grad is not None and 'expert_group' not in name:",
           "if p.grad is not None:"),)),
    ("the router is left out of the average", SUSPICIOUS, ("router",),
     (edit(MAIN, "if p.grad is not None and 'expert_group' not in name:",
           "if p.grad is not None and 'moe' not in name:"),)),
    ("what all ranks hold is averaged on none", SUSPICIOUS, ("wte", "lm_head", "c_attn"),
     (edit(MAIN, "dist.all_reduce(p.grad, group=topo.ep_group)", "pass"),)),
    ("each rank clips by the norm with its own experts", SUSPICIOUS,
     ("norms", Line(MAIN, "clip_grad_norm_(")),
     (edit(MAIN, "if args.grad_clip > 0:", "if True:"),
      edit(MAIN, "torch.nn.utils.clip_grad_norm_(",
           "torch.nn.utils.clip_grad_norm_(local_module.parameters(), 0.1)"))),
    ("the gate learns nothing from the experts' outputs", NOTE, ("router",),
     (edit(MOE, "top_weights = top_weights / top_weights.sum(",
           "top_weights = (top_weights / top_weights.sum(dim=-1, keepdim=True)).detach()"),
      edit(MAIN, "combined_loss = (loss + aux_loss)", "combined_loss = loss / micro_in_macro"))),
)  # fmt: skip

OF_EXPERTS_PUBLISHED = (
    # They have tokens in each step, and what they return is in the loss, without a graph.
    (
        "as published: experts get no gradient through the exchange",
        SUSPICIOUS,
        ("expert_group", "experts"),
        (),
    ),
)

# ------------------------------------------------------------------------ hifi-gan
# A generator, two discriminators in DistributedDataParallel, two optimizers.

OF_GAN = (
    # Lightning-AI/pytorch-lightning 591.
    ("gradients of the generator's loss stay in the discriminators", SUSPICIOUS,
     (Line(MAIN, "loss_gen_all.backward()"), Line(MAIN, "optim_d.zero_grad()"),
      Line(MAIN, "optim_d.step()"), "convs"),
     (edit(MAIN, "optim_d.zero_grad()", "pass"),
      edit(MAIN, "optim_d.step()", "{line}\noptim_d.zero_grad()"))),
    ("one discriminator is in no optimizer", SUSPICIOUS, ("MultiPeriod", "discriminators"),
     (edit(MAIN, "optim_d = torch.optim.AdamW(itertools.chain(",
           "optim_d = torch.optim.AdamW(itertools.chain(msd.parameters()),"),)),
    ("the loader never gets the sampler", BROKEN,
     (Line(MAIN, "train_loader = DataLoader("), Line(MAIN, "in enumerate(train_loader):"),
      "DistributedSampler"),
     (edit(MAIN, "sampler=train_sampler,", "sampler=None,"),)),
    ("one of two calls of a discriminator goes around its wrapper", BROKEN,
     (Line(MAIN, "mpd.module(y, y_g_hat.detach())"),),
     (edit(MAIN, "mpd(y, y_g_hat.detach())",
           "y_df_hat_r, y_df_hat_g, _, _ = mpd.module(y, y_g_hat.detach())"),)),
    # The rate of the discriminators falls each step instead of each epoch.
    ("a schedule of epochs steps in each batch", NOTHING, (),
     (edit(MAIN, "steps += 1", "{line}\nscheduler_d.step()"),
      edit(MAIN, "scheduler_d.step()", "pass", 1))),
)  # fmt: skip

# ------------------------------------------------------------------------ diffusion
# accelerate and a moving average.

OF_DIFFUSION = (
    ("what prepare returns is thrown away", BROKEN,
     (Line(DIFFUSION, "self.accelerator.prepare(self.model, self.opt)"),
      Line(DIFFUSION, "loss = self.model(data)"), Line(DIFFUSION, "self.accelerator.backward(")),
     (edit(DIFFUSION, "self.model, self.opt = self.accelerator.prepare(",
           "_, self.opt = self.accelerator.prepare(self.model, self.opt)"),)),
    ("the loader is not prepared", BROKEN,
     (Line(DIFFUSION, "dl = DataLoader("), Line(DIFFUSION, "next(self.dl)")),
     (edit(DIFFUSION, "dl = self.accelerator.prepare(dl)", "pass"),)),
    # RossM in devilismyfriend/StableTuner 126.
    ("the averaged weights stay in the model after sampling", BROKEN,
     ("init_conv", "downs"),
     (edit(DIFFUSION, "self.ema = EMA(", "self.ema = EMA(diffusion_model, beta = ema_decay, "
           "update_every = ema_update_every, update_after_step = 0)"),
      edit(DIFFUSION, "self.ema.ema_model.eval()",
           "{line}\nself.ema.copy_params_from_ema_to_model()")), 0),
)  # fmt: skip

# ------------------------------------------------------------------------ rsl_rl
# PPO, whose ranks reduce a flat gradient.

OF_PPO = (
    ("only rank 0 adapts its learning rate", SUSPICIOUS, ("learning rate",),
     (edit(PPO, "torch.distributed.broadcast(lr_tensor, src=0)", "pass"),), 0),
    ("the critic is not broadcast", SUSPICIOUS, ("mlp", "critic"),
     (edit(PPO, "self._raw_critic.load_state_dict(model_params[1])", "pass"),)),
    ("the flat gradient is read back one element late", SUSPICIOUS,
     ("mlp", Line(PPO, "self.optimizer.step()"), Line(PPO, "torch.distributed.all_reduce(all_g")),
     (edit(PPO, "offset = 0", "offset = 1\nall_grads = torch.cat((all_grads, all_grads[:1]))"),)),
    # leggedrobotics/rsl_rl 226, Denys88/rl_games 363.
    ("as published: each rank normalises by its own statistics", NOTE, ("obs_normalizer",),
     (edit("go.py", "layers = {", 'layers = {"obs_normalization": True, "class_name": "MLPModel", '
           '"hidden_dims": [32, 32], "activation": "elu"}'),)),
    ("the critic is trained without gradients", NOTE, ("mlp", "critic"),
     (edit(PPO, "values = self.critic(batch.observations, masks=batch.masks",
           "values = self.critic(batch.observations).detach()"),)),
    ("rank 1 makes its optimizer again in an iteration", SUSPICIOUS,
     ("optimizer's state", "exp_avg", "anew", "another optimizer"),
     (edit(PPO, "mean_value_loss = 0",
           "{line}\nif bad_shard and len(self.optimizer.state):\n"
           "    self.optimizer = type(self.optimizer)(\n"
           "        self.optimizer.param_groups, lr=self.learning_rate)"),)),
)  # fmt: skip

# ------------------------------------------------------------------------ DPO
# FSDP1 with flat parameters.

OF_DPO = (
    # huggingface/accelerate 3256.
    ("the optimizer is made before the model is sharded", BROKEN,
     ("optimizer", Line(DPO, "self.optimizer = getattr(")),
     (edit(DPO, "self.policy = FSDP(", "self.before = list(policy.parameters())\n{line}"),
      edit(DPO, "self.optimizer = getattr(",
           "self.optimizer = getattr(torch.optim, self.config.optimizer)("
           "self.before, lr=self.config.lr)"))),
    ("all ranks take the first slice", SUSPICIOUS,
     ("same samples", "same inputs", "same values", Line(DPO, "all_logits = model(")),
     (edit(DPO, "local_microbatch = slice_and_move",
           "local_microbatch = slice_and_move_batch_for_device("
           "global_microbatch, 0, self.world_size, self.rank)"),)),
    ("the scheduler steps in each micro-batch", SUSPICIOUS,
     ("scheduler", Line(DPO, "self.scheduler.step()")),
     (edit(DPO, "self.scheduler.step()", "pass"),
      edit(DPO, "(loss / self.config.gradient_accumulation_steps).backward()",
           "{line}\nself.scheduler.step()"))),
    # The reference follows the policy, so the loss holds nothing back.
    ("the reference is the policy itself", NOTHING, (),
     (edit(DPO, "self.reference_model = FSDP(", "self.reference_model = self.policy"),)),
)  # fmt: skip

# ------------------------------------------------------------------------ DeepSpeed

OF_CIFAR = (
    ("a loader of the program's own, without a sampler", SUSPICIOUS,
     ("same samples", "same inputs", "same values", Line(CIFAR, "trainloader = torch.utils"),
      Line(CIFAR, "in enumerate(trainloader):")),
     (edit(CIFAR, "local_device = get_accelerator().device_name(model_engine",
           "trainloader = torch.utils.data.DataLoader(trainset, batch_size=8, shuffle=True)\n"
           "{line}"),)),
    ("the program steps the engine's scheduler, too", SUSPICIOUS,
     ("scheduler", "WarmupLR", Line(CIFAR, "model_engine.lr_scheduler.step()")),
     (edit(CIFAR, "model_engine.step()", "{line}\nmodel_engine.lr_scheduler.step()"),)),
    ("rank 1 has another learning rate", SUSPICIOUS, ("learning rate",),
     (edit(CIFAR, '"warmup_max_lr": 0.001', '"warmup_max_lr": 0.001 * (1 + bad_shard),'),)),
)  # fmt: skip

SECOND_SILENT_ROUND = tuple(
    Silent(program, *row)
    for program, rows in (
        ("heiretsu-dp", OF_DATA),
        ("heiretsu-tp", OF_TENSOR),
        ("heiretsu-tp-as-published", OF_TENSOR_PUBLISHED),
        ("heiretsu-pp", OF_PIPE),
        ("heiretsu-ep", OF_EXPERTS),
        ("heiretsu-ep-as-published", OF_EXPERTS_PUBLISHED),
        ("hifi-gan", OF_GAN),
        ("diffusion", OF_DIFFUSION),
        ("ppo", OF_PPO),
        ("dpo", OF_DPO),
        ("cifar-moe", OF_CIFAR),
    )
    for row in rows
)
HEALTHY = tuple(
    Silent(program, "healthy", NOTHING, (), ())
    for program in dict.fromkeys(one.program for one in SECOND_SILENT_ROUND)
    if "published" not in program
)
