"""Where findings and tokens per expert go: a file of JSON lines, TensorBoard, W&B.

    from moediag.callbacks import sinks

    sinks.send("laws-run", [sinks.JsonLines("findings.jsonl")])

A sink is any object with the two methods of :class:`Sink`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from moediag import arguments
from moediag.result import FAILURES, TrialResult

__all__ = ["JsonLines", "Sink", "TensorBoard", "WandB", "send"]


class Sink(Protocol):
    """Receives what one job recorded."""

    def tokens(self, step: int, block: str, counts: Mapping[int, Sequence[int]]) -> None:
        """``counts``: rank -> tokens of each expert of the MoE block ``block`` in ``step``, from 1.
        Steps come in order."""

    def finding(self, trial: TrialResult) -> None:
        """The diagnosis, last."""


def check_sinks(sinks: object) -> None:
    """Raises UsageError if ``sinks`` is no list of sinks."""
    given = arguments.sequence("sinks", sinks, '[sinks.JsonLines("findings.jsonl")]')
    for at, sink in enumerate(given):
        for method in ("tokens", "finding"):
            arguments.function(f"sinks[{at}].{method}", getattr(sink, method, None))


def send(path: str | Path, sinks: Sequence[Sink]) -> TrialResult:
    """Diagnoses the job at ``path``, as ``moediag diagnose`` does, and sends it to ``sinks``.
    Returns the diagnosed job, the last one if there are several.

    Raises EvidenceError, and the first error of a sink, after all sinks were served."""
    from moediag.diagnosis import tokens_of
    from moediag.pipeline.examine import examine

    arguments.path("path", path)
    check_sinks(sinks)
    found = examine([Path(path)])
    errors = []
    for trial, evidence in zip(found.result.trials, found.evidence, strict=True):
        counts = tokens_of(evidence).counts
        for sink in sinks:
            try:
                for step, block in sorted(counts):
                    sink.tokens(step, block, counts[step, block])
                sink.finding(trial)
            except Exception as error:
                errors.append(error)
    if errors:
        raise errors[0]
    return found.result.trials[-1]


def _totals(counts: Mapping[int, Sequence[int]]) -> list[int]:
    """Tokens of each expert over all ranks."""
    return [sum(of) for of in zip(*counts.values(), strict=False)]


class JsonLines:
    """Appends objects to ``path``, one a line, whose ``kind`` is ``tokens`` or ``finding``."""

    def __init__(self, path: str | Path):
        arguments.path("path", path)
        self.path = Path(path)

    def tokens(self, step: int, block: str, counts: Mapping[int, Sequence[int]]) -> None:
        by_rank = {str(rank): list(of) for rank, of in counts.items()}
        self._write({"kind": "tokens", "step": step, "block": block, "counts": by_rank})

    def finding(self, trial: TrialResult) -> None:
        found = trial.diagnosis
        self._write(
            {
                "kind": "finding", "verdict": str(found.verdict), "signature": found.signature,
                "confidence": str(found.confidence), "culprits": found.culprits,
                "cause": found.cause, "next_step": found.next_step, "notes": found.notes,
                "evidence": trial.evidence,
            }
        )  # fmt: skip

    def _write(self, line: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


class TensorBoard:
    """Writes to a ``torch.utils.tensorboard.SummaryWriter``: one histogram per block and step, with
    a bucket for each expert, and the finding as text."""

    def __init__(self, writer: Any):
        arguments.function("writer.add_text", getattr(writer, "add_text", None))
        self.writer = writer

    def tokens(self, step: int, block: str, counts: Mapping[int, Sequence[int]]) -> None:
        totals = _totals(counts)
        tokens = sum(totals)
        self.writer.add_histogram_raw(
            f"moediag/tokens per expert/{block}",
            min=0, max=len(totals), num=tokens,
            sum=sum(expert * of for expert, of in enumerate(totals)),
            sum_squares=sum(expert * expert * of for expert, of in enumerate(totals)),
            bucket_limits=[expert + 1.0 for expert in range(len(totals))],
            bucket_counts=totals, global_step=step,
        )  # fmt: skip

    def finding(self, trial: TrialResult) -> None:
        found = trial.diagnosis
        lines = [f"{found.verdict}: {found.cause}", *found.notes]
        # Four spaces: markdown shows it as it is.
        self.writer.add_text("moediag/finding", "\n".join(f"    {line}" for line in lines))
        self.writer.flush()


class WandB:
    """Writes to a run of W&B: one histogram per block and step, the finding in the summary, and an
    alert for a failure. Works offline. ``run``: default ``wandb.run``."""

    STEP = "moediag/step"  # W&B's own step does not go back to those before the end of the training

    def __init__(self, run: Any = None):
        if run is not None:
            arguments.function("run.log", getattr(run, "log", None))
        self.run = run
        self._defined = False

    def tokens(self, step: int, block: str, counts: Mapping[int, Sequence[int]]) -> None:
        import wandb

        totals = _totals(counts)
        if not self._defined:
            self._defined = True
            self._of().define_metric("moediag/*", step_metric=self.STEP)
        edges = list(range(len(totals) + 1))
        shown = wandb.Histogram(np_histogram=(totals, edges))
        self._of().log({self.STEP: step, f"moediag/tokens per expert/{block}": shown})

    def finding(self, trial: TrialResult) -> None:
        found, run = trial.diagnosis, self._of()
        run.summary.update(
            {
                "moediag/verdict": str(found.verdict), "moediag/cause": found.cause,
                "moediag/culprits": list(found.culprits), "moediag/notes": list(found.notes),
            }
        )  # fmt: skip
        if found.verdict in FAILURES:
            run.alert(title=f"moediag: {found.verdict}", text=found.cause)

    def _of(self) -> Any:
        import wandb

        run = self.run or wandb.run
        if run is None:
            raise ValueError("no run of W&B is active: call wandb.init before, or give the run")
        return run
