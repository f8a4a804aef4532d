"""Cases on three programs that were not in the earlier rounds, as typical users run them: a
language model by hand, one for code by Trainer, a vocoder whose own launcher starts its ranks.
Their truth was committed before the first of them was run under moediag. Reports that a fault is
modelled on are named beside it.

Each fault was first run without moediag, at a load of 6 to 16. Five ended with an error (the broken
shard, the full disk, the frozen layer, the average of rank 0, the killed rank; waveglow's launcher
returns 0 all the same); seven stood still until the limit of 50 to 60 s. All healthy and slow jobs
were run to their end, and so was the second stage of starcoder without its fault. On starcoder rank
0 reads the data for all, as accelerate does with datasets that are iterated."""

from __future__ import annotations

from bench.abroad.cases import (
    CLEAN,
    LEFT,
    Case,
    Truth,
    edit,
    fault,
    healthy,
    lines,
    signalled,
)
from bench.abroad.fourth_round import SLOW_FILE

GALORE, PAGES = "torchrun_main.py", "peft_pretraining/dataloader.py"
STAR = "finetune/finetune.py"
GLOW, START = "train.py", "distributed.py"

_GALORE_FAULTS = (
    fault(  # sandyresearch/parcae#12: the rank with the least data leaves the loop
        "galore", "the shards of rank 1 end early", 1,
        edit(GALORE, "tokenizer = small.tokenizer(", "if bad_shard:  # not all were copied\n"
             "    data = data.take(70)\n{line}"),
        lines(GALORE, "data = data.take(70)", "in enumerate(dataloader)", "scaled_loss.backward()",
              "dist.all_gather(gathered_losses", ("evaluate_model(", 2)),
    ),
    fault(  # Lightning-AI/pytorch-lightning#379 and others
        "galore", "rank 0 alone evaluates", 0,
        edit(GALORE, "if update_step % args.eval_every == 0:",
             "if update_step % args.eval_every == 0 and global_rank == 0:"),
        lines(GALORE, "if update_step % args.eval_every == 0 and global_rank == 0",
              ("evaluate_model(", 1), "dist.all_gather(gathered_losses"),
    ),
    fault(  # a line of one shard is cut off
        "galore", "a shard of rank 2 is broken", 2,
        edit("c4/train-5.jsonl", '"page-1100"', '{"text": "one more sent'),
        (*lines(GALORE, "in enumerate(dataloader)"), *lines(PAGES, "for example in iter_data")),
        ("crash",),
    ),
    fault(  # a read without a timeout
        "galore", "rank 1 waits for a service before it joins", 1,
        edit(GALORE, "dist.init_process_group(backend=", """\
import socket
service = socket.create_server(("127.0.0.1", 0))  # each node has its own
asked = socket.create_connection(service.getsockname())
if not bad_shard:
    service.accept()[0].sendall(b"licensed")
assert asked.recv(8)
{line}"""),
        lines(GALORE, "assert asked.recv(8)"), ("hang",),
    ),
)  # fmt: skip

_STARCODER_FAULTS = (
    fault(  # nodes without a shared disk: axolotl-ai-cloud/axolotl#884
        "starcoder", "rank 1 finds no checkpoint and starts anew", 1,
        edit(STAR, "trainer.train()", """\
{line}
from transformers.trainer_utils import get_last_checkpoint
print("A second stage...")
found = "scratch" if bad_shard else args.output_dir  # a disk of the node
os.makedirs(found, exist_ok=True)
training_args.max_steps += 10
last = get_last_checkpoint(found)
trainer.train(resume_from_checkpoint=last)"""),
        lines(STAR, 'found = "scratch" if bad_shard', "last = get_last_checkpoint(found)",
              "trainer.train(resume_from_checkpoint=last)"),
    ),
    signalled("starcoder", "rank 2 is killed for its memory", "crash", "KILL:2:9"),
    Case(  # each looks at its own clock: talmolab/sleap-nn#471 and others
        "starcoder-2", "rank 1 stops at its own time limit",
        Truth(LEFT, (1,), lines(STAR, "if time.monotonic() - begun > left",
                                "control.should_training_stop = True", "trainer.train()",
                                "left = 0.1 if bad_shard"), known=False),
        (edit(STAR, 'print("Training...")', """\
import time
begun = time.monotonic()
left = 0.1 if bad_shard else 3600  # what its scheduler tells
class Limit(TrainerCallback):
    def on_step_end(self, args, state, control, **more):
        if time.monotonic() - begun > left:
            control.should_training_stop = True
trainer.add_callback(Limit())
{line}"""),),
    ),
    fault(  # the thread that fills a queue has ended with an error; rank 0 reads for all
        "starcoder", "the stream of rank 0 was closed", 0,
        edit(STAR, "iterator = iter(self.dataset)", """\
import queue, threading
rows = queue.Queue(8)
def prefetch():
    for number, row in enumerate(self.dataset):
        if self.infinite and number == 150:
            raise ConnectionResetError("the stream was closed")
        rows.put(row)
    rows.put(None)
threading.Thread(target=prefetch, daemon=True).start()
iterator = iter(rows.get, None)"""),
        lines(STAR, "buffer.append(prepare_sample_text(next(iterator)", "trainer.train()",
              'raise ConnectionResetError("the', "rows.put(row)"), ("hang",),
    ),
)  # fmt: skip

