"""What scripts do with a Trainer before they train: a baseline, a look at a batch, a first save.
Training after it must be the same training."""

from __future__ import annotations

from typing import Any, Callable, Dict

NOTHING = "nothing"


def _evaluate(trainer: Any) -> None:
    trainer.evaluate(trainer.train_dataset)


def _evaluate_unmarked(trainer: Any) -> None:
    _evaluate(trainer)
    # accelerate 1.14 and 1.15 take a model with this mark for one that is wrapped.
    trainer.model.__dict__.pop("_is_accelerate_prepared", None)


# By the words of moediag.protocol.specs.FIRST_CALLS.
CALLS: Dict[str, Callable[[Any], object]] = {
    "evaluate": _evaluate,
    "evaluate-unmarked": _evaluate_unmarked,
    "predict": lambda trainer: trainer.predict(trainer.train_dataset),
    "save": lambda trainer: trainer.save_model(),
    "read-batches": lambda trainer: list(trainer.get_train_dataloader()),
    "create-optimizer": lambda trainer: trainer.create_optimizer(),
    "prepare-for-evaluation": lambda trainer: trainer.accelerator.prepare_model(
        trainer.model, evaluation_mode=True
    ),
    "unwrap": lambda trainer: trainer.accelerator.unwrap_model(trainer.model),
    "free-memory": lambda trainer: trainer.accelerator.free_memory(),
}


def call(trainer: Any, what: str) -> None:
    """Makes the calls of ``what``, as ``wrapper.before_train`` names them."""
    for word in what.split(" then ") if what != NOTHING else ():
        CALLS[word](trainer)
