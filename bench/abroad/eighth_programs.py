"""The programs of the eighth round, and how each is started on CPU ranks. They run unmodified but
for the edits here, which remove GPUs, downloads and large sizes."""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path

import torch

from bench.abroad.edits import Edit, Line
from bench.abroad.programs import Program, on_cpu
from bench.abroad.quiet_programs import beside, imports_on_cpu
from bench.abroad.seventh_programs import NO_KERNEL, TELLS

_PIPE, _FED = "examples/example_dualpipe.py", "examples/cross-process-mnist"
_LOOP, _JEPA, _RL = "training/training_loop.py", "src/train.py", "rl_games/common/a2c_common.py"
_VAE, _MM, _DCP = "train_vae.py", "examples/distributed_training.py", "async_checkpointing_example"
_HERE = ("PYTHONPATH", ".")  # a package beside its examples


def _without(*modules: str) -> str:
    """Source that stands in for ``modules``, which are not used."""
    return (
        "import sys\nfrom unittest.mock import MagicMock\n"
        f"sys.modules.update({{name: MagicMock() for name in {modules}}})\n{{line}}"
    )


def _at(port: int) -> tuple[tuple[str, str], ...]:
    return (("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", str(port)))


def _for_fedlab(folder: Path) -> None:
    """One script for server and clients, which are started by a shell script as published."""
    beside(f"{_FED}/client.py", "torchvision")(folder)
    (folder / _FED / "start.py").write_text(
        "import os, runpy, sys\nrank = os.environ['RANK']\n"
        "script = 'server.py' if rank == '0' else 'client.py'\n"
        "sys.argv = [script, '--ip', os.environ['MASTER_ADDR'], '--port', "
        "os.environ['MASTER_PORT'], '--world_size', os.environ['WORLD_SIZE']]\n"
        "sys.argv += ['--round', '6'] if rank == '0' else ['--rank', rank, '--batch_size', '16']\n"
        "runpy.run_path(os.path.join(os.path.dirname(__file__), script), run_name='__main__')\n"
    )


def _png(number: int, size: int = 16) -> bytes:
    rows = (bytes([0, *((at * number) % 256 for at in range(3 * size))]) for _ in range(size))
    parts = (b"IHDR" + struct.pack(">IIBBBBB", size, size, 8, 2, 0, 0, 0),
             b"IDAT" + zlib.compress(b"".join(rows)), b"IEND")  # fmt: skip
    chunks = (struct.pack(">I", len(one) - 4) + one + struct.pack(">I", zlib.crc32(one))
              for one in parts)  # fmt: skip
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def _for_edm(folder: Path) -> None:
    beside("train.py")(folder)
    (folder / "images").mkdir()
    for number in range(48):
        (folder / "images" / f"{number}.png").write_bytes(_png(number))


def _for_ijepa(folder: Path) -> None:
    beside("main.py", "torchvision")(folder)
    (folder / "out").mkdir()
    settings = {
        "data": dict(batch_size=8, color_jitter_strength=0.0, crop_scale=[0.3, 1.0], crop_size=16,
                     image_folder="images/", num_workers=1, pin_mem=False, root_path=".",
                     use_color_distortion=False, use_gaussian_blur=False,
                     use_horizontal_flip=False),
        "logging": dict(folder="out", write_tag="jepa"),
        "mask": dict(allow_overlap=True, aspect_ratio=[0.75, 1.5], enc_mask_scale=[0.85, 1.0],
                     min_keep=1, num_enc_masks=1, num_pred_masks=2, patch_size=4,
                     pred_mask_scale=[0.15, 0.2]),
        "meta": dict(copy_data=False, load_checkpoint=False, model_name="vit_tiny", pred_depth=1,
                     pred_emb_dim=24, read_checkpoint=None, use_bfloat16=False),
        "optimization": dict(ema=[0.996, 1.0], epochs=4, final_lr=0.0001, final_weight_decay=0.4,
                             ipe_scale=1.0, lr=0.001, start_lr=0.0002, warmup=1,
                             weight_decay=0.04),
    }  # fmt: skip
    (folder / "tiny.yaml").write_text(json.dumps(settings))


def _for_contriever(folder: Path) -> None:
    beside("train.py")(folder)
    (folder / "data").mkdir()
    for number in range(6):
        torch.save(torch.arange(number, number + 800) % 60 + 3, folder / "data" / f"{number}.pt")


