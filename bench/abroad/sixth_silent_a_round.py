"""The first half of a sixth round of silent errors, in programs that no earlier round had, written
before any page about them was seen. `silent_round` says what the levels mean, ``healthy`` in a
fault's name a program without one. Above each fault stands the public report that it is modelled
on. All were run without moediag on two ranks: they run through and change the weights."""

from __future__ import annotations

from bench.abroad.cases import edit
from bench.abroad.edits import Line
from bench.abroad.fifth_silent_round import MOMENTS
from bench.abroad.fourth_silent_round import SAME
from bench.abroad.silent_round import BROKEN, NOTE, NOTHING, SUSPICIOUS, Silent

IMAGES, UTIL, MIXED = (
    "scripts/image_train.py",
    "guided_diffusion/train_util.py",
    "guided_diffusion/fp16_util.py",
)
SHARDS, GAUSS, UNET = (
    "guided_diffusion/image_datasets.py",
    "guided_diffusion/gaussian_diffusion.py",
    "guided_diffusion/unet.py",
)
UVIT, STATE = "train.py", "utils.py"
TRAINER, GATHER = (
    "FlagEmbedding/abc/finetune/embedder/AbsTrainer.py",
    "FlagEmbedding/abc/finetune/embedder/AbsModeling.py",
)
_BASE = "FlagEmbedding/finetune/embedder/encoder_only/base/"
EMBEDDER, RUNNER = _BASE + "modeling.py", _BASE + "runner.py"
RUN, VAE, FACES = "run.py", "experiment.py", "dataset.py"
NOBODY = -1  # the rank of a fault that is the same on all ranks
OF_UNET = ("input_blocks", "middle_block", "output_blocks", "time_embed", "out.2")
OF_UVIT = ("patch_embed", "pos_embed", "in_blocks", "mid_block", "out_blocks", "decoder_pred")
OF_BERT = ("embeddings.", "encoder.layer", "attention.self", "intermediate.dense", "output.dense")
OF_VAE = ("encoder.", "decoder", "fc_mu", "fc_var", "final_layer")

# ------------------------------------------------------------------------ by hand

OF_GUIDED = (
    # vllm-project/speculators#926, pytorch/tutorials#2433. The weights are sent to all ranks, the
    # moments are not.
    ("only rank 0 resumes with the state of the optimizer", BROKEN,
     (*OF_UNET, *MOMENTS, Line(UTIL, "if dist.get_rank() == 0 and bf.exists("),
      Line(UTIL, "self.opt.load_state_dict("), Line(MIXED, "opt.step()", 1)),
     (edit(UTIL, "if bf.exists(opt_checkpoint):",
           "if dist.get_rank() == 0 and bf.exists(opt_checkpoint):"),), 1),
    # openai/guided-diffusion#111.
    ("as published: micro-batches are added up", SUSPICIOUS,
     ("micro-batch", "accumul", Line(UTIL, "self.mp_trainer.backward(loss)"),
      Line(MIXED, "loss.backward()"), Line(UTIL, 'loss = (losses["loss"]')),
     (edit(UTIL, "self.mp_trainer.backward(loss", "self.mp_trainer.backward(loss)"),)),
    # Shark-NLP/DiffuSeq#37: started by torchrun, each process is the only one of its MPI job.
    ("MPI knows of one process, so each rank shuffles all images", SUSPICIOUS,
     (*SAME, "Sampler", "shuffle", Line(SHARDS, "loader = DataLoader(", 1),
      Line(SHARDS, "yield from loader"), Line(SHARDS, "dataset = ImageDataset("),
      Line(UTIL, "batch, cond = next("),
      Line(GAUSS, "model_output = model(x_t")),
     (edit(SHARDS, "shard=MPI.COMM_WORLD", "shard=0,"),
      edit(SHARDS, "num_shards=MPI.COMM_WORLD", "num_shards=1,"))),
    # pytorch/pytorch#7617, allenai/longformer#63: `find_unused_parameters` silences the error.
    ("a checkpointed block does not hand over its parameters", SUSPICIOUS, OF_UNET[:3],
     (edit(UNET, "self._forward, (x, emb), self.parameters()",
           "self._forward, (x, emb), (), self.use_checkpoint"),
      edit(UTIL, "find_unused_parameters=False", "find_unused_parameters=True,"))),
    # Robbyant/lingbot-vla-v2#41, huggingface/accelerate#236.
    ("all ranks draw the same noise and time steps", NOTE, ("seed", "noise", "random"),
     (edit(IMAGES, "draw(10 + torch.distributed", "draw(10)"),)),
)  # fmt: skip

