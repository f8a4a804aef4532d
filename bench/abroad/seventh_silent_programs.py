"""The programs of the seventh round of silent faults, and how each is started on CPU ranks. They
run unmodified but for the edits here, which remove GPUs, downloads and size, and repair what is
silently wrong in a program as published, where `seventh_silent_round` says so."""

from __future__ import annotations

import json
from pathlib import Path

from bench.abroad.programs import Program, on_cpu
from bench.abroad.quiet_programs import beside, imports_on_cpu
from bench.abroad.silent_programs import write

# ------------------------------------------------------- hindsight-experience-replay, fff9994c

_MPI = """\
import torch
import torch.distributed as dist

dist.init_process_group("gloo")


class World:
    def Get_rank(self):
        return dist.get_rank()

    def Get_size(self):
        return dist.get_world_size()

    def Bcast(self, array, root):
        dist.broadcast(torch.from_numpy(array), root)

    def Allreduce(self, array, into, op):
        into[...] = array
        dist.all_reduce(torch.from_numpy(into), op)

    def allreduce(self, number, op):
        total = torch.tensor(float(number))
        dist.all_reduce(total, op)
        return total.item()


class MPI:
    COMM_WORLD, SUM = World(), dist.ReduceOp.SUM
"""
# A point that is to be moved to a place.
_GYM = """\
from types import SimpleNamespace

import numpy as np


class Reach:
    _max_episode_steps = 10
    action_space = SimpleNamespace(shape=(3,), high=np.ones(3))

    def seed(self, seed):
        self.draw = np.random.default_rng(seed)

    def reset(self):
        self.place, self.goal = self.draw.uniform(-1, 1, (2, 3))
        return self.seen()

    def seen(self):
        observation = np.concatenate([self.place, np.sin(3 * self.place)])
        return {"observation": observation, "achieved_goal": self.place.copy(),
                "desired_goal": self.goal.copy()}

    def compute_reward(self, achieved, goal, info):
        return -(np.linalg.norm(achieved - goal, axis=-1) > 0.4).astype(np.float32)

    def step(self, action):
        self.place = np.clip(self.place + 0.2 * action, -1, 1)
        reward = self.compute_reward(self.place, self.goal, None)
        return self.seen(), reward, False, {"is_success": float(reward == 0)}


def make(name):
    return Reach()
"""


def _for_her(folder: Path) -> None:
    write(folder, {"mpi4py/__init__.py": _MPI, "gym/__init__.py": _GYM})


_HER = Program(
    "her", "hindsight-experience-replay", "train.py",
    ("--n-epochs=2", "--n-cycles=4", "--n-batches=4", "--batch-size=32", "--buffer-size=1000",
     "--n-test-rollouts=4"),
    needs=("numpy",), prints=r"success rate is: [0-9.]+", prepare=_for_her,
    adapt=(
        # As published, gradients are added up (TianhongDai/hindsight-experience-replay#4).
        *on_cpu(
            "mpi_utils/mpi_utils.py",
            ("comm.Allreduce(flat_grads", "{line}\nglobal_grads /= comm.Get_size()"),
        ),
    ),
)  # fmt: skip

# ----------------------------------------------------------------------------- GaLore, 2cc66f88

_LLAMA = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip
_LOG = """\
class logger:
    info = warning = print

    def remove():
        logger.info = lambda *_: None
"""
_NO_RUNS = """\
from types import SimpleNamespace

run = SimpleNamespace(dir="wandb", id="x")
config = SimpleNamespace(update=lambda *_, **__: None)
init = save = log = lambda *_, **__: None
"""
_CORPUS = """\
import datasets


def rows(count):
    texts = [" ".join(f"w{(row * 7 + n * n * (1 + row % 3)) % 59}" for n in range(30))
             for row in range(count)]
    return datasets.Dataset.from_dict(
        {"text": texts, "timestamp": texts, "url": texts}
    ).to_iterable_dataset()
"""
_VOCABULARY = "\n".join(
    ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{n}" for n in range(59)))
)
_PRETRAIN = "torchrun_main.py"


