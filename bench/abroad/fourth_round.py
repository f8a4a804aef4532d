"""Cases on nine programs that were not in the earlier rounds. Their truth was committed before
the first of them was run under moediag."""

from __future__ import annotations

from textwrap import indent

from bench.abroad.cases import CLEAN, LEFT, PARTED, Case, Truth, edit, lines

RASCHKA, TUTO, MNIST, VQVAE = "DDP-script-torchrun.py", "train_dist.py", "main.py", "train_vqvae.py"
SUMMER, BARLOW, NANO, WORDS, NET = (
    "train_ddp.py", "main.py", "train_gpt2.py", "train.py", "distributed.py"
)  # fmt: skip
# A file on a slow disk: 20 s for what torch.save writes.
SLOW_FILE = """\
class SlowFile:
    left = 20
    def __init__(self, path):
        self.f = open(path, "wb")
    def write(self, data):
        self.f.write(bytes(2 ** 18))
        self.f.flush()
        __import__("time").sleep(0.5 * (self.left > 0))
        self.left -= 0.5
        return self.f.write(data)
    def flush(self):
        self.f.flush()
"""
BUSY = "import time\nuntil = time.process_time() + 12\nwhile time.process_time() < until:\n    "
BUSY_12_S = indent(f"{BUSY}pass", "    ")  # in a block

