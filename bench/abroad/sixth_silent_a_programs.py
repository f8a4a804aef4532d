"""The programs of the first half of the sixth round of silent faults, and how each is started on
CPU ranks. They run unmodified but for the edits here, which remove GPUs, downloads and size, and
repair what is silently wrong in a program as published, where `sixth_silent_a_round` says so."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from bench.abroad.cases import edit
from bench.abroad.programs import Program, on_cpu
from bench.abroad.quiet_programs import beside, imports_on_cpu
from bench.abroad.silent_programs import write

# ---------------------------------------------------------------- guided-diffusion, 22e0df81

_MPI = """\
import os


class MPI:
    class COMM_WORLD:
        def Get_rank():
            return int(os.environ["RANK"])

        def Get_size():
            return int(os.environ["WORLD_SIZE"])
"""
_BLOBS = """\
from os import listdir
from os.path import dirname, exists, isdir, join

BlobFile = open
"""
# A checkpoint after six steps, from which the program resumes.
_FIRST = """\
import os

import torch

from guided_diffusion.script_util import create_model_and_diffusion, model_and_diffusion_defaults

torch.manual_seed(3)
sizes = dict(image_size=16, num_channels=32, num_res_blocks=1, channel_mult="1,2", num_heads=2,
             attention_resolutions="8")
model, _ = create_model_and_diffusion(**model_and_diffusion_defaults() | sizes)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
for _ in range(6):
    for p in model.parameters():
        p.grad = 0.01 * torch.randn_like(p)
    optimizer.step()
os.mkdir("out")
torch.save(model.state_dict(), "out/model000006.pt")
torch.save(model.state_dict(), "out/ema_0.9_000006.pt")
torch.save(optimizer.state_dict(), "out/opt000006.pt")
"""
_DIFFUSION = "scripts/image_train.py"


def _for_guided(folder: Path) -> None:
    beside(_DIFFUSION)(folder)
    stubs = {"mpi4py/__init__.py": _MPI, "blobfile.py": _BLOBS, "first.py": _FIRST}
    write(folder, stubs)
    (folder / "images").mkdir()
    for row in range(32):  # of a format that Pillow knows by its first bytes
        pixels = bytes((row * 37 + n * n * (1 + row % 5)) % 256 for n in range(16 * 16 * 3))
        (folder / f"images/{row:02}.png").write_bytes(b"P6 16 16 255\n" + pixels)
    subprocess.run([sys.executable, "first.py"], cwd=folder, check=True)


_TRAIN_UTIL = "guided_diffusion/train_util.py"
_GUIDED = Program(
    "guided-diffusion", "guided-diffusion", _DIFFUSION,
    ("--data_dir=images", "--image_size=16", "--num_channels=32", "--num_res_blocks=1",
     "--channel_mult=1,2", "--num_heads=2", "--attention_resolutions=8", "--use_checkpoint=True",
     "--lr=1e-3", "--batch_size=8", "--microbatch=4", "--ema_rate=0.9", "--lr_anneal_steps=22",
     "--log_interval=2", "--save_interval=100", "--resume_checkpoint=out/model000006.pt"),
    needs=("numpy", "PIL"), prints=r"loss +\| [0-9.]+", prepare=_for_guided,
    env=(("PYTHONPATH", "."), ("OPENAI_LOGDIR", "out"), ("OPENAI_LOG_FORMAT", "stdout")),
    adapt=(
        *imports_on_cpu(_DIFFUSION, "import argparse"),
        *on_cpu(
            _DIFFUSION,
            ("logger.configure()", "{line}\nimport random\nimport numpy\nimport torch\n"
             "for draw in (random.seed, numpy.random.seed, torch.manual_seed):\n"
             "    draw(10 + torch.distributed.get_rank())"),
        ),
        *on_cpu(
            "guided_diffusion/dist_util.py",
            ("if dist.is_initialized():", 'dist.init_process_group("gloo")\nif True:'),
            # As published, only rank 0 takes part in the broadcasts of a checkpoint.
            ("chunk_size = 2 ** 30", "return th.load(path, **kwargs)"),
        ),
        *on_cpu("guided_diffusion/logger.py", ('for varname in ["PMI', 'for varname in ["RANK"]:')),
        edit("guided_diffusion/image_datasets.py", "shuffle=True, num_workers=1",
             "dataset, batch_size=batch_size, shuffle=True, num_workers=0, drop_last=True"),
        edit(_TRAIN_UTIL, "if th.cuda.is_available():", "if True:"),
        # As published, gradients of the micro-batches are added up (openai/guided-diffusion#111).
        edit(_TRAIN_UTIL, "self.mp_trainer.backward(loss)",
             "self.mp_trainer.backward(loss * len(micro) / len(batch))"),
    ),
)  # fmt: skip

# ---------------------------------------------------------------------------- U-ViT, ce551708

_CONFIGS = """\
class ConfigDict(dict):
    __getattr__, __setattr__ = dict.__getitem__, dict.__setitem__
    to_dict = dict


