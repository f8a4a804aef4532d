"""The programs of the tenth round's first half, and how each is started on CPU ranks. They run
unmodified but for the edits here, which remove GPUs, downloads, plots and large sizes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from bench.abroad.programs import Program, on_cpu
from bench.abroad.quiet_programs import beside, imports_on_cpu
from bench.abroad.seventh_programs import TELLS
from bench.abroad.silent_programs import write
from bench.abroad.third_silent_programs import with_small

_MAIN, _TRAINING = "src/gpt2/__main__.py", "src/gpt2/training/training.py"
_REWARD, _LORA, _SEQ = "summarize_from_feedback_details/reward.py", "finetune.py", "train.py"
_NO_WANDB = "from unittest.mock import MagicMock\nwandb = MagicMock()"
_WORDS = [f"w{number}" for number in range(40)]


def _said(row: int, length: int) -> str:
    return " ".join(_WORDS[(row * 7 + number * 3) % 40] for number in range(length))


def _for_gpt2(folder: Path) -> None:
    beside(_MAIN)(folder)
    text = "\n".join(_said(row, 8 + row % 9) for row in range(300))
    write(folder, {"vocab.txt": "\n".join(["<unk>", *_WORDS]), "train.txt": text, "eval.txt": text})


_FEEDBACK = """\
from datasets import Dataset


def _ids(row, count, start=3):
    return [start + (row * 5 + 3 * n) % 90 for n in range(count)]


def load(name, split):
    rows = []
    for row in range({"train": 192}.get(split, 24)):
        query, chosen, rejected = _ids(row, 8), _ids(row + 1, 6), _ids(row + 2, 6)
        rows.append({
            "query_token": query, "chosen_token": chosen, "rejected_token": rejected,
            "query_chosen_token": query + chosen, "query_rejected_token": query + rejected,
            "reference_response_token": chosen, "query_reference_response_token": query + chosen,
            "batch": f"batch{row % 3}", "split": split, "extra": {"confidence": 1 + row % 4},
            "choice": row % 2, "policies": "a-b", "chosen_policy": "a", "rejected_policy": "b"})
    return Dataset.from_list(rows)
"""

_PEFT = """\
class LoraConfig:
    def __init__(self, target_modules, **_):
        self.trained = target_modules


def prepare_model_for_int8_training(model):
    return model


def get_peft_model(model, config):
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(one in name for one in config.trained))
    model.print_trainable_parameters = lambda: None
    return model


def get_peft_model_state_dict(model, state):
    return state


def set_peft_model_state_dict(model, state):
    model.load_state_dict(state)
"""

_BLOBS = """\
from os.path import dirname, exists, join

