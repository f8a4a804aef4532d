"""Trainer cannot resume a DeepSeek-V4 model: it reads config.json with the base class.

Needs torch, transformers and accelerate, no download, one process. Exit code 1 if it shows, 0 if
not.
"""

import sys
import tempfile
import traceback

import torch
import transformers
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM, Trainer, TrainingArguments

ROWS = [{"input_ids": row, "labels": row} for row in torch.arange(80).view(10, 8).tolist()]


def trained(folder, steps, checkpoint=None):
    torch.manual_seed(0)
    config = DeepseekV4Config(
        vocab_size=96, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, head_dim=16,
        qk_rope_head_dim=8, q_lora_rank=16, o_groups=2, o_lora_rank=8, moe_intermediate_size=16,
        n_routed_experts=4, num_experts_per_tok=2, index_n_heads=2, index_head_dim=8,
        layer_types=["sliding_attention", "sliding_attention",
                     "compressed_sparse_attention", "heavily_compressed_attention"],
        mlp_layer_types=["hash_moe", "moe", "moe", "moe"],
    )  # fmt: skip
    args = TrainingArguments(
        output_dir=folder, max_steps=steps, per_device_train_batch_size=2, save_steps=2,
        use_cpu=True, report_to="none", disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(model=DeepseekV4ForCausalLM(config), args=args, train_dataset=ROWS)
    trainer.train(resume_from_checkpoint=checkpoint)


print(f"transformers {transformers.__version__}")
with tempfile.TemporaryDirectory() as folder:
    trained(folder, 2)
    DeepseekV4ForCausalLM.from_pretrained(f"{folder}/checkpoint-2")
    print("from_pretrained loads the checkpoint")
    try:
        trained(folder, 4, f"{folder}/checkpoint-2")
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)
        line = next(p for p in place if p.filename.endswith("trainer.py") and "_load" in p.name)
        print(f"Trainer does not resume: {line.name}: {line.line}")
        print(f"  {error}")
        sys.exit(1)
print("Trainer resumes")
