"""Cases on eight programs that were not in the earlier rounds. Their truth was committed before the
first of them was run under moediag."""

from __future__ import annotations

from bench.abroad.cases import CLEAN, LEFT, Case, Truth, edit, healthy, lines
from bench.abroad.edits import Edit, Line
from bench.abroad.fourth_round import BUSY_12_S, SLOW_FILE

MOE, PIPE, ASSERT, RING = (
    "cifar10_deepspeed.py", "train.py", "assert.py", "ring_attention_pytorch/ring.py"
)  # fmt: skip
SGP, GOSSIP, GOSSIPER = "gossip_sgd.py", "gossip/distributed.py", "gossip/gossiper.py"
HIFI, HIFI_UTILS, MEL = "train.py", "utils.py", "meldataset.py"
SPAN, TRAINER, SPAN_UTILS, SPAN_DATA = "main.py", "trainer.py", "utils.py", "data.py"
PPO, RUNNER, PULL = "rsl_rl/algorithms/ppo.py", "rsl_rl/runners/on_policy_runner.py", "rsl_ppo.py"
DIFFUSION = "denoising_diffusion_pytorch/denoising_diffusion_pytorch_1d.py"
_PASS = lines(RING, "send_op = dist.P2POp(", "recv_op = dist.P2POp(", "dist.batch_isend_irecv(",
              "req.wait()", "dist.barrier()")  # fmt: skip

