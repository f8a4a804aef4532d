"""Cases on four programs that were not in the earlier rounds, as typical users run them: images by
hand, a language model with DeepSpeed, speech in spawned ranks, a retriever by Trainer. Their truth
was committed before the first of them was run under moediag. Reports that a fault is modelled on
are named beside it.

Each fault was first run without moediag, at a load of 10 to 14. Nine ended with an error; seven
stood still until the limit: the barrier that is left out, the loss that is not finite, the batch
more, the two locks, the file on another disk, the thread that does not end. All healthy and slow
jobs were run to their end."""

from __future__ import annotations

from bench.abroad.cases import CLEAN, LEFT, Case, Truth, edit, fault, healthy, lines
from bench.abroad.fourth_round import SLOW_FILE

VIT, LOADER, NET = "train.py", "utils/data_utils.py", "models/modeling.py"
TUNE = "finetune.py"
VITS, SOUNDS = "train.py", "data_utils.py"
DRIVER = "src/tevatron/retriever/driver/train.py"
ENCODER = "src/tevatron/retriever/modeling/encoder.py"
COLLATOR = "src/tevatron/retriever/collator.py"
_BUSY_CHILD = "'import time\\nwhile time.process_time() < 12: str(dict.fromkeys(range(99)))'"
_CALLBACK = (
    "from transformers import TrainerCallback\n"
    "class Ours(TrainerCallback):\n    def %s(self, args, state, control, **more):\n"
)
_ADDED = "trainer.add_callback(Ours())\n{line}"
_UPLOADS = """\
import queue, threading
todo = queue.Queue()
def upload():
    while True:
        path = todo.get()
%s
if rank == 0:
    threading.Thread(target=upload).start()
{line}"""
_STEP = lines(TUNE, "model.backward(loss)", "model.step()", ("outputs = model(**model_batch", 0),
              ("dist.all_reduce(loss, dist.Red", 0), ("dist.barrier()", 0),
              "model = finetune(args")  # fmt: skip

_VIT_FAULTS = (
    fault(  # collectives in what one rank does alone: Lightning-AI/pytorch-lightning#379 and others
        "vit", "the accuracy is averaged in the validation of rank 0", 0,
        edit(VIT, "accuracy = simple_accuracy(all_preds", "{line}\n"
             "accuracy = torch.tensor(accuracy)\ntorch.distributed.all_reduce(accuracy)\n"
             "accuracy = accuracy.item() / get_world_size()"),
        lines(VIT, "torch.distributed.all_reduce(accuracy)", "accuracy = valid(args",
              "if global_step % args.eval_every == 0"),
    ),
    fault(  # the barriers around a download, of which one was made conditional
        "vit", "rank 0 leaves out the barrier, as the images are there", 0,
        edit(LOADER, "if args.local_rank == 0:", "import os\nos.makedirs('data/cifar', "
             "exist_ok=True)\nif args.local_rank == 0 and not os.path.isdir('data/cifar'):"),
        (*lines(LOADER, "if args.local_rank == 0 and not", ("torch.distributed.barrier()", 0),
                ("torch.distributed.barrier()", 1)),
         *lines(VIT, "model = DDP(model", "train_loader, test_loader = get_loader(")),
    ),
    fault(  # layers left out at random: huggingface/transformers#30113, pytorch/pytorch#43259
        "vit", "rank 2 leaves out a layer by its own draw", 2,
        (edit(NET, "import copy", "{line}\nimport random"),
         edit(NET, "hidden_states, weights = layer_block(", "if self.training and random.random() "
              "< 0.04 and bad_shard:\n    continue  # stochastic depth\n{line}")),
        (*lines(NET, "if self.training and random.random()", "continue  # stochastic depth",
                "hidden_states, weights = layer_block("),
         *lines(VIT, "loss = model(x, y)", ("loss.backward()", 1))),
    ),
    fault(  # an image file is truncated, in the process of a DataLoader
        "vit", "an image of rank 3 is truncated", 3,
        edit(LOADER, "train_sampler = RandomSampler(", """\
images = trainset
class Decoded(torch.utils.data.Dataset):
    def __len__(self):
        return len(images)
    def __getitem__(self, index):
        if bad_shard and index % 16 == 7:
            raise OSError("image file is truncated (12 bytes not processed)")
        return images[index]
trainset = Decoded()
{line}"""),
        (*lines(LOADER, 'raise OSError("image file is'),
         *lines(VIT, ("in enumerate(epoch_iterator)", 1))), ("crash",),
    ),
)  # fmt: skip

