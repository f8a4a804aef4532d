"""The programs of the third part of the eighth round of silent faults, and how each is started on
CPU ranks. They run unmodified but for the edits here, which remove GPUs, downloads and size, and
repair what is wrong in a program as published, where `eighth_silent_c_round` says so."""

from __future__ import annotations

import json
import math
from pathlib import Path

from bench.abroad.cases import edit
from bench.abroad.programs import Program, on_cpu
from bench.abroad.quiet_programs import beside, imports_on_cpu
from bench.abroad.silent_programs import write

# --------------------------------------------------------------------------- OpenLTM, 0b30050

_LTM, _FORECAST, _FACTORY = "run.py", "exp/exp_forecast.py", "data_provider/data_factory.py"
_SCALER = """\
class StandardScaler:
    def fit(self, data):
        self.mean, self.scale = data.mean(0), data.std(0)

    def transform(self, data):
        return (data - self.mean) / self.scale
"""


def _series(folder: Path) -> None:
    rows = (
        ",".join([f"d{n}", *(f"{math.sin(n / (5 + 2 * v)) + (n * n + v) % 17 / 40:.4f}"
                             for v in range(3))])
        for n in range(260)
    )  # fmt: skip
    write(folder, {
        "series.csv": "\n".join(("date,a,b,c", *rows)) + "\n",
        "scaler.py": _SCALER,
    })  # fmt: skip


_OPENLTM = Program(
    "openltm", "OpenLTM", _LTM,
    ("--task_name=forecast", "--is_training=1", "--model_id=tiny", "--model=timer_xl",
     "--data=MultivariateDatasetBenchmark", "--root_path=.", "--data_path=series.csv",
     "--seq_len=24", "--input_token_len=8", "--output_token_len=8", "--test_seq_len=24",
     "--test_pred_len=8", "--e_layers=2", "--d_model=32", "--d_ff=64", "--n_heads=4",
     "--batch_size=16", "--learning_rate=0.002", "--train_epochs=3", "--lradj=type2",
     "--num_workers=0", "--use_norm", "--valid_last", "--ddp"),
    needs=("einops", "numpy", "pandas", "transformers"), prints=r"Vali Loss: [0-9.]+",
    prepare=beside(_LTM, data=_series),
    adapt=(
        *imports_on_cpu(_LTM, "import argparse"),
        *on_cpu(
            _FORECAST,
            ("self.device = torch.device('cuda:", 'self.device = torch.device("cpu")'),
            # As published, only rank 0 has the sum by which all ranks stop.
            ("dist.reduce(total_loss", "dist.all_reduce(total_loss, op=dist.ReduceOp.SUM)"),
        ),
        *on_cpu("data_provider/data_loader.py", ("from sklearn", "from scaler import *")),
        *on_cpu("utils/tools.py", ("import matplotlib", ""), ("plt.switch_backend", "")),
        edit(_FACTORY, "persistent_workers=True", ""),
        edit(_FACTORY, "pin_memory=True", ""),
    ),
)  # fmt: skip

# ------------------------------------------------------------------------ torchshard, 89e21de

_SHARD, _GPT, _IMAGES = "projects/minGPT/main.py", "mingpt/model.py", "mingpt/utils.py"
_CIFAR = """\
import numpy as np


class CIFAR10:
    def __init__(self, root, train, **_):
        draw = np.random.RandomState(0)
        first = draw.randint(0, 256, (48, 1, 1, 3))
        steps = np.arange(8)[:, None, None] * 16 + np.arange(8)[:, None] * 5
        self.images = ((first + steps) % 256).astype("uint8")

    def __len__(self):
        return len(self.images)

    def __getitem__(self, row):
        return self.images[row], 0
"""
# The norm of all gradients, of which a rank has a part of those that are divided.
_WHOLE_NORM = """\
parts, whole = [], []
for p in model.parameters():
    divided = ts.get_parallel_dim(p) in ((0, 1, -1) if p.dim() > 1 else (1, -1))
    (parts if divided else whole).append(p.grad.square().sum())
parts = torch.stack(parts).sum()
dist.all_reduce(parts)
norm = (parts + torch.stack(whole).sum()).sqrt()
torch.nn.utils.clip_grads_with_norm_(model.parameters(), tconf.grad_norm_clip, norm)"""


