"""The language models of an eighth round of silent errors, in programs that no earlier round had,
written before any page about them was seen. `silent_round` says what the levels mean, ``healthy``
in a fault's name a program without one. Above each fault stands the public report that it is
modelled on. All were run without moediag on two ranks: they run through and change the weights."""

from __future__ import annotations

from bench.abroad.cases import edit
from bench.abroad.edits import Line
from bench.abroad.silent_round import BROKEN, NOTHING, SUSPICIOUS, Silent

DISTILLER = "distiller.py"
NOBODY = -1  # the rank of a fault that is the same on all ranks

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

EIGHTH_SILENT_ROUND_B = tuple(
    Silent(program, *row, *(NOBODY,)[: len(row) < 5])
    for program, rows in (("distil", OF_DISTIL),)
    for row in rows
)
EIGHTH_HEALTHY_B = tuple(
    Silent(program, "healthy", NOTHING, (), ())
    for program in dict.fromkeys(one.program for one in EIGHTH_SILENT_ROUND_B)
)
