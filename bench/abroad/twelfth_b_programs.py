"""The programs of half B of the twelfth round, and how each is started on CPU ranks. They run
unmodified but for the edits here, which remove GPUs, downloads, plots and large sizes."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

from bench.abroad.edits import Edit, Line
from bench.abroad.programs import Program, on_cpu
from bench.abroad.quiet_programs import beside, imports_on_cpu
from bench.abroad.seventh_programs import TELLS
from bench.abroad.silent_programs import write

# ------------------------------------------------------------------------ arcface_torch

_FACE, _FACES, _HEAD = "train_v2.py", "dataset.py", "partial_fc_v2.py"
_FACE_SETTINGS = """\
from easydict import EasyDict

config = EasyDict(
    network="mbf", output="out", embedding_size=32, fp16=False, batch_size=4, num_workers=1,
    lr=0.02, rec="faces", num_classes=32, num_image=96, num_epoch=2, warmup_epoch=0, verbose=6,
    frequent=2, val_targets=["lfw"], save_all_states=True)
"""
_FACE_PACKAGES = {
    "torchvision/__init__.py": "from torchvision import datasets, transforms\n",
    "torchvision/transforms.py": """\
def Compose(steps):
    return lambda image: image


def RandomHorizontalFlip():
    pass


ToTensor = RandomHorizontalFlip


def Normalize(**_):
    pass
""",
    "torchvision/datasets.py": """\
import torch


class ImageFolder(torch.utils.data.Dataset):
    # Persons 0 to 23 of 32 have pictures, the last few of them rarely.
    def __init__(self, root, transform):
        self.root, self.transform = root, transform

    def __len__(self):
        return 96

    def __getitem__(self, index):
        person = index % 22 if index % 8 else 23
        draw = torch.Generator().manual_seed(index)
        image = torch.randn(3, 112, 112, generator=draw) * 0.3 + person / 30
        return self.transform(image), person
""",
    "mxnet/__init__.py": """\
import numpy
from mxnet import ndarray


class image:
    @staticmethod
    def imdecode(data):
        return ndarray.Array(numpy.random.RandomState(data).rand(112, 112, 3) * 255)
""",
    "mxnet/ndarray.py": """\
import numpy


class Array(numpy.ndarray):
    def __new__(cls, data):
        return numpy.asarray(data, dtype="float32").view(cls)

    def asnumpy(self):
        return numpy.array(self)


def transpose(data, axes):
    return numpy.transpose(data, axes)


def flip(data, axis):
    return numpy.flip(data, axis)
