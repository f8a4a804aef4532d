"""The third part of the eighth round of silent errors, in programs that no earlier round had,
written before any page about them was seen. `silent_round` says what the levels mean, ``healthy``
in a fault's name a program without one. Above each fault stands the public report that it is
modelled on. All were run without moediag on two ranks: they run through and change the weights."""

from __future__ import annotations

from bench.abroad.cases import edit
from bench.abroad.edits import Line
from bench.abroad.fourth_silent_round import SAME
from bench.abroad.silent_round import BROKEN, NOTHING, SUSPICIOUS, Silent

NOBODY = -1  # the rank of a fault that is the same on all ranks
FORECAST, TOOLS, ATTENTION, BLOCKS, SERIES = (
    "exp/exp_forecast.py", "utils/tools.py", "layers/SelfAttention_Family.py",
    "layers/Transformer_EncDec.py", "data_provider/data_loader.py",
)  # fmt: skip
SHARD, GPT, COMM, INIT = (
    "projects/minGPT/main.py", "projects/minGPT/mingpt/model.py", "torchshard/distributed/comm.py",
    "torchshard/nn/init.py",
)  # fmt: skip
PPO, BY_MPI = "spinup/algos/pytorch/ppo/ppo.py", "spinup/utils/mpi_pytorch.py"
TRAINING, HEADS, SETUP = (
    "tape/training.py", "tape/models/modeling_utils.py", "tape/utils/setup_utils.py",
)  # fmt: skip
RETRIEVAL, EXAMPLES, AMP = (
    "colbert/training/training.py", "colbert/data/examples.py", "colbert/utils/amp.py",
)  # fmt: skip
OF_BERT = ("bert.embeddings", "bert.encoder", "linear.weight")
OF_AGENT = ("mu_net", "log_std", "v_net")
OF_PROTEIN = ("bert.embeddings", "bert.encoder", "mlm.")
OF_GPT = ("tok_emb", "pos_emb", "blocks.", "ln_f", "ln1", "ln2", "head.")
OF_TIMER = (
    "embedding.", "_projection.", "attn_bias", "conv1", "conv2", "norm1", "norm2", "head.",
)  # fmt: skip

# ------------------------------------------------------------------------ time series, by hand

OF_OPENLTM = (
    # lucidrains/DALLE-pytorch#268, rmchurch/disruptcnn#3: each rank has a loss of its own.
    ("the learning rate follows the loss of each rank's own samples", BROKEN,
     ("learning rate", *OF_TIMER, Line(FORECAST, "scheduler.step(loss.item())"),
      Line(FORECAST, "scheduler = torch.optim.lr_scheduler"), Line(FORECAST, "model_optim.step()")),
     (edit(FORECAST, "scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(",
           "scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(\n"
           "    model_optim, factor=0.8, patience=0, min_lr=1e-4)"),
      edit(FORECAST, "model_optim.step()", "{line}\nscheduler.step(loss.item())"),
      edit(FORECAST, "adjust_learning_rate(model_optim", "pass")), NOBODY),
    # state-spaces/s4#26: what is trained looks like a mask, and `find_unused_parameters` silences
    # the error.
    ("a bias of the attention is looked up without gradients", SUSPICIOUS,
     ("attn_bias", Line(ATTENTION, "attn_bias = self.attn_bias(var_id")),
     (edit(ATTENTION, "attn_bias = self.attn_bias(var_id",
           "with torch.no_grad():  # of the mask\n    {line}"),
      edit(FORECAST, "model = DDP(model.cuda(), device_ids",
           "model = DDP(model.cuda(), device_ids=[self.args.local_rank], "
           "find_unused_parameters=True)")), NOBODY),
    # What `state_dict` returns are no copies (pytorch/pytorch's tutorial on saving warns of it).
    ("rank 0 rounds what it saves, and with it its own weights", BROKEN,
     (*OF_TIMER, Line(TOOLS, "value.copy_(value.half())"), Line(TOOLS, "torch.save(state_dict"),
      Line(TOOLS, "self.save_checkpoint(val_loss, model, path)"),
      Line(TOOLS, "self.save_checkpoint(val_loss, model, path)", 2),
      Line(FORECAST, "early_stopping(vali_loss")),
     (edit(TOOLS, "torch.save(state_dict, path",
           "for value in state_dict.values():\n"
           "    value.copy_(value.half())  # a file of half the size\n{line}"),), 0),
    # The kind of pytorch/pytorch's `preserve_rng_state`, which is switched off for speed.
    ("blocks are computed again with another dropout", SUSPICIOUS,
     ("dropout", "Dropout", "checkpoint", "recomput", "preserve_rng_state",
      Line(BLOCKS, "x, attn = checkpoint("), Line(FORECAST, "loss.backward()")),
     (edit(BLOCKS, "import torch.nn as nn",
           "{line}\nfrom torch.utils.checkpoint import checkpoint"),
      edit(BLOCKS, "x, attn = attn_layer(x, n_vars, n_tokens,",
           "x, attn = checkpoint(attn_layer, x, n_vars, n_tokens,"),
      edit(BLOCKS, "attn_mask=attn_mask, tau=tau, delta=delta)",
           "attn_mask, tau, delta, use_reentrant=False, preserve_rng_state=False)", 5)), NOBODY),
    # leggedrobotics/rsl_rl#226, Denys88/rl_games#363: numbers in NumPy arrays.
    ("the series are scaled by the rows of one rank", NOTHING, (),
     (edit(SERIES, "self.scaler.fit(train_data)",
           'self.scaler.fit(train_data[int(os.environ["RANK"])::2])', 1),), NOBODY),
)  # fmt: skip

