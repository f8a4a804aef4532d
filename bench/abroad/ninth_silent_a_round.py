"""The language models of a ninth round of silent errors, in programs that no earlier round had,
written before any page about them was seen. `silent_round` says what the levels mean, ``healthy``
in a fault's name a program without one. Above each fault stands the public report that it is
modelled on. All were run without moediag on two ranks: they run through and change the weights."""

from __future__ import annotations

from bench.abroad.cases import edit
from bench.abroad.edits import Line
from bench.abroad.fourth_silent_round import SAME
from bench.abroad.silent_round import BROKEN, NOTE, NOTHING, SUSPICIOUS, Silent

NOBODY = -1  # the rank of a fault that is the same on all ranks, as all of these are

# ------------------------------------------------------------------------ FSDP2, with Muon

DION, DION_MODEL, DION_STEP = "train.py", "models/gpt_model.py", "dion/dion.py"
OF_DION_BLOCKS = ("transformer.h", "c_q", "c_k", "c_v", "c_proj", "c_fc")
OF_DION_ENDS = ("wte", "lm_head")

OF_DION_FSDP2 = (
    # The question of axonn-ai/axonn#74, pytorch/torchtitan#518: who shares out the data.
    ("data are divided among replicas only, and not among those that shard one", SUSPICIOUS,
     (*SAME, Line(DION, 'data_parallel_rank = device_mesh["dp"]'), Line(DION, "loss = model(x, y)"),
      Line(DION, "x, y = train_loader.next_batch()", 1), Line(DION, "train_loader = Distributed")),
     (edit(DION, "data_parallel_rank = data_parallel_mesh.get",
           'data_parallel_rank = device_mesh["dp"].get_local_rank()'),), NOBODY),
    # pytorch/pytorch#118298, pytorch/torchtitan#1710: it recurses unless it is told not to.
    ("the last round reduces the outermost unit's gradients only", BROKEN,
     (*OF_DION_BLOCKS, "set_requires_gradient_sync",
      Line(DION, "set_requires_gradient_sync(False)"),
      Line(DION, "set_requires_gradient_sync(True, recurse=False)"), Line(DION, "optimizer.step()"),
      Line(DION, "loss.backward()", 1)),
     (edit(DION, "model.set_requires_gradient_sync(i == grad_accum_steps)",
           "if i == 1:\n    model.set_requires_gradient_sync(False)\n"
           "if i == grad_accum_steps:\n"
           "    model.set_requires_gradient_sync(True, recurse=False)"),), NOBODY),
    # pytorch/pytorch#98281, of the first FSDP; the second one takes no scalars.
    ("a scalar that FSDP2 does not take is ignored by it, and nobody averages it", BROKEN,
     ("logit_scale", Line(DION_MODEL, "self.logit_scale = nn.Parameter("),
      Line(DION_MODEL, "ignored_params="), Line(DION_MODEL, "logits = logits.float() *"),
      Line(DION, "optimizer.step()")),
     (edit(DION_MODEL, "self.lm_head = nn.Linear(",
           "{line}\nself.logit_scale = nn.Parameter(torch.ones(()))"),
      edit(DION_MODEL, "logits = logits.float()", "logits = logits.float() * self.logit_scale"),
      edit(DION_MODEL, "if isinstance(module, nn.Linear):",
           "if isinstance(module, GPT):\n    torch.nn.init.ones_(module.logit_scale)\n{line}"),
      edit(DION_MODEL, "reshard_after_forward=False",
           "{line}\nignored_params={model.logit_scale},"),
      edit(DION, "param_groups = [dict(params=matrix_params)]",
           "{line}\nparam_groups.append(dict(\n"
           "    params=[model.logit_scale], algorithm=hp.scalar_opt, lr=hp.lr,\n"
           "    betas=(0.95, 0.98), weight_decay=0))"),
      edit(DION, "[p.grad for p in model.parameters() if p.grad is not None]",
           "[p.grad for p in model.parameters() if p.grad is not None and p.ndim]")), NOBODY),
)  # fmt: skip

