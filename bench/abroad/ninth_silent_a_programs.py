"""The language models of the ninth round of silent faults, and how each is started on CPU ranks.
They run unmodified but for the edits here, which remove GPUs, downloads and size, and repair what
is silently wrong in a program as published, where `ninth_silent_a_round` says so."""

from __future__ import annotations

import json
import pickle
import struct
from pathlib import Path

from bench.abroad.edits import Edit, Line
from bench.abroad.programs import Program, on_cpu
from bench.abroad.quiet_programs import beside, imports_on_cpu
from bench.abroad.seventh_programs import NO_KERNEL
from bench.abroad.silent_programs import write

# -------------------------------------------------------------------------- dion, 0a059a45

_DION = "train.py"
_MUON = """\
{model_dim: 32, n_layer: 2, n_head: 2, sequence_length: 24, batch_size: 16, device_batch_size: 4,
 num_iterations: 10, warmup_ratio: 0.2, warmdown_ratio: 0.2, val_loss_every: 5, val_tokens: 384,
 optimizer: muon, scalar_opt: adamw, adjust_lr: spectral_norm, mu: 0.95, weight_decay: 0.01,
 lr: 0.02, no_wandb: true, no_compile: true, no_triton: true}
"""


def _for_dion(folder: Path) -> None:
    beside(_DION)(folder)
    write(folder, {"tiny.yaml": _MUON, "wandb.py": ""})
    header = struct.pack("<256i", 20240520, 1, 8_000, *(253 * [0]))
    for name, start in (("train", 0), ("val", 3)):
        tokens = ((start + n * 7 + (n % 37) ** 2 * (1 + n % 3)) % 64 for n in range(8_000))
        (folder / f"fineweb_{name}_0.bin").write_bytes(header + struct.pack("<8000H", *tokens))


def _dion(name: str, *arguments: str, adapt: tuple[Edit, ...] = ()) -> Program:
    return Program(
        f"dion-{name}", "dion", _DION, ("--config=tiny.yaml", "--data_dir=.", *arguments),
        needs=("numpy", "tqdm", "yaml"), prints=r"val_loss:[0-9.]+", prepare=_for_dion,
        adapt=(
            *imports_on_cpu(_DION, "import argparse"),
            *on_cpu(
                _DION,
                ("import torch", "import contextlib\n{line}\n"
                 "torch.compile = lambda made=None, **_: made or (lambda given: given)"),
                ("assert torch.cuda.is_available()", ""),
                ('device_type="cuda",', 'device_type="cpu",'),
                ("num_vocab = 50304", "num_vocab = 64"),
                ('model.to_empty(device="cuda")', 'model.to_empty(device="cpu")'),
                ("autocast_ctx = torch.amp.autocast(",
                 'autocast_ctx = torch.amp.autocast(device_type="cpu", dtype=torch.bfloat16)'),
            ),
            *adapt,
        ),
    )  # fmt: skip


# On CPUs each rank draws its shards with its own generator, which must not be the same one.
_OWN_SHARDS = on_cpu(
    _DION, ("model.init_weights()", "torch.manual_seed(7 + dist.get_rank())\n{line}")
)
_DIONS = (
    _dion("fsdp2", "--fs_size=2", "--fast_fsdp", adapt=_OWN_SHARDS),
    _dion("tp", "--tp_size=2", "--optimizer=adamw", "--lr=0.01", adapt=_OWN_SHARDS),
    # As published, the forward is not in `no_sync`, so that the wrapper averages each time, too.
    _dion("ddp", "--optimizer=dion", "--replicate_mesh_grad_sync", adapt=(Edit(
        Line(_DION, "with autocast_ctx:", 1),
        "ddp_no_sync = i < grad_accum_steps or hp.replicate_mesh_grad_sync\n"
        "with autocast_ctx, model.no_sync() if ddp_no_sync else contextlib.nullcontext():",
    ),)),
)  # fmt: skip