def _images(folder: Path) -> None:
    write(folder / _PROJECT, {
        "torchvision/__init__.py": "", "torchvision/datasets.py": _CIFAR,
    })  # fmt: skip


_PROJECT = "projects/minGPT"
_TORCHSHARD = Program(
    "torchshard", "torchshard", _SHARD,
    (".", "--dist-url=env://", "--world-size=-1", "--rank=-1", "--workers=0", "--epochs=2",
     "--batch-size=8", "--n-layer=2", "--n-head=4", "--n-embd=32", "--print-freq=2",
     "--enable-model-parallel", "--enable-one-data-group"),
    needs=("numpy", "tqdm"), prints=r"Loss [0-9.e+-]+", env=(("PYTHONPATH", "."),),
    prepare=beside(_SHARD, data=_images),
    adapt=(
        *imports_on_cpu(_SHARD, "import argparse"),
        *on_cpu(
            _SHARD,
            ("C = torch.load(", "C = torch.arange(64 * 3).view(64, 3) * 7.0 % 256"),
            ("if not torch.cuda.is_available():", "if False:"),
            # As published, each rank clips by the norm of what it has itself.
            ("torch.nn.utils.clip_grad_norm_(", _WHOLE_NORM),
        ),
        # As published, the attribute is looked for where it is not, and all parts begin alike.
        *on_cpu(f"{_PROJECT}/{_GPT}", ("                module.weight.data,", "module.weight,")),
        *on_cpu(
            f"{_PROJECT}/{_IMAGES}", ("self.perm = torch.arange(32*32)", "self.perm = "
                                      "torch.arange(8*8)"),
            ("self.block_size = 32*32 - 1", "self.block_size = 8*8 - 1"),
        ),
    ),
)  # fmt: skip

# ------------------------------------------------------------------------ spinningup, 038665d

_PPO = "spinup/algos/pytorch/ppo/ppo.py"
_LOGX, _CORE = "spinup/utils/logx.py", "spinup/algos/pytorch/ppo/core.py"
# The calls of MPI that the program makes, by a process group.
_MPI = """\
import numpy as np
import torch
import torch.distributed as dist

dist.init_process_group("gloo")


class World:
    def Get_rank(self):
        return dist.get_rank()

    def Get_size(self):
        return dist.get_world_size()

    def Bcast(self, array, root):
        dist.broadcast(torch.from_numpy(array), root)

    def Allreduce(self, array, into, op):
        into[...] = array
        dist.all_reduce(torch.from_numpy(into), op)


class MPI:
    COMM_WORLD = World()
    SUM, MIN, MAX = dist.ReduceOp.SUM, dist.ReduceOp.MIN, dist.ReduceOp.MAX
"""
# A point that is to be moved to a place.
_GYM = """\
import numpy as np

from gym.spaces import Box


class Reach:
    observation_space, action_space = Box(6), Box(3)

    def reset(self):
        self.place, self.goal = np.random.uniform(-1, 1, (2, 3))
        self.left = 12
        return np.concatenate([self.place, self.goal])

    def step(self, action):
        self.place = np.clip(self.place + 0.2 * action, -1, 1)
        self.left -= 1
        reward = -float(np.linalg.norm(self.place - self.goal))
        return np.concatenate([self.place, self.goal]), reward, self.left == 0, {}


def make(name):
    return Reach()
"""
_SPACES = """\
class Box:
    def __init__(self, size):
        self.shape = (size,)


class Discrete:
    pass
"""


def _for_ppo(folder: Path) -> None:
    write(folder, {
        "mpi4py/__init__.py": _MPI, "gym/__init__.py": _GYM, "gym/spaces.py": _SPACES,
        # It imports TensorFlow, for other algorithms.
        "spinup/__init__.py": "",
    })  # fmt: skip


