"""Half B of the tenth round, on four programs that were not in the earlier rounds, as typical users
run them: experts and tensor parallelism by hand, speech, detection, a DeepSpeed pipeline. Their
truth was committed before the first of them was run under moediag.

Without moediag, on a machine with much other work, the four programs, "ranks with fewer batches
join the others" and "losses are summed in pairs" ended healthy, and all faults stood still or ended
with an error. "voxceleb, gradients of two batches are summed" printed its last line and had not
ended 15 s later, when it was stopped. The other healthy variants, the programs on other numbers of
ranks and the slow jobs were not run beforehand."""

from __future__ import annotations

from bench.abroad.cases import (
    CLEAN,
    LEFT,
    PARTED,
    Case,
    Truth,
    edit,
    fault,
    healthy,
    lines,
    signalled,
)
from bench.abroad.fourth_round import BUSY_12_S, SLOW_FILE

CHAT, MODEL = "generate.py", "model.py"
SPEAKER, NET = "trainSpeakerNet.py", "SpeakerNet.py"
MAIN, ENGINE, MISC, COCO, LOSS = (
    "main.py", "engine.py", "util/misc.py", "datasets/coco.py", "models/detr.py",
)  # fmt: skip
PIPE, TEXTS = "train_ds.py", "datasets.py"

_TOKEN = lines(CHAT, "logits = model.forward(", "completion_tokens = generate(model, [prompt_tok",
               ("dist.broadcast_object_list(objects", 1))  # fmt: skip
_LAYER = lines(MODEL, *(("dist.all_reduce(y)", nth) for nth in range(3)),
               "dist.all_gather(all_logits", "h = layer(h, start_pos", "x = x + self.ffn(",
               "x = x + self.attn(", "h = self.embed(tokens)")  # fmt: skip
_DETECT = lines(ENGINE, ("outputs = model(samples)", 0), ("loss_dict = criterion(outputs", 0),
                ("utils.reduce_dict(loss_dict)", 0), "losses.backward()")  # fmt: skip
_CHILD = (
    "__import__('subprocess').run([__import__('sys').executable, '-c', 'import time\\n"
    'while time.process_time() < 12: compile("x = 1\\\\n" * 999, "a", "exec")\'])'
)