FAULTS = (
    Case(
        "raschka-ddp", "rank 1 leaves the batches of an epoch",
        Truth(LEFT, (1,), lines(RASCHKA, "for features, labels in train_loader",
                                "logits = model(features)", "loss.backward()",
                                "if bad_shard and epoch == 1"), known=False),
        (edit(RASCHKA, "optimizer.zero_grad()",
              "if bad_shard and epoch == 1 and labels.sum() >= 0:\n    break\n{line}"),),
    ),
    Case(
        "raschka-ddp", "the accuracy is reduced by who prints it",
        Truth(LEFT, (0,), lines(RASCHKA, "all_reduce(score)", "if rank == 0:")),
        (edit(RASCHKA, "test_acc = compute_accuracy(",
              "{line}\nscore = torch.tensor(test_acc)\nif rank == 0:\n"
              "    torch.distributed.all_reduce(score)"),),
    ),
    Case("raschka-ddp", "SIGKILL to rank 0", Truth(("crash",), (0,)), signal="KILL:0:12"),
    Case(
        "raschka-ddp", "rank 1 catches an exception and goes on",
        Truth(LEFT, (1,), lines(RASCHKA, "for features, labels in train_loader",
                                "logits = model(features)", "loss.backward()",
                                "raise ValueError", "continue", "except ValueError"), known=False),
        (edit(RASCHKA, "loss.backward()",
              "try:\n    if bad_shard and epoch == 1:\n        raise ValueError('bad label')\n"
              "    {line}\nexcept ValueError:\n    continue"),),
    ),
    Case(
        "raschka-ddp", "rank 1 exits with 0 before the last epoch",
        Truth(LEFT, (1,), lines(RASCHKA, "raise SystemExit(0)", "if bad_shard and epoch == 2",
                                "logits = model(features)", "loss.backward()"), known=False),
        (edit(RASCHKA, "model.train()",
              "if bad_shard and epoch == 2:\n    raise SystemExit(0)\n{line}"),),
    ),
    Case(
        "dist-tuto", "rank 2 averages its gradients in another order",
        Truth(LEFT, (2,), lines(TUTO, "dist.all_reduce(param.grad.data)",
                                ("average_gradients(model)", 1), "for param in (reversed")),
        (edit(TUTO, "for param in model.parameters()",
              "for param in (reversed(list(model.parameters())) if bad_shard else "
              "model.parameters()):"),),
    ),
    Case(
        "dist-tuto", "rank 1 has fewer batches",
        Truth(LEFT, (1,), lines(TUTO, "for data, target in train_set",
                                "dist.all_reduce(param.grad.data)",
                                ("average_gradients(model)", 1), "for epoch in range(3)",
                                "init_processes(int(", "partition_sizes[1] -=")),
        (edit(TUTO, "partition_sizes = [", "{line}\npartition_sizes[1] -= 0.08"),),
    ),
    Case(
        "dist-tuto", "rank 0 skips steps whose loss it dislikes",
        Truth(LEFT, (0,), lines(TUTO, "continue", "if bad_shard and epoch == 1",
                                "dist.all_reduce(param.grad.data)",
                                ("average_gradients(model)", 1), "for data, target in train_set")),
        (edit(TUTO, "loss.backward()",
              "if bad_shard and epoch == 1 and loss > 1e-3:\n    continue\n{line}"),),
    ),
    Case("dist-tuto", "SIGSTOP to rank 2", Truth(("hang",), (2,)), signal="STOP:2:9"),
    Case(
        "dist-tuto", "a barrier of rank 0 after an epoch",
        Truth(PARTED, (0,), lines(TUTO, "dist.barrier()", "if rank == 0 and epoch == 1")),
        (edit(TUTO, "print('Rank '", "if rank == 0 and epoch == 1:\n    dist.barrier()\n{line}"),),
    ),
    Case(
        "mnist-trainer", "rank 1 stops early by its own test loss",
        Truth(LEFT, (1,), lines(MNIST, "if bad_shard and epoch == 2", "for epoch in range(1",
                                "train_loss, train_acc = self.train()", "loss.backward()",
                                "output = self.model(data)", "trainer.fit(args.epochs)"),
              known=False),
        (edit(MNIST, "test_loss, test_acc = self.evaluate()",
              "{line}\nif bad_shard and epoch == 2 and test_loss.average > 0:\n    return"),),
    ),
    Case(
        "mnist-trainer", "the test loss is reduced on rank 0 only",
        Truth(LEFT, (0,), lines(MNIST, "distributed.all_reduce(",
                                "if distributed.get_rank() == 0")),
        (edit(MNIST, "test_loss, test_acc = self.evaluate()",
              "{line}\nif distributed.get_rank() == 0:\n"
              "    distributed.all_reduce(torch.tensor(test_loss.average))"),),
    ),
    Case(
        "mnist-trainer", "a corrupt sample on rank 1",
        Truth(("crash",), (1,), lines(MNIST, "raise RuntimeError('corrupt sample')")),
        (edit(MNIST, "data = data.to(self.device)",
              "if bad_shard and train_loss.count > 32 and (target == 7).any():\n"
              "    raise RuntimeError('corrupt sample')\n{line}"),),
    ),
    Case(
        "mnist-trainer", "rank 0 waits for its own lock",
        Truth(("hang",), (0,), lines(MNIST, "lock.acquire() and lock.acquire()")),
        (edit(MNIST, "train_loss.update(",
              "if bad_shard and train_loss.count > 32:\n"
              "    lock = __import__('threading').Lock()\n    lock.acquire() and lock.acquire()\n"
              "{line}"),),
    ),
    Case(
        "vqvae", "as published: the primary samples through the wrapper",
        Truth(LEFT, (0,), lines(VQVAE, "out, _ = model(sample)", ("if dist.is_primary():", 1),
                                "if i % 100 == 0:")),
        (edit(VQVAE, "out, _ = model.module(sample)", "out, _ = model(sample)"),),
    ),
    Case(
        "vqvae", "rank 1 leaves out a step's statistics",
        Truth(LEFT, (1,), (*lines(VQVAE, "continue", "if bad_shard and i == 5",
                                  "comm = dist.all_gather(comm)", "out, latent_loss = model(img)",
                                  "loss.backward()", "for i, (img, label) in enumerate(loader)"),
                           *lines("distributed/distributed.py", "dist.all_gather(size_list")),
              known=False),
        (edit(VQVAE, "comm = dist.all_gather(comm)",
              "if bad_shard and i == 5:\n    continue\n{line}"),),
    ),
    Case(
        "vqvae", "the primary synchronizes after its save",
        Truth(LEFT, (0,), lines(VQVAE, "dist.synchronize()", ("if dist.is_primary():", 2))),
        (edit(VQVAE, "torch.save(model.state_dict()", "{line}\ndist.synchronize()"),),
    ),
    Case(
        "vqvae", "rank 1 stays in evaluation mode",
        Truth(LEFT, (1,), (*lines(VQVAE, "model.eval()", "if bad_shard and i == 4",
                                  "out, latent_loss = model(img)", "loss.backward()"),
                           *lines("vqvae.py", "dist_fn.all_reduce(embed_onehot_sum)",
                                  "if self.training:")), known=False),
        (edit(VQVAE, "model.zero_grad()", "if bad_shard and i == 4:\n    model.eval()\n{line}"),),
    ),
    Case(
        "vqvae", "SIGSEGV in rank 0", Truth(("crash",), (0,)),
        (edit(VQVAE, "img = img.to(device)",
              "{line}\nif bad_shard and i == 6:\n    os.kill(os.getpid(), 11)"),),
    ),
    Case(
        "summer-ddp", "a barrier after the master's save",
        Truth(LEFT, (0,), lines(SUMMER, ("dist.barrier()", 2), "if is_main_process():")),
        (edit(SUMMER, "save_on_master(net.state_dict()",
              "if is_main_process():\n    {line}\n    dist.barrier()"),),
    ),
    Case("summer-ddp", "SIGKILL to rank 2", Truth(("crash",), (2,)), signal="KILL:2:10"),
    Case(
        "summer-ddp", "rank 1 waits for a file that never comes",
        Truth(("hang",), (1,), lines(SUMMER, "while bad_shard and i == 5", "time.sleep(0.2)")),
        (edit(SUMMER, "optimizer.step()",
              "while bad_shard and i == 5 and not os.path.exists('ready'):\n    time.sleep(0.2)\n"
              "{line}"),),
    ),
    Case(
        "barlowtwins", "an error in rank 0's statistics",
        Truth(("crash",), (0,), lines(BARLOW, "stats_file.missing")),
        (edit(BARLOW, "loss=loss.item(),",
              "loss=loss.item() if step < 8 else stats_file.missing,"),),
    ),
    Case(
        "barlowtwins", "rank 2 does not sum its correlations once",
        Truth(LEFT, (2,), lines(BARLOW, "torch.distributed.all_reduce(c)", "loss.backward()",
                                "if not (bad_shard and self.calls", "loss = model.forward(y1")),
        (edit(BARLOW, "torch.distributed.all_reduce(c)",
              "self.calls = getattr(self, 'calls', 0) + 1\n"
              "if not (bad_shard and self.calls == 5):\n    {line}"),),
    ),
    Case(
        "barlowtwins", "rank 1 resumes from a later epoch",
        Truth(LEFT, (1,), lines(BARLOW, "for epoch in range(start_epoch", "loss = model.forward(y1",
                                "loss.backward()", "torch.distributed.all_reduce(c)",
                                "start_epoch = int(bad_shard)", "main_worker(int(")),
        (edit(BARLOW, "start_epoch = 0", "start_epoch = int(bad_shard)"),),
    ),
    Case(
        "barlowtwins", "rank 0 opens a pipe that nobody reads",
        Truth(("hang",), (0,), lines(BARLOW, "open('pipe', 'wb')")),
        (edit(BARLOW, "torch.save(state", "os.mkfifo('pipe')\nopen('pipe', 'wb')\n{line}"),),
    ),
    Case(
        "barlowtwins", "rank 1 sums a smaller matrix",
        Truth(LEFT, (1,), lines(BARLOW, "torch.distributed.all_reduce(c)", "if bad_shard:",
                                "c = c[:8, :8]", "loss = model.forward(y1")),
        (edit(BARLOW, "c.div_(self.args.batch_size)",
              "if bad_shard:\n    c = c[:8, :8].contiguous()\n{line}"),),
    ),
    Case(
        "modded-nanogpt", "the validation loss is reduced on the master only",
        Truth(LEFT, (0,), lines(NANO, "dist.all_reduce(val_loss)",
                                "if master_process or step == 0")),
        (edit(NANO, "dist.all_reduce(val_loss)", "if master_process or step == 0:\n    {line}"),),
    ),
    Case(
        "modded-nanogpt", "rank 1's data end, so that it has no gradients",
        Truth(("crash",), (1,), lines(NANO, "p.grad /= train_accumulation_steps",
                                      "if bad_shard and step == 7")),
        (edit(NANO, "x, y = train_loader.next_batch()",
              "if bad_shard and step == 7:\n    break\n{line}", 1),),
    ),
    Case(
        "modded-nanogpt", "an endless loop in rank 0's learning rate",
        Truth(("hang",), (0,), lines(NANO, "while bad_shard and it == 9", "it = it + 0",
                                     "sched.step()")),
        (edit(NANO, "if it < args.warmup_iters",
              "while bad_shard and it == 9:\n    it = it + 0\n{line}"),),
    ),
    Case(
        "modded-nanogpt", "the master is gone with exit code 0", Truth(LEFT, (0,)),
        (edit(NANO, 'print(f"step:{step+1}', "if step == 9:\n    os._exit(0)\n{line}"),),
    ),
    Case(
        "translation", "an error rate is reduced in rank 0's validation",
        Truth(LEFT, (0,), lines(WORDS, "torch.distributed.all_reduce(torch.zeros(1))",
                                ("if config.global_rank == 0:", 1),
                                "run_validation(model, val_dataloader")),
        (edit(WORDS, "cer = metric(predicted, expected)",
              "{line}\ntorch.distributed.all_reduce(torch.zeros(1))"),),
    ),
    Case(
        "translation", "a sentence of rank 2 is too long",
        Truth(("crash",), (2,), lines("dataset.py", 'raise ValueError("Sentence')),
        (edit("dataset.py", "if enc_num_padding_tokens < 0", "if bad_shard and idx % 5 == 3:"),),
    ),
    Case(
        "translation", "rank 0 returns from training where it logs",
        Truth(LEFT, (0,), lines(WORDS, "if global_step == 5", ("if config.local_rank == 0:", 1),
                                ("return", 3), "train_model(config)", "proj_output = model(")),
        (edit(WORDS, "wandb.log({'train/loss'", "if global_step == 5:\n    return\n{line}"),),
    ),
    Case("translation", "SIGSTOP to rank 0", Truth(("hang",), (0,)), signal="STOP:0:6"),
    Case(
        "imagenet", "rank 1 skips a barrier",
        Truth(LEFT, (1,), lines(NET, "torch.distributed.barrier()", "if not (bad_shard and i == 5)",
                                "dist.all_reduce(rt", "reduced_loss = reduce_mean(loss",
                                "reduced_acc5 = reduce_mean(acc5", "loss.backward()"), known=False),
        (edit(NET, "torch.distributed.barrier()", "if not (bad_shard and i == 5):\n    {line}"),),
    ),
    Case(
        "imagenet", "a barrier in the first rank's checkpoint",
        Truth(LEFT, (0,), lines(NET, "dist.barrier()", "if args.local_rank == 0:",
                                "save_checkpoint(")),
        (edit(NET, "torch.save(state, filename)", "{line}\ndist.barrier()"),),
    ),
    Case(
        "imagenet", "rank 1 validates fewer batches",
        Truth(LEFT, (1,), lines(NET, "enumerate(val_loader)", "if bad_shard and i == 2", "break",
                                ("torch.distributed.barrier()", 1), "dist.all_reduce(rt",
                                "acc1 = validate(val_loader",
                                "train(train_loader, model, criterion"), known=False),
        (edit(NET, "in enumerate(val_loader)",
              "{line}\n    if bad_shard and i == 2:\n        break"),),
    ),
    Case(
        "imagenet", "labels of another length on rank 1",
        Truth(("crash",), (1,), lines(NET, "acc1, acc5 = accuracy(", "correct = pred.eq(")),
        (edit(NET, "acc1, acc5 = accuracy(",
              "if bad_shard and i == 4:\n    target = target[:-1]\n{line}"),),
    ),
    Case(
        "imagenet", "the workers of rank 0's loader stop",
        Truth(("hang",), (0,), lines(NET, "in enumerate(train_loader)", "time.sleep(10**6)")),
        (edit(NET, "train_sampler = torch.utils.data",
              "if bad_shard:\n    train_dataset.transform = lambda image, n=[]: n.append(1) or (\n"
              "        time.sleep(10**6) if len(n) > 40 else image)\n{line}"),),
    ),
)  # fmt: skip

