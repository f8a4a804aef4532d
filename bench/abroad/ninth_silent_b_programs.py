"""The programs of the second part of the ninth round of silent faults: images, video and scenes,
and how each is started on CPU ranks. They run unmodified but for the edits here, which remove GPUs,
downloads and size, print the loss, and let IP-Adapter clip. None is repaired."""

from __future__ import annotations

import json
from pathlib import Path

from bench.abroad.cases import edit
from bench.abroad.programs import Program, on_cpu
from bench.abroad.quiet_programs import beside, imports_on_cpu
from bench.abroad.silent_programs import write

# ------------------------------------------------------------------------ LlamaGen, ce98ec4

_LLAMAGEN, _LLAMAGEN_GPT = "autoregressive/train/train_c2i_fsdp.py", "autoregressive/models/gpt.py"
_LLAMAGEN_DATA = "dataset/imagenet.py"


def _for_llamagen(folder: Path) -> None:
    write(folder, {"imagenet256_codes/README": "", "imagenet256_labels/README": ""})


_LLAMAGEN_PROGRAM = Program(
    "llamagen", "LlamaGen", _LLAMAGEN,
    ("--code-path=.", "--cloud-save-path=out", "--gpt-model=GPT-B", "--vocab-size=64",
     "--num-classes=8", "--epochs=2", "--lr=1e-3", "--global-batch-size=8", "--num-workers=0",
     "--log-every=2", "--mixed-precision=fp32", "--no-wandb"),
    needs=("numpy", "PIL", "wandb"), prints=r"loss [0-9.]+", env=(("PYTHONPATH", "."),),
    prepare=beside(_LLAMAGEN, "torchvision", data=_for_llamagen),
    adapt=(
        *imports_on_cpu(_LLAMAGEN),
        *on_cpu(
            _LLAMAGEN,
            ("assert torch.cuda.is_available()", "pass"),
            ("device = global_rank % torch.cuda", 'device = torch.device("cpu")'),
            ("latent_size = args.image_size //", "latent_size = 4"),
            # What `sync_module_states` does on GPUs only.
            ("model = FSDP(", "for value in model.state_dict().values():\n"
             "    dist.broadcast(value, 0)\n{line}"),
            ("sync_module_states=True", ""),
            ("log_steps += 1", "{line}\nprint(f'loss {loss.item():.6f}', flush=True)"),
        ),
        *on_cpu(
            _LLAMAGEN_GPT,
            ("return Transformer(ModelArgs(n_layer=12", "return Transformer(ModelArgs("
             "n_layer=2, n_head=2, dim=32, multiple_of=16, **kwargs))"),
        ),
        # Codes of an image follow from its number.
        *on_cpu(
            _LLAMAGEN_DATA,
            ("self.feature_files = [f", 'self.feature_files = [f"{i}.npy" for i in range(48)]'),
            ("self.label_files = [f", 'self.label_files = [f"{i}.npy" for i in range(48)]'),
            ("features = np.load(",
             "features = (np.arange(16) * (1 + idx % 5) + idx * 7)[None] % 64"),
            ("labels = np.load(", "labels = np.array([idx % 8])"),
        ),
    ),
)  # fmt: skip

# ------------------------------------------------------------------------ BiSeNet, 6b4b67a

_BISENET, _BISENET_LOADER = "tools/train_amp.py", "lib/data/get_dataloader.py"
_BISENET_NET = "lib/models/bisenetv2.py"
_BISENET_CONFIG = """\
cfg = dict(
    model_type="bisenetv2", n_cats=5, num_aux_heads=4, lr_start=5e-4, weight_decay=5e-4,
    warmup_iters=3, max_iter=8, dataset="CustomerDataset", im_root=".", train_im_anns="train.txt",
    val_im_anns="val.txt", scales=[0.75, 2.0], cropsize=[64, 64], eval_crop=[64, 64],
    eval_scales=[1.0], ims_per_gpu=3, eval_ims_per_gpu=2, use_fp16=False, use_sync_bn=True,
    respth="res",
)
"""
# Bands of colours, whose hues are the labels, drawn from the path.
_BISENET_CV2 = """\
import zlib

import numpy as np
import torch
from torch.nn.functional import interpolate

INTER_NEAREST, INTER_LINEAR = "nearest", "bilinear"


def imread(path, flag=1):
    draw = np.random.RandomState(zlib.crc32(path.rsplit("-", 1)[0].encode()) % 2**31)
    a, b, c = draw.uniform(0.05, 0.2, 3)
    rows, columns = np.mgrid[:80, :80]
    label = (2.5 + 2.49 * np.sin(a * rows + c * 30) * np.cos(b * columns)).astype("uint8")
    if flag == 0:
        return label
    hues = np.array([[250, 20, 20], [20, 250, 20], [20, 20, 250], [250, 250, 20], [20, 250, 250]])
    return (hues[label] - draw.randint(0, 20, (80, 80, 3))).astype("uint8")


def resize(image, size, interpolation=INTER_LINEAR):
    planes = torch.from_numpy(np.ascontiguousarray(image)).float().reshape(*image.shape[:2], -1)
    more = {} if interpolation == INTER_NEAREST else {"align_corners": False}
    planes = interpolate(planes.permute(2, 0, 1)[None], size[::-1], mode=interpolation, **more)
    resized = planes[0].permute(1, 2, 0).numpy().round().astype(image.dtype)
    return resized if image.ndim == 3 else resized[..., 0]
"""


