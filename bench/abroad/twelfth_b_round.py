"""Half B of the twelfth round, on four programs that were not in the earlier rounds, as typical
users run them: metric learning with the classes on ranks, a recommender, an image tokenizer with
its discriminator, experts in a pipeline. Their truth was committed before the first of them was run
under moediag.

Modelled on deepinsight/insightface#1890 and #1287, RUCAIBox/RecBole#1684, allenai/allennlp#5088,
isi-nlp/rtg#11, bytedance/UNO#71, huggingface/accelerate#2690, soumith/ganhacks#23 and
NVIDIA/Megatron-LM#1444.

Without moediag, on a machine with much other work, every fault stood still or ended with an error,
and all healthy and slow jobs ended with 0. In "each rank stops by the score of its own users" rank
1 stops in the fourth epoch, the others go on."""

from __future__ import annotations

from bench.abroad.cases import CLEAN, LEFT, Case, Truth, edit, fault, healthy, lines, signalled
from bench.abroad.fourth_round import SLOW_FILE
from bench.abroad.tenth_b_round import _CHILD

FACE, FACES, HEAD = "train_v2.py", "dataset.py", "partial_fc_v2.py"
SCORE, CALLS, IMAGES = "eval/verification.py", "utils/utils_callbacks.py", "torchvision/datasets.py"
SAMPLER = "utils/utils_distributed_sampler.py"
VAE = "muse_maskgit_pytorch/trainers.py"
CHAT, STAGES, TOKENS, CACHE, MOE, BLOCK = (
    f"src/mistral_inference/{name}.py"
    for name in ("main", "transformer", "generate", "cache", "moe", "transformer_layers")
)
QUICK, FIT, CONFIG = (
    "recbole/quick_start/quick_start.py", "recbole/trainer/trainer.py",
    "recbole/config/configurator.py",
)  # fmt: skip

_EMBED = lines(FACE, "local_embeddings = backbone(img)", "loss: torch.Tensor = module_partial_fc(")
_GATHER = lines(HEAD, "_list_embeddings = AllGather(", "distributed.all_gather(gather_list",
                "distributed.all_gather(_gather_labels")  # fmt: skip
