"""The programs of the third round of silent faults, and how each is started on CPU ranks. They run
unmodified but for the edits here, which remove GPUs, downloads and size, and repair what is
silently wrong in a program as published, where `third_silent_round` says so."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

from bench.abroad.cases import edit
from bench.abroad.edits import Edit
from bench.abroad.programs import Program, on_cpu
from bench.abroad.quiet_programs import beside, imports_on_cpu
from bench.abroad.silent_programs import write

_OF_RANK = "int(os.environ['RANK'])"

# ------------------------------------------------------------------------ makemore, 988aa59

_MAKEMORE = Program(
    "makemore", "makemore", "makemore.py",
    ("--max-steps=40", "--num-workers=0", "--n-layer=2", "--n-head=2", "--n-embd=16",
     "--n-embd2=16", "--batch-size=8", "--learning-rate=1e-2"),
    launcher="python", needs=("tensorboard",),
    adapt=on_cpu("makemore.py",
                 ("if step > 0 and step % 500 == 0", "if step > 0 and step % 13 == 0:")),
)  # fmt: skip

# ------------------------------------------------------------------------ tacotron2, 185cd24

_HPARAMS = """\
from types import SimpleNamespace


class HParams(SimpleNamespace):
    def parse(self, text):
        for name, value in (one.split("=") for one in text.split(",")):
            kind = type(getattr(self, name))
            setattr(self, name, value == "True" if kind is bool else kind(value))


contrib = SimpleNamespace(training=SimpleNamespace(HParams=HParams))
logging = SimpleNamespace(info=lambda *_: None)
"""


def _for_tacotron(folder: Path) -> None:
    beside("train.py")(folder)
    write(folder, {
        "tensorflow.py": _HPARAMS, "unidecode.py": "unidecode = str", "inflect.py": "engine = dict",
        "librosa/__init__.py": "", "librosa/util.py": "tiny = normalize = pad_center = None",
        "librosa/filters.py": "",
        "train.txt": "\n".join(f"{row}|{'one more word'[row % 5:]}" for row in range(48)),
    })  # fmt: skip


_TACOTRON = Program(
    "tacotron2", "tacotron2", "train.py",
    ("--output_directory=out", "--log_directory=log", "--n_gpus=2",
     "--hparams=distributed_run=True,dist_url=env://,epochs=4,batch_size=4,iters_per_checkpoint=9,"
     "training_files=train.txt,validation_files=train.txt,symbols_embedding_dim=16,n_mel_channels=8,"
     "encoder_embedding_dim=16,encoder_n_convolutions=1,decoder_rnn_dim=16,prenet_dim=16,"
     "attention_rnn_dim=16,attention_dim=8,attention_location_n_filters=4,postnet_embedding_dim=8,"
     "postnet_n_convolutions=2"),
    needs=("numpy",), prepare=_for_tacotron, prints=r"Train loss \d+ [0-9.]+",
    adapt=(
        *imports_on_cpu("train.py"),
        *on_cpu("train.py",
                ("from logger import", "from unittest.mock import MagicMock\n"
                 "Tacotron2Logger = lambda *_: MagicMock()"),
                ("rt, op=dist.reduce_op.SUM", "dist.all_reduce(rt)"),
                ("assert torch.cuda.is_available()", ""),
                ("hparams = create_hparams(", "{line}\nargs.rank = " + _OF_RANK),
                ("train_loader = DataLoader(", "train_loader = DataLoader(trainset, num_workers=0, "
                 "shuffle=shuffle,"),
                ("val_loader = DataLoader(", "val_loader = DataLoader(valset, sampler=val_sampler, "
                 "num_workers=0,")),
        *on_cpu("hparams.py", ("text_cleaners=", "text_cleaners=['basic_cleaners'],")),
        *on_cpu("utils.py", ("from scipy", ""),
                ("ids = torch.arange(0", "ids = torch.arange(0, max_len)")),
        *on_cpu("layers.py", ("from librosa", ""), ("from audio_", ""), ("from audio_", ""),
                ("from stft", "")),
        *on_cpu("data_utils.py",
                ("self.stft = layers.", "(lambda *_: None)("),
                ("mel = self.get_mel(audiopath)",
                 "draw = torch.Generator().manual_seed(int(audiopath))\n"
                 "mel = torch.randn(8, 10 + int(audiopath) % 5, generator=draw)")),
    ),
)  # fmt: skip

# ------------------------------------------------------------------------ LoRA, c4593f0

_NLG = "examples/NLG/src/"


def _for_lora(folder: Path) -> None:
    beside(_NLG + "gpt2_ft.py")(folder)
    rows = ({"context": [1 + (row * 3 + n) % 60 for n in range(4 + row % 3)],
             "completion": [1 + (row * 5 + 2 * n) % 60 for n in range(5)]}
            for row in range(64))  # fmt: skip
    write(folder, {"data.jsonl": "\n".join(map(json.dumps, rows))})


_LORA = Program(
    "lora-nlg", "LoRA", _NLG + "gpt2_ft.py",
    ("--train_data=data.jsonl", "--valid_data=data.jsonl", "--platform=local",
     "--model_card=gpt2.sm", "--lora_dim=4", "--lora_dropout=0.1", "--lr=2e-3", "--max_epoch=4",
     "--train_batch_size=4", "--seq_len=16", "--eval_interval=9", "--work_dir=out", "--clip=1.0",
     "--warmup_step=3", "--correct_bias", "--log_interval=4"),
    prepare=_for_lora, env=(("PYTHONPATH", "."),), prints=r"ppl +[0-9.]+",
    adapt=(
        *imports_on_cpu(_NLG + "gpt2_ft.py", "import argparse"),
        *on_cpu(_NLG + "gpt2_ft.py",
                ("n_embd=768",
                 "n_embd=32, n_layer=2, n_head=2, vocab_size_or_config_json_file=64,")),
        *on_cpu(_NLG + "gpu.py", ("device = torch.device('cuda', local_rank)", "device = 'cpu'")),
    ),
)  # fmt: skip

# ------------------------------------------------------------------------ I-JEPA, 52c1ae9

_JEPA = """\
import on_cpu
import torch.distributed as dist
import yaml

