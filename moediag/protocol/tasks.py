"""What a trial does: one task, identified in trial.json by its ``kind``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Dict, List, Mapping, Optional, Union

from moediag.protocol.specs import ModelSpec, Size, option

# Values of wrapper.kind where a training library runs the steps, see TrainerTask.
TRAINER_KINDS = ("trainer", "trl")


@dataclass(frozen=True)
class StepTask:
    """The training step under test."""

    kind: str = field(default="step", init=False)


@dataclass(frozen=True)
class TrainerTask:
    """The same steps run by transformers' Trainer or TRL's SFTTrainer (``wrapper.kind``)."""

    kind: str = field(default="trainer", init=False)


@dataclass(frozen=True)
class ResumeTask:
    """Compares an uninterrupted run with some steps, a save, a load into a new model and optimizer,
    and the rest. Only the steps after the save are judged, not the gradients."""

    kind: str = field(default="resume", init=False)
    through: str = option("dcp", choices=("dcp", "dcp-model", "accelerate", "save-pretrained"))
    """dcp: torch.distributed.checkpoint with get_state_dict and set_state_dict; dcp-model: the same
    without the optimizer; accelerate: save_state and load_state; save-pretrained: save_pretrained
    and from_pretrained for the model, torch.save on each rank for the optimizer."""
    after: int = option(2, ge=1)
    """Steps before the save."""
    state_dict: str = option("sharded", choices=("sharded", "full"))
    """Through accelerate: its state dict type."""
    layout: Dict[str, int] = option(dict)
    """The layout after loading, if it is another one. The steps after it are compared with those of
    a training that got the state at the save in memory, at this layout."""


@dataclass(frozen=True)
class ProgramTask:
    """A program that replaces the training step of a whole model."""

    kind: str = field(default="program", init=False)
    name: str = ""
    """A program of the catalogue, e.g. metrics, or the path of your own, relative to this file:
    ./my_step.py."""
    # In a trial every option of the program is written out.
    options: Dict[str, Any] = option(dict)
    """Its options; a variant overrides the scenario's options one by one."""


@dataclass(frozen=True)
class CostTask:
    """Times the fixes on a mid-size healthy step, side by side."""

    kind: str = field(default="cost", init=False)
    fixes: List[str] = option(list)
    """Fixes to time; empty: those of the selected variants on the same stack."""
    rounds: int = option(8, ge=1)
    """Timed steps per fix, alternating."""
    model: ModelSpec = option(ModelSpec)
    """The timed model; mid-size."""
    batch: int = option(1, ge=1)
    """Sequences per rank."""
    seq_len: int = option(512, ge=1)
    """Tokens per sequence."""


@dataclass(frozen=True)
class ReferenceTask:
    """The same step in one process in fp32; writes the trial's ``reference_path``."""

    kind: str = field(default="reference", init=False)


@dataclass(frozen=True)
class GenerateTask:
    """``generate`` with prompts that end after different numbers of tokens, compared with one
    process."""

    kind: str = field(default="generate", init=False)
    synced: bool = False  # whether synced_gpus=True is passed


@dataclass(frozen=True)
class SaveTask:
    """Saves the model under the trial's layout, and loads what was saved into one process."""

    kind: str = field(default="save", init=False)


@dataclass(frozen=True)
class FamiliesTask:
    """Lists the families of the release and the relations that can be checked, in one process."""

    kind: str = field(default="families", init=False)


@dataclass(frozen=True)
class RelationTask:
    """Checks one relation on a tiny model of ``model.family``, in one process."""

    kind: str = field(default="relation", init=False)
    relation: str = ""  # name of one of moediag.lab.relations
    # Only this way, at this size (null: the first of SIZES), and without the conditions.
    way: str = ""
    size: Optional[Size] = None
    # Folder with what the earlier release saved, see CheckpointTask; "": there is none.
    earlier: str = ""


@dataclass(frozen=True)
class CheckpointTask:
    """Saves tiny models of ``model.family`` with their logits, for a later release."""

    kind: str = field(default="checkpoint", init=False)
    folder: str = ""


@dataclass(frozen=True)
class SequenceTask:
    """Runs several trials one after the other in the same processes. What one of them leaves in a
    process may change the next: only a trial that shows nothing is decided by it."""

    kind: str = field(default="sequence", init=False)
    trials: List[str] = field(default_factory=list)  # folders below this trial's, see TRIAL_FILE
    single: bool = False  # in one process, as references


@dataclass(frozen=True)
class CheckTask:
    """Plans the trial's layout for a model without weights, and simulates its ranks, one by one.
    The trial's ``wrapper.kind`` says who shards: ``fsdp2`` or ``transformers``."""

    kind: str = field(default="check", init=False)
    config: str = ""  # folder with config.json, or the file itself
    simulate: bool = True  # run one step of a tiny model on simulated ranks
    length: int = 0  # tokens of a sequence; 0: not known
    dtype: str = ""  # that from_pretrained is given; "": the configuration's
    batch: int = 0  # sequences of a rank; 0: what lives during a step is not measured
    recompute: str = "none"  # none | layers | selective: what backward computes again
    brief: bool = False  # one of many: without notes, and without the peak of the worst load
    reserved: bool = False  # a step at full depth, with all that it allocates and frees


@dataclass(frozen=True)
class WatchTask:
    """A job that moediag only watched: its own program decides what the ranks do."""

    kind: str = field(default="watch", init=False)


@dataclass(frozen=True)
class AttachTask:
    """A job that was started without moediag, and looked at from outside while it ran."""

    kind: str = field(default="attach", init=False)


@dataclass(frozen=True)
class VerifyTask:
    """The first steps of a user's job, compared with the same steps in one process."""

    kind: str = field(default="verify", init=False)


@dataclass(frozen=True)
class ResumedTask:
    """A user's job that resumed from a checkpoint, compared with uninterrupted runs of it."""

    kind: str = field(default="resumed", init=False)


Task = Union[
    StepTask, TrainerTask, ResumeTask, ProgramTask, CostTask, ReferenceTask, GenerateTask,
    SaveTask, FamiliesTask, RelationTask, SequenceTask, CheckTask, WatchTask,
    AttachTask, VerifyTask, ResumedTask, CheckpointTask,
]  # fmt: skip


def task_fields(trial: Mapping[str, Any]) -> Dict[str, Any]:
    """The task in the content of a trial.json. Older files have a ``purpose`` and a section of that
    name instead. Whatever else the file holds, the result has a ``kind``."""
    if isinstance(trial.get("task"), dict):
        return {"kind": "", **trial["task"]}
    sections = {name: value for name, value in trial.items() if isinstance(value, dict)}
    kind = str(trial.get("purpose", "step"))
    if kind == "step":
        trained = sections.get("wrapper", {}).get("kind") in TRAINER_KINDS
        others = [name for name in ("program", "resume") if name in sections]
        kind = others[0] if others else "trainer" if trained else "step"
    return {**sections.get(kind, {}), "kind": kind}
