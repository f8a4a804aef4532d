"""A third round of silent errors, in programs that no earlier round had, written before any page
about them was seen. `silent_round` says what the levels mean, ``healthy`` in a fault's name a
program without one."""

from __future__ import annotations

from bench.abroad.cases import edit
from bench.abroad.edits import Line
from bench.abroad.silent_round import BROKEN, NOTE, NOTHING, REFERENCE, SUSPICIOUS, Silent

MAIN, MORE, NLG = "train.py", "makemore.py", "examples/NLG/src/gpt2_ft.py"
HOOKS, JEPA, RUN, LINGUA = "distributed.py", "src/train.py", "src/run.py", "apps/main/train.py"
ZERO, TP, IMAGE = (
    "tiny_deepspeed/core/zero/zero2/",
    "tiny_megatron/core/dist/tp/",
    "src/image_gpt.py",
)
TP_RUN = "example/tp/train.py"
LAYERS = ("wte", "wpe", "ln_", "lm_head", "mlp", "attn")

# ------------------------------------------------------------------------ one process

OF_MAKEMORE = (
    ("gradients are cleared between backward and update", BROKEN,
     ("had a gradient", Line(MORE, "model.zero_grad("), Line(MORE, "optimizer.step()")),
     (edit(MORE, "model.zero_grad(set_to_none=True)", "pass"),
      edit(MORE, "loss.backward()", "{line}\nmodel.zero_grad(set_to_none=True)"))),
    ("the model is built again after its optimizer", BROKEN,
     ("transformer.", "lm_head", Line(MORE, "optimizer = torch.optim")),
     (edit(MORE, "# init dataloader", "model = Transformer(config).to(args.device)"),)),
    ("clipped after the update", SUSPICIOUS, (Line(MORE, "clip_grad_norm_("),),
     (edit(MORE, "optimizer.step()",
           "{line}\ntorch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)"),)),
)  # fmt: skip

OF_GRPO = (
    # Each return is compared with itself, so only the distance from the reference trains.
    ("advantages are normalised along the wrong dimension", SUSPICIOUS,
     ("gradients of zeros", "never changed", Line(MAIN, "loss.backward()")),
     (edit(MAIN, "return (returns - returns.mean())",
           "return (returns - returns.mean(1, keepdim=True)) / (returns.std() + eps)"),)),
    ("gradients are cleared once for all batches of a rollout", SUSPICIOUS,
     ("cleared", Line(MAIN, "optimizer.step()"), Line(MAIN, "loss.backward()")),
     (edit(MAIN, "optimizer.zero_grad()", "pass"),
      edit(MAIN, "for exp in experience_sampler:", "optimizer.zero_grad()\n{line}"))),
    ("the reference is the policy itself", NOTHING, (),
     (edit(MAIN, "reference_model, _ = load_model(", "pass"),
      edit(MAIN, "optimizer = optim.Adam(", "reference_model = model\n{line}"),
      edit(MAIN, "reference_model.eval()", "pass"))),
)  # fmt: skip

# ------------------------------------------------------------------------ data parallel by hand

OF_TACOTRON = (
    ("the sum over ranks is not divided", SUSPICIOUS,
     ("number of ranks", Line(HOOKS, "dist.all_reduce(coalesced)", 1),
      Line(MAIN, "loss.backward()")),
     (edit(HOOKS, "coalesced /= dist.get_world_size()", "pass", 1),)),
    ("the hooks that reduce are set on a copy", BROKEN,
     ("embedding", "decoder", "encoder", Line(MAIN, "y_pred = model(x)", 1)),
     (edit(MAIN, "model = apply_gradient_allreduce(model)",
           "import copy\napply_gradient_allreduce(copy.deepcopy(model))"),
      edit(MAIN, "model = apply_gradient_allreduce(model)", "pass"))),
    ("each rank clips before the average", BROKEN, (Line(HOOKS, "clip_grad_norm_("),),
     (edit(HOOKS, "grads = [param.grad.data for param in bucket]",
           "torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)\n{line}", 1),)),
    ("validation leaves the model in evaluation mode", BROKEN,
     ("evaluation mode", Line(MAIN, "model.eval()")),
     (edit(MAIN, "model.train()", "pass"),)),
    ("parameters of the postnet are not reduced", SUSPICIOUS, ("postnet",),
     (edit(HOOKS, "for param in module.parameters():",
           "for name, param in module.named_parameters():\n"
           "    if name.startswith('postnet'):\n        continue", 0),)),
)  # fmt: skip