_ARCFACE = (
    # insightface#1890: a last batch that is smaller
    fault(
        "arcface", "the last batch of rank 2 is smaller", 2,
        (edit(IMAGES, "return 96", "return 95"),
         edit(SAMPLER, ": self.total_size", ": len(self.dataset)"),
         edit(SAMPLER, "assert len(indices) == self.total_size", ""),
         edit(SAMPLER, "assert len(indices) == self.num_samples", ""),
         edit(FACES, "drop_last=True", "drop_last=False,"),
         edit(HEAD, "assert self.last_batch_size == batch_size", "self.sizes = (")),
        (*lines(FACES, "drop_last=False"), *lines(SAMPLER, ": len(self.dataset)",
                                                  "indices = indices[self.rank"),
         *lines(HEAD, "torch.zeros((batch_size, self.embedding_size))"), *_EMBED, *_GATHER),
    ),
    fault(
        "arcface", "rank 1 resumes from the epoch before", 1,
        edit(FACE, "if cfg.resume:", """\
cfg.resume = True
left = {"epoch": 1 - bad_shard, "global_step": 8 - 8 * bad_shard,
        "state_dict_backbone": backbone.module.state_dict(),
        "state_dict_softmax_fc": module_partial_fc.state_dict(),
        "state_optimizer": opt.state_dict(), "state_lr_scheduler": lr_scheduler.state_dict()}
torch.save(left, os.path.join(cfg.output, f"checkpoint_gpu_{rank}.pt"))  # by an earlier job
{line}"""),
        (*lines(FACE, 'start_epoch = dict_checkpoint["epoch"]', "dict_checkpoint = torch.load(",
                "for epoch in range(start_epoch", 'left = {"epoch"',
                "for _, (img, local_labels) in"), *_EMBED, *_GATHER),
    ),
    fault(
        "arcface", "the thread that reads the images of rank 1 dies", 1,
        edit(IMAGES, "person = index % 22", "if bad_shard and index == 54:\n"
             "    raise OSError('image file is truncated')\n{line}"),
        (*lines(IMAGES, "raise OSError("), *lines(FACE, "for _, (img, local_labels) in"),
         *lines(FACES, "next_item = self.queue.get()", "for item in self.generator",
                "self.batch = next(self.iter, None)", ("self.preload()", 0), ("self.preload()", 1),
                "return self.next()")), ("hang",),
    ),
    fault(
        "arcface", "a rank without a class of the batch leaves out a sum", 2,
        edit(HEAD, "distributed.all_reduce(loss, ", "if len(index):\n    {line}"),
        (*lines(HEAD, "if len(index):", "distributed.all_reduce(loss, ", "_op.wait()",
                "distributed.reduce(grad_out, rank", "loss = self.dist_cross_entropy(",
                "distributed.reduce(", "grad_list[i], i, distributed",
                "return DistCrossEntropyFunc.apply("),
         *lines(FACE, "loss.backward()"), *_EMBED),
    ),
    *healthy("arcface", "arcface-2", "arcface-4"),
    # The others, which have not evaluated, send them once more in the next step.
    Case(
        "arcface", "healthy, rank 0 evaluates by a model that sends its buffers", CLEAN,
        (edit(FACE, "module=backbone, broadcast_buffers=False", "module=backbone, "
              "broadcast_buffers=True, device_ids=[local_rank], bucket_cap_mb=16,"),),
    ),
    Case(
        "arcface", "healthy, gradients of two batches are summed", CLEAN,
        (edit("configs/base.py", "config.gradient_acc = 1", "config.gradient_acc = 2"),
         edit(FACE, "backbone._set_static_graph()", "import contextlib"),
         edit(FACE, "local_embeddings = backbone(img)", "last = global_step % cfg.gradient_acc == 0"
              "\nwith contextlib.nullcontext() if last else backbone.no_sync():\n    {line}")),
    ),
    Case(
        "arcface", "healthy, ranks agree on the fewest batches", CLEAN,
        (edit(SAMPLER, "self.seed = sync_random_seed(seed)",
              "{line}\nself.num_samples -= 8 * (self.rank == 1)"),
         edit(SAMPLER, "indices = indices[self.rank", "{line}\n"
              "indices = indices[: self.num_samples]"),
         edit(FACE, "for _, (img, local_labels) in", "fewest = torch.tensor(len(train_loader))\n"
              "distributed.all_reduce(fewest, distributed.ReduceOp.MIN)\n"
              "for _, (img, local_labels) in zip(range(int(fewest)), train_loader):")),
    ),
    Case(
        "arcface", "healthy, rank 0 scores for 15 s", CLEAN,
        (edit(CALLS, "self.ver_test(backbone, num_update)", "until = time.process_time() + 15 * ("
              "num_update == 6)\nwhile time.process_time() < until:\n    {line}\n{line}"),),
    ),
    Case(
        "arcface", "healthy, rank 2 unpacks its images for 15 s", CLEAN,
        (edit(FACE, 'rank = int(os.environ["RANK"])', """\
{line}
if rank == 2:
    import gzip, time
    packed, until = gzip.compress(os.urandom(1 << 21), 1), time.process_time() + 15
    while time.process_time() < until:
        with open(f"image-{time.monotonic_ns() % 9}", "wb") as file:
            file.write(gzip.decompress(packed))"""),),
    ),
)  # fmt: skip

_RECOMMEND = lines(FIT, "scaler.scale(loss + sync_loss).backward()", "self.set_reduce_hook()",
                   "self.distributed_model(torch.LongTensor", "train_loss = self._train_epoch(",
                   "torch.distributed.all_gather(",
                   ("torch.distributed.all_gather(", 1))  # fmt: skip
