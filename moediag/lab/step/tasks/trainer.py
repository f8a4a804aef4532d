"""A short training run by transformers' Trainer or TRL's SFTTrainer, started as users do.

The library controls the loop, the sharding, clipping and the optimizer. It is observed from inside
``training_step``, where gradients are reduced and not yet clipped, and compared with the same
single-process reference as every other trial.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from typing import Any, ContextManager, Dict, List, Optional

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import SequentialSampler

from moediag import protocol
from moediag.lab.step import content, data, preparation
from moediag.lab.step.collector import Collector
from moediag.lab.step.measure import gradients, reference
from moediag.lab.step.measure.block_inputs import InputGradients
from moediag.lab.step.models import checkpoint as load
from moediag.lab.step.models import tiny
from moediag.lab.step.models.skew import RouterSkew
from moediag.lab.step.shard import accelerate_on_cpu, fsdp2_internals
from moediag.lab.step.shard.wrapped import Wrapped
from moediag.lab.step.tasks import before_training, trainer_arguments
from moediag.protocol import Trial
from moediag.recorder.not_applicable import NotApplicable

HIDDEN = (
    "the loaded model was made to forget its tp_size, from which Trainer tells accelerate that "
    "ranks share a batch and leave FSDP2 none: so it is prepared as any other model"
)
NO_AUX_LOSS = "router_aux_loss_coef is 0: SFTTrainer would add that loss, the reference has none"


def run(collector: Collector) -> None:
    """Runs all steps. Collective: it ends on all ranks, raises, or hangs, which the trial tests."""
    trial = collector.trial
    watched = Watched(collector)
    if trial.step.fill_uninitialized:
        preparation.fill_uninitialized()
    with contextlib.ExitStack() as stack:
        stack.enter_context(_like_gpus(collector))
        within = os.environ.get(protocol.ENV_EVIDENCE)  # where even a killed rank may leave it
        folder = stack.enter_context(tempfile.TemporaryDirectory(dir=within))
        # Before the model, as in users' scripts: they set FSDP variables in the environment.
        given = _arguments(trial, folder)
        watched.load()
        trainer = _trainer(watched, given)
        before_training.call(trainer, trial.wrapper.before_train)
        stack.enter_context(watched.observing())
        trainer.train()
    dist.barrier()
    watched.finish(_norms(trainer))


class Watched:
    """One rank's run, observed from inside the library's loop."""

    def __init__(self, collector: Collector) -> None:
        self.collector = collector
        self.trial = trial = collector.trial
        self.expected: Optional[Dict[str, Any]] = None
        if trial.reference_path:
            self.expected = reference.load(trial.reference_path)
        self.weights = preparation.Weights(trial, collector.recorder, self.expected)
        self.model: Any = None
        self.anatomy: Any = None
        self.wrapped: Optional[Wrapped] = None
        self._forwards = 0
        self._began = 0.0

    def load(self) -> None:
        """Loads the model. Raises NotApplicable, and what the library raises."""
        trial = self.trial
        self.collector.note(*load.notes(trial))
        if trial.model.source == "checkpoint":
            self.model = load.from_checkpoint(trial, self.collector.device)
        else:
            self.model = tiny.build(
                trial.model, trial.step.seed, experts=trial.model.experts_implementation
            ).to(self.collector.device)
        self.anatomy = tiny.anatomy(self.model, trial.model)
        self.weights.examine("loaded", self.model, self.anatomy)
        if trial.wrapper.hide_tp_size and getattr(self.model, "tp_size", None) is not None:
            self.model._tp_size = None
            self.collector.note(HIDDEN)
        fix = content.fix(trial.fix) if trial.fix else None
        if fix is not None:
            if not hasattr(fix, "before_wrap"):
                raise NotApplicable(
                    f"a Trainer shards by itself, before {trial.fix} could change it"
                )
            fix.before_wrap(self.model, self.anatomy, trial.wrapper)
        self.skew = RouterSkew(trial.skew, self.anatomy.experts)
        self.skew.set_rank(self.collector.rank)
        self.kept = InputGradients(self.anatomy)

    @contextlib.contextmanager
    def observing(self) -> Any:
        with self.skew.installed(self.anatomy), self.kept:
            yield

    def before(self, model: nn.Module, tokens: torch.Tensor) -> None:
        """Observes a step before it runs. ``model``: the Trainer's; ``tokens``: this rank's."""
        rank, measured = self.collector.rank, self.collector.measured
        number, micro = divmod(self._forwards, self.trial.step.accumulate)
        number += 1
        if self.wrapped is None:
            self.wrapped = Wrapped(model, self.anatomy, self.trial)
            self.weights.examine("prepared", model, self.anatomy)
        if micro == 0:
            self.collector.begin(number, self.skew)
            measured.losses.append(0.0)
            measured.step_seconds.append(0.0)
        if not torch.equal(tokens.cpu(), data.batch(self.trial, rank, number, micro)):
            raise NotApplicable(
                f"in step {number} the Trainer gave rank {rank} another batch than the reference "
                "trained on, so its gradients cannot be compared"
            )
        self._began = time.perf_counter()

    def after(self, loss: float) -> None:
        """Observes a step after it ran. ``loss``: the micro-batch's, divided by accumulation."""
        measured = self.collector.measured
        measured.step_seconds[-1] += time.perf_counter() - self._began
        measured.losses[-1] += loss
        self._forwards += 1
        number, micro = divmod(self._forwards, self.trial.step.accumulate)
        if micro or self.expected is None or self.wrapped is None:
            return
        of_inputs = self.expected["inputs"][number - 1][self.collector.rank]
        whole = self.expected["gradients"][number - 1]
        measured.inputs[str(number)] = gradients.inputs(self.wrapped, self.kept.take(), of_inputs)
        measured.gradients[str(number)] = gradients.compare(self.wrapped, whole, self.weights.held)

    def finish(self, norms: List[Optional[float]]) -> None:
        """Records the results. ``norms``: of every step, before clipping."""
        expected = self.expected or {}
        self.collector.set(
            reference_losses=expected.get("losses", []),
            gradient_norms=norms,
            reference_norms=expected.get("norms", []),
            steps_done=len(norms),
        )


