"""The programs of half B of the tenth round, and how each is started on CPU ranks. They run
unmodified but for the edits here, which remove GPUs, downloads, plots and large sizes."""

from __future__ import annotations

import json
import shutil
import struct
import wave
from dataclasses import replace
from pathlib import Path

from bench.abroad.edits import Edit, Line
from bench.abroad.programs import Program, on_cpu
from bench.abroad.quiet_programs import beside, imports_on_cpu
from bench.abroad.seventh_programs import NO_KERNEL, TELLS
from bench.abroad.silent_programs import write

# ------------------------------------------------------------------------ DeepSeek-V3

_CHAT, _MODEL = "generate.py", "model.py"
_TOKENS = """\
class AutoTokenizer:
    eos_token_id = 2

    @classmethod
    def from_pretrained(cls, *_):
        return cls()

    def encode(self, text):
        return [3 + ord(one) % 61 for one in text]

    def decode(self, tokens, **_):
        return "".join(chr(64 + one) for one in tokens)

    def apply_chat_template(self, messages, **_):
        return [token for one in messages for token in self.encode(one["content"])][-24:]
"""
_SIZES = {
    "max_batch_size": 4, "max_seq_len": 64, "vocab_size": 96, "dim": 48, "inter_dim": 96,
    "moe_inter_dim": 24, "n_layers": 3, "n_dense_layers": 1, "n_heads": 12, "n_routed_experts": 12,
    "n_shared_experts": 2, "n_activated_experts": 2, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4, "v_head_dim": 8, "original_seq_len": 64,
}  # fmt: skip
_QUESTIONS = "\n".join([*(f"question {number} of a user" for number in range(9)), "/exit"])


def _for_deepseek(folder: Path) -> None:
    beside(_CHAT)(folder)
    write(folder, {"tokens.py": _TOKENS, "tiny.json": json.dumps(_SIZES), "asked": _QUESTIONS})


# ------------------------------------------------------------------------ voxceleb_trainer

_SPEAKER, _NET = "trainSpeakerNet.py", "SpeakerNet.py"
_FEATURES = """\
import torch


class MelSpectrogram(torch.nn.Module):
    def __init__(self, n_mels, **_):
        super().__init__()
        self.n_mels = n_mels

    def forward(self, sound):
        frames = sound.unfold(-1, 400, 160)
        return torch.fft.rfft(frames).abs()[..., : self.n_mels].transpose(-1, -2).float()
"""
_CURVE = """\
import numpy


def roc_curve(labels, scores, pos_label=1):
    order = numpy.argsort(scores)[::-1]
    right = numpy.asarray(labels)[order] == pos_label
    found, false = numpy.cumsum(right), numpy.cumsum(~right)
    return false / false[-1], found / found[-1], numpy.asarray(scores)[order]
"""