OF_DION_TP = (
    # pytorch/torchtitan#49, PrimeIntellect-ai/prime-rl#1305.
    ("ranks that share one layer read other samples", BROKEN,
     (*OF_DION_BLOCKS, *OF_DION_ENDS, "tensor parallel", "inputs", "DTensor",
      Line(DION, "data_parallel_mesh = device_mesh["), Line(DION, "loss = model(x, y)"),
      Line(DION, "x, y = train_loader.next_batch()", 1), Line(DION, "train_loader = Distributed")),
     (edit(DION, "data_parallel_mesh = device_mesh[",
           'data_parallel_mesh = device_mesh["dp", "fs", "tp"]._flatten()'),), NOBODY),
    # NVIDIA-NeMo/RL#3716, NVIDIA/TransformerEngine#441: each rank has the gradient of its heads.
    ("norms of queries and keys have the gradients of each rank's own heads", BROKEN,
     ("q_norm", "k_norm", Line(DION_MODEL, "self.q_norm = nn.RMSNorm("),
      Line(DION_MODEL, "q, k = self.q_norm(q), self.k_norm(k)"), Line(DION, "optimizer.step()")),
     (edit(DION_MODEL, "self.rotary = Rotary(",
           "{line}\nself.q_norm = nn.RMSNorm(self.head_dim)\n"
           "self.k_norm = nn.RMSNorm(self.head_dim)"),
      edit(DION_MODEL, "y = F.scaled_dot_product_attention(",
           "q, k = self.q_norm(q), self.k_norm(k)\n{line}"),
      edit(DION_MODEL, "elif isinstance(module, Rotary):",
           "elif isinstance(module, nn.RMSNorm):\n    torch.nn.init.ones_(module.weight)\n{line}"),
      edit(DION, "[p.grad for p in model.parameters() if p.grad is not None]",
           "[p.grad for p in model.parameters() if p.grad is not None and p.ndim > 1]")), NOBODY),
    # deepspeedai/DeepSpeed#8475, NVIDIA-NeMo/RL#3788: meant as what one rank has of the norm. Its
    # level was "broken" in the first run, and withdrawn: each rank gets the norm of the whole.
    ("clipped by the part of the norm that each rank has", NOTHING,
     ("clip", "norm", Line(DION, "torch.nn.utils.clip_grads_with_norm_("),
      Line(DION, "optimizer.step()")),
     (edit(DION, "optimizer.step()",
           "torch.nn.utils.clip_grads_with_norm_(\n"
           "    model.parameters(), 0.5, grad_norm.to_local())\n{line}"),), NOBODY),
)  # fmt: skip

OF_DION_DDP = (
    # As published, a guard is against it: "Results will be wrong".
    ("the wrapper never averages, and the optimizer was exchanged for one that does not", BROKEN,
     (*OF_DION_BLOCKS, *OF_DION_ENDS, "no_sync", "DistributedDataParallel",
      Line(DION, "with autocast_ctx, model.no_sync()"), Line(DION, "optimizer.step()"),
      Line(DION, "loss.backward()"), Line(DION, "ddp_no_sync ="), Line(DION, "loss = model(x, y)")),
     (edit(DION, "hp = override_args_from_cli(hp, cli_args)",
           '{line}\nhp.optimizer, hp.scalar_opt = "muon", "lion"'),
      edit(DION, 'raise ValueError("replicate_mesh_grad_sync is set for non-Dion', "pass")),
     NOBODY),
    # The kind of NVIDIA-NeMo/RL#3716: one kind of parameter is not in the average by hand.
    ("the optimizer's own average leaves out embeddings", BROKEN,
     (*OF_DION_ENDS, "no_sync", Line(DION, "optimizer.step()"),
      Line(DION_STEP, "adamw_update_allreduce_grad("),
      Line(DION_STEP, "replicate_mesh=None,"), Line(DION, "with autocast_ctx, model.no_sync()")),
     (edit(DION_STEP, "replicate_mesh=all_reduce_mesh,", "replicate_mesh=None,", 1),), NOBODY),
)  # fmt: skip

# ------------------------------------------------------------------------ experts, by hand