FrozenConfigDict = ConfigDict
"""
_FLAGS = """\
from absl import flags


def DEFINE_config_file(name, *_, **__):
    flags.DEFINE_string(name, None, "")
"""
_IMAGES = """\
import torch


class Images(torch.utils.data.Dataset):
    data_shape, fid_stat = (3, 8, 8), "images.py"

    def get_split(self, split, labeled):
        return self

    def unpreprocess(self, images):
        return images

    def __len__(self):
        return 64

    def __getitem__(self, row):
        return torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(row))
"""
_UVIT_RUN = """\
import on_cpu
from ml_collections import ConfigDict

from train import train

train(ConfigDict(
    seed=1234, pred="noise_pred", grad_clip=0.5, ema_rate=0.9, hparams="x", workdir="work",
    ckpt_root="work/ckpts", sample_dir="work/samples",
    train=ConfigDict(n_steps=20, batch_size=8, mode="uncond", log_interval=2, eval_interval=100,
                     save_interval=100),
    optimizer=ConfigDict(name="adamw", lr=2e-3, weight_decay=0.03, betas=(0.9, 0.999)),
    lr_scheduler=ConfigDict(name="customized", warmup_steps=10),
    nnet=ConfigDict(name="uvit", img_size=8, patch_size=2, embed_dim=32, depth=2, num_heads=2,
                    mlp_ratio=2, qkv_bias=False, mlp_time_embed=False, num_classes=-1),
    dataset=ConfigDict(name="cifar10"),
    sample=ConfigDict(sample_steps=2, n_samples=4, mini_batch_size=2, path="",
                      algorithm="euler_maruyama_sde"),
))
"""


def _for_uvit(folder: Path) -> None:
    beside("go.py")(folder)
    # accelerate would import it for the library of this name.
    (folder / "datasets.py").unlink()
    nothing = "def save_image(*_):\n    pass\n\n\nmake_grid = save_image\n"
    write(folder, {
        "go.py": _UVIT_RUN, "images.py": _IMAGES, "ml_collections/__init__.py": _CONFIGS,
        "ml_collections/config_flags.py": _FLAGS, "torchvision/__init__.py": "",
        "torchvision/utils.py": nothing,
    })  # fmt: skip


_UVIT = Program(
    "u-vit", "U-ViT", "go.py", needs=("accelerate", "absl", "einops", "numpy", "tqdm"),
    prints=r"'loss': '[0-9.]+'", env=(("ACCELERATE_USE_CPU", "true"),),
    prepare=_for_uvit,
    adapt=(
        *on_cpu(
            "train.py",
            ("from datasets import", "import images"), ("from tools.fid_score", ""),
            ("import wandb", "from unittest.mock import MagicMock\nwandb = MagicMock()"),
            ("dataset = get_dataset(", "dataset = images.Images()"),
            ("num_workers=8, pin_memory=True", "num_workers=0)"),
            ("_fid = calculate_fid", "_fid = 0"),
            ("n_samples=10000, sample_steps=50", "fid = eval_step(n_samples=4, sample_steps=2, "
             "algorithm='euler_maruyama_sde')"),
            ("logging.info(utils.dct2str(", "print(utils.dct2str(dict(**metrics)))"),
        ),
    ),
)  # fmt: skip

# -------------------------------------------------------------------- FlagEmbedding, 7ed43d67

_BERT = {
    "model_type": "bert", "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "intermediate_size": 64, "max_position_embeddings": 64,
}  # fmt: skip
_EMBED_RUN = """\
import on_cpu
from FlagEmbedding.finetune.embedder.encoder_only.base.__main__ import main