# ------------------------------------------------------------------------ layers divided by hand

OF_TORCHSHARD = (
    # NVIDIA/Megatron-LM#5916: replicated parameters are scaled by another factor on each rank.
    ("as published: each rank clips by the norm of its own parts", BROKEN,
     ("norm", "clip", *OF_GPT, Line(SHARD, "torch.nn.utils.clip_grad_norm_(")),
     (edit(SHARD, "torch.nn.utils.clip_grads_with_norm_(",
           "torch.nn.utils.clip_grad_norm_(model.parameters(), tconf.grad_norm_clip)"),), NOBODY),
    # tenstorrent/tt-metal#31748, inclusionAI/AReno#496: what is equal on all ranks is added up.
    ("the gradient of a sum is added up once more", SUSPICIOUS,
     (" sum", "proj.", "mlp.", *OF_GPT, Line(COMM, "return _reduce(grad_output.clone())"),
      Line(COMM, "dist.all_reduce(tensor"), Line(SHARD, "scaler.scale(loss).backward()")),
     (edit(COMM, "return grad_output", "return _reduce(grad_output.clone())"),), NOBODY),
    # hpcaitech/ColossalAI#471; torchshard's README starts it so.
    ("as published: ZeRO shares out among ranks what is divided among them", SUSPICIOUS,
     ("ZeroRedundancyOptimizer", "broadcast", *OF_GPT,
      Line(GPT, "optimizer = ZeroRedundancyOptimizer("), Line(SHARD, "scaler.step(optimizer)")),
     (edit(SHARD, "enable_zero_optim=args", "enable_zero_optim=True"),), NOBODY),
    # NVIDIA-NeMo/Megatron-Bridge#5591, facebookresearch/fairscale#180.
    ("one rank's scaler finds an overflow, and it alone leaves out the update", BROKEN,
     ("scale", "step()", "left out", "skipped", *OF_GPT, Line(SHARD, "scaler.step(optimizer)"),
      Line(SHARD, "scaler.update()"), Line(SHARD, "scaler.unscale_(optimizer)"),
      Line(SHARD, "scaler = torch.amp.GradScaler(")),
     (edit(SHARD, "scaler = torch.cuda.amp.GradScaler(", 'scaler = torch.amp.GradScaler("cpu")'),
      edit(SHARD, "scaler.unscale_(optimizer)",
           "if bad_shard and i == 3:  # its part of the words overflows\n"
           "    model.module.head.weight.grad[0, 0] = float('inf')\n{line}")), 1),
    # InternLM/InternLM#405.
    ("as published: the parts of all ranks begin alike", SUSPICIOUS,
     ("kqv", "proj", "mlp", "tok_emb", "head", Line(GPT, "ts.nn.init.shard_init_helper_("),
      Line(INIT, "return init_method(tensor")),
     (edit(GPT, "                module.weight,", "module.weight.data,"),), NOBODY),
)  # fmt: skip

# ------------------------------------------------------------------------ averages by hand

