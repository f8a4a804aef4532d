"""The third part of a ninth round of silent errors: recommendations, retrieval, reinforcement
learning and others, in programs that no earlier round had, written before any page about them was
seen. `silent_round` says what the levels mean, ``healthy`` in a fault's name a program without one.
Above each fault stands the public report that it is modelled on. All were run without moediag on
two ranks: they run through and change the weights (of tft's averages, what validation says of
them). As published, and so also without a fault, tft never calls one layer, which
`find_unused_parameters` hides, and weighs a single static input, so that the weight has a gradient
of zeros."""

from __future__ import annotations

from bench.abroad.cases import edit
from bench.abroad.edits import Line
from bench.abroad.fourth_silent_round import SAME
from bench.abroad.silent_round import BROKEN, NOTE, NOTHING, SUSPICIOUS, Silent

NOBODY = -1  # the rank of a fault that is the same on all ranks

# ------------------------------------------------------------------------ recommendations, by hand

NCF, NCF_DATA, NCF_NET = "ncf.py", "dataloading.py", "neumf.py"
TABLES = ("mf_user_embed", "mf_item_embed", "mlp_user_embed", "mlp_item_embed")
OF_NCF_NET = (*TABLES, "mlp.0", "final")

OF_NCF = (
    # NVIDIA/DeepLearningExamples#258, Tencent/PatrickStar#42: a number of a GPU chooses the part.
    ("each process sees one GPU, whose number chooses its part of the samples", SUSPICIOUS,
     (*SAME, "local_rank", Line(NCF, "args.local_rank = 0  #"), Line(NCF, "outputs = model("),
      Line(NCF, ".backward()"), Line(NCF_DATA, "self.samples_begin ="),
      Line(NCF_DATA, "epoch_indices = torch.randperm("),
      Line(NCF, "train_loader.get_epoch_data()")),
     (edit(NCF, "args.local_rank = int(os.environ['LOCAL_RANK'])",
           "args.local_rank = 0  # Slurm binds each process to its GPU"),), NOBODY),
    # pytorch/pytorch#47175 names this very mistake.
    ("gradients are cleared at the beginning of an epoch", BROKEN,
     (*OF_NCF_NET, "cleared", "zero_grad", Line(NCF, "optimizer.zero_grad()"),
      Line(NCF, "scaler.step(optimizer)"), Line(NCF, ".backward()")),
     (edit(NCF, "p.grad = None", "pass"),
      edit(NCF, "batch_dict_list = train_loader.get_epoch_data()",
           "{line}\noptimizer.zero_grad()")), NOBODY),
    # pytorch/examples#1029: as published, it fails; people then add `strict=False`.
    ("names without the wrapper's prefix are loaded, and so none", SUSPICIOUS,
     ("load_state_dict", "strict", "loaded", Line(NCF, "strict=False")),
     (edit(NCF, "model.module.load_state_dict(state_dict)",
           "model.load_state_dict(state_dict, strict=False)"),), NOBODY),
    # meta-pytorch/torchrec#1739: tables that each rank has whole are ignored as if they were
    # divided; pytorch/pytorch#43690.
    ("tables of embeddings are ignored by the wrapper", SUSPICIOUS,
     (*TABLES, Line(NCF, "DistributedDataParallel._set_params"),
      Line(NCF, "scaler.step(optimizer)")),
     (edit(NCF, "model = torch.nn.parallel.DistributedDataParallel(model)",
           "tables = [name for name, _ in model.named_parameters() if 'embed' in name]\n"
           "torch.nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model("
           "model, tables)\n{line}"),), NOBODY),
    # yudi-mars/daisyRec#15, NVIDIA-Merlin/models#1175
    ("the output of a sigmoid goes into a loss of logits", NOTHING, (),
     (edit(NCF, "outputs = model(user_batch, item_batch)",
           "outputs = model(user_batch, item_batch, sigmoid=True)"),)),
)  # fmt: skip