BlobFile = open
"""


def _for_diffuseq(folder: Path) -> None:
    beside(_SEQ)(folder)
    rows = [json.dumps({"src": _said(row, 5), "trg": _said(row + 1, 5)}) for row in range(96)]
    bert = {
        "model_type": "bert", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "intermediate_size": 32, "max_position_embeddings": 32, "vocab_size": 44,
    }  # fmt: skip
    write(folder, {
        "blobfile.py": _BLOBS, "vocab.txt": "\n".join(_WORDS), "bert/config.json": json.dumps(bert),
        "data/train.jsonl": "\n".join(rows), "data/valid.jsonl": "\n".join(rows[:48]),
        "out/about.txt": "",
    })  # fmt: skip


_FOUR = (
    Program(  # affjljoo3581 7b15966: a language model, DistributedDataParallel in spawned ranks
        "gpt2-spawn", "GPT2", _MAIN,
        ("train", "--train_corpus=train.txt", "--eval_corpus=eval.txt", "--vocab_path=vocab.txt",
         "--seq_len=32", "--layers=2", "--heads=2", "--dims=16", "--batch_train=12",
         "--batch_eval=12", "--total_steps=60", "--eval_steps=10", "--save_steps=20",
         "--gpus=3"),
        ranks=3, launcher="python", needs=("regex", "tqdm"), prepare=_for_gpt2,
        env=(("PYTHONPATH", "src"),),
        adapt=(
            *imports_on_cpu(_TRAINING, "import tqdm"),
            *on_cpu(_TRAINING, ("dist.init_process_group(backend", TELLS),
                    ("init_method='tcp", "init_method=f'tcp://127.0.0.1:{29600 + os.getppid() % "
                     "300}',")),
            *on_cpu("src/gpt2/visualize_metrics.py", ("import matplotlib", "")),
        ),
    ),
    Program(  # vwxyzjn ee77a9a: a reward model of RLHF, accelerate
        "tldr-reward", "summarize_from_feedback_details", _REWARD,
        ("--local_micro_batch_size=4", "--gradient_accumulation_steps=2", "--total_episodes=192",
         "--local_eval_batch_size=4", "--run_eval", "--lr=1e-3", "--num_train_epochs=3",
         "--output_dir=models/reward"),
        ranks=3, needs=("accelerate", "datasets", "pandas", "rich", "tensorboard", "transformers",
                        "tyro"),
        prepare=with_small(_REWARD, **{"summarize_from_feedback_details/feedback.py": _FEEDBACK}),
        env=(("ACCELERATE_USE_CPU", "true"), ("PYTHONPATH", "summarize_from_feedback_details:.")),
        prints=r"train_accuracy=[0-9.]+",
        adapt=on_cpu(
            _REWARD,
            ("from huggingface_hub import HfApi", "import feedback\nimport small"),
            ("api = HfApi()", ""),
            ("base_config: PretrainedConfig", "base_config: PretrainedConfig = None,"),
            ("self.lm_backbone = AutoModel", "self.lm_backbone = small.gpt2("),
            ("trust_remote_code=True,", "trust_remote_code=True,"),
            ("dataset = load_dataset(args.label", "dataset = feedback.load('label', 'train')"),
            ("validation_dataset = load_dataset(args.label",
             "validation_dataset = feedback.load('label', split).flatten()"),
            ("norm_dataset = load_dataset(", "norm_dataset = feedback.load('query', 'train')"),
            ("tokenizer = AutoTokenizer", "tokenizer = small.tokenizer("),
            ("model_config = AutoConfig", "model_config = small.gpt2().config"),
            ("output = self.lm_backbone(**", "output = self.lm_backbone.transformer(**kwargs)"),
        ),
    ),
    Program(  # tloen 8bb8579: a language model fine-tuned by transformers' Trainer
        "alpaca-lora", "alpaca-lora", _LORA,
        ("--base_model=x", "--data_path=data.json", "--output_dir=out", "--batch_size=12",
         "--micro_batch_size=2", "--num_epochs=3", "--cutoff_len=64", "--val_set_size=8",
         "--learning_rate=2e-3"),
        ranks=2, needs=("accelerate", "datasets", "fire", "transformers"),
        prepare=with_small(_LORA, **{"lora.py": _PEFT, "data.json": json.dumps([
            {"instruction": "add " + "xyz"[row % 3:], "input": "",
             "output": "abcdefgh"[row % 5:] * 2} for row in range(104)])}),
        adapt=on_cpu(
            _LORA,
            ("from transformers import Llama", "import small"),
            ("from peft import (", "from lora import ("),
            ("model = LlamaForCausalLM", "model = (lambda *_, **__: small.llama())("),
            ("tokenizer = LlamaTokenizer", "tokenizer = small.tokenizer()"),
            ("fp16=True", "use_cpu=True,"), ("evaluation_strategy=", "eval_strategy='steps',"),
            ("warmup_steps=100", "warmup_steps=2,"), ("logging_steps=10", "logging_steps=4,"),
            ("eval_steps=200", "eval_steps=8,"), ("save_steps=200", "save_steps=8,"),
            ("group_by_length=group_by_length", ""), ("report_to=", "report_to='none',"),
            ("if torch.__version__ >=", "if False:"),
            ("data = load_dataset(\"json\"", "data = load_dataset('json', data_files=data_path, "
             "cache_dir='cache' + os.environ['RANK'])"),
        ),
    ),
    Program(  # Shark-NLP f78945d: a diffusion model of text, DistributedDataParallel
        "diffuseq", "DiffuSeq", _SEQ,
        ("--vocab=vocab.txt", "--config_name=bert", "--data_dir=data", "--checkpoint_path=out",
         "--seq_len=16", "--hidden_dim=16", "--hidden_t_dim=16", "--batch_size=8",
         "--microbatch=4", "--diffusion_steps=50", "--learning_steps=48", "--log_interval=10",
         "--eval_interval=10", "--save_interval=20", "--lr=1e-3"),
        ranks=4, needs=("datasets", "psutil", "transformers"), prepare=_for_diffuseq,
        adapt=(
            *imports_on_cpu(_SEQ, "import argparse"),
            *on_cpu(_SEQ, ("import wandb", _NO_WANDB)),
            *on_cpu("diffuseq/utils/logger.py", ("import wandb", _NO_WANDB)),
            *on_cpu("diffuseq/step_sample.py", (
                "dtype=np.int)", "self._loss_counts = np.zeros([diffusion.num_timesteps], int)")),
            *on_cpu("train_util.py", ("if th.cuda.is_available(): # DEBUG", "if True:")),
            *on_cpu("diffuseq/text_datasets.py", ("num_workers=4", "num_workers=1,"),
                    ("num_proc=4", "num_proc=None,")),
        ),
    ),
)  # fmt: skip


def _on(ranks: int, program: Program) -> Program:
    """The same program on another number of ranks."""
    arguments = tuple(f"--gpus={ranks}" if one[:7] == "--gpus=" else one for one in
                      program.arguments)  # fmt: skip
    name = f"{program.name}-{ranks}"
    return replace(program, name=name, ranks=ranks, arguments=arguments)


TENTH_A_PROGRAMS = (
    *_FOUR,
    replace(_FOUR[2], name="alpaca-lora-restart", env=(("PET_MAX_RESTARTS", "1"),)),
    *(_on(ranks, one) for one in _FOUR for ranks in (2, 3, 4) if ranks != one.ranks),
)
