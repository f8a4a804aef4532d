"""The programs of the thirteenth round, and how each is started on CPU ranks. They run unmodified
but for the edits here, which remove GPUs, downloads, logs and large sizes."""

from __future__ import annotations

import json
import struct
import wave
from dataclasses import replace
from pathlib import Path

from bench.abroad.edits import Edit, Line
from bench.abroad.programs import Program, on_cpu
from bench.abroad.quiet_programs import BOUND, beside, imports_on_cpu
from bench.abroad.seventh_programs import TELLS
from bench.abroad.silent_programs import write
from bench.abroad.third_silent_programs import with_small

# ------------------------------------------------------------------------ GaLore

_GALORE, _LOW_RANK = "torchrun_main.py", "galore_torch"
_LOGURU = """\
from types import SimpleNamespace

logger = SimpleNamespace(info=print, warning=print)
logger.remove = lambda: logger.__dict__.update(info=lambda *_: None)
"""
_WANDB = """\
from types import SimpleNamespace

run = SimpleNamespace(id="one", dir="wandb")
config = SimpleNamespace(update=lambda *_, **__: None)
init = save = log = lambda *_, **__: None
"""
_LLAMA = {
    "architectures": ["LLaMAForCausalLM"], "model_type": "llama", "bos_token_id": 2,
    "eos_token_id": 1, "pad_token_id": 0, "hidden_act": "silu", "hidden_size": 32,
    "intermediate_size": 64, "max_position_embeddings": 64, "num_attention_heads": 2,
    "num_hidden_layers": 2, "use_cache": False, "vocab_size": 100,
}  # fmt: skip


def _pages(first: int, count: int) -> str:
    return "\n".join(
        json.dumps({"text": f"{'one more sentence of a page'[row % 9:]} {row}", "timestamp": "x",
                    "url": f"page-{row}"})
        for row in range(first, first + count)
    )  # fmt: skip


_PRETRAINING = Program(  # jiaweizzhao 2cc66f8: a language model, DistributedDataParallel by hand
    "galore", "GaLore", _GALORE,
    ("--model_config=tiny.json", "--use_hf_model", "--batch_size=4", "--total_batch_size=12",
     "--max_length=32", "--optimizer=galore_adamw", "--rank=4", "--update_proj_gap=10", "--lr=1e-3",
     "--warmup_steps=4", "--eval_every=9", "--save_every=12", "--num_training_steps=30",
     "--save_dir=out", "--workers=1", "--dtype=float32", "--grad_clipping=1.0"),
    ranks=3, needs=("datasets", "numpy", "tqdm", "transformers"),
    prepare=with_small(_GALORE, **{
        "loguru.py": _LOGURU, "wandb.py": _WANDB, "tiny.json": json.dumps(_LLAMA),
        **{f"c4/train-{shard}.jsonl": _pages(200 * shard, 200) for shard in range(6)},
        "c4/valid.jsonl": _pages(0, 36),
    }),
    env=(("TOKENIZERS_PARALLELISM", "false"), ("HF_HUB_OFFLINE", "1")),
    adapt=(
        *imports_on_cpu(_GALORE),
        *on_cpu(
            _GALORE,
            ("from peft_pretraining.modeling_llama", "from transformers import LlamaForCausalLM\n"
             "import small"),
            ("import bitsandbytes", ""),
            ('datasets.load_dataset("c4"', 'val_data = datasets.load_dataset("json", '
             'data_files="c4/valid.jsonl", split="train", streaming=True)'),
            ('datasets.load_dataset("allenai/c4"', 'data = datasets.load_dataset("json", '
             'data_files="c4/train-*.jsonl", split="train", streaming=True)'),
            ("tokenizer = AutoTokenizer", "tokenizer = small.tokenizer("
             "model_max_length=args.max_length)"),
        ),
        *on_cpu(f"{_LOW_RANK}/__init__.py", ("from .adamw8bit", "GaLoreAdamW8bit = None")),
        *on_cpu(f"{_LOW_RANK}/galore_projector_tensor.py", ("from tensorly.dec", ""),
                ("from tensorly import", "")),
    ),
)  # fmt: skip

# ------------------------------------------------------------------------ starcoder

_STAR = "finetune/finetune.py"
_QUESTIONS = """\
from datasets import Dataset, DatasetDict


def load_dataset(*_, **__):
    rows = [{"prompt": f"what is {row}", "completion": f"{row % 7} and {row * 5}"}
            for row in range(400)]
    return DatasetDict(train=Dataset.from_list(rows), test=Dataset.from_list(rows[:60]))
"""