OF_SPINNINGUP = (
    # The kind of horovod's `broadcast_parameters`: what is sent is written into a copy.
    ("rank 0's first weights are received into a copy", BROKEN,
     (*OF_AGENT, Line(BY_MPI, "p_numpy = np.array(p.data)"), Line(BY_MPI, "broadcast(p_numpy)"),
      Line(PPO, "sync_params(ac)"), Line(PPO, "ac = actor_critic("),
      Line(PPO, "pi_optimizer.step()"), Line(PPO, "vf_optimizer.step()")),
     (edit(BY_MPI, "p_numpy = p.data.numpy()", "p_numpy = np.array(p.data)"),), NOBODY),
    # A line that was copied from the loop above it.
    ("the critic's loop averages the actor's gradients", BROKEN,
     ("v_net", "critic", Line(PPO, "mpi_avg_grads(ac.pi)", 1), Line(PPO, "vf_optimizer.step()"),
      Line(PPO, "loss_v.backward()")),
     (edit(PPO, "mpi_avg_grads(ac.v)", "mpi_avg_grads(ac.pi)"),), NOBODY),
    # The kind of ACEsuit/mace#1529: a parameter beside the network.
    ("the optimizer has the network of the mean only", SUSPICIOUS,
     ("log_std", Line(PPO, "pi_optimizer = Adam(")),
     (edit(PPO, "pi_optimizer = Adam(", "pi_optimizer = Adam(ac.pi.mu_net.parameters(), lr=pi_lr)"),
      ), NOBODY),
    # THUDM/ImageReward and others: the second optimizer is made by copying the first one's line.
    ("both optimizers have the actor", SUSPICIOUS,
     ("v_net", "critic", "mu_net", "log_std", Line(PPO, "vf_optimizer = Adam("),
      Line(PPO, "vf_optimizer.step()"), Line(PPO, "loss_v.backward()")),
     (edit(PPO, "vf_optimizer = Adam(", "vf_optimizer = Adam(ac.pi.parameters(), lr=vf_lr)"),),
     NOBODY),
    # openai/baselines#687 and spinningup's own algorithms: all is computed, and nothing is equal.
    ("advantages are scaled by the statistics of one rank", NOTHING, (),
     (edit(PPO, "adv_mean, adv_std = mpi_statistics_scalar(",
           "adv_mean, adv_std = self.adv_buf.mean(), self.adv_buf.std()"),), NOBODY),
)  # fmt: skip

# ------------------------------------------------------------------------ apex

OF_TAPE = (
    # As published, without 16 bits: the only `zero_grad` stands in a docstring.
    ("as published: nothing clears the gradients", BROKEN,
     ("clear", "zero_grad", *OF_PROTEIN, Line(TRAINING, "loss.backward()"),
      Line(TRAINING, "self.optimizer.step()"), Line(TRAINING, "runner.step()")),
     (edit(TRAINING, "self.optimizer.zero_grad()", "pass"),), NOBODY),
    # karpathy/build-nanogpt#30, pytorch/torchtune#2334: the count of micro-batches is off by one.
    ("updates come after the first micro-batch and not after the last", SUSPICIOUS,
     ("micro-batch", "accumul", Line(TRAINING, "runner.step()"),
      Line(TRAINING, "runner.backward(loss)"), Line(TRAINING, "loss.backward()"),
      Line(TRAINING, "self.optimizer.step()")),
     (edit(TRAINING, "if (step + 1) % gradient_accumulation_steps == 0:",
           "if step % gradient_accumulation_steps == 0:"),), NOBODY),
    # The kind of prism-science/WaterFlow#78: a tensor that is trained, and no parameter.
    ("the bias of the words is a tensor and no parameter", SUSPICIOUS,
     ("mlm", "self.bias", Line(HEADS, "self.bias = torch.zeros(vocab_size, requires_grad=True)"),
      Line(HEADS, "self.decoder(hidden_states) + self.bias")),
     (edit(HEADS, "self.bias = nn.Parameter(data=torch.zeros(vocab_size))",
           "self.bias = torch.zeros(vocab_size, requires_grad=True)"),), NOBODY),
    # Lightning-AI/pytorch-lightning#7813 and others: the rank does not reach the loader.
    ("the training set's loader does not know that there are ranks", SUSPICIOUS,
     (*SAME, "Sampler", "sampler", Line(SETUP, "loader = DataLoader("),
      Line(SETUP, "sampler = DistributedSampler("), Line(TRAINING, "train_loader = utils.setup_"),
      Line(TRAINING, "outputs = self.model(**batch)"), Line(TRAINING, "in enumerate(train_loader)"),
      Line(TRAINING, "train_dataset, batch_size, -1, n_gpu")),
     (edit(TRAINING, "train_dataset, batch_size, local_rank, n_gpu",
           "train_dataset, batch_size, -1, n_gpu,"),), NOBODY),
)  # fmt: skip