dist.init_process_group("gloo")
with open("tiny.yaml") as file:
    params = yaml.safe_load(file)
from src.train import main

main(params)
"""


def _for_ijepa(folder: Path) -> None:
    beside("go.py", "torchvision")(folder)
    text = (folder / "configs/in1k_vith14_ep300.yaml").read_text()
    for name, value in {
        "batch_size": 4, "crop_size": 16, "num_workers": 0, "pin_mem": "false", "folder": "out",
        "patch_size": 2, "min_keep": 4, "model_name": "vit_tiny", "pred_depth": 1,
        "pred_emb_dim": 24, "use_bfloat16": "false", "epochs": 3, "warmup": 1,
    }.items():  # fmt: skip
        text = re.sub(rf"\b{name}: .*", f"{name}: {value}", text)
    text = text.replace("- 0.996", "- 0.9")
    write(folder, {"go.py": _JEPA, "tiny.yaml": text, "out/.keep": ""})


_IJEPA = Program(
    "ijepa", "ijepa", "go.py", needs=("yaml", "PIL", "numpy"), prepare=_for_ijepa,
    adapt=(
        *on_cpu("src/models/vision_transformer.py",
                ("embed_dim=192", "patch_size=patch_size, embed_dim=24, depth=2, num_heads=2, "
                 "mlp_ratio=4,")),
        *on_cpu("src/datasets/imagenet1k.py",
                ("dataset = ImageNet(",
                 "dataset = (lambda **_: torchvision.Images(3, 16, None, 80))("),
                ("class ImageNet(torchvision", "class ImageNet:")),
    ),
)  # fmt: skip

# ------------------------------------------------------------------------ stylegan2, bef283a


def _for_stylegan(folder: Path) -> None:
    beside("train.py", "torchvision")(folder)
    model = (folder / "model.py").read_text()
    write(folder, {"lmdb.py": "", "model.py": re.sub(r"\b512\b", "16", model), "sample/a": "",
                   "checkpoint/a": ""})  # fmt: skip


_STYLEGAN = Program(
    "stylegan2", "stylegan2-pytorch", "train.py",
    ("data", "--iter=26", "--batch=4", "--size=8", "--n_sample=4", "--d_reg_every=4"),
    needs=("numpy", "PIL", "tqdm"), prepare=_for_stylegan,
    adapt=(
        *imports_on_cpu("train.py", "import argparse"),
        *on_cpu("train.py", ('device = "cuda"', 'device = "cpu"'), ("args.latent = 512",
                 "args.latent = 16\ntorch.manual_seed(get_rank())"),
                ("args.n_mlp = 8", "args.n_mlp = 2"), ("import wandb", "wandb = None"),
                ("dataset = MultiResolutionDataset(", "import torchvision\n"
                 "dataset = torchvision.Plain(3, args.size, None, 96)")),
        *(edit(f"op/{name}.py", "import load", "load = lambda *_, **__: None")
          for name in ("fused_act", "upfirdn2d")),
    ),
)  # fmt: skip

# ------------------------------------------------------------------------ Tiny-DeepSpeed, 1ca1850
# ------------------------------------------------------------------------ Tiny-Megatron, 810ce59

_NORM = """\
def layernorm_fwd(input, weight, bias, eps, tuner):
    mean = input.mean(-1, keepdim=True)
    rstd = (input.var(-1, correction=0, keepdim=True) + eps).rsqrt()
    return (input - mean) * rstd * weight + bias, mean, rstd, {"BLOCK_SIZE": 0, "num_warps": 0}