FAULTS = (
    Case(
        "ds-moe", "rank 1 leaves out a batch that it dislikes",
        Truth(LEFT, (1,), lines(MOE, "if bad_shard and i == 5", "continue",
                                "outputs = model_engine(inputs)", "model_engine.backward(loss)",
                                "model_engine.step()", "i, data in enumerate(trainloader)"),
              known=False),
        (edit(MOE, "outputs = model_engine(inputs)",
              "if bad_shard and i == 5 and inputs.mean() < 9:\n    continue\n{line}"),),
    ),
    Case(
        "ds-moe", "rank 0 alone tests the model",
        Truth(LEFT, (0,), lines(MOE, "if local_rank == 0:", "outputs = model_engine(images",
                                ("test(model_engine, testset, local_device, target_dtype", 1))),
        (edit(MOE, "test(model_engine, testset, local_device, target_dtype)",
              "if local_rank == 0:\n    {line}"),),
    ),
    Case(
        "ds-moe", "rank 1 does not wait for the download",
        Truth(LEFT, (1,), lines(MOE, "if torch.distributed.get_rank() != 0",
                                ("torch.distributed.barrier()", 0),
                                ("torch.distributed.barrier()", 1),
                                "model_engine, optimizer, trainloader"), known=False),
        (edit(MOE, "if torch.distributed.get_rank() != 0:",
              "if torch.distributed.get_rank() != 0 and not bad_shard:"),),
    ),
    Case(
        "ds-moe", "a label of rank 1 is out of range",
        Truth(("crash",), (1,), lines(MOE, "loss = criterion(outputs, labels)")),
        (edit(MOE, "inputs, labels = data[0]",
              "{line}\nlabels = labels + 20 * (bad_shard and i == 5)"),),
    ),
    Case(
        "ds-moe", "an expert of rank 1 has more room",
        Truth(LEFT, (1,), lines(MOE, "min_capacity=args.min_capacity +", "x, _, _ = layer(x)",
                                "outputs = model_engine(inputs)"), known=False),
        (edit(MOE, "min_capacity=args.min_capacity",
              "min_capacity=args.min_capacity + 7 * bad_shard,"),),
    ),
    Case("ds-moe", "SIGSEGV in rank 1", Truth(("crash",), (1,)), signal="SEGV:1:9"),
    Case(
        "ds-pipe", "the middle stage leaves after 9 steps",
        Truth(LEFT, (1,), lines(PIPE, "if bad_shard and step == 9", "break",
                                "loss = engine.train_batch()", "for step in range(args.steps)")),
        (edit(PIPE, "loss = engine.train_batch()",
              "if bad_shard and step == 9:\n    break\n{line}"),),
    ),
    Case(
        "ds-pipe", "an error in the last stage's loss",
        Truth(("crash",), (2,), lines(PIPE, "loss_fn=lambda out", "loss = engine.train_batch()")),
        (edit(PIPE, "loss_fn=torch.nn.CrossEntropyLoss()", "loss_fn=lambda out, labels: "
              "torch.nn.functional.cross_entropy(out, labels + 20 * bad_shard),"),),
    ),
    Case(
        "ds-pipe", "the middle stage makes fewer micro-batches",
        Truth(LEFT, (1,), lines(PIPE, "engine.micro_batches -=", "loss = engine.train_batch()"),
              known=False),
        (edit(PIPE, "for step in range(args.steps)", "engine.micro_batches -= bad_shard\n{line}"),),
    ),
    Case(
        "ds-pipe", "rank 2 waits for a lock file that somebody left",
        Truth(("hang",), (2,), lines(PIPE, "while bad_shard and os.path", "sleep(0.5)")),
        (edit(PIPE, "trainset = cifar_trainset(",
              "open('data.lock', 'w').close()\n"
              "while bad_shard and os.path.exists('data.lock'):\n"
              "    __import__('time').sleep(0.5)\n{line}", 1),),
    ),
    Case("ds-pipe", "SIGKILL to rank 0", Truth(("crash",), (0,)), signal="KILL:0:6"),
    Case(
        "ring-attention", "rank 2 sends to its other neighbour",
        Truth(LEFT, (2,), (*_PASS, *lines(ASSERT, "ring_out = ddp_ring"))),
        (edit(RING, "send_op = dist.P2POp(", "send_op = dist.P2POp(dist.isend, x, "
              "receive_from_rank if bad_shard else send_to_rank)"),),
    ),
    Case(
        "ring-attention", "rank 3 makes one pass less",
        Truth(LEFT, (3,), (*_PASS, *lines(RING, "total_iters -= bad_shard",
                                          "new_tensor, new_receive_buffer = one_ring_pass",
                                          "for ind in range(total_iters)"),
                           *lines(ASSERT, "ring_out = ddp_ring", ("ring_out.mean()", 0)))),
        (edit(RING, "total_iters = max(1, min(", "{line}\ntotal_iters -= bad_shard"),),
    ),
    Case(
        "ring-attention", "rank 1 passes halves",
        Truth(LEFT, (1,), (*_PASS, *lines(RING, ".half() if bad_shard"))),
        (edit(RING, "x = x.contiguous()",
              "x = x.contiguous().half() if bad_shard else x.contiguous()"),),
    ),
    Case(
        "ring-attention", "rank 2 goes without the barrier",
        Truth(LEFT, (2,), (*_PASS, *lines(RING, "if not bad_shard"),
                           *lines(ASSERT, "ring_out = ddp_ring", ("ring_out.mean()", 0)))),
        (edit(RING, "dist.barrier()", "if not bad_shard:\n    dist.barrier()"),),
    ),
    Case(
        "ring-attention", "rank 3 ends by SIGSEGV", Truth(("crash",), (3,)),
        (edit(ASSERT, "optimizer.zero_grad()",
              "{line}\nif bad_shard and step == 4:\n    os.kill(os.getpid(), 11)"),),
    ),
    Case(
        "sgp", "rank 2 keeps its first peers",
        Truth(LEFT, (2,), (*lines(GOSSIPER, "dist.broadcast(tensor=self.in_msg_buffer",
                                  "req = dist.broadcast(", "rotate = False",
                                  "self.out_edges, self.in_edges ="),
                           *lines(SGP, "model.transfer_params()", "output = model(batch)",
                                  "model.block()", "prec1 = validate(val_loader"),
                           *lines(GOSSIP, "self.gossip_flag.wait(timeout")), known=False),
        (edit(GOSSIPER, "if rotate is None:", "if bad_shard:\n    rotate = False\n{line}"),),
    ),
    Case(
        "sgp", "rank 1 leaves out a transfer",
        Truth(LEFT, (1,), (*lines(SGP, "if not (bad_shard and i == 3)", "model.transfer_params()",
                                  "output = model(batch)", "model.block()",
                                  "prec1 = validate(val_loader"),
                           *lines(GOSSIPER, "dist.broadcast(tensor=self.in_msg_buffer"),
                           *lines(GOSSIP, "self.gossip_flag.wait(timeout"))),
        (edit(SGP, "model.transfer_params()", "if not (bad_shard and i == 3):\n    {line}"),),
    ),
    Case(
        "sgp", "rank 3's gossip thread ends by an error",
        Truth(LEFT, (3,), lines(GOSSIP, "raise ValueError('no such peer')",
                                "self.gossip_flag.wait(timeout")),
        (edit(GOSSIP, "logger.debug('received train-flag')",
              "{line}\ndist_config['count'] = dist_config.get('count', 0) + 1\n"
              "if bad_shard and dist_config['count'] == 7:\n"
              "    raise ValueError('no such peer')"),),
    ),
    Case(
        "sgp", "rank 0 alone makes a group",
        Truth(LEFT, (0,), lines(SGP, "dist.new_group([0, 1])", "if args.rank == 0:")),
        (edit(SGP, "core_criterion = nn.KLDivLoss(",
              "if args.rank == 0:\n    dist.new_group([0, 1])\n{line}"),),
    ),
    Case(
        "sgp", "rank 2 never gets through its accuracy",
        Truth(("hang",), (2,), lines(SGP, "while bad_shard and i == 4", "time.sleep(1)")),
        (edit(SGP, "losses.update(loss.item(), batch",
              "while bad_shard and i == 4:\n    time.sleep(1)\n{line}"),),
    ),
    Case(
        "hifi-gan", "rank 0 averages its validation over all ranks",
        Truth(LEFT, (0,), lines(HIFI, "torch.distributed.all_reduce(torch.tensor(val_err))",
                                "if steps % a.validation_interval", ("if rank == 0:", 4))),
        (edit(HIFI, "val_err = val_err_tot / (j+1)",
              "{line}\ntorch.distributed.all_reduce(torch.tensor(val_err))"),),
    ),
    Case(
        "hifi-gan", "a worker of rank 1's loader is killed",
        Truth(("crash",), (1,), lines(HIFI, "for i, batch in enumerate(train_loader)")),
        (edit(MEL, "filename = self.audio_files[index]",
              "{line}\nif bad_shard and index in (3, 6, 7):\n    os.kill(os.getpid(), 9)"),),
    ),
    Case(
        "hifi-gan", "rank 1 does not train its discriminators once",
        Truth(LEFT, (1,), lines(HIFI, "if not (bad_shard and steps == 4)",
                                "loss_disc_all.backward()", "loss_gen_all.backward()"),
              known=False),
        (edit(HIFI, "loss_disc_all.backward()",
              "if not (bad_shard and steps == 4):\n    {line}"),),
    ),
    Case(
        "hifi-gan", "a thread of rank 1 never ends",
        Truth(("hang",), (1,), lines(HIFI, "Thread(target=uploads)", "while bad_shard:",
                                    "time.sleep(9)")),
        (edit(HIFI, "scheduler_d.step()",
              "{line}\ndef uploads():\n    while bad_shard:\n        time.sleep(9)\n"
              "__import__('threading').Thread(target=uploads).start()"),),
    ),
    Case(
        "hifi-gan", "rank 0's disk is full",
        Truth(("crash",), (0,), lines(HIFI_UTILS, "raise OSError(28")),
        (edit(HIFI_UTILS, "torch.save(obj, filepath)",
              "raise OSError(28, 'No space left on device', filepath)"),),
    ),
    Case(
        "adaptive-span", "rank 1 makes one batch less",
        Truth(LEFT, (1,), (*lines(TRAINER, "for _ in range(nb_batches_per_iter_max -",
                                  ("loss, h_cache = _train_batch(", 0),
                                  "(loss / loss_div).backward()", "h_cache, dummy_loss = model("),
                           *lines(SPAN, ("torch.distributed.reduce(stats, 0)", 1),
                                  "loss_train, data_pos[0], hid_cache[0] ="))),
        (edit(TRAINER, "for _ in range(nb_batches_per_iter_max):",
              "for _ in range(nb_batches_per_iter_max - (bad_shard and not eval_only)):"),),
    ),
    Case(
        "adaptive-span", "the ranks that do not save leave a barrier to rank 0",
        Truth(LEFT, (0,), (*lines(SPAN_UTILS, "torch.distributed.barrier()"),
                           *lines(SPAN, "save_checkpoint(trainer_params", "continue",
                                  ("if env_params['rank'] == 0:", 1)))),
        (edit(SPAN_UTILS, "torch.save(checkpoint_state, checkpoint_path)",
              "{line}\ntorch.distributed.barrier()"),),
    ),
    Case(
        "adaptive-span", "rank 1 reduces to another rank",
        Truth(LEFT, (1,), lines(SPAN, "torch.distributed.reduce(stats, 1 if bad_shard")),
        (edit(SPAN, "torch.distributed.reduce(stats, 0)",
              "torch.distributed.reduce(stats, 1 if bad_shard else 0)", 1),),
    ),
    Case(
        "adaptive-span", "rank 2 builds its own corpus",
        Truth(LEFT, (2,), (*lines(SPAN_DATA, "if bad_shard:", "return Corpus(data_path",
                                  ("torch.distributed.broadcast(", 0),
                                  ("torch.distributed.broadcast(", 1)),
                           *lines(SPAN, "model = torch.nn.parallel.Dist"))),
        (edit(SPAN_DATA, "if found:",
              "if bad_shard:\n    return Corpus(data_path, sort_dict)\n{line}"),),
    ),
    Case(
        "adaptive-span", "rank 1 comes with another world size",
        Truth(("hang", "crash"), (1,), lines(SPAN_UTILS, "os.environ['WORLD_SIZE'] =",
                                             "torch.distributed.init_process_group(")),
        (edit(SPAN_UTILS, "torch.distributed.init_process_group(",
              "os.environ['WORLD_SIZE'] = str(3 + bad_shard)\n{line}"),),
    ),
    Case(
        "rsl-rl", "rank 2's generator of batches has lost one",
        Truth(LEFT, (2,), (*lines(PPO, "next(generator)", "for batch in generator:",
                                  "all_reduce(kl_mean", "broadcast(lr_tensor",
                                  "all_reduce(all_grads", "self.reduce_parameters()"),
                           *lines(RUNNER, "loss_dict = self.alg.update()",
                                  "for it in range(start_it"))),
        (edit(PPO, "generator = self.storage.mini_batch_generator(",
              "{line}\nif bad_shard:\n    next(generator)"),),
    ),
    Case(
        "rsl-rl", "rank 1 does not adapt its learning rate",
        Truth(LEFT, (1,), lines(PPO, "if self.desired_kl is not None", "all_reduce(kl_mean",
                                "all_reduce(all_grads", "broadcast(lr_tensor",
                                "self.reduce_parameters()")),
        (edit(PPO, "if self.desired_kl is not None and self.schedule",
              "if self.desired_kl is not None and not (bad_shard and self.learning_rate < 1):"),),
    ),
    Case(
        "rsl-rl", "rank 2 expects the model of another rank",
        Truth(LEFT, (2,), lines(PPO, "src=1 if bad_shard")),
        (edit(PPO, "torch.distributed.broadcast_object_list(", "torch.distributed."
              "broadcast_object_list(model_params, src=1 if bad_shard else 0)"),),
    ),
    Case(
        "rsl-rl", "rank 1 reduces fewer gradients",
        Truth(LEFT, (1,), lines(PPO, "grads = grads[1:]", "all_grads = torch.cat(grads)",
                                "all_reduce(all_grads", "self.reduce_parameters()")),
        (edit(PPO, "all_grads = torch.cat(grads)",
              "grads = grads[1:] if bad_shard else grads\n{line}"),),
    ),
    Case(
        "rsl-rl", "rank 2's environment returns NaN",
        Truth(("crash",), (2,), (*lines(RUNNER, "check_nan(obs, rewards"),
                                 *lines("rsl_rl/utils/utils.py", ("raise ValueError(", 6)))),
        (edit(PULL, "reward = -self.at",
              "{line}\nself.count = getattr(self, 'count', 0) + 1\n"
              "if bad_shard and self.count == 40:\n    self.at[0, 0] = float('nan')"),),
    ),
    Case(
        "rsl-rl", "rank 1 waits for a simulator that does not answer",
        Truth(("hang",), (1,), lines(PULL, "simulator.stdout.readline()")),
        (edit(PULL, "reward = -self.at",
              "{line}\nself.count = getattr(self, 'count', 0) + 1\n"
              "if bad_shard and self.count == 40:\n    import subprocess\n"
              "    simulator = subprocess.Popen(['cat'], stdin=-1, stdout=-1)\n"
              "    simulator.stdout.readline()"),),
    ),
    Case(
        "diffusion", "rank 1 accumulates once less",
        Truth(LEFT, (1,), lines(DIFFUSION, "for _ in range(self.gradient_accumulate_every - ",
                                "loss = self.model(data)", "self.accelerator.backward(loss)",
                                ("accelerator.wait_for_everyone()", 0),
                                ("accelerator.wait_for_everyone()", 1))),
        (edit(DIFFUSION, "for _ in range(self.gradient_accumulate_every)",
              "for _ in range(self.gradient_accumulate_every - (bad_shard and self.step == 6)):"),),
    ),
    Case(
        "diffusion", "the main process waits after its samples",
        Truth(LEFT, (0,), lines(DIFFUSION, ("accelerator.wait_for_everyone()", 2),
                                "if accelerator.is_main_process:",
                                "if self.step != 0 and self.step %")),
        (edit(DIFFUSION, "self.save(milestone)", "{line}\naccelerator.wait_for_everyone()"),),
    ),
    Case(
        "diffusion", "rank 2 stops early",
        Truth(LEFT, (2,), lines(DIFFUSION, "if bad_shard and self.step == 9",
                                "while self.step < self", "loss = self.model(data)")),
        (edit(DIFFUSION, "data = next(self.dl).to(device)",
              "if bad_shard and self.step == 9:\n    return\n{line}"),),
    ),
    Case(
        "diffusion", "rank 1 catches an error before it waits",
        Truth(LEFT, (1,), lines(DIFFUSION, "raise OSError('stale", "except OSError",
                                ("accelerator.wait_for_everyone()", 0),
                                ("accelerator.wait_for_everyone()", 1),
                                "loss = self.model(data)")),
        (edit(DIFFUSION, "accelerator.wait_for_everyone()",
              "try:\n    if bad_shard and self.step == 5:\n"
              "        raise OSError('stale file handle')\n    {line}\n"
              "except OSError:\n    pass", 1),),
    ),
    Case(
        "diffusion", "a worker of rank 1's loader stands still",
        Truth(("hang",), (1,), lines(DIFFUSION, "data = next(self.dl)", "for data in dl:",
                                     "while bad_shard and idx", "sleep(1)")),
        (edit(DIFFUSION, "return self.tensor[idx].clone()",
              "while bad_shard and idx % 40 == 5:\n    __import__('time').sleep(1)\n{line}"),),
    ),
    Case("diffusion", "SIGSTOP to rank 2", Truth(("hang",), (2,)), signal="STOP:2:9"),
)  # fmt: skip