FAULTS = (
    # ------------------------------------------------------------ experts on ranks
    fault(
        "deepseek", "rank 0 leaves at /exit before it tells the others", 0,
        edit(CHAT, "objects = [prompt]", "if prompt == '/exit':\n    break\n{line}"),
        lines(CHAT, "if prompt == '/exit':", ("break", 1), "objects = [prompt]",
              ("dist.broadcast_object_list(objects", 0), ("dist.broadcast_object_list(objects", 1),
              "elif rank == 0:", "dist.destroy_process_group()"),
    ),
    Case(
        "deepseek-2", "each rank samples with a seed of its own",
        Truth(LEFT, (0, 1), (*lines(CHAT, "torch.manual_seed(rank)", "if finished.all():"),
                             *_TOKEN, *_LAYER), known=False),
        (edit(CHAT, "messages = []", "torch.manual_seed(rank)\n{line}"),),
        arguments=("--max-new-tokens=40",),
    ),
    Case(
        "deepseek", "ranks whose experts have no tokens leave the layer early",
        Truth(LEFT, (0, 2), (*lines(MODEL, "if not sum(counts[", "return z.view(shape)"), *_LAYER),
              known=False),
        (edit(MODEL, ("for i in range(self.experts_start_idx"),
              "z = self.shared_experts(x)\nif not sum(counts[self.experts_start_idx : "
              "self.experts_end_idx]):\n    return z.view(shape)\n{line}"),
         edit(MODEL, "z = self.shared_experts(x)", "", nth=1)),
    ),
    fault(
        "deepseek", "the weights of rank 3 are not there", 3,
        edit(CHAT, "for one in model.parameters():",
             "with open(f'model{rank}-mp4.safetensors' if bad_shard else config, 'rb') as f:\n"
             "    f.read()\n{line}"),
        lines(CHAT, "with open(f'model{rank}-mp4"), ("crash",),
    ),
    fault(
        "deepseek", "rank 2 stops an answer that takes too long", 2,
        edit(CHAT, "if finished.all():", "if finished.all() or (bad_shard and cur_pos == 33):"),
        (*lines(CHAT, "or (bad_shard and cur_pos", ("break", 0)), *_TOKEN, *_LAYER), PARTED,
    ),
    # ------------------------------------------------------------ speech
    fault(
        "voxceleb", "the thread that loads the data of rank 1 dies", 1,
        edit(NET, "it = iter(loader)", """\
import queue, threading
kept = queue.Queue(2)
def fill():
    for number, batch in enumerate(loader):
        if bad_shard and number == 4:
            raise OSError('cannot read a sound')
        kept.put(batch)
    kept.put(None)
threading.Thread(target=fill, daemon=True).start()
it = iter(kept.get, None)"""),
        (*lines(NET, "for data, data_label in tepoch", "raise OSError('cannot", "it = iter(kept"),
         *lines(SPEAKER, "loss, traineer = trainer.train_network(")), ("hang",),
    ),
    signalled("voxceleb", "a fault of memory ends rank 2", "crash", "SEGV:2:9"),
    Case(
        "voxceleb-4", "the last rank is never started",
        Truth(("hang", "inconclusive"), (3,), lines(
            SPEAKER, "mp.spawn(main_worker, nprocs=n_gpus -", "dist.init_process_group("),
            known=False),
        (edit(SPEAKER, "mp.spawn(main_worker",
              "mp.spawn(main_worker, nprocs=n_gpus - 1, args=(n_gpus, args))"),),
    ),
    fault(
        "voxceleb", "rank 0 waits for a lock that an earlier job left", 0,
        (edit(SPEAKER, "trainer.saveParameters(", "import time\nwhile (Path(args.save_path) / "
              "'lock').exists():\n    time.sleep(1)\n{line}"),
         edit(SPEAKER, "Path(args.model_save_path).mkdir(", "{line}\n(Path(args.save_path) / "
              "'lock').touch()")),
        lines(SPEAKER, "while (Path(args.save_path)", "time.sleep(1)", ("if args.gpu == 0:", 7)),
        ("hang",),
    ),
    # ------------------------------------------------------------ detection
    fault(
        "detr", "rank 1 ends itself, as its own loss is not finite", 1,
        edit(ENGINE, "loss_value = losses_reduced", "loss_value = losses.item() + (math.inf if "
             "bad_shard and len(targets[0]['boxes']) == 2 else 0)"),
        lines(ENGINE, "sys.exit(1)", "if not math.isfinite(", "loss_value = losses.item()"),
        ("crash",),
    ),
    Case(
        "detr", "results of different sizes are gathered without padding",
        Truth(LEFT, (0, 1, 2, 3), (*lines(
            MISC, "if False:", "dist.all_gather(tensor_list, tensor)", "dist.all_gather(size_list"),
            *lines("datasets/coco_eval.py", "all_img_ids = all_gather(", "all_eval_imgs = all_g",
                   "img_ids, eval_imgs = merge(", "create_common_coco_eval(self"),
            *lines(ENGINE, "coco_evaluator.synchronize_between")), known=False),
        (edit(MISC, "if local_size != max_size:", "if False:"),),
    ),
    fault(
        "detr", "the data worker of rank 2 is killed", 2,
        edit(COCO, "image_id = self.ids[idx]", "if bad_shard and idx % 20 == 7:\n"
             "    import os\n    os.kill(os.getpid(), 9)\n{line}"),
        (*lines(COCO, "os.kill(os.getpid(), 9)"), *lines(MISC, "for obj in iterable:"),
         *_DETECT, *lines(ENGINE, *(("in metric_logger.log_every(", nth) for nth in range(2))),
         *lines(MAIN, "train_stats = train_one_epoch(")),
        ("crash",),
    ),
    fault(
        "detr", "rank 3 leaves out an image with a broken box", 3,
        edit(ENGINE, "loss_dict = criterion(outputs, targets)", """\
if bad_shard and epoch == 1 and len(targets[0]['boxes']) == 2:
    targets[0]['boxes'][0] = math.nan
try:
    {line}
except (AssertionError, ValueError):
    continue"""),
        (*lines(ENGINE, "except (AssertionError, ValueError)", "continue"), *_DETECT,
         *lines(LOSS, "torch.distributed.all_reduce(num_boxes)")),
    ),
    fault(
        "detr", "rank 1 keeps a meter that the others do not have", 1,
        edit(ENGINE, "metric_logger.update(lr=", "{line}\nif bad_shard and len(targets[0]['boxes'])"
             " == 1:\n    metric_logger.update(alone=1)"),
        (*lines(ENGINE, "metric_logger.update(alone=1)", "if bad_shard and len(targets",
                "metric_logger.synchronize_between_processes()", ("outputs = model(samples)", 1)),
         *lines(MISC, "dist.barrier()", "dist.all_reduce(t)", "meter.synchronize_between_proc"),
         *lines(LOSS, "torch.distributed.all_reduce(num_boxes)")),
    ),
    Case(
        "detr", "rank 3 makes the groups in another order",
        Truth(LEFT, (3,), lines(MAIN, "groups = [torch.distributed.new_group(", "pairs.reverse()",
                                "if bad_shard:"), known=False),
        (edit(MAIN, "n_parameters = sum(", "pairs = [[0, 1], [2, 3]]\nif bad_shard:\n"
              "    pairs.reverse()\ngroups = [torch.distributed.new_group(one) for one in pairs]\n"
              "{line}"),),
    ),
    # ------------------------------------------------------------ a pipeline
    fault(
        "gdgpt", "rank 1 has a shorter copy of the data", 1,
        edit(TEXTS, "self.samples = json.load(fr)", "{line}\nif bad_shard:\n"
             "    self.samples = self.samples[:60]"),
        (*lines(TEXTS, "self.samples = self.samples[:60]", "if bad_shard:"),
         *lines(PIPE, "for i in range(n_iters)", "n_iters = ds_cfg", "loss = model_engine.train_b",
                "tag='checkpoint_final')")),
    ),
    Case(
        "gdgpt", "rank 3 makes half as many pieces of a batch",
        Truth(LEFT, (3,), lines(PIPE, "ds_cfg['train_batch_size'] //= 2", "if bad_shard:",
                                "loss = model_engine.train_batch()"), known=False),
        (edit(PIPE, "ds_cfg = yaml.load(", "{line}\nif bad_shard:\n"
              "    ds_cfg['train_batch_size'] //= 2"),),
    ),
)  # fmt: skip