def layernorm_dx(grad, input, weight, bias, mean, rstd, args, tuner):
    hat, wdy = (input - mean) * rstd, grad * weight
    dx = (wdy - wdy.mean(-1, keepdim=True) - hat * (wdy * hat).mean(-1, keepdim=True)) * rstd
    return dx, grad * hat, grad, args


def layernorm_dwdb(weight, bias, dw, db, args, tuner):
    return dw.flatten(0, -2).sum(0), db.flatten(0, -2).sum(0)
"""


def _tiny(name: str, tree: str, package: str, example: str, adapt: tuple[Edit, ...]) -> Program:
    script = f"example/{example}/train.py"

    def prepare(folder: Path) -> None:
        beside(script)(folder)
        write(folder, {f"{package}/core/module/ops/layernorm.py": _NORM,
                       f"{package}/core/module/ops/utils.py": ""})  # fmt: skip
        for path in (folder / package).rglob("optim.py"):
            path.write_text(re.sub(r", device=self.param_part_table\[name\]", "", path.read_text()))

    return Program(
        name, tree, script, prepare=prepare,
        adapt=(
            *imports_on_cpu(script, "import sys"),
            *on_cpu("example/model.py", ("block_size: int", "block_size: int = 16"),
                    ("vocab_size: int", "vocab_size: int = 64"),
                    ("n_layer: int", "n_layer: int = 2"),
                    ("n_head: int", "n_head: int = 2"), ("n_embd: int", "n_embd: int = 32")),
            *adapt,
        ),
    )  # fmt: skip


def _sharded(stage: int) -> Program:
    script = f"example/zero{stage}/train.py"
    # As published, ranks begin with different weights, and gradients are added up, not averaged;
    # in stage 3 they are reduced nowhere.
    name = f"tiny-zero{stage}" + "-as-published" * (stage == 3)
    return _tiny(name, "Tiny-DeepSpeed", "tiny_deepspeed", f"zero{stage}", (
        *on_cpu(script, ("op=dist.ReduceOp.AVG", "dist.all_reduce(loss)"),
                ("for i in range(100):", "for i in range(26):"),
                ("optimizer = Zero", f"optimizer = Zero{stage}AdamW("
                 "model.module.named_parameters(), lr=1e-3, weight_decay=1e-1, "
                 "param_part_table=parts, ranks_map=ranks_map)"),
                ("model = GPT2Model(config).to", "torch.manual_seed(0)\n{line}")),
        *(edit(f"tiny_deepspeed/core/zero/zero{stage}/module.py", "def sync_grad(",
               "{line}\n    grad.div_(dist.get_world_size())") for _ in range(3 - stage)),
    ))  # fmt: skip


_GROUPS = "tiny_megatron/core/dist/utils/comm.py"
_TP = "example/tp/train.py"
# As published, patterns match no layer, a tensor-parallel group has one rank, ranks begin with
# different weights, and nothing clears the gradients.
_TP_AS_PUBLISHED = on_cpu(
    _TP, ("in tqdm(range(100))", "for i in range(26):"),
    ("optimizer = ",
     "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)"),
)  # fmt: skip
_TINY = (
    *(_sharded(stage) for stage in (2, 3)),
    _tiny("tiny-tp-as-published", "Tiny-Megatron", "tiny_megatron", "tp", _TP_AS_PUBLISHED),
    _tiny("tiny-tp", "Tiny-Megatron", "tiny_megatron", "tp", (
        *_TP_AS_PUBLISHED,
        *on_cpu(_TP, ("torch.manual_seed(rank)", "torch.manual_seed(0)"),
                ("column_linear_names=", 'column_linear_names=["*attn.c_attn", "*mlp.c_fc"],'),
                ("row_linear_names=", 'row_linear_names=["*attn.c_proj", "*mlp.c_proj"]'),
                ("optimizer.step()", "{line}\noptimizer.zero_grad()")),
        *on_cpu(_GROUPS, ("== coord_val:", "if True:"), ("== current_coord_in_dim:", "if True:"),
                ("== target_coord:", "if True:")),
    )),
)  # fmt: skip

# ------------------------------------------------------------------------ image-gpt, b967b24


def _for_image_gpt(folder: Path) -> None:
    beside("src/run.py", "torchvision")(folder)
    sizes = {"name": "tiny", "steps": 26, "warmup_steps": 4, "batch_size": 4, "embed_dim": 16,
             "accumulate_grad_batches": 2, "learning_rate": 3e-3, "num_heads": 2, "num_layers": 2,
             "num_pixels": 8, "num_vocab": 16, "classify": False, "precision": 32}  # fmt: skip
    write(folder, {"tiny.yml": json.dumps(sizes)})


_MODEL = "src/image_gpt.py"
_IMAGE_GPT = Program(
    "image-gpt", "image-gpt", "src/run.py", ("train", "tiny.yml"),
    needs=("pytorch_lightning", "yaml", "numpy"), prepare=_for_image_gpt,
    adapt=(
        *imports_on_cpu("src/run.py", "import pytorch_lightning"),
        edit("src/run.py", "gpus=config", 'accelerator="cpu", devices=2, '
             'strategy="ddp_find_unused_parameters_true", enable_progress_bar=False,', 1),
        edit("src/run.py", "checkpoint_callback=checkpoint", "max_epochs=-1,", 1),
        *on_cpu(_MODEL, ("torch.from_numpy(np", "torch.linspace(-2, 2, 16).view(16, 1), "
                         "requires_grad=False"),
                ("def validation_epoch_end", "def on_validation_epoch_end(self, outs=()):\n"
                 "    return"), ("def test_epoch_end", "def unused(self, outs):")),
        *on_cpu("src/data.py", ('"mnist":', '"mnist": lambda *_, train, **__: '
                '__import__("torchvision").Images(1, 8, None, 144 if train else 16),'),
                ('"fmnist":', ""), ("train_dl = DataLoader(", "train_dl = DataLoader(train_ds, "
                "shuffle=True, batch_size=batch_size)"),
                ("valid_dl = DataLoader(",
                 "valid_dl = DataLoader(valid_ds, batch_size=batch_size)")),
    ),
)  # fmt: skip

# ------------------------------------------------------------------------ language models

_SMALL = """\
import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import (
    GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast,
)