def _for_voxceleb(folder: Path) -> None:
    beside(_SPEAKER)(folder)
    write(folder, {"torchaudio/__init__.py": "from torchaudio import transforms",
                   "torchaudio/transforms.py": _FEATURES, "sklearn/__init__.py": "",
                   "sklearn/metrics.py": _CURVE, "scipy/__init__.py": "", "scipy/signal.py": "",
    })  # fmt: skip
    names = [f"id{speaker:02}/{number}.wav" for speaker in range(30) for number in range(4)]
    for at, name in enumerate(names):
        (folder / "wav" / name).parent.mkdir(parents=True, exist_ok=True)
        with wave.open(str(folder / "wav" / name), "wb") as file:
            file.setparams((1, 2, 16000, 0, "NONE", ""))
            tone = ((n * (5 + at // 4)) % 1500 + (n * at) % 300 - 900 for n in range(3600))
            file.writeframes(b"".join(struct.pack("<h", one) for one in tone))
    trials = (f"{int(a % 4 == 0)} {names[a]} {names[a - a % 4 + 1 + a % 3 * 4]}" for a in range(24))
    write(folder, {"train.txt": "\n".join(f"{name[:4]} {name}" for name in names) + "\n",
                   "trials.txt": "\n".join(trials) + "\n"})  # fmt: skip


# ------------------------------------------------------------------------ DETR

_DETR, _MISC = "main.py", "util/misc.py"
_VISION = {
    "__init__.py": """\
from torchvision import datasets, models, ops

__version__ = "0.20"


def _is_tracing():
    return False
""",
    "ops/__init__.py": "from torchvision.ops import boxes, misc\n",
    "ops/boxes.py": """\
def box_area(boxes):
    return (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
""",
    "ops/misc.py": "from torch.nn.functional import interpolate\n",
    "models/__init__.py": """\
import torch


class Network(torch.nn.Module):
    def __init__(self, norm_layer, **_):
        super().__init__()
        sizes = (3, 8, 8, 8, 512)
        for number, (few, many) in enumerate(zip(sizes, sizes[1:]), 1):
            self.add_module(f"layer{number}", torch.nn.Sequential(
                torch.nn.Conv2d(few, many, 3, stride=2, padding=1), norm_layer(many),
                torch.nn.ReLU()))


resnet18 = Network
""",
    "models/_utils.py": """\
import torch


class IntermediateLayerGetter(torch.nn.ModuleDict):
    def __init__(self, model, return_layers):
        super().__init__(dict(model.named_children()))
        self.wanted = return_layers

    def forward(self, x):
        out = {}
        for name, layer in self.items():
            x = layer(x)
            if name in self.wanted:
                out[self.wanted[name]] = x
        return out
""",
    "datasets.py": """\
import torch
from PIL import Image
from pycocotools.coco import COCO


class CocoDetection(torch.utils.data.Dataset):
    def __init__(self, folder, annotations):
        self.coco = COCO(annotations)
        self.ids = sorted(self.coco.imgs)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        about = self.coco.loadImgs(self.ids[index])[0]
        size = about["width"], about["height"]
        image = Image.effect_noise(size, 40 + self.ids[index] % 50).convert("RGB")
        return image, self.coco.loadAnns(self.coco.getAnnIds(self.ids[index]))
""",
    "transforms/__init__.py": """\
import random


class RandomCrop:
    @staticmethod
    def get_params(image, size):
        down = random.randint(0, image.height - size[0])
        return down, random.randint(0, image.width - size[1]), *size
""",
    "transforms/functional.py": """\
import numpy
import torch
from PIL import Image


def hflip(image):
    return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)


def crop(image, top, left, height, width):
    return image.crop((left, top, left + width, top + height))


def resize(image, size):
    return image.resize(size[::-1])


def to_tensor(image):
    return torch.from_numpy(numpy.array(image)).permute(2, 0, 1).float() / 255


def normalize(image, mean, std):
    return (image - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]
""",
}


def _annotations(start: int, count: int) -> str:
    images, boxes = [], []
    for number in range(start, start + count):
        width, height = 48 + number % 3 * 8, 48 + number % 4 * 8
        images.append({"id": number, "width": width, "height": height, "file_name": f"{number}"})
        for at in range(1 + number % 3):
            box = [3 + at * 7, 4 + at * 5, 12 + number % 9, 14 + at]
            boxes.append({"id": len(boxes) + 1, "image_id": number, "category_id": 1 + at,
                          "iscrowd": 0, "area": box[2] * box[3], "bbox": box})  # fmt: skip
    kinds = [{"id": number, "name": f"kind {number}"} for number in (1, 2, 3)]
    return json.dumps({"images": images, "annotations": boxes, "categories": kinds, "info": {}})


def _for_detr(folder: Path) -> None:
    beside(_DETR)(folder)
    write(folder / "torchvision", _VISION)
    (folder / "coco").mkdir()
    write(folder, {f"coco/annotations/instances_{name}2017.json": _annotations(start, count)
                   for name, start, count in (("train", 100, 64), ("val", 500, 22))})  # fmt: skip


# ------------------------------------------------------------------------ gdGPT

_GD = "train_ds.py"
_PARTS = """\
import torch
from deepspeed.pipe import LayerSpec
from transformers import BatchEncoding


class Config:
    model_type = "llama"

    def save_pretrained(self, folder):
        pass


class Tokenizer:
    pad_token, eos_token, pad_token_id, eos_token_id = "p", "</s>", 0, 1

    def __init__(self, **_):
        pass

    def __call__(self, text, **_):
        ids = torch.tensor([[2 + ord(one) % 60 for one in text]])
        return BatchEncoding({"input_ids": ids, "attention_mask": torch.ones_like(ids)})

    def save_pretrained(self, folder):
        pass


class Enter(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(64, 32)

    def forward(self, inputs):
        return self.embed(inputs[..., 0]), inputs[..., 1].clone().contiguous()


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.hidden = torch.nn.LayerNorm(32), torch.nn.Linear(32, 32)

    def forward(self, inputs):
        x, mask = inputs
        return x + self.hidden(self.norm(x)).tanh() * mask.unsqueeze(-1), mask


class Exit(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.out = torch.nn.Linear(32, 64)

    def forward(self, inputs):
        return self.out(inputs[0])


def specs(**_):
    return [LayerSpec(Enter), LayerSpec(Layer), LayerSpec(Layer), LayerSpec(Exit)]
"""


def _settings(stages: int, replicas: int) -> str:
    return json.dumps({
        "train_micro_batch_size_per_gpu": 2, "train_batch_size": 8 * replicas,
        "dataloader_drop_last": True, "steps_per_print": 5, "gradient_clipping": 2.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "scheduler": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 5}},
        "fp16": {"enabled": False}, "from_scratch": True, "model_path": "x", "save_path": "saved",
        "n_epoches": 4, "max_seq_len": 24, "data_path": "dataset.json", "use_grad_ckpt": False,
        "model_topo": {"parts": "uniform", "process_topology": {
            "axes": ["pipe", "data"], "dims": [stages, replicas]}}})  # fmt: skip


def _for_gdgpt(folder: Path) -> None:
    beside(_GD)(folder)
    shutil.rmtree(folder / "deepspeed")  # an old copy of the package
    rows = [{"type": "pretrain", "text": "abcdefg"[row % 5 :] * 3} for row in range(96)]
    write(folder, {"parts.py": _PARTS, "dataset.json": json.dumps(rows),
                   **{f"{a}x{b}.yml": _settings(a, b) for a, b in ((2, 1), (3, 1), (2, 2))},
    })  # fmt: skip


_DEEPSEEK = Program(  # 9b4e978: mixture of experts and tensor parallelism by hand, generating
    "deepseek", "DeepSeek-V3/inference", _CHAT,
    ("--ckpt-path=.", "--config=tiny.json", "--interactive", "--max-new-tokens=16",
     "--temperature=1.0"),
    ranks=4, launcher="mpirun", needs=("numpy",), prepare=_for_deepseek, bound=120.0,
    adapt=(
        *imports_on_cpu(_CHAT),
        *on_cpu(_CHAT, ("from transformers", "from tokens import AutoTokenizer"),
                ("from safetensors", ""),
                ("tokens = torch.full(", "tokens = torch.full((len(prompt_tokens), total_len), -1, "
                 "dtype=torch.long)"),
                ("tokens[i, :len(t)] =", "tokens[i, :len(t)] = torch.tensor(t)"),
                ("finished = torch.tensor(",
                 "finished = torch.tensor([False] * len(prompt_tokens))"),
                ('with torch.device("cuda")', 'with torch.device("cpu"):'),
                ("torch.set_num_threads(8)", ""),
                ("load_model(model", ""),
                ("tokenizer = AutoTokenizer", "for one in model.parameters():\n"
                 "    torch.nn.init.normal_(one, std=0.3)\n{line}"),
                ("messages = []", "{line}\nasked = open('asked').read().splitlines()")),
        Edit(Line(_CHAT, 'input(">>> ")', 1), "prompt = asked.pop(0)"),
        *on_cpu(_MODEL, ("from kernel import", "")),
    ),
)  # fmt: skip
_VOXCELEB = Program(  # f51bab8: speech, DistributedDataParallel in ranks of its own
    "voxceleb", "voxceleb_trainer", _SPEAKER,
    ("--distributed", "--model=ResNetSE34L", "--trainfunc=softmaxproto", "--nPerSpeaker=2",
     "--nClasses=30", "--batch_size=3", "--max_frames=12", "--eval_frames=12", "--n_mels=16",
     "--nOut=16", "--test_interval=2", "--max_epoch=4", "--nDataLoaderThread=0", "--port=29671",
     "--train_list=train.txt", "--test_list=trials.txt", "--train_path=wav", "--test_path=wav",
     "--save_path=out"),
    ranks=3, launcher="python", needs=("numpy", "soundfile", "tqdm", "yaml"),
    prepare=_for_voxceleb,
    adapt=(
        *imports_on_cpu(_SPEAKER, "import argparse"),
        *on_cpu(_SPEAKER, ("args.gpu = gpu", "rank = gpu\n" + TELLS),
                ("n_gpus = torch.cuda", "n_gpus = 3")),
        *on_cpu(_NET, ('torch.device(f"cuda', 'self.device = torch.device("cpu")')),
        *on_cpu("models/ResNetSE34L.py", ("[3, 4, 6, 3]", "model = ResNetSE(SEBasicBlock, "
                "[1, 1, 1, 1], num_filters, nOut, **kwargs)"),
                ("num_filters = [16", "num_filters = [8, 8, 8, 8]")),
    ),
)  # fmt: skip
_DETECTION = Program(  # 29901c5: detection, DistributedDataParallel
    "detr", "detr", _DETR,
    ("--coco_path=coco", "--output_dir=out", "--device=cpu", "--backbone=resnet18", "--epochs=2",
     "--enc_layers=1", "--dec_layers=2", "--dim_feedforward=32", "--hidden_dim=32", "--nheads=2",
     "--num_queries=8", "--num_workers=1", "--lr=1e-3"),
    ranks=4, needs=("numpy", "packaging", "PIL", "pycocotools", "scipy"), prepare=_for_detr,
    adapt=(
        *imports_on_cpu(_DETR, "import argparse"),
        *on_cpu("datasets/coco.py", ("scales = [480", "scales = [48, 64]"),
                ("T.RandomResize([400", "T.RandomResize([56, 64]),"),
                ("T.RandomSizeCrop(384", "T.RandomSizeCrop(40, 56),"),
                ("T.RandomResize([800]", "T.RandomResize([64], max_size=96),")),
        *on_cpu(_MISC,
                ("t = torch.tensor([self.count", "t = torch.tensor([self.count, self.total])"),
                ("storage = torch.ByteStorage", ""),
                ("tensor = torch.ByteTensor(", "tensor = torch.tensor(list(buffer), "
                 "dtype=torch.uint8)"),
                ("local_size = torch.tensor(", "local_size = torch.tensor([tensor.numel()])"),
                ("size_list = [torch.tensor(",
                 "size_list = [torch.tensor([0]) for _ in range(world_size)]"),
                ("tensor_list.append(",
                 "tensor_list.append(torch.empty((max_size,), dtype=torch.uint8))"),
                ("padding = torch.empty(", "padding = torch.empty(size=(max_size - local_size,), "
                 "dtype=torch.uint8)")),
    ),
)  # fmt: skip
_GDGPT = Program(  # f5aa4a4: a language model in a DeepSpeed pipeline with two replicas
    "gdgpt", "gdGPT", _GD, ("--config=2x2.yml",), ranks=4,
    needs=("accelerate", "deepspeed", "transformers", "yaml"), prepare=_for_gdgpt,
    env=(("DS_ACCELERATOR", "cpu"), ("DS_BUILD_OPS", "0")),
    adapt=(
        *imports_on_cpu(_GD),
        *on_cpu(_GD, ("import deepspeed", NO_KERNEL), ("device = torch.device(", ""),
                ("torch.cuda.set_device(", "import parts"),
                ("config = AutoConfig", "config = parts.Config()"),
                ("specs = get_llama", "specs = parts.specs(**kwargs)"),
                ("raw_model = AutoModel", "raw_model = model.hg_config"),
                ("raw_model.save_pretrained", ""),
                ("training_data.save_tokenizer(", "")),
        *on_cpu("datasets.py", ("import astunparse", ""),
                ("tokenizer = AutoTokenizer.from_pretrained(model_name,",
                 "import parts\ntokenizer = parts.Tokenizer(")),
        *(Edit(Line("models/__init__.py", f"from .{name} import"), "")
          for name in ("bloom", "llama", "baichuan2_7b", "chatglm3_6b", "mixtral")),
        *on_cpu("models/__init__.py", ("@torch.compile", "")),
    ),
)  # fmt: skip


def _spawned(ranks: int) -> Program:
    last = Edit(Line(_SPEAKER, "n_gpus = 3"), f"n_gpus = {ranks}")
    return replace(_VOXCELEB, name=f"voxceleb-{ranks}", ranks=ranks, adapt=(*_VOXCELEB.adapt, last))


TENTH_B_PROGRAMS = (
    _DEEPSEEK,
    *(replace(_DEEPSEEK, name=f"deepseek-{n}", ranks=n, launcher="torchrun") for n in (2, 3)),
    _VOXCELEB, _spawned(2), _spawned(4),
    _DETECTION, *(replace(_DETECTION, name=f"detr-{n}", ranks=n) for n in (2, 3)),
    _GDGPT, *(replace(_GDGPT, name=f"gdgpt-{n}", ranks=n, arguments=(f"--config={n}x1.yml",))
              for n in (2, 3)),
)  # fmt: skip
