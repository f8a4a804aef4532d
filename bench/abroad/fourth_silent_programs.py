"""The programs of the fourth round of silent faults, and how each is started on CPU ranks. They run
unmodified but for the edits here, which remove GPUs, downloads and size, and repair what is
silently wrong in a program as published, where `fourth_silent_round` says so."""

from __future__ import annotations

import json
from pathlib import Path

from bench.abroad.cases import edit
from bench.abroad.programs import Program, on_cpu
from bench.abroad.quiet_programs import beside, imports_on_cpu
from bench.abroad.seventh_programs import TELLS
from bench.abroad.silent_programs import write
from bench.abroad.third_silent_programs import with_small

# ------------------------------------------------------------------------ glow-tts, 13e9976

_APEX = "class amp:\n    pass\n"
_PARALLEL = "from torch.nn.parallel import DistributedDataParallel\n"


def _for_glow(folder: Path) -> None:
    beside("train.py")(folder)
    config = json.loads((folder / "configs/base.json").read_text())
    config["train"] |= {"epochs": 2, "batch_size": 2, "warmup_steps": 20, "ddi": False,
                        "fp16_run": False, "log_interval": 4, "learning_rate": 0.05}  # fmt: skip
    config["data"] |= {"training_files": "rows.txt", "validation_files": "few.txt",
                       "text_cleaners": ["basic_cleaners"], "n_mel_channels": 8,
                       "cmudict_path": None}  # fmt: skip
    config["model"] |= {"hidden_channels": 16, "filter_channels": 16, "filter_channels_dp": 16,
                        "n_blocks_dec": 2, "n_layers_enc": 2, "n_block_layers": 2,
                        "hidden_channels_enc": 16, "hidden_channels_dec": 16}  # fmt: skip
    rows = (f"{row}|{'one more word'[row % 5 :]}" for row in range(24))
    write(folder, {
        "tiny.json": json.dumps(config), "rows.txt": "\n".join(rows), "few.txt": "1|one\n2|word",
        "apex/__init__.py": _APEX, "apex/parallel.py": _PARALLEL, "logs/.keep": "",
        "librosa/__init__.py": "stft = istft = None",
        "librosa/util.py": "tiny = normalize = pad_center = None",
        "librosa/filters.py": "mel = None", "unidecode.py": "unidecode = str",
        "inflect.py": "engine = dict",
        "monotonic_align/__init__.py": "from commons import maximum_path\n",
    })  # fmt: skip


_GLOW = Program(
    "glow-tts", "glow-tts", "train.py", ("--config=tiny.json", "--model=tiny"), launcher="python",
    needs=("numpy", "scipy", "tensorboard"), prepare=_for_glow, prints=r"Loss: [0-9.]+",
    adapt=(
        *imports_on_cpu("train.py"),
        *on_cpu("train.py", ("assert torch.cuda", ""), ("n_gpus = torch.cuda", "n_gpus = 2"),
                ("'80000'", "os.environ['MASTER_PORT'] = '29591'"),
                ("dist.init_process_group(", TELLS.replace("import builtins, os",
                                                           "import builtins")),
                ("train_loader = DataLoader(", "train_loader = DataLoader(train_dataset, "
                 "num_workers=0, shuffle=False,"),
                ("val_loader = DataLoader(",
                 "val_loader = DataLoader(val_dataset, num_workers=0, shuffle=False,")),
        *on_cpu("data_utils.py", ("self.stft = commons.Tac", "(lambda *_: None)("),
                ("mel = self.get_mel(audiopath)",
                 "draw = torch.Generator().manual_seed(int(audiopath))\n"
                 "mel = torch.randn(8, 24 + 2 * (int(audiopath) % 5), generator=draw)")),
        *on_cpu("commons.py", (".astype(np.bool)", "mask = mask.cpu().detach().numpy() > 0")),
        *on_cpu("utils.py", *2 * (("global MATPLOTLIB_FLAG",
                                  "return torch.zeros(2, 2, 3).numpy()"),)),
    ),
)  # fmt: skip

# ------------------------------------------------------------------------ byol-pytorch, 2993126

