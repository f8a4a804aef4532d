"""Callbacks and sinks in the libraries that they are for, each as far as it is installed:
transformers with accelerate, lightning, tensorboard, wandb."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from moediag.callbacks.sinks import JsonLines, TensorBoard, WandB  # noqa: E402
from tests.unit.test_callbacks import BLOCK, BROKEN, COUNTS, lines  # noqa: E402

pytestmark = pytest.mark.wide


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        sink = TensorBoard(writer)
        sink.tokens(2, BLOCK, COUNTS)
        sink.finding(BROKEN)
    read = EventAccumulator(str(tmp_path)).Reload()
    (event,) = read.Histograms(f"moediag/tokens per expert/{BLOCK}")
    assert (event.step, event.histogram_value.bucket) == (2, [7.0, 1.0])
    (text,) = read.Tensors("moediag/finding/text_summary")
    assert b"nonfinite: it is nan" in text.tensor_proto.string_val[0]


def test_wandb_keeps_the_finding_offline(tmp_path: Path) -> None:
    wandb = pytest.importorskip("wandb")
    with wandb.init(mode="offline", dir=str(tmp_path), project="test") as run:
        sink = WandB()
        sink.tokens(2, BLOCK, COUNTS)
        sink.finding(BROKEN)
        assert run.summary["moediag/verdict"] == "nonfinite"
        assert run.summary["moediag/step"] == 2
    assert list(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))


class Numbers(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": torch.full((4,), float(index)), "labels": torch.zeros(2)}


class Net(torch.nn.Module):
    """The loss of the second step is nan if ``bad``."""

    def __init__(self, bad: bool) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 2)
        self.bad, self.calls = bad, 0

    def forward(self, x: Any, labels: Any = None) -> dict[str, Any]:
        self.calls += 1
        loss = (self.linear(x) ** 2).sum()
        return {"loss": loss * float("nan") if self.bad and self.calls == 2 else loss}


def trainer(folder: Path, name: str, bad: bool = False, callbacks: Sequence[Any] = ()) -> Any:
    """A Trainer whose findings are in ``found-NAME.jsonl``."""
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    from moediag.callbacks.trainer_callback import TrainerLaws

    laws = TrainerLaws(str(folder / name), 1, [JsonLines(folder / f"found-{name}.jsonl")])
    arguments = TrainingArguments(
        str(folder / "out"), max_steps=4, per_device_train_batch_size=2, report_to=[],
        max_grad_norm=0.0, save_strategy="no", use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    return Trainer(
        Net(bad), arguments, train_dataset=Numbers(), eval_dataset=Numbers(),
        callbacks=[laws, *callbacks],
    )  # fmt: skip


@pytest.mark.parametrize(("bad", "verdict"), [(False, "clean"), (True, "nonfinite")])
def test_a_transformers_trainer_reports_its_laws(tmp_path: Path, bad: bool, verdict: str) -> None:
    trainer(tmp_path, "run", bad).train()
    (line,) = lines(tmp_path / "found-run.jsonl")
    assert line["verdict"] == verdict, line


def test_a_training_whose_exception_is_caught_is_reported_and_ends(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    from transformers import TrainerCallback

    class Fails(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            raise ValueError("no data")

    with pytest.raises(ValueError, match="no data"):
        trainer(tmp_path, "first", callbacks=[Fails()]).train()
    (line,) = lines(tmp_path / "found-first.jsonl")
    assert line["verdict"] == "crash" and "no data" in line["cause"]
    trainer(tmp_path, "second", bad=True).train()
    (line,) = lines(tmp_path / "found-second.jsonl")
    assert line["verdict"] == "nonfinite"


def test_a_trainer_that_only_evaluates_does_not_keep_the_next_from_checking(tmp_path: Path) -> None:
    trainer(tmp_path, "evaluates").evaluate()
    trainer(tmp_path, "run", bad=True).train()
    (line,) = lines(tmp_path / "found-run.jsonl")
    assert line["verdict"] == "nonfinite"


@pytest.mark.filterwarnings("ignore:The `srun` command is available")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("bad", "verdict"), [(False, "clean"), (True, "nonfinite")])
def test_a_lightning_trainer_reports_its_laws(
    tmp_path: Path, bad: bool, verdict: str, compiled: bool
) -> None:
    lightning = pytest.importorskip("lightning.pytorch")
    from moediag.callbacks.lightning_callback import LightningLaws

    class Module(lightning.LightningModule):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = Net(bad)

        def training_step(self, batch: Any, index: int) -> Any:
            return self.net(batch["x"])["loss"]

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.001)

    laws = LightningLaws(str(tmp_path / "run"), 1, [JsonLines(tmp_path / "found.jsonl")])
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, max_steps=4, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[laws],
    )  # fmt: skip
    module = Module()
    if compiled:
        module.compile(backend="eager")
    trainer.fit(module, torch.utils.data.DataLoader(Numbers(), batch_size=2))
    (line,) = lines(tmp_path / "found.jsonl")
    assert line["verdict"] == verdict, line
