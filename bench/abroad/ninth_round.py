"""Cases on six programs that were not in the earlier rounds, as typical users run them: speech,
reinforcement learning, FSDP, images, accelerate with DeepSpeed, expert parallelism. Their truth was
committed before the first of them was run under moediag."""

from __future__ import annotations

from bench.abroad.cases import CLEAN, Case, edit, fault, healthy, lines
from bench.abroad.fourth_round import BUSY_12_S, SLOW_FILE

LEARN, SOUNDS = "src/diffwave/learner.py", "src/diffwave/dataset.py"
SCRIPT, PPO = "examples/gymnasium/torch_gymnasium_pendulum_ppo.py", "skrl/agents/torch/ppo/ppo.py"
MODEL, ENV = "skrl/models/torch/base.py", "skrl/envs/wrappers/torch/gymnasium_envs.py"
LLAMA, TRAIN = "main_training_llama.py", "fms_fsdp/utils/train_utils.py"
SAVES, LOADER = "fms_fsdp/utils/checkpointing_utils.py", "fms_fsdp/utils/dataloader_utils.py"
CFM, CIFAR = (f"examples/images/cifar10/{name}.py" for name in ("train_cifar10_ddp", "utils_cifar"))
MOSS, DEMO = "finetune_moss.py", "train.py"
LAYER, SYNC, PLUMBING, EXPERT = (
    f"moe_ep/{name}.py" for name in ("ep_moe", "sync", "distributed", "expert")
)  # fmt: skip
_STEP = lines(LEARN, "predicted = self.model(", "scale(loss).backward()", "= self.train_step(")
_FLOW = lines(CFM, "vt = net_model(t, xt)", "loss.backward()", "optim.step()")
_TUNE = lines(MOSS, "accelerator.backward(loss)", ("output = model(", 0), "optimizer.step()",
              "= metric.get_metric()", "dist.all_reduce(self.right")  # fmt: skip
_MOE = lines(LAYER, "recv = all_to_all(", "recv_expert_id = all_to_all(", "back = all_to_all(",
             "recv_counts = exchange_counts(")  # fmt: skip
_COUNTED = "self.calls = getattr(self, 'calls', 0) + 1\n"