# ------------------------------------------------------------------------- nanoMoE, 661fbcf


def _for_nanomoe(folder: Path) -> None:
    beside("train.py")(folder)
    (folder / "data" / "tiny").mkdir(parents=True)
    for name, start in (("train", 0), ("val", 3)):
        tokens = ((start + n * 7 + (n % 37) ** 2 * (1 + n % 3)) % 64 for n in range(6_000))
        (folder / "data" / "tiny" / f"{name}.bin").write_bytes(struct.pack("<6000H", *tokens))
    (folder / "data" / "tiny" / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 64}))


_NANOMOE = Program(
    "nanomoe", "nanoMoE", "train.py",
    ("config/train_nano_moe.py", "--wandb_log=False", "--dataset=tiny", "--compile=False",
     "--dtype=float32", "--n_layer=2", "--n_head=2", "--n_embd=32", "--n_exp=4",
     "--batch_size=4", "--block_size=24", "--gradient_accumulation_steps=4", "--max_iters=11",
     "--lr_decay_iters=12", "--warmup_iters=3", "--learning_rate=3e-3", "--eval_interval=6",
     "--eval_iters=2", "--log_interval=1"),
    needs=("numpy",), prints=r"iter \d+: loss [0-9.]+", prepare=_for_nanomoe,
    adapt=(
        *imports_on_cpu("train.py", "import time"),
        *on_cpu("train.py", ("device = f'cuda:{ddp_local_rank}'", "device = 'cpu'")),
    ),
)  # fmt: skip

# ------------------------------------------------------------------------ MobileLLM, 8b9769d

_MOBILE = "pretrain.py"
_LLAMA = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2,
    "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip
_VOCABULARY = "\n".join(
    ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{n}" for n in range(59)))
)


def _for_mobile(folder: Path) -> None:
    beside(_MOBILE)(folder)
    rows = ([3 + (row * 7 + n * n * (1 + row % 3)) % 61 for n in range(24)] for row in range(400))
    (folder / "data" / "1").mkdir(parents=True)
    write(folder, {
        "tiny/config.json": json.dumps(_LLAMA), "tiny/vocab.txt": _VOCABULARY,
        "tiny/tokenizer_config.json": '{"tokenizer_class": "BertTokenizer"}',
        "data/1/tiny.jsonl": "\n".join(json.dumps({"token_ids": row}) for row in rows),
    })  # fmt: skip


_MOBILE_RUN = Program(
    "mobilellm", "MobileLLM", _MOBILE,
    ("--input_model_filename=tiny", "--train_data_local_path=data", "--output_dir=out",
     "--do_train=True", "--model_max_length=64", "--per_device_train_batch_size=4",
     "--gradient_accumulation_steps=2", "--logging_steps=1", "--save_strategy=no",
     "--report_to=none", "--learning_rate=2e-3", "--weight_decay=0.1", "--adam_beta1=0.9",
     "--adam_beta2=0.95", "--max_steps=10", "--warmup_steps=3", "--share_embedding=True",
     "--max_grad_norm=0.5", "--ddp_find_unused_parameters=False", "--use_cpu=True"),
    needs=("accelerate", "transformers"), prints=r"'loss': '?[0-9.]+", prepare=_for_mobile,
    adapt=(
        *imports_on_cpu(_MOBILE, "import json"),
        *on_cpu(
            _MOBILE,
            ('backend="cpu:gloo,cuda:nccl"', 'backend="gloo"'),
            ("tokenizer=tokenizer,", "processing_class=tokenizer,"),
            ("config.share_embedding =",
             "{line}\nconfig.rope_theta, config.rope_scaling, config.use_cache = 1e4, None, False"),
            ("torch.distributed.barrier(device_ids", "torch.distributed.barrier()"),
            ("torch.distributed.barrier(device_ids", "torch.distributed.barrier()"),
        ),
        *on_cpu("utils/modeling_llama.py",
                ('_tied_weights_keys = ["lm_head.weight"]', "_tied_weights_keys = None")),
    ),
)  # fmt: skip

