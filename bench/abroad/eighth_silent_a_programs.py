"""The programs of the first part of the eighth round of silent faults: images, video, scenes and
sound, and how each is started on CPU ranks. They run unmodified but for the edits here, which
remove GPUs, downloads and size, and repair what is silently wrong in a program as published, where
`eighth_silent_a_round` says so."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from bench.abroad.programs import Program, on_cpu
from bench.abroad.quiet_programs import beside, imports_on_cpu
from bench.abroad.silent_programs import write

# ------------------------------------------------------------------ ECCV2022-RIFE, 9a195b7

# Frames of a grid that moves, drawn from the path.
_CV2 = """\
import zlib

import numpy as np

ROTATE_90_CLOCKWISE, ROTATE_180, ROTATE_90_COUNTERCLOCKWISE = 3, 2, 1


def setNumThreads(count):
    pass


def imread(path):
    folder, frame = path.rsplit("/im", 1)
    draw = np.random.RandomState(zlib.crc32(folder.encode()) % 2**31)
    (x, y), waves = draw.randint(0, 4, 2), draw.uniform(0.1, 0.6, (3, 2))
    rows, columns = np.mgrid[:96, :96]
    rows, columns = rows + x * int(frame[0]), columns + y * int(frame[0])
    image = [np.sin(a * rows) * np.cos(b * columns) for a, b in waves]
    return (127.5 + 127 * np.stack(image, 2)).astype("uint8")


def rotate(image, times):
    return np.rot90(image, times)
"""
# Weights of an earlier training, as it saves them.
_RIFE_FIRST = """\
import torch
from model.IFNet import IFNet

torch.manual_seed(5)
saved = {f"module.{name}": value for name, value in IFNet().state_dict().items()}
torch.save(saved, "train_log/flownet.pkl")
"""
_RIFE = "train.py"


def _for_rife(folder: Path) -> None:
    beside(_RIFE, "torchvision")(folder)
    (folder / "train_log").mkdir()
    clips = "\n".join(f"{clip:05}" for clip in range(50))
    write(folder, {
        "cv2.py": _CV2, "first.py": _RIFE_FIRST,
        "vimeo_triplet/tri_trainlist.txt": clips, "vimeo_triplet/tri_testlist.txt": clips,
    })  # fmt: skip
    subprocess.run([sys.executable, "first.py"], cwd=folder, check=True)


_RIFE_PROGRAM = Program(
    "rife", "ECCV2022-RIFE", _RIFE, ("--epoch=2", "--batch_size=5", "--world_size=2"),
    needs=("numpy", "tensorboard"), prints=r"loss_l1:[-+.0-9e]+", prepare=_for_rife,
    adapt=(
        *imports_on_cpu(_RIFE),
        *on_cpu(
            _RIFE,
            ("'--local_rank', default=0", "parser.add_argument('--local_rank', type=int, "
             "default=int(os.environ['LOCAL_RANK']))"),
            ("num_workers=8, pin_memory=True, drop_last", "train_data = DataLoader(dataset, "
             "batch_size=args.batch_size, num_workers=0, drop_last=True, sampler=sampler)"),
            ("pin_memory=True, num_workers=8", "val_data = DataLoader(dataset_val, batch_size=16)"),
            ("if step < 2000:", "if step < 4:"),
            ("mul = step / 2000.", "mul = step / 4."),
            ("mul = np.cos(", "mul = np.cos((step - 4) / (args.epoch * args.step_per_epoch - 4.) "
             "* math.pi) * 0.5 + 0.5"),
            ("nr_eval % 5 == 0", "if nr_eval % 2 == 0:"),
        ),
        *on_cpu("dataset.py", ("* 0.95)", "cnt = int(len(self.trainlist) * 0.8)"),
                ("224, 224)", "img0, gt, img1 = self.crop(img0, gt, img1, 64, 64)")),
        *on_cpu("model/IFNet.py", ("IFBlock(6, c=240)", "self.block0 = IFBlock(6, c=8)"),
                ("self.block1 = IFBlock(", "self.block1 = IFBlock(13+4, c=8)"),
                ("self.block2 = IFBlock(", "self.block2 = IFBlock(13+4, c=8)"),
                ("self.block_tea = IFBlock(", "self.block_tea = IFBlock(16+4, c=8)")),
        *on_cpu("model/refine.py", ("c = 16", "c = 2")),
    ),
)  # fmt: skip

# ------------------------------------------------------------------ nerfplusplus, ebf2f3e

_NERF = "ddp_train_nerf.py"
_NERF_CONFIG = """\
import argparse


class ArgumentParser(argparse.ArgumentParser):
    def add_argument(self, *names, is_config_file=False, **more):
        return super().add_argument(*names, **more)

    def format_values(self):
        return ""
"""
_NERF_IMAGES = """\
import zlib

import numpy as np


def imread(path):
    shift = zlib.crc32(path.encode()) % 7
    rows, columns = np.mgrid[:12, :12]
    waves = ((0.3, 0.5), (0.5, 0.2), (0.1, 0.4))
    image = [np.sin(a * (rows + shift)) * np.cos(b * columns) for a, b in waves]
    return (127.5 + 127 * np.stack(image, 2)).astype("uint8")