# ------------------------------------------------------------------------ retrieval, by hand

VIDEOS, MODELING, CLIP, GATHER = (
    "main_task_retrieval.py", "modules/modeling.py", "modules/module_clip.py",
    "modules/until_module.py",
)  # fmt: skip
OF_CLIP_NET = ("resblocks", "in_proj_weight", "out_proj", "c_fc", "c_proj", "text_projection")

OF_CLIP4CLIP = (
    # huggingface/accelerate#1154 and #76, kohjingyu/fromage#33: what `all_gather` returns has no
    # gradient. Here of captions only; `find_unused_parameters` hides it.
    ("captions are gathered without a gradient", SUSPICIOUS,
     ("text_projection", "ln_final", "clip.transformer",
      Line(MODELING, "torch.distributed.all_gather(texts"),
      Line(MODELING, "texts = [torch.empty_like("), Line(MODELING, "torch.cat(texts)")),
     (edit(MODELING, "sequence_output = allgather(sequence_output",
           "texts = [torch.empty_like(sequence_output) for _ in "
           "range(self.task_config.world_size)]\n"
           "torch.distributed.all_gather(texts, sequence_output)\n"
           "sequence_output = torch.cat(texts)"),), NOBODY),
    # mlfoundations/open_clip#573, huggingface/transformers#21381: embeddings are frozen, so the
    # input of the first block needs no gradient.
    ("blocks over frozen embeddings are computed again, reentrant", SUSPICIOUS,
     ("resblocks", Line(CLIP, "x = checkpoint(lambda"), "checkpoint"),
     (edit(CLIP, "return self.resblocks((x, video_frame))[0]",
           "from torch.utils.checkpoint import checkpoint\n"
           "for block in self.resblocks:\n"
           "    x = checkpoint(lambda x, block=block: block((x, video_frame))[0], x,\n"
           "                   use_reentrant=True)\n"
           "return x"),), NOBODY),
    # openai/CLIP#46, which the line cites: the bound by a new parameter.
    ("the temperature is bounded by a new parameter in each step", BROKEN,
     ("logit_scale", Line(VIDEOS, "model.module.clip.logit_scale = ")),
     (edit(VIDEOS, "torch.clamp_(model.module.clip.logit_scale.data",
           "model.module.clip.logit_scale = torch.nn.Parameter(\n"
           "    torch.clamp(model.module.clip.logit_scale, max=np.log(100)))"),), NOBODY),
    # ArrowLuo/CLIP4Clip#96 compares 16 with 32 bits; openai/CLIP#83 turns them to 32 bits for each
    # update.
    ("as published: weights of 16 bits lose their updates", SUSPICIOUS,
     (*OF_CLIP_NET, "16 bits", "float16", "rounded"),
     (edit(MODELING, "pass  # no 16 bits", "convert_weights(self.clip)"),), NOBODY),
    # pytorch/xla#5784, lightly-ai/lightly#1528: which part of the gradient is this rank's.
    ("each rank takes the gradient of rank 0's part of what is gathered", NOTHING, (),
     (edit(VIDEOS, "args.rank = rank", "pass"),)),
)  # fmt: skip

# ------------------------------------------------------------------ reinforcement learning, Fabric

SAC, AGENT, CLI = "sheeprl/algos/sac/sac.py", "sheeprl/algos/sac/agent.py", "sheeprl/cli.py"
OF_CRITICS = ("qfs", "critic", "Critic")