main()
"""


def _for_embedder(folder: Path) -> None:
    beside("go.py")(folder)

    def text(start: int, count: int) -> str:
        return " ".join(f"w{(start * 7 + n * n) % 59}" for n in range(count))

    rows = (
        {"query": text(row, 4 + row % 4), "pos": [text(row, 9 + row % 5)],
         "neg": [text(row + other, 8 + row % 6) for other in (3, 11, 19)]}
        for row in range(64)
    )  # fmt: skip
    words = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{n}" for n in range(59)))
    write(folder, {
        "go.py": _EMBED_RUN, "FlagEmbedding/__init__.py": "",
        "pairs.jsonl": "\n".join(map(json.dumps, rows)), "tiny/config.json": json.dumps(_BERT),
        "tiny/vocab.txt": "\n".join(words),
        "tiny/tokenizer_config.json": '{"tokenizer_class": "BertTokenizer"}',
    })  # fmt: skip


_RUNNER = "FlagEmbedding/finetune/embedder/encoder_only/base/runner.py"
_EMBEDDER = Program(
    "flag-embedding", "FlagEmbedding", "go.py",
    ("--model_name_or_path=tiny", "--train_data=pairs.jsonl", "--cache_path=cache",
     "--train_group_size=4", "--query_max_len=16", "--passage_max_len=24", "--output_dir=out",
     "--use_cpu=True", "--per_device_train_batch_size=4", "--gradient_accumulation_steps=2",
     "--num_train_epochs=4", "--learning_rate=2e-3", "--warmup_steps=3", "--logging_steps=1",
     "--save_strategy=no", "--report_to=none", "--negatives_cross_device=True",
     "--temperature=0.05", "--max_grad_norm=20", "--dataloader_drop_last=True"),
    needs=("accelerate", "datasets", "transformers"), prints=r"'loss': '?[0-9.]+",
    prepare=_for_embedder,
    adapt=(
        edit(_RUNNER, "base_model = AutoModel.from_pretrained(", "base_model = (lambda name, **_: "
             "AutoModel.from_config(AutoConfig.from_pretrained(name)))("),
        edit("FlagEmbedding/finetune/embedder/encoder_only/base/trainer.py",
             "if self.tokenizer is not None", "if False:"),
    ),
)  # fmt: skip

# ----------------------------------------------------------------------- PyTorch-VAE, a6896b94

_TINY = """\
model_params: {name: VanillaVAE, in_channels: 3, latent_dim: 8, hidden_dims: [4, 8, 16, 32, 64]}
data_params: {data_path: x, train_batch_size: 4, val_batch_size: 8, patch_size: 64}
exp_params: {LR: 0.005, weight_decay: 0.0, scheduler_gamma: 0.95, kld_weight: 0.02,
             manual_seed: 1265}
trainer_params: {accelerator: cpu, devices: 2, max_epochs: 3, accumulate_grad_batches: 2,
                 enable_progress_bar: false}
logging_params: {save_dir: logs, name: VanillaVAE}
"""
_TRANSFORMS = """\
import torch


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return lambda *_, **__: torch.nn.Identity()
"""
_FACES = """\
import torch


class CelebA(torch.utils.data.Dataset):
    def __init__(self, root, split, **_):
        self.count = 96 if split == "train" else 16

    def __len__(self):
        return self.count

    def __getitem__(self, row):
        return torch.rand(3, 64, 64, generator=torch.Generator().manual_seed(row)), row % 10
"""


def _for_vae(folder: Path) -> None:
    write(folder, {
        "tiny.yaml": _TINY, "torchvision/__init__.py": "", "torchvision/transforms.py": _TRANSFORMS,
        "torchvision/models.py": "def __getattr__(name):\n    return None\n",
        "torchvision/utils.py": "def save_image(*_, **__):\n    pass\n",
        "torchvision/datasets/__init__.py": _FACES,
        "torchvision/datasets/folder.py": "default_loader = None\n",
    })  # fmt: skip


_VAE = Program(
    "pytorch-vae", "PyTorch-VAE", "run.py", ("--config=tiny.yaml",), launcher="python",
    needs=("pytorch_lightning", "tensorboard", "yaml", "numpy"), prints=r"val_loss [0-9.]+",
    prepare=_for_vae,
    adapt=(
        *on_cpu(
            "run.py",
            ("from pytorch_lightning.utilities.seed", "from pytorch_lightning import "
             "seed_everything"),
            ("import DDPPlugin", "from pytorch_lightning.strategies import DDPStrategy as "
             "DDPPlugin"),
            ("data = VAEDataset(", 'data = VAEDataset(**config["data_params"])'),
            ("runner.fit(", "{line}\nprint('val_loss', "
             "float(runner.callback_metrics['val_loss']))"),
        ),
        # Lightning 2 refuses a step with this argument.
        *on_cpu("experiment.py", ("def training_step(", "def training_step(self, batch, "
                "batch_idx):\n    optimizer_idx = 0")),
        *on_cpu("models/vanilla_vae.py", ("result = result.view(-1, 512",
                "result = result.view(-1, 64, 2, 2)")),
    ),
)  # fmt: skip

SIXTH_SILENT_A_PROGRAMS = (_GUIDED, _UVIT, _EMBEDDER, _VAE)
