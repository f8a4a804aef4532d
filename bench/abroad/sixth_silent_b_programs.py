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

# --------------------------------------------------------------- fine-tune-mistral, c8c8ec1

_MISTRAL = "train.py"
_TINY_MISTRAL = """\
from types import SimpleNamespace

import torch
from transformers import MistralConfig, MistralForCausalLM


class Tokenizer:
    pad_token, eos_token, unk_token, pad_token_id = "<pad>", "~", "?", 0

    def __init__(self, *_, model_max_length, **__):
        self.model_max_length = model_max_length

    def __len__(self):
        return 64

    def __call__(self, text, **_):
        return SimpleNamespace(input_ids=torch.tensor([[1 + ord(one) % 63 for one in text]]))

    def add_special_tokens(self, _):
        pass

    def save_pretrained(self, _):
        pass


class Rows(dict):
    def filter(self, keeps, **_):
        kept = keeps(self)
        return Rows({key: [one for one, stays in zip(rows, kept) if stays]
                     for key, rows in self.items()})

    def map(self, made, **_):
        return Rows(made(self))


def load_dataset(*_, data_files, **__):
    count = 12 if "validation" in data_files[0] else 80
    said = ["".join(chr(97 + (row * 7 + n * n) % 26) for n in range(4 + row % 5))
            for row in range(count)]
    return Rows(instruction=said, output=[one[::-1] + one for one in said])


def tiny_config(*_, **__):
    return MistralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256)


def tiny_model(*_, config, torch_dtype, **__):
    return MistralForCausalLM(config).to(torch_dtype)


def init(**_):
    pass


def log(said):
    print(*(f"{name} {value:.6f}" for name, value in said.items()), flush=True)
"""
_MISTRAL_PROGRAM = Program(
    "mistral-fsdp", "fine-tune-mistral", _MISTRAL, needs=("numpy", "transformers", "tqdm"),
    prints=r"current_loss [0-9.]+", env=(("HF_TOKEN", "x"),),
    prepare=beside(_MISTRAL, data=lambda folder: write(folder, {
        "tiny_mistral.py": _TINY_MISTRAL, "numba.py": "def njit(what):\n    return what\n",
        "dotenv.py": "def load_dotenv():\n    pass\n"})),
    adapt=(
        *imports_on_cpu(_MISTRAL, "import random"),
        *on_cpu(
            _MISTRAL,
            ("import wandb", "import tiny_mistral as wandb\n"
             "from tiny_mistral import Tokenizer, tiny_config, tiny_model"),
            ("config = transformers.AutoConfig", "config = tiny_config("),
            ("model = transformers.AutoModel", "model = tiny_model("),
            ("tokenizer = transformers.AutoTok", "tokenizer = Tokenizer("),
            # As published, its weights of 16 bits lose most updates of so small a rate.
            ("torch_dtype=torch.bfloat16", "torch_dtype=torch.float32,"),
            ("device_id=torch.cuda", 'device_id=torch.device("cpu"),'),
            # FSDP gathers no weights on CPUs to save them.
            ("def save_model(", "def save_model(*_):\n    pass\n\n\ndef gathered(local_rank, "
             "model, tokenizer, outpath, current_epoch, current_step):"),
            ("param_dtype=torch.bfloat16", "param_dtype=torch.float32,"),
            ("reduce_dtype=torch.bfloat16", "reduce_dtype=torch.float32,"),
            ("buffer_dtype=torch.bfloat16", "buffer_dtype=torch.float32,"),
            ("epochs = 3", "epochs = 2"),
            ("max_length = 2048", "max_length = 96"), ("lr = 2e-05", "lr = 2e-3"),
        ),
        *on_cpu("core/supervised_dataset.py", ("import datasets", "import tiny_mistral as "
                                               "datasets")),
    ),
)  # fmt: skip

# ------------------------------------------------------ phasic-policy-gradient, 7295473