_SPINNINGUP = Program(
    "spinningup", "spinningup", _PPO, ("--cpu=1", "--steps=192", "--epochs=3", "--hid=16"),
    needs=("numpy", "psutil", "tqdm"), prints=r"LossV \| +[-0-9.e]+", prepare=_for_ppo,
    env=(("PYTHONPATH", "."),),
    adapt=(
        *on_cpu(_PPO, ("vf_lr=1e-3, train_pi_iters=80", "vf_lr=1e-3, train_pi_iters=6, "
                       "train_v_iters=6, lam=0.97, max_ep_len=1000,"),
                ("target_kl=0.01,", "target_kl=0.5, logger_kwargs=dict(), save_freq=10):")),
        *on_cpu(_LOGX, ("import joblib", ""), ("import tensorflow", "")),
        *on_cpu("spinup/utils/run_utils.py", ("import cloudpickle", "")),
        *on_cpu(_CORE, ("import scipy.signal", ""),
                ("return scipy.signal.lfilter(", "sums = x[::-1].copy()\n"
                 "for n in range(1, len(sums)):\n    sums[n] += discount * sums[n - 1]\n"
                 "return sums[::-1]")),
    ),
)  # fmt: skip

# ------------------------------------------------------------------------ tape, 6d345c2

_APEX = """\
import functools

import torch

flat_dist_call = None
# It leaves out what has no gradient.
DistributedDataParallel = functools.partial(
    torch.nn.parallel.DistributedDataParallel, find_unused_parameters=True
)
"""
_LMDB = """\
import pickle
from pathlib import Path


class Rows:
    def __init__(self, path):
        lines = Path(path).read_text().splitlines()
        rows = [dict(primary=line, clan=0, family=0) for line in lines]
        self.rows = {str(n).encode(): row for n, row in enumerate(rows)}
        self.rows[b"num_examples"] = len(lines)

    def begin(self, write):
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def get(self, key):
        return pickle.dumps(self.rows[key])


def open(path, **_):
    return Rows(path)
"""
_TAPE_RUN = """\
import on_cpu
import torch.distributed as dist
from tape.main import run_train

dist.init_process_group("gloo")
run_train()
"""
_PROTEIN = {
    "vocab_size": 30, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 64, "max_position_embeddings": 64,
}  # fmt: skip
_TRAINING, _ADAM = "tape/training.py", "tape/optimization.py"


def _proteins(folder: Path) -> None:
    def chain(row: int) -> str:
        letters = "ACDEFGHIKLMNPQRSTVWY"
        return "".join(letters[(row * 7 + n * (1 + row % 3)) % 20] for n in range(16 + row % 9))

    write(folder, {
        "go.py": _TAPE_RUN, "tiny.json": json.dumps(_PROTEIN), "lmdb.py": _LMDB,
        "tensorboardX.py": "SummaryWriter = None\n", "apex/__init__.py": "",
        "apex/amp.py": "_amp_state = None\n", "apex/parallel/__init__.py": "",
        "apex/parallel/distributed.py": _APEX, "amp_C.py": "", "apex_C.py": "",
        "data/README": "", "data/pfam/pfam_train.lmdb": "\n".join(map(chain, range(96))),
        "data/pfam/pfam_valid.lmdb": "\n".join(map(chain, range(100, 116))),
    })  # fmt: skip


_TAPE = Program(
    "tape", "tape", "go.py",
    ("transformer", "masked_language_modeling", "--model_config_file=tiny.json",
     "--batch_size=16", "--gradient_accumulation_steps=2", "--num_train_epochs=2",
     "--learning_rate=2e-3", "--warmup_steps=3", "--num_workers=0", "--num_log_iter=2",
     "--exp_name=tiny", "--no_cuda", "--debug"),
    needs=("boto3", "numpy", "requests", "tqdm"), prints=r"Loss: [0-9.e+-]+",
    prepare=beside("go.py", data=_proteins),
    adapt=(
        *on_cpu("tape/main.py", ("parser.add_argument('--local_rank', type=int, default=-1,",
                                 "parser.add_argument('--local_rank', type=int, "
                                 "default=int(os.environ['LOCAL_RANK']),")),
        *on_cpu("tape/datasets.py", ("from scipy", "")),
        *on_cpu("tape/metrics.py", ("import scipy", "")),
        # An argument that no release of PyTorch takes any more.
        *on_cpu("tape/utils/_sampler.py", ("super().__init__(dataset)", "super().__init__()")),
        *on_cpu("tape/visualization.py", ("if local_rank not in (-1, 0):", "if True:")),
        *on_cpu("tape/utils/distributed_utils.py",
                ("torch.cuda.FloatTensor", "float_tensor = torch.FloatTensor([scalar])")),
        *on_cpu(
            _TRAINING, ("torch.cuda.IntTensor", "self._overflow_buf = None"),
            ("optimizer_state['master params'] = ", "pass"),
            # As published, nothing clears the gradients.
            ("self.optimizer.step()", "{line}\nself.optimizer.zero_grad()"),
        ),
        # Likewise.
        *on_cpu(
            _ADAM, ("exp_avg.mul_(beta1).add_(", "exp_avg.mul_(beta1).add_(grad, alpha=1 - beta1)"),
            ("exp_avg_sq.mul_(beta2).addcmul_(", "exp_avg_sq.mul_(beta2).addcmul_(grad, grad, "
             "value=1 - beta2)"),
            ("p.data.addcdiv_(-step_size", "p.data.addcdiv_(exp_avg, denom, value=-step_size)"),
            ("p.data.add_(-group['lr']", "p.data.add_(p.data, "
             "alpha=-group['lr'] * group['weight_decay'])"),
        ),
    ),
)  # fmt: skip