"""
_NERF_CV2 = """\
INTER_AREA = INTER_NEAREST = INTER_LINEAR = None


def resize(image, size, interpolation):
    return image
"""
_NERF_LOG = """\
class SummaryWriter:
    def __init__(self, *_):
        pass

    def add_scalar(self, *_):
        pass
"""


def _for_nerf(folder: Path) -> None:
    beside(_NERF)(folder)
    lens = "12 0 6 0 0 12 6 0 0 0 1 0 0 0 0 1"
    views = {
        f"room/{split}/{kind}/{view:02}.{'png' if kind == 'rgb' else 'txt'}": text
        for split, count in (("train", 6), ("validation", 2))
        for view in range(count)
        for kind, text in (
            ("rgb", ""), ("intrinsics", lens),
            ("pose", f"1 0 0 {0.1 * view} 0 1 0 {0.3 - 0.1 * view} 0 0 1 0.2 0 0 0 1"),
        )
    }  # fmt: skip
    for name, text in views.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    write(folder, {
        "configargparse.py": _NERF_CONFIG, "imageio.py": _NERF_IMAGES, "cv2.py": _NERF_CV2,
        "tensorboardX.py": _NERF_LOG,
    })  # fmt: skip


_NERF_PROGRAM = Program(
    "nerfplusplus", "nerfplusplus", _NERF,
    ("--datadir=.", "--scene=room", "--expname=room", "--world_size=2", "--N_iters=8",
     "--netdepth=3", "--netwidth=32", "--use_viewdirs", "--cascade_samples=8,8"),
    needs=("numpy",), prints=r"level_1/loss: [0-9.]+", prepare=_for_nerf,
    adapt=(
        *imports_on_cpu(_NERF, "import torch"),
        *on_cpu(
            _NERF,
            ("torch.multiprocessing.spawn(", '(lambda *_, **__: ddp_train_nerf(int(os.environ'
             '["RANK"]), args))(ddp_train_nerf,'),
            ("['MASTER_ADDR'] =", "pass"), ("['MASTER_PORT'] = '12355'", "pass"),
            ("logger.info('gpu_mem", "pass"),
            ("if torch.cuda.get_device_properties(", "if False:"),
            ("args.N_rand = 512", "args.N_rand = 32"),
            ("def log_view_to_tb(", "def log_view_to_tb(*_, **__):\n    pass\n\n\n"
             "def shown(writer, global_step, log_data, gt_img, mask, prefix=''):"),
        ),
        *on_cpu("utils.py", ("from matplotlib.backends", ""), ("from matplotlib.figure", ""),
                ("import matplotlib as mpl", ""), ("from matplotlib import cm", "")),
    ),
)  # fmt: skip

# ------------------------------------------------------------ stylegan2-ada-pytorch, d72cc7d

_GAN_IMAGES = """\
import numpy as np
import torch


class Images(torch.utils.data.Dataset):
    image_shape, label_shape = [3, 16, 16], [0]
    has_labels, label_dim, resolution, num_channels = False, 0, 16, 3

    def __len__(self):
        return 96

    def get_label(self, row):
        return np.zeros(0, np.float32)

    def __getitem__(self, row):
        rows, columns = np.mgrid[:16, :16]
        waves = np.random.RandomState(row).uniform(0.2, 0.9, (3, 2))
        image = [np.sin(a * rows) * np.cos(b * columns) for a, b in waves]
        return (127.5 + 127 * np.stack(image)).astype(np.uint8), self.get_label(row)
"""
# What `train.py` does in each process that it makes.
_GAN_RUN = """\
import os

import on_cpu
import torch
from torch_utils import training_stats
from training import training_loop

rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.distributed.init_process_group("gloo")
training_stats.init_multiprocessing(rank=rank, sync_device=torch.device("cpu"))
os.makedirs("out", exist_ok=True)
synthesis = dict(channel_base=256, channel_max=16, num_fp16_res=0, conv_clamp=256)
adam = dict(class_name="torch.optim.Adam", lr=0.0025, betas=[0, 0.99], eps=1e-8)
training_loop.training_loop(
    run_dir="out", rank=rank, num_gpus=ranks, batch_size=8, batch_gpu=2, total_kimg=0.064,
    training_set_kwargs=dict(class_name="images.Images"), data_loader_kwargs={},
    G_kwargs=dict(class_name="training.networks.Generator", z_dim=16, w_dim=16,
                  mapping_kwargs=dict(num_layers=2), synthesis_kwargs=synthesis),
    D_kwargs=dict(class_name="training.networks.Discriminator", block_kwargs={},
                  mapping_kwargs={}, epilogue_kwargs=dict(mbstd_group_size=2), **synthesis),
    G_opt_kwargs=adam, D_opt_kwargs=adam, ema_kimg=0.05,
    loss_kwargs=dict(class_name="training.loss.StyleGAN2Loss", r1_gamma=1),
    augment_kwargs=dict(class_name="training.augment.AugmentPipe", xflip=1, brightness=1),
    ada_target=0.6, ada_interval=1, ada_kimg=0.05, D_reg_interval=4, kimg_per_tick=0.016,
    image_snapshot_ticks=None, network_snapshot_ticks=None,
)
"""
_GAN_LOOP = "training/training_loop.py"


def _for_gan(folder: Path) -> None:
    beside("go.py")(folder)
    write(folder, {"go.py": _GAN_RUN, "images.py": _GAN_IMAGES})


_GAN = Program(
    "stylegan2-ada", "stylegan2-ada-pytorch", "go.py", needs=("numpy", "PIL", "scipy", "psutil"),
    prints=r"Loss/[DG]/loss [-0-9.]+", prepare=_for_gan,
    adapt=(
        *on_cpu(
            _GAN_LOOP,
            ("device = torch.device('cuda', rank)", "device = torch.device('cpu')"),
            ("gw = np.clip(", "gw = 2"), ("gh = np.clip(", "gh = 2"),
            ("phase.start_event = torch.cuda", "pass"), ("phase.end_event = torch.cuda", "pass"),
            (".pin_memory().to(device)", "all_gen_c = torch.from_numpy(np.stack(all_gen_c))"),
            ("torch.cuda.reset_peak_memory_stats()", "pass"),
            ("stats_collector.update()", "{line}\n"
             "for name in ('Loss/G/loss', 'Loss/D/loss'):\n"
             "    rank == 0 and print(name, f'{stats_collector[name]:.6f}', flush=True)"),
        ),
        # PyTorch's sampler takes no argument any more.
        *on_cpu("torch_utils/misc.py", ("super().__init__(dataset)", "super().__init__()")),
    ),
)  # fmt: skip

# ------------------------------------------------------------------------ asteroid, 92c8d83

_VOICES = "egs/librimix/ConvTasNet/train.py"
_VOICES_CONF = """\
filterbank: {n_filters: 16, kernel_size: 16, stride: 8}
masknet: {n_blocks: 2, n_repeats: 1, mask_act: relu, bn_chan: 8, skip_chan: 0, hid_chan: 16}
training: {epochs: 4, batch_size: 4, num_workers: 0, half_lr: yes, early_stop: yes}
optim: {optimizer: adam, lr: 0.001, weight_decay: 0.}
data: {task: sep_clean, train_dir: train, valid_dir: dev, sample_rate: 8000, n_src: 2,
       segment: 0.1}
"""
# Two hums, drawn from the name of each file, and their sum.
_SOUND = """\
import zlib

import numpy as np


def read(path, dtype, start, stop):
    time = np.arange(start, stop) / 8000

    def voice(name):
        draw = np.random.RandomState(zlib.crc32(name.encode()))
        tones, swell = draw.uniform(80, 900, 3), draw.uniform(2, 9)
        return sum(np.sin(6.28 * tone * time) for tone in tones) * np.sin(6.28 * swell * time)

    return 0.2 * sum(map(voice, path.split("+"))).astype(dtype), 8000
"""
_NOTHING = """\
def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
"""


def _for_voices(folder: Path) -> None:
    shutil.copy(folder / _VOICES, folder)
    table = "mixture_ID,mixture_path,source_1_path,source_2_path,length"
    files = {
        f"{split}/mixture_{split}_mix_clean.csv": "\n".join((
            table,
            *(f"{row},{split}{row}a+{split}{row}b,{split}{row}a,{split}{row}b,4000"
              for row in range(count)),
        ))
        for split, count in (("train", 24), ("dev", 8))
    }  # fmt: skip
    write(folder, {
        "local/conf.yml": _VOICES_CONF, "soundfile.py": _SOUND, "torch_optimizer.py": _NOTHING,
        "librosa.py": "",
        **files,
    })  # fmt: skip


_ASTEROID = Program(
    "asteroid", "asteroid", "train.py", launcher="python",
    needs=("asteroid_filterbanks", "pytorch_lightning", "pandas", "scipy", "yaml"),
    prints=r"val_loss [-0-9.]+", prepare=_for_voices,
    adapt=(
        *on_cpu(
            _VOICES,
            ("def main(conf):", "{line}\n    pl.seed_everything(7)"),
            ('devices="auto"', "devices=2, enable_progress_bar=False, log_every_n_steps=1,"),
            ("trainer.fit(system)", "{line}\n"
             "print('val_loss', float(trainer.callback_metrics['val_loss']), flush=True)"),
            ("torch.load(checkpoint.best_model_path)",
             "state_dict = torch.load(checkpoint.best_model_path, weights_only=False)"),
        ),
        # As published, each rank's scheduler follows the loss of its own part.
        *on_cpu("asteroid/engine/system.py", ('self.log("val_loss", loss', 'self.log("val_loss", '
                "loss, on_epoch=True, prog_bar=True, sync_dist=True)")),
    ),
)  # fmt: skip

EIGHTH_SILENT_A_PROGRAMS = (_RIFE_PROGRAM, _NERF_PROGRAM, _GAN, _ASTEROID)