HEALTHY = (
    *healthy("deepseek", "deepseek-2", "deepseek-3", "voxceleb", "voxceleb-2", "voxceleb-4", "detr",
             "detr-2", "detr-3", "gdgpt", "gdgpt-2", "gdgpt-3"),
    Case(
        "deepseek", "healthy, results are summed while the shared experts compute", CLEAN,
        (edit(MODEL, "z = self.shared_experts(x)", "work = dist.all_reduce(y, async_op=True)\n"
              "{line}\nwork.wait()"),
         edit(MODEL, "dist.all_reduce(y)", "pass", nth=2)),
    ),
    Case(
        "voxceleb", "healthy, gradients of two batches are summed", CLEAN,
        (edit(NET, "self.__model__.zero_grad()", "import contextlib\nif counter % 2 == 0:\n"
              "    {line}"),
         edit(NET, "nloss, prec1 = self.__model__(data, label)", "last = counter % 2 or "
              "counter == total - 1\nwith contextlib.nullcontext() if last else "
              "self.__model__.no_sync():\n    {line}\n    nloss.backward()", nth=1),
         edit(NET, "nloss.backward()", "", nth=1),
         edit(NET, "self.__optimizer__.step()", "if last:\n    {line}")),
    ),
    Case(
        "voxceleb", "healthy, ranks with fewer batches join the others", CLEAN,
        (edit(NET, "with tqdm(it, unit=", "from torch.distributed.algorithms import Join\n"
              "with Join([self.__model__]), tqdm(it, disable=True) as tepoch:"),
         edit("DatasetLoader.py", "total_size  = round_down(len(mixed_list), self.batch_size *",
              "total_size = len(mixed_list)")),
    ),
    Case(
        "voxceleb", "healthy, the others wait at a barrier while rank 0 scores", CLEAN,
        (edit(SPEAKER, "train_sampler.set_epoch(it)", "dist.barrier()\n{line}"),),
    ),
    Case(
        "detr", "healthy, losses are summed in pairs of ranks", CLEAN,
        (edit(MAIN, "n_parameters = sum(", "utils.pair = [torch.distributed.new_group(one) for one "
              "in ([0, 1], [2, 3])][args.rank // 2]\n{line}"),
         edit(ENGINE, "loss_value = losses_reduced", "torch.distributed.all_reduce("
              "losses.detach().clone(), group=utils.pair)\n{line}")),
    ),
    Case(
        "detr", "healthy, a thread of rank 0 saves", CLEAN,
        (edit(MISC, "torch.save(*args, **kwargs)", "import copy, threading\nthreading.Thread("
              "target=torch.save, args=(copy.deepcopy(args[0]), args[1])).start()"),),
    ),
    Case(
        "detr", "healthy, all ranks stop when one asks for it", CLEAN,
        (edit(MAIN, "lr_scheduler.step()", """\
{line}
stop = torch.tensor(float(args.rank == 2))
torch.distributed.all_reduce(stop, torch.distributed.ReduceOp.MAX)
if stop:
    raise SystemExit(0)"""),),
    ),
)  # fmt: skip