_RECBOLE = (
    # allennlp#5088, rtg#11
    Case(
        "recbole", "each rank stops by the score of its own users",
        Truth(LEFT, (1,), (*lines(
            FIT, "if not self.config['single_spec'] and load_best_model:", "if stop_flag:",
            "break", ") = early_stopping(", "stop_flag,",
            "valid_score, valid_result = self._valid_epoch("), *_RECOMMEND,
            *lines(QUICK, "best_valid_score, best_valid_result = trainer.fit(",
                   "test_result = trainer.evaluate(")), known=False),
        (edit(FIT, "result = self._map_reduce(", "pass"),
         edit(FIT, "self.wandblogger.log_eval_metrics(", "if not self.config['single_spec'] and "
              "load_best_model:\n    result = self._map_reduce(result, num_sample)\n{line}"),
         edit("tiny.yaml", "epochs: 4", "epochs: 30\nstopping_step: 2\nlearning_rate: 0.05")),
    ),
    fault(
        "recbole", "the best model is on the disk of another node", 2,
        edit(FIT, 'self.checkpoint_dir = config["checkpoint_dir"]', "self.checkpoint_dir = "
             "os.path.join('node1' if bad_shard else 'node0', config['checkpoint_dir'])"),
        (*lines(FIT, "checkpoint = torch.load(checkpoint_file", "'node1' if bad_shard"),
         *lines(QUICK, "test_result = trainer.evaluate(")), ("crash",),
    ),
    Case(
        "recbole", "rank 1 was given another port",
        Truth(("hang", "inconclusive"), (1,), (*lines(
            CONFIG, "+ bad_shard", "torch.distributed.init_process_group("),
            *lines(QUICK, "config = Config(")), known=False),
        (edit(CONFIG, '+ str(self.final_config_dict["port"]),',
              '+ str(int(self.final_config_dict["port"]) + bad_shard),'),),
    ),
    # A parent that joins before it reads: "Joining processes that use queues" in Python's manual
    fault(
        "recbole", "rank 0 returns more than a pipe holds", 0,
        edit(QUICK, '"test_result": test_result,', '{line}\n"all_scores": [[user * item / 7 for '
             'item in range(400)] for user in range(400)],'),
        lines(QUICK, "queue.put(result)", '"all_scores"', "queue is not None",
              ), ("hang",),
    ),
    *healthy("recbole", "recbole-2", "recbole-4"),
    Case(
        "recbole", "healthy, all ranks stop early", CLEAN,
        (edit("tiny.yaml", "epochs: 4", "epochs: 30\nstopping_step: 1\nlearning_rate: 0.05"),),
    ),
    Case(
        "recbole", "healthy, the others wait at a barrier while rank 0 works", CLEAN,
        (edit(QUICK, "# model evaluation", """\
if config["local_rank"] == 0:
    import time
    until = time.process_time() + 4
    while time.process_time() < until:
        sum(map(hash, range(9999)))
dist.barrier()"""),),
    ),
    Case(
        "recbole", "healthy, rank 0 saves for 20 s", CLEAN,
        (edit(FIT, "torch.save(state, saved_model_file", f"{SLOW_FILE}if epoch == 0:\n"
              "    torch.save(state, SlowFile(saved_model_file + '.copy'))\n{line}"),),
    ),
    Case(
        "recbole", "healthy, rank 1 downloads its data for 14 s", CLEAN,
        (edit(QUICK, "# dataset filtering", """\
if config["local_rank"] == 1:
    import socket, threading, time
    server = socket.create_server(("127.0.0.1", 0))
    def serve():
        client, _ = server.accept()
        for _ in range(70):
            client.sendall(b"u1 m1 5 " * 8192)
            time.sleep(0.2)
        client.close()
    threading.Thread(target=serve, daemon=True).start()
    with socket.create_connection(server.getsockname()) as mirror, open("ratings", "wb") as file:
        while got := mirror.recv(65536):
            file.write(got)
            file.flush()"""),),
    ),
)  # fmt: skip

