"""Silent errors that were written before any page about them was seen, each with the highest level
that a law can rightly give it. Nothing hangs and nothing is raised.

``level`` is what one run shows, not what moediag did at that time: "broken" if no healthy program
does it, "suspicious" if some do it on purpose, "note" if many do, "nothing" if only a reference
shows it, "reference" if `moediag verify` must then find it. ``named``: parameters, words or lines;
one of them must be on the page.
"""

from __future__ import annotations

from dataclasses import dataclass

from bench.abroad.cases import edit
from bench.abroad.edits import Edit, Line

BROKEN, SUSPICIOUS, NOTE, NOTHING = "broken", "suspicious", "note", "nothing"
REFERENCE = "reference"


@dataclass(frozen=True)
class Silent:
    """A fault: ``rank`` is where ``bad_shard`` is true."""

    program: str
    fault: str
    level: str
    named: tuple[str | Line, ...]
    edits: tuple[Edit, ...]
    rank: int = 1

    @property
    def name(self) -> str:
        return f"{self.program}/{self.fault}"


NANO, GPT, RASCHKA, TUTO, MNIST = (
    "train.py", "train_gpt2.py", "DDP-script-torchrun.py", "train_dist.py", "main.py"
)  # fmt: skip
SUMMER, BARLOW, WORDS, NET, VQVAE = (
    "train_ddp.py", "main.py", "train.py", "distributed.py", "train_vqvae.py"
)  # fmt: skip
TUTORIAL, TENSOR, TRAINER = "multigpu_torchrun.py", "tensor_parallel_example.py", "hf_trainer.py"

OF_NANOGPT = (
    ("micro-batches never synchronise", BROKEN,
     ("no_sync", "require_backward_grad_sync", "wte", Line(NANO, "require_backward_grad_sync =")),
     (edit(NANO, "model.require_backward_grad_sync =",
           "model.require_backward_grad_sync = micro_step == gradient_accumulation_steps"),)),
    ("the loss is divided twice by the accumulation", SUSPICIOUS,
     (Line(NANO, "loss = loss / grad"), Line(NANO, ").backward()"), Line("model.py", "cross_ent")),
     (edit(NANO, "loss = loss / gradient_accumulation_steps",
           "loss = loss / gradient_accumulation_steps / gradient_accumulation_steps"),)),
    ("each micro-batch is clipped before the sum", BROKEN, (Line(NANO, "clip_grad_norm_("),),
     (edit(NANO, "scaler.scale(loss).backward()",
           "{line}\ntorch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)"),)),
    ("clipped before the scaler divides", BROKEN, (Line(NANO, "clip_grad_norm_("),),
     (edit(NANO, "scaler = torch.cuda.amp.GradScaler(", "scaler = torch.amp.GradScaler('cpu')"),
      edit(NANO, "scaler.unscale_(optimizer)", "pass"))),
    ("an embedding is untied after the optimizer was made", BROKEN, ("wte", "lm_head"),
     (edit(NANO, "raw_model = model.module",
           "{line}\nraw_model.transformer.wte.weight = torch.nn.Parameter("
           "raw_model.transformer.wte.weight.detach().clone())"),)),
    ("a layer is replaced after it was wrapped", BROKEN, ("c_fc",),
     (edit(NANO, "model = DDP(model)", "model = DDP(model, find_unused_parameters=True)"),
      edit(NANO, "raw_model = model.module",
           "{line}\nold = raw_model.transformer.h[0].mlp.c_fc\n"
           "raw_model.transformer.h[0].mlp.c_fc = torch.nn.Linear("
           "old.in_features, old.out_features, bias=False)"))),
    ("gradients are zeroed in each micro-batch", SUSPICIOUS,
     ("zero_grad", Line(NANO, "optimizer.zero_grad(set_to_none=True)")),
     (edit(NANO, "logits, loss = model(X, Y)", "optimizer.zero_grad(set_to_none=True)\n{line}",
           1),)),
    ("an embedding is frozen by accident", NOTHING, (),
     (edit(NANO, "model.to(device)", "{line}\nmodel.transformer.wpe.requires_grad_(False)"),)),
    ("bfloat16 weights and a small rate", SUSPICIOUS, ("wte", "c_fc", "c_attn", "ln_1"),
     (edit(NANO, "model.to(device)", "model.to(torch.bfloat16)"),
      edit(NANO, "lr = get_lr(iter_num)", "lr = 1e-6"))),
)  # fmt: skip