def _for_rl_games(folder: Path) -> None:
    beside("runner.py")(folder)
    path = folder / "rl_games" / "configs" / "ppo_continuous.yaml"
    text = path.read_text()
    for old, new in (
        ("[256, 128, 64]", "[16, 16]"), ("num_actors: 16", "num_actors: 2"), ("3e-4", "0.0003"),
        ("horizon_length: 256", "horizon_length: 32"), ("_size: 1024", "_size: 32"),
        ("mini_epochs: 8", "mini_epochs: 2"), ("name: walker", "name: walker\n      multi_gpu: True"
         "\n      max_epochs: 12\n      torch_compile: False"),
        ("BipedalWalkerHardcore-v3", "Pendulum-v1"),
        ("normalize_input: False", "normalize_input: True"),
    ):  # fmt: skip
        text = text.replace(old, new)
    (folder / "tiny.yaml").write_text(text)


EIGHTH_PROGRAMS = (
    Program(  # 3da1bbe
        "dualpipe", "DualPipe", _PIPE, ranks=4, launcher="python", prepare=beside(_PIPE),
        env=(_HERE, *_at(29571)),
        adapt=(
            *imports_on_cpu(_PIPE),
            *on_cpu("dualpipe/comm.py", ("return [torch.empty(s", "return [torch.empty(s, "
                    "dtype=TENSOR_DTYPE, requires_grad=True) for s in TENSOR_SHAPES]")),
            *on_cpu(
                _PIPE, ("dist.init_process_group(", TELLS), ("torch.set_default_device(", ""),
                ("num_chunks = 20", "num_chunks = 8"), ("seq_len = 256", "seq_len = 16"),
                ("hidden_size = 512", "hidden_size = 32"), ("num_gpus = ", "num_gpus = 4"),
                ("for ngpus in range(", "for ngpus in [num_gpus]:"),
                ("return_outputs=False)", "optimizer = torch.optim.SGD(local_modules.parameters(), "
                 "lr=0.0)\nfor step in range(10):\n    dualpipe_model.zero_grad()\n    {line}\n"
                 "    optimizer.step()"),
                ("gather_into_tensor(p0all", "dist.all_gather_into_tensor(p0all.flatten(0, 1), "
                 "p0.grad)"),
                ("gather_into_tensor(p1all", "dist.all_gather_into_tensor(p1all.flatten(0, 1), "
                 "p1.grad)"),
            ),
        ),
    ),
    Program(  # 92552a7
        "fedlab", "FedLab", f"{_FED}/start.py", ranks=4, prepare=_for_fedlab, env=(_HERE,),
        needs=("numpy", "pandas", "sklearn"),
        adapt=(
            *imports_on_cpu(f"{_FED}/client.py", "import argparse"),
            *on_cpu(f"{_FED}/client.py", ("root='../../", "dataset = PathologicalMNIST(root='data',"
                    ), ("path=\"../../", "path='data',")),
            # As published, the server draws one client a round, though its sample is to be all.
            *on_cpu(f"{_FED}/server.py", ("global_round=args.round",
                    "global_round=args.round, num_clients=args.world_size - 1,")),
            # As published, the clients of this example do not send the weights that it wants.
            *on_cpu("fedlab/contrib/algorithm/fedavg.py",
                    ("weights = [ele[1]", "weights = [1.0 for ele in buffer]")),
            *on_cpu("fedlab/utils/functional.py", ("import pynvml", "")),
            *on_cpu("fedlab/utils/dataset/functional.py", ("import seaborn", "")),
            *on_cpu("fedlab/contrib/dataset/pathological_mnist.py",
                    ("shards=200", "self, root, path, num_clients=100, shards=12, download=True, "
                     "preprocess=False"), ("data_indices = noniid", "mnist.targets = [at % 10 for "
                     "at in range(len(mnist))]\n{line}"),
                    ('"data{}.pkl".format(id)))', "dataset = torch.load(os.path.join(self.path, "
                     "type, f'data{id}.pkl'), weights_only=False)")),
        ),
    ),
    Program(  # 008a4e5
        "edm", "edm", "train.py",
        ("--outdir=out", "--data=images", "--duration=0.001", "--batch=6", "--cbase=8",
         "--cres=1,1", "--tick=1", "--snap=1", "--dump=2", "--augment=0", "--bench=0"), ranks=3,
        needs=("click", "numpy", "PIL", "scipy"), prepare=_for_edm, prints=r"kimg [0-9.]+",
        adapt=(
            *imports_on_cpu("train.py"),
            *on_cpu("train.py", ("seed = torch.ran", "seed = torch.randint(1 << 31, size=[])")),
            *on_cpu("torch_utils/distributed.py", ("sync_device = ", "sync_device = 'cpu'")),
            *on_cpu("torch_utils/misc.py", ("super().__init__(dataset)", "")),
            *on_cpu(
                _LOOP, ("device              =", "device = torch.device('cpu'),"),
                ("cur_nimg < tick_start", "if (not done) and (cur_tick != 0) and (cur_nimg < "
                 "tick_start_nimg + kimg_per_tick * 48):"),
                ("done = (cur_nimg >=", "done = (cur_nimg >= total_kimg * 192)"),
                ('"gpumem ', ""), ('"reserved ', ""), ("torch.cuda.reset_peak", ""),
            ),
        ),
    ),
    Program(  # 52c1ae9
        "ijepa", "ijepa", "main.py",
        ("--fname=tiny.yaml", "--devices", "cpu:0", "cpu:1", "cpu:2"), ranks=3, launcher="python",
        needs=("numpy", "PIL", "yaml"), prepare=_for_ijepa,
        adapt=(
            *imports_on_cpu("main.py", "import argparse"),
            *on_cpu("src/utils/distributed.py", ("def init_distributed(",
                    "def init_distributed(port=40117, rank_and_world_size=(None, None)):")),
            *on_cpu("main.py", ("import os", TELLS.replace("\n{line}", ""))),
            *on_cpu("src/models/vision_transformer.py", ("embed_dim=192, depth=12",
                    "patch_size=patch_size, embed_dim=24, depth=2, num_heads=2, mlp_ratio=2,")),
        ),
    ),
    Program(  # 39fb220
        "contriever", "contriever", "train.py",
        ("--local_rank=0", "--main_port=-1", "--train_data", "data", "--random_init",
         "--chunk_length=32", "--queue_size=48", "--per_gpu_batch_size=4", "--num_workers=1",
         "--projection_size=32", "--total_steps=60", "--warmup_steps=5", "--log_freq=5",
         "--eval_freq=10", "--save_freq=20", "--output_dir=out"),
        ranks=3, needs=("numpy", "transformers"), prepare=_for_contriever,
        prints=r"train/loss: [0-9.]+",
        adapt=(
            *imports_on_cpu("train.py"),
            *on_cpu("src/beir_utils.py", ("import beir.util", _without(
                "beir", "beir.util", "beir.datasets", "beir.datasets.data_loader", "beir.retrieval",
                "beir.retrieval.evaluation", "beir.retrieval.search",
                "beir.retrieval.search.dense", "beir.reranking", "beir.reranking.models"))),
            *on_cpu("src/moco.py", ("cfg = utils.load_hf(", "cfg = transformers.BertConfig(vocab_"
                    "size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, "
                    "intermediate_size=32)"), ("tokenizer = utils.load_hf(", "tokenizer = "
                    "__import__('types').SimpleNamespace(bos_token_id=1, eos_token_id=2)")),
            *on_cpu("src/contriever.py", ("head_mask=head_mask,", ""),
                    ("output_attentions=output_att", ""), ("output_hidden_states=output", "")),
        ),
    ),
    Program(  # 262cf20
        "rl-games", "rl_games", "runner.py", ("--file=tiny.yaml", "--train", "--seed=3"), ranks=3,
        needs=("gymnasium", "numpy", "yaml"), prepare=_for_rl_games,
        adapt=(
            *imports_on_cpu("runner.py", "import argparse"),
            *on_cpu(_RL, ("from tensorboardX", _without("tensorboardX")),
                    ("self.device_name = 'cuda:'", "self.device_name = 'cpu'")),
        ),
    ),
    Program(  # 25434293
        "mmengine", "mmengine", _MM, ("--launcher=pytorch",), ranks=3,
        needs=("addict", "cv2", "numpy", "yapf"), prepare=beside(_MM, "torchvision"), env=(_HERE,),
        prints=r"loss: [0-9.]+",
        adapt=(*imports_on_cpu(_MM, "import argparse"), *on_cpu(_MM, *2 * (
            ("batch_size=32", "batch_size=8,"),), ("max_epochs=2", "train_cfg=dict(by_epoch=True, "
            "max_epochs=4, val_interval=1),"))),
    ),
    Program(  # 376cac6a
        "bert4rec", "torchrec/examples/bert4rec", "bert4rec_main.py",
        ("--dataset_name=random", "--num_epochs=4", "--emb_dim=16", "--max_len=8",
         "--train_batch_size=4", "--val_batch_size=2", "--test_batch_size=2", "--min_user_count=2",
         "--random_user_count=24"),
        ranks=3, needs=("fbgemm_gpu", "pandas", "torchrec", "tqdm"),
        prepare=beside("bert4rec_main.py"), prints=r"average loss [0-9.]+",
        adapt=on_cpu("bert4rec_main.py", (  # as published, each rank draws its own data
            "import argparse", "import on_cpu, random\n{line}"), ("import torch",
            "{line}\nrandom.seed(0)\nnp.random.seed(0)"),
            ("EmbOptimType.ADAM", 'fused_params["optimizer"] = EmbOptimType.EXACT_SGD'),
            ('fused_params["weight_decay"]', "")),
    ),
    Program(  # 58c1e1a
        "dalle", "DALLE-pytorch", _VAE,
        ("--distributed_backend=deepspeed", "--image_folder=images", "--image_size=16",
         "--num_layers=1", "--num_tokens=16", "--emb_dim=8", "--hidden_dim=8", "--batch_size=12",
         "--epochs=3", "--num_resnet_blocks=1"), ranks=3,
        needs=("deepspeed", "einops"), env=(("DS_ACCELERATOR", "cpu"),),
        prepare=beside(_VAE, "torchvision"), prints=r"loss - [0-9.]+",
        adapt=(
            *imports_on_cpu(_VAE, "import math"),
            *on_cpu(
                _VAE, ("from torchvision.utils", "make_grid = lambda *_, **__: None"),
                ("from dalle_pytorch import distributed_utils", _without(
                    "wandb", "taming", "taming.models", "taming.models.vqgan", "youtokentome",
                    "ftfy", "pkg_resources", "axial_positional_embedding",
                    "rotary_embedding_torch", "g_mlp_pytorch")),
                ("distr_backend.initialize()",
                 NO_KERNEL.replace("{line}", "import deepspeed") + "\n{line}"),
            ),
            # As published, rank 0 alone saves at last, which with DeepSpeed all ranks must.
            Edit(Line(_VAE, "save_model('./vae-final.pt')"), ""),
            Edit(Line(_VAE, "if distr_backend.is_root_worker():", 5),
                 "save_model('./vae-final.pt')\n{line}"),
        ),
    ),
    Program(  # pytorch 123527f6
        "dcp-async", "pytorch-dcp", f"{_DCP}.py", ranks=4, launcher="python",
        prepare=beside(f"{_DCP}.py"),
        adapt=(
            *imports_on_cpu(f"{_DCP}.py"),
            *on_cpu(
                f"{_DCP}.py", ('DEVICE = "cuda"', 'DEVICE = "cpu"'),
                ("NUM_EPOCHS = 1000", "NUM_EPOCHS = 44"),
                ("CHECKPOINT_DIR = ", "CHECKPOINT_DIR = 'checkpoint'"),
                ("import FullySharded", "from torch.distributed.fsdp import fully_shard"),
                ("model = FSDP(", "model = fully_shard(model, mesh=device_mesh)"),
                ("x = torch.rand(", "x = torch.rand(128, 8)"),
                ("y = torch.zeros(", "y = torch.zeros(128, 1)"),
                ('os.environ["MASTER_ADDR"]', TELLS),
                ('"12355"', 'os.environ["MASTER_PORT"] = "29573"'),
                ("dist.init_process_group(",
                 "dist.init_process_group('gloo', rank=rank, world_size=world_size)"),
                # Its own group: with gloo for both, the thread's calls would mix with training's.
                ("f = None", "savers = dist.new_group()\nf = None"),
                ("state_dict, checkpoint_id=CHECK",
                 "state_dict, checkpoint_id=CHECKPOINT_DIR, process_group=savers"),
                ("dcp.load(state_dict)", "dcp.load(state_dict, checkpoint_id=CHECKPOINT_DIR)"),
                ("world_size = torch.cuda.device_count()", "world_size = 4"),
            ),
        ),
    ),
)  # fmt: skip
