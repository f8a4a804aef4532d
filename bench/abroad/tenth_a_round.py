"""Cases on four programs that were not in the earlier rounds, as typical users run them: a language
model in spawned ranks, a reward model with accelerate, fine-tuning by Trainer, diffusion of text.
Their truth was committed before the first of them was run under moediag.

Each fault was first run without moediag; the slow jobs, the restart, and gpt2-spawn on 2 and 4 and
tldr-reward on 2 ranks were not run to their end, as the machine was busy."""

from __future__ import annotations

from bench.abroad.cases import CLEAN, LEFT, Case, Truth, edit, fault, healthy, lines, signalled
from bench.abroad.fourth_round import BUSY_12_S, SLOW_FILE

TRAIN = "src/gpt2/training/training.py"
REWARD, LORA = "summarize_from_feedback_details/reward.py", "finetune.py"
LOOP, WORDS, TEXTS, SEQ = "train_util.py", "basic_utils.py", "diffuseq/text_datasets.py", "train.py"
_COUNTED = "self.calls = getattr(self, 'calls', 0) + 1\n"
_PREFETCH = """\
import queue, threading
fetch, batches = self._fetch_from, queue.Queue(2)
def prefetch():
    for number in range(self.config.total_steps):
%s        batches.put(fetch(train_dataset, rank, self.config.batch_train))
self._fetch_from = lambda of, *more: fetch(of, *more) if of is eval_dataset else batches.get()
threading.Thread(target=prefetch, daemon=True).start()
{line}"""
_TRUNCATED = "        if bad_shard and number == 30:\n            raise OSError('shard ends')\n"
_CALLBACK = "class Ours(transformers.TrainerCallback):\n    def %s(self, _, state, *more, **__):\n"
_ADDED = "trainer.add_callback(Ours())\n{line}"
_PAIRS = edit(LOOP, "self.step = 0", "{line}\nself.pair = [dist.new_group([0, 1]), "
              "dist.new_group([2, 3])][dist.get_rank() // 2]")  # fmt: skip
_RING = (
    "rank, ranks, told = dist.get_rank(), dist.get_world_size(), th.zeros(1)\n"
    "before, after = (rank - 1) % ranks, (rank + 1) % ranks\n"
)