def _for_bisenet(folder: Path) -> None:
    def lines(start: int, count: int) -> str:
        return "\n".join(f"{n}-image,{n}-label" for n in range(start, start + count))

    write(folder, {
        "res/README": "", "configs/tiny.py": _BISENET_CONFIG,
        "train.txt": lines(0, 48), "val.txt": lines(60, 4), "tools/cv2.py": _BISENET_CV2,
        "tools/tabulate.py": "def tabulate(*_, **__):\n    return ''\n",
    })  # fmt: skip


_BISENET_PROGRAM = Program(
    "bisenet", "BiSeNet", _BISENET, ("--config=configs/tiny.py",),
    needs=("numpy", "tqdm"), prints=r"loss_pre: [0-9.]+",
    prepare=beside(_BISENET, "torchvision", data=_for_bisenet),
    adapt=(
        *imports_on_cpu(_BISENET, "import random"),
        *on_cpu(
            _BISENET,
            ("#  torch.manual_seed(123)", "torch.manual_seed(123 + int(os.environ['RANK']))"),
            ("#  np.random.seed(123)", "np.random.seed(123 + int(os.environ['RANK']))"),
            ("scaler = amp.GradScaler()", "scaler = torch.amp.GradScaler('cpu')"),
            ("if (it + 1) % 100 == 0:", "if (it + 1) % 2 == 0:"),
            ("logger.info(msg)", "{line}\nprint(msg, flush=True)"),
        ),
        edit(_BISENET_LOADER, "num_workers=4,", "num_workers=0,"),
        edit(_BISENET_LOADER, "num_workers=4,", "num_workers=0,"),
        *on_cpu(
            _BISENET_NET, ("state = modelzoo.load_url(", "state = {}"),
            ("self.head = SegmentHead(", "self.head = SegmentHead(128, 64, n_classes, aux=False)"),
        ),
    ),
)  # fmt: skip

# ------------------------------------------------------------------------ IP-Adapter, 62e4af9

_IP = "tutorial_train.py"
_IP_LETTERS = ("!", "a", "b", "c", "d", "e", "!</w>", "a</w>", "b</w>", "c</w>", "d</w>", "e</w>")
# What would be read from a pretrained model, in evaluation mode as then.
_IP_TEXT = (
    "text_encoder = CLIPTextModel(CLIPTextConfig(\n"
    "    vocab_size=16, hidden_size=16, intermediate_size=32, num_hidden_layers=1,\n"
    "    num_attention_heads=2, max_position_embeddings=12, bos_token_id=12, eos_token_id=13,\n"
    ")).eval()"
)
_IP_VAE = (
    "vae = AutoencoderKL(\n"
    "    down_block_types=('DownEncoderBlock2D',) * 2, up_block_types=('UpDecoderBlock2D',) * 2,\n"
    "    block_out_channels=(8, 16), norm_num_groups=4,\n"
    ").eval()"
)
_IP_UNET = (
    "unet = UNet2DConditionModel(\n"
    "    sample_size=8, block_out_channels=(16, 32), layers_per_block=1, norm_num_groups=4,\n"
    "    down_block_types=('DownBlock2D', 'CrossAttnDownBlock2D'), cross_attention_dim=16,\n"
    "    up_block_types=('CrossAttnUpBlock2D', 'UpBlock2D'), attention_head_dim=8,\n"
    ").eval()"
)
_IP_IMAGES = (
    "image_encoder = CLIPVisionModelWithProjection(CLIPVisionConfig(\n"
    "    hidden_size=16, intermediate_size=32, projection_dim=16, num_hidden_layers=1,\n"
    "    num_attention_heads=2, image_size=16, patch_size=8,\n"
    ")).eval()"
)


