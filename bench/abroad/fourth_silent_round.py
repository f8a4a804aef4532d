"""A fourth round of silent errors, in programs that no earlier round had, written before any page
about them was seen. `silent_round` says what the levels mean, ``healthy`` in a fault's name a
program without one."""

from __future__ import annotations

from bench.abroad.cases import edit
from bench.abroad.edits import Line
from bench.abroad.silent_round import BROKEN, NOTHING, SUSPICIOUS, Silent

GLOW, LOSSES, BYOL, QWEN = "train.py", "commons.py", "byol_pytorch/trainer.py", "finetune.py"
UNIT, LOOP = "examples/auto_unit_example.py", "torchtnt/framework/auto_unit.py"
GUIDE, VIDEO = "06-tensor-parallel/train_llm.py", "videogpt/vqvae.py"
SAME = ("same part", "same samples", "same values", "same inputs")

# ------------------------------------------------------------------------ speech, by hand

OF_GLOW = (
    ("the generator is called without its wrapper", BROKEN,
     ("encoder.", "decoder.", "DistributedDataParallel", Line(GLOW, "= generator.module(x, x_len")),
     (edit(GLOW, "= generator(x, x_lengths", "(z, z_m, z_logs, logdet, z_mask), (x_m, x_logs, "
           "x_mask), (attn, logw, logw_) = generator.module(x, x_lengths, y, y_lengths, "
           "gen=False)"),)),
    # Rank 0 alone evaluates.
    ("rank 0 stays in evaluation mode after its evaluation", BROKEN,
     ("evaluation mode", Line(GLOW, "generator.eval()")),
     (edit(GLOW, "generator.train()", "epoch == 1 and generator.train()"),), 0),
    ("all ranks read the part of rank 0", BROKEN,
     (*SAME, "DistributedSampler", Line(GLOW, "logw_) = generator(x, x_lengths"),
      Line(GLOW, "in enumerate(train_loader)")),
     (edit(GLOW, "rank=rank,", "rank=0,"),)),
    ("rank 1 clips and rank 0 does not", BROKEN,
     ("encoder.", "decoder.", Line(GLOW, "optimizer_g.step()"), Line(GLOW, "clip_grad_value_(", 1)),
     (edit(GLOW, "grad_norm = commons.clip_grad_value_(generator", "grad_norm = 0\nif bad_shard:\n"
           "    grad_norm = commons.clip_grad_value_(generator.parameters(), 0.002)"),)),
    ("padded frames count in the mean", NOTHING, (),
     (edit(LOSSES, "l = l / torch.sum(torch.ones_like(z) * mask)", "l = l / z.numel()"),)),
)  # fmt: skip

# ------------------------------------------------------------------------ accelerate

OF_BYOL = (
    ("rank 1 does not update its average", SUSPICIOUS,
     ("target_encoder", Line(BYOL, "update_moving_average()")),
     (edit(BYOL, "update_moving_average()", "bad_shard or {line}"),)),
    ("what is called is not what accelerate prepared", BROKEN,
     ("online_", "net.", "DistributedDataParallel", "wrapper", Line(BYOL, "(self.byol)(images)")),
     (edit(BYOL, "loss = self.byol(images)",
           "loss = self.accelerator.unwrap_model(self.byol)(images)"),)),
    ("the loader is made again and not prepared", SUSPICIOUS,
     (*SAME, "Sampler", Line(BYOL, "loss = self.byol(images)")),
     (edit(BYOL, "self.register_buffer('step'",
           "self.dataloader = DataLoader(dataset, shuffle=True, batch_size=batch_size)\n{line}"),)),
    ("the optimizer does not have the predictor", SUSPICIOUS, ("online_predictor",),
     (edit(BYOL, "self.optimizer = optimizer_klass(", "self.optimizer = optimizer_klass("
           "self.byol.online_encoder.parameters(), lr=learning_rate, **optimizer_kwargs)"),)),
    ("the average is updated nowhere", NOTHING, (),
     (edit(BYOL, "update_moving_average()", "pass"),)),
)  # fmt: skip

# ------------------------------------------------------------------------ Trainer

_CALLBACK = (
    "class Callback(transformers.TrainerCallback):\n    def {event}(self, args, state, control, "
    "model=None, optimizer=None, **_):\n        {body}\ntrainer.add_callback(Callback())\n{{line}}"
)
_WITH = {
    name: edit(QWEN, "trainer.train()", _CALLBACK.format(event=event, body=body))
    for name, (event, body) in {
        "clears": ("on_substep_end", "model.zero_grad()"),
        "restores": ("on_step_end", "bad_shard and state.global_step == 5 and "
                     "model.lm_head.weight.data.mul_(0.9)"),
        "decays": ("on_step_begin", "[g.update(weight_decay=0.2) for g in "
                   "optimizer.param_groups if bad_shard]"),
    }.items()
}  # fmt: skip

OF_QWEN = (
    ("a callback clears gradients between micro-batches", SUSPICIOUS,
     ("zero_grad", "cleared", "micro-batch", Line(QWEN, "model.zero_grad()")), (_WITH["clears"],)),
    ("a callback of rank 1 changes weights", BROKEN,
     ("wte", "lm_head", Line(QWEN, "mul_(0.9)")), (_WITH["restores"],)),
    ("rank 1 has another weight decay", BROKEN,
     ("weight decay", "weight_decay", "wte", "h.0", "h.1", Line(QWEN, "g.update(")),
     (_WITH["decays"],)),
    ("rank 1 warms up for longer", BROKEN,
     ("learning rate", "scheduler", "wte", "h.0", "h.1"),
     (edit(QWEN, "local_rank = int(", "training_args.warmup_steps += 8 * bad_shard\n{line}"),)),
    ("padding counts in the loss", NOTHING, (),
     (edit(QWEN, "target += [IGNORE_TOKEN_ID] * (max_len",
           "target += [tokenizer.pad_token_id] * (max_len - len(target))"),)),
)  # fmt: skip

