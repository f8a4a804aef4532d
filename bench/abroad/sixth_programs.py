"""The programs of the sixth round, and how each is started on CPU ranks. They run unmodified but
for the edits here, which remove GPUs, downloads and packages that only log."""

from __future__ import annotations

import shutil
from pathlib import Path

from bench.abroad.programs import SCRIPTS, Program, on_cpu
from bench.abroad.quiet_programs import beside, imports_on_cpu

_GUIDE = "02-distributed-data-parallel/train_llm.py"
_TOY = "related-topics/elastic-training/toy.py"
_ELASTIC = "examples/imagenet/main.py"
_PIPE = "examples/basic/example_train.py"
_SENDRECV = "examples/smoke-dist/dist_sendrecv.py"
_MNIST = "examples/mnist/mnist.py"
_ROWS = "[[(7 * row + n) % 64 for n in range(16)] for row in range(96)]"


def _for_swav(folder: Path) -> None:
    beside("main_swav.py", "torchvision")(folder)
    (folder / "out").mkdir()


def _for_baselines(folder: Path) -> None:
    shutil.copy(SCRIPTS / "stand_ins" / "on_cpu.py", folder / "src")
    for name, text in (("wandb", ""), ("tiktoken", "def get_encoding(name): pass\n"),
                       ("datasets", "load_dataset = None\n")):  # fmt: skip
        (folder / "src" / f"{name}.py").write_text(text)