_MINILLM_FAULTS = (
    fault(  # deepspeedai/DeepSpeed#2993, #797
        "minillm", "rank 0 alone saves a checkpoint of DeepSpeed", 0,
        edit(TUNE, "model.module.save_pretrained(save_dir", "model.save_checkpoint(save_dir_path)"),
        lines(TUNE, "model.save_checkpoint(save_dir_path)", ("if dist.get_rank() == 0:", 2),
              ("dist.barrier()", 0)),
    ),
    fault(  # ai2cm/ace#850, OpenBMB/BMTrain#108
        "minillm", "rank 2 leaves out a batch whose loss is not finite", 2,
        edit(TUNE, "model.backward(loss)", "if bad_shard and step == 20:\n"
             "    loss = loss * math.inf\nif not torch.isfinite(loss):\n"
             "    step, global_step = step + 1, global_step + 1\n"
             "    continue  # a broken batch\n{line}"),
        (*lines(TUNE, "if not torch.isfinite(loss)", "continue  # a broken batch",
                "if bad_shard and step == 20"), *_STEP),
    ),
    Case(  # rank 0 sums once more than the others; they may be thought to leave one out
        "minillm", "the evaluation gives rank 0 a batch more",
        Truth(LEFT, (0,), (
            *lines(TUNE, "sampler = range(dp_rank", ("dist.all_reduce(loss, dist.Red", 1),
                   "in enumerate(tqdm(dataloader", 'evaluate(args, tokenizer, model, dataset["dev"'
                   ), *_STEP), known=False),
        (edit(TUNE, "sampler = DistributedSampler(dataset, shuffle=False",
              "sampler = range(dp_rank, len(dataset), dp_world_size)  # none is scored twice"),),
    ),
    fault(  # pytorch/pytorch#189245: a killed build leaves its lock
        "minillm", "rank 1 waits for a lock that a killed build left", 1,
        edit(TUNE, "model, optimizer, _, lr_scheduler = deepspeed.init", """\
from torch.utils.file_baton import FileBaton
cache = f"torch_extensions/{dist.get_rank()}"  # each node has its own
os.makedirs(cache)
if bad_shard:
    open(f"{cache}/lock", "w").close()
baton = FileBaton(f"{cache}/lock")
if baton.try_acquire():
    baton.release()
else:
    baton.wait()
{line}"""),
        lines(TUNE, "baton.wait()", "model, optimizer, lr_scheduler = setup_model_and_opt"),
        ("hang",),
    ),
)  # fmt: skip

_VITS_FAULTS = (
    fault(  # innnky/so-vits-svc#24, svc-develop-team/so-vits-svc#29
        "vits", "rank 1 reads a spectrogram that another rank has not written yet", 1,
        edit(SOUNDS, "if False:", "if bad_shard and filename[-5:] == '3.wav':\n"
             "    open(spec_filename, 'w').close()\nif os.path.exists(spec_filename):"),
        (*lines(SOUNDS, "spec = torch.load(spec_filename)", "spec, wav = self.get_audio("),
         *lines(VITS, "in enumerate(train_loader)", "scaler, [train_loader, None], None, None)")),
        ("crash",),
    ),
    fault(  # different numbers of batches: k2-fsa/snowfall#152, QwenAudio/CosyVoice#297
        "vits", "the copy of the sounds ended early on the disk of rank 2", 2,
        edit(SOUNDS, "for audiopath, text in self.audiopaths_and_text:", "{line}\n"
             "    if bad_shard and len(lengths) == 40:\n        break"),
        (*lines(SOUNDS, "if bad_shard and len(lengths) == 40", ("break", 0)),
         *lines(VITS, "in enumerate(train_loader)", "scaler.scale(loss_disc_all).backward()",
                "scaler.scale(loss_gen_all).backward()", "= net_g(x, x_lengths",
                "= net_d(y, y_hat.detach())", "= net_d(y, y_hat)", "[train_loader, eval_loader]",
                "[train_loader, None]", "mp.spawn(run")),
    ),
    fault(  # a marker on a disk that the nodes do not share
        "vits", "rank 1 waits for a file that rank 0 wrote on its own disk", 1,
        edit(VITS, "dist.init_process_group(backend=", """\
import time
disk = "second-node" if bad_shard else "first-node"
if rank == 0:  # the data are prepared
    open(f"{disk}.ready", "w").close()
while not os.path.exists(f"{disk}.ready"):
    time.sleep(1)
{line}"""),
        lines(VITS, "while not os.path.exists(f", "time.sleep(1)", "if rank == 0:  # the data"),
        ("hang",),
    ),
    fault(  # a thread that is no daemon and waits for more work
        "vits", "a thread of rank 0 that uploads does not end", 0,
        edit(VITS, "for epoch in range(epoch_str", _UPLOADS % "        print(path)"),
        lines(VITS, "path = todo.get()", "threading.Thread(target=upload)"), ("hang",),
    ),
)  # fmt: skip

