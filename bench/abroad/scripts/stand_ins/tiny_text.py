"""Stands in for the sentences, the log and the metrics of a translation program."""

WORDS = ["one", "two", "three", "four", "five", "six", "seven"]


def load_dataset(*_, **__):
    def sentence(row):
        return " ".join(WORDS[(row * 3 + at) % 7] for at in range(3 + row % 4))

    return [{"translation": {"en": sentence(row), "it": sentence(row + 1)}} for row in range(80)]


class Quiet:
    id = "none"

    def __getattr__(self, name):
        return self

    def __call__(self, *_, **__):
        return self


wandb = torchmetrics = Quiet()