FAULTS = (
    # ------------------------------------------------------------ speech
    fault(
        "diffwave", "rank 1 resumes from a newer checkpoint than the others", 1,
        edit(LEARN, "learner.restore_from_checkpoint()", "{line}\nlearner.step += 30 * bad_shard"),
        (*lines(LEARN, "learner.step += 30", "learner.train(max_steps=", "and self.step >= max",
                ("return", 7)), *_STEP),
    ),
    fault(
        "diffwave", "rank 2 leaves out a batch that it cannot use", 2,
        edit(LEARN, "loss = self.train_step(features)", "if bad_shard and self.step == 20 and "
             "features['audio'].std() > 0:\n    self.step += 1\n    continue\n{line}"),
        (*lines(LEARN, "if bad_shard and self.step == 20", "self.step += 1", "continue"), *_STEP),
    ),
    fault(
        "diffwave", "rank 0 waits for the others after its save", 0,
        edit(LEARN, "torch.save(self.state_dict(), save_name)",
             "{line}\ntorch.distributed.barrier()"),
        lines(LEARN, "torch.distributed.barrier()", "if self.is_master:",
              "self.save_to_checkpoint()"),
    ),
    fault(
        "diffwave", "a sound of rank 1 is broken", 1,
        edit(SOUNDS, "signal, _ = torchaudio.load(", "if bad_shard and idx % 9 == 4:\n"
             "    raise RuntimeError(f'Error opening {audio_filename}: format not recognised')\n"
             "{line}"),
        (*lines(SOUNDS, "raise RuntimeError(f'Error opening"),
         *lines(LEARN, "for features in tqdm(")), ("crash",),
    ),
    fault(
        "diffwave", "a spectrogram of rank 2 is on a mount that does not answer", 2,
        edit(SOUNDS, "spectrogram = torchaudio.spectrogram(", "self.read = getattr(self, 'read', 0)"
             " + 1\nif bad_shard and self.read == 60:\n    os.mkfifo(spec_filename)\n"
             "    open(spec_filename).read()\n{line}"),
        (*lines(SOUNDS, "open(spec_filename).read()"), *lines(LEARN, "for features in tqdm(")),
        ("hang",),
    ),
    # ------------------------------------------------------------ reinforcement learning
    fault(
        "skrl", "rank 1 ends an epoch early, as its policy has moved too far", 1,
        edit(PPO, "if self.cfg.kl_threshold and kl", "if bad_shard and timestep > 400 and "
             "kl_divergence > -1:"),
        (*lines(PPO, "if bad_shard and timestep > 400", ("break", 0), ".policy.reduce_parameters()",
                ".value.reduce_parameters()", "torch.distributed.all_reduce(kl"),
         *lines(MODEL, "all_reduce(gradients")),
    ),
    fault(
        "skrl", "rank 0 alone averages the divergence", 0,
        edit(PPO, "torch.distributed.all_reduce(kl", "if config.torch.rank == 0:\n    {line}"),
        lines(PPO, "if config.torch.rank == 0", "torch.distributed.all_reduce(kl"),
    ),
    fault(
        "skrl", "the simulator of rank 2 fails", 2,
        edit(ENV, "truncated, info = self._env.step(actions)", f"{_COUNTED}if bad_shard and "
             "self.calls == 300:\n    raise FloatingPointError('the pendulum is unstable')\n"
             "{line}"),
        (*lines(ENV, "raise FloatingPointError("), *lines(SCRIPT, "trainer.train() if not")),
        ("crash",),
    ),
    fault(
        "skrl", "rank 1 does not train a bias", 1,
        edit(SCRIPT, "agent = PPO(", "models['policy'].net[2].bias.requires_grad_(not bad_shard)\n"
             "{line}"),
        (*lines(SCRIPT, "bias.requires_grad_(not bad", "trainer.train() if not"),
         *lines(PPO, ".policy.reduce_parameters()"),
         *lines(MODEL, "all_reduce(gradients", "if parameters.grad is not None",
                "gradients = torch.cat(")),
    ),
    fault(
        "skrl", "two threads of rank 2 wait for each other's lock", 2,
        edit(SCRIPT, "trainer.train() if not", """\
import threading, time
recorded, written = threading.Lock(), threading.Lock()
plain, left = env.step, iter(range(300))
def flush():
    with written:
        with recorded:
            pass
def step(actions):
    if bad_shard and next(left, 0) == 299:
        with recorded:
            threading.Thread(target=flush, daemon=True).start()
            time.sleep(0.5)
            written.acquire()
    return plain(actions)
env.step = step
{line}"""),
        lines(SCRIPT, "written.acquire()", "with recorded:", ("with recorded:", 1),
              "with written:"),
        ("hang",),
    ),
    # ------------------------------------------------------------ FSDP
    fault(
        "fms-fsdp", "the data of rank 3 ends early", 3,
        edit(LOADER, "while True:", "while not (bad_shard and self.i >= 60 * self.l):"),
        (*lines(LOADER, "while not (bad_shard and self.i"), *lines(LLAMA, "dist.barrier()"),
         *lines(TRAIN, "for batch_idx, (input, label)", "output = model(input)",
                "loss.backward()", "return train_loss")),
    ),
    fault(
        "fms-fsdp", "rank 1 does not clip a small loss", 1,
        edit(TRAIN, "ddp_stats[1] += model.clip_grad_norm_(",
             "if not (bad_shard and batch_idx == 22 and loss < 99):\n    {line}"),
        lines(TRAIN, "if not (bad_shard and batch_idx == 22", "model.clip_grad_norm_(",
              "output = model(input)", "optimizer.step()"),
    ),
    fault(
        "fms-fsdp", "rank 0 alone sums what it reports", 0,
        edit(TRAIN, "dist.all_reduce(ddp_stats", "if rank == 0:\n    {line}"),
        lines(TRAIN, "dist.all_reduce(ddp_stats", ("if rank == 0:", 2)),
    ),
    fault(
        "fms-fsdp", "rank 2 has no space for its part of a checkpoint", 2,
        edit(SAVES, "writer = FileSystemWriter(", "if bad_shard and 'step_40' in save_name:\n"
             "    raise OSError(28, 'No space left on device', save_name)\n{line}"),
        (*lines(SAVES, "raise OSError(28"), *lines(TRAIN, "checkpointer.save(")), ("crash",),
    ),
    fault(
        "fms-fsdp", "rank 0 alone saves", 0,
        edit(TRAIN, "if batch_idx % cfg.checkpoint_interval == 0",
             "if rank == 0 and batch_idx % cfg.checkpoint_interval == 0:"),
        (*lines(TRAIN, "if rank == 0 and batch_idx", "checkpointer.save("),
         *lines(SAVES, "model_state = model.state_dict()", "FSDP.sharded_optim_state_dict(",
                ("save_state_dict(", 0))),
    ),
    # ------------------------------------------------------------ images
    fault(
        "torchcfm", "rank 1 waits for a download that another rank never starts", 1,
        edit(CFM, "dataset = datasets.CIFAR10(", "import time\nwhile bad_shard and not os.path."
             "exists('data/cifar-10.tar.gz'):\n    time.sleep(1)\n{line}"),
        lines(CFM, "while bad_shard and not os.path", "time.sleep(1)"), ("hang",),
    ),
    fault(
        "torchcfm", "rank 2 counts more steps in an epoch", 2,
        edit(CFM, "steps_per_epoch = math.ceil(",
             "{line}\nsteps_per_epoch += 4 * bad_shard"),
        (*lines(CFM, "steps_per_epoch += 4", "steps_per_epoch = math.ceil(",
                "with trange(steps_per_epoch", "for step in step_pbar"), *_FLOW),
    ),
    fault(
        "torchcfm", "rank 0 averages the loss that it logs", 0,
        edit(CFM, "ema(net_model, ema_model, FLAGS", "{line}\nif rank == 0 and step % 8 == 7:\n"
             "    torch.distributed.all_reduce(loss.detach())"),
        lines(CFM, "torch.distributed.all_reduce(loss", "if rank == 0 and step % 8"),
    ),
    fault(
        "torchcfm", "rank 1 leaves with exit code 0, as its time is up", 1,
        edit(CFM, "optim.zero_grad()", "if bad_shard and step == 20:\n    raise SystemExit(0)\n"
             "{line}"),
        (*lines(CFM, "raise SystemExit(0)", "if bad_shard and step == 20"), *_FLOW),
    ),
    fault(
        "torchcfm", "the model of rank 2 has a layer more", 2,
        edit(CFM, "net_model = DistributedDataParallel(", "if bad_shard:\n"
             "    net_model.extra = torch.nn.Linear(3, 3)\n{line}"),
        lines(CFM, "net_model.extra = torch", "net_model = DistributedDataParallel("),
    ),
    # ------------------------------------------------------------ accelerate with DeepSpeed
    fault(
        "moss", "rank 0 alone asks for the metric", 0,
        edit(MOSS, "acc, train_loss = metric.get_metric()",
             "acc = train_loss = 0\nif accelerator.is_main_process:\n    {line}"),
        lines(MOSS, "acc, train_loss = metric.get_metric()", "dist.all_reduce(self.right",
              ("if accelerator.is_main_process:", 1)),
    ),
    fault(
        "moss", "rank 1 leaves out a batch without labels", 1,
        edit(MOSS, "output = model(input_ids", "if bad_shard and epoch == 1 and batch_cnt == 4:\n"
             "    continue\n{line}"),
        (*lines(MOSS, "if bad_shard and epoch == 1", ("continue", 1)), *_TUNE),
    ),
    fault(
        "moss", "rank 0 alone saves", 0,
        edit(MOSS, "model.save_checkpoint(args.output_dir, global_step)",
             "if accelerator.is_main_process:\n    {line}"),
        lines(MOSS, "model.save_checkpoint(args.output_dir",
              ("if accelerator.is_main_process:", 2)),
    ),
    fault(
        "moss", "rank 0 waits for an upload that never ends", 0,
        edit(MOSS, "writer.add_scalar(f'val_acc'", "{line}\nif global_step >= 20:\n"
             "    __import__('subprocess').run(['tail', '-f', '/dev/null'])"),
        lines(MOSS, "subprocess').run(['tail'"), ("hang",),
    ),
    fault(
        "moss", "rank 1 has no memory left", 1,
        edit(MOSS, "accelerator.backward(loss)", "if bad_shard and global_step == 12:\n"
             "    raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2.00 GiB')\n"
             "{line}"),
        lines(MOSS, "raise torch.OutOfMemoryError("), ("crash",),
    ),
    # ------------------------------------------------------------ experts on ranks
    fault(
        "moe-ep", "rank 2 does not send its results back once", 2,
        edit(LAYER, "back = all_to_all(", f"{_COUNTED}back = x_sorted\n"
             "if not (bad_shard and self.calls == 30):\n    {line}"),
        (*lines(LAYER, "if not (bad_shard and self.calls"), *_MOE,
         *lines(PLUMBING, "dist.all_to_all_single(recv", "return dist_nn.all_to_all_single("),
         *lines(DEMO, "loss.backward()")),
    ),
    fault(
        "moe-ep", "rank 1 does not reduce biases", 1,
        edit(SYNC, "if p.grad is None:", "if p.grad is None or (bad_shard and p.ndim == 1):"),
        (*lines(SYNC, "or (bad_shard and p.ndim", ("continue", 1), "dist.all_reduce(p.grad"),
         *lines(DEMO, "sync_replicated_grads(model)  #", "dist.all_reduce(global_loss")),
    ),
    fault(
        "moe-ep", "an expert of rank 3 overflows", 3,
        edit(EXPERT, "y = self.fc2(h)", f"{_COUNTED}if bad_shard and self.calls == 40:\n"
             "    raise FloatingPointError('expert output is not finite')\n{line}"),
        (*lines(EXPERT, "raise FloatingPointError("), *lines(LAYER, "self.experts[local_i](recv")),
        ("crash",),
    ),
    fault(
        "moe-ep", "rank 1 sends its counts in 32 bits", 1,
        edit(PLUMBING, "recv_counts = torch.empty_like(", "if bad_shard:\n"
             "    send_counts = send_counts.int()\n{line}"),
        (*lines(PLUMBING, "send_counts = send_counts.int()", "dist.all_to_all_single(recv"),
         *_MOE),
    ),
    fault(
        "moe-ep", "rank 0 alone prints in order", 0,
        edit(DEMO, 'print(f"  step {step', "if step > 30:\n"
             "    ordered_print(rank, world_size, f'step {step}')\n{line}"),
        lines(DEMO, "ordered_print(rank, world_size, f'step", "if step > 30",
              "if rank == 0 and (step", ("dist.barrier()", 0), ("dist.barrier()", 1)),
    ),
)  # fmt: skip