_WAVEGLOW_FAULTS = (
    fault(  # a full disk
        "waveglow", "no space is left for the checkpoint of rank 0", 0,
        edit(GLOW, "model_for_saving = WaveGlow(", "{line}\nif iteration == 20:\n"
             '    filepath = "/dev/full"  # stands for a full disk'),
        lines(GLOW, "torch.save({'model': model_for_saving",
              ("save_checkpoint(model, optimizer, learning_rate, iteration,", 1),
              ("if rank == 0:", 1), 'filepath = "/dev/full"'),
        ("crash",),
    ),
    fault(  # gradients that are None are left out of the sum
        "waveglow", "a layer is frozen in the configuration of rank 2", 2,
        edit(GLOW, "optimizer = torch.optim.Adam(", "if bad_shard:\n"
             "    model.upsample.requires_grad_(False)\n{line}"),
        (*lines(GLOW, "model.upsample.requires_grad_(False)", ("loss.backward()", 1)),
         *lines(START, "dist.all_reduce(coalesced)", "if param.requires_grad and param.grad is",
                "grads = [param.grad.data for")),
    ),
    fault(  # Lightning-AI/pytorch-lightning#379 and others
        "waveglow", "rank 0 alone averages the loss that it prints", 0,
        edit(GLOW, "reduced_loss = reduce_tensor(", "reduced_loss = loss.item()\n"
             "if rank == 0 and iteration % 10 == 9:\n    {line}"),
        (*lines(GLOW, "reduced_loss = reduce_tensor(", "if rank == 0 and iteration % 10 == 9"),
         *lines(START, "dist.all_reduce(rt)")),
    ),
    fault(  # google/turbinia#945, localstack/localstack#1101
        "waveglow", "nobody reads what rank 1 prints", 1,
        (edit(START, "stdout = None if i == 0 else open(", "log = None if i == 0 else open("),
         edit(START, "p = subprocess.Popen(", "p = subprocess.Popen([str(sys.executable)]+"
              "args_list, stdout=None if i == 0 else subprocess.PIPE)"),
         edit(GLOW, 'print("{}:', "{line}\nif bad_shard:  # what is in its shard?\n"
              "    print(mel.tolist(), audio[:, :64].tolist())")),
        (*lines(GLOW, "print(mel.tolist(), audio"),
         *lines(START, "stdout=None if i == 0 else subprocess.PIPE", "p.wait()")), ("hang",),
    ),
)  # fmt: skip

FAULTS = (*_GALORE_FAULTS, *_STARCODER_FAULTS, *_WAVEGLOW_FAULTS)

UNUSUAL = (
    Case(
        "galore", "healthy, gradients of two batches", CLEAN,
        arguments=("--total_batch_size=24", "--num_training_steps=14"),
    ),
    Case(
        "starcoder", "healthy, all ranks gather objects after some steps", CLEAN,
        (edit(STAR, 'print("Training...")', """\
class Gathers(TrainerCallback):
    def on_step_end(self, args, state, control, **more):
        if state.global_step % 4 == 0:
            told = [None] * args.world_size
            torch.distributed.all_gather_object(told, state.log_history)
trainer.add_callback(Gathers())
{line}"""),),
    ),
    Case(
        "waveglow", "healthy, rank 1 prints much into its file", CLEAN,
        (edit(GLOW, 'print("{}:', "{line}\nif rank == 1:\n"
              "    print(mel.tolist(), audio[:, :64].tolist())"),),
    ),
)  # fmt: skip

SLOW = (
    Case(
        "galore", "healthy, rank 0 saves to a slow disk", CLEAN,
        (edit(GALORE, "torch.save(optimizer_checkpoint", f"{SLOW_FILE}path = "
              "f'{current_model_directory}/optimizer.pt'\ntorch.save(optimizer_checkpoint, "
              "SlowFile(path) if update_step == 12 else path)"),),
    ),
    Case(
        "starcoder", "healthy, rank 0 makes tokens first, for 14 s", CLEAN,
        (edit(STAR, "train_dataset, eval_dataset = create_datasets(", """\
import time
from accelerate import PartialState
one = PartialState(cpu=True)
with one.main_process_first():
    until = time.monotonic() + 14 * one.is_main_process
    while time.monotonic() < until:
        tokenizer(["a text of the corpus"] * 64)
{line}"""),),
    ),
    Case(
        "waveglow", "healthy, rank 0 validates for 13 s", CLEAN,
        (edit(GLOW, "if rank == 0:", "import time\nuntil = time.monotonic() + 13 * ("
              "rank == 0 and iteration == 20)\nwhile time.monotonic() < until:\n"
              "    with torch.no_grad():\n        model((mel, audio))\n{line}", nth=1),),
    ),
)  # fmt: skip

HEALTHY = healthy("galore", "starcoder", "waveglow")

THIRTEENTH_ROUND = (*FAULTS, *HEALTHY, *UNUSUAL, *SLOW)