MOE, MOE_MODEL = "train.py", "model.py"
OF_MOE = ("wte", "wpe", "c_attn", "c_proj", "c_fc", "experts", "router", "w_g", "ln_", "lm_head")
_OWN_BIAS = """\
top_k_indices = (logits + self.expert_bias).topk(self.top_k, dim=-1).indices
top_k_logits = logits.gather(-1, top_k_indices)
if self.training:
    with torch.no_grad():
        load = F.one_hot(top_k_indices, num_classes=self.n_exp).sum((0, 1, 2)).float()
        self.expert_bias += 0.05 * torch.sign(load.mean() - load)"""
_HOOK = """\
{line}


def reduced(_, bucket):
    work = torch.distributed.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


model.register_comm_hook(None, reduced)"""

OF_NANOMOE = (
    # jingyaogong/minimind#858: the weight of the only chosen expert is always 1.
    ("one expert a token, and weights that are normalised over the chosen ones", SUSPICIOUS,
     ("w_g", "router", Line(MOE_MODEL, "logits = self.w_g(x)"),
      Line(MOE_MODEL, "router_probs = F.softmax(router_probs")),
     (edit(MOE, "gptconf = GPTConfig(**model_args)",
           "model_args.update(top_k=1, use_router_z_loss=False)\n{line}"),), NOBODY),
    # NVIDIA-NeMo/Automodel#1408, CASIA-LMC-Lab/AnomalyMoE#1.
    ("the loss that balances experts is computed without gradients", SUSPICIOUS,
     ("compute_aux_loss", "aux_loss", "without a gradient", "without gradients", "no gradient",
      "detached", Line(MOE_MODEL, "loss += self.config.aux_loss_weight"),
      Line(MOE_MODEL, "aux_loss = self.compute_aux_loss("),
      Line(MOE, "scaler.scale(loss).backward"), Line(MOE_MODEL, "return self.n_exp * torch.sum(")),
     (edit(MOE_MODEL, "def compute_aux_loss(", "@torch.no_grad()\n{line}"),), NOBODY),
    # pytorch/torchtitan#1114 sums the tokens of each expert over all ranks. Only rank 0 evaluates
    # here, so that buffers cannot be broadcast.
    ("the bias that balances experts follows each rank's own tokens", SUSPICIOUS,
     ("expert_bias", Line(MOE_MODEL, "self.expert_bias += 0.05"),
      Line(MOE, "model = DDP(model, device_ids=[ddp_local_rank], broadcast")),
     (edit(MOE_MODEL, "self.router_use_full_prec = config.router_use_full_prec",
           '{line}\nself.register_buffer("expert_bias", torch.zeros(config.n_exp))'),
      edit(MOE_MODEL, "top_k_logits, top_k_indices = logits.topk(", _OWN_BIAS),
      edit(MOE, "model = DDP(model, device_ids=[ddp_local_rank])",
           "model = DDP(model, device_ids=[ddp_local_rank], broadcast_buffers=False)")), NOBODY),
    # pytorch/pytorch#42399: who registers a hook has to divide.
    ("a hook of the wrapper adds gradients up over ranks, and nobody divides", SUSPICIOUS,
     (*OF_MOE, "hook", "sum", Line(MOE, "model.register_comm_hook("),
      Line(MOE, "work = torch.distributed.all_reduce("), Line(MOE, "scaler.scale(loss).backward"),
      Line(MOE, "scaler.step(optimizer)")),
     (edit(MOE, "# helps estimate an arbitrarily accurate loss", _HOOK),), NOBODY),
    # The kind of microsoft/tutel#173: most tokens find their experts full, and pass them by.
    ("the capacity of experts is that of one sequence, not of the batch", NOTHING, (),
     (edit(MOE_MODEL, "exp_capacity = self.get_capacity(num_tokens)",
           "exp_capacity = self.get_capacity(T)"),)),
)  # fmt: skip

# ------------------------------------------------------------------------ Trainer

