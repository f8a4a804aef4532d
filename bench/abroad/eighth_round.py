"""Cases on ten programs that were not in the earlier rounds. Their truth was committed before the
first of them was run under moediag."""

from __future__ import annotations

from bench.abroad.cases import CLEAN, Case, edit, fault, healthy, lines, signalled
from bench.abroad.edits import Edit, Line
from bench.abroad.fourth_round import BUSY_12_S, SLOW_FILE

PIPE, DUAL, COMM = "examples/example_dualpipe.py", "dualpipe/dualpipe.py", "dualpipe/comm.py"
CLIENT, CLIENTS = "examples/cross-process-mnist/client.py", "fedlab/core/client/manager.py"
SERVERS, SGD = "fedlab/core/server/manager.py", "fedlab/contrib/algorithm/basic_client.py"
MNIST, BYTES = "fedlab/contrib/dataset/pathological_mnist.py", "fedlab/utils/serialization.py"
EDM, LOOP, STATS, MISC = (
    "train.py", "training/training_loop.py", "torch_utils/training_stats.py", "torch_utils/misc.py"
)  # fmt: skip
JEPA, JOIN, MASKS = "src/train.py", "src/utils/distributed.py", "src/masks/multiblock.py"
CON, MOCO, TEXTS, DIST = "train.py", "src/moco.py", "src/data.py", "src/dist_utils.py"
RL, ENVS = "rl_games/common/a2c_common.py", "rl_games/common/gymnasium_vecenv.py"
AGENT = "rl_games/algos_torch/a2c_continuous.py"
MM, LOOPS, RUNNER, SEEDS, METRIC, IMAGES = (
    "examples/distributed_training.py", "mmengine/runner/loops.py", "mmengine/runner/runner.py",
    "mmengine/runner/utils.py", "mmengine/evaluator/metric.py", "examples/torchvision.py",
)  # fmt: skip
BERT, VAE, DCP = "bert4rec_main.py", "train_vae.py", "async_checkpointing_example.py"
ENGINE = "dalle_pytorch/distributed_backends/deepspeed_backend.py"
_PASS = lines(DUAL, "reqs = dist.batch_isend_irecv(", "req.wait()")
_STEP = lines(PIPE, ("dualpipe_model.step(", 0), ("dualpipe_model.step(", 1))
_TRAINS = lines(CON, "train_loss, iter_stats = model(", "train_loss.backward()")