def _for_ip_adapter(folder: Path) -> None:
    rows = [
        {"image_file": f"{n}.png", "text": "abcde"[n % 5 :] + " " + "edcba"[n % 3 :]}
        for n in range(48)
    ]
    words = [*_IP_LETTERS, "<|startoftext|>", "<|endoftext|>"]
    write(folder, {"data.json": json.dumps(rows)})
    (folder / "tiny").mkdir()
    write(folder, {
        "tiny/tokenizer/vocab.json": json.dumps({word: n for n, word in enumerate(words)}),
        "tiny/tokenizer/merges.txt": "#version: 0.2\n",
        "tiny/tokenizer/tokenizer_config.json": '{"tokenizer_class": "CLIPTokenizer", '
                                                '"model_max_length": 12}',
    })  # fmt: skip


_IP_ADAPTER = Program(
    "ip-adapter", "IP-Adapter", _IP,
    ("--pretrained_model_name_or_path=tiny", "--image_encoder_path=tiny", "--data_root_path=.",
     "--data_json_file=data.json", "--resolution=16", "--train_batch_size=4",
     "--num_train_epochs=2", "--learning_rate=1e-3", "--output_dir=out"),
    needs=("accelerate", "diffusers", "einops", "PIL", "tensorboard", "transformers"),
    prints=r"step_loss: [0-9.]+", prepare=beside(_IP, data=_for_ip_adapter),
    env=(("ACCELERATE_USE_CPU", "true"),),
    adapt=(
        *on_cpu(
            "ip_adapter/ip_adapter.py",
            ("from diffusers import StableDiffusionPipeline", "StableDiffusionPipeline = object"),
            ("from diffusers.pipelines.controlnet", "MultiControlNetModel = ()"),
        ),
        *imports_on_cpu(_IP, "import random"),
        *on_cpu(
            _IP,
            ("from transformers import CLIPTextModel", "from transformers import (\n"
             "    CLIPTextConfig, CLIPTextModel, CLIPTokenizer, CLIPVisionConfig,\n"
             "    CLIPVisionModelWithProjection,\n)"),
            ("from transformers import CLIPImageProcessor", ""),
            ("from torchvision import transforms",
             "from unittest.mock import MagicMock\ntransforms = MagicMock()"),
            ("self.clip_image_processor = CLIPImageProcessor()", ""),
            ("noise_scheduler = DDPMScheduler", "noise_scheduler = DDPMScheduler()"),
            ("text_encoder = CLIPTextModel.from", _IP_TEXT),
            ("vae = AutoencoderKL.from", _IP_VAE),
            ("unet = UNet2DConditionModel.from", _IP_UNET),
            ("image_encoder = CLIPVisionModelWithProjection.from", _IP_IMAGES),
            ("raw_image = Image.open(", 'raw_image = Image.linear_gradient("L").resize((16, 16))'
             '.rotate(37 * idx).convert("RGB")'),
            ("image = self.transform(", "image = torch.frombuffer(bytearray(raw_image.tobytes()), "
             "dtype=torch.uint8)\nimage = image.view(16, 16, 3).permute(2, 0, 1) / 127.5 - 1"),
            ("clip_image = self.clip_image_processor(", "clip_image = image[None]"),
            # Ranks draw other noise, as where nothing is seeded.
            ("# dataloader", "random.seed(7 + accelerator.process_index)\n"
             "torch.manual_seed(7 + accelerator.process_index)"),
            # Training scripts of diffusers clip, too.
            ("params_to_opt = itertools.chain(", "params_to_opt = list(itertools.chain("
             "ip_adapter.image_proj_model.parameters(), ip_adapter.adapter_modules.parameters()))"),
            ("accelerator.backward(loss)", "{line}\n"
             "accelerator.clip_grad_norm_(params_to_opt, 0.01)"),
        ),
    ),
)  # fmt: skip

# ------------------------------------------------------------------------ IBRNet, 41807b2