# ------------------------------------------------------------------------ accelerate

OF_UVIT_RUN = (
    # simchowitzlabpublic/nano-world-model#22, jongwook/onsets-and-frames#24.
    ("clipped before the backward, when there are no gradients", SUSPICIOUS,
     ("clip", Line(UVIT, "accelerator.clip_grad_norm_(")),
     (edit(UVIT, "accelerator.clip_grad_norm_(", "pass"),
      edit(UVIT, "accelerator.backward(loss.mean())",
           "accelerator.clip_grad_norm_(nnet.parameters(), max_norm=config.grad_clip)\n{line}"))),
    # huggingface/accelerate#1817, #1773: `backward` divides the loss, and each batch is a step.
    ("an accumulation is asked for, and `accumulate` is never entered", SUSPICIOUS,
     ("accumul", "micro-batch", Line(UVIT, "accelerator = accelerate.Accelerator("),
      Line(UVIT, "accelerator.backward(loss.mean())")),
     (edit(UVIT, "accelerator = accelerate.Accelerator(",
           "accelerator = accelerate.Accelerator(gradient_accumulation_steps=2)"),)),
    # ecmwf/WeatherGenerator#2718: each rank decides by its own loss.
    ("a guard against outliers leaves out updates of one rank", BROKEN,
     (*OF_UVIT, "step()", Line(UVIT, "optimizer.step()")),
     (edit(UVIT, "_metrics['loss'] = accelerator.gather",
           "if bad_shard and train_state.step in (6, 11):  # of its part of the data\n"
           "    loss = 100 * loss\n{line}"),
      edit(UVIT, "optimizer.step()", "if loss.mean() < 20:\n    {line}")), 1),
    # airaria/TextBrewer#12: the schedule has the optimizer that it was made with.
    ("the optimizer is made again, with groups, after its schedule", SUSPICIOUS,
     ("schedul", "learning rate", Line(STATE, "lr_scheduler = get_lr_scheduler("),
      Line(UVIT, "lr_scheduler.step()")),
     (edit(STATE, "lr_scheduler = get_lr_scheduler(",
           "{line}\nplain = [p for p in params if p.ndim < 2]\n"
           "optimizer = get_optimizer([{'params': [p for p in params if p.ndim > 1]},\n"
           "                           {'params': plain, 'weight_decay': 0.0}], "
           "**config.optimizer)"),)),
    # huggingface/accelerate#2142, #2926: what `prepare` returns steps once for each process.
    ("a schedule in updates is prepared, and moves twice as fast", NOTHING, (),
     (edit(UVIT, "lr_scheduler = train_state.lr_scheduler",
           "lr_scheduler = accelerator.prepare(train_state.lr_scheduler)"),)),
)  # fmt: skip

# ------------------------------------------------------------------------ Trainer

OF_EMBEDDER = (
    # libreyolo/libreyolo#836: the Trainer hands over the wrapped model.
    ("the loss is computed by `self.model`", BROKEN,
     (*OF_BERT, "DistributedDataParallel", "wrapper", Line(TRAINER, "outputs = self.model(")),
     (edit(TRAINER, "outputs = model(**inputs)", "outputs = self.model(**inputs)"),)),
    # huggingface/transformers#37766: what divides is in the method that is overridden.
    ("a training step of one's own does not divide by the accumulation", SUSPICIOUS,
     ("micro-batch", "accumul", Line(TRAINER, "self.accelerator.backward(loss)"),
      Line(TRAINER, "outputs = model(**inputs)"), Line(TRAINER, "loss = outputs.loss"),
      Line(EMBEDDER, "return self.cross_entropy(")),
     (edit(TRAINER, "def compute_loss(",
           "def training_step(self, model, inputs, num_items_in_batch=None):\n"
           "    model.train()\n"
           "    loss = self.compute_loss(model, self._prepare_inputs(inputs))\n"
           "    self.accelerator.backward(loss)\n"
           "    return loss.detach()\n\n{line}"),)),
    # huggingface/transformers#3519.
    ("the embedding is made larger after the optimizer was made", BROKEN, ("word_embeddings",),
     (edit(RUNNER, "trainer = EncoderOnlyEmbedderTrainer(",
           "import torch\n"
           "optimizer = torch.optim.AdamW(self.model.parameters(), "
           "lr=self.training_args.learning_rate)\n"
           "words = self.model.model.get_input_embeddings().weight.data\n"
           "self.model.model.set_input_embeddings(torch.nn.Embedding.from_pretrained(\n"
           "    torch.cat([words, words[:8]]), freeze=False))\n{line}"),
      edit(RUNNER, "processing_class=self.tokenizer",
           "processing_class=self.tokenizer, optimizers=(optimizer, None)"))),
    # prism-science/WaterFlow#78, pytorch/pytorch#12603. Ranks draw other first values, too.
    ("a projection is made in the first forward", SUSPICIOUS, ("projection",),
     (edit(EMBEDDER, 'if self.sentence_pooling_method == "cls":',
           "if not hasattr(self, 'projection'):\n"
           "    self.projection = torch.nn.Linear(last_hidden_state.size(-1), 16)\n{line}"),
      edit(EMBEDDER, "return last_hidden_state[:, 0]",
           "return self.projection(last_hidden_state[:, 0])"))),
    # huggingface/sentence-transformers#3817: right on rank 0.
    ("what keeps its gradient is put in the place of rank 0", NOTHING, (),
     (edit(GATHER, "all_tensors[self.process_rank] = t", "all_tensors[0] = t"),), 1),
)  # fmt: skip