SIXTH_PROGRAMS = (
    Program(  # aed7489
        "guide-ddp", "distributed-training-guide", _GUIDE,
        ("--experiment-name=x", "--dataset-name=x", "--model-name=x", "--save-dir=out",
         "--num-epochs=2", "--batch-size=4", "--log-freq=4", "--ckpt-freq=8"),
        needs=("transformers", "tqdm"), prepare=beside(_GUIDE), prints=r"'running_loss': [0-9.]+",
        adapt=on_cpu(
            _GUIDE,
            ("import tqdm", "import on_cpu\nimport tqdm"), ("import datasets", ""),
            ('device = torch.device(f"cuda', 'device = torch.device("cpu")'),
            ("config = AutoConfig", "from transformers import LlamaConfig\nconfig = LlamaConfig("
             "vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, "
             "num_attention_heads=2)"),
            ("model = AutoModelForCausalLM", "model = AutoModelForCausalLM.from_config(config)"),
            ("model = torch.compile(model)", ""),
            ("model.parameters(), optimizer_class", "model.parameters(), "
             "optimizer_class=torch.optim.AdamW, lr=args.lr"),
            ("tokenizer = AutoTokenizer", "return [dict(input_ids=row, labels=row) for row in "
             f"{_ROWS}]"),
            ("torch.cuda.reset_peak", ""),
            ("mem = torch.cuda", "return {'curr_alloc_gb': 0}"),
        ),
    ),
    Program(
        "elastic-toy", "distributed-training-guide", _TOY, ranks=4,
        adapt=on_cpu(
            _TOY, ("dist.init_process_group()", 'dist.init_process_group("gloo")'),
            ("while True:", "while state['num_steps'] < 40:"),
            ("if value < 0.001", "if value < 0:"),
        ),
    ),
    Program(  # bc88e69
        "elastic-imagenet", "elastic", _ELASTIC,
        ("data", "--dist-backend=gloo", "--epochs=3", "--batch-size=8", "--print-freq=4",
         "--checkpoint-file=out/c.pth.tar"),
        ranks=3, needs=("numpy",), prepare=beside(_ELASTIC, "torchvision"),
        prints=r"Loss [0-9.e+-]+",
        adapt=(*imports_on_cpu(_ELASTIC, "import numpy"),
               *on_cpu(_ELASTIC, ("map_location=f", "snapshot = torch.load(f)"))),
    ),
    Program(  # 06b1b7c
        "swav", "swav", "main_swav.py",
        ("--data_path=data", "--epochs=2", "--warmup_epochs=1", "--batch_size=8", "--workers=0",
         "--nmb_prototypes=16", "--hidden_mlp=16", "--feat_dim=8", "--dump_path=out",
         "--use_fp16=false", "--dist_url=env://", "--queue_length=0"),
        ranks=3, needs=("numpy",), prepare=_for_swav,
        adapt=(
            *on_cpu("src/logger.py", ("import pandas as pd", "from types import SimpleNamespace")),
            *on_cpu("src/utils.py", ("training_stats = PD_Stats(", "training_stats = {} or ("),
                    ('"stats" + str(params.rank)', "'stats'")),
            *on_cpu(
                "main_swav.py",
                ("import numpy as np", "import on_cpu\nimport numpy as np"),
                ("import apex", "import types\napex = types.SimpleNamespace(amp=None)"),
                ("from apex.parallel.LARC", "LARC = lambda optimizer, **_: optimizer"),
                ("from src.multicropdataset", "import torchvision\n\n"
                 "class MultiCropDataset(torchvision.Images):\n    def __init__(self, *_):\n"
                 "        super().__init__(3, 16, None, 192)\n\n    def __getitem__(self, index):\n"
                 "        image = super().__getitem__(index)[0]\n"
                 "        return [image, image.flip(2)]\n"),
                ("training_stats.update(scores)", ""),
                ("amp=apex.amp,", ""),
                ('lr=optimizer.optim.param_groups[0]["lr"]', 'lr=optimizer.param_groups[0]["lr"],'),
            ),
            *on_cpu("src/resnet50.py", ("return ResNet(Bottleneck, [3, 4, 6, 3], **kwargs)",
                    "return ResNet(Bottleneck, [1, 1, 1, 1], width_per_group=16, **kwargs)")),
        ),
    ),
    Program(  # c8a5105
        "llm-baselines", "llm-baselines", "src/main.py",
        ("--distributed_backend=nccl", "--dataset=shakespeare-char", "--n_layer=2", "--n_head=2",
         "--n_embd=32", "--sequence_length=32", "--batch_size=4", "--acc_steps=4",
         "--iterations=20", "--warmup_steps=4", "--eval_interval=8", "--eval_batches=2",
         "--log_interval=4", "--vocab_size=64", "--latest_ckpt_interval=8",
         "--results_base_folder=out", "--auto_resume="),  # ranks race for the first checkpoint
        needs=("numpy", "tqdm", "yaml", "requests"), prepare=_for_baselines,
        prints=r"(train|val)_loss=[0-9.]+",
        adapt=(
            *imports_on_cpu("src/main.py", "import numpy"),
            *on_cpu("src/distributed/ddp.py", ("args.device = f", 'args.device = "cpu"')),
            *on_cpu("src/data/utils.py", ("return get_shakespeare_data", "return dict.fromkeys("
                    "('train', 'val'), np.random.default_rng(0).integers(0, 64, 20_000))")),
            *on_cpu("src/optim/utils.py", ('"rng_torch_gpu": ', "")),
        ),
    ),
    Program(  # 1bcb2bf
        "pippy", "PiPPy", _PIPE, ranks=3,
        adapt=on_cpu(
            _PIPE,
            ("from pippy import SplitPoint", "from torch.distributed.pipelining import SplitPoint, "
             "ScheduleGPipe, pipeline"),
            ("from pippy import pipeline", ""),
            ("pipe = pipeline(mn", "pipe = pipeline(mn, (example_input.chunk(chunks)[0],), "
             "split_spec=split_spec)"),
            ("stage = PipelineStage(", "stage = pipe.build_stage(rank, device)\n"
             "optimizer = torch.optim.SGD(stage.submod.parameters(), lr=1e-6)"),
            ("layer_dims = [", "layer_dims = [64, 64, 32]"), ("in_dim = 512", "in_dim = 32"),
            ("schedule.step(x)", "for step in range(16):\n    schedule.step(x)\n"
             "    optimizer.step()\n    optimizer.zero_grad()"),
            ("output = schedule.step(target", "for step in range(16):\n"
             "    output = schedule.step(target=target, losses=losses)\n    optimizer.step()\n"
             "    optimizer.zero_grad()"),
            ("    schedule.step()", "for step in range(16):\n    schedule.step()\n"
             "    optimizer.step()\n    optimizer.zero_grad()"),
            ("torch.testing.assert_close(", ""), ("print(pipe.split_gm.submod_0)", ""),
            ("print(pipe.split_gm.submod_1)", ""), ("print(pipe.split_gm.submod_2)", ""),
        ),
    ),
    Program(  # 9bd2307
        "sendrecv", "pytorch-operator", _SENDRECV, ranks=4,
        prepare=beside(_SENDRECV, "torchvision"),
        adapt=on_cpu(_SENDRECV, ("    fn()", "for _ in range(40):\n    fn()")),
    ),
    Program(
        "operator-mnist", "pytorch-operator", _MNIST, ("--epochs=3", "--batch-size=16"), ranks=3,
        prepare=beside(_MNIST, "torchvision"), prints=r"loss=[0-9.]+|accuracy=[0-9.]+",
        adapt=on_cpu(
            _MNIST,
            ("from tensorboardX", "from unittest.mock import MagicMock\n\n"
             "SummaryWriter = lambda *_: MagicMock()"),
            ("else nn.parallel.Distributed", "else nn.parallel.DistributedDataParallel"),
            ("datasets.FashionMNIST('../data', train=True", "datasets.MNIST('', train=True,"),
            ("datasets.FashionMNIST('../data', train=False", "datasets.MNIST('', train=False, "
             "transform=transforms.Compose(["),
        ),
    ),
)  # fmt: skip