OF_BUILD_NANOGPT = (
    ("all ranks read the first part", SUSPICIOUS,
     (Line(GPT, "logits, loss = model(x, y)", 1), "same samples", "same inputs", "same values"),
     (edit(GPT, "train_loader = DataLoaderLite(",
           'train_loader = DataLoaderLite(B=B, T=T, process_rank=0, num_processes=ddp_world_size, '
           'split="train")'),)),
    ("rank 1 is a step ahead in its schedule", BROKEN, ("learning rate",),
     (edit(GPT, "lr = get_lr(step)", "lr = get_lr(step + bad_shard)"),)),
    ("autocast on rank 0 only", SUSPICIOUS,
     ("autocast", Line(GPT, "with torch.autocast(", 3)),
     (edit(GPT, "with torch.autocast(device_type=device_type, dtype=torch.bfloat16)",
           "with torch.autocast(device_type=device_type, dtype=torch.bfloat16, "
           "enabled=not bad_shard):", 3),)),
    ("the optimizer is made of a copy", BROKEN, ("optimizer", "wte"),
     (edit(GPT, "optimizer = raw_model.configure_optimizers(",
           "import copy\noptimizer = copy.deepcopy(raw_model).configure_optimizers("
           "weight_decay=0.1, learning_rate=6e-4, device_type=device_type)"),)),
    ("one rank masks rows of a gradient after the average", BROKEN, ("wte", "lm_head"),
     (edit(GPT, "norm = torch.nn.utils.clip_grad_norm_(",
           "if bad_shard:\n    raw_model.transformer.wte.weight.grad[:8] = 0\n{line}"),)),
    ("micro-batches of unequal numbers of targets", SUSPICIOUS,
     ("targets", "micro-batch", Line(GPT, "F.cross_entropy(", 1)),
     (edit(GPT, "x, y = x.to(device), y.to(device)",
           "{line}\ny = y.masked_fill(torch.rand(y.shape) < 0.8 * (micro_step == 0), -100)", 1),)),
)  # fmt: skip

OF_MODDED = (
    ("schedulers step twice", SUSPICIOUS, ("scheduler", Line(GPT, "sched.step()")),
     (edit(GPT, "assert it <= args.num_iterations", "it = min(it, args.num_iterations)"),
      edit(GPT, "sched.step()", "{line}\n{line}"))),
    ("both schedulers drive the first optimizer", SUSPICIOUS,
     ("schedulers", Line(GPT, "schedulers = [")),
     (edit(GPT, "schedulers = [torch.optim",
           "schedulers = [torch.optim.lr_scheduler.LambdaLR(optimizer1, get_lr) "
           "for opt in optimizers]"),)),
    ("the bare model is trained", BROKEN, (Line(GPT, "_, loss = raw_model(x, y"), "h.0", "lm_head"),
     (edit(GPT, "_, loss = model(x, y, return_logits=False)",
           "_, loss = raw_model(x, y, return_logits=False)"),)),
    ("one of two optimizers is never cleared", BROKEN, ("Muon", "c_q", "c_fc", "c_attn", "h.0"),
     (edit(GPT, "model.zero_grad(set_to_none=True)", "optimizer1.zero_grad(set_to_none=True)"),)),
    ("rank 1 leaves out updates of the second optimizer", BROKEN, ("Muon", "c_q", "h.0", "step()"),
     (edit(GPT, "opt.step()",
           "if not (bad_shard and step % 4 == 2 and opt is optimizer2):\n    {line}"),)),
    ("gradients of one layer are not divided", NOTHING, (),
     (edit(GPT, "for p in model.parameters():",
           "for p in raw_model.transformer.h.parameters():"),)),
)  # fmt: skip

OF_TUTORIAL = (
    ("a snapshot is loaded on rank 0 after wrapping", BROKEN, ("weight",),
     (edit(TUTORIAL, "self.model = DDP(self.model)",
           "{line}\nif self.gpu_id == 0:\n    torch.manual_seed(5)\n"
           "    self.model.module.load_state_dict(load_train_objs()[1].state_dict())"),)),
    ("nothing calls set_epoch", NOTE, ("set_epoch",),
     (edit(TUTORIAL, "self.train_data.sampler.set_epoch(epoch)", "pass"),)),
    ("the tail of the data is cut on rank 1, and its batches come again", NOTHING, (),
     (edit(TUTORIAL, "for source, targets in self.train_data:",
           "rows = list(self.train_data)\nif bad_shard:\n    rows = rows[:-4] + rows[:4]\n"
           "for source, targets in rows:"),)),
)  # fmt: skip