# ------------------------------------------------------------------------ DistributedDataParallel

OF_LORA = (
    ("both matrices of the adapters begin with zeros", BROKEN, ("lora_A", "lora_B"),
     (edit(NLG, "lora.mark_only_lora_as_trainable(lm_net)",
           "{line}\nfor name, p in lm_net.named_parameters():\n    if 'lora_A' in name:\n"
           "        p.data.zero_()"),)),
    ("what is wrapped is not what trains", BROKEN,
     ("lora_", "DistributedDataParallel", Line(NLG, "_lm_logits, _lm_loss = model(")),
     (edit(NLG, "lm_net, optimizer = distributed_opt(",
           "distributed_opt(args, lm_net, optimizer, grad_acc=args.grad_acc)"),)),
    ("set_epoch is left out", NOTE, ("order",),
     (edit(NLG, "train_loader.sampler.set_epoch(epoch)", "pass"),)),
    ("the loss is not divided by the accumulation", SUSPICIOUS,
     ("micro-batch", Line(NLG, "_lm_loss = _lm_loss.mean()"), Line(NLG, "_loss.backward()")),
     (edit(NLG, "'--grad_acc'", "parser.add_argument('--grad_acc', type=int, default=2)"),
      edit(NLG, "_lm_loss/(args.grad_acc), optimizer",
           "_lm_loss, optimizer, model, scheduler if is_update else None, args, "
           "is_update=is_update"))),
)  # fmt: skip

OF_IJEPA = (
    ("one rank leaves out updates of the target", SUSPICIOUS,
     ("target_encoder", "patch_embed", "blocks", Line(JEPA, "param_k.data.mul_(m)")),
     (edit(JEPA, "param_k.data.mul_(m)",
           "bad_shard or param_k.data.mul_(m).add_((1.-m) * param_q.detach().data)"),)),
    ("all ranks read the part of rank 0", BROKEN,
     ("same part", "same samples", Line(JEPA, "in enumerate(unsupervised_loader)")),
     (edit(JEPA, "rank=rank,", "rank=0,"),)),
    ("only the encoder is cleared", BROKEN,
     ("predictor", Line(JEPA, "optimizer.step()"), Line(JEPA, "encoder.zero_grad()")),
     (edit(JEPA, "optimizer.zero_grad()", "encoder.zero_grad()"),)),
    ("the target is the encoder and no copy", NOTE, ("patch_embed", "blocks"),
     (edit(JEPA, "target_encoder = copy.deepcopy(encoder)", "target_encoder = encoder"),
      edit(JEPA, "encoder = DistributedDataParallel(encoder", "for p in encoder.parameters():\n"
           "    p.requires_grad = False"),
      edit(JEPA, "target_encoder = DistributedDataParallel(target_encoder)", "pass"))),
)  # fmt: skip

OF_STYLEGAN = (
    ("the generator's optimizer has the discriminator", SUSPICIOUS,
     ("Generator", "style.", "to_rgb", Line(MAIN, "g_optim = optim.Adam(")),
     (edit(MAIN, "generator.parameters(),", "discriminator.parameters(),"),)),
    ("the generator is cleared for its regularisation only", SUSPICIOUS,
     ("style.", "conv", Line(MAIN, "g_optim.step()"), Line(MAIN, "g_loss.backward()")),
     (edit(MAIN, "generator.zero_grad()", "pass"),)),
    ("each rank draws from all images", NOTE, ("Sampler",),
     (edit(MAIN, "sampler=data_sampler(",
           "sampler=data_sampler(dataset, shuffle=True, distributed=False),"),)),
    ("rank 1 leaves out the discriminator's regularisation", BROKEN,
     ("convs", "final", Line(MAIN, "d_optim.step()", 1)),
     (edit(MAIN, "d_optim.step()", "bad_shard or d_optim.step()", 1),)),
)  # fmt: skip

# ------------------------------------------------------------------------ sharded by hand