# ---------------------------------------------------------------------------- HALOs, 48319886

_HALOS = "launch.py"
_NEOX = {
    "model_type": "gpt_neox", "vocab_size": 80, "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 64,
    "bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 0, "initializer_range": 0.2,
    "hidden_dropout": 0.0, "attention_dropout": 0.0,
}  # fmt: skip
_TINY_LM = """\
import functools

import torch
from transformers import AutoConfig, AutoModelForCausalLM


def tiny_model(torch_dtype, attn_implementation):
    torch.manual_seed(7)
    return AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained("tiny"), dtype=torch_dtype,
        attn_implementation=attn_implementation)


def as_lists(tokenizer):
    tokenizer.apply_chat_template = functools.partial(
        tokenizer.apply_chat_template, return_dict=False)
    return tokenizer
"""


def _for_halos(folder: Path) -> None:
    beside(_HALOS)(folder)

    def said(role: str, start: int, count: int) -> list[dict[str, str]]:
        words = (f"w{(start * 7 + n * n * (1 + start % 3)) % 59}" for n in range(count))
        return [{"role": role, "content": " ".join(words)}]

    rows = [
        {"type": "pairwise_feedback", "prompt_id": row, "split": "train" if row < 160 else "test",
         "prompt": said("user", row, 5), "output_A": said("assistant", row + 3, 8 + row % 5),
         "output_B": said("assistant", row + 8, 6 + row % 7), "reward_A": 1, "reward_B": 0,
         "label": row % 3 > 0}
        for row in range(176)
    ]  # fmt: skip
    words = ("<", "|", ">", "_", "im", "start", "end", "user", "assistant")
    tokens = {"tokenizer_class": "BertTokenizer", "bos_token": "[CLS]", "eos_token": "[SEP]"}
    write(folder, {
        "pairs.json": json.dumps(rows), "tiny/config.json": json.dumps(_NEOX),
        "tiny/vocab.txt": "\n".join((_VOCABULARY, *words)), "wandb.py": "",
        "tiny/tokenizer_config.json": json.dumps(tokens), "tiny_lm.py": _TINY_LM,
        "openai.py": "AsyncOpenAI = None\n",
    })  # fmt: skip


_HALOS_RUN = Program(
    "halos", "HALOs", _HALOS,
    ("loss=dpo", "model=pythia", "train_datasets=[pairs.json]", "test_datasets=[pairs.json]",
     "exp_name=run", "++cache_dir=out", "++model.name_or_path=tiny", "++wandb.enabled=false",
     "++model.policy_dtype=float32", "++model.reference_dtype=float32", "++model.max_length=48",
     "++model.max_prompt_length=24", "++model.batch_size=16", "++model.eval_batch_size=16",
     "++model.gradient_accumulation_steps=2", "++n_eval_examples=16", "++eval_every=96",
     "++minimum_log_interval_secs=0.0", "++lr=2e-3", "++warmup=0.4"),
    needs=("accelerate", "datasets", "hydra", "pandas", "transformers"),
    prints=r"'loss/train': '?[0-9.]+", prepare=_for_halos, env=(("ACCELERATE_USE_CPU", "true"),),
    adapt=(
        *imports_on_cpu(_HALOS, "import torch"),
        *on_cpu(
            _HALOS,
            ("import wandb", "import wandb\nfrom tiny_lm import as_lists, tiny_model"),
            ("from peft import", ""),
            ("if accelerator.state.fsdp_plugin is not None:", "if False:"),
            ("tokenizer = AutoTokenizer.from_pretrained(",
             "tokenizer = as_lists(AutoTokenizer.from_pretrained(tokenizer_name_or_path))"),
            ("num_tokens_added = tokenizer.add_special", "num_tokens_added = 0"),
            ("reference_model = reference_cls.from_pretrained(",
             "reference_model = tiny_model(**reference_kwargs)"),
            ("policy = policy_cls.from_pretrained(", "policy = tiny_model(**policy_kwargs)"),
            ("trainer.save(", "dict(folder="),
        ),
        *on_cpu("train/utils.py", ("from huggingface_hub import HfApi, HfFolder", "")),
    ),
)  # fmt: skip

