"""The programs of the twelfth round's first half, and how each is started on CPU ranks. They run
unmodified but for the edits here, which remove GPUs, downloads, plots and large sizes."""

from __future__ import annotations

import json
import re
import struct
import wave
from dataclasses import replace
from pathlib import Path

from bench.abroad.edits import Edit, Line
from bench.abroad.programs import Program, on_cpu
from bench.abroad.quiet_programs import BOUND, beside, imports_on_cpu
from bench.abroad.seventh_programs import NO_KERNEL, TELLS
from bench.abroad.silent_programs import write
from bench.abroad.third_silent_programs import with_small

# ------------------------------------------------------------------------ ViT-pytorch

_VIT, _LOADER, _SIZES = "train.py", "utils/data_utils.py", "models/configs.py"
_APEX = """\
import torch


class DistributedDataParallel(torch.nn.parallel.DistributedDataParallel):
    def __init__(self, module, message_size=0, gradient_predivide_factor=1.0):
        super().__init__(module)
"""
_CONFIGS = """\
class ConfigDict(dict):
    __setattr__, __delattr__ = dict.__setitem__, dict.__delitem__

    def __getattr__(self, name):
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None
"""


def _for_vit(folder: Path) -> None:
    beside(_VIT, "torchvision")(folder)
    write(folder, {
        "apex/__init__.py": "amp = None", "apex/parallel.py": _APEX,
        "ml_collections.py": _CONFIGS, "scipy/__init__.py": "ndimage = None",
    })  # fmt: skip


_VISION = Program(  # jeonsworld 460a162: images, DistributedDataParallel by hand
    "vit", "ViT-pytorch", _VIT,
    ("--name=cifar", "--dataset=cifar10", "--model_type=ViT-B_16", "--img_size=32",
     "--train_batch_size=4", "--eval_batch_size=8", "--eval_every=12", "--num_steps=40",
     "--warmup_steps=4", "--learning_rate=1e-2"),
    ranks=4, needs=("numpy", "tensorboard", "tqdm"), prepare=_for_vit,
    adapt=(
        *imports_on_cpu(_VIT, "import logging"),
        *on_cpu(_VIT, ("model.load_from(np.load(", ""),
                ("args = parser.parse_args()", "{line}\nargs.local_rank = "
                 "int(os.environ['LOCAL_RANK'])")),
        *on_cpu(_LOADER, ("num_workers=4", "num_workers=1,"), ("num_workers=4", "num_workers=1,")),
        Edit(Line(_SIZES, "'size': (16, 16)", 1),
             "config.patches = ml_collections.ConfigDict({'size': (8, 8)})"),
        *on_cpu(_SIZES, ("hidden_size = 768", "config.hidden_size = 32"),
                ("mlp_dim = 3072", "config.transformer.mlp_dim = 64"),
                ("num_heads = 12", "config.transformer.num_heads = 2"),
                ("num_layers = 12", "config.transformer.num_layers = 2")),
    ),
)  # fmt: skip

# ------------------------------------------------------------------------ LMOps/minillm

_TUNE, _UTILS = "finetune.py", "utils.py"
_ZERO = {"zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True,
         "train_micro_batch_size_per_gpu": 1, "wall_clock_breakdown": False}  # fmt: skip


def _indexed(rows: int) -> tuple[bytes, bytes]:
    """Returns a data file and its index: in each row a question, 65535 and an answer."""
    texts = [
        [*(3 + (row * 5 + n) % 90 for n in range(4 + row % 3)), 65535,
         *(3 + (row * 7 + 3 * n) % 90 for n in range(6 + row % 4)), 1]
        for row in range(rows)
    ]  # fmt: skip
    data = [struct.pack(f"<{len(text)}H", *text) for text in texts]
    starts = [sum(map(len, data[:row])) for row in range(rows)]
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, rows, rows)
    sizes = struct.pack(f"<{rows}i", *map(len, texts))
    numbers = struct.pack(f"<{2 * rows}q", *starts, *range(rows))
    return b"".join(data), head + sizes + numbers


def _for_minillm(folder: Path) -> None:
    with_small(_TUNE, **{"ds.json": json.dumps(_ZERO)})(folder)
    (folder / "tokens").mkdir()
    for name, rows in (("train", 112), ("valid", 25)):
        data, index = _indexed(rows)
        (folder / f"tokens/{name}_0.bin").write_bytes(data)
        (folder / f"tokens/{name}_0.idx").write_bytes(index)