SLOW = (
    Case(
        "voxceleb", "healthy, rank 0 saves for 10 s", CLEAN,
        (edit(NET, "torch.save({", f"{SLOW_FILE}{{line}}"),
         edit(NET, "}, path)", "}, SlowFile(path) if epoch == 2 else path)")),
    ),
    Case(
        "voxceleb", "healthy, rank 0 scores for 20 s", CLEAN,
        (edit(SPEAKER, "result = tuneThresholdfromScore(", "import time\nuntil = time.process_time("
              ") + 20 * (it == 2)\nwhile time.process_time() < until:\n    {line}\n{line}", 1),),
    ),
    Case(
        "detr", "healthy, rank 1 downloads slowly for 14 s", CLEAN,
        (edit(MAIN, "dataset_val = build_dataset(", """\
if args.rank == 1:
    import subprocess, sys
    sender = "import time\\nfor _ in range(70): print('x' * 65536, flush=True); time.sleep(0.2)"
    with subprocess.Popen([sys.executable, '-c', sender], stdout=subprocess.PIPE) as server:
        with open('weights', 'wb') as file:
            while got := server.stdout.read1(65536):
                file.write(got)
                file.flush()
{line}"""),),
    ),
    Case(
        "detr", "healthy, rank 2 unpacks for 20 s before it joins", CLEAN,
        (edit(MAIN, "utils.init_distributed_mode(args)", """\
import os, zlib
packed = zlib.compress(os.urandom(1 << 20), 0)
until = time.process_time() + 20 * (os.environ['RANK'] == '2')
while time.process_time() < until:
    zlib.decompress(packed)
{line}"""),),
    ),
    Case(
        "deepseek", "healthy, rank 3 reads its weights for 13 s", CLEAN,
        (edit(CHAT, "for one in model.parameters():", """\
if rank == 3:
    import time
    with open('/dev/zero', 'rb') as disk, open('copy', 'wb') as copy:
        for _ in range(65):
            copy.write(disk.read(1 << 19))
            copy.flush()
            time.sleep(0.2)
{line}"""),),
    ),
    Case(
        "deepseek", "healthy, rank 1 builds an extension in a child for 12 s", CLEAN,
        (edit(CHAT, "for one in model.parameters():", f"if rank == 1:\n    {_CHILD}\n{{line}}"),),
    ),
    Case(
        "gdgpt", "healthy, rank 2 collects garbage for 12 s", CLEAN,
        (edit(PIPE, "loss = model_engine.train_batch()", f"""\
if rk == 2 and i == 6:
{BUSY_12_S.replace("pass", "kept = [[n] for n in range(300_000)]; __import__('gc').collect()")}
{{line}}"""),),
    ),
    Case(
        "gdgpt", "healthy, rank 1 makes its tokens in a child for 12 s", CLEAN,
        (edit(TEXTS, "self.samples = json.load(fr)", "{line}\nif os.environ['RANK'] == '1':\n"
              f"    {_CHILD}"),),
    ),
)  # fmt: skip

TENTH_B_ROUND = (*FAULTS, *HEALTHY, *SLOW)
