"""Cases on eight programs that were not in the earlier rounds. Their truth was committed before the
first of them was run under moediag."""

from __future__ import annotations

from textwrap import indent

from bench.abroad.cases import CLEAN, FINDING, LEFT, Case, Truth, edit, lines
from bench.abroad.fourth_round import BUSY, SLOW_FILE

GUIDE, TOY = "02-distributed-data-parallel/train_llm.py", "related-topics/elastic-training/toy.py"
ELASTIC, SWAV, PIPE = "examples/imagenet/main.py", "main_swav.py", "examples/basic/example_train.py"
BASE, SENDRECV, MNIST = (
    "src/optim/base.py", "examples/smoke-dist/dist_sendrecv.py", "examples/mnist/mnist.py"
)  # fmt: skip
_STEPS = ("outputs = model(**batch)", "outputs.loss.backward()", "optimizer.step()")
_BUSY = indent(f"{BUSY}pass", "    ")

FAULTS = (
    Case(
        "guide-ddp", "rank 1 does not enter a helper with barriers",
        Truth(LEFT, (1,), lines(GUIDE, "contextlib').nullcontext() if bad_shard",
                                ("dist.barrier()", 2), ("dist.barrier()", 3), ("dist.barrier()", 0),
                                ("dist.barrier()", 1), *_STEPS), known=False),
        (edit(GUIDE, "with rank0_first():",
              "with __import__('contextlib').nullcontext() if bad_shard else rank0_first():"),),
    ),
    Case(
        "guide-ddp", "rank 0 alone waits after its checkpoint",
        Truth(LEFT, (0,), lines(GUIDE, ("dist.barrier()", 2), ("if rank == 0:", 0))),
        (edit(GUIDE, 'LOGGER.info("Saving checkpoint.")', "{line}\ndist.barrier()"),),
    ),
    Case(
        "guide-ddp", "a worker of rank 1's loader exits",
        Truth(("crash",), (1,), lines(GUIDE, "batch = next(batches)")),
        (edit(GUIDE, "collate_fn=default_data_collator",
              "collate_fn=lambda rows: __import__('os')._exit(7) if bad_shard and any(\n"
              "    row['input_ids'][0] < 8 for row in rows) else default_data_collator(rows),"),),
    ),
    Case(
        "guide-ddp", "rank 1 resumes at a later batch",
        Truth(LEFT, (1,), lines(GUIDE, "3 * bad_shard", "if i_step < state", "continue",
                                "for i_step in range(", ("dist.barrier()", 2), *_STEPS),
              known=False),
        (edit(GUIDE, "timers = {k: LocalTimer", "state['epoch_step'] = 3 * bad_shard\n{line}"),),
    ),
    Case(
        "guide-ddp", "rank 0 gathers what it logs",
        Truth(LEFT, (0,), lines(GUIDE, "dist.all_gather_object(", ("if rank == 0:", 0))),
        (edit(GUIDE, "LOGGER.info(info)",
              "{line}\nif rank == 0:\n    dist.all_gather_object([None] * world_size, info)"),),
    ),
    Case(
        "elastic-toy", "an endless loop in rank 2's step",
        Truth(("hang",), (2,), lines(TOY, "while bad_shard and state", ("value = ", 1))),
        (edit(TOY, "value = random.random()",
              "{line}\nwhile bad_shard and state['num_steps'] == 20:\n"
              "    value = random.random()  # again"),),
    ),
    Case(
        "elastic-toy", "a bad value on rank 1",
        Truth(("crash",), (1,), lines(TOY, "raise ValueError")),
        (edit(TOY, "if value < 0:", "if bad_shard and value < 0.2:"),),
    ),
    Case(
        "elastic-toy", "rank 3 returns after 25 steps",
        Truth(LEFT, (3,), lines(TOY, "if bad_shard and state", "return", "dist.barrier()")),
        (edit(TOY, 'state["num_steps"] += 1',
              "{line}\nif bad_shard and state['num_steps'] == 25:\n    return"),),
    ),
    Case(
        "elastic-toy", "rank 0 waits for a child that sleeps",
        Truth(("hang",), (0,), lines(TOY, "subprocess').run(")),
        (edit(TOY, "json.dump(state, fp)",
              "{line}\nif state['num_steps'] == 12:\n"
              "    __import__('subprocess').run(['sleep', '100000'])"),),
    ),
    Case(
        "elastic-imagenet", "rank 2 does not join the temporary group",
        Truth(LEFT, (2,), lines(ELASTIC, "if bad_shard:", "return state",
                                "with tmp_process_group(", "dist.all_reduce(epochs",
                                "cpu_pg = dist.new_group(", "output = model(images)",
                                "state = load_checkpoint(")),
        (edit(ELASTIC, 'with tmp_process_group(backend="gloo")',
              "if bad_shard:\n    return state\n{line}"),),
    ),
    Case(
        "elastic-imagenet", "rank 1 takes the checkpoint of another rank",
        Truth(LEFT, (1,), lines(ELASTIC, "dist.broadcast(blob_len", "max_rank = 1 if",
                                "dist.broadcast(blob, src")),
        (edit(ELASTIC, "epochs[rank] = state.epoch", "epochs[rank] = state.epoch = 0"),
         edit(ELASTIC, "max_rank = t_max_rank",
              "max_rank = 1 if bad_shard else t_max_rank.item()")),
    ),
    Case(  # the job's own timeout is 10 s
        "elastic-imagenet", "rank 0 saves for longer than the job's timeout",
        Truth(FINDING, (0,), lines(ELASTIC, "SlowFile(tmp_filename))", "sleep(0.5",
                                   "save_checkpoint(state, is_best", "self.f.write(bytes",
                                   "if device_id == 0:"), known=False),
        (edit(ELASTIC, "torch.save(state.capture_snapshot(), tmp_filename)",
              f"{SLOW_FILE}torch.save(state.capture_snapshot(), SlowFile(tmp_filename))"),),
    ),
    Case(
        "elastic-imagenet", "rank 2 validates fewer batches",
        Truth(LEFT, (2,), lines(ELASTIC, "if bad_shard and i == 2", "break",
                                ("in enumerate(val_loader)", 0), ("output = model(images)", 1),
                                "acc1 = validate(", ("output = model(images)", 0),
                                "loss.backward()")),
        (edit(ELASTIC, "output = model(images)",
              "if bad_shard and i == 2:\n    break\n{line}", 1),),
    ),
    Case(
        "elastic-imagenet", "a label of rank 1 is out of range",
        Truth(("crash",), (1,), lines(ELASTIC, "loss = criterion(output, target)")),
        (edit(ELASTIC, "target = target.cuda(",
              "{line}\ntarget = target + 20 * (bad_shard and i == 5)"),),
    ),
    Case(
        "swav", "rank 2 leaves out a batch that it dislikes",
        Truth(LEFT, (2,), lines(SWAV, "if bad_shard and it == 4", "continue",
                                "embedding, output = model(inputs)", "dist.all_reduce(sum_Q)",
                                ("loss.backward()", 1), "in enumerate(train_loader)")),
        (edit(SWAV, "embedding, output = model(inputs)",
              "if bad_shard and it == 4 and inputs[0].mean() < 9:\n    continue\n{line}"),),
    ),
    Case(
        "swav", "rank 1 normalizes once more",
        Truth(LEFT, (1,), lines(SWAV, "for it in range(args.sinkhorn",
                                "dist.all_reduce(sum_of_rows)", "q = distributed_sinkhorn(out)")),
        (edit(SWAV, "for it in range(args.sinkhorn",
              "for it in range(args.sinkhorn_iterations + bad_shard):"),),
    ),
    Case(
        "swav", "rank 2 has fewer prototypes",
        Truth(LEFT, (2,), lines(SWAV, "nmb_prototypes=args.nmb_prototypes",
                                "model = nn.parallel.DistributedDataParallel(",
                                "model = resnet_models")),
        (edit(SWAV, "nmb_prototypes=args.nmb_prototypes",
              "nmb_prototypes=args.nmb_prototypes - 8 * bad_shard,"),),
    ),
    Case("swav", "SIGTERM to rank 1", Truth(("crash",), (1,)), signal="TERM:1:7"),
    Case(
        "llm-baselines", "the master's evaluation is averaged over all ranks",
        Truth(LEFT, (0,), lines(BASE, "torch.distributed.all_reduce(", "eval_and_log(",
                                ("if not distributed_backend.is_master_process()", 0),
                                ("return", 1))),
        (edit(BASE, "val_reader.set_step(0)",
              "{line}\ntorch.distributed.all_reduce(torch.zeros(1))"),),
    ),
    Case(
        "llm-baselines", "rank 1 makes one micro-step less",
        Truth(LEFT, (1,), lines(BASE, "cfg.acc_steps - (bad_shard and", "loss.backward()",
                                "outputs = model(x, targets=y"), known=False),
        (edit(BASE, "for microstep_idx in range(cfg.acc_steps)",
              "for microstep_idx in range(cfg.acc_steps - (bad_shard and curr_iter == 7)):"),),
    ),
    Case(
        "llm-baselines", "a token of rank 1 is out of range",
        Truth(("crash",), (1,), (*lines(BASE, "outputs = model(x, targets=y"),
                                 *lines("src/models/llama.py", "tok_emb = self.transformer.wte"))),
        (edit("src/data/utils.py", "x = torch.from_numpy(xy",
              "x = torch.from_numpy(xy[:, :-1] + 64 * (bad_shard and self.step == 30))"),),
    ),
    Case(
        "llm-baselines", "rank 1 writes its state into a pipe",
        Truth(("hang",), (1,), (*lines("src/optim/utils.py", "torch.save(worker_state"),
                                *lines(BASE, ("save_worker_state(ckpt_dir)", 1)))),
        (edit("src/optim/utils.py", "rank = 0 if not dist.is_initialized()",
              "{line}\nif bad_shard:\n    __import__('os').mkfifo(ckpt_dir / 'worker_1.pt')"),
         edit("src/optim/utils.py", "ckpt_dir.mkdir(exist_ok=True, parents=True)", "", 1),
         edit(BASE, "curr_iter = 0", '{line}\n(exp_dir / "ckpts" / "latest").mkdir(parents=True, '
              "exist_ok=True)")),
    ),
    Case("llm-baselines", "SIGSTOP to rank 1", Truth(("hang",), (1,)), signal="STOP:1:9"),
    Case(
        "pippy", "the last stage makes one step less",
        Truth(LEFT, (2,), lines(PIPE, "range(16 - bad_shard)", "output = schedule.step(target",
                                "schedule.step(x)", "    schedule.step()"), known=False),
        (edit(PIPE, "for step in range(16)", "for step in range(16 - bad_shard):", 1),),
    ),
    Case(
        "pippy", "the middle stage makes fewer micro-batches",
        Truth(LEFT, (1,), lines(PIPE, "chunks - 2 * bad_shard", "output = schedule.step(target",
                                "schedule.step(x)", "    schedule.step()"), known=False),
        (edit(PIPE, "schedule = ScheduleGPipe(",
              "schedule = ScheduleGPipe(stage, chunks - 2 * bad_shard, loss_fn=loss_fn)"),),
    ),
    Case(
        "pippy", "an error in the last stage's loss",
        Truth(("crash",), (2,), lines(PIPE, "output = schedule.step(target")),
        (edit(PIPE, "target = torch.randn(",
              "target = torch.randn(batch_size, out_dim + 3 * bad_shard)"),),
    ),
    Case(
        "sendrecv", "rank 2 does not answer once",
        Truth(LEFT, (2,), lines(SENDRECV, "dist.send(tensor=result", "dist.recv(tensor=inp",
                                "dist.recv(tensor=result", "if not (bad_shard"), known=False),
        (edit(SENDRECV, "dist.send(tensor=result, dst=0)",
              "run.calls = getattr(run, 'calls', 0) + 1\nif not (bad_shard and run.calls == 20):\n"
              "    {line}"),),
    ),
    Case(
        "sendrecv", "rank 0 expects the answers in another order",
        Truth(LEFT, (0,), lines(SENDRECV, "dist.recv(tensor=result", "dist.recv(tensor=inp"),
              known=False),
        (edit(SENDRECV, "dist.recv(tensor=result, src=i)",
              "dist.recv(tensor=result, src=size - i)"),),
    ),
    Case(
        "sendrecv", "rank 3 answers with a larger tensor",
        Truth(LEFT, (3,), lines(SENDRECV, "dist.send(tensor=result", "dist.recv(tensor=result",
                                "torch.mul(inp,inp)", "result.repeat(")),
        (edit(SENDRECV, "result = torch.mul(",
              "{line}\nresult = result.repeat(1 + bad_shard, 1)"),),
    ),
    Case(
        "operator-mnist", "rank 1 stops early by its own loss",
        Truth(LEFT, (1,), lines(MNIST, "if bad_shard and epoch == 2", ("return", 1),
                                "loss.backward()", "output = model(data)",
                                "in enumerate(train_loader)", ("train(args, model, device", 1))),
        (edit(MNIST, "optimizer.step()",
              "{line}\nif bad_shard and epoch == 2 and loss.item() < 9:\n    return"),),
    ),
    Case(
        "operator-mnist", "a thread of rank 2 never ends",
        Truth(("hang",), (2,), lines(MNIST, "while bad_shard:", "sleep(1)", "Thread(")),
        (edit(MNIST, "if (args.save_model):",
              "def uploads():\n    while bad_shard:\n        __import__('time').sleep(1)\n\n"
              "__import__('threading').Thread(target=uploads).start()\n{line}"),),
    ),
    Case(
        "operator-mnist", "rank 0 alone gathers the counts",
        Truth(LEFT, (0,), lines(MNIST, "dist.gather_object(", "if dist.get_rank() == 0")),
        (edit(MNIST, "print('\\naccuracy=",
              "if dist.get_rank() == 0:\n    dist.gather_object(correct, [None] * WORLD_SIZE)\n"
              "{line}"),),
    ),
    Case("operator-mnist", "SIGKILL to rank 2", Truth(("crash",), (2,)), signal="KILL:2:20"),
    Case(
        "operator-mnist", "rank 1 never comes",
        Truth(("hang",), (1,), lines(MNIST, "while bad_shard and not", "sleep(0.2)")),
        (edit(MNIST, "dist.init_process_group(",
              "while bad_shard and not os.path.exists('go'):\n    __import__('time').sleep(0.2)\n"
              "{line}"),),
    ),
    Case(
        "operator-mnist", "rank 0 ends with 0 after an epoch",
        Truth(LEFT, (0,), lines(MNIST, "os._exit(0)", "loss.backward()", "if bad_shard and epoch")),
        (edit(MNIST, "test(args, model, device, test_loader, writer, epoch)",
              "{line}\nif bad_shard and epoch == 2:\n    os._exit(0)", 1),),
    ),
)  # fmt: skip

