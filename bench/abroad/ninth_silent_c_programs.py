"""The programs of the third part of the ninth round of silent faults, and how each is started on
CPU ranks. They run unmodified but for the edits here, which remove GPUs, downloads and size, and
repair what is wrong in a program as published, where `ninth_silent_c_round` says so."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from bench.abroad.cases import edit
from bench.abroad.programs import Program, on_cpu
from bench.abroad.quiet_programs import beside, imports_on_cpu
from bench.abroad.silent_programs import write

# ------------------------------------------- DeepLearningExamples' NCF, recommendations, 729963dd

_NCF = "ncf.py"
_NCF_SPEC = """\
feature_spec:
  user: {cardinality: 24, dtype: torch.int64}
  item: {cardinality: 40, dtype: torch.int64}
  label: {dtype: torch.float32}
source_spec:
  train:
  - {type: torch_tensor, features: [user, item], files: [train.pt]}
  - {type: torch_tensor, features: [label], files: [train_labels.pt]}
  test:
  - {type: torch_tensor, features: [user, item], files: [rank.pt]}
  - {type: torch_tensor, features: [label], files: [rank_labels.pt]}
channel_spec: {user_ch: [user], item_ch: [item], label_ch: [label]}
metadata: {test_samples_per_series: 10}
"""
# Who likes what, and the weights of an earlier training, as it saves them.
_NCF_DATA = """\
import torch
from neumf import NeuMF

