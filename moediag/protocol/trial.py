"""The trial: everything a rank needs to know about one launch."""

from __future__ import annotations

import dataclasses
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Dict, Optional, Union

from moediag.protocol.files import TRIAL_FILE
from moediag.protocol.specs import ModelSpec, RecorderSpec, SkewSpec, StepSpec, WrapperSpec
from moediag.protocol.stored import SCHEMA_VERSION, build, read_json, write_json
from moediag.protocol.tasks import (
    CheckTask,
    FamiliesTask,
    ReferenceTask,
    RelationTask,
    SequenceTask,
    StepTask,
    Task,
    task_fields,
)

LAWS_VARIANT = "laws"  # of a program that records itself, by `moediag.laws`


@dataclass(frozen=True)
class Trial:
    """One launch: what a rank needs to know."""

    name: str  # unique within the run; also its folder's name
    scenario: str
    variant: str
    role: str = "unfixed"  # unfixed | fix | control
    task: Task = field(default_factory=StepTask)  # what the ranks do
    world_size: int = 2
    layout: Dict[str, int] = field(default_factory=dict)  # mesh axis -> size, outermost first
    backend: str = "gloo"
    launcher: str = "fork"
    model: ModelSpec = field(default_factory=ModelSpec)
    wrapper: WrapperSpec = field(default_factory=WrapperSpec)
    step: StepSpec = field(default_factory=StepSpec)
    skew: SkewSpec = field(default_factory=SkewSpec)
    fix: Optional[str] = None  # name of a fix of scenarios/fixes, or the path of another
    reference_path: Optional[str] = None
    recorder: RecorderSpec = field(default_factory=RecorderSpec)
    record: bool = True  # install the recorder (benchmarks switch it off)
    executed: bool = False  # with it, note of which files functions ran, see executed_file
    timeout: float = 120.0  # seconds; the bound on the whole launch, not the hang detector
    shared_gpu: bool = False  # several ranks on one GPU, with whatever backend
    # Variables a rank sets before it joins the process group, unless they are set already.
    environment: Dict[str, str] = field(default_factory=dict)
    schema_version: int = SCHEMA_VERSION

    @property
    def alone(self) -> bool:
        """Whether it runs in one process, whatever its world size."""
        if isinstance(self.task, SequenceTask):
            return self.task.single
        alone = (ReferenceTask, FamiliesTask, RelationTask, CheckTask)
        return isinstance(self.task, alone)

    @property
    def on_gpu(self) -> bool:
        """Whether its tensors lie on GPUs: always with NCCL, with gloo where ranks share one."""
        return self.backend == "nccl" or self.shared_gpu

    @property
    def computes_in(self) -> str:
        """dtype of forward and backward; FSDP2's param_dtype may differ from the parameters'."""
        return self.wrapper.param_dtype or self.model.dtype

    @property
    def checkpoint_path(self) -> Path:
        """The folder of the saved model, beside the reference that wrote it. Raises ValueError."""
        if self.reference_path is None:
            raise ValueError(f"trial {self.name}: no reference run, so nothing saved a checkpoint")
        return Path(self.reference_path).with_suffix(".checkpoint")

    def write(self, folder: Union[str, Path]) -> Path:
        """Writes ``trial.json`` atomically; returns its path."""
        return write_json(Path(folder) / TRIAL_FILE, dataclasses.asdict(self))

    @classmethod
    def read(cls, path: Union[str, Path]) -> "Trial":
        """Raises ValueError when the file is of another schema version, or of a task that this
        moediag does not know."""
        raw = read_json(path)
        version = raw.get("schema_version") if isinstance(raw, dict) else None
        if version != SCHEMA_VERSION:
            raise ValueError(
                f"{path}: schema_version {version!r}, this moediag reads {SCHEMA_VERSION}"
            )
        return typing.cast("Trial", build(cls, {**raw, "task": task_fields(raw)}))