_IBRNET, _IBRNET_UTILS = "train.py", "utils.py"
_IBRNET_CONFIG = """\
import argparse


class ArgumentParser(argparse.ArgumentParser):
    def add_argument(self, *names, is_config_file=False, **more):
        return super().add_argument(*names, **more)
"""
_IBRNET_WRITER = """\
class SummaryWriter:
    def __init__(self, folder):
        pass

    def add_scalar(self, *_):
        pass
"""
# Views of a striped ball from a circle of cameras.
_IBRNET_VIEWS = """\
import numpy as np
import torch


def camera(turn):
    place = 4 * np.array([np.cos(turn), 0.3, np.sin(turn)])
    ahead = -place / np.linalg.norm(place)
    side = np.cross([0, 1, 0], ahead)
    side /= np.linalg.norm(side)
    pose, inside = np.eye(4), np.eye(4)
    pose[:3] = np.stack([side, np.cross(ahead, side), ahead, place], 1)
    inside[:2, :3] = [[64, 0, 32], [0, 64, 32]]
    return np.concatenate([[64, 64], inside.ravel(), pose.ravel()]).astype("float32")


def view(turn):
    rows, columns = (np.mgrid[:64, :64] - 32) / 16
    ball = (rows**2 + columns**2 < 1.5)[..., None]
    hues = [np.sin(k * (columns + turn)) * np.cos(rows * k) for k in (1, 2, 3)]
    return torch.from_numpy((ball * (0.5 + 0.5 * np.stack(hues, 2))).astype("float32"))


class Views(torch.utils.data.Dataset):
    def __init__(self, args, mode, scenes):
        self.sources = args.num_source_views

    def __len__(self):
        return 12

    def __getitem__(self, row):
        turns = np.arange(12) / 2
        near = (row + 1 + np.random.permutation(6)[: self.sources]) % 12
        return {
            "rgb": view(turns[row]), "camera": torch.from_numpy(camera(turns[row])),
            "rgb_path": str(row), "src_rgbs": torch.stack([view(turns[one]) for one in near]),
            "src_cameras": torch.stack([torch.from_numpy(camera(turns[one])) for one in near]),
            "depth_range": torch.tensor([2.5, 5.5]),
        }


dataset_dict = {"views": Views}
"""


def _for_ibrnet(folder: Path) -> None:
    write(folder, {
        "configargparse.py": _IBRNET_CONFIG, "tensorboardX.py": _IBRNET_WRITER,
        "ibrnet/data_loaders/__init__.py": _IBRNET_VIEWS,
    })  # fmt: skip


_IBRNET_PROGRAM = Program(
    "ibrnet", "IBRNet", _IBRNET,
    ("--distributed", "--rootdir=.", "--expname=tiny", "--train_dataset=views",
     "--eval_dataset=views", "--workers=0", "--num_source_views=4", "--N_rand=48",
     "--N_samples=16", "--N_importance=8", "--n_iters=12", "--lrate_decay_steps=6",
     "--i_img=1000"),
    needs=("numpy",), prints=r" loss: [0-9.]+", prepare=beside(_IBRNET, data=_for_ibrnet),
    adapt=(
        *imports_on_cpu(_IBRNET),
        *on_cpu(
            _IBRNET,
            ("        np.random.seed()", "np.random.seed(2 * epoch + args.local_rank)"),
            ("# Create criterion", "torch.manual_seed(7 + args.local_rank)"),
        ),
        *on_cpu("config.py", ('parser.add_argument("--local_rank"', 'parser.add_argument('
                '"--local_rank", type=int, default=int(__import__("os").environ["LOCAL_RANK"]))')),
        *on_cpu("ibrnet/feature_network.py", ("layers = [3, 4, 6, 3]", "layers = [1, 1, 1, 1]")),
        *on_cpu(
            _IBRNET_UTILS, ("from matplotlib.backends", ""), ("from matplotlib.figure", ""),
            ("import matplotlib as mpl", ""), ("from matplotlib import cm", ""), ("import cv2", ""),
        ),
    ),
)  # fmt: skip

# ------------------------------------------------------------------------ CoCLR, 45f200e

_COCLR = "main_nce.py"
# Two noisy looks at stripes that move.
_COCLR_CLIPS = """\
import numpy as np
import torch


class UCF101LMDB_2CLIP(torch.utils.data.Dataset):
    def __init__(self, mode, transform, num_frames, ds, return_label):
        self.frames = num_frames

    def __len__(self):
        return 32

    def __getitem__(self, row):
        time, rows, columns = np.mgrid[: 2 * self.frames, :32, :32]
        stripes = np.sin(rows * (0.1 + row % 7 / 10) + columns * (row % 5 / 5) + time * row / 9)
        noise = np.random.uniform(-1, 1, (3, *stripes.shape))
        return torch.from_numpy(stripes + 0.3 * noise).float(), row % 4
"""
_COCLR_TRANSFORMS = """\
def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return lambda *_, **__: None
"""
_COCLR_WRITER = """\
class SummaryWriter:
    def __init__(self, logdir):
        pass

    def add_scalar(self, *_):
        pass
"""