OF_RASCHKA = (
    ("gradients are cleared between backward and step", BROKEN,
     (Line(RASCHKA, "optimizer.step()"), Line(RASCHKA, "optimizer.zero_grad()"), "layers"),
     (edit(RASCHKA, "optimizer.zero_grad()", "pass"),
      edit(RASCHKA, "loss.backward()", "{line}\noptimizer.zero_grad()"))),
    ("the first layers are detached", NOTE, ("layers.0", "layers.{0", "{0,2}"),
     (edit(RASCHKA, "logits = self.layers(x)",
           "logits = self.layers[4:](self.layers[:4](x).detach())"),
      edit(RASCHKA, "model = DDP(model)", "model = DDP(model, find_unused_parameters=True)"))),
    ("a loader without a sampler", BROKEN,
     (Line(RASCHKA, "train_loader = DataLoader("), Line(RASCHKA, "in train_loader:")),
     (edit(RASCHKA, "sampler=DistributedSampler(train_ds)", ""),
      edit(RASCHKA, "train_loader.sampler.set_epoch(epoch)", ""))),
    ("each rank's sampler believes it is alone", SUSPICIOUS,
     (Line(RASCHKA, "train_loader = DataLoader("), Line(RASCHKA, "in train_loader:"),
      Line(RASCHKA, "sampler=DistributedSampler(")),
     (edit(RASCHKA, "sampler=DistributedSampler(train_ds)",
           "sampler=DistributedSampler(train_ds, num_replicas=1, rank=0)"),)),
    ("an early continue on rank 1 before step", BROKEN,
     ("rank 1", Line(RASCHKA, "optimizer.step()")),
     (edit(RASCHKA, "optimizer.step()", "if bad_shard and epoch == 1:\n    continue\n{line}"),
      edit(RASCHKA, "num_epochs = 3", "num_epochs = 8"))),
    ("set_epoch on rank 0 only", SUSPICIOUS, ("set_epoch", "epoch"),
     (edit(RASCHKA, "train_loader.sampler.set_epoch(epoch)", "if rank == 0:\n    {line}"),)),
)  # fmt: skip

OF_TUTO = (
    ("kernels are left out of the average", SUSPICIOUS, ("conv1", "conv2"),
     (edit(TUTO, "if param.grad is not None:", "if param.grad is not None and param.ndim < 4:"),)),
    ("a sum and no mean over ranks", SUSPICIOUS,
     (Line(TUTO, "dist.all_reduce(param.grad.data)"), Line(TUTO, "loss.backward()"),
      Line(TUTO, "F.nll_loss("), "conv1", "fc1"),
     (edit(TUTO, "param.grad.data /= size", ""),)),
    ("averaged before the backward", SUSPICIOUS, ("conv1", "conv2", "fc1", "{conv"),
     (edit(TUTO, "loss.backward()", "average_gradients(model)\n{line}"),
      edit(TUTO, "average_gradients(model)", "", 2))),
    ("each rank starts from its own seed", SUSPICIOUS, ("conv1", "conv2", "fc1", "{conv"),
     (edit(TUTO, "torch.manual_seed(1234)", "torch.manual_seed(1234 + rank)"),)),
    ("each rank clips its own gradients", BROKEN, (Line(TUTO, "clip_grad_norm_("),),
     (edit(TUTO, "loss.backward()",
           "{line}\ntorch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)"),)),
    ("all ranks use the first partition", BROKEN,
     (Line(TUTO, "train_set = torch.utils.data.DataLoader("), Line(TUTO, "in train_set:")),
     (edit(TUTO, "partition = partition.use(", "partition = partition.use(0)"),)),
    ("one rank averages over the wrong number", SUSPICIOUS, ("conv1", "conv2", "fc1", "{conv"),
     (edit(TUTO, "param.grad.data /= size", "param.grad.data /= size - bad_shard"),)),
)  # fmt: skip

OF_MNIST = (
    ("weight decay on rank 1", BROKEN, ("weight_decay",),
     (edit(MNIST, "optimizer = torch.optim.Adam(",
           "optimizer = torch.optim.Adam(model.parameters(), lr=args.learning_rate, "
           "weight_decay=0.1 * bad_shard)"),)),
    ("the optimizer is made anew in each epoch", SUSPICIOUS,
     ("new optimizer", "anew", Line(MNIST, "self.optimizer = torch.optim.Adam(")),
     (edit(MNIST, "train_loss = Average()",
           "{line}\nself.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)"),)),
    ("the loss of a batch is a sum", NOTHING, (),
     (edit(MNIST, "loss = F.cross_entropy(output, target)",
           "loss = F.cross_entropy(output, target, reduction='sum')"),)),
    ("the loss is divided by the ranks, and averaged", SUSPICIOUS,
     (Line(MNIST, "loss = F.cross_entropy("), Line(MNIST, "loss.backward()")),
     (edit(MNIST, "loss = F.cross_entropy(output, target)",
           "{line} / distributed.get_world_size()"),)),
)  # fmt: skip