""",
}


def _for_arcface(folder: Path) -> None:
    beside(_FACE)(folder)
    write(folder, {**_FACE_PACKAGES, "configs/tiny.py": _FACE_SETTINGS, "faces/readme": ""})
    pairs = [number // 2 if number % 4 else 40 for number in range(24)], [True, False] * 6
    (folder / "faces" / "lfw.bin").write_bytes(pickle.dumps(pairs))


# ------------------------------------------------------------------------ RecBole

_REC, _QUICK = "run_recbole.py", "recbole/quick_start/quick_start.py"
_TRAINER = "recbole/trainer/trainer.py"
_REC_SETTINGS = """\
gpu_id: '0,1,2,3'
epochs: 4
train_batch_size: 96
eval_batch_size: 400
embedding_size: 16
show_progress: False
load_col: {inter: [user_id, item_id, rating]}
"""


def _for_recbole(folder: Path) -> None:
    beside(_REC)(folder)
    rows = [f"u{user}\tm{(user * 7 + at * at) % 41}\t{1 + (user + at) % 5}"
            for user in range(60) for at in range(20)]  # fmt: skip
    head = "user_id:token\titem_id:token\trating:float"
    # Its ranks make these folders at the same time, and all but one fail.
    made = ("log/readme", "log/BPR/readme", "saved/readme", "log_tensorboard/readme")
    write(folder, {"tiny.yaml": _REC_SETTINGS, **dict.fromkeys(made, ""),
                   "dataset/tiny/tiny.inter": "\n".join([head, *rows]) + "\n"})  # fmt: skip


_ARCFACE = Program(  # deepinsight 7fadd42: metric learning, classes of the head on ranks by hand
    "arcface", "insightface/recognition/arcface_torch", _FACE, ("configs/tiny.py",), ranks=3,
    needs=("easydict", "numpy", "scipy", "sklearn", "tensorboard"), prepare=_for_arcface,
    adapt=(
        *imports_on_cpu(_FACE, "import argparse"),
        *on_cpu(_FACES, ("self.stream = torch.cuda.Stream(", "self.stream = None"),
                ("torch.cuda.current_stream().wait", ""), ("pin_memory=True", "")),
        *on_cpu("utils/utils_distributed_sampler.py",
                ("def sync_random_seed(", 'def sync_random_seed(seed=None, device="cpu"):')),
        *on_cpu("backbones/mobilefacenet.py",
                ("def get_mbf(", "def get_mbf(fp16, num_features, blocks=(1, 1, 1, 1), scale=1):")),
        *on_cpu("eval/verification.py", ("f = interpolate.interp1d(far_train",
                "f = interpolate.interp1d(far_train, thresholds)")),
        *on_cpu("utils/utils_callbacks.py", ("self.ver_list[i], backbone, 10, 10)",
                                             "self.ver_list[i], backbone, 8, 2)")),
        *on_cpu("lr_scheduler.py", ("super().__init__(optimizer, last_epoch",
                                    "super().__init__(optimizer, last_epoch=last_epoch)")),
    ),
)  # fmt: skip

_RECBOLE = Program(  # RUCAIBox 7b02be5: recommendations, DistributedDataParallel, ranks by mp.spawn
    "recbole", "RecBole", _REC,
    ("--model=BPR", "--dataset=tiny", "--config_files=tiny.yaml", "--nproc=3"),
    ranks=3, launcher="python",
    needs=("colorama", "colorlog", "numpy", "pandas", "psutil", "scipy", "tabulate",
           "tensorboard", "texttable", "tqdm", "yaml"),
    prepare=_for_recbole,
    adapt=(
        *on_cpu(_REC, ("port=args.port,", "port=str(20000 + __import__('os').getpid() % 9000),")),
        *imports_on_cpu(_QUICK, "import logging"),
        *on_cpu(_QUICK, ("from ray import tune", ""), ("kwargs = args[-1]", TELLS),
                ("flops = get_flops(", "flops = 0")),
        *on_cpu("recbole/config/configurator.py",
                ('"cuda", self.final_config_dict["local_rank"]', '"cpu"'),
                ("np.float = np.float_", "np.float = float"),
                ("np.complex = np.complex_", ""), ("np.unicode = np.unicode_", "")),
        # Of no use here, and four processes import it.
        *on_cpu("recbole/evaluator/metrics.py", ("from sklearn.metrics import auc", ""),
                ("from sklearn.metrics import mean", "")),
        *on_cpu("recbole/model/general_recommender/nceplrec.py", ("from sklearn", "")),
        *on_cpu("recbole/model/general_recommender/slimelastic.py",
                ("from sklearn.linear_model", ""), ("from sklearn.exceptions", "")),
        *on_cpu(_TRAINER,
                ("checkpoint = torch.load(checkpoint_file",
                 "checkpoint = torch.load(checkpoint_file, weights_only=False)"),
                # Each rank reads the time, and sometimes another second than rank 0.
                ("saved_model_file = \"{}-{}.pth\".format(", 'saved_model_file = "best.pth"')),
    ),
)  # fmt: skip


def _recbole(ranks: int) -> Program:
    return replace(_RECBOLE, name=f"recbole-{ranks}", ranks=ranks,
                   arguments=(*_RECBOLE.arguments[:-1], f"--nproc={ranks}"))  # fmt: skip


# ------------------------------------------------------------------------ muse-maskgit-pytorch

_MUSE = "go.py"
_TRAIN_VAE = """\
import on_cpu
import os
from muse_maskgit_pytorch import VQGanVAE, VQGanVAETrainer

vae = VQGanVAE(dim=16, layers=2, discr_layers=2, codebook_size=64)
trainer = VQGanVAETrainer(
    vae=vae,
    image_size=32,
    folder="images",
    batch_size=2,
    grad_accum_every=1,
    num_train_steps=10,
    save_results_every=4,
    save_model_every=4,
).cuda()
trainer.train()
"""
_MUSE_PACKAGES = {
    "torchvision/__init__.py": "from torchvision import datasets, models, transforms, utils\n",
    "torchvision/datasets.py": "ImageFolder = None\n",
    "torchvision/models.py": """\