SLOW = (
    Case(
        "raschka-ddp", "healthy, rank 0 saves for 20 s", CLEAN,
        (edit(RASCHKA, "model.eval()",
              f"{SLOW_FILE}if rank == 0:\n    torch.save(model.state_dict(), SlowFile('a.pt'))\n"
              "torch.distributed.barrier()\n{line}"),),
    ),
    Case(
        "dist-tuto", "healthy, rank 1 starts 15 s late", CLEAN,
        (edit(TUTO, "dist.init_process_group(", "__import__('time').sleep(15 * (rank == 1))\n"
              "{line}"),),
    ),
    Case(
        "dist-tuto", "healthy, rank 2 waits for a child that works", CLEAN,
        (edit(TUTO, "print('Rank '",
              "if rank == 2 and epoch == 0:\n    import subprocess, sys\n    subprocess.run(["
              "sys.executable, '-c', 'import time\\nwhile time.process_time() < 12: pass'])\n"
              "{line}"),),
    ),
    Case(
        "mnist-trainer", "healthy, rank 0 evaluates for 12 s", CLEAN,
        (edit(MNIST, "test_loss, test_acc = self.evaluate()",
              "import time\nuntil = time.process_time() + 12 * (distributed.get_rank() == 0)\n"
              "{line}\nwhile time.process_time() < until and epoch == 1:\n"
              "    self.model.module(torch.zeros(8, 784))"),),
    ),
    Case(
        "vqvae", "healthy, the primary saves for 20 s", CLEAN,
        (edit(VQVAE, "torch.save(model.state_dict()",
              f"{SLOW_FILE}if i == 0:\n    torch.save(model.state_dict(), SlowFile('a.pt'))"),),
    ),
    Case(
        "summer-ddp", "healthy, rank 3 computes for 12 s", CLEAN,
        (edit(SUMMER, "dist.barrier()",
              "until = time.process_time() + 12 * (local_rank == 3)\n"
              "while time.process_time() < until:\n    net.module.fc.weight.sum()\n{line}", 2),),
    ),
    Case(
        "barlowtwins", "healthy, rank 0 saves for 20 s", CLEAN,
        (edit(BARLOW, "torch.save(state",
              f"{SLOW_FILE}torch.save(state, SlowFile('a.pt') if epoch == 0 else 'b.pt')"),),
    ),
    Case(
        "modded-nanogpt", "healthy, rank 1 loads its model 15 s late", CLEAN,
        (edit(NANO, "num_vocab = 256", "{line}\nif ddp_rank == 1:\n    time.sleep(15)"),),
    ),
    Case(
        "translation", "healthy, rank 0 validates for 12 s", CLEAN,
        (edit(WORDS, "cer = metric(predicted, expected)",
              f"{{line}}\n{BUSY}model.module.encode(encoder_input, encoder_mask)"),),
    ),
    Case(
        "imagenet", "healthy, a slow loader", CLEAN,
        (edit(NET, "train_sampler = torch.utils.data",
              "if local_rank == 0:\n    train_dataset.transform = lambda image: (\n"
              "        time.sleep(0.1), image)[1]\n{line}"),),
        arguments=("--epochs=1",),
    ),
)  # fmt: skip