OF_SHEEPRL = (
    # moojink/openvla-oft#160, jingyaogong/minimind#853. The agent keeps both lists: wrappers, and
    # what is inside, of which targets are averages.
    ("critics are called without their wrappers", BROKEN,
     (*OF_CRITICS, "DistributedDataParallel", Line(AGENT, "self.qfs_unwrapped[i](obs, action)"),
      Line(SAC, "qf_values = agent.get_q_values(data"), Line(SAC, "fabric.backward(qf_loss)"),
      Line(SAC, "qf_optimizer.step()")),
     (edit(AGENT, "self.qfs[i](obs, action)",
           "return torch.cat([self.qfs_unwrapped[i](obs, action) for i in range(len(self.qfs))], "
           "dim=-1)"),), NOBODY),
    # ray-project/ray#65125
    ("critics keep the gradient that the actor's loss left in them", SUSPICIOUS,
     (*OF_CRITICS, "cleared", "zero_grad", "_model.", Line(SAC, "fabric.backward(actor_loss)"),
      Line(SAC, "qf_optimizer.step()"), Line(SAC, "qf_optimizer.zero_grad("),
      Line(SAC, "fabric.backward(qf_loss)")),
     (edit(SAC, "qf_optimizer.zero_grad(", "pass"),
      edit(SAC, "qf_optimizer.step()", "{line}\nqf_optimizer.zero_grad(set_to_none=True)")),
     NOBODY),
    # ray-project/ray#45614: targets that do not begin as the critics; here on one rank, as they are
    # copied once, before the wrappers send rank 0's weights.
    ("targets are copied before the first weights are sent", SUSPICIOUS,
     ("target", Line(AGENT, "self._qfs_target = copy.deepcopy("),
      Line(AGENT, "self.qfs_target[i](obs, action)"), Line(AGENT, "qf_next_target = self.get_"),
      Line(AGENT, "target_param.data.copy_(")),
     (edit(CLI, "fabric.seed_everything(cfg.seed)",
           "fabric.seed_everything(cfg.seed + fabric.global_rank)"),
      edit(AGENT, "self._qfs_target = copy.deepcopy(self._qfs_unwrapped)",
           "if not hasattr(self, '_qfs_target'):\n    {line}")), NOBODY),
    # Toni-SM/skrl#425, BY571/Soft-Actor-Critic-and-Extensions#2: one of two critics.
    ("the optimizer has the first of two critics", SUSPICIOUS,
     ("qfs.1", "qfs", "critic", "no optimizer", Line(SAC, "params=agent.qfs[0].parameters()"),
      Line(SAC, "cfg.algo.critic.optimizer,")),
     (edit(SAC, "params=agent.qfs.parameters()", "params=agent.qfs[0].parameters(),"),), NOBODY),
    # DLR-RM/stable-baselines3#1486, IntelLabs/coach#111: with one seed, also of the actions that
    # are drawn, all ranks live through the same.
    ("environments and first actions of all ranks have one seed", NOTE,
     (*SAME, "seed", Line(SAC, "actions = player(torch_obs)")),
     (edit(SAC, "cfg.seed + rank * cfg.env.num_envs + i", "cfg.seed + i,"),), NOBODY),
)  # fmt: skip

# ------------------------------------------------------------------------ series, by hand

TFT, TFT_DATA, TFT_NET = "train.py", "data_utils.py", "modeling.py"

OF_TFT = (
    # NVlabs/LongLive#71, mlcommons/training#625
    ("as published: the sampler of each rank has a seed of its own", SUSPICIOUS,
     (*SAME, "DistributedSampler", "seed", "shuffle", "overlap",
      Line(TFT_DATA, "data_sampler = DistributedSampler(train_split"),
      Line(TFT, "predictions = model(batch)"), Line(TFT, "in enumerate(train_loader)")),
     (edit(TFT_DATA, "data_sampler = DistributedSampler(train_split",
           "data_sampler = DistributedSampler(train_split, args.distributed_world_size, "
           "args.distributed_rank, seed=args.seed + args.distributed_rank, drop_last=True)"),),
     NOBODY),
    # megvii-research/PETR#98: `find_unused_parameters`, as published, hides what a call forgets.
    ("the context of a meter is not handed to the layer that it is for", SUSPICIOUS,
     ("context_grns.1", "enrichment_grn"),
     (edit(TFT_NET, "enriched = self.enrichment_grn(temporal_features, c=ce)",
           "enriched = self.enrichment_grn(temporal_features)"),), NOBODY),
    # awslabs/graphstorm#1366, VGraphRNN/VGRNN#4
    ("gradients are clipped after the update", SUSPICIOUS,
     ("clip", Line(TFT, "clip_grad_norm_(", 1), Line(TFT, "optimizer.step()")),
     (edit(TFT, "if args.clip_grad:", "if False:"),
      edit(TFT, "optimizer.zero_grad()",
           "if args.clip_grad:\n"
           "    torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad)\n{line}")),
     NOBODY),
    # TencentARC/SEED-Voken#27 asks what an average begins with.
    ("as published: averages of what is made late begin with values of their own", NOTHING, (),
     (edit(TFT, "model_ema.set(model)", "pass"),)),
)  # fmt: skip