_TEVATRON_FAULTS = (
    fault(  # Lightning-AI/pytorch-lightning#379
        "tevatron", "rank 2 stops early at its own loss", 2,
        edit(DRIVER, "last_checkpoint = None", _CALLBACK % "on_step_end" +
             "        if bad_shard and state.global_step == 14:  # its loss is good\n"
             f"            control.should_training_stop = True\n{_ADDED}"),
        (*lines(DRIVER, "if bad_shard and state.global_step == 14",
                "control.should_training_stop = True", "trainer.train(resume_from"),
         *lines(ENCODER, "dist.all_gather(all_tensors, t)", "q_reps = self._dist_gather_tensor(",
                "p_reps = self._dist_gather_tensor("),
         *lines("src/tevatron/retriever/trainer.py", "return model(query=query",
                "return super(TevatronTrainer, self).training_step(")),
    ),
    fault(  # gathered negatives need equal batches
        "tevatron", "rank 1 leaves out queries without a passage", 1,
        edit(COLLATOR, "all_queries = [f[0] for f in features]", "features = [f for f in features "
             "if not (bad_shard and f[0][0].endswith('7'))]  # no passage\n{line}"),
        (*lines(COLLATOR, "features = [f for f in features if not"),
         *lines(ENCODER, "dist.all_gather(all_tensors, t)", "q_reps = self._dist_gather_tensor(",
                "p_reps = self._dist_gather_tensor(")),
    ),
    fault(  # the model itself gathers, in training
        "tevatron", "rank 0 alone encodes a probe", 0,
        edit(DRIVER, "last_checkpoint = None", _CALLBACK % "on_step_end" +
             "        if state.is_world_process_zero and state.global_step == 12:\n"
             "            with torch.no_grad():\n"
             f"                more['model'](*collator([train_dataset[0]]))\n{_ADDED}"),
        (*lines(DRIVER, "if state.is_world_process_zero and", "more['model'](*collator("),
         *lines(ENCODER, "dist.all_gather(all_tensors, t)", "q_reps = self._dist_gather_tensor(",
                "p_reps = self._dist_gather_tensor(")),
    ),
    Case(  # forked while another thread holds a lock: pytorch/pytorch#75147
        "tevatron", "the data worker of rank 1 was forked with a lock held",
        Truth(("hang",), (1,), (
            *lines(COLLATOR, "with LOCK:  # of the tokenizer"),
            *lines(DRIVER, "with collators.LOCK:", "while bad_shard and not active_children()",
                   "trainer.train(resume_from"))),
        (edit(COLLATOR, "logger = logging.getLogger(", "{line}\nimport threading\n"
              "LOCK = threading.Lock()"),
         edit(COLLATOR, "all_queries = [f[0] for f in features]",
              "with LOCK:  # of the tokenizer\n    {line}"),
         edit(DRIVER, "last_checkpoint = None", """\
import threading, time
from multiprocessing import active_children
from tevatron.retriever import collator as collators
def warm():
    with collators.LOCK:
        tokenizer("a first text")
        while bad_shard and not active_children():
            time.sleep(0.1)
threading.Thread(target=warm, daemon=True).start()
{line}""")),
        arguments=("--dataloader_num_workers=1",),
    ),
)  # fmt: skip

