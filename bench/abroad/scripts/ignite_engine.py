"""A small classifier trained and evaluated by PyTorch-Ignite's engines."""

import ignite.distributed as idist
import torch
from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
from ignite.metrics import Accuracy, Loss
from torch.utils.data import TensorDataset


def rows(size):
    draw = torch.Generator().manual_seed(size)
    return TensorDataset(
        torch.randn(size, 8, generator=draw), torch.randint(0, 4, (size,), generator=draw)
    )


def training(local_rank):
    torch.manual_seed(0)
    train = idist.auto_dataloader(rows(192), batch_size=16, shuffle=True)
    held = idist.auto_dataloader(rows(64), batch_size=16)
    model = idist.auto_model(
        torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    )
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=0.05))
    criterion = torch.nn.CrossEntropyLoss()
    trainer = create_supervised_trainer(model, optimizer, criterion)
    evaluator = create_supervised_evaluator(
        model, metrics={"accuracy": Accuracy(), "loss": Loss(criterion)}
    )

    @trainer.on(Events.EPOCH_COMPLETED)
    def evaluate(engine):
        evaluator.run(held)
        if idist.get_rank() == 0:
            print(f"epoch {engine.state.epoch}: {evaluator.state.metrics['loss']:.4f}", flush=True)

    trainer.run(train, max_epochs=4)


if __name__ == "__main__":
    with idist.Parallel(backend="gloo") as parallel:
        parallel.run(training)