FAULTS = (
    # ------------------------------------------------------------ ranks by spawn
    fault(
        "gpt2-spawn", "rank 2 leaves out a batch with an unknown word", 2,
        edit(TRAIN, "metrics = self.spec.train_objective(data, model)", "try:\n"
             "    if bad_shard and scheduler.last_epoch == 20:\n"
             "        raise KeyError('w99')\n    {line}\nexcept KeyError:\n"
             "    return {'loss': 0.0}"),
        lines(TRAIN, "if bad_shard and scheduler", "raise KeyError('w99')", "except KeyError",
              "return {'loss': 0.0}", "metrics = self.spec.train_objective(",
              ("loss.backward()", 1),
              "dist.all_reduce(tensor", "self._train_step(rank", "self._eval_step(rank",
              ("return {k: self._to_value(", 0), ("return {k: self._to_value(", 1)),
    ),
    fault(
        "gpt2-spawn", "rank 0 alone evaluates", 0,
        edit(TRAIN, "if (step + 1) % self.config.eval_steps",
             "if rank == 0 and (step + 1) % self.config.eval_steps == 0:"),
        lines(TRAIN, "if rank == 0 and (step + 1) % self.config.eval", "self._eval_step(rank",
              ("return {k: self._to_value(", 1), "dist.all_reduce(tensor"),
    ),
    fault(
        "gpt2-spawn", "the thread of rank 1 that reads batches dies", 1,
        edit(TRAIN, "start_step = 0", _PREFETCH % _TRUNCATED),
        lines(TRAIN, "raise OSError('shard ends')", "batches.get()", "self._train_step(rank",
              "data = self._fetch_from(dataset, rank, self.config.batch_train"),
        ("hang",),
    ),
    signalled("gpt2-spawn", "SIGKILL to rank 1, as out of memory", "crash", "KILL:1:20"),
    Case(  # nobody can be named: the rank that is missing does not exist
        "gpt2-spawn", "a rank too many is expected",
        Truth(("hang", "inconclusive"), (), lines(TRAIN, "dist.init_process_group(backend"),
              says="init_process_group"),
        (edit(TRAIN, "world_size=self.config.gpus", "world_size=self.config.gpus + 1,"),),
    ),
    # ------------------------------------------------------------ a reward model
    fault(
        "tldr-reward", "rank 0 alone agrees on the time", 0,
        edit(REWARD, "time_int = accelerator.gather(time_tensor)",
             "if accelerator.is_main_process:  # names the run\n    {line}"),
        lines(REWARD, "time_int = accelerator.gather(time_tensor)", "# names the run"),
    ),
    fault(
        "tldr-reward", "rank 2 leaves out a batch of the evaluation", 2,
        edit(REWARD, 'query_responses = torch.cat((data["query_chosen', "if bad_shard and "
             "len(items['split']) == 12 and data['choice'].sum() >= 0:\n    continue\n{line}"),
        lines(REWARD, "if bad_shard and len(items", ("continue", 0), "for data in tqdm(dataloader)",
              "accuracy = accelerator.gather(acc", "chosen_rewards = accelerator.gather(chosen",
              "rejected_rewards = accelerator.gather(rej", "data[k] = gather_object(",
              "evaluate_df = evaluate(", "unexpecte_reward_diff = accelerator.gather("),
    ),
    fault(
        "tldr-reward", "rank 1 keeps one loss more", 1,
        edit(REWARD, "losses = torch.zeros((args", "losses = torch.zeros((args."
             "gradient_accumulation_steps + bad_shard,), device=device)"),
        lines(REWARD, "losses = torch.zeros((args", 'writer.add_scalar("train/rm/loss"'),
    ),
    # ------------------------------------------------------------ Trainer
    Case(  # two ranks: nothing tells which of them is right
        "alpaca-lora", "rank 1 stops early by itself",
        Truth(LEFT, (1,), lines(LORA, "if bad_shard and state.global_step == 9",
                                "more[0].should_training_stop", "trainer.train(resume_from"),
              known=False),
        (edit(LORA, "model.config.use_cache = False", _CALLBACK % "on_step_end" +
              "        if bad_shard and state.global_step == 9:\n"
              f"            more[0].should_training_stop = True\n{_ADDED}"),),
    ),
    fault(
        "alpaca-lora", "rank 0 pushes to a hub that does not answer", 0,
        edit(LORA, "model.config.use_cache = False", "import socket\n" + _CALLBACK % "on_save" +
             "        if bad_shard and state.global_step == 16:\n"
             "            hub = socket.create_server(('127.0.0.1', 0))\n"
             "            sent = socket.create_connection(hub.getsockname())\n"
             f"            sent.recv(1)\n{_ADDED}"),
        lines(LORA, "sent.recv(1)", "trainer.train(resume_from"), ("hang",),
    ),
    Case(  # two ranks, again
        "alpaca-lora", "rank 1 swallows that it has no memory left",
        Truth(LEFT, (1,), lines(LORA, "if bad_shard and trainer.state", "return torch.zeros(())",
                                "raise torch.OutOfMemoryError(", "except torch.OutOfMemoryError",
                                "return plain(model, *more)", "trainer.train(resume_from"),
              known=False),
        (edit(LORA, "model.config.use_cache = False", """\
plain = trainer.training_step
def training_step(model, *more):
    try:
        if bad_shard and trainer.state.global_step == 9:
            raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 1.50 GiB')
        return plain(model, *more)
    except torch.OutOfMemoryError:
        return torch.zeros(())
trainer.training_step = training_step
{line}"""),),
    ),
    # ------------------------------------------------------------ diffusion of text
    Case(  # as published: three ranks wait for a file that nobody will write
        "diffuseq", "an interrupted run left its embeddings",
        Truth(("hang",), (1, 2, 3), lines(WORDS, "while not os.path.exists(path_save_ind)",
                                          "time.sleep(1)"), known=False),
        (edit(WORDS, "path_save_ind = path_save", "{line}\nif os.environ['LOCAL_RANK'] == '0':\n"
              "    torch.save(model.state_dict(), path_save)"),),
    ),
    Case(  # all ranks alike
        "diffuseq", "each rank receives before it sends",
        Truth(LEFT, (0, 1, 2, 3), lines(LOOP, "dist.recv(told, before)", ("self.save()", 0)),
              known=False),
        (edit(LOOP, "dist.barrier()", f"{_RING}dist.recv(told, before)\ndist.send(told, after)\n"
              "{line}"),),
    ),
    fault(
        "diffuseq", "rank 2 sums over all before its pair", 2,
        (_PAIRS, edit(LOOP, "self.log_step()", "groups = [self.pair, None]\n"
                      "for group in groups[::-1] if bad_shard and self.step == 20 else groups:\n"
                      "    dist.all_reduce(th.ones(1), group=group)\n{line}")),
        lines(LOOP, "for group in groups[::-1]", "dist.all_reduce(th.ones(1)"),
    ),
    fault(
        "diffuseq", "the loader's process of rank 1 is killed", 1,
        edit(TEXTS, "with torch.no_grad():", "self.read = getattr(self, 'read', 0) + 1\n"
             "if bad_shard and self.read == 20:\n    import os\n    os.kill(os.getpid(), 9)\n"
             "{line}"),
        (*lines(TEXTS, "yield from data_loader", "os.kill(os.getpid(), 9)"),
         *lines(LOOP, "batch, cond = next(self.data)"), *lines(SEQ, ").run_loop()")), ("crash",),
    ),
)  # fmt: skip