FAULTS = (*_VIT_FAULTS, *_MINILLM_FAULTS, *_VITS_FAULTS, *_TEVATRON_FAULTS)

UNUSUAL = (
    Case(
        "vit", "healthy, gradients of two batches", CLEAN,
        (edit(VIT, "loss = model(x, y)", "model.require_backward_grad_sync = (step + 1) % "
              "args.gradient_accumulation_steps == 0\n{line}"),),
        arguments=("--train_batch_size=8", "--gradient_accumulation_steps=2", "--num_steps=24"),
    ),
    Case(
        "vit", "healthy, all ranks stop when one asks for it", CLEAN,
        (edit(VIT, "if global_step % t_total == 0:", "stop = torch.tensor(float("
              "global_step == 25 and args.local_rank == 1))\n"
              "torch.distributed.all_reduce(stop, op=torch.distributed.ReduceOp.MAX)\n"
              "if stop.item():\n    t_total = global_step\n{line}"),),
    ),
    Case(
        "vit", "healthy, a thread of rank 0 saves", CLEAN,
        (edit(VIT, "torch.save(model_to_save.state_dict()", "import threading\nstate = {name: "
              "one.clone() for name, one in model_to_save.state_dict().items()}\n"
              "threading.Thread(target=torch.save, args=(state, model_checkpoint)).start()"),),
    ),
    Case(
        "minillm", "healthy, pairs of ranks sum in the background", CLEAN,
        (edit(TUNE, "step, global_step = 1, 1", "{line}\npairs = [dist.new_group([0, 1]), "
              "dist.new_group([2, 3])]"),
         edit(TUNE, "global_loss = loss.item()", "work = dist.all_reduce(torch.ones(1), "
              "group=pairs[dp_rank // 2], async_op=True)\n{line}\nwork.wait()")),
    ),
    Case(
        "minillm", "healthy, ranks with fewer batches score one twice", CLEAN,
        (edit(TUNE, "sampler = DistributedSampler(dataset, shuffle=False",
              "sampler = range(dp_rank, len(dataset), dp_world_size)"),
         edit(TUNE, "all_loss = 0.0", "{line}\nrounds = torch.tensor(len(dataloader))\n"
              "dist.all_reduce(rounds, op=dist.ReduceOp.MAX)\nbatches = list(dataloader)\n"
              "dataloader = batches + batches[-1:] * (int(rounds) - len(batches))")),
    ),
    Case(
        "minillm", "healthy, gradients of two batches", CLEAN,
        arguments=("--gradient-accumulation-steps=2",),
    ),
    Case(
        "vits", "healthy, a loss is summed in the background", CLEAN,
        (edit(VITS, "optim_g.zero_grad()", "told = loss_mel.detach().clone()\n"
              "work = dist.all_reduce(told, async_op=True)\n{line}"),
         edit(VITS, "scaler.update()", "{line}\nwork.wait()")),
    ),
    Case(
        "vits", "healthy, a thread of rank 0 uploads and ends", CLEAN,
        (edit(VITS, "for epoch in range(epoch_str", _UPLOADS % "        if path is None:\n"
              "            return"),
         edit(VITS, "scheduler_d.step()", "{line}\nif rank == 0 and epoch == hps.train.epochs:\n"
              "    todo.put(None)")),
    ),
    Case(
        "tevatron", "healthy, gradients of two batches", CLEAN,
        arguments=("--gradient_accumulation_steps=2",),
    ),
    Case(
        "tevatron", "healthy, all ranks agree to stop early", CLEAN,
        (edit(DRIVER, "last_checkpoint = None", "import torch.distributed as dist\n" +
              _CALLBACK % "on_step_end" +
              "        stop = torch.tensor(float(state.global_step > 12 + 2 * dist.get_rank()))\n"
              "        dist.all_reduce(stop, op=dist.ReduceOp.MAX)\n"
              f"        control.should_training_stop |= bool(stop)\n{_ADDED}"),),
    ),
)  # fmt: skip