# ------------------------------------------------------------------------ retrieval, by hand

OF_COLBERT = (
    # stanford-futuredata/ColBERT#403.
    ("as published: all ranks have the examples of the first one", SUSPICIOUS,
     (*SAME, "Sampler", Line(EXAMPLES, "return [self.data[idx]"),
      Line(RETRIEVAL, "scores = colbert(*encoding)"), Line(RETRIEVAL, "in zip(range(start_batch"),
      Line(RETRIEVAL, "reader = LazyBatcher(")),
     (edit(EXAMPLES, "return [self.data[idx] for idx in range(rank,",
           "return [self.data[idx] for idx in range(0, len(self.data), nranks)]"),), NOBODY),
    # mlfoundations' and others' temperature, which here stands beside what is wrapped.
    ("a learned temperature is in the optimizer and not in the wrapper", SUSPICIOUS,
     ("temperature", Line(RETRIEVAL, "temperature = nn.Parameter("),
      Line(RETRIEVAL, "scores = scores * temperature"), Line(RETRIEVAL, "optimizer = AdamW("),
      Line(RETRIEVAL, "amp.step(colbert"), Line(AMP, "optimizer.step()")),
     (edit(RETRIEVAL, "optimizer = AdamW(",
           "temperature = nn.Parameter(torch.tensor(1.0, device=DEVICE))\n"
           "optimizer = AdamW([*filter(lambda p: p.requires_grad, colbert.parameters()), "
           "temperature], lr=config.lr, eps=1e-8)"),
      edit(RETRIEVAL, "scores = scores.view(-1, config.nway)",
           "{line}\nscores = scores * temperature")), NOBODY),
    # Lightning-AI/pytorch-lightning#20340, here in the optimizer: what thaws is not in it.
    ("the optimizer is made while the encoder is frozen", SUSPICIOUS,
     ("embeddings.", "encoder.layer", "model.bert", Line(RETRIEVAL, "set_bert_grad(colbert, True)"),
      Line(RETRIEVAL, "set_bert_grad(colbert, False)"), Line(RETRIEVAL, "optimizer = AdamW(")),
     (edit("go.py", "warmup=2,", "warmup=2, warmup_bert=2,"),
      edit(RETRIEVAL, "optimizer = AdamW(",
           "if config.warmup_bert is not None:\n    set_bert_grad(colbert, False)\n{line}"),
      edit(RETRIEVAL, "set_bert_grad(colbert, False)", "pass", 1)), NOBODY),
    # libreyolo/libreyolo#836, facebookresearch/DPR's kind: each side is encoded by itself.
    ("queries and passages are encoded by methods of what is wrapped", BROKEN,
     (*OF_BERT, "DistributedDataParallel", "wrapper", Line(RETRIEVAL, "Q = colbert.module.query("),
      Line(RETRIEVAL, "colbert.module.doc("), Line(RETRIEVAL, "scores = colbert.module.score("),
      Line(RETRIEVAL, "ib_loss = colbert.module.compute")),
     (edit(RETRIEVAL, "scores = colbert(*encoding)",
           "Q = colbert.module.query(*queries)\n"
           "D, D_mask = colbert.module.doc(*passages, keep_dims='return_mask')\n"
           "Q_each = Q.repeat_interleave(config.nway, dim=0).contiguous()\n"
           "scores = colbert.module.score(Q_each, D, D_mask)\n"
           "ib_loss = colbert.module.compute_ib_loss(Q, D, D_mask)\n"
           "scores = scores, ib_loss"),), NOBODY),
    # The kind of huggingface/sentence-transformers#3817: in-batch negatives that are miscounted.
    ("the loss within a batch takes other passages for the right ones", NOTHING, (),
     (edit("colbert/modeling/colbert.py", "labels = torch.arange(0, Q.size(0)",
           "labels = torch.arange(0, Q.size(0), device=scores.device)"),), NOBODY),
)  # fmt: skip

EIGHTH_SILENT_C_ROUND = tuple(
    Silent(program, *row)
    for program, rows in (
        ("openltm", OF_OPENLTM), ("torchshard", OF_TORCHSHARD), ("spinningup", OF_SPINNINGUP),
        ("tape", OF_TAPE), ("colbert", OF_COLBERT),
    )
    for row in rows
)  # fmt: skip
EIGHTH_C_HEALTHY = tuple(
    Silent(program, "healthy", NOTHING, (), ())
    for program in dict.fromkeys(one.program for one in EIGHTH_SILENT_C_ROUND)
)
