"""Training that resumes from a checkpoint continues as if it had not stopped."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

import torch

from moediag.lab.relations.relation import Case, Relation, Tensors
from moediag.lab.step.models.checkpoint import dtype_argument
from moediag.lab.step.models.release_families import from_pretrained
from moediag.recorder.not_applicable import NotInStack

NEW = "new-model"  # the model that resumes is new
LOADED = "from-pretrained"  # it was loaded from the checkpoint before Trainer loads it
STEPS, STOP = 5, 2
ROWS, LENGTH = 2, 10  # of a batch
FRESH = 7  # added to the seed of the model that resumes: what is not loaded shows


class ResumedTraining(Relation):
    name = "resume"
    says = "Trainer, stopped and resumed from its checkpoint, has the state of one run at each step"
    exact = True
    route = "the losses of the steps after resuming"

    def ways(self, case: Case) -> Sequence[str]:
        try:
            import accelerate  # noqa: F401 - Trainer needs it
        except ImportError as error:
            raise NotInStack("accelerate") from error
        return (NEW, LOADED)

    def plain(self, case: Case, way: str) -> Tensors:
        with tempfile.TemporaryDirectory() as folder:
            return _whole(case, folder).states

    def other(self, case: Case, way: str) -> Tensors:
        with tempfile.TemporaryDirectory() as folder:
            return _resumed(case, way, folder).states

    def quantity(self, wrong: Sequence[str]) -> str:
        when = "after loading" if any(_after(STOP) in name for name in wrong) else "at the end"
        first = [name for name in wrong if when == "at the end" or _after(STOP) in name]
        weights = any(" of " not in name for name in first)
        return f"{'weights' if weights else 'optimizer state'} {when}"

    def second(self, case: Case, way: str, wrong: Sequence[str]) -> Optional[bool]:
        with tempfile.TemporaryDirectory() as folder:
            right = _whole(case, folder).losses[STOP:]
        with tempfile.TemporaryDirectory() as folder:
            return _resumed(case, way, folder).losses != right


class _Run:
    """One Trainer with its model. ``states``: weights and optimizer state after step STOP and at
    the end; ``losses``: of each step."""

    def __init__(self, case: Case, folder: str, model: Any) -> None:
        from transformers import Trainer, TrainerCallback, default_data_collator

        self.losses: List[float] = []
        self.states: Tensors = {}
        self.model = model
        self.last = STEPS
        run = self

        class Watching(Trainer):  # type: ignore[misc, unused-ignore]
            def training_step(self, model: Any, inputs: Any, *more: Any, **named: Any) -> Any:
                if self.state.global_step == STOP:
                    run.keep(STOP)
                loss = super().training_step(model, inputs, *more, **named)
                run.losses.append(float(loss))
                return loss

        class Stopping(TrainerCallback):  # type: ignore[misc, unused-ignore]
            def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
                control.should_training_stop |= state.global_step == run.last
                control.should_save = state.global_step == STOP == run.last

        self.trainer: Any = Watching(
            model=model,
            args=_arguments(folder),
            train_dataset=_rows(case),
            data_collator=default_data_collator,
            callbacks=[Stopping()],
        )

    def train(self, last: int, checkpoint: Optional[str] = None) -> _Run:
        """Trains until step ``last``. Returns itself."""
        self.last = last
        self.trainer.train(resume_from_checkpoint=checkpoint)
        self.keep(last)
        return self

    def keep(self, step: int) -> None:
        """Keeps the weights and the optimizer's tensors."""
        names = {p: name for name, p in self.model.named_parameters()}
        for parameter, name in names.items():
            self.states[f"{_after(step)}{name}"] = parameter.detach().clone()
        for parameter, values in self.trainer.optimizer.state.items():
            for key, value in values.items():
                if isinstance(value, torch.Tensor):
                    name = f"{_after(step)}{key} of {names[parameter]}"
                    self.states[name] = value.detach().clone()


def _after(step: int) -> str:
    return f"after step {step}: "


def _whole(case: Case, folder: str) -> _Run:
    return _Run(case, folder, case.model(train=True)).train(STEPS)


def _resumed(case: Case, way: str, folder: str) -> _Run:
    """Returns the run that resumed. Raises what the library raises."""
    _Run(case, folder, case.model(train=True)).train(STOP)
    checkpoint = str(Path(folder, f"checkpoint-{STOP}"))
    fresh: Any = dataclasses.replace(case, seed=case.seed + FRESH).model(train=True)
    if way == LOADED:
        dtype = {dtype_argument(): fresh.dtype}
        fresh = from_pretrained(type(fresh), type(fresh.config), checkpoint, **dtype).train()
    return _Run(case, folder, fresh).train(STEPS, checkpoint)


def _rows(case: Case) -> List[Dict[str, List[int]]]:
    tokens = case.tokens(ROWS * STEPS, LENGTH).tolist()
    return [{"input_ids": row, "labels": row} for row in tokens]


def _arguments(folder: str) -> Any:
    from transformers import TrainingArguments

    return TrainingArguments(
        output_dir=folder, use_cpu=True, max_steps=STEPS, per_device_train_batch_size=ROWS,
        learning_rate=1e-2, lr_scheduler_type="linear", warmup_steps=1, optim="adamw_torch",
        save_strategy="no", logging_strategy="no", report_to="none", disable_tqdm=True,
        dataloader_pin_memory=False, seed=1,
    )  # fmt: skip