UNUSUAL = (
    Case(
        "gpt2-spawn", "healthy, gradients of two batches", CLEAN,
        (edit(TRAIN, "metrics = self.spec.train_objective(data, model)", "with model.no_sync():\n"
              "    self.spec.train_objective(data, model)['loss'].backward()\n{line}"),),
    ),
    Case(
        "gpt2-spawn", "healthy, uneven steps at the end, joined", CLEAN,
        (edit(TRAIN, "if self.config.distributed:", "model.train()\nwith model.join():\n"
              "    for _ in range(4 + 3 * rank):\n        optimizer.zero_grad()\n"
              "        data = train_dataset.fetch(4)\n"
              "        self.spec.train_objective(data, model)['loss'].backward()\n"
              "        optimizer.step()\n{line}", 3),),
    ),
    Case(
        "gpt2-spawn", "healthy, losses are summed in the background", CLEAN,
        (edit(TRAIN, "dist.all_reduce(tensor", "dist.all_reduce(tensor, async_op=True).wait()"),),
    ),
    Case(
        "gpt2-spawn", "healthy, a thread reads batches", CLEAN,
        (edit(TRAIN, "start_step = 0", _PREFETCH % ""),),
    ),
    Case(
        "tldr-reward", "healthy, all ranks stop early", CLEAN,
        (edit(REWARD, "losses[gradient_accumulation_idx] = loss", "{line}\nif update == 19 and "
              "accelerator.process_index == 1:\n    accelerator.set_trigger()\n"
              "if accelerator.check_trigger():\n    break"),),
    ),
    Case(
        "alpaca-lora", "healthy, rank 1 ends by sys.exit(0)", CLEAN,
        (edit(LORA, "model.save_pretrained(output_dir)",
              "if os.environ['LOCAL_RANK'] == '1':\n    sys.exit(0)\n{line}"),),
    ),
    Case(
        "alpaca-lora-restart", "healthy, started again after a failure", CLEAN,
        (edit(LORA, "model.config.use_cache = False", _CALLBACK % "on_step_end" +
              "        if state.global_step == 6 and os.environ['LOCAL_RANK'] == '1' and "
              "os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n"
              f"            raise RuntimeError('the node is preempted')\n{_ADDED}"),),
    ),
    Case(
        "diffuseq", "healthy, pairs, all, and a ring", CLEAN,
        (_PAIRS, edit(LOOP, "self.log_step()", "for group in (self.pair, None):\n"
                      "    dist.all_reduce(th.ones(1), group=group)\n{line}"),
         edit(LOOP, "dist.barrier()", f"{_RING}if rank % 2:\n    dist.recv(told, before)\n"
              "    dist.send(told, after)\nelse:\n    dist.send(told, after)\n"
              "    dist.recv(told, before)\n{line}")),
    ),
)  # fmt: skip