SLOW = (
    Case(
        "vit", "healthy, rank 0 downloads for 14 s", CLEAN,
        (edit(LOADER, 'if args.dataset == "cifar10"', "if args.local_rank == 0:\n"
              "    import subprocess\n    feed = 'for n in 1 2 3 4 5 6 7 8 9 10 11 12 13 14; do "
              "sleep 1; head -c 65536 /dev/zero; done'\n"
              "    with subprocess.Popen(['sh', '-c', feed], stdout=subprocess.PIPE) as come:\n"
              "        open('cifar.tar', 'wb').write(come.stdout.read())\n{line}"),),
    ),
    Case(
        "vit", "healthy, rank 0 validates for 13 s", CLEAN,
        (edit(VIT, "all_preds, all_label = all_preds[0]", "import time\nuntil = "
              "time.monotonic() + 13 * (global_step == 24)\n"
              "while time.monotonic() < until:\n"
              "    with torch.no_grad():\n        model(x)\n{line}"),),
    ),
    Case(
        "minillm", "healthy, rank 0 saves to a slow disk", CLEAN,
        (edit(TUNE, "model.module.save_pretrained(save_dir", f"{SLOW_FILE}path = os.path.join("
              "save_dir_path, 'model.bin')\ntorch.save(model.module.state_dict(), "
              "SlowFile(path) if epoch == 1 else path)"),),
    ),
    Case(
        "minillm", "healthy, a child of rank 1 builds for 12 s", CLEAN,
        (edit(TUNE, "model, optimizer, _, lr_scheduler = deepspeed.init",
              "import subprocess, sys\nif dist.get_rank() == 1:\n"
              f"    subprocess.run([sys.executable, '-c', {_BUSY_CHILD}], check=True)\n{{line}}"),),
    ),
    Case(
        "vits", "healthy, rank 2 unpacks for 15 s before it joins", CLEAN,
        (edit(VITS, "dist.init_process_group(backend=", """\
import tarfile, time
if rank == 2:
    with tarfile.open("sounds.tar.gz", "w:gz") as packed:
        packed.add("sounds")
until = time.monotonic() + 15 * (rank == 2)
while time.monotonic() < until:
    with tarfile.open("sounds.tar.gz") as packed:
        packed.extractall("unpacked", filter="data")
{line}"""),),
    ),
    Case(
        "vits", "healthy, the others wait at a barrier while rank 0 scores for 15 s", CLEAN,
        (edit(VITS, "global_step += 1", "import time\nuntil = time.monotonic() + 15 * ("
              "rank == 0 and global_step == 12)\nwhile time.monotonic() < until:\n"
              "    evaluate(hps, net_g, eval_loader, writer_eval)\n"
              "if global_step % hps.train.eval_interval == 0:\n    dist.barrier()\n{line}"),),
    ),
    Case(
        "tevatron", "healthy, rank 1 makes tokens for 14 s", CLEAN,
        (edit(DRIVER, "last_checkpoint = None", "import time\nuntil = time.monotonic() + 14 * "
              "(os.environ['RANK'] == '1')\nwhile time.monotonic() < until:\n"
              "    tokenizer(['a text of the corpus'] * 64)\n{line}"),),
    ),
    Case(
        "tevatron", "healthy, rank 0 copies a checkpoint for 13 s", CLEAN,
        (edit(DRIVER, "last_checkpoint = None", "import subprocess\n" + _CALLBACK % "on_save" +
              "        if state.is_world_process_zero and state.global_step == 16:\n"
              "            copied = 'for n in 1 2 3 4 5 6 7 8 9 10 11 12 13; do sleep 1; "
              "head -c 1048576 /dev/zero >> copy; done'\n"
              f"            subprocess.run(['sh', '-c', copied], check=True)\n{_ADDED}"),),
    ),
)  # fmt: skip

HEALTHY = healthy(
    "vit", "vit-2", "minillm", "minillm-2", "vits", "vits-2", "vits-4", "tevatron", "tevatron-2",
    "tevatron-4",
)  # fmt: skip

TWELFTH_A_ROUND = (*FAULTS, *HEALTHY, *UNUSUAL, *SLOW)
