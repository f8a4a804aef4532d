"""A small GPT-2 from its configuration, trained by transformers' Trainer."""

import os
import sys

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)


class Numbers(torch.utils.data.Dataset):
    def __init__(self, size):
        self.rows = torch.randint(0, 64, (size, 16), generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


class Progress(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.is_world_process_zero and state.global_step % 5 == 0:
            print(f"step {state.global_step}", flush=True)


def collate(rows):
    return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}


def main():
    set_seed(1)
    arguments = TrainingArguments(
        output_dir=sys.argv[1],
        use_cpu=True,
        max_steps=20,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        eval_strategy="steps",
        eval_steps=8,
        save_steps=10,
        logging_steps=5,
        report_to=[],
        disable_tqdm=True,
        seed=1,
        ddp_backend="gloo",
        dataloader_num_workers=int(os.environ.get("WORKERS", "0")),
    )
    config = GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2)
    trainer = Trainer(
        model=GPT2LMHeadModel(config),
        args=arguments,
        data_collator=collate,
        train_dataset=Numbers(256),
        eval_dataset=Numbers(24),
        callbacks=[Progress()],
    )
    trainer.train()
    print(f"done, loss {trainer.evaluate()['eval_loss']:.4f}", flush=True)


if __name__ == "__main__":
    main()
