"""The programs of the fifth round of silent faults, and how each is started on CPU ranks. They run
unmodified but for the edits here, which remove GPUs, downloads and size, and repair what is
silently wrong in a program as published, where `fifth_silent_round` says so."""

from __future__ import annotations

from bench.abroad.programs import Program, on_cpu
from bench.abroad.quiet_programs import beside, imports_on_cpu
from bench.abroad.silent_programs import write

# ----------------------------------------------------------- rectified-flow-pytorch, 26fbed94

_FLOW_RUN = """\
import on_cpu
import torch
from torch import nn

from rectified_flow_pytorch.rectified_flow import RectifiedFlow, Trainer


class Pictures(torch.utils.data.Dataset):
    def __len__(self):
        return 128

    def __getitem__(self, row):
        return torch.rand(3, 8, 8, generator=torch.Generator().manual_seed(row))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Conv2d(3, 12, 3, padding=1)
        self.clock = nn.Sequential(nn.Linear(1, 12), nn.SiLU(), nn.Linear(12, 12))
        self.norm = nn.GroupNorm(3, 12)
        self.middle = nn.Conv2d(12, 12, 3, padding=1)
        self.leave = nn.Conv2d(12, 3, 3, padding=1)

    def forward(self, x, times):
        x = self.enter(x) + self.clock(times[:, None])[..., None, None]
        x = x + self.middle(torch.relu(self.norm(x)))
        return self.leave(torch.relu(x))


torch.manual_seed(3)
trainer = Trainer(
    RectifiedFlow(Net(), use_consistency=True, consistency_decay=0.9, ema_update_after_step=2,
                  ema_kwargs={"update_every": 2}),
    dataset=Pictures(), num_train_steps=48, learning_rate=3e-3, batch_size=4, grad_accum_every=2,
    save_results_every=1000, checkpoint_every=1000, accelerate_kwargs={"cpu": True},
)
torch.manual_seed(3 + trainer.accelerator.process_index)
trainer()
"""
_FLOW = Program(
    "flow", "rectified-flow-pytorch", "go.py", prints=r"total: [0-9.]+",
    needs=("accelerate", "einops", "ema_pytorch", "scipy", "torchdiffeq", "PIL"),
    prepare=beside("go.py", data=lambda folder: write(folder, {
        "go.py": _FLOW_RUN, "einx.py": "", "x_transformers.py": "Encoder = None",
        "hyper_connections/__init__.py": "",
        "hyper_connections/hyper_connections_channel_first.py":
            "get_init_and_expand_reduce_stream_functions = Residual = None",
        "torchvision/__init__.py": "", "torchvision/transforms.py": "",
        "torchvision/utils.py": "save_image = None",
        "torchvision/models.py": "class VGG16_Weights:\n    DEFAULT = None",
        "rectified_flow_pytorch/__init__.py": ""})),
)  # fmt: skip

# ----------------------------------------------------------------------------- DiT, ed81ce22

_PICTURES = """\
from types import SimpleNamespace

import torch
from torch import nn


class Pictures(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, row):
        return torch.randn(4, 8, 8, generator=torch.Generator().manual_seed(row)), row % 10


class AutoencoderKL(nn.Module):
    @classmethod
    def from_pretrained(cls, _):
        return cls()

    def encode(self, x):
        return SimpleNamespace(latent_dist=SimpleNamespace(sample=x.clone))


class PatchEmbed(nn.Module):
    def __init__(self, size, patch, channels, width, bias):
        super().__init__()
        self.patch_size, self.num_patches = (patch, patch), (size // patch) ** 2
        self.proj = nn.Conv2d(channels, width, patch, stride=patch, bias=bias)

    def forward(self, x):
        return self.proj(x).flatten(2).transpose(1, 2)


class Attention(nn.Module):
    def __init__(self, width, num_heads, qkv_bias):
        super().__init__()
        self.heads, self.qkv = num_heads, nn.Linear(width, 3 * width, bias=qkv_bias)
        self.proj = nn.Linear(width, width)

    def forward(self, x):
        parts = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(*parts)
        return self.proj(mixed.transpose(1, 2).flatten(2))


class Mlp(nn.Sequential):
    def __init__(self, in_features, hidden_features, act_layer, drop):
        super().__init__(nn.Linear(in_features, hidden_features), act_layer(),
                         nn.Linear(hidden_features, in_features))
"""
_DIT = Program(
    "dit", "DiT", "train.py",
    ("--data-path=x", "--model=DiT-S/8", "--image-size=64", "--num-classes=10", "--epochs=3",
     "--global-batch-size=8", "--num-workers=0", "--log-every=4", "--ckpt-every=1000"),
    needs=("numpy", "PIL"), prints=r"Train Loss: [0-9.]+",
    prepare=beside("train.py", data=lambda folder: write(folder, {"pictures.py": _PICTURES})),
    adapt=(
        *imports_on_cpu("train.py", "import torch"),
        *on_cpu(
            "train.py",
            ("assert torch.cuda", ""), ("device = rank %", 'device = "cpu"'),
            ("from torchvision.datasets", "from pictures import AutoencoderKL, Pictures"),
            ("from torchvision import", "from unittest.mock import MagicMock\n"
             "transforms = MagicMock()"),
            ("from diffusers.models", ""), ("dataset = ImageFolder(", "dataset = Pictures()"),
            ('"--image-size"', 'parser.add_argument("--image-size", type=int)'),
        ),
        *on_cpu("models.py", ("from timm", "from pictures import PatchEmbed, Attention, Mlp"),
                ("hidden_size=384, patch_size=8", "return DiT(depth=2, hidden_size=32, "
                 "patch_size=2, num_heads=2, **kwargs)")),
    ),
)  # fmt: skip

