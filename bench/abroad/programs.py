"""How each program is started on CPU ranks with a tiny configuration. Programs of a checkout are
run as they are, except for the edits listed here (most of them insist on GPUs); packages are run
through the training scripts in ``scripts/``, which call only their public trainers."""

from __future__ import annotations

import array
import pickle
import random
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench.abroad import launchers
from bench.abroad.edits import Edit, Line
from tests.victims.table import HEALTHY_JOBS, healthy_programs

SCRIPTS = Path(__file__).with_name("scripts")
EXAMPLES = "examples/distributed"


@dataclass(frozen=True)
class Program:
    name: str
    tree: str  # its folder below --checkouts; "" for one of our scripts
    script: str  # the file to run, in that folder
    arguments: tuple[str, ...] = ()
    ranks: int = 2
    launcher: str = "torchrun"  # or another of `launchers`
    needs: tuple[str, ...] = ()  # modules it imports, torch apart
    adapt: tuple[Edit, ...] = ()
    prepare: Callable[[Path], None] | None = None  # writes its data into the folder
    prints: str = ""  # a pattern of what it prints that must not change when it is watched
    env: tuple[tuple[str, str], ...] = ()
    bound: float = 240.0  # seconds for one run, its start included
    scripts: Path = SCRIPTS  # where the script is, if it is in no tree

    def command(self, python: str, extra: tuple[str, ...]) -> list[str]:
        before = launchers.command(self.launcher, python, self.ranks)
        return [*before, self.script, *self.arguments, *extra]

    def place(self, folder: Path, checkouts: Path | None) -> None:
        """Copies the program into ``folder``, adapts it and writes its data."""
        if self.tree:
            assert checkouts is not None
            skip = shutil.ignore_patterns(".git", "*.ipynb", "*.png", "*.jpg", "assets")
            shutil.copytree(checkouts / self.tree, folder, ignore=skip)
        else:
            folder.mkdir()
            shutil.copy(self.scripts / self.script, folder)
        for edit in self.adapt:
            edit.apply(folder)
        if self.prepare is not None:
            self.prepare(folder)


# ------------------------------------------------------------------------ data


def _numbers(count: int, below: int) -> array.array[int]:
    draw = random.Random(0)  # noqa: S311
    return array.array("H", (draw.randrange(below) for _ in range(count)))


def _for_nanogpt(folder: Path) -> None:
    data = folder / "data" / "tiny"
    data.mkdir(parents=True)
    for name, count in (("train", 20_000), ("val", 4_000)):
        (data / f"{name}.bin").write_bytes(_numbers(count, 64).tobytes())
    (data / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 64}))


def for_llmc(folder: Path) -> None:
    header = struct.pack("<256i", 20240520, 1, 8_000, *(253 * [0]))
    for name in ("train", "val"):
        (folder / f"{name}.bin").write_bytes(header + _numbers(8_000, 256).tobytes())


def _for_build_nanogpt(folder: Path) -> None:
    data = folder / "edu_fineweb10B"
    data.mkdir()
    for name, count in (("train", 8_000), ("val", 2_000)):
        kind = f"{{'descr': '<u2', 'fortran_order': False, 'shape': ({count},), }}"
        head = kind.ljust(117) + "\n"  # numpy's format 1.0: magic, length and header are 128 bytes
        (data / f"{name}_0.npy").write_bytes(
            b"\x93NUMPY\x01\x00" + struct.pack("<H", 118) + head.encode()
            + _numbers(count, 64).tobytes()
        )  # fmt: skip


def _for_mingpt(folder: Path) -> None:
    text = "".join(chr(97 + number) for number in _numbers(1_400, 26))
    (folder / "text.txt").write_text(text, encoding="utf-8")


def _for_accelerate(folder: Path) -> None:
    shutil.copy(SCRIPTS / "tiny_glue.py", folder)


# ------------------------------------------------------------------------ adaptations


def on_cpu(file: str, *changes: tuple[str, str]) -> tuple[Edit, ...]:
    return tuple(Edit(Line(file, has), new) for has, new in changes)