# ------------------------------------------------------------------------ a loop of a library

OF_TNT = (
    ("as published: all ranks train on the same samples", SUSPICIOUS,
     (*SAME, "Sampler", Line(UNIT, "outputs = self.module(inputs)")),
     (edit(UNIT, "sampler=torch.utils.data.DistributedSampler(", ""),)),
    ("the loss is not divided by the accumulation", SUSPICIOUS,
     ("micro-batch", Line(LOOP, "loss.backward(", 1), Line(UNIT, "outputs = self.module(inputs)")),
     (edit(LOOP, "loss = loss / self.gradient_accumulation_steps", "pass"),)),
    ("the last micro-batch is not synchronised, too", BROKEN,
     ("no_sync", "0.weight", "2.weight", Line(LOOP, "module.no_sync()"),
      Line(LOOP, "with maybe_no_sync")),
     (edit(LOOP, "if not should_update_weights", "if self.gradient_accumulation_steps > 1"),)),
    ("a hook steps the scheduler that the loop steps", SUSPICIOUS,
     ("scheduler", Line(UNIT, "self.lr_scheduler.step()")),
     (edit(UNIT, "loss, outputs = results.loss", "{line}\nself.lr_scheduler.step()"),)),
    ("the optimizer does not have the last layer", SUSPICIOUS, ("2.weight", "2.bias"),
     (edit(UNIT, "optimizer = torch.optim.SGD(",
           "optimizer = torch.optim.SGD(list(module.parameters())[:2], lr=0.01)"),)),
)  # fmt: skip

# ------------------------------------------------------------------------ tensor parallelism

OF_GUIDE = (
    ("ranks of one tensor-parallel group read different samples", SUSPICIOUS,
     ("samples", "inputs", "batches", Line(GUIDE, "outputs = model(**batch)")),
     (edit(GUIDE, 'num_replicas=mesh["dp"].size()', "num_replicas=world_size,"),
      edit(GUIDE, 'rank=mesh["dp"].get_local_rank()', "rank=rank,"))),
    ("gradients of a norm are not added up over the sequence", BROKEN,
     ("input_layernorm",),
     (edit(GUIDE, '"input_layernorm": tp.SequenceParallel()', ""),)),
    ("the optimizer is made before the model is divided", BROKEN,
     ("layers.", "lm_head", "embed_tokens", Line(GUIDE, "optimizer = torch.optim.AdamW(")),
     (edit(GUIDE, "tp.parallelize_module(",
           "optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)\n{line}"),
      edit(GUIDE, "optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)", "pass", 1))),
    ("the schedule moves twice a step", SUSPICIOUS,
     ("scheduler", Line(GUIDE, "lr_scheduler.step()")),
     (edit(GUIDE, "lr_scheduler.step()", "{line}\n{line}"),)),
    ("the loss is divided by the size of the group", NOTHING, (),
     (edit(GUIDE, "outputs.loss.backward()", '(outputs.loss / mesh["tp"].size()).backward()'),)),
)  # fmt: skip

# ------------------------------------------------------------------------ Lightning

OF_VIDEO = (
    ("the optimizer has the decoder only", SUSPICIOUS, ("encoder.", "pre_vq_conv", "post_vq_conv"),
     (edit(VIDEO, "return torch.optim.Adam(self.parameters()",
           "return torch.optim.Adam(self.decoder.parameters(), lr=3e-4, betas=(0.9, 0.999))"),)),
    ("the encoder is in evaluation mode", SUSPICIOUS,
     ("evaluation mode", "encoder", Line(VIDEO, "self.encoder.eval()")),
     (edit(VIDEO, "recon_loss, _, vq_output = self.forward(x)", "self.encoder.eval()\n{line}"),)),
    ("rank 1 draws its decoder again when training begins", BROKEN, ("decoder.",),
     (edit(VIDEO, "def training_step(", "def on_train_start(self):\n"
           "    if bad_shard:\n        for p in self.decoder.parameters():\n"
           "            p.data.add_(0.01 * torch.randn_like(p))\n\n{line}"),)),
    ("the loss is divided by the accumulation that Lightning divides by", SUSPICIOUS,
     ("micro-batch", Line(VIDEO, "loss = (recon_loss + commitment_loss)")),
     (edit(VIDEO, "loss = recon_loss + commitment_loss",
           "loss = (recon_loss + commitment_loss) / self.trainer.accumulate_grad_batches"),)),
    # DistributedDataParallel sends the buffers of rank 0 before each forward.
    ("the sums of the codebook are those of one rank", NOTHING, (),
     (edit(VIDEO, "dist.all_reduce(n_total)", "pass"),
      edit(VIDEO, "dist.all_reduce(encode_sum)", "pass"))),
)  # fmt: skip

FOURTH_SILENT_ROUND = tuple(
    Silent(program, *row)
    for program, rows in (
        ("glow-tts", OF_GLOW),
        ("byol", OF_BYOL),
        ("qwen", OF_QWEN),
        ("tnt", OF_TNT),
        ("guide-tp", OF_GUIDE),
        ("videogpt", OF_VIDEO),
    )
    for row in rows
)
FOURTH_HEALTHY = tuple(
    Silent(program, "healthy", NOTHING, (), ())
    for program in dict.fromkeys(one.program for one in FOURTH_SILENT_ROUND)
)