# -------------------------------------------------------------------- FSDP-Training, b7a46352

_WORDS = """\
class AutoTokenizer:
    pad_token, vocab_size = "", 64

    @classmethod
    def from_pretrained(cls, _):
        return cls()

    def __call__(self, text, **_):
        return {"input_ids": [ord(one) % 64 for one in text]}


class Rows(list):
    def filter(self, keeps):
        return Rows(filter(keeps, self))


def load_dataset(*_, **__):
    return Rows({"text": "".join(chr(97 + (row * 7 + n * n) % 26) for n in range(16))}
                for row in range(64))
"""
_REAL = "train_fsdp_real.py"
_BLOCKS = Program(
    "fsdp-blocks", "FSDP-Training", _REAL,
    ("--epochs=3", "--batch_size=4", "--seq_len=16", "--log_interval=2", "--lr=3e-3"),
    needs=("numpy", "tqdm"), prints=r"Loss [0-9.]+",
    prepare=beside(_REAL, data=lambda folder: write(folder, {"tiny_words.py": _WORDS})),
    adapt=(
        *imports_on_cpu(_REAL),
        *on_cpu(
            _REAL, ("from datasets import", ""),
            ("from transformers import", "from tiny_words import AutoTokenizer, load_dataset"),
            ("num_workers=8,", "num_workers=0,"),
            ("dim=4096, n_layers=2", "dim=32, n_layers=2, n_heads=2, n_kv_heads=1, multiple_of=16,"
             " vocab_size=tokenizer.vocab_size"),
            # As published, the program reads options that it does not define.
            ("args = parser.parse_args()", "{line}\nargs.enable_ema, args.ema_decay, "
             "args.reshard_after_forward = True, 0.9, True"),
        ),
    ),
)  # fmt: skip

# ----------------------------------------------------------------- Pytorch_MoE_Train, f59d1bd6

_EP = "main_ep.py"
_MOE = Program(
    "moe-train", "Pytorch_MoE_Train", _EP, needs=("tensorboard", "numpy"), prepare=beside(_EP),
    prints=r"total=[0-9.]+",
    adapt=(
        *imports_on_cpu(_EP),
        *on_cpu(
            _EP, ("model = EPMoE(", "torch.manual_seed(100 + rank)\n{line}"),
            # As published, each rank fits a target of its own, and the gradients of experts are
            # sums over ranks, those of the gate averages.
            ("start_time = time.perf", "dist.broadcast(target_proj.weight, 0)\n"
             "torch.manual_seed(200 + rank)\n{line}"),
            ("total_loss.backward()", "{line}\nfor p in model.experts.parameters():\n"
             "    p.grad is None or p.grad.div_(world_size)"),
        ),
        *on_cpu("config_defaults.py", ("num_experts=", "num_experts=4,"),
                ("hidden_dim=", "hidden_dim=16,"), ("max_num_tokens=", "max_num_tokens=16,"),
                ('"steps":', '"steps": 32,'), ('"bsz":', '"bsz": 16,'), ('"lr":', '"lr": 5e-3,'),
                ('"log_interval":', '"log_interval": 4,')),
    ),
)  # fmt: skip

FIFTH_SILENT_PROGRAMS = (_FLOW, _DIT, _BLOCKS, _MOE)