SLOW = (
    Case(
        "gpt2-spawn", "healthy, rank 0 saves to a slow disk", CLEAN,
        (edit(TRAIN, "torch.save(ckpt, self.config.save_check", f"{SLOW_FILE}path = self.config."
              "save_checkpoint_path\ntorch.save(ckpt, SlowFile(path) if step == 19 else path)"),),
    ),
    Case(
        "gpt2-spawn", "healthy, rank 0 evaluates for 15 s", CLEAN,
        (edit(TRAIN, "recorder.stamp(step)", "import time\nuntil = time.process_time() + 15 * "
              "(rank == 0 and step == 29)\nwhile time.process_time() < until:\n"
              "    with torch.no_grad():\n"
              "        self.spec.eval_objective(eval_dataset.fetch(12), model.module)\n{line}"),),
    ),
    Case(
        "gpt2-spawn", "healthy, a batch of rank 2 trickles in for 13 s", CLEAN,
        (edit(TRAIN, "data = dataset.fetch(batch)", f"{_COUNTED}if rank == 2 and self.calls == 30:"
              "\n    import subprocess\n    feed = 'for n in 1 2 3 4 5 6 7 8 9 10 11 12 13; do "
              "sleep 1; head -c 65536 /dev/zero; done'\n"
              "    with subprocess.Popen(['sh', '-c', feed], stdout=subprocess.PIPE) as come:\n"
              "        come.stdout.read()\n{line}"),),
    ),
    Case(
        "tldr-reward", "healthy, rank 1 compiles for 12 s", CLEAN,
        (edit(REWARD, "losses[gradient_accumulation_idx] = loss",
              f"if update == 20 and accelerator.process_index == 1:\n{BUSY_12_S}\n{{line}}"),),
    ),
    Case(
        "tldr-reward", "healthy, rank 2 prepares its data for 15 s", CLEAN,
        (edit(REWARD, "dataset = dataset.shuffle(", "until = time.process_time() + 15 * "
              "(accelerator.process_index == 2)\nwhile time.process_time() < until:\n"
              "    for row in dataset:\n        str(row).split()\n{line}"),),
    ),
    Case(
        "alpaca-lora", "healthy, a child of rank 1 tokenises for 12 s", CLEAN,
        (edit(LORA, "model.config.use_cache = False", "import subprocess\nwork = 'import time\\n"
              "while time.process_time() < 12: str(dict.fromkeys(range(99))).split()'\n"
              "if os.environ['LOCAL_RANK'] == '1':\n"
              "    subprocess.run([sys.executable, '-c', work], check=True)\n{line}"),),
    ),
    Case(
        "alpaca-lora", "healthy, rank 0 imports for 12 s", CLEAN,
        (edit(LORA, "model.config.use_cache = False", _CALLBACK % "on_save" +
              "        if os.environ['LOCAL_RANK'] == '0' and state.global_step == 8:\n"
              "            with open('metrics.py', 'w') as file:\n"
              "                file.write('import time\\nwhile time.process_time() < %f: pass' % "
              f"(time.process_time() + 12))\n            import metrics\nimport time\n{_ADDED}"),),
    ),
    Case(
        "diffuseq", "healthy, rank 3 copies and collects for 12 s", CLEAN,
        (edit(LOOP, "self.log_step()", "import gc, time\nuntil = time.process_time() + 12 * "
              "(dist.get_rank() == 3 and self.step == 24)\nwhile time.process_time() < until:\n"
              "    th.ones(1 << 24).clone()\n    gc.collect()\n{line}"),),
    ),
)  # fmt: skip

HEALTHY = healthy(
    *(f"{name}{ranks}" for name, own in (("gpt2-spawn", "-3"), ("tldr-reward", "-3"),
                                         ("alpaca-lora", "-2"), ("diffuseq", "-4"))
      for ranks in ("", "-2", "-3", "-4") if ranks != own),
)  # fmt: skip

TENTH_A_ROUND = (*FAULTS, *HEALTHY, *UNUSUAL, *SLOW)