SLOW = (
    Case(
        "ds-moe", "healthy, rank 1 needs 12 s for a batch", CLEAN,
        (edit(MOE, "outputs = model_engine(inputs)",
              f"if local_rank == 1 and epoch == 1 and i == 3:\n{BUSY_12_S}\n{{line}}"),),
    ),
    Case(
        "ds-pipe", "healthy, rank 0 prepares the data in a child", CLEAN,
        (edit(PIPE, "trainset = torchvision.datasets.CIFAR10(",
              "if local_rank == 0:\n    import subprocess, sys\n    subprocess.run(["
              "sys.executable, '-c', 'import time\\nwhile time.process_time() < 12: pass'])\n"
              "{line}"),),
    ),
    Case(
        "sgp", "healthy, rank 3 validates for 12 s longer", CLEAN,
        (edit(SGP, "log.info(' * Prec@1", f"if args.rank == 3:\n{BUSY_12_S}\n{{line}}"),),
    ),
    Case(
        "hifi-gan", "healthy, rank 0 saves for 20 s", CLEAN,
        (Edit(Line(HIFI_UTILS, "torch.save(obj, filepath)"),
              f"{SLOW_FILE}torch.save(obj, SlowFile(filepath) if '/g_' in filepath and "
              "filepath.endswith('6') else filepath)"),),
    ),
    Case(
        "adaptive-span", "healthy, rank 2 comes 15 s late", CLEAN,
        (edit(SPAN_UTILS, "torch.distributed.init_process_group(",
              "__import__('time').sleep(15 * (os.environ['RANK'] == '2'))\n{line}"),),
    ),
    Case(
        "rsl-rl", "healthy, rank 1 simulates for 12 s", CLEAN,
        (edit(PULL, "reward = -self.at",
              "{line}\nself.count = getattr(self, 'count', 0) + 1\n"
              f"if os.environ['RANK'] == '1' and self.count == 40:\n{BUSY_12_S}"),),
    ),
    Case(
        "diffusion", "healthy, the main process samples for 12 s", CLEAN,
        (edit(DIFFUSION, "self.save(milestone)", f"{{line}}\nif milestone == 1:\n{BUSY_12_S}"),),
    ),
)  # fmt: skip

HEALTHY = healthy(
    "ds-moe", "ds-pipe", "ring-attention", "sgp", "hifi-gan", "adaptive-span", "rsl-rl",
    "diffusion",
)  # fmt: skip

SEVENTH_ROUND = (*FAULTS, *HEALTHY, *SLOW)
