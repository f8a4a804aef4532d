"""The programs of the second round of silent faults, and how each is started on CPU ranks. They run
unmodified but for the edits here, which remove GPUs and downloads, and repair what is silently
wrong in a program as published, where `second_silent_round` says so."""

from __future__ import annotations

import json
import re
from pathlib import Path

from bench.abroad.cases import edit
from bench.abroad.edits import Edit
from bench.abroad.programs import Program, on_cpu
from bench.abroad.quiet_programs import beside, imports_on_cpu

_RANK = "int(os.environ['RANK'])"
_GAN, _CIFAR = "train.py", "training/cifar/cifar10_deepspeed.py"
_DIFFUSION = "denoising_diffusion_pytorch/denoising_diffusion_pytorch.py"


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)


# ------------------------------------------------------------------------ heiretsu, bce9fb3


def _tokens(folder: Path) -> None:
    numbers = b"".join(((7 * n * n + 3 * n) % 64).to_bytes(2, "little") for n in range(4_000))
    for name in ("train_000000", "train_000001", "val_000000"):
        (folder / f"fineweb_{name}.bin").write_bytes(numbers)
        numbers = numbers[2:] + numbers[:2]


def _heiretsu(name: str, *arguments: str, adapt: tuple[Edit, ...] = ()) -> Program:
    return Program(
        f"heiretsu-{name}", "heiretsu", "train.py",
        ("--device=cpu", "--dist_backend=gloo", "--data_dir=.", "--batch_size=4",
         "--block_size=16", "--n_layer=2", "--n_head=2", "--n_embed=32", "--max_iters=26",
         "--eval_interval=13", "--eval_iters=2", "--dropout=0", *arguments),
        needs=("einops", "numpy"), prepare=_tokens, prints=r"loss [0-9.]+",
        adapt=(*on_cpu("gpt_model.py", ("vocab_size: int = 50257", "vocab_size: int = 64")),
               *adapt),
    )  # fmt: skip


# As published its ranks of one tensor-parallel group draw their embeddings with different seeds.
_ONE_SEED = on_cpu("train.py", ("model_init_seed = args.seed +", "model_init_seed = args.seed"))
_HEIRETSU = (
    _heiretsu("dp", "--dp=2", "--grad_accum_steps=2"),
    _heiretsu("tp", "--tp=2", "--grad_clip=0", adapt=_ONE_SEED),
    _heiretsu("tp-as-published", "--tp=2"),
    _heiretsu("pp", "--pp=2", "--grad_accum_steps=4"),
    _heiretsu("ep-as-published", "--ep=2", "--num_experts=4"),
    _heiretsu(
        "ep", "--ep=2", "--num_experts=4", "--grad_clip=0",
        adapt=(
            edit("ep_comm.py", "dist.all_to_all_single(",
                 "x_recv = torch.distributed.nn.functional.all_to_all_single(", 1),
            edit("ep_comm.py", "dist.all_to_all_single(",
                 "y_combined = torch.distributed.nn.functional.all_to_all_single(", 2),
            edit("ep_comm.py", "import torch.distributed as dist",
                 "{line}\nimport torch.distributed.nn.functional"),
            edit("train.py", " rank_for_data = 0 if", "rank_for_data = topo.ep_rank"),
            # Each token is seen by one rank only: dense gradients are averaged, those of experts,
            # which have the tokens of all ranks, divided.
            edit("train.py", "average_gradients(local_module, topo.dp_group)",
                 "for name, p in local_module.named_parameters():\n"
                 "    if p.grad is not None and 'expert_group' not in name:\n"
                 "        dist.all_reduce(p.grad, group=topo.ep_group)\n"
                 "for p in local_module.parameters():\n"
                 "    if p.grad is not None:\n"
                 "        p.grad.div_(topo.ep)"),
        ),
    ),
)  # fmt: skip

# ------------------------------------------------------------------------ hifi-gan, 4769534