MARKS = {"pad_token": "[PAD]", "eos_token": "</s>", "bos_token": "<s>", "unk_token": "<unk>"}


def gpt2(*_, **__):
    torch.manual_seed(3)
    sizes = {"vocab_size": 100, "n_positions": 256, "n_embd": 16, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=2, eos_token_id=1, pad_token_id=0))


def llama():
    torch.manual_seed(3)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=100, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, bos_token_id=2, eos_token_id=1, pad_token_id=1))


def tokenizer(*_, **more):
    words = [*MARKS.values(), *map(chr, range(32, 126)), "\\n"]
    one = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, "<unk>"))
    one.pre_tokenizer = pre_tokenizers.Split(Regex("[\\\\s\\\\S]"), "isolated")
    size, side = more.get("model_max_length", 64), more.get("padding_side", "right")
    made = PreTrainedTokenizerFast(
        tokenizer_object=one, model_max_length=size, padding_side=side, **MARKS)
    made.chat_template = "{{ messages[1]['content'] }}"
    return made


class Rows(torch.utils.data.Dataset):
    def __init__(self, *_):
        pass

    def __len__(self):
        return 64

    def __getitem__(self, row):
        ids = [3 + (row * 5 + 3 * n) % 90 for n in range(10 + row % 5)]
        return {"input_ids": ids, "labels": [-100] * 3 + ids[3:]}