torch.manual_seed(5)
pairs = torch.tensor([(n % 24, (n % 24 * 5 + n // 24 * 7) % 40) for n in range(192)])
tests = torch.tensor([(user, (user * 3 + item * 4) % 40) for user in range(24)
                      for item in range(10)])
torch.save(pairs, "train.pt")
torch.save(torch.ones(192, 1), "train_labels.pt")
torch.save(tests, "rank.pt")
torch.save(torch.eye(10)[0].repeat(24)[:, None], "rank_labels.pt")
saved = NeuMF(24, 40, 8, [16, 8], dropout=0.1).state_dict()
torch.save({f"module.{name}": 2 * value for name, value in saved.items()}, "model.pth")
"""
_APEX = """\
from torch.optim import Adam as FusedAdam
"""
_DLLOGGER = """\
shown = True


class Verbosity:
    VERBOSE = 1


class JSONStreamBackend:
    def __init__(self, *_, **__):
        pass


StdOutBackend = JSONStreamBackend


def init(backends):
    global shown
    shown = bool(backends)


def metadata(*_):
    pass


def log(step, data, verbosity=1):
    for name in ("train_loss", "val_loss"):
        if shown and name in data:
            print(name, f"{data[name]:.6f}", flush=True)
"""


def _for_ncf(folder: Path) -> None:
    beside(_NCF)(folder)
    write(folder, {
        "feature_spec.yaml": _NCF_SPEC, "data.py": _NCF_DATA, "dllogger.py": _DLLOGGER,
        "apex/optimizers.py": _APEX,
    })  # fmt: skip
    subprocess.run([sys.executable, "data.py"], cwd=folder, check=True)


_NCF_PROGRAM = Program(
    "ncf", "DeepLearningExamples/PyTorch/Recommendation/NCF", _NCF,
    ("--data=.", "--epochs=2", "--batch_size=128", "--valid_batch_size=80", "--factors=8",
     "--layers", "16", "8", "--dropout=0.1", "--seed=3", "--topk=3",
     "--load_checkpoint_path=model.pth"),
    needs=("numpy", "yaml"), prints=r"train_loss [0-9.]+", prepare=_for_ncf,
    adapt=(
        *imports_on_cpu(_NCF, "import torch.jit"),
        *on_cpu(_NCF, ('broadcast(torch.tensor([1], device="cuda")',
                       "torch.distributed.broadcast(torch.tensor([1]), 0)")),
        *on_cpu(
            "dataloading.py",
            ("map_location=torch.device('cuda", "chunk_data = torch.load(path_to_load)"),
            ("device='cuda:{}'", "epoch_indices = torch.randperm("
             "self.samples_end - self.samples_begin)"),
        ),
        # As published, names without the wrapper's prefix are loaded into the wrapper, which fails.
        *on_cpu(_NCF, ("model.load_state_dict(state_dict)",
                       "model.module.load_state_dict(state_dict)")),
    ),
)  # fmt: skip

# ------------------------------------------------------- CLIP4Clip, videos and captions, 508ffa3

_VIDEOS = "main_task_retrieval.py"
# Weights of CLIP, as small as its heads allow.
_CLIP_WEIGHTS = """\
import math

import torch
from modules.module_clip import CLIP

torch.manual_seed(5)
model = CLIP(64, 32, 2, 64, 16, 16, 49408, 64, 1, 2)
model.logit_scale.data.fill_(math.log(1 / 0.07))
torch.save(model.state_dict(), "modules/ViT-B-32.pt")
"""
# Frames of waves, drawn from the name of the video.
_FRAMES = """\
draw = np.random.RandomState(int("".join(filter(str.isdigit, video_path))))
rows, columns = np.mgrid[:32, :32]
waves = draw.uniform(0.1, 0.9, (2, 3, 2))
frames = [[np.sin(a * rows) * np.cos(b * columns) for a, b in frame] for frame in waves]
image_input = {"video": th.tensor(np.array(frames))}"""

_SIZE = "self.rawVideoExtractor.size, self.rawVideoExtractor.size), dtype=float)"


def _for_videos(folder: Path) -> None:
    beside(_VIDEOS)(folder)
    sizes = folder / "modules/cross-base/cross_config.json"
    sizes.write_text(json.dumps(json.loads(sizes.read_text()) | {"hidden_size": 64}))
    colours = ("red", "green", "blue", "black", "white", "grey", "pink")
    captions = [f"a {colours[row % 7]} wave meets {row % 5} rocks near {row} boats"
                for row in range(112)]  # fmt: skip
    text = {
        "sentences": [{"video_id": f"video{row}", "caption": one}
                      for row, one in enumerate(captions)],
        "videos": [{"video_id": f"video{row}", "url": f"?v={row}"} for row in range(112)],
    }  # fmt: skip
    write(folder, {
        "weights.py": _CLIP_WEIGHTS, "ftfy.py": "def fix_text(text):\n    return text\n",
        "text.json": json.dumps(text),
        "train.csv": "\n".join(("video_id", *(f"video{row}" for row in range(96)))),
        "val.csv": "\n".join(("video_id,sentence", *(f"video{row},{captions[row]}"
                                                      for row in range(96, 112)))),
    })  # fmt: skip
    subprocess.run([sys.executable, "weights.py"], cwd=folder, check=True)


_CLIP4CLIP = Program(
    "clip4clip", "CLIP4Clip", _VIDEOS,
    ("--do_train", "--num_thread_reader=0", "--epochs=2", "--batch_size=16", "--n_display=2",
     "--train_csv=train.csv", "--val_csv=val.csv", "--data_path=text.json", "--features_path=.",
     "--output_dir=out", "--lr=1e-4", "--max_words=12", "--max_frames=2", "--batch_size_val=16",
     "--datatype=msrvtt", "--coef_lr=0.1", "--loose_type", "--sim_header=seqTransf",
     "--cross_num_hidden_layers=1", "--freeze_layer_num=0", "--slice_framepos=2"),
    needs=("numpy", "pandas", "regex", "tqdm", "requests", "boto3"), prints=r"Train Loss: [0-9.]+",
    prepare=_for_videos,
    adapt=(
        *imports_on_cpu(_VIDEOS, "import torch"),
        *on_cpu(
            _VIDEOS,
            ("\"--local_rank\"", "parser.add_argument('--local_rank', type=int, "
             "default=int(os.environ['LOCAL_RANK']))"),
            ("device = torch.device(", "device = torch.device('cpu')"),
            ("logger.info(\"Epoch %d/%s Finished",
             "print(f'Train Loss: {tr_loss:.6f}', flush=True)"),
        ),
        edit(_VIDEOS, "if n_gpu > 1:", "if False:", 1),
        *on_cpu(
            "dataloaders/rawvideo_util.py",
            ("from PIL", ""), ("from torchvision", ""), ("import cv2", ""),
            ("self.transform = self._transform(", "pass"),
            ("image_input = self.video_to_tensor(", _FRAMES),
        ),
        *(edit("dataloaders/dataloader_msrvtt_retrieval.py", has, new)
          for has, new in (("image_resolution=224", "image_resolution=32,"),
                           ("rawVideoExtractor.size), dtype=np.float)", _SIZE)) * 2),
        # As published, most weights have 16 bits, in which updates are lost.
        *on_cpu("modules/modeling.py", ("convert_weights(self.clip)", "pass  # no 16 bits")),
    ),
)  # fmt: skip

# --------------------------------------------- sheeprl, reinforcement learning, Fabric, 33b63668
# It wants gymnasium 0.29.

_SHEEP = "sheeprl.py"


def _for_sheeprl(folder: Path) -> None:
    beside(_SHEEP)(folder)
    write(folder, {
        "decorator.py": "def decorator(function):\n    return function\n",
        "moviepy/__init__.py": "", "moviepy/decorators.py": "",
        "cv2.py": "INTER_AREA = None\n",
    })  # fmt: skip


_SHEEPRL = Program(
    "sheeprl", "sheeprl", _SHEEP,
    ("exp=sac", "env.id=Pendulum-v1", "env.num_envs=2", "env.sync_env=True",
     "env.capture_video=False", "fabric.devices=2", "fabric.strategy=ddp", "algo.total_steps=28",
     "algo.learning_starts=16", "algo.per_rank_batch_size=16", "algo.hidden_size=16",
     "algo.run_test=False", "buffer.size=256", "buffer.memmap=False", "metric.log_every=16",
     "checkpoint.save_last=False", "checkpoint.every=1000"),
    needs=("gymnasium", "hydra", "lightning", "pytorch_lightning", "rich", "tensorboard",
           "torchmetrics", "dotenv"),
    prints=r"value_loss [0-9.]+", prepare=_for_sheeprl,
    adapt=(
        *imports_on_cpu(_SHEEP, "from sheeprl"),
        *on_cpu(
            "sheeprl/algos/sac/sac.py",
            ("metrics_dict = aggregator.compute()", "{line}\nfabric.print('value_loss', "
             "f\"{float(metrics_dict['Loss/value_loss']):.6f}\", flush=True)"),
        ),
        # So that two runs draw the same samples.
        *on_cpu("sheeprl/data/buffers.py", ("default_rng()", "self._rng = np.random.default_rng("
                "int(os.environ['RANK']))")),
    ),
)  # fmt: skip

# -------------------------------------- DeepLearningExamples' TFT, series of measurements, 729963dd

_TFT, _SERIES = "train.py", "data_utils.py"
_TFT_SIZES = {
    "hidden_size": 16, "n_head": 2, "example_length": 16, "encoder_length": 12,
    "static_categorical_inp_lens": [6],
}  # fmt: skip
# Six meters whose use of power swings each day, and what would turn scaled values back.
_TFT_DATA = """\
import pickle

import numpy as np
from scalers import Same

for name, hours in (("train", 37), ("valid", 20), ("test", 20)):
    meters = []
    for meter in range(6):
        hour = np.arange(hours)
        power = np.sin(hour * (1 + meter) / 4) + (hour * hour + meter) % 7 / 20
        columns = (meter + 0 * hour, hour, power, hour % 24 / 24, hour // 24, hour / 40,
                   meter + 0 * hour)
        meters.append(np.stack(columns, 1).astype(np.float32))
    with open(f"{name}.bin", "wb") as file:
        pickle.dump(meters, file)
for name, value in (("tgt_scalers", dict.fromkeys(range(6), Same())), ("cat_encodings", {})):
    with open(f"{name}.bin", "wb") as file:
        pickle.dump(value, file)
"""
_SAME = """\
class Same:
    def inverse_transform(self, values):
        return values
"""


def _for_tft(folder: Path) -> None:
    beside(_TFT)(folder)
    write(folder, {
        "power.py": _TFT_DATA, "scalers.py": _SAME, "dllogger.py": _DLLOGGER,
        "apex/optimizers.py": _APEX, "sklearn/preprocessing.py": "",
        "sklearn/impute.py": "SimpleImputer = None\n",
    })  # fmt: skip
    subprocess.run([sys.executable, "power.py"], cwd=folder, check=True)


_WITH_AUTOCAST = "with amp.autocast(enabled=args.use_amp)"
_TFT_PROGRAM = Program(
    "tft", "DeepLearningExamples/PyTorch/Forecasting/TFT", _TFT,
    ("--data_path=.", "--dataset=electricity", "--epochs=2", "--batch_size=11", "--clip_grad=0.01",
     "--results=out", "--affinity=disabled", "--ema_decay=0.25", "--disable_benchmark",
     f"--overwrite_config={json.dumps(_TFT_SIZES)}"),
    needs=("numpy", "pandas", "tensorboard", "tqdm"), prints=r"val_loss [0-9.]+",
    prepare=_for_tft, env=(("TFT_SCRIPTING", "1"),),
    adapt=(
        *imports_on_cpu(_TFT),
        *on_cpu(
            _TFT,
            ("from log_helper", ""), ("import gpu_affinity", ""),
            ("setup_logger(args)", "os.makedirs(args.results, exist_ok=True)\n"
             "dllogger.init([] if args.local_rank else [1])"),
            ("amp.autocast(enabled=args.use_amp):", f"{_WITH_AUTOCAST}:"),
            ("amp.autocast(enabled=args.use_amp), torch.no_grad", f"{_WITH_AUTOCAST}, "
             "torch.no_grad():"),
            ("state_dict = torch.load(", "state_dict = torch.load(os.path.join(args.results, "
             "'checkpoint.pt'), weights_only=False)"),
            # As published, averages of what is made late begin with values of their own.
            ("model_ema(batch)", "model_ema(batch)\nmodel_ema.set(model)"),
        ),
        *on_cpu("inference.py", ("from log_helper", ""), ('with torch.jit.fuser("fuser2")',
                                                          "if True:")),
        *on_cpu(_SERIES, *(("num_workers=4", "num_workers=0,"),) * 3),
        # As published, the order of each rank has a seed of its own.
        *on_cpu(_SERIES, ("seed=args.seed + args.distributed_rank", "data_sampler = "
                "DistributedSampler(train_split, args.distributed_world_size, "
                "args.distributed_rank, seed=args.seed, drop_last=True)")),
    ),
)  # fmt: skip

# ------------------------------------------------------------------ CleanUNet, speech, 9487a8d

_SPEECH = "train.py"
_SPEECH_CONFIG = {
    "network_config": {
        "channels_input": 1, "channels_output": 1, "channels_H": 8, "max_H": 16, "kernel_size": 4,
        "encoder_n_layers": 3, "stride": 2, "tsfm_n_layers": 1, "tsfm_n_head": 2,
        "tsfm_d_model": 16, "tsfm_d_inner": 32,
    },
    "train_config": {
        "exp_path": "tiny",
        "log": {"directory": "./out", "ckpt_iter": "max", "iters_per_ckpt": 100,
                "iters_per_valid": 6},
        "optimization": {"n_iters": 23, "learning_rate": 2e-4, "batch_size_per_gpu": 2},
        "loss_config": {
            "ell_p": 1, "ell_p_lambda": 1, "stft_lambda": 1,
            "stft_config": {"sc_lambda": 0.5, "mag_lambda": 0.5, "band": "full",
                            "hop_sizes": [8, 16, 32], "win_lengths": [32, 64, 128],
                            "fft_sizes": [32, 64, 128]},
        },
    },
    "trainset_config": {"root": "./dns", "crop_length_sec": 0.05, "sample_rate": 16000},
    "dist_config": {"dist_backend": "nccl", "dist_url": "env://"},
}  # fmt: skip
# A voice of three tones, drawn from the name of the file, and noise beside it.
_SPEECH_FILES = """\
import re

import numpy as np
import torch


def load(path):
    draw = np.random.RandomState(int(re.findall(r"fileid_(\\d+)", path)[0]))
    time = np.arange(1600) / 16000
    sound = sum(np.sin(6.28 * tone * time) for tone in draw.uniform(80, 900, 3)) / 5
    if "noisy" in path:
        sound = sound + 0.05 * draw.randn(1600)
    return torch.tensor(sound, dtype=torch.float32)[None], 16000
"""


def _for_speech(folder: Path) -> None:
    beside(_SPEECH, "torchvision")(folder)
    for kind in ("clean", "noisy"):
        (folder / "dns/training_set" / kind).mkdir(parents=True)
        for row in range(24):
            (folder / f"dns/training_set/{kind}/fileid_{row}.wav").touch()
    write(folder, {"tiny.json": json.dumps(_SPEECH_CONFIG), "torchaudio.py": _SPEECH_FILES})


_CLEANUNET = Program(
    "cleanunet", "CleanUNet", _SPEECH, ("--config=tiny.json", "--group_name=one"),
    needs=("numpy", "scipy", "tensorboard", "tqdm"), prints=r"reduced loss: [0-9.]+",
    prepare=_for_speech,
    adapt=(
        *imports_on_cpu(_SPEECH),
        *on_cpu(_SPEECH, ("parser.add_argument('-r', '--rank'",
                          "parser.add_argument('-r', '--rank', type=int,\n"
                          "    default=int(os.environ['RANK']),"),
                # As published, all epochs have the order of the first.
                ("# for each epoch", "trainloader.sampler.set_epoch(n_iter)")),
        *on_cpu("distributed.py", ("assert torch.cuda.is_available()", "pass")),
        *on_cpu("network.py", ("x += skip_i", "x = x + skip_i[:, :, :x.shape[-1]]")),
        *on_cpu("dataset.py", ('"num_workers": 4', 'kwargs = {"batch_size": batch_size, '
                               '"num_workers": 0, "drop_last": False}')),
        *on_cpu(
            "stft_loss.py",
            ("return_complex=False", "x, fft_size, hop_size, win_length, window, "
             "return_complex=True"),
            ("real = x_stft", "real = x_stft.real"), ("imag = x_stft", "imag = x_stft.imag"),
        ),
    ),
)  # fmt: skip

NINTH_SILENT_C_PROGRAMS = (_NCF_PROGRAM, _CLIP4CLIP, _SHEEPRL, _TFT_PROGRAM, _CLEANUNET)