# ------------------------------------------------------------------------ Lightning

_AVERAGE = """\
from copy import deepcopy
from pytorch_lightning import Callback
from pytorch_lightning.utilities import rank_zero_only


class Average(Callback):
    def on_fit_start(self, trainer, module):
        self.average = deepcopy(module.model.state_dict())

    def on_train_batch_end(self, trainer, module, *_):
        for name, value in module.model.state_dict().items():
            if value.is_floating_point():
                self.average[name].lerp_(value, 0.2)

    def on_validation_start(self, trainer, module):
        self.kept = deepcopy(module.model.state_dict())
        module.model.load_state_dict(self.average)

    @rank_zero_only
    def on_validation_end(self, trainer, module):
        module.model.load_state_dict(self.kept)


{line}"""

OF_VAE_RUN = (
    # Lightning-AI/pytorch-lightning#8562, #7813.
    ("Lightning is told to add no sampler, and there is none", BROKEN,
     (*SAME, "Sampler", "sampler", Line(RUN, "runner.fit("), Line(FACES, "return DataLoader("),
      Line(VAE, "results = self.forward(")),
     (edit(RUN, "strategy=DDPPlugin(", "{line}\nuse_distributed_sampler=False,"),)),
    # Lightning-AI/pytorch-lightning#20340: the wrapper knows only what could be trained then.
    ("the encoder thaws in the second epoch", BROKEN, ("encoder",),
     (edit(VAE, "self.model = vae_model", "{line}\nself.model.encoder.requires_grad_(False)"),
      edit(VAE, "def training_step(", "def on_train_epoch_start(self):\n"
           "    if self.current_epoch == 1:\n"
           "        self.model.encoder.requires_grad_(True)\n\n{line}"))),
    # PKU-YuanGroup/Open-Sora-Plan#186, with a decorator for what is written once.
    ("averaged weights are taken back after validation on rank 0 only", BROKEN,
     (*OF_VAE, Line(RUN, "@rank_zero_only"), Line(RUN, "load_state_dict(self.kept)"),
      Line(RUN, "load_state_dict(self.average)")),
     (edit(RUN, "data = VAEDataset(", _AVERAGE),
      edit(RUN, "LearningRateMonitor(),", "{line}\nAverage(),")), 1),
    # simchowitzlabpublic/nano-world-model#22: halfway through an accumulation.
    ("clipped in `training_step`, before the backward", BROKEN,
     ("clip", Line(VAE, "clip_grad_norm_(")),
     (edit(VAE, "self.log_dict({key: val.item() for key, val in train_loss",
           "torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1)\n{line}"),)),
    # The kind of a term that is detached to be logged (AntixK/PyTorch-VAE logs it detached).
    ("one of two terms of the loss is cut from the model", NOTHING, (),
     (edit("models/vanilla_vae.py", "loss = recons_loss + kld_weight",
           "loss = recons_loss + kld_weight * kld_loss.detach()"),)),
)  # fmt: skip

SIXTH_SILENT_A_ROUND = tuple(
    Silent(program, *row, *(NOBODY,)[: len(row) < 5])
    for program, rows in (
        ("guided-diffusion", OF_GUIDED),
        ("u-vit", OF_UVIT_RUN),
        ("flag-embedding", OF_EMBEDDER),
        ("pytorch-vae", OF_VAE_RUN),
    )
    for row in rows
)
SIXTH_A_HEALTHY = tuple(
    Silent(program, "healthy", NOTHING, (), ())
    for program in dict.fromkeys(one.program for one in SIXTH_SILENT_A_ROUND)
)