_STARCODER = Program(  # bigcode-project d72c7fe: a language model for code by transformers' Trainer
    "starcoder", "starcoder", _STAR,
    ("--seq_length=32", "--max_steps=30", "--batch_size=4", "--gradient_accumulation_steps=1",
     "--learning_rate=1e-3", "--num_warmup_steps=4", "--log_freq=4", "--eval_freq=10",
     "--save_freq=10", "--output_dir=out"),
    ranks=3, needs=("accelerate", "datasets", "tqdm", "transformers"),
    prepare=with_small(_STAR, **{"finetune/questions.py": _QUESTIONS}),
    env=(("PYTHONPATH", "."), ("TOKENIZERS_PARALLELISM", "false"), ("HF_HUB_OFFLINE", "1")),
    prints=r"'loss': '?[0-9.]+",
    adapt=(
        *on_cpu(
            _STAR,
            ("num_of_sequences=1024", "num_of_sequences=16,"),
            ("from datasets import", "from questions import load_dataset"),
            ("from peft import", "import small\nLoraConfig = dict\n"
             "get_peft_model = lambda model, _: model\n"
             "prepare_model_for_int8_training = lambda model: model"),
            ("model = AutoModelForCausalLM", "model = small.gpt2("),
            ("tokenizer = AutoTokenizer", "tokenizer = small.tokenizer()"),
            ("device_map=", 'device_map={"": Accelerator(cpu=True).process_index},'),
            ("evaluation_strategy=", 'eval_strategy="steps",\nuse_cpu=True,'),
            ("bf16=args.bf16", ""), ("report_to=", 'report_to="none",'),
            # Its callbacks are peft's.
            ("trainer = Trainer(", "trainer = Trainer(model=model, args=training_args, "
             "train_dataset=train_data, eval_dataset=val_data)"),
            # Ranks that write one file at the same time fail now and then.
            ('"final_checkpoint/"', "if trainer.is_world_process_zero():\n    {line}"),
        ),
    ),
)  # fmt: skip

# ------------------------------------------------------------------------ waveglow

_GLOW, _START = "train.py", "distributed.py"
_SPECTRA = """\
import torch


class TacotronSTFT:
    def __init__(self, filter_length, hop_length, win_length, sampling_rate, mel_fmin, mel_fmax):
        self.hop = hop_length
        self.to_mel = torch.randn(8, hop_length, generator=torch.Generator().manual_seed(1)) * 0.1

    def mel_spectrogram(self, sound):
        return (self.to_mel @ sound.unfold(1, self.hop, self.hop).transpose(1, 2)).abs()
"""
_READ = """\
import wave
import numpy
def read(path):
    with wave.open(path, "rb") as file:
        sound = file.readframes(file.getnframes())
        return file.getframerate(), numpy.frombuffer(sound, numpy.int16).copy()"""
# Two jobs on one machine must not meet at one port.
_PORT = """\
import json, socket
with socket.socket() as one, open(config) as file:
    one.bind(("127.0.0.1", 0))
    values = json.load(file)
    values["dist_config"]["dist_url"] = f"tcp://127.0.0.1:{one.getsockname()[1]}"
with open(config, "w") as file:
    json.dump(values, file)
{line}"""
_VOCODER = {
    "train_config": {
        "fp16_run": False, "output_directory": "checkpoints", "epochs": 5, "learning_rate": 1e-4,
        "sigma": 1.0, "iters_per_checkpoint": 10, "batch_size": 4, "seed": 1234,
        "checkpoint_path": "", "with_tensorboard": False,
    },
    "data_config": {
        "training_files": "train_files.txt", "segment_length": 1024, "sampling_rate": 8000,
        "filter_length": 256, "hop_length": 256, "win_length": 256, "mel_fmin": 0.0,
        "mel_fmax": 4000.0,
    },
    "dist_config": {"dist_backend": "gloo", "dist_url": "tcp://localhost:54321"},
    "waveglow_config": {
        "n_mel_channels": 8, "n_flows": 2, "n_group": 8, "n_early_every": 4, "n_early_size": 2,
        "WN_config": {"n_layers": 2, "n_channels": 8, "kernel_size": 3},
    },
}  # fmt: skip


def _for_waveglow(folder: Path) -> None:
    beside(_GLOW)(folder)
    write(folder, {
        "tacotron2/layers.py": _SPECTRA, "tiny.json": json.dumps(_VOCODER), "wavs/about.txt": "",
        "train_files.txt": "\n".join(f"wavs/{one}.wav" for one in range(96)),
    })  # fmt: skip
    for one in range(96):
        with wave.open(str(folder / f"wavs/{one}.wav"), "wb") as file:
            file.setparams((1, 2, 8000, 0, "NONE", ""))
            file.writeframes(b"".join(struct.pack("<h", (n * (one + 3) * 37) % 9000 - 4500)
                                      for n in range(1100 + one)))  # fmt: skip


def _waveglow(ranks: int) -> Program:
    return Program(  # NVIDIA 8afb643: a vocoder whose own launcher starts ranks, gradients by hand
        "waveglow", "waveglow", _START, ("--config=tiny.json", "--stdout_dir=logs"), ranks=ranks,
        launcher="python", needs=("numpy",), prepare=_for_waveglow, bound=BOUND,
        prints=r"\d+:\t-?[0-9.]+", env=(("OMP_NUM_THREADS", "1"),),
        adapt=(
            *imports_on_cpu(_GLOW),
            *on_cpu(_GLOW, ("num_gpus = torch.cuda", f"num_gpus = {ranks}"),
                    ("torch.manual_seed(seed)", TELLS)),
            *on_cpu(_START, ("rt, op=dist.reduce_op.SUM", "dist.all_reduce(rt)"),
                    ("assert torch.cuda.is_available()", ""),
                    ("num_gpus = torch.cuda", f"num_gpus = {ranks}"), ("workers = []", _PORT)),
            Edit(Line("mel2samp.py", "from scipy.io.wavfile"), _READ),
        ),
    )  # fmt: skip


THIRTEENTH_PROGRAMS = (
    _PRETRAINING, _STARCODER, replace(_STARCODER, name="starcoder-2", ranks=2), _waveglow(3),
)  # fmt: skip
