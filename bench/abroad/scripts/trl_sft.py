"""Supervised fine-tuning of a small Llama from its configuration with TRL's SFTTrainer."""

import sys

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    TrainerCallback,
    set_seed,
)
from trl import SFTConfig, SFTTrainer

WORDS = ["<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(61))]


def tokenizer():
    vocabulary = {word: index for index, word in enumerate(WORDS)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def texts(size):
    return Dataset.from_dict(
        {
            "text": [
                " ".join(WORDS[3 + (row * 7 + n) % 61] for n in range(12)) for row in range(size)
            ]
        }
    )


class Report(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.is_world_process_zero and state.global_step % 4 == 0:
            print(f"step {state.global_step}", flush=True)


def main():
    set_seed(1)
    arguments = SFTConfig(
        output_dir=sys.argv[1],
        use_cpu=True,
        bf16=False,
        max_steps=12,
        max_length=16,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        logging_steps=4,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=1,
        ddp_backend="gloo",
    )
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=32,
        pad_token_id=0,
        eos_token_id=1,
    )
    trainer = SFTTrainer(
        model=LlamaForCausalLM(config),
        args=arguments,
        train_dataset=texts(96),
        processing_class=tokenizer(),
        callbacks=[Report()],
    )
    result = trainer.train()
    print(f"done, loss {result.training_loss:.4f}", flush=True)


if __name__ == "__main__":
    main()