_BYOL_RUN = """\
import on_cpu
import torch

from byol_pytorch import BYOLTrainer


class Images(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, row):
        return torch.randn(3, 16, 16, generator=torch.Generator().manual_seed(row))


torch.manual_seed(3)
net = torch.nn.Sequential()
net.conv = torch.nn.Conv2d(3, 8, 3, stride=2)
net.norm = torch.nn.BatchNorm2d(8)
net.pool = torch.nn.AdaptiveAvgPool2d(2)
net.flat = torch.nn.Flatten()
net.head = torch.nn.Linear(32, 10)
trainer = BYOLTrainer(
    net, dataset=Images(), image_size=16, hidden_layer="flat", learning_rate=1e-3, batch_size=4,
    num_train_steps=32, checkpoint_every=100, accelerator_kwargs={"cpu": True},
    byol_kwargs={"projection_size": 8, "projection_hidden_size": 16, "sem_num_simplices": 4},
)
trainer()
"""
_TRANSFORMS = """\
import torch


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return lambda *_, **__: torch.nn.Identity()
"""
_BYOL = Program(
    "byol", "byol-pytorch", "go.py", needs=("accelerate", "beartype"), prints=r"loss [0-9.]+",
    prepare=beside("go.py", data=lambda folder: write(folder, {
        "go.py": _BYOL_RUN, "torchvision/__init__.py": "",
        "torchvision/transforms.py": _TRANSFORMS})),
    # As published, the wrapper is asked for the model's method, and the model that accelerate has
    # wrapped needs all parameters.
    adapt=(
        *on_cpu("byol_pytorch/trainer.py", (
            "self.byol.update_moving_average()",
            "self.accelerator.unwrap_model(self.byol).update_moving_average()")),
        edit("byol_pytorch/byol_pytorch.py", "return nn.SyncBatchNorm if", "return nn.BatchNorm1d"),
    ),
)  # fmt: skip

# ------------------------------------------------------------------------ Qwen, 2df8e8a


def _chat(row: int) -> dict[str, object]:
    said = (("user", "add " + "xyz"[row % 3 :]), ("assistant", "abcdefgh"[row % 5 :] * 2))
    return {"conversations": [{"from": who, "value": value} for who, value in said]}


_QWEN = Program(
    "qwen", "Qwen", "finetune.py",
    ("--model_name_or_path=x", "--data_path=data.json", "--output_dir=out", "--use_cpu=True",
     "--num_train_epochs=4", "--save_strategy=no", "--per_device_train_batch_size=2",
     "--gradient_accumulation_steps=2", "--learning_rate=2e-3", "--warmup_steps=2",
     "--lr_scheduler_type=cosine", "--logging_steps=1", "--model_max_length=120",
     "--report_to=none"),
    needs=("accelerate", "deepspeed", "transformers"), prints=r"'loss': '?[0-9.]+",
    env=(("DS_ACCELERATOR", "cpu"),),
    prepare=with_small("finetune.py", **{"data.json": json.dumps([_chat(n) for n in range(48)])}),
    adapt=on_cpu(
        "finetune.py",
        ("from transformers import Trainer", "from transformers import Trainer\n"
         "from transformers.integrations import deepspeed"),
        ("from peft import", "LoraConfig = GPTQConfig = None"),
        ("config = transformers.Auto", "import small\nconfig = "
         "(lambda *_, **__: small.gpt2().config)("),
        ("model = transformers.Auto", "model = small.gpt2("),
        ("tokenizer = transformers.Auto", "tokenizer = small.tokenizer("),
        ("tokenizer.pad_token_id = tokenizer.eod_id", "tokenizer.pad_token_id = 0\n"
         "tokenizer.im_start_id, tokenizer.im_end_id = 2, 1"),
        ("local_rank = training_args.local_rank", "local_rank = int(os.environ['LOCAL_RANK'])"),
        ("trainer.args.local_rank == 0", "if trainer.args.should_save:"),
        ("model=model, tokenizer=tokenizer",
         "model=model, processing_class=tokenizer, args=training_args, **data_module"),
    ),
)  # fmt: skip

# ------------------------------------------------------------------------ torchtnt, b83990d2