class Of:
    def __init__(self, make):
        self.from_pretrained = make


MODE = {"glm2": {"tokenizer": Of(tokenizer), "model": Of(gpt2), "dataset": Rows}}
"""


def with_small(script: str, **files: str) -> Callable[[Path], None]:
    return beside(script, data=lambda folder: write(folder, {"small.py": _SMALL, **files}))


def _glm(stage: int) -> Program:
    return Program(
        f"chatglm-zero{stage}", "ChatGLM-Finetuning", "train.py",
        ("--model_name_or_path=x", f"--ds_file=ds_zero{stage}_no_offload.json", "--train_type=all",
         "--per_device_train_batch_size=4", "--gradient_accumulation_steps=2",
         "--num_train_epochs=5", "--learning_rate=2e-3", "--show_loss_step=1", "--output_dir=out"),
        needs=("deepspeed", "transformers", "tensorboard"), prepare=with_small("train.py"),
        env=(("DS_ACCELERATOR", "cpu"), ("DS_BUILD_OPS", "0")), prints=r"loss: [0-9.]+",
        adapt=(
            *imports_on_cpu("train.py", "import argparse"),
            *on_cpu(
                "train.py",
                ("import deepspeed", "import os\nimport sys\nimport deepspeed\n"
                 "sys.modules['deepspeed.comm.torch'].build_shm_op = lambda: None"),
                ("from utils import DataCollator", "{line}\nsave_model = lambda *_, **__: None"),
                ("from peft", ""), ("from model import MODE", "from small import MODE"),
                ("args = parse_args()", "{line}\nargs.local_rank = int(os.environ['LOCAL_RANK'])"),
                ('device = torch.device("cuda", args', 'device = "cpu"'),
                ("ds_config = json.load(fh)", "{line}\nds_config['fp16']['enabled'] = False\n"
                 f"ds_config['zero_optimization'] = {{'stage': {stage}}}\n"
                 "ds_config['optimizer']['params']['torch_adam'] = True"),
            ),
        ),
    )  # fmt: skip


_ALPACA = Program(
    "alpaca", "stanford_alpaca", "train.py",
    ("--data_path=data.json", "--output_dir=out", "--num_train_epochs=4", "--save_strategy=no",
     "--per_device_train_batch_size=2", "--gradient_accumulation_steps=2", "--learning_rate=2e-3",
     "--warmup_steps=2", "--lr_scheduler_type=cosine", "--logging_steps=1", "--use_cpu=True",
     "--model_max_length=240", "--report_to=none"),
    needs=("transformers", "accelerate"), prints=r"'loss': '?[0-9.]+",
    prepare=with_small("train.py", **{"data.json": json.dumps([
        {"instruction": "add " + "xyz"[row % 3:], "input": "", "output": "abcdefgh"[row % 5:] * 2}
        for row in range(48)])}),
    adapt=on_cpu(
        "train.py",
        ("model = transformers.Auto", "import small\nmodel = small.gpt2("),
        ("tokenizer = transformers.Auto", "tokenizer = small.tokenizer("),
        ("import utils", "import json\nimport types\n"
         "utils = types.SimpleNamespace(jload=lambda path: json.load(open(path)))"),
        ("trainer = Trainer(", "trainer = Trainer(model=model, processing_class=tokenizer, "
         "args=training_args, **data_module)"),
    ),
)  # fmt: skip

_GRPO = Program(
    "tiny-grpo", "tiny-grpo", "train.py", launcher="python", needs=("transformers",),
    prints=r"grad_norm= *[0-9.]+",
    prepare=with_small("train.py", **{"data/math_tasks.jsonl": "\n".join(
        json.dumps({"question": f"{row}+{row % 7}=", "answer": str(row + row % 7), "num_terms": 2,
                    "num_digits": 2}) for row in range(10, 34))}),
    adapt=(
        *imports_on_cpu("train.py", "from collections.abc"),
        *on_cpu(
            "train.py",
            ("import wandb", "from unittest.mock import MagicMock\nwandb = MagicMock()"),
            ("tokenizer = AutoTokenizer", "import small\nreturn small.llama(), small.tokenizer()"),
            ("returns[i] = reward", "returns[i] = len(set(completion)) / 10"),
            ('torch.device("cuda"', 'device = torch.device("cpu")'),
            ("checkpoint_path = Path", "checkpoint_path = None"),
            ("train_batch_size = 16", "train_batch_size = 4"), ("lr = 5e-6", "lr = 1e-3"),
            ("group_size = 12", "group_size = 4"),
            ("rollouts_per_step = 32", "rollouts_per_step = 4"),
            ("max_length = 1024", "max_length = 24"),
        ),
    ),
)  # fmt: skip

# ------------------------------------------------------------------------ lingua, 437d680

_GPU = """\
from types import SimpleNamespace