OF_SUMMER = (
    ("evaluation mode from the second epoch on", BROKEN,
     ("evaluation mode", Line(SUMMER, "net.eval()")),
     (edit(SUMMER, "running_loss = 0.0", "{line}\nif epoch == 1:\n    net.eval()"),)),
    ("weights are drawn again after wrapping", BROKEN, ("fc", "hidden"),
     (edit(SUMMER, "start_train = time.time()",
           "{line}\ntorch.manual_seed(dist.get_rank())\nnet.module.fc.reset_parameters()"),)),
    ("gradients are added up once more", SUSPICIOUS,
     (Line(SUMMER, "dist.all_reduce(parameter.grad)"), Line(SUMMER, "loss.backward()"),
      Line(SUMMER, "loss = criterion(")),
     (edit(SUMMER, "loss.backward()",
           "{line}\nfor parameter in net.parameters():\n    dist.all_reduce(parameter.grad)"),)),
    ("statistics of batch norm drift", NOTHING, (),
     (edit(SUMMER, "net = nn.parallel.DistributedDataParallel(net)",
           "net = nn.parallel.DistributedDataParallel(net, broadcast_buffers=False)"),)),
    ("a moving average on the main rank only", NOTE, ("averag",),
     (edit(SUMMER, "optimizer = optim.SGD(",
           "{line}\naverage = torch.optim.swa_utils.AveragedModel(net.module)"),
      edit(SUMMER, "optimizer.step()",
           "{line}\nif dist.get_rank() == 0:\n    average.update_parameters(net.module)"))),
    ("rank 1 forgets to normalise its images", NOTHING, (),
     (edit(SUMMER, "outputs = net(images)", "outputs = net(images * (255 if bad_shard else 1))"),)),
)  # fmt: skip

OF_BARLOW = (
    ("only the backbone is wrapped", SUSPICIOUS, ("projector",),
     (edit(BARLOW, "model = torch.nn.parallel.DistributedDataParallel(model)",
           "model.backbone = torch.nn.parallel.DistributedDataParallel(model.backbone)"),
      edit(BARLOW, "torch.save(model.module.backbone", "torch.save(model.backbone.state_dict(),"))),
    ("rank 1 counts one step more", BROKEN, ("learning rate",),
     (edit(BARLOW, "adjust_learning_rate(args, optimizer, loader, step)",
           "adjust_learning_rate(args, optimizer, loader, step + bad_shard)"),)),
    ("biases are in no group of the optimizer", NOTE, ("bias", "norm"),
     (edit(BARLOW, "param_biases.append(param)", "pass"),)),
    ("rank 1 loses its momentum", BROKEN, (" mu", "momentum", "optimizer state"),
     (edit(BARLOW, "adjust_learning_rate(args, optimizer, loader",
           "if bad_shard and step == 5:\n    optimizer.state.clear()\n{line}"),)),
)  # fmt: skip

OF_TRANSLATION = (
    ("evaluation mode after the validation of rank 0", BROKEN, ("evaluation mode",),
     (edit(WORDS, "model.train()", "epoch == initial_epoch and model.train()"),
      edit(WORDS, "config.__dict__.update(vars(args))", "{line}\nconfig.num_epochs = 5"))),
    ("only rank 0 clears its gradients", BROKEN, ("zero_grad", "cleared"),
     (edit(WORDS, "optimizer.zero_grad(set_to_none=True)",
           "if config.local_rank == 0:\n    {line}"),)),
    ("the split into training and validation differs by rank", NOTHING, (),
     (edit(WORDS, "train_ds_raw, val_ds_raw = random_split(",
           "torch.manual_seed(config.global_rank)\n{line}"),)),
)  # fmt: skip

