"""Silent errors in the programs: nothing hangs and nothing is raised. Only laws find them."""

from __future__ import annotations

from bench.abroad.cases import Case, Truth, edit

CLEARS = Truth(("wrong-gradients",), says="nothing cleared the gradients")
MODE = Truth(("wrong-gradients",), says="only in evaluation mode since")
REPLICAS = Truth(("replica-divergence",), says="between replicas")
START = Truth(("replica-divergence",), says="start equal")
UNTRAINED = Truth(("wrong-weights", "wrong-gradients"), says="of every optimizer had no gradients")
ABSENT = Truth(("wrong-gradients",), says="no parameter of any optimizer had a gradient")
NLP, GPT = "nlp_example.py", "train.py"

SILENT = tuple(
    Case(program, fault, truth, faults, laws=True)
    for program, fault, truth, faults in (
        (
            "nanogpt", "gradients that nothing clears", CLEARS,
            (edit(GPT, "optimizer.zero_grad(set_to_none=True)", "pass"),),
        ),
        (
            "nanogpt", "forward without the wrapper", REPLICAS,
            (edit(GPT, "logits, loss = model(X, Y)", "logits, loss = raw_model(X, Y)", 1),),
        ),
        (
            "nanogpt", "other weights on rank 1", START,
            (edit(GPT, "raw_model = model.module",
                  "{line}\nddp_rank = int(os.environ['RANK'])\n"
                  "raw_model.transformer.h[0].ln_1.weight.data.mul_(1 + 0.01 * ddp_rank)"),),
        ),
        (
            "mingpt-alone", "gradients that nothing clears", CLEARS,
            (edit("mingpt/trainer.py", "model.zero_grad(set_to_none=True)", "pass"),),
        ),
        (
            "mingpt-alone", "an optimizer of a copy", UNTRAINED,
            (edit("mingpt/trainer.py", "self.optimizer = model.configure_optimizers(config)",
                  "import copy\n"
                  "self.optimizer = copy.deepcopy(model).configure_optimizers(config)"),),
        ),
        (
            "accelerate-nlp", "evaluation mode that is never left", MODE,
            (edit(NLP, "model.train()", "epoch == 0 and model.train()"),),
        ),
        (
            "accelerate-nlp", "gradients that nothing clears", CLEARS,
            (edit(NLP, "optimizer.zero_grad()", "pass"),),
        ),
        (
            "ddp-tutorial", "a loss that is cut from the model", ABSENT,
            (edit("multigpu_torchrun.py", "output = self.model(source)",
                  "output = self.model(source).detach().requires_grad_()"),),
        ),
    )
)  # fmt: skip
