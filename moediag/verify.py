"""One step of a running program, compared with the same step in one process.

    from moediag import verify

    with verify.step(model, optimizer, reference=build_model, loss=loss_fn, batch=batch):
        loss_fn(model, batch).backward()
        optimizer.step()

It is `moediag verify` for programs that have no command for one process: same comparison, same
verdicts, same page.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moediag.pipeline.measured_jobs import Compared
    from moediag.result import RunResult

__all__ = ["Checked", "jobs", "step"]


@dataclass(slots=True)
class Checked:
    """What the comparison found; on every rank, once the step is over."""

    folder: Path
    """The run directory, which `moediag report` shows."""
    verdict: str = ""
    """"" before the end of the step."""
    cause: str = ""
    next_step: str = ""
    """What to do, if anything."""
    not_compared: tuple[str, ...] = field(default=())

    @property
    def ok(self) -> bool:
        """Whether everything that was compared agrees."""
        return self.verdict == "clean"


def jobs(
    command: Sequence[str],
    reference: Sequence[str],
    *,
    steps: int = 2,
    out: str | Path | None = None,
) -> RunResult:
    """Compares the first ``steps`` steps of a distributed ``command`` with those of ``reference``
    in one process, as ``moediag verify``. The last trial has the verdict. The jobs' output goes
    where this program's goes.

        import moediag

        distributed = ["torchrun", "--nproc-per-node", "2", "train.py"]
        result = moediag.verify.jobs(distributed, ["python", "train.py"], steps=1)
        print(result.trials[-1].verdict, result.trials[-1].cause)
    """
    from moediag import arguments
    from moediag.pipeline.measured_jobs import MeasuringOptions
    from moediag.pipeline.verify import verify

    arguments.command("command", command)
    arguments.command("reference", reference)
    arguments.whole("steps", steps, 1)
    arguments.path("out", out, optional=True)
    folder = Path(out) if out is not None else None
    return verify(command, reference, MeasuringOptions(steps=steps, out=folder)).result


@contextmanager
def step(
    model: Any,
    optimizer: Any,
    *,
    reference: Callable[[], Any],
    loss: Callable[[Any, Any], Any],
    batch: Any,
    clip: float | None = None,
    collate: Callable[[list[Any]], Any] | None = None,
    out: str | Path | None = None,
) -> Iterator[Checked]:
    """Compares the step that runs inside with one process. Call it on all ranks.

    ``model``: as it is called inside; ``optimizer``: makes its step inside.
    ``reference()``: returns the same model of one process, without wrappers. Rank 0 calls it.
    ``loss(model, batch)``: returns the loss that one process would train on.
    ``batch``: the samples that this rank trains on inside, all micro-batches of them together, as
    tensors with one row a sample in lists, tuples and dictionaries.
    ``clip``: the limit, if the step clips by the norm of the gradients.
    ``collate(batches)``: returns the ranks' batches as one; default: they are concatenated.
    ``out``: the run directory, which must be new or empty.

    Rank 0 prints the page to stderr. Nothing is raised for a wrong step. If rank 0 cannot compare,
    for example because its disk is full, every rank raises its error.
    """
    from moediag import arguments
    from moediag.ranks.verify import in_program

    arguments.function("model", model)
    arguments.function("optimizer.step", getattr(optimizer, "step", None))
    arguments.function("reference", reference)
    arguments.function("loss", loss)
    if clip is not None:
        arguments.above("clip", clip, "a limit")
    if collate is not None:
        arguments.function("collate", collate)
    arguments.path("out", out, optional=True)
    rank = in_program.own_rank()
    name = Path(sys.argv[0]).name or "python"
    of_ranks = in_program.exchanged((in_program.host(), *_made(rank, out, name)))
    _, folder, error = of_ranks[0]
    if error is not None:
        raise error
    asked = in_program.Asked(model, optimizer, reference, loss, batch, clip, collate)
    checked = Checked(Path(folder))
    if len({host for host, *_ in of_ranks}) > 1:
        checked.verdict, checked.cause = "inconclusive", f"{in_program.SEVERAL_MACHINES}."
        yield checked
        return
    from moediag.pipeline import verify as verifier

    inside = in_program.Step(asked, checked.folder / verifier.MEASURED)
    with inside.measured():
        yield checked

    def compare() -> None:
        runs = [checked.folder / run / verifier.MEASURED for run in verifier.REFERENCES]
        _show(verifier.conclude(checked.folder, name, inside.references(runs)))

    in_program.on_rank_zero(compare, folder)
    _read(checked)


def _made(rank: int, out: str | Path | None, name: str) -> tuple[str, BaseException | None]:
    """Rank 0's new folder, and the error where there is none."""
    from moediag.pipeline.run_folder import run_folder
    from moediag.ranks.verify.in_program import sendable

    if rank:
        return "", None
    try:
        return str(run_folder(Path(out) if out is not None else None, f"verify-{name}")), None
    except Exception as error:
        return "", sendable(error)


def _show(done: Compared) -> None:
    from rich.console import Console

    from moediag.report import terminal, views

    console = Console(stderr=True, highlight=False, emoji=False)
    terminal.render(done.result, console, views.short(done.folder))


def _read(checked: Checked) -> None:
    """Reads what rank 0 has written."""
    from moediag.result import read_result

    found = read_result(checked.folder).trials[-1].diagnosis
    checked.verdict, checked.cause = str(found.verdict), found.cause
    checked.next_step, checked.not_compared = found.next_step, found.not_seen