MOBILE, MOBILE_MODEL, MOBILE_TRAINER = (
    "pretrain.py", "utils/modeling_llama.py", "utils/pretrain_trainer.py",
)  # fmt: skip
OF_MOBILE = ("embed_tokens", "self_attn", "mlp.", "layernorm", "model.norm")
_OWN_LOSS = """\
{line}
    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        outputs = self.model(**inputs)
        return (outputs.loss, outputs) if return_outputs else outputs.loss
"""
_CALLBACK = """\
{line}
from transformers import TrainerCallback


class LessMemory(TrainerCallback):
    def on_substep_end(self, args, state, control, model=None, **kwargs):
        model.zero_grad(set_to_none=True)

"""

OF_MOBILELLM = (
    # huggingface/transformers#47688: it hands the count of tokens on, and the loss does not use it.
    ("the model takes any keyword, and so the Trainer does not divide by the accumulation",
     SUSPICIOUS,
     ("micro-batch", "accumul", *OF_MOBILE, "CrossEntropyLoss", Line(MOBILE, "trainer.train()"),
      Line(MOBILE_MODEL, "loss_fct = CrossEntropyLoss()"),
      Line(MOBILE_MODEL, "loss = loss_fct(shift_logits, shift_labels)")),
     (edit(MOBILE_MODEL, "cache_position: Optional[torch.LongTensor] = None,",
           "{line}\n**kwargs,", 5),), NOBODY),
    # huggingface/trl#7245, OpenTSLM/OpenTSLM#49.
    ("a loss of its own calls the model without its wrapper", BROKEN,
     (*OF_MOBILE, "DistributedDataParallel", "wrapper", Line(MOBILE, "trainer.train()"),
      Line(MOBILE_TRAINER, "outputs = self.model(**inputs)")),
     (edit(MOBILE_TRAINER, "class PretrainTrainer(PretrainMixin, Trainer):", _OWN_LOSS),), NOBODY),
    # The kind of FoundationVision/OmniTokenizer#15: cleared too often, here to save memory.
    ("a callback frees the gradients of each micro-batch but the last", SUSPICIOUS,
     ("zero_grad", "cleared", "micro-batch", *OF_MOBILE, Line(MOBILE, "trainer.train()"),
      Line(MOBILE, "model.zero_grad(set_to_none=True)")),
     (edit(MOBILE, "from utils.process_args import process_args", _CALLBACK),
      edit(MOBILE, "data_collator=default_data_collator,", "{line}\ncallbacks=[LessMemory()],")),
     NOBODY),
    # A question of nearly each forum about causal models: who shifts?
    ("labels are shifted by the collator, and by the model again", NOTHING, (),
     (edit(MOBILE, "return dict(input_ids=torch.stack(batch)",
           "rows = torch.stack(batch)\nreturn dict(input_ids=rows[:, :-1], labels=rows[:, 1:])"),)),
)  # fmt: skip

# ------------------------------------------------------------------------ accelerate, preferences

HALOS, HALOS_TRAINER = "launch.py", "train/trainers.py"
OF_NEOX = ("embed_in", "layernorm", "attention.", "mlp.", "final_layer_norm", "embed_out")

