"""The programs of the second half of the sixth round of silent faults, and how each is started on
CPU ranks. They run unmodified but for the edits here, which remove GPUs, downloads and size, and
repair what is wrong in a program as published."""

from __future__ import annotations

from bench.abroad.programs import Program, on_cpu
from bench.abroad.quiet_programs import beside, imports_on_cpu
from bench.abroad.silent_programs import write

# ---------------------------------------------------------------- FixMatch-pytorch, 040be3b

_FIXMATCH = "train.py"
# CIFAR as arrays of random bytes, and transforms that make a tensor of an image and no more.
_CIFAR = """\
import sys
from types import ModuleType

import numpy as np
import torch
from PIL import Image


class CIFAR10(torch.utils.data.Dataset):
    def __init__(self, root, train=True, transform=None, target_transform=None, download=False):
        draw = np.random.RandomState(0 if train else 1)
        self.data = draw.randint(0, 256, (96 if train else 16, 16, 16, 3)).astype("uint8")
        self.targets = [row % 10 for row in range(len(self.data))]
        self.transform, self.target_transform = transform, target_transform

    def __len__(self):
        return len(self.data)

    def __getitem__(self, row):
        return self.transform(Image.fromarray(self.data[row])), self.targets[row]


def same(*_, **__):
    return lambda image: image


def to_tensor():
    return lambda image: torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255


def compose(parts):
    def apply(image):
        for part in parts:
            image = part(image)
        return image

    return apply


datasets, transforms = ModuleType("datasets"), ModuleType("transforms")
datasets.CIFAR10 = datasets.CIFAR100 = CIFAR10
transforms.Compose, transforms.ToTensor = compose, to_tensor
transforms.RandomHorizontalFlip = transforms.RandomCrop = transforms.Normalize = same
sys.modules["torchvision.datasets"], sys.modules["torchvision.transforms"] = datasets, transforms
"""
_FIXMATCH_PROGRAM = Program(
    "fixmatch", "FixMatch-pytorch", _FIXMATCH,
    ("--seed=5", "--num-labeled=40", "--expand-labels", "--total-steps=36", "--eval-step=12",
     "--batch-size=4", "--mu=2", "--num-workers=0", "--threshold=0.3", "--no-progress",
     "--lr=0.02", "--ema-decay=0.9"),
    needs=("numpy", "PIL", "tensorboard", "tqdm"), prints=r"loss [0-9.]+",
    prepare=beside(_FIXMATCH, data=lambda folder: write(folder, {"torchvision.py": _CIFAR})),
    adapt=(
        *imports_on_cpu(_FIXMATCH, "import argparse"),
        *on_cpu(
            _FIXMATCH,
            ('parser.add_argument("--local_rank"', 'parser.add_argument("--local_rank", type=int, '
             'default=int(os.environ["LOCAL_RANK"]),'),
            ("args.model_depth = 28", "args.model_depth = 10"),
            ("args.model_width = 2", "args.model_width = 1"),
            # As published, iterators have a method that no release of PyTorch has any more.
            ("inputs_x, targets_x = labeled_iter.next()", "inputs_x, targets_x = "
             "next(labeled_iter)"),
            ("inputs_x, targets_x = labeled_iter.next()", "inputs_x, targets_x = "
             "next(labeled_iter)"),
            ("(inputs_u_w, inputs_u_s), _ = unlabeled_iter.next()", "(inputs_u_w, inputs_u_s), "
             "_ = next(unlabeled_iter)"),
            ("(inputs_u_w, inputs_u_s), _ = unlabeled_iter.next()", "(inputs_u_w, inputs_u_s), "
             "_ = next(unlabeled_iter)"),
            ("test_accs.append(test_acc)", "{line}\nprint(f'loss {losses.avg:.6f}', flush=True)"),
        ),
    ),
)  # fmt: skip

SIXTH_SILENT_B_PROGRAMS = (_FIXMATCH_PROGRAM,)
