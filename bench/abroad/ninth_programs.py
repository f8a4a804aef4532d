"""The programs of the ninth round, and how each is started on CPU ranks. They run unmodified but
for the edits here, which remove GPUs, downloads, plots and large sizes."""

from __future__ import annotations

import json
from pathlib import Path

from bench.abroad.programs import Program, on_cpu
from bench.abroad.quiet_programs import beside, imports_on_cpu
from bench.abroad.seventh_programs import NO_KERNEL, TELLS
from bench.abroad.silent_programs import write
from bench.abroad.third_silent_programs import with_small

_WAVE, _PPO = "src/diffwave/__main__.py", "examples/gymnasium/torch_gymnasium_pendulum_ppo.py"
_FSDP, _CFM = "main_training_llama.py", "examples/images/cifar10/train_cifar10_ddp.py"
_MOSS, _UTILS = "finetune_moss.py", "fms_fsdp/utils"
_TELLS = "rank = replica_id\n" + TELLS.replace("import builtins, os", "import builtins")
# accelerate knows DeepSpeed with GPUs only.
_GLOO = (
    "import accelerate.state as state\nstate.PartialState._prepare_backend = "
    "lambda *_, **__: ('gloo', state.DistributedType.MULTI_GPU)\n"
)
_HERE = ("PYTHONPATH", ".")  # a package beside its examples

_TORCHAUDIO = """\
import pathlib
import torch


def _drawn(path, *shape):
    draw = torch.Generator().manual_seed(int(pathlib.Path(path).name.partition(".")[0]))
    return torch.rand(shape, generator=draw)


def load(path):
    pathlib.Path(path).read_bytes()
    return _drawn(path, 1, 2048) * 2 - 1, 22050


def spectrogram(path):
    return _drawn(path, 8, 8).numpy()
"""


def _for_diffwave(folder: Path) -> None:
    beside(_WAVE)(folder)
    sounds = {f"wavs/{number}.wav": "" for number in range(96)}
    write(folder, {"src/torchaudio.py": _TORCHAUDIO, **sounds})


_TORCHDYN = """\
import torch


class NeuralODE:
    def __init__(self, model, **_):
        self.model = model

    def trajectory(self, x, t_span):
        return torch.stack([x, x + self.model(t_span[:1].expand(len(x)), x)])
"""


def _for_torchcfm(folder: Path) -> None:
    beside(_CFM, "torchvision")(folder)
    write(folder / Path(_CFM).parent, {"torchdyn/__init__.py": "", "torchdyn/core.py": _TORCHDYN})


def _talk(row: int) -> str:
    said = {"Human": "abcdefgh"[row % 5 :] * 2, "MOSS": "xyz"[row % 3 :] * (1 + row % 4)}
    return json.dumps({"meta_instruction": "answer", "num_turns": 1, "chat": {"turn_1": said}})