def _like_gpus(collector: Collector) -> ContextManager[Any]:
    trial = collector.trial
    if trial.on_gpu:
        return contextlib.nullcontext()
    if trial.wrapper.native_fsdp or trial.wrapper.fsdp_plugin:
        if fsdp2_internals.sums_for_means(trial.backend):
            raise NotApplicable("a Trainer with FSDP2 and gloo needs torch >= 2.9")
        collector.note(*fsdp2_internals.prepare_cpu())
    return accelerate_on_cpu.as_on_gpus(collector.note)


def _arguments(trial: Trial, folder: str) -> Any:
    """Returns TrainingArguments, or SFTConfig. Raises NotApplicable."""
    values = trainer_arguments.training(trial, _layer_class(trial), folder)
    if trial.wrapper.kind == "trainer":
        from transformers import TrainingArguments

        return TrainingArguments(**values)
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    try:
        from trl import SFTConfig
    except ImportError as error:
        raise NotApplicable(f"this stack has no trl ({error})") from error
    return SFTConfig(max_length=trial.step.seq_len, packing=False, **values)


def _layer_class(trial: Trial) -> str:
    """Returns the decoder layer's class, from a copy without weights: the model is loaded later."""
    with torch.device("meta"):
        model = tiny.build(trial.model, trial.step.seed)
    return type(tiny.anatomy(model, trial.model).layers[0][1]).__name__


def _trainer(watched: Watched, given: Any) -> Any:
    trial = watched.trial
    rows = trainer_arguments.rows(trial, getattr(watched.model, "tp_size", None) or 1)
    if trial.wrapper.kind == "trainer":
        from transformers import Trainer, default_data_collator

        return _watching(Trainer, watched)(
            model=watched.model,
            args=given,
            train_dataset=rows,
            data_collator=default_data_collator,
        )
    from datasets import Dataset
    from trl import SFTTrainer

    watched.model.config.router_aux_loss_coef = 0.0
    watched.collector.note(NO_AUX_LOSS)
    return _watching(SFTTrainer, watched)(
        model=watched.model,
        args=given,
        train_dataset=Dataset.from_list(rows),
        processing_class=trainer_arguments.tokenizer(trial.model.vocab),
    )


def _watching(base: Any, watched: Watched) -> Any:
    """Returns ``base`` with the reference's data order and optimizer groups."""

    class Watching(base):
        def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
            return SequentialSampler(self.train_dataset)

        def get_decay_parameter_names(self, model: Any) -> List[str]:
            # The reference's optimizer has no exceptions for norms.
            return [name for name, _ in model.named_parameters()]

        def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            watched.before(self.model, inputs["input_ids"])
            loss = super().training_step(model, inputs, *args, **kwargs)
            watched.after(float(loss.detach()))
            return loss

        def _send_telemetry(self) -> None:
            """Sends nothing: TRL counts its users, and a test is not one."""

    return Watching


def _norms(trainer: Any) -> List[Optional[float]]:
    """Returns the logged gradient norm of every step before clipping on this rank."""
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    norms = [entry.get("grad_norm") for entry in logged]
    return [None if norm is None else float(norm) for norm in norms]
