"""The programs of the seventh round, and how each is started on CPU ranks. They run unmodified but
for the edits here, which remove GPUs, downloads, plots and large sizes."""

from __future__ import annotations

import json
import shutil
import struct
import wave
from pathlib import Path

from bench.abroad.edits import Edit, Line
from bench.abroad.programs import SCRIPTS, Program, on_cpu
from bench.abroad.quiet_programs import beside, imports_on_cpu

_MOE, _PIPE, _SGP = "cifar10_deepspeed.py", "train.py", "gossip_sgd.py"
_GOSSIP = "gossip/distributed.py"
_DIFFUSION = "denoising_diffusion_pytorch/denoising_diffusion_pytorch_1d.py"
# In programs that start their ranks by themselves.
TELLS = (
    "import builtins, os\nbuiltins.bad_shard = str(rank) == os.environ.get('ABROAD_RANK')\n"
    "os.environ['RANK'] = str(rank)\n{line}"
)
NO_KERNEL = "{line}\nimport sys\nsys.modules['deepspeed.comm.torch'].build_shm_op = lambda: None"
_LIBROSA = """import sys, types, numpy, wave
util, filters, wavfile = map(types.ModuleType, ("librosa.util", "librosa.filters", "wavfile"))
util.normalize = lambda audio: audio / max(1e-9, abs(audio).max())
filters.mel = lambda rate, n_fft, mels, *_: numpy.ones((mels, n_fft // 2 + 1)) / n_fft
sys.modules["librosa.util"], sys.modules["librosa.filters"] = util, filters


def read(path):
    with wave.open(path) as file:
        frames = file.readframes(file.getnframes())
    return 22050, numpy.frombuffer(frames, dtype="int16").astype("float64")
"""


def _for_adaptive_span(folder: Path) -> None:
    beside("main.py")(folder)
    (folder / "data").mkdir()
    for name, count in (("train", 900), ("valid", 200), ("test", 200)):
        rows = (" ".join(f"word{(row * 5 + n * n) % 12}" for n in range(9)) for row in range(count))
        (folder / "data" / f"{name}.txt").write_text("\n".join(rows))


def _for_hifi_gan(folder: Path) -> None:
    beside("train.py")(folder)
    (folder / "librosa.py").write_text(_LIBROSA)
    (folder / "wavs").mkdir()
    for number in range(24):
        with wave.open(str(folder / "wavs" / f"{number}.wav"), "wb") as file:
            file.setparams((1, 2, 22050, 0, "NONE", ""))
            tone = ((at * (7 + number)) % 2000 - 1000 for at in range(4000))
            file.writeframes(b"".join(struct.pack("<h", one) for one in tone))
    for name, chosen in (("training", range(12)), ("validation", range(22, 24))):
        (folder / f"{name}.txt").write_text("\n".join(f"{number}|x" for number in chosen))
    settings = json.loads((folder / "config_v3.json").read_text())
    settings |= {"num_gpus": 2, "batch_size": 2, "segment_size": 1024,
                 "num_workers": 1, "upsample_initial_channel": 16}  # fmt: skip
    settings["dist_config"]["dist_backend"] = "gloo"
    (folder / "tiny.json").write_text(json.dumps(settings))
    models = (folder / "models.py").read_text()
    for large in ("1024", "512", "256", "128", "32"):
        models = models.replace(f" {large},", " 16,").replace(f"({large},", "(16,")
    (folder / "models.py").write_text(models)


def _for_diffusion(folder: Path) -> None:
    shutil.copy(SCRIPTS / "diffusion_1d.py", folder)
    (folder / "denoising_diffusion_pytorch" / "__init__.py").write_text("")