def _for_galore(folder: Path) -> None:
    beside(_PRETRAIN)(folder)
    write(folder, {
        "loguru.py": _LOG, "no_runs.py": _NO_RUNS, "corpus.py": _CORPUS,
        "bitsandbytes/__init__.py": "", "bitsandbytes/optim/__init__.py": "",
        "bitsandbytes/optim/optimizer.py": "Optimizer2State = object\n",
        "tensorly/__init__.py": "tenalg = None\n",
        "tensorly/decomposition.py": "tucker = None\n",
        "tiny/config.json": json.dumps(_LLAMA), "tiny/vocab.txt": _VOCABULARY,
        "tiny/tokenizer_config.json": '{"tokenizer_class": "BertTokenizer"}',
    })  # fmt: skip


_GALORE = Program(
    "galore", "GaLore", _PRETRAIN,
    ("--model_config=tiny/config.json", "--use_hf_model", "--batch_size=4",
     "--total_batch_size=16", "--max_length=24", "--optimizer=galore_adamw", "--lr=1e-3",
     "--warmup_steps=2", "--num_training_steps=12", "--rank=8", "--update_proj_gap=5",
     "--dtype=float32", "--workers=0", "--save_dir=out", "--grad_clipping=1.0"),
    needs=("datasets", "transformers"), prints=r"Final eval loss: [0-9.]+", prepare=_for_galore,
    adapt=(
        *imports_on_cpu(_PRETRAIN),
        *on_cpu(
            _PRETRAIN,
            ("import wandb", "import corpus\nimport no_runs as wandb"),
            ('datasets.load_dataset("c4"', "val_data = corpus.rows(16)"),
            ('datasets.load_dataset("allenai/c4"', "data = corpus.rows(256)"),
            ('from_pretrained("t5-base"', 'tokenizer = AutoTokenizer.from_pretrained("tiny")'),
            ('device = f"cuda:{local_rank}"', 'device = "cpu"'),
        ),
    ),
)  # fmt: skip

# --------------------------------------------------------------------- DeepSeek-Coder, 2f9fd859

_CODER = _LLAMA | {"max_position_embeddings": 160}
_FINETUNE = "finetune/finetune_deepseekcoder.py"


def _for_coder(folder: Path) -> None:
    def text(start: int, count: int) -> str:
        return " ".join(f"w{(start * 7 + n * n * (1 + start % 3)) % 59}" for n in range(count))

    rows = (
        {"instruction": text(row, 5), "output": text(row + 3, 9 + row % 7)} for row in range(96)
    )
    write(folder, {
        "pairs.json": "\n".join(map(json.dumps, rows)), "tiny/config.json": json.dumps(_CODER),
        "tiny/vocab.txt": _VOCABULARY,
        "tiny/tokenizer_config.json": '{"tokenizer_class": "BertTokenizer"}',
    })  # fmt: skip


_CODER_RUN = Program(
    "deepseek-coder", "DeepSeek-Coder", _FINETUNE,
    ("--model_name_or_path=tiny", "--data_path=pairs.json", "--output_dir=out", "--use_cpu=True",
     "--num_train_epochs=2", "--model_max_length=128", "--per_device_train_batch_size=4",
     "--gradient_accumulation_steps=2", "--learning_rate=2e-3", "--warmup_steps=2",
     "--lr_scheduler_type=cosine", "--logging_steps=1", "--save_strategy=no", "--report_to=none",
     "--cache_dir=cache", "--max_grad_norm=20"),
    needs=("accelerate", "datasets", "transformers"), prints=r"'loss': '?[0-9.]+",
    prepare=_for_coder,
    adapt=(
        *on_cpu(
            _FINETUNE,
            ("model = transformers.AutoModelForCausalLM.from_pretrained(",
             "transformers.set_seed(7)\n"
             "model = (lambda name, dtype: transformers.AutoModelForCausalLM.from_config(\n"
             "    transformers.AutoConfig.from_pretrained(name), dtype=dtype))("),
            # As published, weights of bfloat16 are trained.
            ("torch_dtype=torch.bfloat16", "torch.float32"),
            ("num_proc=32", ""),
            ("trainer = Trainer(model=model, tokenizer=", "trainer = Trainer(model=model, "
             "processing_class=tokenizer, args=training_args, **data_module)"),
        ),
    ),
)  # fmt: skip

SEVENTH_SILENT_PROGRAMS = (_HER, _GALORE, _CODER_RUN)