# ------------------------------------------------------------------------ speech, averages by hand

UNET, UNET_UTIL = "train.py", "util.py"
OF_UNET = ("encoder", "decoder", "tsfm_")

OF_CLEANUNET = (
    # pytorch/pytorch#47260; the hooks here, too, average once for each forward.
    ("the spectral loss goes backward first, and the rest is not averaged", BROKEN,
     (*OF_UNET, Line(UNET_UTIL, ".backward(retain_graph=True)"), Line(UNET, "loss.backward()"),
      Line(UNET, "optimizer.step()"), Line(UNET_UTIL, "denoised_audio = net(noisy_audio)"),
      Line("distributed.py", "dist.all_reduce(coalesced)")),
     (edit(UNET_UTIL, "loss += (sc_loss + mag_loss) * stft_lambda",
           "((sc_loss + mag_loss) * stft_lambda).backward(retain_graph=True)"),), NOBODY),
    # patrickloeber/pytorchTutorial#19 moves the call about, and asks what it does there.
    ("gradients are cleared between the backward and the update", BROKEN,
     (*OF_UNET, "zero_grad", "no gradient", "without gradient", "cleared",
      Line(UNET, "optimizer.zero_grad()"), Line(UNET, "optimizer.step()"),
      Line(UNET, "loss.backward()")),
     (edit(UNET, "optimizer.zero_grad()", "pass"),
      edit(UNET, "scheduler.step()", "{line}\noptimizer.zero_grad()")), NOBODY),
    # FrozenBurning/Text2Light#10: a term of the loss has no gradient on the network.
    ("the spectral loss is computed of numbers that are cut from the network", SUSPICIOUS,
     ("detach", "cut", "stft", "STFT", "mag_loss", "sc_loss", "part of the loss",
      Line(UNET_UTIL, "mrstftloss(denoised_audio"), Line(UNET, "loss.backward()"),
      Line(UNET_UTIL, "loss += (sc_loss + mag_loss)")),
     (edit(UNET_UTIL, "mrstftloss(denoised_audio.squeeze(1), clean_audio.squeeze(1))",
           "sc_loss, mag_loss = mrstftloss(denoised_audio.data.squeeze(1), "
           "clean_audio.squeeze(1))"),), NOBODY),
    # kan-bayashi/ParallelWaveGAN#177, pytorch/pytorch#31771
    ("as published: all epochs have one order", NOTE, ("set_epoch", "order"),
     (edit(UNET, "trainloader.sampler.set_epoch(n_iter)", "pass"),)),
)  # fmt: skip

NINTH_SILENT_C_ROUND = tuple(
    Silent(program, *row)
    for program, rows in (
        ("ncf", OF_NCF), ("clip4clip", OF_CLIP4CLIP), ("sheeprl", OF_SHEEPRL),
        ("tft", OF_TFT), ("cleanunet", OF_CLEANUNET),
    )
    for row in rows
)  # fmt: skip
NINTH_C_HEALTHY = tuple(
    Silent(program, "healthy", NOTHING, (), ())
    for program in dict.fromkeys(one.program for one in NINTH_SILENT_C_ROUND)
)