_MANY_GPUS = ("return has_gpu and gpu_count", "return True")
_CPU = ("device_type = torch.acc", 'device_type = "cpu"')
_LLAMA = "tensor_parallelism"
_GLUE = (
    ("metric = evaluate.load(", "metric = tiny_glue.Metric()"),
    ("tokenizer = AutoTokenizer", "tokenizer = tiny_glue.tokenizer()"),
    ("datasets = load_dataset(", "datasets = tiny_glue.datasets()"),
    ("model = AutoModelForSequenceClassification", "model = tiny_glue.model()"),
    ("import evaluate", "import tiny_glue"),
    ("from datasets import load_dataset", ""),
    # It lets go of the process group, so that freeing the model joins its threads with the
    # interpreter lock held (pytorch/pytorch#56297): about every second job hangs at its end here.
    ("accelerator.end_training()", ""),
    ('"num_epochs": 3', 'config = {"lr": 2e-3, "num_epochs": 2, "seed": 42, "batch_size": 8}'),
)


def by_feature(name: str, script: str, *arguments: str) -> Program:
    return Program(
        name, "accelerate/examples/by_feature", script, ("--cpu", *arguments),
        needs=("accelerate", "transformers", "datasets", "evaluate"),
        prepare=_for_accelerate, adapt=on_cpu(script, *_GLUE), prints=r"epoch \d+: .*",
    )  # fmt: skip


