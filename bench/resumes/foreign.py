"""``python -m bench.resumes.foreign CHECKOUTS OUT``: three public programs that save and resume,
as they are, repaired, and repaired with one fault. It writes the programs and their commands.

CHECKOUTS has llama2.c 350e04f, nerf-pytorch 63a5a63 and pytorch-cifar100 11d8418.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import numpy as np
from PIL import Image

Edits = list[tuple[str, str]]
STAND_IN = Path(__file__).parents[1] / "abroad" / "scripts" / "stand_ins" / "torchvision.py"

LLAMA: Edits = [
    ("GradScaler(enabled", 'GradScaler("cpu", enabled'),
    ("torch.cuda.amp", "torch.amp"),
]
SKIPS: Edits = [
    (
        "X, Y = next(train_batch_iter)  # fetch the very first batch\n",
        "X, Y = next(train_batch_iter)\n"
        "for _ in range(iter_num * gradient_accumulation_steps):\n"
        "    X, Y = next(train_batch_iter)\n",
    )
]
STORIES: Edits = [
    ("from tokenizer import Tokenizer\n", ""), ("import sentencepiece as spm\n", ""),
    ("import requests\n", ""), ("pin_memory=True", "pin_memory=False"),
]  # fmt: skip
NERF: Edits = [
    (
        "torch.set_default_tensor_type('torch.cuda.FloatTensor')",
        "np.random.seed(0); torch.manual_seed(0)",
    ),
    ("ckpt = torch.load(ckpt_path)", "ckpt = torch.load(ckpt_path, weights_only=False)"),
    ("N_iters = 200000 + 1", "N_iters = 16"),
]
RESTORES: Edits = [
    (
        "'global_step': global_step,",
        "'global_step': global_step + 1, 'numpy': np.random.get_state(),\n"
        "                'torch': torch.get_rng_state(),",
    ),
    (
        "    start = start + 1\n    for i",
        "    if start:\n"
        "        folder = os.path.join(basedir, expname)\n"
        "        last = sorted(f for f in os.listdir(folder) if 'tar' in f)[-1]\n"
        "        kept = torch.load(os.path.join(folder, last), weights_only=False)\n"
        "        np.random.set_state(kept['numpy']); torch.set_rng_state(kept['torch'])\n"
        "    start = start + 1\n    for i",
    ),
]
CIFAR: Edits = [
    (
        "from torch.utils.tensorboard import SummaryWriter\n",
        "class SummaryWriter:\n    def __init__(self, **_): pass\n"
        "    def __getattr__(self, _): return lambda *a, **k: None\n",
    ),
    ("num_workers=4", "num_workers=0"),
    (
        "    args = parser.parse_args()\n",
        "    parser.add_argument('-out', required=True)\n    args = parser.parse_args()\n"
        "    settings.CHECKPOINT_PATH = os.path.join(args.out, 'checkpoint')\n"
        "    settings.LOG_DIR = os.path.join(args.out, 'runs')\n"
        "    os.makedirs(args.out, exist_ok=True)\n"
        "    torch.manual_seed(0); np.random.seed(0)\n",
    ),
]
WHOLE: Edits = [
    (
        "torch.save(net.state_dict(), weights_path)",
        "torch.save({'net': net.state_dict(), 'optimizer': optimizer.state_dict(), "
        "'warm': warmup_scheduler.state_dict(), 'rng': torch.get_rng_state()}, weights_path)",
    ),
    (
        "        net.load_state_dict(torch.load(weights_path))\n\n        resume_epoch",
        "        kept = torch.load(weights_path)\n        net.load_state_dict(kept['net'])\n\n"
        "        resume_epoch",
    ),
    (
        "        train(epoch)\n",
        "        if args.resume and epoch == resume_epoch + 1:\n"
        "            warmup_scheduler.load_state_dict(kept['warm'])\n"
        "            torch.set_rng_state(kept['rng'])\n"
        "            rates = [group['lr'] for group in optimizer.param_groups]\n"
        "            optimizer.load_state_dict(kept['optimizer'])\n"
        "            for group, rate in zip(optimizer.param_groups, rates): group['lr'] = rate\n"
        "        train(epoch)\n",
    ),
]
SMALL = {
    "conf/global_settings.py": [
        ("EPOCH = 200", "EPOCH = 4"),
        ("SAVE_EPOCH = 10", "SAVE_EPOCH = 1"),
    ],
    "utils.py": [("torchvision.datasets.CIFAR100(", "torchvision.datasets.CIFAR10(")],
}
# Name -> checkout, file, edits of it; other files' edits.
PROGRAMS: dict[str, tuple[str, str, Edits, dict[str, Edits]]] = {
    "llama-published": ("llama2.c", "train.py", LLAMA, {"tinystories.py": STORIES}),
    "llama-healthy": ("llama2.c", "train.py", LLAMA + SKIPS, {"tinystories.py": STORIES}),
    "llama-moments": (
        "llama2.c", "train.py",
        [*LLAMA, *SKIPS, ('"optimizer" in checkpoint', '"optim" in checkpoint')],
        {"tinystories.py": STORIES},
    ),
    "nerf-published": ("nerf-pytorch", "run_nerf.py", NERF, {}),
    "nerf-healthy": ("nerf-pytorch", "run_nerf.py", NERF + RESTORES, {}),
    "nerf-ahead": (
        "nerf-pytorch", "run_nerf.py",
        [*NERF, *RESTORES, ("global_step + 1, 'numpy'", "global_step + 2, 'numpy'")], {},
    ),
    "cifar-published": ("pytorch-cifar100", "train.py", CIFAR, SMALL),
    "cifar-healthy": ("pytorch-cifar100", "train.py", CIFAR + WHOLE, SMALL),
    "cifar-moments": (
        "pytorch-cifar100", "train.py",
        [
            *CIFAR, *WHOLE, ("'optimizer': optimizer.state_dict(), ", ""),
            ("            optimizer.load_state_dict(kept['optimizer'])\n", ""),
        ],
        SMALL,
    ),
}  # fmt: skip
COMMANDS = {
    "llama": (
        "python train.py --out_dir={dir} --device=cpu --dtype=float32 --compile=False --dim=32 "
        "--n_layers=2 --n_heads=2 --n_kv_heads=2 --max_seq_len=32 --batch_size=2 "
        "--gradient_accumulation_steps=2 --eval_iters=2 --eval_interval=3 "
        "--always_save_checkpoint=True --warmup_iters=4 --max_iters=9",
        " --init_from=resume",
    ),
    "nerf": (
        "python run_nerf.py --expname e --basedir {dir} --datadir scene --dataset_type blender "
        "--no_batching --N_rand 16 --N_samples 8 --N_importance 8 --use_viewdirs --netwidth 16 "
        "--netwidth_fine 16 --netdepth 6 --netdepth_fine 6 --i_weights 3 --i_video 1000 "
        "--i_testset 1000 --i_print 1000 --lrate_decay 1",
        "",
    ),
    "cifar": ("python train.py -net squeezenet -b 64 -out {dir}", " -resume"),
}


def written(checkouts: Path, out: Path, name: str) -> None:
    """Writes the program ``name``; raises SystemExit where an edit does not fit."""
    source, file, edits, others = PROGRAMS[name]
    target = out / name
    shutil.copytree(checkouts / source, target)
    for place, pairs in {file: edits, **others}.items():
        text = (target / place).read_text()
        for old, new in pairs:
            if old not in text:
                raise SystemExit(f"{name}: {place} has no {old!r}")
            text = text.replace(old, new)
        (target / place).write_text(text)
    draw = np.random.default_rng(0)
    if source == "llama2.c":
        stories = target / "data" / "TinyStories_all_data"
        stories.mkdir(parents=True)
        for number in range(3):
            draw.integers(0, 32000, 4000).astype(np.uint16).tofile(stories / f"data{number}.bin")
    elif source == "nerf-pytorch":
        for loader in ("load_LINEMOD.py", "load_blender.py"):
            text = (target / loader).read_text()
            (target / loader).write_text(text.replace("import cv2\n", ""))
        for split, count in (("train", 4), ("val", 1), ("test", 1)):
            _views(target / "scene", split, count, draw)
    else:
        shutil.copy(STAND_IN, target / "torchvision.py")


def _views(scene: Path, split: str, count: int, draw: np.random.Generator) -> None:
    (scene / split).mkdir(parents=True)
    frames = []
    for number in range(count):
        pixels = draw.integers(0, 255, (16, 16, 4)).astype(np.uint8)
        Image.fromarray(pixels).save(scene / split / f"r_{number}.png")
        s, c = np.sin(0.5 * number), np.cos(0.5 * number)
        at = [[c, 0, s, 4 * s], [0, 1, 0, 0], [-s, 0, c, 4 * c], [0, 0, 0, 1]]
        path = f"./{split}/r_{number}"
        frames.append({"file_path": path, "rotation": 0.1, "transform_matrix": at})
    told = {"camera_angle_x": 0.7, "frames": frames}
    (scene / f"transforms_{split}.json").write_text(json.dumps(told))


def main() -> None:
    checkouts, out = map(Path, sys.argv[1:3])
    for name in PROGRAMS:
        written(checkouts, out, name)
        command, more = COMMANDS[name.partition("-")[0]]
        sys.stdout.write(
            f"cd {out / name} && moediag resume --resumed '{command}{more}' -- {command}\n"
        )


if __name__ == "__main__":
    main()