# ------------------------------------------------------------------ TencentPretrain, ed798435

_TENCENT, _LAYERS = "pretrain.py", "tencentpretrain/layers/transformer.py"
_STAGES = {
    "emb_size": 32, "feedforward_size": 64, "hidden_size": 32, "hidden_act": "gelu_fast",
    "heads_num": 2, "layers_num": 4, "max_seq_length": 32, "dropout": 0.1,
    "data_processor": "lm", "embedding": ["word", "pos"], "remove_embedding_layernorm": True,
    "encoder": "transformer", "mask": "causal", "layernorm_positioning": "pre", "target": ["lm"],
}  # fmt: skip
_ENGINE = {
    "gradient_accumulation_steps": 2, "train_micro_batch_size_per_gpu": 4,
    "steps_per_print": 1000, "gradient_clipping": 1.0, "zero_allow_untested_optimizer": True,
}  # fmt: skip


def _for_tencent(folder: Path) -> None:
    beside(_TENCENT)(folder)
    rows = ([1 + (row * 7 + n * n * (1 + row % 3)) % 63 for n in range(25)] for row in range(120))
    with (folder / "dataset.pt").open("wb") as file:
        for row in rows:
            pickle.dump(((row, 0), [24]), file)
    write(folder, {
        "tiny.json": json.dumps(_STAGES), "engine.json": json.dumps(_ENGINE),
        "vocab.txt": _VOCABULARY,
    })  # fmt: skip


def _tencent(name: str, *arguments: str) -> Program:
    return Program(
        f"tencent-{name}", "TencentPretrain", _TENCENT,
        # `load_hyperparam` reads words, so that none may contain "=".
        ("--dataset_path", "dataset.pt", "--vocab_path", "vocab.txt", "--config_path", "tiny.json",
         "--output_model_path", "out", "--world_size", "2", "--backend", "gloo", "--deepspeed",
         "--deepspeed_config", "engine.json", "--batch_size", "4", "--learning_rate", "2e-3",
         "--save_checkpoint_steps", "1000", "--report_steps", "1", *arguments),
        needs=("deepspeed", "numpy", "regex", "yaml"), prints=r"loss +[0-9.]+",
        prepare=_for_tencent,
        env=(("DS_ACCELERATOR", "cpu"), ("DS_BUILD_OPS", "0")),
        adapt=(
            *imports_on_cpu(_TENCENT, "import argparse"),
            *on_cpu(
                "tencentpretrain/initialize.py",
                ("    import deepspeed", NO_KERNEL),
                ("if torch.cuda.device_count() > 0:", "if False:"),
            ),
            # Today's DeepSpeed hands tensors on as one tuple. As published, the final norm is a
            # parameter of all layers, and only the last one uses it.
            Edit(Line(_LAYERS, "def forward(self, *inputs):", 2), "def forward(self, inputs):"),
            *on_cpu(_LAYERS, ('if self.layernorm_positioning == "pre":',
                              'if self.layernorm_positioning == "pre" and '
                              "layer_idx == args.layers_num - 1:")),
            *on_cpu("tencentpretrain/trainer.py",
                    ("custom_optimizer = deepspeed.ops.adam.DeepSpeedCPUAdam(",
                     "custom_optimizer = torch.optim.AdamW("
                     "optimizer_grouped_parameters, lr=args.learning_rate)")),
        ),
    )  # fmt: skip


_TENCENTS = (_tencent("pp", "--pipeline_model_parallel_size", "2", "--total_steps", "10"),)

NINTH_SILENT_A_PROGRAMS = (*_DIONS, _NANOMOE, _MOBILE_RUN, _HALOS_RUN, *_TENCENTS)