_MINILLM = Program(  # microsoft 4f2a9de: a language model distilled and fine-tuned with DeepSpeed
    "minillm", "LMOps/minillm", _TUNE,
    ("--deepspeed", "--deepspeed_config=ds.json", "--model-path=x", "--model-type=gpt2",
     "--do-train", "--data-dir=tokens", "--save=out", "--epochs=4", "--batch-size=2",
     "--eval-batch-size=2", "--lr=1e-3", "--lr-decay-style=cosine", "--max-length=24",
     "--max-prompt-length=8", "--num-workers=0", "--save-interval=-1", "--eval-interval=-1",
     "--log-interval=4", "--mid-log-num=0"),
    ranks=4, needs=("accelerate", "deepspeed", "numpy", "tqdm", "transformers"),
    prepare=_for_minillm, env=(("DS_ACCELERATOR", "cpu"), ("DS_BUILD_OPS", "0")),
    prints=r"avg_loss: [0-9.]+",
    adapt=(
        *imports_on_cpu(_TUNE),
        *on_cpu(
            _TUNE,
            ("import deepspeed", NO_KERNEL), ("    mpu,", ""), ("from peft", ""),
            ("from rouge_metric", "compute_metrics = None"),
            ("torch.cuda.memory_summary()", ""),
            ("safe_serialization=False", "model.module.save_pretrained(save_dir_path)"),
        ),
        *on_cpu(
            _UTILS,
            ("from peft", "import small"), ("    mpu", ""),
            ("config = AutoConfig", "config = small.gpt2().config"),
            ("model = AutoModelForCausalLM.from_pretrained", "model = small.gpt2()"),
            ("tokenizer = AutoTokenizer", "tokenizer = small.tokenizer()"),
        ),
    ),
)  # fmt: skip

# ------------------------------------------------------------------------ vits

_VITS, _MELS = "train.py", "mel_processing.py"
_ALIGNED = """\
import torch


def maximum_path(scores, mask):
    rows = (torch.arange(scores.shape[1]) * scores.shape[2]) // scores.shape[1]
    path = torch.nn.functional.one_hot(rows, scores.shape[2]).to(scores.dtype)
    return path.expand_as(scores) * mask
"""
_WAVES = """\
import wave
import numpy


def read(path):
    with wave.open(str(path), "rb") as file:
        sound = file.readframes(file.getnframes())
        return file.getframerate(), numpy.frombuffer(sound, numpy.int16)
"""
_FILTERS = """\
import numpy


def mel(rate, n_fft, mels, *_):
    return numpy.ones((mels, n_fft // 2 + 1), numpy.float32) / n_fft
"""
_VOICE = {
    "train": {
        "log_interval": 4, "eval_interval": 12, "seed": 1234, "epochs": 4, "learning_rate": 2e-4,
        "betas": [0.8, 0.99], "eps": 1e-9, "batch_size": 4, "fp16_run": False,
        "lr_decay": 0.999, "segment_size": 512, "c_mel": 45, "c_kl": 1.0,
    },
    "data": {
        "training_files": "train.txt", "validation_files": "valid.txt",
        "text_cleaners": ["english_cleaners2"], "max_wav_value": 32768.0, "sampling_rate": 8000,
        "filter_length": 64, "hop_length": 16, "win_length": 64, "n_mel_channels": 8,
        "mel_fmin": 0.0, "mel_fmax": None, "add_blank": True, "n_speakers": 0,
        "cleaned_text": True,
    },
    "model": {
        "inter_channels": 8, "hidden_channels": 8, "filter_channels": 16, "n_heads": 2,
        "n_layers": 1, "kernel_size": 3, "p_dropout": 0.1, "resblock": "2",
        "resblock_kernel_sizes": [3], "resblock_dilation_sizes": [[1, 3]],
        "upsample_rates": [4, 4], "upsample_initial_channel": 16,
        "upsample_kernel_sizes": [8, 8], "n_layers_q": 1, "use_spectral_norm": False,
    },
}  # fmt: skip


def _for_vits(folder: Path) -> None:
    beside(_VITS)(folder)
    sounds = range(72)
    write(folder, {
        "monotonic_align/__init__.py": _ALIGNED, "librosa/__init__.py": "",
        "librosa/util.py": "normalize = pad_center = tiny = None", "librosa/filters.py": _FILTERS,
        "scipy/__init__.py": "", "scipy/signal.py": "get_window = None",
        "scipy/io/__init__.py": "", "scipy/io/wavfile.py": _WAVES,
        "unidecode.py": "unidecode = str", "phonemizer.py": "phonemize = str",
        "tiny.json": json.dumps(_VOICE), "sounds/about.txt": "",
        "train.txt": "\n".join(f"sounds/{one}.wav|{'hello world'[one % 5:]}" for one in sounds),
        "valid.txt": "\n".join(f"sounds/{one}.wav|hello" for one in sounds[-8:]),
    })  # fmt: skip
    for one in sounds:
        with wave.open(str(folder / f"sounds/{one}.wav"), "wb") as file:
            file.setparams((1, 2, 8000, 0, "NONE", ""))
            file.writeframes(b"".join(struct.pack("<h", (n * (one + 3) * 37) % 9000 - 4500)
                                      for n in range(16 * (40 + one % 24))))  # fmt: skip
    nets = folder / "models.py"
    before, name, after = nets.read_text().partition("class DiscriminatorP")
    discriminators, end, rest = after.partition("class MultiPeriodDiscriminator")
    few = re.sub(r"groups=\d+", "groups=1", re.sub(r"\b(64|128|256|512|1024)\b", "8",
                                                   discriminators))  # fmt: skip
    nets.write_text(before + name + few + end + rest)