def _for_coclr(folder: Path) -> None:
    write(folder, {
        "dataset/lmdb_dataset.py": _COCLR_CLIPS, "utils/augmentation.py": _COCLR_TRANSFORMS,
        "tensorboardX.py": _COCLR_WRITER,
    })  # fmt: skip


_COCLR_PROGRAM = Program(
    "coclr", "CoCLR", _COCLR,
    ("--net=s3d", "--model=infonce", "--batch_size=4", "--seq_len=8", "--img_dim=32",
     "--moco-k=64", "--moco-m=0.9", "--moco-dim=16", "--epochs=2", "--workers=0",
     "--print_freq=1"),
    needs=("numpy", "PIL", "tqdm"), prints=r"Loss [0-9.]+",
    prepare=beside(_COCLR, "torchvision", data=_for_coclr),
    adapt=(
        *imports_on_cpu(_COCLR),
        *on_cpu(
            _COCLR, ("import matplotlib", ""), ("plt.switch_backend", ""),
            ("parser.add_argument('--local_rank'", "parser.add_argument('--local_rank', type=int, "
             "default=int(os.environ['LOCAL_RANK']),"),
        ),
        *on_cpu("utils/utils.py", ("correct_k = correct[:k]", "correct_k = correct[:k].reshape(-1)"
                ".float().sum(0)")),
    ),
)  # fmt: skip

# ------------------------------------------------------------------------ lightly, e8d317fc

_DINO = "examples/pytorch_lightning_distributed/dino.py"
_DINO_MODELS = """\
from torch import nn


def resnet18():
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, 2), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, 2),
        nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Linear(32, 10),
    )
"""
# Two large and four small parts of a picture.
_DINO_IMAGES = """\
import torch


class VOCDetection(torch.utils.data.Dataset):
    def __init__(self, root, target_transform, **_):
        self.target_transform = target_transform

    def __len__(self):
        return 64

    def __getitem__(self, row):
        draw = torch.Generator().manual_seed(row)
        image = torch.rand(3, 4, 4, generator=draw)
        image = torch.nn.functional.interpolate(image[None], (40, 40), mode="bilinear")[0]
        views = []
        for size in (32, 32, 16, 16, 16, 16):
            down, right = torch.randint(0, 40 - size, (2,), generator=draw).tolist()
            views.append(image[:, down : down + size, right : right + size])
        return views, self.target_transform({})
"""


def _for_dino(folder: Path) -> None:
    write(folder, {
        "pictures/__init__.py": "from . import datasets, models\n",
        "pictures/models.py": _DINO_MODELS, "pictures/datasets.py": _DINO_IMAGES,
    })  # fmt: skip


_DINO_PROGRAM = Program(
    "lightly-dino", "lightly", _DINO, launcher="python", needs=("numpy", "pytorch_lightning"),
    prints=r"loss [0-9.]+", prepare=_for_dino, env=(("PYTHONPATH", "."),),
    adapt=(
        *on_cpu(
            _DINO,
            ("import torchvision", "import pictures as torchvision\n\npl.seed_everything(7)"),
            ("from lightly.transforms", "DINOTransform = object"),
            ("input_dim = 512", "input_dim = 32"),
            ("input_dim, 512, 64, 2048, freeze", "input_dim, 32, 16, 64, freeze_last_layer=1"),
            ("self.teacher_head = DINOProj", "self.teacher_head = DINOProjectionHead("
                                             "input_dim, 32, 16, 64)"),
            ("self.criterion = DINOLoss(", "self.criterion = DINOLoss(output_dim=64, "
                                           "warmup_teacher_temp_epochs=5)"),
            ("loss = self.criterion(", "{line}\nprint(f'loss {loss.item():.6f}', flush=True)"),
            ("batch_size=64,", "batch_size=8,"),
            ("num_workers=8,", "num_workers=0,"),
            ("max_epochs=10,", "max_epochs=3, enable_progress_bar=False, logger=False,\n"
                               "enable_checkpointing=False,"),
            ('devices="auto",', "devices=2,"),
            ('accelerator="gpu",', 'accelerator="cpu",'),
            ("sync_batchnorm=True,", ""),
        ),
        *on_cpu("lightly/models/utils.py", ("from torchvision.ops", "StochasticDepth = None")),
        *on_cpu("lightly/loss/dense_relational_utils.py",
                ("from torchvision.ops", "roi_align = None")),
    ),
)  # fmt: skip

NINTH_SILENT_B_PROGRAMS = (
    _LLAMAGEN_PROGRAM, _BISENET_PROGRAM, _IP_ADAPTER, _IBRNET_PROGRAM, _COCLR_PROGRAM,
    _DINO_PROGRAM,
)  # fmt: skip
