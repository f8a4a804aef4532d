"""Arguments, data set and tokenizer for a Trainer. Nothing is downloaded or kept.

The data set holds the trial's own batches in the order in which a Trainer distributes them, so that
the single-process reference uses the same batches as every rank.
"""

from __future__ import annotations

from typing import Any, Dict, List

import torch

from moediag.axes import DP_REPLICATE, DP_SHARD, EP
from moediag.lab.step import data
from moediag.protocol import Trial
from moediag.recorder.not_applicable import NotApplicable

Row = Dict[str, List[int]]

_OPTIMIZERS = {"adamw": "adamw_torch", "sgd": "sgd"}


def sharding(trial: Trial, layer_class: str) -> Dict[str, Any]:
    """Returns TrainingArguments for FSDP2; empty if nothing is sharded, or from_pretrained does it.
    Raises NotApplicable for a layout that Trainer arguments cannot express."""
    spec = trial.wrapper
    if spec.native_fsdp:
        return {}
    # FSDP2 of accelerate, DDP and an ep axis alone span all ranks.
    axis = EP if EP in trial.layout else DP_SHARD if spec.fsdp_plugin else DP_REPLICATE
    lies = {a: n for a, n in trial.layout.items() if n > 1}
    if lies and lies != {axis: trial.world_size}:
        raise NotApplicable(f"these arguments of a Trainer mean {axis}={trial.world_size}, no other"
                            " layout")  # fmt: skip
    if not spec.fsdp_plugin:
        return {}
    if spec.ignore_experts:
        raise NotApplicable("fsdp_config of TrainingArguments takes no ignored modules")
    config = {
        "version": 2,
        "transformer_layer_cls_to_wrap": layer_class,
        "cpu_ram_efficient_loading": spec.cpu_ram_efficient_loading,
        "reshard_after_forward": spec.reshard_after_forward,
    }
    return {"fsdp": "full_shard auto_wrap", "fsdp_config": config}


def training(trial: Trial, layer_class: str, folder: str) -> Dict[str, Any]:
    """Returns TrainingArguments for the trial's step; nothing is saved or reported. The optimizer
    is the reference's: constant learning rate, else torch's defaults."""
    step = trial.step
    values: Dict[str, Any] = dict(
        output_dir=folder,
        use_cpu=not trial.on_gpu,
        max_steps=step.steps,
        per_device_train_batch_size=step.batch,
        gradient_accumulation_steps=step.accumulate,
        learning_rate=step.lr,
        lr_scheduler_type="constant",
        warmup_steps=0,
        weight_decay=0.01 if step.optimizer == "adamw" else 0.0,
        optim=_OPTIMIZERS[step.optimizer],
        max_grad_norm=0.0 if step.clip is None else step.clip,
        gradient_checkpointing=step.checkpointing != "none",
        seed=step.seed,
        logging_steps=1,
        logging_nan_inf_filter=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        bf16=False,
        **sharding(trial, layer_class),
    )
    if step.checkpointing != "none":
        reentrant = step.checkpointing == "reentrant"
        values["gradient_checkpointing_kwargs"] = {"use_reentrant": reentrant}
    return values


def rows(trial: Trial, shared: int) -> List[Row]:
    """Returns one row per sequence, in the order of a sequential sampler: batch after batch, and of
    each micro-batch one batch per group of ``shared`` ranks that get the same one from the Trainer.

    Raises NotApplicable if ranks of a group need different batches.
    """
    found: List[Row] = []
    for number in range(1, trial.step.steps + 1):
        for micro in range(trial.step.accumulate):
            for first in range(0, trial.world_size, shared):
                group = [data.batch(trial, first + i, number, micro) for i in range(shared)]
                if any(not torch.equal(group[0], other) for other in group):
                    raise NotApplicable(
                        f"the Trainer gives each {shared} ranks one batch, because the model says "
                        f"they divide it among them: skew.batches {trial.skew.batches} cannot be"
                    )
                found += [_row(tokens) for tokens in group[0].tolist()]
    return found


def _row(tokens: List[int]) -> Row:
    # Nothing predicts the first token; the Trainer of 5.7.0 would count it anyway.
    return {
        "input_ids": tokens,
        "labels": [-100, *tokens[1:]],
        "attention_mask": [1] * len(tokens),
    }


def tokenizer(vocab: int) -> Any:
    """Returns a tokenizer with one word per token, because SFTTrainer requires one."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"t{number}": number for number in range(vocab)}
    made = Tokenizer(models.WordLevel(words, "t0"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"unk_token": "t0", "pad_token": f"t{vocab - 2}", "eos_token": f"t{vocab - 1}"}
    return PreTrainedTokenizerFast(tokenizer_object=made, **special)