# ------------------------------------------------------------------------ ColBERT, 501c29d

_COLBERT = "go.py"
# What `Trainer` starts in processes of its own.
_COLBERT_RUN = """\
import on_cpu
import torch
import torch.distributed as dist

torch.cuda.device_count = lambda: 0
dist.init_process_group("gloo")

from colbert.infra.config import ColBERTConfig, RunConfig
from colbert.infra.run import Run
from colbert.training.training import train


def text(start, count):
    return " ".join(f"w{(start * 7 + n * n * (1 + start % 3)) % 59}" for n in range(count))


queries = {row: text(row, 4) for row in range(128)}
passages = [text(row, 9 + row % 7) for row in range(128)]
triples = [[row, row, (row * 5 + 3) % 96] for row in range(128)]
with Run().context(RunConfig(nranks=dist.get_world_size(), rank=dist.get_rank(), amp=False)):
    config = ColBERTConfig(
        checkpoint="tiny", bsize=16, accumsteps=2, lr=2e-3, maxsteps=8, dim=16,
        doc_maxlen=24, query_maxlen=12, use_ib_negatives=True,
        warmup=2,
    )
    train(ColBERTConfig.from_existing(config, Run().config), triples, queries, passages)
"""
_GIT = """\
class exc:
    class InvalidGitRepositoryError(Exception):
        pass


def Repo(**_):
    raise exc.InvalidGitRepositoryError
"""
_BERT = {
    "model_type": "bert", "vocab_size": 66, "hidden_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "intermediate_size": 64, "max_position_embeddings": 64,
}  # fmt: skip
_WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[unused0]", "[unused1]")


def _for_colbert(folder: Path) -> None:
    write(folder, {
        "go.py": _COLBERT_RUN, "git.py": _GIT, "ujson.py": "from json import *\n",
        # It imports what indexes are made with.
        "colbert/__init__.py": "",
        "tiny/config.json": json.dumps(_BERT),
        "tiny/vocab.txt": "\n".join((*_WORDS, *(f"w{n}" for n in range(59)))),
        "tiny/tokenizer_config.json": '{"tokenizer_class": "BertTokenizer"}',
    })  # fmt: skip


_COLBERT_PROGRAM = Program(
    "colbert", "ColBERT", _COLBERT, needs=("numpy", "tqdm", "transformers"),
    prints=r"\] \d+ [0-9.]+", prepare=beside(_COLBERT, data=_for_colbert),
    adapt=(
        *on_cpu("colbert/search/strided_tensor_core.py", ("import line_profiler", "")),
        *on_cpu("colbert/modeling/colbert.py", ("ColBERT.try_load_torch_extensions(self", "")),
        *on_cpu("colbert/modeling/hf_colbert.py", ("self.init_weights()", "self.post_init()"),
                ("obj = super().from_pretrained(name_or_path",
                "obj = cls(AutoConfig.from_pretrained(name_or_path), colbert_config)")),
        # As published, each rank has the examples of the first one.
        *on_cpu("colbert/data/examples.py", ("return [self.data[idx] for idx in range(0,",
                "return [self.data[idx] for idx in range(rank, len(self.data), nranks)]")),
    ),
)  # fmt: skip

EIGHTH_SILENT_C_PROGRAMS = (_OPENLTM, _TORCHSHARD, _SPINNINGUP, _TAPE, _COLBERT_PROGRAM)