import torch


class VGG(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.features = torch.nn.Conv2d(3, 4, 3, stride=4)
        self.classifier = torch.nn.Sequential(
            torch.nn.Linear(256, 16), torch.nn.ReLU(), torch.nn.Linear(16, 16),
            torch.nn.Dropout(), torch.nn.Linear(16, 4))

    def forward(self, images):
        return self.classifier(self.features(images).flatten(1))


def vgg16(pretrained):
    return VGG().requires_grad_(False)
""",
    "torchvision/transforms.py": """\
import numpy
import torch


def Compose(steps):
    def apply(image):
        return torch.from_numpy(numpy.array(image)).permute(2, 0, 1).float() / 255

    return apply


def Lambda(*_):
    pass


Resize = RandomHorizontalFlip = CenterCrop = ToTensor = Lambda
""",
    "torchvision/utils.py": """\
import torch


def make_grid(images, **_):
    return images.mean(0)


def save_image(image, path):
    torch.save(image, path)
""",
    "memory_efficient_attention_pytorch/__init__.py": "",
    "memory_efficient_attention_pytorch/flash_attention.py": "FlashAttentionFunction = None\n",
}


def _for_muse(folder: Path) -> None:
    write(folder, {_MUSE: _TRAIN_VAE, **_MUSE_PACKAGES, "images/readme": ""})
    beside(_MUSE)(folder)
    for number in range(96):  # read by what is in them, not by their names
        points = bytes((number * 3 + at * at) % 256 for at in range(32 * 32 * 3))
        (folder / "images" / f"{number}.png").write_bytes(b"P6 32 32 255\n" + points)


_MUSE_VAE = Program(  # lucidrains 6df7f33: an image tokenizer and its discriminator, accelerate
    "muse", "muse-maskgit-pytorch", _MUSE, ranks=3, prepare=_for_muse,
    needs=("accelerate", "beartype", "einops", "ema_pytorch", "numpy", "PIL", "tqdm",
           "vector_quantize_pytorch"),
    env=(("ACCELERATE_USE_CPU", "1"),),
    adapt=on_cpu("muse_maskgit_pytorch/muse_maskgit_pytorch.py",
                 ("from muse_maskgit_pytorch.t5 import",
                  "t5_encode_text = get_encoded_dim = DEFAULT_T5_NAME = None")),
)  # fmt: skip

# ------------------------------------------------------------------------ mistral-inference

_CHAT = "src/mistral_inference/main.py"
_LAYERS = "src/mistral_inference/transformer.py"
_MIXTRAL = """\
{
"dim": 32, "head_dim": 8, "hidden_dim": 48, "n_heads": 4, "n_kv_heads": 2,
"n_layers": 12,
"norm_eps": 1e-5, "vocab_size": 96, "moe": {"num_experts": 8, "num_experts_per_tok": 2}
}
"""
_MISTRAL_PACKAGES = {
    "xformers/__init__.py": "",
    "xformers/ops/__init__.py": "",
    "xformers/ops/fmha/__init__.py": """\
from torch.nn.functional import scaled_dot_product_attention


def memory_efficient_attention(query, key, value, bias):
    unused = ~bias.mask.any(0)[None, :, None, None]  # memory that nobody wrote yet
    key, value = key.masked_fill(unused, 0), value.masked_fill(unused, 0)
    heads = [one.transpose(1, 2) for one in (query, key, value)]
    return scaled_dot_product_attention(*heads, attn_mask=bias.mask).transpose(1, 2)
""",
    "xformers/ops/fmha/attn_bias.py": """\
import torch


class AttentionBias:
    def __init__(self, mask):
        self.mask = mask

    def make_local_attention(self, window):
        return self

    make_local_attention_from_bottomright = make_local_attention


class BlockDiagonalMask(AttentionBias):
    pass


class BlockDiagonalCausalMask(AttentionBias):
    @classmethod
    def from_seqlens(cls, lengths):
        return cls(torch.block_diag(*(torch.ones(n, n).tril() for n in lengths)).bool())


class BlockDiagonalCausalWithOffsetPaddedKeysMask(AttentionBias):
    @classmethod
    def from_seqlens(cls, q_seqlen, kv_padding, kv_seqlen):
        rows = ((torch.arange(kv_padding) < n).float()[None] for n in kv_seqlen)
        return cls(torch.block_diag(*rows).bool())
""",
    "mistral_common/__init__.py": "",
    "mistral_common/protocol/__init__.py": "",
    "mistral_common/protocol/instruct/__init__.py": "",
    "mistral_common/protocol/instruct/messages.py": """\
class UserMessage:
    def __init__(self, content):
        self.content = content


AssistantMessage = UserMessage
ContentChunk = ImageChunk = ImageURLChunk = TextChunk = UserMessage
""",
    "mistral_common/protocol/instruct/request.py": """\
class ChatCompletionRequest:
    def __init__(self, messages):
        self.messages = messages
""",
    "mistral_common/tokens/__init__.py": "",
    "mistral_common/tokens/tokenizers/__init__.py": "",
    "mistral_common/tokens/tokenizers/base.py": "Tokenizer = None\n",
    "mistral_common/tokens/tokenizers/sentencepiece.py": """\
def is_sentencepiece(path):
    return path.name == "tokenizer.model.v3"
""",
    "mistral_common/tokens/tokenizers/tekken.py": """\
class Tekkenizer:
    pass


SpecialTokenPolicy = None


def is_tekken(path):
    return False
""",
    "mistral_common/tokens/tokenizers/mistral.py": """\
from types import SimpleNamespace


class MistralTokenizer:
    eos_id = 96  # is never drawn: the program cannot show an empty answer

    def __init__(self):
        self.instruct_tokenizer = SimpleNamespace(tokenizer=self)

    @classmethod
    def from_file(cls, path):
        return cls()

    def encode_chat_completion(self, request):
        said = "".join(one.content for one in request.messages)
        return SimpleNamespace(tokens=[3 + ord(one) % 91 for one in said][-24:], images=[])

    def decode(self, tokens):
        return "".join(chr(32 + one) for one in tokens)
""",
}


def _for_mistral(folder: Path) -> None:
    for name, text in _MISTRAL_PACKAGES.items():
        (folder / "src" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "src" / name).write_text(text)
    beside(_CHAT)(folder)
    asked = "".join(f"question {number} of somebody\n" for number in range(10))
    write(
        folder,
        {
            "asked": asked,
            "weights/params.json": _MIXTRAL,
            "weights/tokenizer.model.v3": "",
            "weights/consolidated.00.pth": "",
        },
    )


_MISTRAL = Program(  # mistralai 2557e12: experts in a pipeline by hand, generating
    "mistral", "mistral-inference", _CHAT,
    ("interactive", "weights", "--max_tokens=16", "--instruct"), ranks=3,
    needs=("fire", "numpy", "PIL", "safetensors", "simple_parsing"), prepare=_for_mistral,
    env=(("PYTHONPATH", "src"),),
    adapt=(
        *imports_on_cpu(_CHAT, "import json"),
        Edit(Line(_CHAT, "while True:", 1), 'for question in open("asked").read().splitlines():'),
        *on_cpu(_CHAT, ('user_input = input("Prompt', "user_input = question"),
                # Without it, a rank sometimes ends with SIGABRT.
                ("def demo(", "    dist.destroy_process_group()\n\n\n{line}")),
        *on_cpu(_LAYERS, ('with torch.device("meta")', 'with torch.device("cpu"):'),
                ("loaded = torch.load(", "torch.manual_seed(3)"),
                ("model.load_state_dict(loaded", "for one in model.parameters():\n"
                 "    torch.nn.init.normal_(one, std=0.3)\ntorch.manual_seed(4)")),
    ),
)  # fmt: skip


TWELFTH_B_PROGRAMS = (
    _ARCFACE, *(replace(_ARCFACE, name=f"arcface-{n}", ranks=n) for n in (2, 4)),
    _RECBOLE, _recbole(2), _recbole(4),
    _MUSE_VAE, *(replace(_MUSE_VAE, name=f"muse-{n}", ranks=n) for n in (2, 4)),
    _MISTRAL, *(replace(_MISTRAL, name=f"mistral-{n}", ranks=n) for n in (2, 4)),
)  # fmt: skip