_IMAGES = lines(VAE, ("img = next(self.dl_iter)", 0), ("img = next(self.dl_iter)", 1),
                "for data in dl:", "valid_data = next(self.valid_dl_iter)")  # fmt: skip
_MUSE = (
    # bytedance/UNO#71, accelerate#2690
    fault(
        "muse", "rank 0 alone waits for all before it saves", 0,
        (edit(VAE, "self.accelerator.wait_for_everyone()", ""),
         edit(VAE, "if self.is_main and not (steps % self.save_model_every)",
              "{line}\n    self.accelerator.wait_for_everyone()")),
        lines(VAE, "self.accelerator.wait_for_everyone()",
              "if self.is_main and not (steps % self.save_model_every)"),
    ),
    fault(
        "muse", "rank 2 trains its discriminator only if it is worth it", 2,
        edit(VAE, "if exists(discr):", "worth = logs['loss'] * (not bad_shard or steps != 5) > "
             "1e-3\nif exists(discr) and worth:"),
        lines(VAE, "worth = logs['loss']", "if exists(discr) and worth:",
              "loss = self.vae(img, return_discr_loss = True)", "loss = self.vae(",
              ("self.accelerator.backward(loss / self.grad_accum_every)", 0),
              ("self.accelerator.backward(loss / self.grad_accum_every)", 1),
              "self.accelerator.wait_for_everyone()", "recons = model(valid_data"),
    ),
    fault(
        "muse", "rank 1 has a part of the images", 1,
        edit(VAE, "self.paths = [p for ext in exts", "{line}\nif bad_shard:\n"
             "    self.paths = self.paths[:34]"),
        (*lines(VAE, "self.paths = self.paths[:34]", "if bad_shard:"), *_IMAGES),
    ),
    signalled("muse", "rank 2 is stopped", "hang", "STOP:2:9"),
    *healthy("muse", "muse-2", "muse-4"),
    Case(
        "muse", "healthy, gradients of two batches are summed", CLEAN,
        (edit("go.py", "grad_accum_every=1", "grad_accum_every=2,"),),
    ),
    Case(
        "muse", "healthy, a thread of rank 0 saves", CLEAN,
        (edit(VAE, "self.accelerator.save(state_dict, model_path)", "import copy, threading\n"
              "threading.Thread(target=self.accelerator.save, args=(copy.deepcopy(state_dict), "
              "model_path)).start()"),),
    ),
    Case(
        "muse", "healthy, rank 1 builds an extension in a child for 12 s", CLEAN,
        (edit("go.py", "vae = VQGanVAE(",
              f"if os.environ['RANK'] == '1':\n    {_CHILD}\n{{line}}"),),
    ),
    Case(
        "muse", "healthy, rank 2 comes 16 s later", CLEAN,
        (edit("go.py", "vae = VQGanVAE(", "import time\n"
              "time.sleep(16 * (os.environ['RANK'] == '2'))\n{line}"),),
    ),
)  # fmt: skip

_STAGE = lines(STAGES, "torch.distributed.recv(h", "torch.distributed.send(h",
               "torch.distributed.broadcast(outs", "h = self.forward_partial(")  # fmt: skip