import torch
import wandb

class Event:
    def __init__(self, **_):
        pass

    def record(self):
        pass

    def elapsed_time(self, _):
        return 1.0


torch.cuda.Event = Event


class GPUMemoryMonitor:
    device_name = device_index = ""
    device_capacity_gib = 1.0

    def __init__(self, _):
        pass

    reset_peak_stats = lambda self: None

    def get_peak_stats(self):
        return SimpleNamespace(max_active_pct=0.0, power_draw=0.0, _asdict=dict)
"""
_CONFIG = {
    "dump_dir": "out", "name": "tiny", "steps": 26, "seed": 7, "grad_acc_steps": 2,
    "optim": {"lr": 3e-3, "warmup": 4, "clip": 1.0},
    "distributed": {"fsdp_type": "full_shard", "model_dtype": "fp32", "dp_shard": 2,
                    "spawn_method": "fork"},
    "model": {"dim": 32, "n_layers": 2, "n_heads": 2, "multiple_of": 16},
    "data": {"root_dir": "data", "sources": {"made": 1.0}, "batch_size": 2, "seq_len": 16,
             "load_async": False, "prefetch_size": 4, "tokenizer": {"name": "bytes"}},
    "checkpoint": {"dump": {"every": 1000}, "eval": {"every": 1000}},
    "logging": {"freq": 1},
}  # fmt: skip
_LINGUA_TRAIN = "apps/main/train.py"


def _for_lingua(folder: Path) -> None:
    beside(_LINGUA_TRAIN)(folder)
    rows = [json.dumps({"text": "".join(chr(97 + (row * 7 + 3 * n) % 26) for n in range(40))})
            for row in range(400)]  # fmt: skip
    write(folder, {
        "tiny_gpu.py": _GPU, "tiny.yaml": json.dumps(_CONFIG), "xformers/__init__.py": "",
        "xformers/ops.py": "fmha = None\nclass AttentionBias: pass\n",
        "xformers/profiler.py": "MemSnapshotsProfiler = PyTorchProfiler = object\n",
        "sentencepiece.py": "SentencePieceProcessor = None\n",
        "data/.keep": "", "data/made/made.chunk.00.jsonl": "\n".join(rows[:200]),
        "data/made/made.chunk.01.jsonl": "\n".join(rows[200:]),
    })  # fmt: skip


_LINGUA = Program(
    "lingua", "lingua", _LINGUA_TRAIN, ("config=tiny.yaml",),
    needs=("omegaconf", "tiktoken", "numpy"), prepare=_for_lingua, env=(("PYTHONPATH", "."),),
    adapt=(
        *imports_on_cpu(_LINGUA_TRAIN, "from copy import"),
        *on_cpu(_LINGUA_TRAIN, ('to_empty(device="cuda")', 'model = model.to_empty(device="cpu")'),
                ("with torch.random.fork_rng(", "with torch.random.fork_rng(devices=[]):"),
                ("    GPUMemoryMonitor,", ""),
                ("import wandb", "import wandb\nfrom tiny_gpu import GPUMemoryMonitor")),
        *on_cpu("lingua/distributed.py", ("torch.ops.xformers_flash.flash_fwd", ""),
                ('init_device_mesh("cuda"', 'return init_device_mesh("cpu", mesh_shape=dims, '
                 "mesh_dim_names=names)"),
                ("dist.all_reduce(tensor, op=ReduceOp.AVG", "dist.all_reduce(tensor)")),
    ),
)  # fmt: skip

THIRD_SILENT_PROGRAMS = (
    _MAKEMORE, _TACOTRON, _LORA, _IJEPA, _STYLEGAN, *_TINY, _IMAGE_GPT, _glm(2), _glm(3), _ALPACA,
    _GRPO, _LINGUA,
)  # fmt: skip