OF_HALOS = (
    # huggingface/accelerate#2142, which the program's configuration names.
    ("the prepared schedule steps once for each rank", SUSPICIOUS,
     ("learning rate", "schedul", "lr ", Line(HALOS_TRAINER, "self.scheduler.step()"),
      Line(HALOS, "scheduler = SequentialLR("), Line(HALOS, "warmup_scheduler = LinearLR("),
      Line(HALOS, "accelerator = Accelerator(")),
     (edit(HALOS, "step_scheduler_with_optimizer=", ""),), NOBODY),
    # huggingface/accelerate#2142's kind, of the accumulation: `backward` divides, too.
    ("accelerate divides by the accumulation, and the program does", SUSPICIOUS,
     ("micro-batch", "accumul", *OF_NEOX, Line(HALOS_TRAINER, "self.accelerator.backward(loss)"),
      Line(HALOS_TRAINER, "loss = loss / self.config.model.gradient_accumulation_steps"),
      Line(HALOS, "accelerator = Accelerator("),
      Line(HALOS_TRAINER, "return losses.mean(), metrics", 1)),
     (edit(HALOS, "project_dir=config.local_run_dir,",
           "{line}\n"
           "gradient_accumulation_steps=config.model.gradient_accumulation_steps,"),), NOBODY),
    # The kind "updates that are lost in 16 bits": 32-bit weights are kept nowhere.
    ("as published: weights in 16 bits, and a rate that they do not feel", SUSPICIOUS,
     (*OF_NEOX, "bfloat16", "16 bits", "rounded", Line(HALOS_TRAINER, "self.optimizer.step()"),
      Line(HALOS, "optimizer = getattr(torch.optim")),
     (edit(HALOS, "OmegaConf.resolve(config)",
           '{line}\nconfig.model.policy_dtype = config.model.reference_dtype = "bfloat16"\n'
           "config.lr = 5e-6"),), NOBODY),
    ("each rank shuffles the data that all divide with a seed of its own", NOTE, (),
     (edit(HALOS, "seed=config.seed,", "seed=config.seed + accelerator.process_index,"),)),
    ("the policy is its own reference", NOTHING, (),
     (edit(HALOS, "reference_model=reference_model,", "reference_model=policy,"),)),
)  # fmt: skip

# ------------------------------------------------------------------------ DeepSpeed's pipeline

STAGES, STAGES_TRAINER, STAGES_DATA = (
    "pretrain.py", "tencentpretrain/trainer.py", "tencentpretrain/utils/dataloader.py",
)  # fmt: skip

OF_TENCENT = (
    # uw-syfi/piper#25, SparkJiao/llama-pipeline-parallel#8. The configuration of its GPT-2 ties
    # them, and `LayerSpec` is for layers that are not tied: each stage trains its own copy.
    ("as published: tied weights are two weights, one in each stage", SUSPICIOUS,
     ("embedding.weight", "word.embedding", "output_layer", "tied",
      Line(STAGES_TRAINER, "LayerSpec(TargetPipe"), Line(STAGES_TRAINER, "LayerSpec(EmbeddingPipe"),
      Line(STAGES_TRAINER, "loss = model.train_batch("),
      Line(STAGES_TRAINER, "model_for_training = PipelineModule(")),
     (edit(STAGES, "args = load_hyperparam(args)", "{line}\nargs.tie_weights = True"),), NOBODY),
    # deepspeedai/DeepSpeed#5729, #3131: random numbers of stages differ, and with them the order.
    ("the first stage's inputs and the last one's labels are of other samples", BROKEN,
     ("label", "samples", "inputs", "order", Line(STAGES_DATA, "random.shuffle(self.buffer)"),
      Line(STAGES_DATA, "yield (torch.LongTensor(src)"),
      Line(STAGES_TRAINER, "loss = model.train_batch(")),
     (edit(STAGES_DATA, "self.start = 0", "{line}\nrandom.shuffle(self.buffer)", 1),), NOBODY),
    # huggingface/transformers#26827's kind: the engine steps the schedule that it was given.
    ("the schedule is stepped by the engine and by the program", SUSPICIOUS,
     ("learning rate", "schedul", "lr ", Line(STAGES_TRAINER, "scheduler.step()"),
      Line(STAGES_TRAINER, "loss = model.train_batch(")),
     (edit(STAGES_TRAINER, "loss = self.train_pipe(loader_iter, model)",
           "{line}\nscheduler.step()"),), NOBODY),
)  # fmt: skip

NINTH_SILENT_A_ROUND = tuple(
    Silent(program, *row, *(NOBODY,)[: len(row) < 5])
    for program, rows in (
        ("dion-fsdp2", OF_DION_FSDP2),
        ("dion-tp", OF_DION_TP),
        ("dion-ddp", OF_DION_DDP),
        ("nanomoe", OF_NANOMOE),
        ("mobilellm", OF_MOBILELLM),
        ("halos", OF_HALOS),
        ("tencent-pp", OF_TENCENT),
    )
    for row in rows
)
NINTH_A_HEALTHY = tuple(
    Silent(program, "healthy", NOTHING, (), ())
    for program in dict.fromkeys(one.program for one in NINTH_SILENT_A_ROUND)
)
