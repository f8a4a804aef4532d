"""The second half of a sixth round of silent errors, in programs that no earlier round had, written
before any page about them was seen. `silent_round` says what the levels mean, ``healthy`` in a
fault's name a program without one. Each fault is modelled on the public report that stands above
it. All were run without moediag first, with two ranks: each runs to its end, with other weights or
other losses than the healthy program."""

from __future__ import annotations

from bench.abroad.cases import edit
from bench.abroad.edits import Line
from bench.abroad.fourth_silent_round import SAME
from bench.abroad.silent_round import BROKEN, NOTHING, SUSPICIOUS, Silent

FIX = MISTRAL = "train.py"
PPO, TU = "phasic_policy_gradient/ppo.py", "phasic_policy_gradient/torch_util.py"
ENVS, REWARDS = "phasic_policy_gradient/envs.py", "phasic_policy_gradient/reward_normalizer.py"
FAIR, TOP2 = "benchmarks/moe.py", "fairscale/nn/moe/top2gate.py"
OF_FAIR_NET = ("self_attn", "norm1", "norm2", "gate", "experts", "0.weight", "4.weight", "4.bias")
OF_PPG_NET = ("pi_enc", "vf_enc", "vf_vhead", "pi_head", "aux_vf_head")
OF_MISTRAL_NET = ("embed_tokens", "layers.", "norm.", "lm_head", "flat_param")
OF_FIX_NET = ("conv1", "conv2", "block1", "block2", "block3", "fc.", "bn1")

# ------------------------------------------------------------------------ by hand, vision

OF_FIXMATCH = (
    # pytorch/pytorch#47260
    ("two losses go backward one after the other through one forward", BROKEN,
     (*OF_FIX_NET, Line(FIX, "Lx.backward("), Line(FIX, "(args.lambda_u * Lu).backward()")),
     (edit(FIX, "loss.backward()",
           "Lx.backward(retain_graph=True)\n(args.lambda_u * Lu).backward()", 1),)),
    # Spijkervet/SimCLR#26, huggingface/nanoVLM#124: of several loaders, one is forgotten.
    ("the loader without labels has no distributed sampler", SUSPICIOUS,
     (*SAME, "Sampler", "sampler", Line(FIX, "unlabeled_trainloader = DataLoader("),
      Line(FIX, "next(unlabeled_iter)", 1), Line(FIX, "next(unlabeled_iter)", 3),
      Line(FIX, "logits = model(inputs)")),
     (edit(FIX, "sampler=train_sampler(unlabeled_dataset)", "shuffle=True,"),
      edit(FIX, "unlabeled_trainloader.sampler.set_epoch(unlabeled_epoch)", "pass"),
      edit(FIX, "unlabeled_trainloader.sampler.set_epoch(unlabeled_epoch)", "pass"))),
    # PKU-YuanGroup/Open-Sora-Plan#186, harubaru/waifu-diffusion#31; here rank 0 alone evaluates.
    ("rank 0 evaluates averaged weights in its model, and keeps them", BROKEN,
     (*OF_FIX_NET, Line(FIX, "model.module.load_state_dict(ema_model")),
     (edit(FIX, "test_loss, test_acc = test(",
           "model.module.load_state_dict(ema_model.ema.state_dict())\n"
           "test_loss, test_acc = test(args, test_loader, model.module, epoch)\nmodel.train()"),),
     0),
    # The program's own default, without --seed.
    ("each rank draws the samples that have labels by itself", NOTHING, (),
     (edit(FIX, "labeled_dataset, unlabeled_dataset, test_dataset = DATASET",
           "np.random.seed(args.seed + args.local_rank)\n{line}"),)),
    ("gradients are cleared in the averaged model only", BROKEN,
     ("zero_grad", "cleared", "accumulat", *OF_FIX_NET, Line(FIX, "optimizer.step()"),
      Line(FIX, "ema_model.ema.zero_grad()")),
     (edit(FIX, "model.zero_grad()", "ema_model.ema.zero_grad()", 1),)),
)  # fmt: skip