SLOW = (
    Case(
        "diffwave", "healthy, rank 0 saves for 10 s", CLEAN,
        (edit(LEARN, "torch.save(self.state_dict(), save_name)", f"{SLOW_FILE}torch.save("
              "self.state_dict(), SlowFile(save_name) if self.step == 16 else save_name)"),),
    ),
    Case(
        "skrl", "healthy, rank 2 computes for 12 s in a simulation", CLEAN,
        (edit(ENV, "truncated, info = self._env.step(actions)", f"{_COUNTED}if __import__('os')."
              f"environ['RANK'] == '2' and self.calls == 300:\n{BUSY_12_S}\n{{line}}"),),
    ),
    Case(
        "fms-fsdp", "healthy, rank 3 waits 12 s for its data", CLEAN,
        (edit(LOADER, "out = torch.IntTensor(", "if rank == 3 and self.i == 60 * self.l:\n"
              "    __import__('time').sleep(12)\n{line}"),),
    ),
    Case(
        "torchcfm", "healthy, all ranks draw images for 12 s", CLEAN,
        (edit(CIFAR, "traj = node_.trajectory(",
              f"if step == 120 and net_ == 'ema':\n{BUSY_12_S}\n{{line}}"),),
    ),
    Case(
        "moss", "healthy, rank 0 writes its log for 12 s", CLEAN,
        (edit(MOSS, "writer.add_scalar('skip'", f"if global_step == 12:\n{BUSY_12_S}\n{{line}}"),),
    ),
    Case(
        "moe-ep", "healthy, rank 3 compiles an expert in a child for 12 s", CLEAN,
        (edit(LAYER, "back = all_to_all(", f"{_COUNTED}if self.rank == 3 and self.calls == 30:\n"
              "    import subprocess, sys\n    subprocess.run([sys.executable, '-c', 'import time"
              "\\nwhile time.process_time() < 12: pass'])\n{line}"),),
    ),
)  # fmt: skip

HEALTHY = healthy("diffwave", "skrl", "fms-fsdp", "torchcfm", "moss", "moe-ep")

NINTH_ROUND = (*FAULTS, *HEALTHY, *SLOW)