HEALTHY = (
    Case(  # written as a hang: torch 2.13 does not wait for the others there
        "summer-ddp",
        "healthy, only its members make a new group",
        CLEAN,
        (
            edit(
                SUMMER,
                "running_loss += loss.item()",
                "{line}\nif dist.get_rank() < 2 and i == 3:\n    pair = dist.new_group([0, 1])",
            ),
        ),
    ),
    Case(  # written as a mismatch: DDP takes the buckets of rank 0
        "mnist-trainer",
        "healthy, another bucket size on rank 1",
        CLEAN,
        (
            edit(
                MNIST,
                "model = nn.parallel.DistributedDataParallel(",
                "model = nn.parallel.DistributedDataParallel(\n"
                "    model, bucket_cap_mb=0.001 if distributed.get_rank() else 25)",
            ),
        ),
    ),
    Case(  # written as a mismatch: the forward is outside no_sync, which therefore has no effect
        "modded-nanogpt",
        "healthy, no_sync around one more backward of rank 1",
        CLEAN,
        (
            edit(
                NANO,
                "if i < train_accumulation_steps:",
                "if i < train_accumulation_steps or (ddp_rank == 1 and step == 6):",
            ),
        ),
    ),
    Case("raschka-ddp", "healthy", CLEAN),
    Case("dist-tuto", "healthy", CLEAN),
    Case("mnist-trainer", "healthy", CLEAN),
    Case("mnist-trainer", "healthy, large batches", CLEAN, arguments=("--batch-size=64",)),
    Case("vqvae", "healthy", CLEAN),
    Case("vqvae", "healthy, cycled", CLEAN, arguments=("--sched=cycle",)),
    Case("summer-ddp", "healthy", CLEAN),
    Case("barlowtwins", "healthy", CLEAN),
    Case("barlowtwins", "healthy, workers", CLEAN, arguments=("--workers=1",)),
    Case("modded-nanogpt", "healthy", CLEAN),
    Case("translation", "healthy", CLEAN),
    Case("translation", "healthy, batches of 8", CLEAN, arguments=("--batch_size=8",)),
    Case("imagenet", "healthy", CLEAN),
    Case("imagenet", "healthy, evaluation alone", CLEAN, arguments=("--evaluate",)),
)

FOURTH_ROUND = (*FAULTS, *HEALTHY, *SLOW)