def _for_hifigan(folder: Path) -> None:
    beside(_GAN)(folder)
    write(folder, {
        "librosa/__init__.py": "", "librosa/util.py": "def normalize(audio): return audio\n",
        "librosa/filters.py": "import numpy\n\ndef mel(rate, n_fft, mels, low, high):\n"
        "    return numpy.random.RandomState(0).rand(mels, n_fft // 2 + 1) / 40\n",
        "matplotlib/__init__.py": "def use(name): pass\n", "matplotlib/pylab.py": "",
    })  # fmt: skip
    config = json.loads((folder / "config_v3.json").read_text())
    config |= {
        "num_gpus": 2, "batch_size": 2, "upsample_initial_channel": 16, "segment_size": 1024,
        "num_workers": 0, "n_fft": 256, "num_mels": 80, "win_size": 256, "lr_decay": 0.9,
        "dist_config": {"dist_backend": "gloo", "dist_url": "env://", "world_size": 1},
    }  # fmt: skip
    (folder / "tiny.json").write_text(json.dumps(config))
    for name, count in (("training", 24), ("validation", 2)):
        rows = "\n".join(f"a{row}|x|x" for row in range(count))
        (folder / f"LJSpeech-1.1/{name}.txt").write_text(rows)
    models = folder / "models.py"
    smaller = re.sub(r"\b(128|256|512|1024)\b", lambda n: str(int(n[0]) // 16), models.read_text())
    models.write_text(smaller.replace("groups=16", "groups=4"))


_HIFIGAN = Program(
    "hifi-gan", "hifi-gan", _GAN,
    ("--config=tiny.json", "--training_epochs=5", "--stdout_interval=1",
     "--validation_interval=9"),
    needs=("scipy", "numpy", "tensorboard"), prepare=_for_hifigan, prints=r"Total : [0-9.]+",
    adapt=(
        *imports_on_cpu(_GAN, "import itertools"),
        *on_cpu(
            _GAN,
            ("device = torch.device('cuda", "device = torch.device('cpu')"),
            ("mp.spawn(train, nprocs", f"train({_RANK}, a, h)"),
            ("sw.add_figure('gt", "pass"), ("sw.add_figure('generated", "pass"),
            ("plot_spectrogram(y_hat_spec", ""),
            ("validation_loader = DataLoader(validset", "validation_loader = DataLoader(validset, "
             "num_workers=0, shuffle=False,"),
            ("sw = SummaryWriter(", "from unittest.mock import MagicMock\nsw = MagicMock()"),
        ),
        *on_cpu(
            "meldataset.py",
            ("= read(full_path)", "sampling_rate = 22050\n"
             "seed = sum(map(ord, full_path))\n"
             "data = np.random.RandomState(seed).randint(-9000, 9000, 3000)"),
            ("center=center, pad_mode='reflect'", "center=center, pad_mode='reflect', "
             "normalized=False, onesided=True, return_complex=True)"),
            ("spec = torch.sqrt(spec.pow(2)", "spec = torch.sqrt(torch.view_as_real(spec).pow(2)."
             "sum(-1) + 1e-9)"),
        ),
    ),
)  # fmt: skip

# ------------------------------------------------------------------------ diffusion, faed4db

_GO = """\
import on_cpu
import torch
import torchvision
from accelerate import PartialState

PartialState(cpu=True)
from denoising_diffusion_pytorch.denoising_diffusion_pytorch import GaussianDiffusion, Trainer, Unet

model = Unet(dim=8, dim_mults=(1, 2), flash_attn=False)
diffusion = GaussianDiffusion(model, image_size=16, timesteps=20, sampling_timesteps=4)
trainer = Trainer(
    diffusion, "images", train_batch_size=16, gradient_accumulate_every=2, train_lr=1e-3,
    train_num_steps=26, save_and_sample_every=13, num_samples=4, calculate_fid=False,
    ema_update_every=2, results_folder="out", amp=False,
)
trainer.train()
"""


def _for_diffusion(folder: Path) -> None:
    beside("go.py", "torchvision")(folder)
    write(folder, {"go.py": _GO})
    (folder / "denoising_diffusion_pytorch/__init__.py").write_text("")


_DIFFUSION_PROGRAM = Program(
    "diffusion", "denoising-diffusion-pytorch", "go.py",
    needs=("accelerate", "einops", "scipy", "ema_pytorch", "tqdm"), prepare=_for_diffusion,
    env=(("ACCELERATE_USE_CPU", "true"),),
    adapt=on_cpu(
        _DIFFUSION,
        ("self.ds = Dataset(", "import torchvision\nself.ds = torchvision.Plain(3, 16, None, 192)"),
        ("dl = DataLoader(self.ds", "dl = DataLoader(self.ds, batch_size = train_batch_size, "
         "shuffle = True)"),
    ),
)  # fmt: skip

# ------------------------------------------------------------------------ PPO, c281c32

_WALK = """\
import os

import on_cpu
import torch
from rsl_rl.env import VecEnv
from rsl_rl.runners import OnPolicyRunner
from tensordict import TensorDict


class Walk(VecEnv):
    '''A point that is rewarded for coming near the origin.'''

    num_envs, num_actions, max_episode_length, device, cfg = 8, 2, 20, "cpu", {}

    def __init__(self):
        self.draw = torch.Generator().manual_seed(int(os.environ["RANK"]))
        self.episode_length_buf = torch.zeros(self.num_envs, dtype=torch.long)
        self.state = torch.randn(self.num_envs, 4, generator=self.draw)

    def get_observations(self):
        return TensorDict({"policy": self.state.clone()}, batch_size=[self.num_envs])

    def step(self, actions):
        noise = torch.randn(self.num_envs, 2, generator=self.draw)
        self.state[:, :2] += 0.1 * actions + 0.02 * noise
        self.state[:, 2:] = actions
        self.episode_length_buf += 1
        dones = self.episode_length_buf >= self.max_episode_length
        self.episode_length_buf[dones] = 0
        self.state[dones] = torch.randn(int(dones.sum()), 4, generator=self.draw)
        late = {"time_outs": dones.float()}
        return self.get_observations(), -self.state.norm(dim=1), dones.float(), late


layers = {"class_name": "MLPModel", "hidden_dims": [32, 32], "activation": "elu"}
config = {
    "num_steps_per_env": 8, "save_interval": 100,
    "obs_groups": {"actor": ["policy"], "critic": ["policy"]},
    "algorithm": {"class_name": "PPO", "num_learning_epochs": 2, "num_mini_batches": 2,
                  "rnd_cfg": None, "learning_rate": 1e-3},
    "actor": layers | {"distribution_cfg": {"class_name": "GaussianDistribution"}},
    "critic": dict(layers),
}
torch.manual_seed(int(os.environ["RANK"]))
runner = OnPolicyRunner(Walk(), config, None, device="cuda:" + os.environ["LOCAL_RANK"])
runner.learn(7)
"""


def _for_ppo(folder: Path) -> None:
    beside("go.py")(folder)
    write(folder, {
        "go.py": _WALK, "git.py": "",
        "rsl_rl/utils/wandb_log_writer.py": "WandbLogWriter = None\n",
        "rsl_rl/utils/neptune_log_writer.py": "NeptuneLogWriter = None\n",
    })  # fmt: skip


_PPO = Program(
    "ppo", "rsl_rl", "go.py", needs=("tensordict", "numpy"), prepare=_for_ppo,
    adapt=(
        *on_cpu("rsl_rl/runners/on_policy_runner.py",
                ("self.device = device", "self.device = 'cpu'"),
                ('if self.device != f"cuda:', "if False:")),
        *on_cpu("rsl_rl/utils/logger.py",
                ("files_to_upload = self._store", "files_to_upload = []")),
    ),
)  # fmt: skip

# ------------------------------------------------------------------------ DPO, f8b8c0f

_DPO = "trainers.py"
_TINY = """\
import torch
from transformers import GPT2Config, GPT2LMHeadModel


def gpt2(*_, torch_dtype=None, **__):
    torch.manual_seed(3)
    sizes = {"vocab_size": 64, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=1, eos_token_id=1)).to(torch_dtype)


class Tokenizer:
    pad_token_id, eos_token_id = 0, 1

    def __call__(self, text, **_):
        ids = [2 + ord(one) % 60 for one in text]
        return {"input_ids": ids, "attention_mask": [1] * len(ids)}


def pairs(*_, **__):
    found = {}
    for row in range(64):
        text = "".join(chr(97 + (row * 5 + 3 * n) % 26) for n in range(12 + row % 5))
        found[text[:6] + str(row)] = {
            "responses": [text[6:], text[::-1][:8]], "pairs": [(0, 1)], "sft_target": text[6:],
        }
    return found
"""


def _for_dpo(folder: Path) -> None:
    beside("train.py")(folder)
    write(folder, {
        "tiny.py": _TINY, "wandb.py": "", "tensor_parallel.py": "",
        "bs4.py": "BeautifulSoup = NavigableString = None\n",
    })  # fmt: skip


_DPO_PROGRAM = Program(
    "dpo", "direct-preference-optimization", "train.py",
    ("model=gpt2-large", "loss=dpo", "loss.beta=0.1", "exp_name=x", "trainer=FSDPTrainer",
     "debug=true", "datasets=[made]", "batch_size=8", "eval_batch_size=8",
     "gradient_accumulation_steps=2",
     "sample_during_eval=false", "n_epochs=3", "lr=1e-3", "warmup_steps=4", "n_eval_examples=8",
     "eval_every=64", "wandb.enabled=false", "local_dirs=[.]", "model.reference_dtype=float32",
     "max_length=48", "max_prompt_length=16", "optimizer=AdamW", "fsdp_port=1"),
    needs=("transformers", "hydra", "datasets"), prepare=_for_dpo,
    adapt=(
        *imports_on_cpu("train.py", "import torch.nn as nn"),
        *on_cpu(
            "train.py",
            ("policy = transformers.Auto", "import tiny\npolicy = tiny.gpt2("),
            ("reference_model = transformers.Auto", "reference_model = tiny.gpt2("),
            ("trainer.save()", ""),  # FSDP1 cannot on a CPU
            ("mp.spawn(worker_main", f"worker_main({_RANK}, world_size, config, policy, "
             "reference_model)"),
        ),
        *on_cpu(
            "trainers.py",
            ("self.tokenizer = transformers.Auto", "import tiny\n"
             "self.tokenizer = tiny.Tokenizer()"),
            ("device_id=rank", "device_id=torch.device('cpu'),"),
        ),
        *on_cpu("utils.py", ("random.seed(self.seed)", "random.seed(int(self.seed))"),
                ('os.environ["MASTER_ADDR"]', ""), ('os.environ["MASTER_PORT"]', ""),
                ("all_values = [torch.empty_like(values)", "all_values = [torch.empty_like(values) "
                 "for _ in range(world_size)]")),
        *on_cpu("preference_datasets.py",
                ("for prompt, data in get_dataset(", "import tiny\nfor prompt, data in "
                 "tiny.pairs().items():")),
    ),
)  # fmt: skip

# ------------------------------------------------------------------------ DeepSpeed, 45b4b715

_DEEPSPEED = Program(
    "cifar-moe", "DeepSpeedExamples", _CIFAR,
    ("--dtype=fp32", "--moe", "--ep-world-size=2", "--num-experts", "2", "--top-k=1",
     "--epochs=3", "--log-interval=4"),
    needs=("deepspeed",), prepare=beside(_CIFAR, "torchvision"), prints=r"loss: [ 0-9.]+",
    env=(("DS_ACCELERATOR", "cpu"), ("DS_BUILD_OPS", "0")),
    adapt=(
        *imports_on_cpu(_CIFAR, "import deepspeed"),
        # It would compile its shared-memory operation.
        *on_cpu(_CIFAR, ("import torchvision", "import sys\nimport torchvision\n"
                         "sys.modules['deepspeed.comm.torch'].build_shm_op = lambda: None"),
                ('"lr": 0.001,', '"lr": 0.001, "torch_adam": True,'),
                ('"warmup_num_steps": 1000', '"warmup_num_steps": 12,')),
    ),
)  # fmt: skip

SILENT_PROGRAMS = (
    *_HEIRETSU, _HIFIGAN, _DIFFUSION_PROGRAM, _PPO, _DPO_PROGRAM, _DEEPSPEED,
)  # fmt: skip