_TNT_RUN = "examples/auto_unit_example.py"
_TNT = Program(
    "tnt", "tnt", _TNT_RUN, ("--max-epochs=2", "--num-batches-per-epoch=256", "--batch-size=4",
                             "--input-dim=8"),
    needs=("numpy", "tensorboard", "torcheval", "tqdm", "fsspec", "psutil", "tabulate"),
    env=(("PYTHONPATH", "."),), prepare=beside(_TNT_RUN),
    adapt=(
        *imports_on_cpu(_TNT_RUN, "import argparse"),
        *on_cpu(
            _TNT_RUN,
            ("return nn.Linear(", "return nn.Sequential(nn.Linear(input_dim, 16), nn.ReLU(), "
             "nn.Linear(16, 1))"),
            # As published, all ranks train on the same samples.
            ("_generate_dataset(num_samples, ", "dataset := _generate_dataset(num_samples, "
             "input_dim),\nsampler=torch.utils.data.DistributedSampler(dataset),"),
            ("pet.elastic_launch(", "main(args)"),
        ),
    ),
)  # fmt: skip

# ------------------------------------------------------- distributed-training-guide, aed7489

_TP = "06-tensor-parallel/train_llm.py"
_GUIDE_TP = Program(
    "guide-tp", "distributed-training-guide", _TP,
    ("--experiment-name=x", "--dataset-name=x", "--model-name=x", "--save-dir=out",
     "--num-epochs=2", "--batch-size=4", "--log-freq=4", "--ckpt-freq=100", "--seq-length=16",
     "--lr=1e-3"),
    needs=("transformers", "tqdm"), prepare=beside(_TP), prints=r"'running_loss': [0-9.]+",
    adapt=on_cpu(
        _TP, ("import tqdm", "import on_cpu\nimport tqdm"), ("import datasets", ""),
        ('device = torch.device(f"cuda', 'device = torch.device("cpu")'),
        ('"cuda",', '"cpu",'),
        ("config = AutoConfig", "from transformers import LlamaConfig\nconfig = LlamaConfig("
         "vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, "
         "num_attention_heads=2, use_cache=False)"),
        ("config, dtype=dtype", 'config, dtype=torch.float32, attn_implementation="sdpa"'),
        ("model = model.to_empty(", ""), ("model.init_weights()", ""),
        ("lr=args.lr, fused=True", "optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)"),
        ("tokenizer = AutoTokenizer", "return [dict(input_ids=row, labels=row) for row in "
         "([(7 * n + 3 * m) % 64 for m in range(16)] for n in range(52))]"),
        ("torch.cuda.reset_peak", ""),
        ("mem = torch.cuda", "return {'curr_alloc_gb': 0}"),
    ),
)  # fmt: skip

# ------------------------------------------------------------------------ VideoGPT, 733d2b1

_VIDEO_RUN = """\
import on_cpu
from types import SimpleNamespace

import pytorch_lightning as pl
import torch

from videogpt.vqvae import VQVAE


class Videos(torch.utils.data.Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, row):
        draw = torch.Generator().manual_seed(row)
        return {"video": torch.rand(3, 4, 8, 8, generator=draw) - 0.5}


def main():
    pl.seed_everything(1234)
    args = SimpleNamespace(embedding_dim=8, n_codes=16, n_hiddens=8, n_res_layers=1,
                           downsample=(4, 4, 4), sequence_length=4, resolution=8)
    model = VQVAE(args)
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=3, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, accumulate_grad_batches=2,
    )
    trainer.fit(model, torch.utils.data.DataLoader(Videos(), batch_size=4, shuffle=True),
                torch.utils.data.DataLoader(Videos(), batch_size=8))
    print("recon", trainer.callback_metrics["val/recon_loss"])


main()
"""
_VIDEO = Program(
    "videogpt", "VideoGPT", "go.py", launcher="torchrun", needs=("pytorch_lightning", "numpy"),
    prints=r"recon tensor\([0-9.]+",
    prepare=beside("go.py", data=lambda folder: write(folder, {
        "go.py": _VIDEO_RUN, "videogpt/__init__.py": "", "skvideo/__init__.py": "",
        "skvideo/io.py": ""})),
    adapt=(edit("videogpt/vqvae.py", "self.save_hyperparameters()", ""),),
)  # fmt: skip

FOURTH_SILENT_PROGRAMS = (_GLOW, _BYOL, _QWEN, _TNT, _GUIDE_TP, _VIDEO)