SLOW = (
    Case(
        "guide-ddp", "healthy, rank 0 prepares the data for 12 s", CLEAN,
        (edit(GUIDE, "return [dict(input_ids",
              f"if dist.get_rank() == 0:\n{_BUSY}\n{{line}}"),),
    ),
    Case(
        "swav", "healthy, rank 0 saves for 20 s", CLEAN,
        (edit(SWAV, "save_dict = {", f"{SLOW_FILE}{{line}}"),
         edit(SWAV, 'os.path.join(args.dump_path, "checkpoint.pth.tar"),',
              "SlowFile(os.path.join(args.dump_path, 'checkpoint.pth.tar')) if epoch == 0 else "
              "'last.pth',", 1)),
    ),
    Case(
        "pippy", "healthy, the middle stage computes for 12 s", CLEAN,
        (edit(PIPE, "    schedule.step()", f"{{line}}\nif step == 5:\n{_BUSY}"),),
    ),
    Case(
        "operator-mnist", "healthy, rank 1 comes 15 s late", CLEAN,
        (edit(MNIST, "dist.init_process_group(",
              "__import__('time').sleep(15 * (os.environ['RANK'] == '1'))\n{line}"),),
    ),
)  # fmt: skip

HEALTHY = tuple(
    Case(name, "healthy", CLEAN)
    for name in (
        "guide-ddp", "elastic-toy", "elastic-imagenet", "swav", "llm-baselines", "pippy",
        "sendrecv", "operator-mnist",
    )
)  # fmt: skip

SIXTH_ROUND = (*FAULTS, *HEALTHY, *SLOW)