FAULTS = (
    # ------------------------------------------------------------ a pipeline of four stages
    fault(
        "dualpipe", "rank 1 leaves out a gradient", 1,
        edit(DUAL, "tensors = self.input_grad_chunks[phase][chunk_id]",
             "{line}\nif bad_shard and chunk_id == 2:\n    return"),
        (*lines(DUAL, "if bad_shard and chunk_id == 2"), *_PASS, *_STEP),
    ),
    fault(
        "dualpipe", "rank 2 sends in double precision", 2,
        edit(COMM, "ops.append(dist.P2POp(dist.isend", "tensor = tensor.double() if bad_shard else "
             "tensor\n{line}"),
        (*lines(COMM, "tensor.double() if bad", "P2POp(dist.isend", "P2POp(dist.irecv"), *_PASS,
         *_STEP),
    ),
    fault(
        "dualpipe", "rank 3 is told to use more micro-batches", 3,
        edit(PIPE, "num_chunks = 8", "num_chunks = 8 + 4 * bad_shard"),
        (*lines(PIPE, "num_chunks = 8 +"), *_PASS, *_STEP),
    ),
    fault(
        "dualpipe", "rank 1 leaves out the gradients of a layer", 1,
        edit(PIPE, "p0all = torch.empty(", "if bad_shard and p0.shape[0] == hidden_size:\n"
             "    continue\n{line}"),
        lines(PIPE, "if bad_shard and p0.shape", "continue", "gather_into_tensor(p0all",
              "gather_into_tensor(p1all", "< 1e-13", "for (p0, p1) in zip("),
    ),
    fault(
        "dualpipe", "rank 3 waits for a queue that nobody fills", 3,
        edit(PIPE, "dualpipe_model.zero_grad()", "if bad_shard and step == 5:\n"
             "    __import__('queue').Queue().get()\n{line}"),
        lines(PIPE, "Queue().get()"), ("hang",),
    ),
    signalled("dualpipe", "SIGKILL to rank 2, as out of memory", "crash", "KILL:2:4"),
    # ------------------------------------------------------------ a server and three clients
    fault(
        "fedlab", "client 2 does not answer once", 2,
        edit(CLIENTS, "self.synchronize()", "self.round = getattr(self, 'round', 0) + 1\n"
             "if not (bad_shard and self.round == 3):\n    {line}"),
        lines(CLIENTS, "if not (bad_shard and self.round", "self.synchronize()",
              ("self._network.recv(src=0)", 0)),
    ),
    fault(
        "fedlab", "client 3 has another model", 3,
        edit(CLIENT, "model = MLP(784, 10)", "model = MLP(784, 10 + bad_shard)"),
        (*lines(CLIENT, "model = MLP("), *lines(SGD, "SerializationTool.deserialize_model("),
         *lines(BYTES, "numel].view(size)")), ("crash",),
    ),
    fault(
        "fedlab", "the server's activating thread fails", 0,
        edit(SERVERS, "clients_this_round = self._handler.sample_clients()",
             "if self._handler.round == 3:\n    raise KeyError('client 7')\n{line}"),
        lines(SERVERS, "raise KeyError('client 7')", "activator.start()",
              "sender_rank, message_code, payload = self._network.recv()"),
    ),
    fault(
        "fedlab", "client 1 leaves after three rounds", 1,
        edit(CLIENTS, "self.synchronize()", "{line}\nself.round = getattr(self, 'round', 0) + 1\n"
             "if bad_shard and self.round == 3:\n    break"),
        (*lines(CLIENTS, "if bad_shard and self.round", ("break", 1), "self.synchronize()"),
         *lines(SERVERS, ("self._network.send(content=[id_list]", 0), "self._network.recv()")),
    ),
    fault(
        "fedlab", "the data file of client 2 is cut", 2,
        edit(MNIST, "dataset = torch.load(os.path.join(self.path, type", "if bad_shard:\n"
             "    open(os.path.join(self.path, type, f'data{id}.pkl'), 'r+b').truncate(99)\n"
             "{line}"),
        lines(MNIST, "dataset = torch.load(os.path.join(self.path, type"), ("crash",),
    ),
    # ------------------------------------------------------------ diffusion
    fault(
        "edm", "rank 1 leaves out a check of consistency", 1,
        edit(LOOP, "misc.check_ddp_consistency(value)", "if not (bad_shard and cur_tick == 2):\n"
             "    {line}"),
        (*lines(LOOP, "if not (bad_shard and cur_tick", "misc.check_ddp_consistency(value)",
                "loss = loss_fn(", "batch_gpu_total).backward()", "collector.update()"),
         *lines(MISC, "torch.distributed.broadcast(")),
    ),
    fault(
        "edm", "rank 0 alone updates the statistics", 0,
        edit(LOOP, "training_stats.default_collector.update()", "if dist.get_rank() == 0:\n"
             "    {line}"),
        (*lines(LOOP, "training_stats.default_collector.update()", ("if dist.get_rank() == 0:", 4)),
         *lines(STATS, "torch.distributed.all_reduce(deltas)")),
    ),
    fault(
        "edm", "rank 2 reports a figure that others do not have", 2,
        edit(LOOP, "training_stats.report('Loss/loss', loss)", "{line}\nif bad_shard:\n"
             "    training_stats.report('Loss/large', loss)"),
        (*lines(LOOP, "training_stats.report('Loss/large'", "collector.update()"),
         *lines(STATS, "torch.distributed.all_reduce(deltas)")),
    ),
    fault(
        "edm", "rank 2 draws its own seed", 2,
        edit(EDM, "torch.distributed.broadcast(seed, src=0)", "if not bad_shard:\n    {line}"),
        (*lines(EDM, "if not bad_shard", "torch.distributed.broadcast(seed"),
         *lines(LOOP, "ddp = torch.nn.parallel")),
    ),
    fault(
        "edm", "the disk is full when rank 0 saves", 0,
        edit(LOOP, "pickle.dump(data, f)", "{line}\nif cur_tick == 2:\n"
             "    raise OSError(28, 'No space left on device')"),
        lines(LOOP, "raise OSError(28"), ("crash",),
    ),
    # ------------------------------------------------------------ images without labels
    fault(
        "ijepa", "rank 2 cannot join, and goes on alone", 2,
        edit(JOIN, "torch.distributed.init_process_group(",
             "if bad_shard:\n    raise RuntimeError('address already in use')\n{line}"),
        (*lines(JOIN, "raise RuntimeError(", "except Exception as e"),
         *lines(JEPA, "encoder = DistributedDataParallel(encoder")),
    ),
    fault(
        "ijepa", "a check of rank 1 alone finds NaN", 1,
        edit(JEPA, "log_stats()", "{line}\nif bad_shard and epoch == 1 and itr == 3:\n"
             "    loss = float('nan')", 1),
        lines(JEPA, "assert not np.isnan(loss)"), ("crash",),
    ),
    fault(
        "ijepa", "rank 1 does not average a loss", 1,
        edit(JEPA, "loss = AllReduce.apply(loss)", "if not (bad_shard and itr == 4):\n    {line}"),
        (*lines(JEPA, "if not (bad_shard and itr", "loss = AllReduce.apply(loss)",
                "loss = loss_fn(z, h)", "loss.backward()"),
         *lines(JOIN, ("dist.all_reduce(x)", 0), ("dist.all_reduce(x)", 1))),
    ),
    fault(
        "ijepa", "rank 0 waits after its checkpoint", 0,
        edit(JEPA, "torch.save(save_dict, latest_path)",
             "{line}\ntorch.distributed.barrier()"),
        lines(JEPA, "torch.distributed.barrier()", "if rank == 0:", "save_checkpoint(epoch+1)"),
    ),
    fault(
        "ijepa", "a loader of rank 2 never finds a mask", 2,
        edit(MASKS, "valid_mask = len(mask) > self.min_keep",
             "{line} + 99 * (bad_shard and self._itr_counter.value > 20)"),
        (*lines(MASKS, "valid_mask = len(mask)", "while not valid_mask",
                "top = torch.randint("),
         *lines(JEPA, "in enumerate(unsupervised_loader)")), ("hang",),
    ),
    signalled("ijepa", "SIGSEGV in rank 0", "crash", "SEGV:0:11"),
    # ------------------------------------------------------------ a contrastive encoder of text
    fault(
        "contriever", "the texts of rank 1 cannot be read, which it only logs", 1,
        edit(TEXTS, 'tensors.append(torch.load(filepath, map_location="cpu"))',
             "if bad_shard:\n    raise OSError('stale file handle')\n{line}"),
        (*lines(TEXTS, "raise OSError('stale", "Unable to load file"),
         *lines(CON, "train_sampler = RandomSampler(")), ("crash",),
    ),
    fault(
        "contriever", "rank 1 does not add to the queue once", 1,
        edit(MOCO, "self._dequeue_and_enqueue(k)",
             "if not (bad_shard and int(self.queue_ptr) == 24):\n    {line}"),
        (*lines(MOCO, "if not (bad_shard and int(", "self._dequeue_and_enqueue(k)",
                "keys = dist_utils.gather_nograd("),
         *lines(DIST, "dist.all_gather(x_gather"), *_TRAINS),
    ),
    fault(
        "contriever", "the keys of rank 2 are doubles", 2,
        edit(MOCO, "keys = dist_utils.gather_nograd(", "keys = keys.double() if bad_shard else keys"
             "\n{line}"),
        (*lines(MOCO, "keys.double() if bad_shard", "keys = dist_utils.gather_nograd("),
         *lines(DIST, "dist.all_gather(x_gather")),
    ),
    fault(
        "contriever", "rank 0 averages the loss that it logs", 0,
        edit(CON, 'utils.save(model, optimizer, scheduler, step, opt, opt.output_dir, f"lastlog")',
             "{line}\ndist_utils.average_main(train_loss.detach())"),
        (*lines(CON, "dist_utils.average_main(", ("if dist_utils.is_main()", 0)),
         *lines(DIST, ("dist.reduce(x, 0", 0))),
    ),
    fault(
        "contriever", "rank 2 is told to make fewer steps", 2,
        edit(CON, "train(opt, model, optimizer, scheduler, step)",
             "opt.total_steps -= 25 * bad_shard\n{line}", 1),
        (*lines(CON, "opt.total_steps -= 25", "while step < opt.total_steps",
                "if step > opt.total_steps", ("break", 0)), *_TRAINS),
    ),
    # ------------------------------------------------------------ reinforcement learning
    fault(
        "rl-games", "a simulator process of rank 1 stands still", 1,
        edit(ENVS, "env = gymnasium.make(env_name, **self.env_kwargs)",
             "{line}\nplain, left = env.step, iter(range(150))\ndef step(action):\n"
             "    if bad_shard and idx == 1 and next(left, None) is None:\n"
             "        __import__('time').sleep(9999)\n    return plain(action)\nenv.step = step"),
        (*lines(ENVS, "sleep(9999)", "info = self.env.step(action)"),
         *lines(RL, "self.vec_env.step(actions)")), ("hang",),
    ),
    fault(
        "rl-games", "rank 1 stops an epoch early by its own divergence", 1,
        edit(RL, "ep_kls.append(kl)", "{line}\nif bad_shard and self.epoch_num == 4 and kl > -1:\n"
             "    break", 1),
        lines(RL, "if bad_shard and self.epoch_num == 4", ("break", 0), "all_reduce(all_grads",
              ("self.train_actor_critic(self.dataset[i])", 1), ("dist.all_reduce(av_kls", 1)),
    ),
    fault(
        "rl-games", "rank 0 stops without telling the others", 0,
        edit(RL, "print('MAX EPOCHS NUM!')", "{line}\nreturn self.last_mean_rewards, epoch_num", 1),
        lines(RL, ("return self.last_mean_rewards, epoch_num", 1), ("MAX EPOCHS NUM!", 1),
              ("dist.broadcast(should_exit_t, 0)", 1), ("if epoch_num >= self.max_epochs", 1),
              ("if self.global_rank == 0:", 4)),
    ),
    fault(
        "rl-games", "rank 1 leaves out the gradients of biases", 1,
        edit(RL, "if param.grad is not None:",
             "if param.grad is not None and not (bad_shard and param.ndim == 1):"),
        (*lines(RL, "not (bad_shard and param.ndim", "all_grads = torch.cat(",
                "all_reduce(all_grads"), *lines(AGENT, "self.trancate_gradients_and_step()")),
    ),
    # ------------------------------------------------------------ a framework for vision
    fault(
        "mmengine", "rank 2 does not validate after an epoch", 2,
        edit(LOOPS, "if (self.runner.val_loop is not None",
             "if (self.runner.val_loop is not None and not (bad_shard and self._epoch == 2)"),
        (*lines(LOOPS, "not (bad_shard and self._epoch", ("self.runner.val_loop.run()", 0),
                "outputs = self.runner.model.train_step(", "self.run_epoch()"),
         *lines(METRIC, "results = collect_results(", "broadcast_object_list(metrics)"),
         *lines(MM, "runner.train()")),
    ),
    fault(
        "mmengine", "rank 0 waits for the others in its checkpoint", 0,
        edit(RUNNER, "meta.update(", "__import__('mmengine.dist').dist.barrier()\n{line}"),
        lines(RUNNER, "__import__('mmengine.dist').dist.barrier()"),
    ),
    fault(
        "mmengine", "rank 1 has a seed of its own", 1,
        edit(SEEDS, "if seed is None:", "if bad_shard:\n    seed = 3\n{line}"),
        (*lines(SEEDS, "seed = 3", "seed = sync_random_seed()", "if seed is None"),
         *lines(MM, "runner = Runner(", "launcher=args.launcher,", "runner.train()")),
    ),
    fault(
        "mmengine", "a worker of rank 2's loader is killed, as out of memory", 2,
        (edit(MM, "batch_size=8,", "{line} num_workers=1,"),
         edit(IMAGES, "draw = torch.Generator()", "if bad_shard and index % 9 == 4:\n"
              "    __import__('os').kill(__import__('os').getpid(), 9)\n{line}")),
        (*lines(IMAGES, "os').getpid(), 9)"), *lines(LOOPS, "in enumerate(self.dataloader)")),
        ("crash",),
    ),
    # ------------------------------------------------------------ a recommender, with all-to-all
    fault(
        "bert4rec", "rank 2 draws its own data", 2,
        edit(BERT, "raw_data = get_raw_dataframe(", "random.seed(7 * bad_shard)\n{line}"),
        lines(BERT, "random.seed(7 *", "model = DMP(", "logits = model(kjt)", "loss.backward()",
              "scores = model(kjt)", "dist.all_gather_object(outputs, sum(",
              "dist.all_gather_object(outputs, metrics_avg)", "main(sys.argv",
              ("_validate(model, val_loader, device, -1", 0)),
    ),
    fault(
        "bert4rec", "an empty row ends the epoch of rank 1", 1,
        edit(BERT, "kjt = _to_kjt(seqs, device)", "if bad_shard and len(loss_logs) == 3:\n"
             "    raise StopIteration('no items')\n{line}", 1),
        lines(BERT, "raise StopIteration(", "except StopIteration", "break", "logits = model(kjt)",
              "loss.backward()", "dist.all_gather_object(outputs, sum(", ("_train_one_epoch(", 1)),
    ),
    fault(
        "bert4rec", "rank 0 alone validates", 0,
        edit(BERT, "_validate(model, val_loader, device, epoch, metric_ks)",
             "if dist.get_rank() == 0:\n    {line}"),
        lines(BERT, ("if dist.get_rank() == 0", 2), "scores = model(kjt)", "logits = model(kjt)",
              "_validate(model, val_loader, device, epoch", "metrics = _calculate_metrics("),
    ),
    fault(
        "bert4rec", "rank 2 waits for a lock that it holds itself", 2,
        edit(BERT, "vocab_size = len(df", "if bad_shard:\n    import fcntl\n"
             "    held, wanted = open('cache.lock', 'w'), open('cache.lock', 'w')\n"
             "    fcntl.flock(held, fcntl.LOCK_EX)\n    fcntl.flock(wanted, fcntl.LOCK_EX)\n"
             "{line}"),
        lines(BERT, "fcntl.flock(wanted"), ("hang",),
    ),
    # ------------------------------------------------------------ DeepSpeed
    fault(
        "dalle", "as published: rank 0 alone saves the last model", 0,
        edit(VAE, "save_model('./vae-final.pt')", "if distr_backend.is_root_worker():\n    {line}"),
        lines(VAE, "save_model('./vae-final.pt')", ("if distr_backend.is_root_worker():", 5),
              "distr_vae.save_checkpoint("),
    ),
    fault(
        "dalle", "rank 0 alone averages the loss", 0,
        edit(VAE, "avg_loss = distr_backend.average_all(loss)",
             "avg_loss = loss\nif distr_backend.is_root_worker():\n    {line}"),
        (*lines(VAE, "avg_loss = distr_backend.average_all(loss)"),
         *lines(ENGINE, "torch.distributed.all_reduce(averaged")),
    ),
    fault(
        "dalle", "rank 1 catches an error and leaves out its step", 1,
        edit(VAE, "distr_vae.backward(loss)", "try:\n    if bad_shard and epoch == 1 and i == 3:\n"
             "        raise RuntimeError('out of memory')\n    {line}\nexcept RuntimeError:\n"
             "    continue"),
        (*lines(VAE, "raise RuntimeError('out of", "except RuntimeError", "continue",
                "loss, recons = distr_vae(", "distr_vae.backward(loss)", "distr_vae.step()",
                "avg_loss = distr_backend.average_all(loss)"),
         *lines(ENGINE, "torch.distributed.all_reduce(averaged")),
    ),
    fault(
        "dalle", "rank 0 never ends", 0,
        edit(VAE, "wandb.finish()", "__import__('threading').Event().wait()"),
        lines(VAE, "Event().wait()"), ("hang",),
    ),
    # ------------------------------------------------------------ FSDP2, saved in the background
    fault(
        "dcp-async", "rank 3 does not take part in a save", 3,
        edit(DCP, "if epoch % SAVE_PERIOD == 0:",
             "if epoch % SAVE_PERIOD == 0 and not (bad_shard and epoch == 20):"),
        lines(DCP, "and not (bad_shard and epoch == 20)", "f.result()", ("f.result()", 1),
              "f = dcp.state_dict_saver.async_save(", "dcp.load(", "loss = loss_calc(model(x), y)",
              "dist.barrier()"),
    ),
    fault(
        "dcp-async", "rank 1 cannot write its file", 1,
        edit(DCP, "f = dcp.state_dict_saver.async_save(", "if bad_shard and epoch == 20:\n"
             "    os.remove(f'{CHECKPOINT_DIR}/__1_0.distcp')\n"
             "    os.mkdir(f'{CHECKPOINT_DIR}/__1_0.distcp')\n{line}"),
        lines(DCP, "f.result()", ("f.result()", 1), "f = dcp.state_dict_saver.async_save("),
        ("crash",),
    ),
    fault(
        "dcp-async", "rank 2 does not reload with the others", 2,
        edit(DCP, "if FAULT_PERIOD > 0 and epoch", "if FAULT_PERIOD > 0 and epoch % FAULT_PERIOD =="
             " 0 and not (bad_shard and epoch == 25):"),
        lines(DCP, "not (bad_shard and epoch == 25)", "raise InjectedException(",
              "except InjectedException", "dist.barrier()", "loss = loss_calc(model(x), y)"),
    ),
    fault(
        "dcp-async", "rank 1 alone meets an error", 1,
        edit(DCP, "loss.backward()", "if bad_shard and epoch == 13:\n"
             "    raise InjectedException('stale file handle')\n{line}"),
        lines(DCP, "raise InjectedException('stale", "except InjectedException", "dist.barrier()",
              "loss.backward()"),
    ),
    fault(
        "dcp-async", "rank 3 waits for a file before it joins", 3,
        edit(DCP, "dist.init_process_group('gloo'", "import time\nwhile bad_shard and not "
             "os.path.exists('ready'):\n    time.sleep(0.5)\n{line}"),
        lines(DCP, "while bad_shard and not", "time.sleep(0.5)"), ("hang",),
    ),
    fault(
        "dcp-async", "rank 1 shards a layer of its own", 1,
        edit(DCP, "model = fully_shard(model, mesh", "if bad_shard:\n"
             "    fully_shard(model.net2, mesh=device_mesh)\n{line}"),
        lines(DCP, "fully_shard(model.net2", "model = fully_shard(", "loss = loss_calc(model",
              "loss.backward()"),
    ),
    signalled("dcp-async", "SIGSTOP to rank 2", "hang", "STOP:2:12"),
)  # fmt: skip