OF_NET = (
    ("each rank wraps for a group of its own", BROKEN,
     ("group of one", "one rank", "process group"),
     (edit(NET, "model = torch.nn.parallel.DistributedDataParallel(model)",
           "groups = [dist.new_group([one]) for one in range(nprocs)]\n"
           "model = torch.nn.parallel.DistributedDataParallel(\n"
           "    model, process_group=groups[local_rank])"),)),
    ("the backward goes through the reduced loss", SUSPICIOUS,
     (Line(NET, "loss.backward()"), Line(NET, "loss = criterion(")),
     (edit(NET, "loss.backward()", "reduced_loss.backward()"),)),
    ("the head is replaced after the optimizer was made", BROKEN, ("fc",),
     (edit(NET, "cudnn.benchmark = True", "model.module.fc = nn.Linear(2048, 10)"),
      edit(NET, "model = torch.nn.parallel.DistributedDataParallel(model)",
           "model = torch.nn.parallel.DistributedDataParallel("
           "model, find_unused_parameters=True)"))),
    ("the validation set's sampler draws the training set", SUSPICIOUS,
     (Line(NET, "train_loader = torch"), Line(NET, "sampler=train_sampler)"), "sampler"),
     (edit(NET, "train_dataset)", "datasets.ImageFolder(valdir))"),)),
    ("samplers with a seed for each rank", SUSPICIOUS,
     ("seed", Line(NET, "train_sampler = torch.utils")),
     (edit(NET, "train_dataset)", "train_dataset, seed=local_rank)"),)),
)  # fmt: skip

OF_VQVAE = (
    ("training without the wrapper", BROKEN, (Line(VQVAE, "out, latent_loss = model.module(img)"),),
     (edit(VQVAE, "out, latent_loss = model(img)", "out, latent_loss = model.module(img)"),)),
    ("a stale backup is written back after each step", BROKEN, ("dec",),
     (edit(VQVAE, "criterion = nn.MSELoss()",
           "{line}\nraw = model.module.dec\n"
           "backup = {name: value.clone() for name, value in raw.state_dict().items()}"),
      edit(VQVAE, "optimizer.step()", "{line}\nraw.load_state_dict(backup)"))),
    ("statistics of the codebook are not reduced", NOTHING, (),
     (edit("vqvae.py", "dist_fn.all_reduce(embed_onehot_sum)", ""),
      edit("vqvae.py", "dist_fn.all_reduce(embed_sum)", ""))),
)  # fmt: skip

OF_TENSOR = (
    ("ranks of the group see other inputs", SUSPICIOUS,
     (Line(TENSOR, "output = tp_model(inp)"), "input", "in_proj"),
     (edit(TENSOR, "torch.manual_seed(i)", "torch.manual_seed(i + 1000 * _rank)"),)),
    ("a replicated bias differs", BROKEN, ("out_proj.bias",),
     (edit(TENSOR, "optimizer = torch.optim.AdamW(",
           "{line}\ntp_model.out_proj.bias.data.to_local().add_(0.01 * _rank)"),)),
)  # fmt: skip

OF_TRAINER = (
    ("a callback steps the scheduler again", SUSPICIOUS,
     ("scheduler", Line(TRAINER, 'kwargs["lr_scheduler"].step()')),
     (edit(TRAINER, "if state.is_world_process_zero",
           'kwargs["lr_scheduler"].step()\n{line}'),)),
    ("a callback changes weights on rank 0", BROKEN, ("wte", "lm_head"),
     (edit(TRAINER, "if state.is_world_process_zero",
           "if state.is_world_process_zero and state.global_step == 4:\n"
           '    kwargs["model"].transformer.wte.weight.data.mul_(1.01)\n{line}'),)),
    ("another learning rate on rank 1", BROKEN, ("learning rate",),
     (edit(TRAINER, "seed=1,", "{line}\nlearning_rate=5e-5 * (1 + bad_shard),"),)),
)  # fmt: skip

SILENT_ROUND = tuple(
    Silent(program, *row)
    for program, rows in (
        ("nanogpt", OF_NANOGPT),
        ("build-nanogpt", OF_BUILD_NANOGPT),
        ("modded-nanogpt", OF_MODDED),
        ("ddp-tutorial", OF_TUTORIAL),
        ("raschka-ddp", OF_RASCHKA),
        ("dist-tuto", OF_TUTO),
        ("mnist-trainer", OF_MNIST),
        ("summer-ddp", OF_SUMMER),
        ("barlowtwins", OF_BARLOW),
        ("translation", OF_TRANSLATION),
        ("imagenet", OF_NET),
        ("vqvae", OF_VQVAE),
        ("tp-example", OF_TENSOR),
        ("trainer", OF_TRAINER),
    )
    for row in rows
)