_MISTRAL = (
    fault(
        "mistral", "no layer is left for the last rank", 2,
        edit("weights/params.json", '"n_layers": 12', '"n_layers": 4,'),
        (*lines(CACHE, "return self.cache_k[0].device",
                "batch_size,), device=self.device, dtype=torch.long)",
                "self.init_kvseqlens(len(seqlens))"),
         *lines(STAGES, "input_metadata = cache.get_input_metadata(", "num_layers_per_rank = ",
                "self.freqs_cis[input_metadata[0].positions]"),
         *lines(TOKENS, "prelogits = model.forward(", "cache = BufferCache(")), ("crash",),
    ),
    Case(
        "mistral", "rank 0 shortens the prompt after it told its length",
        Truth(LEFT, (0,), (*lines(
            CHAT, "tokens = tokens[-16:]", "dist.broadcast(length_tensor",
            "tokens = int(length_tensor.item())", "generated_tokens, _ = generate("), *_STAGE),
              known=False),
        (edit(CHAT, "if not should_print:",
              "if should_print:\n    tokens = tokens[-16:]\n{line}"),),
    ),
    # All stages must come to it at once, but each waits for the one before it.
    Case(
        "mistral", "loads of experts are summed over all ranks in a stage",
        Truth(LEFT, (0, 1, 2), (*lines(MOE, "torch.distributed.all_reduce(load)"),
                                *lines(BLOCK, "r = self.feed_forward.forward("),
                                *lines(STAGES, "h = layer(h, freqs_cis"), *_STAGE), known=False),
        (edit(MOE, "results = torch.zeros_like(inputs)", "{line}\nload = torch.bincount("
              "selected_experts.flatten(), minlength=len(self.experts))\n"
              "torch.distributed.all_reduce(load)"),),
    ),
    fault(
        "mistral", "a thread of rank 0 waits for another answer", 0,
        (edit(CHAT, "messages: List[UserMessage | AssistantMessage] = []", """\
{line}
import queue, threading
answers: queue.Queue[str] = queue.Queue()
def keep_answers():
    with open("answers", "a") as file:
        while True:
            file.write(answers.get() + "\\n")
if should_print:
    threading.Thread(target=keep_answers).start()"""),
         edit(CHAT, "print(answer)", "{line}\nanswers.put(answer)")),
        lines(CHAT, "file.write(answers.get()", "threading.Thread(target=keep_answers)",
              "def keep_answers():"), ("hang",),
    ),
    *healthy("mistral", "mistral-2", "mistral-4"),
    Case(
        "mistral-4", "healthy, loads are summed in two groups, then over all", CLEAN,
        (edit(CHAT, 'prompt: str = ""', "{line}\npair = [dist.new_group(one) for one in ([0, 1], "
              "[2, 3])][dist.get_rank() // 2]", nth=0),
         edit(CHAT, "answer = tokenizer.decode(", """\
{line}
load = torch.tensor([float(len(answer))])
dist.all_reduce(load, group=pair)
if dist.get_rank() % 2 == 0:
    dist.all_reduce(load, group=heads)
dist.all_reduce(load)"""),
         edit(CHAT, "pair = [dist.new_group", "{line}\nheads = dist.new_group([0, 2])")),
    ),
    Case(
        "mistral", "healthy, a stage sends while it goes on", CLEAN,
        (edit(STAGES, "torch.distributed.send(h", "self.kept = h\nself.sent = "
              "torch.distributed.isend(h, dst=self.pipeline_rank + 1)"),
         edit(STAGES, "torch.distributed.broadcast(outs", "{line}\n"
              "if self.pipeline_rank < self.num_pipeline_ranks - 1:\n    self.sent.wait()")),
    ),
    Case(
        "mistral", "healthy, rank 2 warms its experts up for 15 s", CLEAN,
        (edit(CHAT, 'prompt: str = ""', """\
import time
until = time.process_time() + 15 * (dist.get_rank() == 2)
while time.process_time() < until:
    for layer in model.layers.values():
        layer.feed_forward(torch.ones(64, model.args.dim))
{line}"""),),
    ),
    Case(
        "mistral", "healthy, rank 1 copies its weights for 14 s", CLEAN,
        (edit(STAGES, 'pt_model_file = Path(folder) / "consolidated.00.pth"', """\
{line}
if pipeline_rank == 1:
    import time
    with open("/dev/zero", "rb") as share, open("weights/mine", "wb") as disk:
        for _ in range(70):
            disk.write(share.read(1 << 19))
            disk.flush()
            time.sleep(0.2)"""),),
    ),
)  # fmt: skip

TWELFTH_B_ROUND = (*_ARCFACE, *_RECBOLE, *_MUSE, *_MISTRAL)
