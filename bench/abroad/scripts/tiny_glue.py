"""Stands in for the tokenizer, the data and the metric that accelerate's examples fetch."""

from datasets import Dataset, DatasetDict
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

WORDS = ["[PAD]", "[UNK]", *(f"w{number}" for number in range(62))]


def tokenizer():
    words = Tokenizer(
        models.WordLevel({word: at for at, word in enumerate(WORDS)}, unk_token="[UNK]")
    )
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]", model_max_length=64
    )


def rows(size):
    def sentence(row):
        return " ".join(WORDS[2 + (row * 5 + n) % 62] for n in range(4 + row % 9))

    return Dataset.from_dict(
        {
            "sentence1": [sentence(row) for row in range(size)],
            "sentence2": [sentence(row + 3) for row in range(size)],
            "label": [row % 2 for row in range(size)],
            "idx": list(range(size)),
        }
    )


def datasets():
    return DatasetDict({"train": rows(192), "validation": rows(96)})


def model():
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=64,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
            max_position_embeddings=64,
        )
    )


class Metric:
    def __init__(self):
        self.right = self.seen = 0

    def add_batch(self, predictions, references):
        self.right += int((predictions == references).sum())
        self.seen += len(references)

    def compute(self):
        accuracy, self.right, self.seen = self.right / max(self.seen, 1), 0, 0
        return {"accuracy": accuracy}