# ------------------------------------------------------------------------ FSDP1

OF_MISTRAL = (
    # pytorch/pytorch#72548, PrimeIntellect-ai/OpenDiloco#6
    ("each rank clips its shards by their own norm", BROKEN,
     ("norm", "clip", Line(MISTRAL, "clip_grad_norm_(model.parameters()")),
     (edit(MISTRAL, "return model.clip_grad_norm_(max_grad_norm)",
           "return torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm).item()"),)),
    # pytorch/pytorch#98281, BrotherHappy/OSTQuant#15
    ("the head is an ignored module", BROKEN, ("lm_head", "ignored_modules"),
     (edit(MISTRAL, "model = FSDP(model, **fsdp_config)",
           "model = FSDP(model, ignored_modules=[model.lm_head], **fsdp_config)"),)),
    # verl-project/verl#7493
    ("shards in groups of one rank, in a mesh of two axes", BROKEN,
     (*OF_MISTRAL_NET, "group of one", "one rank", "HYBRID_SHARD", "mesh",
      Line(MISTRAL, "model = FSDP(model"), Line(MISTRAL, "HYBRID_SHARD")),
     (edit(MISTRAL, "sharding_strategy=ShardingStrategy.FULL_SHARD",
           "sharding_strategy=ShardingStrategy.HYBRID_SHARD,\n"
           'device_mesh=dist.device_mesh.init_device_mesh("cpu", (world_size, 1), '
           'mesh_dim_names=("ddp", "fsdp")),'),)),
    # vllm-project/speculators#765; the program's own types and rate.
    ("as published: weights of 16 bits lose their updates", SUSPICIOUS,
     ("bfloat16", "bf16", "low precision", "low-precision", "16 bits", "stand still",
      *OF_MISTRAL_NET, Line(MISTRAL, "optimizer.step()")),
     (edit(MISTRAL, "torch_dtype=torch.float32", "torch_dtype=torch.bfloat16,"),
      edit(MISTRAL, "param_dtype=torch.float32", "param_dtype=torch.bfloat16,"),
      edit(MISTRAL, "lr = 2e-3", "lr = 2e-05"))),
    # NVIDIA/apex#664, verl-project/verl-SpeCo#29: the sum is no part of the graph.
    ("the loss is averaged over ranks before it goes backward", SUSPICIOUS,
     ("divided", "scale", "all_reduce", Line(MISTRAL, "loss.backward()"),
      Line(MISTRAL, "loss = get_all_reduce_mean(outputs.loss)"),
      Line(MISTRAL, "torch.distributed.all_reduce(tensor")),
     (edit(MISTRAL, "loss = outputs.loss", "loss = get_all_reduce_mean(outputs.loss)", 1),)),
)  # fmt: skip

# ------------------------------------------------------------------------ averages by hand

OF_PPG = (
    # NVIDIA/waveglow#92 asks what this copy is for.
    ("averaged gradients are not copied back", SUSPICIOUS,
     (*OF_PPG_NET, Line(TU, "all_mean_(flatgrad"), Line(PPO, "opt.step()"),
      Line(PPO, "tu.sync_grads(")),
     (edit(TU, "unflatten_to(flatgrad, grads)", "pass"),)),
    # horovod/horovod#1346
    ("each rank clips its own gradients before the average", SUSPICIOUS,
     ("clip", Line(PPO, "th.nn.utils.clip_grad_norm_(")),
     (edit(PPO, "tu.sync_grads(params, grad",
           "th.nn.utils.clip_grad_norm_(params, 0.5)\n{line}"),)),
    # AgileRL/AgileRL#155
    ("each policy phase makes new optimizers", SUSPICIOUS,
     ("new optimizer", "anew", "moment", "optimizer state", "exp_avg", "step count",
      Line(PPO, "th.optim.Adam("), Line(PPO, "opts = {")),
     (edit(PPO, 'opts = learn_state.get("opts") or {', "opts = {"),)),
    # Denys88/rl_games#162, nottombrown/rl-teacher#21
    ("environments of all ranks have one seed", SUSPICIOUS,
     (*SAME, "seed", Line(ENVS, "ProcgenGym3Env(num"), Line(PPO, "= model(ob=ob"),
      Line(PPO, "seg = roller.multi_step("), Line(PPO, "loss.backward()")),
     (edit(ENVS, "env = ProcgenGym3Env(",
           "env = ProcgenGym3Env(num=num_envs, env_name=env_id, rand_seed=42, **env_kwargs)"),)),
    # Denys88/rl_games#363, leggedrobotics/rsl_rl#226
    ("statistics of rewards are those of one rank", NOTHING, (),
     (edit(REWARDS, "self.ret_rms = RunningMeanStd(",
           "self.ret_rms = RunningMeanStd(shape=ret_rms_shape, distributed=False)"),)),
)  # fmt: skip