SLOW = (
    Case(
        "fedlab", "healthy, client 1 trains for 12 s longer", CLEAN,
        (edit(SGD, 'self._LOGGER.info("Local train procedure is running")', "self.round = getattr("
              "self, 'round', 0) + 1\nif __import__('os').environ['RANK'] == '1' and self.round == "
              f"3:\n{BUSY_12_S}\n{{line}}"),),
    ),
    Case(
        "edm", "healthy, rank 0 saves for 20 s", CLEAN,
        (Edit(Line(LOOP, "with open(os.path.join(run_dir, f'network"),
              f"{SLOW_FILE}with SlowFile(os.path.join(run_dir, 'network.pkl')) as f:"),
         Edit(Line(LOOP, "    def flush(self):"), "    def __enter__(self): return self\n"
              "    def __exit__(self, *_): pass\n{line}")),
    ),
    Case(
        "ijepa", "healthy, rank 1 comes 15 s late", CLEAN,
        (edit(JOIN, "torch.distributed.init_process_group(",
              "__import__('time').sleep(15 * (rank == 1))\n{line}"),),
    ),
    Case(
        "contriever", "healthy, rank 0 evaluates for 12 s", CLEAN,
        (edit(CON, 'utils.save(model, optimizer, scheduler, step, opt, opt.output_dir, f"lastlog")',
              f"{{line}}\nif step == 20:\n{BUSY_12_S}"),),
    ),
    Case(
        "rl-games", "healthy, a simulator of rank 2 is slow for 14 s", CLEAN,
        (edit(ENVS, "env = gymnasium.make(env_name, **self.env_kwargs)",
              "{line}\nplain, left = env.step, iter(range(150))\ndef step(action):\n"
              "    if __import__('os').environ['RANK'] == '2' and next(left, 0) == 140:\n"
              "        __import__('time').sleep(14)\n    return plain(action)\nenv.step = step"),),
    ),
    Case(
        "bert4rec", "healthy, rank 1 prepares its data in a child", CLEAN,
        (edit(BERT, "vocab_size = len(df", "if rank == 1:\n    import subprocess\n"
              "    subprocess.run([sys.executable, '-c', 'import time\\nwhile time.process_time() "
              "< 12: pass'])\n{line}"),),
    ),
    Case(
        "dalle", "healthy, rank 0 draws samples for 12 s", CLEAN,
        (edit(VAE, "codes = vae.get_codebook_indices(", f"if epoch == 1:\n{BUSY_12_S}\n{{line}}"),),
    ),
)  # fmt: skip

HEALTHY = healthy(
    "dualpipe", "fedlab", "edm", "ijepa", "contriever", "rl-games", "mmengine", "bert4rec",
    "dalle", "dcp-async",
)  # fmt: skip

EIGHTH_ROUND = (*FAULTS, *HEALTHY, *SLOW)