_SPEECH = Program(  # jaywalnut310 2e561ba: speech, DistributedDataParallel in spawned ranks
    "vits", "vits", _VITS, ("-c", "tiny.json", "-m", "tiny"), ranks=3, launcher="python",
    needs=("numpy", "PIL", "tensorboard"), prepare=_for_vits, bound=BOUND,
    adapt=(
        *imports_on_cpu(_VITS),
        *on_cpu(_VITS, ("assert torch.cuda.is_available()", ""),
                ("n_gpus = torch.cuda", "n_gpus = 3"),
                ("'MASTER_PORT'", "os.environ['MASTER_PORT'] = str(29600 + os.getpid() % 300)"),
                ("if rank == 0:", TELLS),
                ("num_workers=8", "train_loader = DataLoader(train_dataset, num_workers=0, "
                 "shuffle=False,"),
                ("num_workers=8", "eval_loader = DataLoader(eval_dataset, num_workers=0, "
                 "shuffle=False,"),
                ("[32,300", "[8, 48, 100],")),
        *on_cpu(_MELS, *2 * (
            ("onesided=True)", "center=center, pad_mode='reflect', normalized=False, "
             "onesided=True, return_complex=True)"),
            ("spec = torch.sqrt(spec.pow(2)", "spec = torch.sqrt(spec.abs().pow(2) + 1e-6)"))),
        *on_cpu("utils.py", *2 * (("global MATPLOTLIB_FLAG", "return torch.zeros((4, 4, 3)"
                                   ").numpy()"),)),
        *on_cpu("models.py", ("periods = [2", "periods = [2, 3]")),
        # Ranks that write and read one file at the same time fail now and then.
        *on_cpu("data_utils.py", ("if os.path.exists(spec_filename)", "if False:"),
                ("torch.save(spec, spec_filename)", "")),
    ),
)  # fmt: skip

# ------------------------------------------------------------------------ tevatron

_RETRIEVER = "src/tevatron/retriever"
_DRIVER, _ENCODER = f"{_RETRIEVER}/driver/train.py", f"{_RETRIEVER}/modeling/encoder.py"
_PAIRS = "\n".join(
    json.dumps({"query": f"what is {'abcdefgh'[row % 8]}{row}",
                "positive_passages": [{"docid": str(row), "title": f"about {row}",
                                       "text": "xyz"[row % 3] * (4 + row % 5)}],
                "negative_passages": [{"docid": str(row + one), "title": f"about {row + one}",
                                       "text": "uvw"[one] * 5} for one in range(1, 3)]})
    for row in range(96)
)  # fmt: skip

_TEVATRON = Program(  # texttron dd06310: a dense retriever by transformers' Trainer
    "tevatron", "tevatron", _DRIVER,
    ("--model_name_or_path=x", "--output_dir=out", "--dataset_path=pairs.jsonl", "--use_cpu",
     "--do_train", "--per_device_train_batch_size=4", "--num_train_epochs=4", "--save_steps=8",
     "--logging_steps=4", "--learning_rate=1e-3", "--train_group_size=2", "--pooling=eos",
     "--query_max_len=16", "--passage_max_len=24", "--report_to=none"),
    ranks=3, needs=("accelerate", "datasets", "PIL", "transformers"),
    prepare=with_small(_DRIVER, **{"pairs.jsonl": _PAIRS}),
    env=(("PYTHONPATH", "src:."), ("TOKENIZERS_PARALLELISM", "false")),
    prints=r"'loss': '?[0-9.]+",
    adapt=(
        *on_cpu(_DRIVER, ("import logging", "import small\n{line}"),
                ("tokenizer = AutoTokenizer", "tokenizer = (lambda *_, **__: small.tokenizer())(")),
        *on_cpu(f"{_RETRIEVER}/modeling/splade.py", ("from peft", "")),
        *on_cpu(_ENCODER, ("from peft", "LoraConfig = PeftModel = None"),
                ("base_model = cls.TRANSFORMER_CLS",
                 "import small\nbase_model = small.gpt2().transformer")),
        *on_cpu(f"{_RETRIEVER}/dataset.py",
                ("cache_dir=self.data_args", "cache_dir='cache' + os.environ['RANK'],")),
    ),
)  # fmt: skip


def _on(ranks: int, program: Program) -> Program:
    """The same program on another number of ranks."""
    adapt = tuple(replace(one, new=f"n_gpus = {ranks}") if one.new == "n_gpus = 3" else one
                  for one in program.adapt)  # fmt: skip
    return replace(program, name=f"{program.name}-{ranks}", ranks=ranks, adapt=adapt)


TWELFTH_A_PROGRAMS = (
    _VISION, _on(2, _VISION), _MINILLM, _on(2, _MINILLM),
    _SPEECH, _on(2, _SPEECH), _on(4, _SPEECH), _TEVATRON, _on(2, _TEVATRON), _on(4, _TEVATRON),
)  # fmt: skip