# ------------------------------------------------------------------------ experts, by hand

OF_FAIRSCALE = (
    # facebookresearch/fairscale#871; exchanges of tokens between replicas are sound, too (Ulysses).
    ("as published: experts of all ranks are kept equal", NOTHING, (),
     (edit(FAIR, "DDP._set_params_and_buffers_to_ignore_for_model(", "pass"),
      edit(FAIR, "p.grad.div_(world_size)", "pass"))),
    # davidmrau/mixture-of-experts#27; as published, no other loss reaches the gate.
    ("a token has one expert, whose weight is always one", SUSPICIOUS,
     ("gate.wg", "gate", "router", Line(TOP2, "gates1_s = torch.softmax("),
      Line(TOP2, "logits = self.wg(input)")),
     (edit(TOP2, "mask2 *= torch.lt(", "mask2 *= 0"),
      edit(TOP2, "gates1_s /= denom_s",
           "gates1_s = torch.softmax(gates1_s.unsqueeze(1), dim=1).squeeze(1)"),
      edit(FAIR, "loss = loss + 0.1 *", "pass"))),
    # pytorch/torchtitan#2416
    ("the gates are ignored with the experts", SUSPICIOUS,
     ("gate", "_set_params_and_buffers_to_ignore_for_model", Line(FAIR, "own = [name"),
      Line(FAIR, "DDP._set_params_and_buffers_to_ignore_for_model(")),
     (edit(FAIR, "own = [name", "own = [name for name, _ in model.named_parameters()\n"
           '       if "experts" in name or "gate" in name]'),)),
    # NVIDIA/Megatron-LM#5916, deepspeedai/DeepSpeed#8475
    ("each rank clips by a norm that has its own experts only", BROKEN,
     ("norm", "clip", *OF_FAIR_NET, Line(FAIR, "torch.nn.utils.clip_grad_norm_(")),
     (edit(FAIR, "torch.nn.utils.clip_grad_value_(",
           "torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)"),)),
    # facebookresearch/fairseq#4220, laekov/fastmoe#148
    ("gradients of different experts are averaged", SUSPICIOUS,
     ("experts", Line(FAIR, "dist.all_reduce(p.grad)")),
     (edit(FAIR, "p.grad.div_(world_size)", "dist.all_reduce(p.grad)\n{line}"),)),
)  # fmt: skip

SIXTH_SILENT_ROUND_B = tuple(
    Silent(program, *row)
    for program, rows in (
        ("fixmatch", OF_FIXMATCH), ("mistral-fsdp", OF_MISTRAL), ("ppg", OF_PPG),
        ("fairscale-moe", OF_FAIRSCALE),
    )
    for row in rows
)  # fmt: skip
SIXTH_HEALTHY_B = tuple(
    Silent(program, "healthy", NOTHING, (), ())
    for program in dict.fromkeys(one.program for one in SIXTH_SILENT_ROUND_B)
)