NINTH_PROGRAMS = (
    Program(  # lmnt-com 0594106: speech, DistributedDataParallel in ranks of its own
        "diffwave", "diffwave", _WAVE, ("out", "wavs", "--max_steps=64"), ranks=3,
        launcher="python", needs=("numpy", "tensorboard", "tqdm"), prepare=_for_diffwave,
        env=(("PYTHONPATH", "src"),),
        adapt=(
            *imports_on_cpu(_WAVE, "from argparse"),
            *on_cpu(_WAVE, ("replica_count = device_count()", "replica_count = 3")),
            *on_cpu("src/diffwave/learner.py", ("init_process_group(", _TELLS)),
            *on_cpu("src/diffwave/dataset.py",
                    ("spectrogram = np.load(",
                     "spectrogram = torchaudio.spectrogram(spec_filename)"),
                    ("num_workers=os.cpu_count()", "num_workers=0,")),
            *on_cpu("src/diffwave/params.py", ("batch_size=16", "batch_size=12,"),
                    ("n_mels=80", "n_mels=8,"), ("crop_mel_frames=62", "crop_mel_frames=4,"),
                    ("residual_layers=30", "residual_layers=2,"),
                    ("residual_channels=64", "residual_channels=8,")),
        ),
    ),
    Program(  # c29ced63: reinforcement learning, gradients reduced by hand
        "skrl", "skrl", _PPO, ("--headless", "--num_envs=2", "--seed=5"), ranks=3, env=(_HERE,),
        needs=("gymnasium", "numpy", "tensorboard", "tqdm"), prepare=beside(_PPO),
        adapt=(
            *imports_on_cpu(_PPO, "import argparse"),
            *on_cpu(_PPO, ("memory_size=1024", "memory = RandomMemory(memory_size=32, "
                    "num_envs=env.num_envs, device=device)"),
                    ("cfg.rollouts =", "cfg.rollouts = 32"),
                    ("cfg.learning_epochs =", "cfg.learning_epochs = 2"),
                    ("cfg.mini_batches =", "cfg.mini_batches = 2"),
                    ("cfg_trainer =", 'cfg_trainer = {"timesteps": 960, "headless": True}')),
        ),
    ),
    Program(  # 5a296af: a language model, FSDP
        "fms-fsdp", "fms-fsdp", _FSDP,
        ("--use_dummy_dataset=True", "--model_variant=tiny", "--sharding_strategy=fsdp",
         "--mixed_precision=False", "--use_torch_compile=False", "--vocab_size=64",
         "--seq_length=32", "--num_steps=60", "--report_interval=5", "--checkpoint_interval=20",
         "--ckpt_save_path=ckpt", "--ckpt_load_path=ckpt"),
        ranks=4, needs=("fire", "fms", "pyarrow", "transformers"), prepare=beside(_FSDP),
        prints=r"loss: [0-9.]+",
        adapt=(
            *imports_on_cpu(_FSDP, "import math"),
            *on_cpu(_FSDP, ("device_id=torch", 'device_id=torch.device("cpu"),'),
                    ('torch.device("cuda"', 'torch.device("cpu"),')),
            *on_cpu(f"{_UTILS}/train_utils.py", ("torch.cuda.reset_peak", "")),
            *on_cpu(f"{_UTILS}/config_utils.py", (
                'if model_variant == "llama2_70b"', 'if model_variant == "tiny":\n    return '
                "LLaMAConfig(src_vocab_size=64, emb_dim=32, nheads=2, nlayers=2, multiple_of=8, "
                "max_expected_seq_len=32)\n{line}")),
        ),
    ),
    Program(  # cacd4dc: images, DistributedDataParallel
        "torchcfm", "conditional-flow-matching", _CFM,
        ("--parallel=True", "--model=icfm", "--num_channel=32", "--total_steps=32",
         "--batch_size=6", "--num_workers=1", "--warmup=5", "--save_step=60",
         "--output_dir=out/"),
        ranks=3, needs=("absl", "numpy", "ot", "tqdm"), prepare=_for_torchcfm, env=(_HERE,),
        adapt=(
            *imports_on_cpu(_CFM, "import copy"),
            *on_cpu(_CFM, ("num_res_blocks=2", "num_res_blocks=1,"),
                    ("channel_mult=", "channel_mult=[1],"),
                    ("num_head_channels=64", "num_head_channels=16,")),
            # As published, rank 0 opens no store at the port that it is given.
            *on_cpu(_CFM.replace("train_cifar10_ddp", "utils_cifar"),
                    ("torch.randn(64,", "torch.randn(4, 3, 32, 32, device=device),"),
                    ('os.environ["MASTER_ADDR"]', ""), ('os.environ["MASTER_PORT"]', "")),
        ),
    ),
    Program(  # c810e0b: a language model, accelerate with DeepSpeed
        "moss", "MOSS", _MOSS,
        ("--data_dir=.", "--output_dir=out", "--log_dir=log", "--train_bsz_per_gpu=2",
         "--eval_bsz_per_gpu=2", "--n_epochs=5", "--save_step=9", "--eval_step=10",
         "--learning_rate=1e-3"),
        ranks=3, needs=("accelerate", "deepspeed", "tensorboard", "transformers"),
        prepare=with_small(_MOSS, **{
            "train.jsonl": "\n".join(map(_talk, range(48))),
            "val.jsonl": "\n".join(map(_talk, range(12)))}),
        env=(("DS_ACCELERATOR", "cpu"), ("DS_BUILD_OPS", "0"),
             ("ACCELERATE_TORCH_DEVICE", "cpu"),
             ("ACCELERATE_USE_DEEPSPEED", "true"), ("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2"),
             ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1")),
        prints=r"Val loss: [0-9.]+",
        adapt=(
            *imports_on_cpu(_MOSS),
            *on_cpu(
                _MOSS,
                ("import torch.distributed as dist",
                 NO_KERNEL.replace("{line}", "{line}\nimport deepspeed")),
                ("accelerator = Accelerator(",
                 f"{_GLOO}accelerator = Accelerator(mixed_precision='no')"),
                ("tokenizer = AutoTokenizer", "import small\ntokenizer = small.tokenizer()"),
                ("tokenizer.eos_token_id = 1", ""),
                ("model = AutoModelForCausalLM", "model = small.gpt2()"),
                ("model.transformer.gradient_checkpointing = True", ""),
                ("assert model.transformer.gradient_check", ""),
                # As published, a rank may read what another one writes.
                ("torch.save(self.data, data_file)", ""),
                ("torch.save(self.no_loss_spans, no_loss", ""),
            ),
        ),
    ),
    Program(  # albertkim03 15870ce: experts on ranks, by hand
        "moe-ep", "moe-expert-parallelism", "train.py",
        ("--ranks=4", "--steps=80", "--port=29583"), ranks=4, launcher="python",
        prints=r"loss [0-9.]+",
        adapt=on_cpu("train.py", ("distributed.setup(rank", TELLS)),
    ),
)  # fmt: skip