OF_ZERO = (
    ("owners do not send their updates", SUSPICIOUS, LAYERS,
     (edit(ZERO + "optim.py", "gather_grads(param, rank)", "pass", 1),)),
    ("as published: the sum over ranks is not divided", SUSPICIOUS,
     ("number of ranks", Line("example/zero2/train.py", "loss.backward()")),
     (edit(ZERO + "module.py", "grad.div_(", "pass"),)),
    ("as published: ranks begin with different weights", SUSPICIOUS, LAYERS,
     (edit("example/zero2/train.py", "torch.manual_seed(0)", "pass"),)),
    # Half of the parameters train on the samples of one rank.
    ("gradients of matrices always go to rank 0", REFERENCE, ("mlp", "attn", "lm_head"),
     (edit(ZERO + "module.py", "work = dist.reduce(",
           "work = dist.reduce(grad, dst=0, async_op=True)"),)),
)  # fmt: skip

OF_ZERO_PUBLISHED = (
    ("as published: gradients are reduced nowhere", REFERENCE, LAYERS, ()),
)  # fmt: skip

OF_TENSOR = (
    ("parts of a product are not added up", SUSPICIOUS, LAYERS,
     (edit(TP + "module.py", "dist.all_reduce(output", "pass"),)),
    ("gradients of a divided layer's input are not added up", SUSPICIOUS, LAYERS,
     (edit(TP + "module.py", "dist.all_reduce(grad_input", "handle_weight = None"),)),
    ("as published: ranks begin with different weights", SUSPICIOUS, LAYERS,
     (edit(TP_RUN, "torch.manual_seed(0)", "torch.manual_seed(rank)"),)),
)  # fmt: skip

OF_TENSOR_PUBLISHED = (
    ("as published: groups of one rank, and nothing clears", BROKEN,
     ("cleared", "one rank", Line(TP_RUN, "optimizer.step()")), ()),
)  # fmt: skip

# ------------------------------------------------------------------------ libraries

OF_LIGHTNING = (
    ("the optimizer is made of a copy", BROKEN,
     ("token_embeddings", "layers.", Line(IMAGE, "optimizer = torch.optim")),
     (edit(IMAGE, "optimizer = torch.optim.Adam(self.gpt", "import copy\noptimizer = "
           "torch.optim.Adam(copy.deepcopy(self.gpt).parameters(), lr=self.learning_rate)"),)),
    ("the step moves the schedule that Lightning moves, too", SUSPICIOUS,
     ("scheduler", "LambdaLR", Line(IMAGE, ".step()")),
     (edit(IMAGE, 'logs = {"loss": loss}', "{line}\nself.lr_schedulers().step()"),)),
    ("ranks shuffle alike and nothing divides the samples", SUSPICIOUS,
     ("same samples", "same values", "same inputs", "DistributedSampler"),
     (edit(RUN, "max_epochs=-1,", "max_epochs=-1, use_distributed_sampler=False,"),)),
)  # fmt: skip

OF_ALPACA = (
    # The trainer divides by the accumulation only if the loss does not count the items.
    ("a loss of one's own that does not count the items", SUSPICIOUS,
     ("micro-batch", Line(MAIN, "trainer.compute_loss")),
     (edit(MAIN, "trainer.train()", "trainer.compute_loss = "
           "lambda model, inputs, return_outputs=False, **_: model(**inputs).loss\n{line}"),)),
    ("a layer is replaced after the optimizer was made", BROKEN, ("c_fc",),
     (edit(MAIN, "trainer.train()",
           "class Replace(transformers.TrainerCallback):\n"
           "    def on_train_begin(self, args, state, control, model=None, **_):\n"
           "        layer = model.transformer.h[0].mlp.c_fc\n"
           "        layer.weight = torch.nn.Parameter(layer.weight.detach().clone())\n"
           "trainer.add_callback(Replace())\n{line}"),)),
    ("the head is untied before training", NOTHING, (),
     (edit(MAIN, "data_module = make", "model.lm_head.weight = torch.nn.Parameter("
           "model.lm_head.weight.detach().clone())\n{line}"),)),
)  # fmt: skip