_PPG_RUN = """\
import on_cpu
from phasic_policy_gradient.train import train_fn

train_fn(num_envs=4, interacts_total=1536, nminibatch=4, n_pi=4, n_aux_epochs=2, log_dir="out")
"""
# The calls of MPI that the program makes, by the process group that it trains with.
_MPI = """\
import torch
import torch.distributed as dist

dist.init_process_group("gloo")


class Comm:
    rank, size = dist.get_rank(), dist.get_world_size()

    def Get_rank(self):
        return self.rank

    def Barrier(self):
        dist.barrier()

    def allgather(self, what):
        every = [None] * self.size
        dist.all_gather_object(every, what)
        return every

    def gather(self, what):
        every = self.allgather(what)
        return every if self.rank == 0 else None

    def Allreduce(self, what, out):
        total = torch.from_numpy(what.copy())
        dist.all_reduce(total)
        out[...] = total.numpy()


class MPI:
    Comm, COMM_WORLD = Comm, Comm()
"""
_GYM3 = """\
class Wrapper:
    def __init__(self, env):
        self.env, self.num = env, env.num
        self.ob_space, self.ac_space = env.ob_space, env.ac_space

    def observe(self):
        return self.env.observe()

    def act(self, ac):
        self.env.act(ac)

    def get_info(self):
        return self.env.get_info()


class ExtractDictObWrapper(Wrapper):
    def __init__(self, env, key):
        super().__init__(env)
        self.key = key

    def observe(self):
        reward, ob, first = self.env.observe()
        return reward, ob[self.key], first
"""
_GYM3_TYPES = """\
import math
from dataclasses import dataclass


class Real:
    pass


@dataclass(frozen=True)
class Discrete:
    n: int


@dataclass(frozen=True)
class TensorType:
    eltype: object
    shape: tuple

    @property
    def size(self):
        return math.prod(self.shape)
"""
# Reward for the action that a bright column shows; without a seed, each process draws its own.
_PROCGEN = """\
import os

import numpy as np
from gym3.types import Discrete, Real, TensorType


class ProcgenGym3Env:
    ob_space, ac_space = TensorType(Real(), (16, 16, 3)), TensorType(Discrete(15), ())

    def __init__(self, num, env_name, rand_seed=None, **_):
        self.num = num
        self.draw = np.random.RandomState(
            100 + int(os.environ["RANK"]) if rand_seed is None else rand_seed)
        self.act(np.zeros(num, int), shown=np.zeros(num, int))

    def act(self, ac, shown=None):
        shown = self.shown if shown is None else shown
        self.reward = (ac == shown).astype("float32") + 0.1 * self.draw.rand(self.num).astype("f")
        self.first = self.draw.rand(self.num) < 0.1
        self.shown = self.draw.randint(0, 15, self.num)

    def observe(self):
        ob = np.zeros((self.num, 16, 16, 3), "uint8")
        ob[np.arange(self.num), :, self.shown] = 255
        return self.reward, {"rgb": ob}, self.first

    def get_info(self):
        return [{}] * self.num
"""
_PPG = Program(
    "ppg", "phasic-policy-gradient", "go.py", needs=("numpy", "pandas"),
    prints=r"Opt/loss_\w+ +\| [-0-9.e+]+", env=(("RCALL_LOGDIR", "out"),),
    prepare=beside("go.py", data=lambda folder: write(folder, {
        "go.py": _PPG_RUN, "mpi4py/__init__.py": _MPI, "gym3/__init__.py": _GYM3,
        "gym3/types.py": _GYM3_TYPES, "procgen/__init__.py": _PROCGEN})),
    adapt=(
        *on_cpu("phasic_policy_gradient/train.py", ("outsize=256", "outsize=32,"),
                ("chans=(16, 32, 32)", "chans=(4, 8),")),
        # As published, encoders are drawn in the order of a set of words.
        *on_cpu("phasic_policy_gradient/ppg.py",
                ("self.enc_keys = list(set(", "self.enc_keys = sorted({pi_key, *vf_keys})")),
        *on_cpu("phasic_policy_gradient/ppo.py", ('nstep: "(int) number', "nstep=16,")),
        *on_cpu("phasic_policy_gradient/torch_util.py", ("th.has_cuda and", "False")),
    ),
)  # fmt: skip

# ---------------------------------------------------------------------- fairscale, 146f1602

_FAIR, _WIKI = "benchmarks/moe.py", "benchmarks/datasets/wikitext2_data.py"
_SIZES = "benchmarks/golden_configs/lm_wikitext2.py"
_FAIRSCALE = Program(
    "fairscale-moe", "fairscale", _FAIR, ("--use_synthetic_data", "--max-batch=30"),
    needs=("numpy",), prints=r"loss [0-9.]+", env=(("PYTHONPATH", "."),),
    # The rest of the package needs an older PyTorch.
    prepare=beside(_FAIR, data=lambda folder: write(folder, {
        "fairscale/__init__.py": "", "fairscale/nn/__init__.py": "",
        "fairscale/optim/__init__.py": "GradScaler = object"})),
    adapt=(
        *imports_on_cpu(_FAIR, "import logging"),
        *on_cpu(
            _FAIR, ("import time", "import os\n{line}"),
            ("mp.spawn(train", 'train(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), '
             "benchmark_config, model_specs, args)"),
            ("init_method_pgroup =", 'init_method_pgroup = "env://"'),
            ("dist.get_rank(), torch.cuda.memory_stats", "dist.get_rank(), 0"),
            ("total_loss += loss.item()", "{line}\nprint(f'loss {loss.item():.6f}', flush=True)"),
            # As published, DistributedDataParallel makes the experts of all ranks the same ones,
            # and nothing uses the loss that balances their load.
            ("model = DDP(model", 'own = [name for name, p in model.named_parameters() if '
             'hasattr(p, "expert")]\n'
             "DDP._set_params_and_buffers_to_ignore_for_model(model, own)\n{line}"),
            ("loss = criterion(", "{line}\nloss = loss + 0.1 * sum(layer.l_aux for layer in "
             'model.modules() if hasattr(layer, "l_aux"))'),
            ("loss.backward()", "{line}\nfor p in model.parameters():\n"
             '    if hasattr(p, "expert"):\n        p.grad.div_(world_size)'),
        ),
        *on_cpu(
            _WIKI, ("import torchtext", ""), ("from torchtext.data", ""),
            ("from torchtext.utils", ""), ("if operator.ge(torchtext", "if False:"),
            ("from torchtext.vocab import", "pass"),
            ("lm_dataset = torch.randint(", "lm_dataset = torch.arange(8000) ** 2 * 7 % 61"),
            ("return DatasetsInfo(10000", "return DatasetsInfo(64, *3 * [lm_dataset])"),
        ),
        *on_cpu(
            _SIZES, ('"ninp": 1024', '"ninp": 64,'), ('"nhid": 4096', '"nhid": 64,'),
            ('"num_decoder_layers": 20', '"num_decoder_layers": 2,'),
            ('"seq_len": 33', '"seq_len": 17,'), ('"batch_size": 32', '"batch_size": 4,'),
        ),
    ),
)  # fmt: skip

SIXTH_SILENT_B_PROGRAMS = (_FIXMATCH_PROGRAM, _MISTRAL_PROGRAM, _PPG, _FAIRSCALE)
