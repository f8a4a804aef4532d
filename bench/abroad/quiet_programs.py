"""Programs of the fifth round, which are run healthy only. ``stand_ins/on_cpu.py`` removes the GPU
from most of them, so that few edits are left."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from bench.abroad.edits import Edit, Line
from bench.abroad.programs import SCRIPTS, Program, by_feature, on_cpu

BOUND = 420.0  # seconds for one run


def imports_on_cpu(script: str, first: str = "import os") -> tuple[Edit, ...]:
    """Imports ``on_cpu`` before the line that contains ``first``."""
    return (Edit(Line(script, first), "import on_cpu\n{line}"),)


def beside(
    script: str, *names: str, data: Callable[[Path], None] = lambda _: None
) -> Callable[[Path], None]:
    """Writes ``data`` and copies the named stand-ins to the folder of ``script``."""

    def prepare(folder: Path) -> None:
        data(folder)
        for name in ("on_cpu", *names):
            shutil.copy(SCRIPTS / "stand_ins" / f"{name}.py", (folder / script).parent)

    return prepare


# ------------------------------------------------------------------------ minimind, d65ef2c


def _talk(row: int, words: int = 6) -> list[dict[str, str]]:
    def said(role: str, start: int) -> dict[str, str]:
        content = " ".join(f"{chr(97 + (start * 7 + n) % 26)}{n}" for n in range(words + row % 5))
        more = dict.fromkeys(("reasoning_content", "tools", "tool_calls"), "")
        return {"role": role, "content": content, **more}

    return [said("user", row), said("assistant", row + 1)]


def _for_minimind(folder: Path) -> None:
    kinds = {
        "pretrain": lambda row: {"text": _talk(row)[0]["content"]},
        "talk": lambda row: {"conversations": _talk(row)},
        "pairs": lambda row: {"chosen": _talk(row), "rejected": _talk(row + 5, 4)},
    }
    for name, made in kinds.items():
        rows = (json.dumps(made(row)) for row in range(48))
        (folder / f"{name}.jsonl").write_text("\n".join(rows) + "\n")


_TINY = (
    "--batch_size=2", "--num_workers=0", "--log_interval=2", "--save_interval=6", "--epochs=1",
    "--save_dir=out", "--max_seq_len=96",
)  # fmt: skip
_SIZES = ("--hidden_size=32", "--num_hidden_layers=2")
# All models of a job start with the same weights, as from one checkpoint.
_SAME_WEIGHTS = on_cpu(
    "trainer/trainer_utils.py",
    ("model = MiniMindForCausalLM(lm_config)", "torch.manual_seed(7)\n{line}"),
)
_REWARD = on_cpu(
    "trainer/trainer_utils.py",
    ("self.tokenizer = AutoTokenizer.from_pretrained(model_path", "return"),
    ("score = self.model.get_score(", "score = len(response) % 7 / 7"),
)


def _minimind(name: str, script: str, *arguments: str, adapt: tuple[Edit, ...] = ()) -> Program:
    script = f"trainer/{script}.py"
    return Program(
        f"minimind-{name}", "minimind", script, (*_TINY, *arguments),
        needs=("transformers", "datasets"), bound=BOUND, prints=r"[lL]oss: [0-9.]+",
        prepare=beside(script, data=_for_minimind),
        adapt=(
            *imports_on_cpu(script),
            *on_cpu(script, ("if dist.is_initialized(): args.device", "")),
            *on_cpu("trainer/trainer_utils.py", ("def init_model(", "def init_model(lm_config, "
                    "from_weight='none', tokenizer_path='model', save_dir='out', device='cpu'):")),
            *adapt,
        ),
    )  # fmt: skip


_SFT = ("--data_path=talk.jsonl", "--from_weight=none", *_SIZES)
_MINIMIND = (
    _minimind("pretrain", "train_pretrain", "--data_path=pretrain.jsonl", *_SIZES),
    _minimind("moe", "train_pretrain", "--data_path=pretrain.jsonl", "--use_moe=1",
              "--accumulation_steps=2", *_SIZES),
    _minimind("sft", "train_full_sft", "--accumulation_steps=4", *_SFT),
    _minimind("compiled", "train_full_sft", "--use_compile=1", *_SFT),
    _minimind("lora", "train_lora", *_SFT),
    _minimind("dpo", "train_dpo", "--data_path=pairs.jsonl", "--from_weight=none", *_SIZES,
              adapt=_SAME_WEIGHTS),
    _minimind("distillation", "train_distillation", "--data_path=talk.jsonl",
              "--student_hidden_size=32", "--student_num_layers=2", "--teacher_hidden_size=64",
              "--teacher_num_layers=2", "--from_student_weight=none", "--from_teacher_weight=none",
              adapt=_SAME_WEIGHTS),
    _minimind("grpo", "train_grpo", "--max_gen_len=12", "--num_generations=2", *_SFT,
              adapt=(*_SAME_WEIGHTS, *_REWARD)),
    _minimind("ppo", "train_ppo", "--max_gen_len=12", *_SFT,
              adapt=(*_SAME_WEIGHTS, *_REWARD, *on_cpu("trainer/train_ppo.py",
                     ("state_dict = torch.load(ckp", "state_dict = actor_model.state_dict()")))),
)  # fmt: skip

# ------------------------------------------------------------------------ images


def _vision(
    tree: str,
    script: str,
    *arguments: str,
    first: str = "import os",
    adapt: tuple[Edit, ...] = (),
    needs: tuple[str, ...] = (),
    ranks: int = 2,
    prints: str = "",
    env: tuple[tuple[str, str], ...] = (),
) -> Program:
    return Program(
        tree.lower(),
        tree,
        script,
        arguments,
        ranks,
        needs=("numpy", "PIL", *needs),
        prepare=beside(script, "torchvision"),
        prints=prints,
        env=env,
        bound=BOUND,
        adapt=(*imports_on_cpu(script, first), *adapt),
    )


_VISION = (
    _vision(  # 2738efa
        "SimCLR", "main.py", "--nodes=2", "--batch_size=8", "--epochs=2", "--workers=0",
        needs=("yaml", "tensorboard"), prints=r"Loss: [0-9.]+",
        adapt=on_cpu(
            "main.py",
            ('os.environ["MASTER_ADDR"]', ""), ('os.environ["MASTER_PORT"]', ""),
            ("mp.spawn(main", "args.nr = int(os.environ['RANK'])\nmain(0, args)"),
        ),
    ),
    _vision(  # a7bc177
        "simsiam", "main_simsiam.py", "data", "--workers=0", "--epochs=2", "--batch-size=8",
        "--dim=10", "--pred-dim=8", "--dist-url=env://", "--fix-pred-lr", first="import argparse",
        prints=r"Loss [0-9.-]+",
    ),
    _vision(  # 1c4f3c4
        "vicreg", "main_vicreg.py", "--data-dir=data", "--epochs=2", "--batch-size=16",
        "--num-workers=0", "--mlp=16-16-16", "--arch=resnet34",
        first="import argparse",
    ),
    _vision(  # 7c446df
        "dino", "main_dino.py", "--arch=vit_tiny", "--patch_size=8", "--out_dim=32",
        "--batch_size_per_gpu=8", "--epochs=2", "--local_crops_number=2", "--num_workers=0",
        "--use_fp16=false", "--data_path=data", "--warmup_epochs=1", first="import argparse",
        adapt=(*on_cpu("main_dino.py",
                       ("+ torchvision_archs + torch.hub.list(", "+ torchvision_archs,")),
               *on_cpu("utils.py", ("t = torch.tensor([self.count, self.total]", "t = torch.tensor("
                                    "[self.count, self.total], dtype=torch.float64)"))),
    ),
)  # fmt: skip

# ------------------------------------------------------------------------ accelerate, 16cb6eb

_ACCELERATE = (
    by_feature("comm-hook", "ddp_comm_hook.py", "--ddp_comm_hook=power_sgd"),
    by_feature("profiler", "profiler.py", "--record_shapes"),
    by_feature("tracking", "tracking.py"),
    by_feature("memory", "memory.py"),
    by_feature("automatic-accumulation", "automatic_gradient_accumulation.py"),
)  # fmt: skip

# ------------------------------------------------------------------------ Lightning, 7f0c343

_TWO = 'accelerator="cpu", devices=2, strategy='


def _lightning(
    name: str, script: str, *arguments: str, changes: tuple[tuple[str, str], ...]
) -> Program:
    script = f"examples/{script}.py"
    return Program(
        name,
        "pytorch-lightning",
        script,
        arguments,
        launcher="python",
        needs=("lightning",),
        prepare=beside(script, "torchvision"),
        adapt=on_cpu(script, *changes),
        bound=BOUND,
    )


_LIGHTNING = (
    _lightning(
        "lightning-gan", "pytorch/domain_templates/generative_adversarial_net",
        changes=(
            ("from lightning.pytorch.demos.mnist_datamodule", "import torchvision"),
            ("if _TORCHVISION_AVAILABLE:", "if True:"),
            ("grid = torchvision", "grid = sample_imgs"),
            ("dm = MNISTDataModule()", "dm = torch.utils.data.DataLoader("
             "torchvision.datasets.MNIST(''), batch_size=16)"),
            ('trainer = Trainer(accelerator="gpu"', f"trainer = Trainer({_TWO}"
             "'ddp_find_unused_parameters_true', max_epochs=2, logger=False)"),
        ),
    ),
    _lightning(
        "fabric-gan", "fabric/dcgan/train_fabric",
        changes=(
            ('fabric = Fabric(accelerator="auto"', f"fabric = Fabric({_TWO}'ddp')"),
            ("workers = os.cpu_count()", "workers = 0"),
            ("batch_size = 128", "batch_size = 16"),
            ("ngf = 64", "ngf = 4"), ("ndf = 64", "ndf = 4"), ("num_epochs = 5", "num_epochs = 1"),
        ),
    ),
    _lightning(
        "fabric-images", "fabric/image_classifier/train_fabric", "--epochs=2", "--batch-size=16",
        "--save-model",
        changes=(("fabric = Fabric()", f"fabric = Fabric({_TWO}'ddp')\nfabric.launch()"),),
    ),
)  # fmt: skip

# ------------------------------------------------------------------------ others

_IGNITE = "examples/cifar10/main.py"
_DILOCO = "pure_torch_diloco.py"
_OTHERS = (
    Program(  # de08e79
        "ignite-cifar10", "ignite", _IGNITE,
        ("run", "--backend=gloo", "--data_path=data", "--output_path=out", "--batch_size=16",
         "--num_workers=0", "--num_epochs=2", "--num_warmup_epochs=1", "--validate_every=1"),
        needs=("ignite", "fire", "tensorboard"), bound=BOUND,
        prepare=beside(_IGNITE, "torchvision"),
    ),
    Program(  # be38ec4
        "diloco", "diloco_simple", _DILOCO, needs=("transformers", "datasets"), bound=BOUND,
        prints=r"loss: [0-9.]+", prepare=beside(_DILOCO, "tiny_text"),
        adapt=(
            *imports_on_cpu(_DILOCO),
            *on_cpu(
                _DILOCO,
                ("import wandb", "from tiny_text import wandb"),
                ("from cyclopts import App", ""),
                ("app = App()", ""), ("@app.default", ""),
                ("    app()", "main(8, 4, 16, 2, 40, local_steps=3)"),
                ("from datasets import load_dataset", "from datasets import Dataset"),
                ("config = LlamaConfig.from_pretrained", "config = LlamaConfig(vocab_size=64, "
                 "hidden_size=32, intermediate_size=64, num_hidden_layers=2, "
                 "num_attention_heads=2)"),
                ("tokenizer = AutoTokenizer", "tokenizer = dict("), ('"mistralai/Mistral', ""),
                ("tokenizer.pad_token", ""),
                ("ds = load_dataset(", "ds = {'train': Dataset.from_dict({'input_ids': [[(7 * row "
                 "+ n) % 64 for n in range(16)] for row in range(192)]})}"),
                ("tokenized_datasets = ds.map(", "tokenized_datasets = dict("),
                ("tokenize_function, batched=True", "ds"),
                ("data_collator = DataCollator", "data_collator = lambda rows: {name: torch.tensor("
                 "[row['input_ids'] for row in rows]) for name in ('input_ids', 'labels')}"),
                ("dist.all_reduce(tensor=param.grad",
                 "dist.all_reduce(tensor=param.grad)\nparam.grad /= world_size"),
            ),
        ),
    ),
)  # fmt: skip

# ------------------------------------------------------------------------ scripts of ours


KINDS = (
    "local_sgd", "post_local_sgd", "outer_optimizer", "federated", "gossip", "ensemble", "sweep",
    "averaged_once", "folds", "wrapped_alone", "population",
    "sharpness_aware", "second_order", "two_optimizers", "adversarial", "critic_ahead",
    "averaged_weights", "momentum_teacher", "evolution", "inner_loop", "master_weights", "uneven",
    "curriculum", "contrastive", "tasks_in_turn", "thaws", "generation", "replay",
)  # fmt: skip
LAYOUTS = (
    "async_save", "async_save_fsdp2", "async_save_zero", "one_forward_one_backward", "interleaved",
    "looped", "zero_bubble", "replicated_pipeline", "expert_groups", "server", "one_evaluator",
    "two_jobs", "fsdp1_mixed", "fsdp2_mixed", "fsdp2_lora", "tensor_and_data",
    "recomputed_and_compiled", "compressed", "halved", "composable", "tables", "unequal_tables",
    "sliced_updates",
)  # fmt: skip
SLOW = (
    "saves", "syncs", "copies", "copies_by_a_child", "downloads", "tokenizes", "evaluates",
    "computes", "compiles", "builds", "uploads", "pauses", "first-batch", "slow-loader", "late",
    "reads-late", "all-compute", "uploads-at-the-end",
)  # fmt: skip
_OURS = (
    *(Program(f"kind-{name}", "", "kinds.py", (name,)) for name in KINDS),
    *(Program(f"layout-{name}", "", "layouts.py", (name,), ranks=4) for name in LAYOUTS),
    *(Program(f"slow-{name}", "", "slow.py", (name, "45"), bound=BOUND) for name in SLOW),
)

QUIET_PROGRAMS = (*_MINIMIND, *_VISION, *_ACCELERATE, *_LIGHTNING, *_OTHERS, *_OURS)