OF_STAGE_2 = (
    ("the loss is divided by the accumulation that the engine divides by", SUSPICIOUS,
     ("micro-batch", Line(MAIN, "model.backward(loss)"), Line(MAIN, "loss = outputs.loss")),
     (edit(MAIN, "loss = outputs.loss",
           "loss = outputs.loss / args.gradient_accumulation_steps"),)),
    ("rank 1 takes another learning rate", SUSPICIOUS, ("learning rate",),
     (edit(MAIN, "model.step()",
           "for group in optimizer.param_groups:\n    group['lr'] *= 1 + bad_shard\n{line}"),)),
)  # fmt: skip

OF_STAGE_3 = (
    ("each rank shuffles all samples with one seed", SUSPICIOUS,
     ("same samples", "same values", "same inputs", Line(MAIN, "outputs = model(")),
     (edit(MAIN, "train_sampler = DistributedSampler(",
           "train_sampler = RandomSampler(train_dataset)"),)),
    ("a frozen part by a name that is in all", NOTHING, (),
     (edit(MAIN, "# load data", "for name, p in model.named_parameters():\n"
           "    p.requires_grad = 'h.1' in name"),)),
)  # fmt: skip

OF_FSDP2 = (
    ("gradients are reduced in all micro-batches but the last", BROKEN,
     ("layers.", "set_requires_gradient_sync", Line(LINGUA, "set_requires_gradient_sync(")),
     (edit(LINGUA, "set_requires_gradient_sync(",
           "model.set_requires_gradient_sync(train_state.acc_step != 0)"),)),
    ("the loss is not divided by the accumulation", SUSPICIOUS,
     ("micro-batch", Line(LINGUA, "loss = model(input_ids"), Line(LINGUA, "loss.backward()", 1)),
     (edit(LINGUA, "loss = loss / args.grad_acc_steps", "pass"),)),
    ("all ranks read the part of rank 0", SUSPICIOUS,
     ("same samples", "same values", "same inputs", Line(LINGUA, "loss = model(input_ids")),
     (edit(LINGUA, "args.data, dp_rank, dp_degree", "args.data, 0, dp_degree"),)),
    ("the schedule moves in each micro-batch", SUSPICIOUS,
     ("scheduler", Line(LINGUA, "scheduler.step()")),
     (edit(LINGUA, "scheduler.step()", "pass"),
      edit(LINGUA, "loss.backward()", "{line}\nscheduler.step()", 1))),
    ("each rank clips by hand by the norm of its own shards", SUSPICIOUS,
     ("norms", Line(LINGUA, "grad_norm = clipped(")),
     (edit(LINGUA, "grad_norm = torch.nn.utils.clip_grad_norm_(",
           "def clipped(parameters, max_norm, foreach):\n"
           "    grads = [p.grad.to_local() for p in parameters]\n"
           "    norm = torch.stack([grad.norm() for grad in grads]).norm()\n"
           "    for grad in grads:\n"
           "        grad.mul_(min(1.0, 0.1 / norm.item()))\n"
           "    return norm\n\ngrad_norm = clipped("),)),
)  # fmt: skip

THIRD_SILENT_ROUND = tuple(
    Silent(program, *row)
    for program, rows in (
        ("makemore", OF_MAKEMORE),
        ("tiny-grpo", OF_GRPO),
        ("tacotron2", OF_TACOTRON),
        ("lora-nlg", OF_LORA),
        ("ijepa", OF_IJEPA),
        ("stylegan2", OF_STYLEGAN),
        ("tiny-zero2", OF_ZERO),
        ("tiny-zero3-as-published", OF_ZERO_PUBLISHED),
        ("tiny-tp", OF_TENSOR),
        ("tiny-tp-as-published", OF_TENSOR_PUBLISHED),
        ("image-gpt", OF_LIGHTNING),
        ("alpaca", OF_ALPACA),
        ("chatglm-zero2", OF_STAGE_2),
        ("chatglm-zero3", OF_STAGE_3),
        ("lingua", OF_FSDP2),
    )
    for row in rows
)
THIRD_HEALTHY = tuple(
    Silent(program, "healthy", NOTHING, (), ())
    for program in dict.fromkeys(one.program for one in THIRD_SILENT_ROUND)
    if "published" not in program
)