SEVENTH_PROGRAMS = (
    Program(  # DeepSpeedExamples 45b4b715
        "ds-moe", "DeepSpeedExamples/training/cifar", _MOE,
        ("--dtype=fp32", "--stage=2", "--moe", "--ep-world-size=2", "--num-experts=2", "--top-k=1",
         "--moe-param-group", "--epochs=3", "--log-interval=4"),
        needs=("deepspeed",), prepare=beside(_MOE, "torchvision"), prints=r"loss: +[0-9.]+",
        env=(("DS_ACCELERATOR", "cpu"),),
        adapt=on_cpu(
            _MOE, ("import deepspeed", NO_KERNEL),
            ('"lr": 0.001,', '"lr": 0.001, "torch_adam": True,'),
        ),
    ),
    Program(
        "ds-pipe", "DeepSpeedExamples/training/pipeline_parallelism", _PIPE,
        ("--deepspeed_config=ds_config.json", "--backend=gloo", "-p=3", "--steps=16"), ranks=3,
        needs=("deepspeed",), prepare=beside(_PIPE, "torchvision"),
        env=(("DS_ACCELERATOR", "cpu"),), prints=r"loss: [0-9.]+",
        adapt=(
            *on_cpu(
                _PIPE,
                ("from torchvision.models import AlexNet", "AlexNet = lambda **_: [torch.nn.Flatten"
                 "(), torch.nn.Linear(3072, 32), torch.nn.ReLU(), torch.nn.Linear(32, 32), "
                 "torch.nn.ReLU(), torch.nn.Linear(32, 10)]"),
                ("from torchvision.models import vgg19", "import on_cpu"),
                ("import deepspeed", NO_KERNEL),
                ("net = PipelineModule(layers=", "net = PipelineModule(layers=net,"),
            ),
            *on_cpu("ds_config.json", ('"train_batch_size"', '"train_batch_size": 16,'),
                    ('"train_micro', '"train_micro_batch_size_per_gpu": 4,'),
                    ('"lr"', '"lr": 0.001, "torch_adam": true,')),
        ),
    ),
    Program(  # 373f75b
        "ring-attention", "ring-attention-pytorch", "assert.py",
        ("--world-size=4", "--seq-len=32", "--heads=2", "--num-grouped-query-heads=2",
         "--dim-head=8"), ranks=4, launcher="python",
        needs=("beartype", "click", "einops", "jaxtyping"),
        adapt=(
            *on_cpu(
                "assert.py",
                ("ring_out = ddp_ring", "optimizer = torch.optim.SGD(ddp_ring_attention_net."
                 "parameters(), lr=0.0)\nfor step in range(6):\n    optimizer.zero_grad()\n"
                 "    {line}\n    ring_out.mean().backward()\n    optimizer.step()"),
            ),
            Edit(Line("assert.py", "ring_out.mean().backward()", 1), ""),
            Edit(Line("assert.py", "setup(rank, world_size, use_cuda)"), TELLS),
        ),
    ),
    Program(  # e682064
        "sgp", "stochastic_gradient_push", _SGP,
        ("--backend=gloo", "--network_interface_type=ethernet", "--batch_size=8", "--lr=0.001",
         "--num_dataloader_workers=0", "--num_epochs=3", "--print_freq=2",
         "--num_iterations_per_training_epoch=6", "--dataset_dir=data", "--checkpoint_dir=out/",
         "--num_itr_ignore=0", "--schedule", "30", "0.1"),
        ranks=4, needs=("numpy",),
        prepare=beside(_SGP, "torchvision", data=lambda folder: (folder / "out").mkdir()),
        adapt=(
            *imports_on_cpu(_SGP, "import argparse"),
            *on_cpu(
                _SGP,
                ("if isinstance(m, Bottleneck)", "if False:"),
                ("kl_target = torch.zeros(target.shape[0]",
                 "kl_target = torch.zeros(target.shape[0], 10).scatter_("),
                ("target.shape[0], 1000, device='cuda').scatter_(",
                 "target.shape[0], 10).scatter_("),
                ("args.master_addr = os.environ", ""),
                ("args.rank = int(os.environ['SLURM", "args.rank = int(os.environ['RANK'])"),
                ("args.world_size = int(os.environ['SLURM",
                 "args.world_size = int(os.environ['WORLD_SIZE'])"),
                ("args.comm_device = ", "args.comm_device = torch.device('cpu')"),
                ("os.environ['GLOO_SOCKET", "dict("),
                ("network_interface_type=args", "name=args.network_interface_type"),
                ("correct_k = correct[:k].view",
                 "correct_k = correct[:k].reshape(-1).float().sum(0, keepdim=True)"),
                ("os.environ['MASTER_ADDR']", ""), ("os.environ['MASTER_PORT']", ""),
            ),
            *on_cpu(
                _GOSSIP,
                ("device_ids = list(range(", "device_ids = [0]"),
                ("cp = cp.cpu()", ""),
                ("self.gossip_stream = torch.cuda.Stream()", "self.gossip_stream = None"),
                ("self.gossip_stream = torch.cuda.current", "self.gossip_stream = None"),
                ("return scatter_kwargs(", "return (inputs,), (kwargs,)"),
                ("self.gossip_stream.wait_stream", ""),
                ("with torch.cuda.stream(self", "if True:"),
                ("with torch.cuda.stream(gossip", "if True:"),
                ("gossip_stream.synchronize()", ""),
            ),
            *on_cpu("gossip/gossiper.py", (".in_msg_buffer.pin_memory()", "pass")),
        ),
    ),
    Program(  # 4769534
        "hifi-gan", "hifi-gan", "train.py",
        ("--config=tiny.json", "--input_wavs_dir=wavs", "--input_training_file=training.txt",
         "--input_validation_file=validation.txt", "--training_epochs=3", "--checkpoint_path=out",
         "--stdout_interval=2", "--checkpoint_interval=6", "--validation_interval=6",
         "--summary_interval=4"), launcher="python", needs=("numpy", "tensorboard"),
        prepare=_for_hifi_gan, prints=r"Gen Loss Total : +[0-9.]+",
        adapt=(
            *imports_on_cpu("train.py"),
            *on_cpu(
                "train.py",
                ("device = torch.device(", "device = torch.device('cpu')"),
                ("if h.num_gpus > 1:", TELLS),
                ("from torch.utils.tensorboard", "from unittest.mock import MagicMock\n"
                 "SummaryWriter = lambda *_: MagicMock()"),
                ("plot_spectrogram, scan", "from utils import scan_checkpoint, load_checkpoint, "
                 "save_checkpoint\nplot_spectrogram = lambda *_: None"),
            ),
            *on_cpu("utils.py", ("import matplotlib", ""), ("matplotlib.use", ""),
                    ("import matplotlib.pylab", "")),
            *on_cpu(
                "meldataset.py", ("from librosa.util", "import librosa\n{line}"),
                ("from scipy.io", "from librosa import read"),
                ("center=center, pad_mode", "center=center, onesided=True, return_complex=True)"),
                ("spec = torch.sqrt(", "spec = spec.abs()"),
            ),
        ),
    ),
    Program(  # 27b815f
        "adaptive-span", "adaptive-span", "main.py",
        ("--distributed", "--data=data", "--data-unit=ppl", "--nlayers=2", "--hid-sz=16",
         "--inner-hid-sz=32", "--nheads=2", "--block-sz=16", "--attn-span=16", "--batch-sz=12",
         "--optim=sgd", "--lr=0.01", "--niter=4", "--nbatches=10", "--grad-clip=0.3",
         "--adapt-span", "--checkpoint=out.pt"),
        ranks=3, prepare=_for_adaptive_span, prints=r"train: [0-9.]+ppl",
        adapt=(
            *imports_on_cpu("main.py", "import math"),
            *on_cpu("utils.py", ("assert torch.cuda", ""), ("backend='nccl'", "backend='gloo',"),
                    ("= torch.device('cuda')", "env_params['device'] = torch.device('cpu')")),
            # A late rank takes the first rank's new corpus for one that was there before.
            *on_cpu("data.py", ("if os.path.exists(corpus_path):", "found = os.path.exists("
                    "corpus_path)\ntorch.distributed.barrier()\nif found:")),
            *on_cpu("data.py", *2 * (("corpus = torch.load(corpus_path)",
                                      "corpus = torch.load(corpus_path, weights_only=False)"),)),
        ),
    ),
    Program(  # c281c32
        "rsl-rl", "rsl_rl", "rsl_ppo.py", ranks=3, needs=("tensordict",),
        prepare=lambda folder: (beside("rsl_ppo.py")(folder),
                                shutil.copy(SCRIPTS / "rsl_ppo.py", folder), None)[-1],
        prints=r"Mean value loss: +[0-9.]+", adapt=(
            *imports_on_cpu("rsl_rl/runners/on_policy_runner.py", "import time"),
            *on_cpu("rsl_rl/runners/on_policy_runner.py",
                    ('if self.device != f"cuda', "self.device = 'cpu'\nif False:")),
            *on_cpu("rsl_rl/utils/logger.py", ("import git", "from unittest.mock import MagicMock\n"
                    "git = MagicMock()")),
        ),
    ),
    Program(  # faed4db
        "diffusion", "denoising-diffusion-pytorch", "diffusion_1d.py", ranks=3,
        needs=("accelerate", "ema_pytorch"), prepare=_for_diffusion,
        env=(("ACCELERATE_USE_CPU", "1"),),
        adapt=on_cpu(
            _DIFFUSION,
            ("dl = DataLoader(dataset", "dl = DataLoader(dataset, shuffle=True, num_workers=1, "
             "batch_size=train_batch_size)"),
        ),
    ),
)  # fmt: skip