PROGRAMS = (
    Program(
        "nanogpt", "nanoGPT", "train.py",
        ("--dataset=tiny", "--device=cpu", "--backend=gloo", "--compile=False", "--dtype=float32",
         "--block_size=32", "--batch_size=4", "--n_layer=2", "--n_head=2", "--n_embd=32",
         "--max_iters=24", "--eval_interval=8", "--eval_iters=4", "--log_interval=4",
         "--gradient_accumulation_steps=4"),
        needs=("numpy",), prepare=_for_nanogpt, prints=r"loss [0-9.]+",
        adapt=on_cpu(
            "train.py",
            ("device = f'cuda:{ddp_local_rank}'", "device = 'cpu'"),
            ("torch.cuda.set_device(device)", ""),
            ("model = DDP(model, device_ids", "model = DDP(model)"),
        ),
    ),
    Program(
        "llm.c", "llm.c", "train_gpt2.py",
        ("--model=d12", "--input_bin=train.bin", "--input_val_bin=val.bin", "--write_tensors=0",
         "--batch_size=2", "--sequence_length=32", "--total_batch_size=384", "--num_iterations=16",
         "--val_loss_every=4", "--val_max_steps=2", "--overfit_single_batch=0"),
        ranks=3, needs=("numpy", "tiktoken"), prepare=for_llmc,
        prints=r"(train|val) loss [0-9.]+",
        adapt=on_cpu(
            "train_gpt2.py",
            ("assert torch.cuda.is_available()", ""),
            ("init_process_group(backend='nccl')", "init_process_group(backend='gloo')"),
            ("device = f'cuda:{ddp_local_rank}'", "device = 'cpu'"),
            ("torch.cuda.set_device(device)", ""),
            ("enc = tiktoken.get_encoding", "enc = None"),
            ('"d12": GPTConfig(', '"d12": GPTConfig(block_size=32, vocab_size=256, n_layer=2, '
                                  "n_head=2, n_embd=32),"),
            ("model = DDP(model, device_ids", "model = DDP(model)"),
            ("torch.cuda.max_memory_allocated", ""),
            ("dist.all_reduce(lossf, op=", "dist.all_reduce(lossf)"),
        ),
    ),
    Program(
        "build-nanogpt", "build-nanogpt", "train_gpt2.py", needs=("numpy",),
        prepare=_for_build_nanogpt, prints=r"loss: [0-9.]+",
        adapt=on_cpu(
            "train_gpt2.py",
            ("assert torch.cuda.is_available()", ""),
            ("init_process_group(backend='nccl')", "init_process_group(backend='gloo')"),
            ("device = f'cuda:{ddp_local_rank}'", "device = 'cpu'"),
            ("torch.cuda.set_device(device)", ""),
            ("import tiktoken", ""),
            ("enc = tiktoken.get_encoding", ""),
            ("from hellaswag import", ""),
            ("total_batch_size = 524288", "total_batch_size = 512"),
            ("B = 64 # micro", "B = 4"),
            ("T = 1024 # sequence", "T = 32"),
            ("model = GPT(GPTConfig(vocab", "model = GPT(GPTConfig(block_size=32, vocab_size=64, "
                                            "n_layer=2, n_head=2, n_embd=32))"),
            ("model = DDP(model, device_ids", "model = DDP(model)"),
            ("max_steps = 19073", "max_steps = 20"),
            ("if step % 250 == 0 or last_step:", "if step % 8 == 0 or last_step:"),
            ("val_loss_steps = 20", "val_loss_steps = 2"),
            ("dist.all_reduce(val_loss_accum", "dist.all_reduce(val_loss_accum)"),
            ("dist.all_reduce(loss_accum", "dist.all_reduce(loss_accum)"),
            ("if (step % 250 == 0 or last_step) and", "if False:"),
            ("if ((step > 0 and step % 250 == 0)", "if False:"),
        ),
    ),
    Program(
        "ddp-example", f"{EXAMPLES}/ddp", "example.py", ranks=3,
        adapt=on_cpu(
            "example.py", _MANY_GPUS,
            ("model = ToyModel().to(rank)", "model = ToyModel()"),
            ("ddp_model = DDP(model", "ddp_model = DDP(model)"),
            ("labels = torch.randn(20, 5)", "labels = torch.randn(20, 5)"),
            ("acc = torch.accelerator", ""),
            ("backend = torch.distributed.get_default", 'backend = "gloo"'),
            ("torch.accelerator.set_device_index", ""),
        ),
    ),
    Program(
        "fsdp2-example", f"{EXAMPLES}/FSDP2", "example.py",
        adapt=on_cpu(
            "example.py", _MANY_GPUS,
            ("batch_size = 32", "batch_size = 4"),
            ("n_layers=10", "n_layers=2,"),
            ("init_process_group(backend", "torch.distributed.init_process_group(backend=backend)"),
        ),
    ),
    Program(
        "tp-example", f"{EXAMPLES}/{_LLAMA}", "tensor_parallel_example.py",
        adapt=(*on_cpu("log_utils.py", _MANY_GPUS),
               *on_cpu("tensor_parallel_example.py", _CPU)),
    ),
    Program(
        "sp-example", f"{EXAMPLES}/{_LLAMA}", "sequence_parallel_example.py",
        adapt=(*on_cpu("log_utils.py", _MANY_GPUS),
               *on_cpu("sequence_parallel_example.py", _CPU)),
    ),
    Program(
        "fsdp-tp-example", f"{EXAMPLES}/{_LLAMA}", "fsdp_tp_example.py", ranks=4,
        adapt=(
            *on_cpu("log_utils.py", _MANY_GPUS),
            *on_cpu(
                "fsdp_tp_example.py", _CPU,
                ("ModelArgs(dim=256", "simple_llama2_config = ModelArgs("
                                      "dim=32, n_layers=2, n_heads=4, vocab_size=256)"),
                # CPU's flash attention has no sharding strategy; the math one adds a plain mask.
                ("lr = 3e-3", "{line}\ntorch.backends.cuda.enable_flash_sdp(False)\n"
                              "op = torch.distributed.tensor.DTensor._op_dispatcher\n"
                              "op._allow_implicit_replication = True"),
                ("inp = torch.randint(32000",
                 "inp = torch.randint(256, (4, 32), device=device_type)"),
            ),
        ),
    ),
    Program(
        "mingpt-ddp", f"{EXAMPLES}/minGPT-ddp/mingpt", "main.py",
        ("data_config.path=text.txt", "data_config.block_size=16", "data_config.truncate=1.0",
         "gpt_config.n_layer=2", "gpt_config.n_head=2", "gpt_config.n_embd=32",
         "trainer_config.max_epochs=2", "trainer_config.batch_size=32",
         "trainer_config.data_loader_workers=1", "trainer_config.use_amp=False",
         "trainer_config.save_every=1", "hydra.run.dir=."),
        needs=("hydra", "boto3", "fsspec"), prepare=_for_mingpt,
        adapt=(
            *on_cpu("main.py", _MANY_GPUS,
                     ("acc = torch.accelerator", 'acc = torch.device("cpu")'),
                     ("device: torch.device =", "device = acc"),
                     ("torch.accelerator.set_device_index", "")),
            *on_cpu("trainer.py",
                     ("self.acc = torch.accelerator", 'self.acc = torch.device("cpu")'),
                     ("self.device: torch.device =", "self.device = self.acc"),
                     ("self.model = model.to(", "self.model = model"),
                     ("self.model = DDP(", "self.model = DDP(self.model)"),
                     ("source = source.to(", ""), ("targets = targets.to(", ""),
                     ("pin_memory=True", "pin_memory=False,")),
        ),
    ),
    Program(
        "ddp-tutorial", f"{EXAMPLES}/ddp-tutorial-series", "multigpu_torchrun.py", ("4", "2"),
        ranks=3,
        adapt=(
            *on_cpu("multigpu_torchrun.py",
                     ("torch.cuda.set_device(", ""),
                     ('init_process_group(backend="nccl")', 'init_process_group(backend="gloo")'),
                     ("self.model = model.to(", "self.model = model"),
                     ("self.model = DDP(", "self.model = DDP(self.model)"),
                     ("source = source.to(", ""), ("targets = targets.to(", ""),
                     ("pin_memory=True", "pin_memory=False,")),
        ),
    ),
    Program(
        "accelerate-nlp", "accelerate/examples", "nlp_example.py", ("--cpu",),
        needs=("accelerate", "transformers", "datasets", "evaluate"),
        prepare=_for_accelerate, adapt=on_cpu("nlp_example.py", *_GLUE), prints=r"epoch \d+: .*",
    ),
    by_feature("accelerate-stopping", "early_stopping.py"),
    by_feature(
        "accelerate-accumulation", "gradient_accumulation.py", "--gradient_accumulation_steps=2"
    ),
    by_feature("local-sgd", "local_sgd.py"),
    by_feature("checkpointing", "checkpointing.py", "--checkpointing_steps=epoch"),
    by_feature("multi-metrics", "multi_process_metrics.py"),
    Program(
        "mingpt-adder", "minGPT", "projects/adder/adder.py", ("--trainer.max_iters=20",
        "--trainer.num_workers=0", "--data.ndigit=1"), env=(("PYTHONPATH", "."),),
    ),
    Program(
        "mingpt-alone", "minGPT", "projects/adder/adder.py", ("--trainer.max_iters=20",
        "--trainer.num_workers=0", "--data.ndigit=1"), ranks=1, launcher="python",
        env=(("PYTHONPATH", "."),),
    ),
    Program("trainer", "", "hf_trainer.py", ("out",), needs=("transformers", "accelerate"),
            prints=r"'loss': '?[0-9.]+|done, loss [0-9.]+"),
    Program("trl", "", "trl_sft.py", ("out",), needs=("trl", "datasets"),
            prints=r"'loss': '?[0-9.]+|done, loss [0-9.]+"),
    Program("lightning", "", "lightning_fit.py", ("out",), launcher="python",
            needs=("lightning",), prints=r"epoch \d+: loss [0-9.]+"),
    Program("fabric", "", "fabric_loop.py", ("out",), ranks=3, launcher="python",
            needs=("lightning",), prints=r"epoch \d+: [0-9.]+"),
    Program("ignite", "", "ignite_engine.py", needs=("ignite",), prints=r"epoch \d+: [0-9.]+"),
    Program("ray", "", "ray_train.py", ("out",), launcher="python", needs=("ray.train",),
            prints=r"epoch \d+: loss [0-9.]+", bound=300.0,
            env=(("RAY_USAGE_STATS_ENABLED", "0"),)),
    Program("deepspeed-2", "", "deepspeed_zero.py", ("2",), needs=("deepspeed",),
            prints=r"done, loss [0-9.]+", env=(("DS_ACCELERATOR", "cpu"),)),
    Program("deepspeed-3", "", "deepspeed_zero.py", ("3",), needs=("deepspeed",),
            prints=r"done, loss [0-9.]+", env=(("DS_ACCELERATOR", "cpu"),)),
    Program("plain-torchrun", "", "ddp_plain.py", prints=r"done, loss [0-9.]+"),
    Program("plain-accelerate", "", "ddp_plain.py", launcher="accelerate", needs=("accelerate",),
            prints=r"done, loss [0-9.]+"),
    Program("plain-deepspeed", "", "ddp_plain.py", launcher="deepspeed", needs=("deepspeed",),
            prints=r"done, loss [0-9.]+", env=(("DS_ACCELERATOR", "cpu"),)),
    Program("megatron", "", "megatron_tp.py", ranks=4, needs=("megatron.core",),
            prints=r"step \d+: loss .*"),
    *(
        Program(f"ours-{name}", "", HEALTHY_JOBS.name, (name,), scripts=HEALTHY_JOBS.parent)
        for name in healthy_programs()
    ),
)  # fmt: skip
