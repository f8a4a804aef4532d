"""The cases whose pages were read while the diagnosis was being changed. Their truth was written
down before. Those of ``held_out.py`` were never shown to anybody who works on the diagnosis.
"""

from __future__ import annotations

from bench.abroad import elsewhere
from bench.abroad.cases import CLEAN, FINDING, LEFT, PARTED, Case, Truth, edit, lines
from bench.abroad.eighth_programs import EIGHTH_PROGRAMS
from bench.abroad.eighth_round import EIGHTH_ROUND
from bench.abroad.eleventh_round import ELEVENTH_ROUND
from bench.abroad.first_round import FIRST_ROUND
from bench.abroad.fourth_round import FOURTH_ROUND
from bench.abroad.held_out import HELD_OUT
from bench.abroad.later_programs import LATER_PROGRAMS
from bench.abroad.ninth_programs import NINTH_PROGRAMS
from bench.abroad.ninth_round import NINTH_ROUND
from bench.abroad.programs import PROGRAMS
from bench.abroad.quiet_programs import QUIET_PROGRAMS
from bench.abroad.quiet_round import QUIET_ROUND
from bench.abroad.second_round import SECOND_ROUND
from bench.abroad.seventh_programs import SEVENTH_PROGRAMS
from bench.abroad.seventh_round import SEVENTH_ROUND
from bench.abroad.silent import SILENT
from bench.abroad.sixth_programs import SIXTH_PROGRAMS
from bench.abroad.sixth_round import SIXTH_ROUND
from bench.abroad.tenth_a_programs import TENTH_A_PROGRAMS
from bench.abroad.tenth_a_round import TENTH_A_ROUND
from bench.abroad.tenth_b_programs import TENTH_B_PROGRAMS
from bench.abroad.tenth_b_round import TENTH_B_ROUND
from bench.abroad.third_round import THIRD_ROUND
from bench.abroad.thirteenth_programs import THIRTEENTH_PROGRAMS
from bench.abroad.thirteenth_round import THIRTEENTH_ROUND
from bench.abroad.twelfth_a_programs import TWELFTH_A_PROGRAMS
from bench.abroad.twelfth_a_round import TWELFTH_A_ROUND
from bench.abroad.twelfth_b_programs import TWELFTH_B_PROGRAMS
from bench.abroad.twelfth_b_round import TWELFTH_B_ROUND
from tests.victims.table import healthy_programs

NANOGPT = (
    Case("nanogpt", "healthy", CLEAN),
    Case("nanogpt", "healthy, compiled", CLEAN, arguments=("--compile=True",)),
    Case(
        "nanogpt", "healthy, 12 s of evaluation on rank 0", CLEAN,
        (edit("train.py", "losses = estimate_loss()",
              "until = time.process_time() + 12 * (iter_num == 8)\n{line}\n"
              "while time.process_time() < until:\n"
              "    with torch.no_grad():\n        raw_model(X, Y)"),),
    ),
    Case(
        "nanogpt", "all_reduce of the loss on the master only",
        Truth(PARTED, (0,), lines("train.py", "all_reduce(losses[", "and master_process:")),
        (edit("train.py", "losses = estimate_loss()",
              "{line}\nif iter_num > 0:\n    torch.distributed.all_reduce(losses['val'])"),),
    ),
    Case(
        "nanogpt", "one micro-batch less on rank 1",
        Truth(LEFT, (1,), lines("train.py", "for micro_step in", "scaler.scale(loss).backward()",
                                ("logits, loss = model(X, Y)", 1),
                                ("destroy_process_group()", 0)),
              known=False),
        (edit("train.py", "for micro_step in range(",
              "steps = gradient_accumulation_steps - (iter_num == 6 and bad_shard)\n"
              "for micro_step in range(steps):"),),
    ),
    Case("nanogpt", "SIGSTOP to rank 1", Truth(("hang",), (1,)), signal="STOP:1:9"),
    Case(
        "nanogpt", "endless loop in rank 1's forward",
        Truth(("hang",), (1,), lines("model.py", "while self.calls == 30", "self.spun =")),
        (edit("model.py", "device = idx.device",
              "{line}\nself.calls = getattr(self, 'calls', 0) + 1\n"
              "while self.calls == 30 and bad_shard:\n"
              "    self.spun = getattr(self, 'spun', 0) + 1"),),
    ),
)  # fmt: skip

LLM_C = (
    Case("llm.c", "healthy", CLEAN),
    Case(
        "llm.c", "validation loss reduced on the master only",
        Truth(PARTED, (0,), lines("train_gpt2.py", "dist.all_reduce(total)",
                                  "if master_process: # every")),
        (edit("train_gpt2.py", 'print0(f"val loss {val_loss}")',
              "if master_process: # every rank has its own\n    total = torch.tensor(val_loss)\n"
              "    dist.all_reduce(total)\n{line}"),),
    ),
    Case(
        "llm.c", "two all_reduces in another order on rank 1",
        Truth(PARTED, (1,), lines("train_gpt2.py", "dist.all_reduce(value)",
                                  "reversed(values)")),
        (edit("train_gpt2.py", "dist.all_reduce(lossf)",
              "values = [lossf, torch.full((3,), float(step))]\n"
              "for value in reversed(values) if bad_shard and step == 9 else values:\n"
              "    dist.all_reduce(value)"),),
    ),
    Case(
        "llm.c", "exception on rank 1",
        Truth(("crash",), (1,), lines("train_gpt2.py", "raise IndexError")),
        (edit("train_gpt2.py", "buf = self.tokens[self.current_position",
              "if bad_shard and self.current_position > 2000:\n"
              "    raise IndexError('shard is shorter than its header says')\n{line}"),),
    ),
    Case("llm.c", "SIGKILL to rank 1", Truth(("crash",), (1,)), signal="KILL:1:7"),
)  # fmt: skip

EXAMPLES = (
    Case("ddp-example", "healthy", CLEAN),
    Case(
        "ddp-example", "barrier on rank 0 only, at the end",
        Truth(LEFT, (0,), lines("example.py", "dist.barrier()", "if rank == 0:")),
        (edit("example.py", 'print(f"training completed',
              "{line}\nif rank == 0:\n    dist.barrier()"),),
    ),
    Case("fsdp2-example", "healthy", CLEAN),
    Case(
        "fsdp2-example", "norm clipped on rank 0 only",
        Truth(PARTED, (0,), lines("example.py", "clip_grad_norm_(model", "if rank == 0:")),
        (edit("example.py", "torch.nn.utils.clip_grad_norm_(", "if rank == 0:\n    {line}"),),
    ),
    Case(
        "fsdp2-example", "exception swallowed on rank 1",
        Truth(LEFT, (1,), lines("example.py", "loss = model(x)", "raise ValueError",
                                "except ValueError", ("continue", 1), "checkpointer.save("),
              known=False),
        (edit("example.py", "for _ in range(10):", "for number in range(10):"),
         edit("example.py", "loss = model(x).sum()",
              "try:\n    if bad_shard and number == 4:\n"
              "        raise ValueError('corrupt sample')\n    {line}\n"
              "except ValueError:\n    continue")),
    ),
    Case(
        "fsdp2-example", "rank 1 leaves the loop early",
        Truth(LEFT, (1,), lines("example.py", "checkpointer.save(", "if bad_shard and number",
                                ("break", 1), "loss = model(x)"), known=False),
        (edit("example.py", "for _ in range(10):",
              "for number in range(10):\n    if bad_shard and number == 6:\n        break"),),
    ),
    Case("tp-example", "healthy", CLEAN),
    Case(
        "tp-example", "os._exit on rank 1", Truth(("crash",), (1,)),
        (edit("tensor_parallel_example.py", "output = tp_model(inp)",
              "{line}\nif bad_shard and i == 6:\n    os._exit(3)"),),
    ),
    Case("fsdp-tp-example", "healthy", CLEAN),
    Case(
        "fsdp-tp-example", "rank 3 skips a step",
        Truth(PARTED, (3,), lines("fsdp_tp_example.py", "output = sharded_model(inp)",
                                  "output.sum().backward()", "if bad_shard", "continue")),
        (edit("fsdp_tp_example.py", "output = sharded_model(inp)",
              "if bad_shard and i == 5:\n    continue\n{line}"),),
    ),
    Case("mingpt-ddp", "healthy", CLEAN),
    Case(
        "mingpt-ddp", "rank 1's DataLoader worker is stuck",
        Truth(("hang",), (1,), (*lines("char_dataset.py", "time.sleep(1)", "while bad_shard"),
                                *lines("trainer.py", "in enumerate(dataloader)"))),
        (edit("char_dataset.py", "import fsspec", "{line}\nimport time"),
         edit("char_dataset.py", "chunk = self.data[",
              "while bad_shard and idx % 400 == 7:\n    time.sleep(1)\n{line}")),
    ),
    Case(
        "mingpt-ddp", "rank 1 has fewer batches",
        Truth(LEFT, (1,), lines("trainer.py", "in enumerate(dataloader)", "loss.backward()",
                                "_, loss = self.model(", "batch_loss = self._run_batch",
                                "self._run_epoch(epoch, self.t"), known=False),
        (edit("trainer.py", "return DataLoader(",
              "if bad_shard:\n"
              "    dataset = torch.utils.data.Subset(dataset, range(len(dataset) * 3 // 4))\n"
              "{line}"),),
    ),
    Case("ddp-tutorial", "healthy", CLEAN),
    Case(
        "ddp-tutorial", "healthy, 8 s of saving on rank 0", CLEAN,
        (edit("multigpu_torchrun.py", "torch.save(snapshot",
              "import time\nuntil = time.time() + 8\nwhile time.time() < until:\n    {line}"),),
    ),
    Case(
        "ddp-tutorial", "barrier in the snapshot of rank 0",
        Truth(LEFT, (0,), lines("multigpu_torchrun.py", "torch.distributed.barrier()",
                                "if self.gpu_id == 0")),
        (edit("multigpu_torchrun.py", "torch.save(snapshot",
              "{line}\ntorch.distributed.barrier()"),),
    ),
    Case(
        "ddp-tutorial", "rank 2 allocates too much",
        Truth(("crash",), (2,), lines("multigpu_torchrun.py", "self.kept = torch.empty")),
        (edit("multigpu_torchrun.py", "output = self.model(source)",
              "if bad_shard and len(source) < 32:\n"
              "    self.kept = torch.empty(1 << 50)\n{line}"),),
    ),
    Case(
        "mingpt-adder", "never joins a process group", Truth(FINDING, says="process group"),
    ),
)  # fmt: skip

ACCELERATE = (
    Case("accelerate-nlp", "healthy", CLEAN),
    Case(
        "accelerate-nlp", "metrics gathered on the main process only",
        Truth(PARTED, (0,), lines("nlp_example.py", "accelerator.gather_for_metrics(",
                                  "if accelerator.is_main_process:")),
        (edit("nlp_example.py", "predictions, references = accelerator.gather",
              "references = batch['labels']\nif accelerator.is_main_process:\n    {line}"),),
    ),
    Case(
        "accelerate-nlp", "rank 1 gathers one row less",
        Truth(LEFT, (1,), lines("nlp_example.py", "accelerator.gather(predictions)",
                                "predictions = predictions[1:]"), known=False),
        (edit("nlp_example.py", "predictions = outputs.logits.argmax",
              "{line}\nif epoch == 1 and bad_shard:\n"
              "    predictions = predictions[1:]"),
         edit("nlp_example.py", "predictions, references = accelerator.gather",
              "references = accelerator.gather(batch['labels'])\n"
              "predictions = accelerator.gather(predictions)")),
    ),
    Case("accelerate-stopping", "healthy", CLEAN),
    Case(
        "accelerate-stopping", "rank 1 breaks on its own",
        Truth(LEFT, (1,), lines("early_stopping.py", "if bad_shard", "break",
                                "if accelerator.check_trigger()", "accelerator.backward(loss)",
                                "accelerator.gather_for_metrics("), known=False),
        (edit("early_stopping.py", "accelerator.set_trigger()", "break"),
         edit("early_stopping.py", "if callback.check_early_stopping(",
              "if bad_shard and step == 6:")),
    ),
)  # fmt: skip

TRAINERS = (
    Case("trainer", "healthy", CLEAN),
    Case(
        "trainer", "barrier in a callback of rank 0",
        Truth(PARTED, (0,), lines("hf_trainer.py", "torch.distributed.barrier()",
                                  "if state.is_world_process_zero")),
        (edit("hf_trainer.py", 'print(f"step {state.global_step}"',
              "{line}\ntorch.distributed.barrier()"),),
    ),
    Case(
        "trainer", "exception in rank 1's collator",
        Truth(("crash",), (1,), lines("hf_trainer.py", "return {key: torch.stack(")),
        (edit("hf_trainer.py", "return {key: torch.stack(",
              "if bad_shard and int(rows[0]['labels'].sum()) % 23 == 3:\n"
              "    rows[0]['labels'] = rows[0]['labels'][1:]\n{line}"),),
    ),
    Case("trainer", "SIGSTOP to rank 0", Truth(("hang",), (0,)), signal="STOP:0:7"),
    Case("trl", "healthy", CLEAN),
    Case(
        "trl", "gathers objects in a callback of rank 0",
        Truth(PARTED, (0,), lines("trl_sft.py", "all_gather_object(",
                                  "if state.is_world_process_zero")),
        (edit("trl_sft.py", 'print(f"step {state.global_step}"',
              "{line}\nimport torch.distributed as dist\n"
              "dist.all_gather_object([None, None], state.global_step)"),),
    ),
    Case("trl", "SIGKILL to rank 1", Truth(("crash",), (1,)), signal="KILL:1:5"),
    Case("lightning", "healthy", CLEAN),
    Case(
        "lightning", "sync_dist on rank 0 only",
        Truth(PARTED, (0,), lines("lightning_fit.py", 'self.log("loss"',
                                  "if self.trainer.is_global_zero")),
        (edit("lightning_fit.py", 'self.log("loss", loss',
              "if self.trainer.is_global_zero:\n    {line}"),),
    ),
    Case(
        "lightning", "exception in rank 1's validation",
        Truth(("crash",), (1,), lines("lightning_fit.py", "raise RuntimeError")),
        (edit("lightning_fit.py", 'self.log("val_loss"',
              "if self.global_rank == 1 and self.current_epoch == 1:\n"
              "    raise RuntimeError('no such label')\n{line}"),),
    ),
    Case("ray", "healthy", CLEAN),
    Case(
        "ray", "endless loop on rank 1",
        Truth(("hang",), (1,), lines("ray_train.py", "while rank == 1 and", "step += 0")),
        (edit("ray_train.py", "loss = torch.nn.functional.mse_loss(",
              "while rank == 1 and epoch == 1 and step == 3:\n    step += 0\n{line}"),),
    ),
    Case(
        "ray", "exception on rank 1",
        Truth(("crash",), (1,), lines("ray_train.py", "raise ValueError")),
        (edit("ray_train.py", "loss = torch.nn.functional.mse_loss(",
              "if rank == 1 and epoch == 1 and step == 3:\n"
              "    raise ValueError('bad row')\n{line}"),),
    ),
    Case("deepspeed-2", "healthy", CLEAN),
    Case(
        "deepspeed-2", "rank 1 skips a backward",
        Truth(LEFT, (1,), lines("deepspeed_zero.py", "engine.backward(loss)", "engine.step()",
                                "if bad_shard"), known=False),
        (edit("deepspeed_zero.py", "engine.backward(loss)",
              "if bad_shard and step == 7:\n    continue\n{line}"),),
    ),
    Case("deepspeed-3", "healthy", CLEAN),
    Case(
        "deepspeed-3", "evaluation on rank 0 only",
        Truth(LEFT, (0,), lines("deepspeed_zero.py", "score = evaluate(engine)",
                                "if dist.get_rank() == 0", "return engine(torch.ones")),
        (edit("deepspeed_zero.py", "score = evaluate(engine)",
              "if dist.get_rank() == 0:\n    {line}"),),
    ),
    Case("megatron", "healthy", CLEAN),
    Case(
        "megatron", "evaluation on rank 0 only",
        Truth(PARTED, (0,), lines("megatron_tp.py", "score = evaluate(model)", "if rank == 0:",
                                  "return model(torch.ones")),
        (edit("megatron_tp.py", "score = evaluate(model)",
              "score = loss\nif rank == 0:\n    {line}"),),
    ),
    Case(
        "megatron", "a frozen parameter on rank 2",
        Truth(PARTED, (2,), lines("megatron_tp.py", "dist.all_reduce(parameter.grad",
                                  "if parameter.grad is not None",
                                  ("reduce_gradients(model)", 1)),
              known=False),
        (edit("megatron_tp.py", "reduce_gradients(model)",
              "if bad_shard and step == 6:\n    model[0].down.weight.grad = None\n{line}", nth=1),),
    ),
)  # fmt: skip

RATES = Truth(("replica-divergence",), says="learning rate differs")
LAUNCHED = (
    *(
        case
        for launcher in ("torchrun", "accelerate", "deepspeed")
        for case in (
            Case(f"plain-{launcher}", "healthy", CLEAN),
            Case(
                f"plain-{launcher}", "learning rate by rank", RATES,
                (edit("ddp_plain.py", "optimizer = torch.optim.AdamW(",
                      "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2 * (1 + rank))"),),
                laws=True,
            ),
        )
    ),
    Case(
        "lightning", "learning rate by rank", RATES,
        (edit("lightning_fit.py", "return torch.optim.AdamW(",
              "return torch.optim.AdamW(self.parameters(), lr=1e-2 * (1 + self.global_rank))"),),
        laws=True,
    ),
    Case(
        "ray", "learning rate by rank", RATES,
        (edit("ray_train.py", "optimizer = torch.optim.SGD(",
              "rank = ray.train.get_context().get_world_rank()\n"
              "optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * (1 + rank))"),),
        laws=True,
    ),
)  # fmt: skip

_KNOWN = (
    *NANOGPT,
    *LLM_C,
    *EXAMPLES,
    *ACCELERATE,
    *TRAINERS,
    *LAUNCHED,
    *SILENT,
    *FIRST_ROUND,
    *SECOND_ROUND,
    *THIRD_ROUND,
    *FOURTH_ROUND,
    *QUIET_ROUND,
    *SIXTH_ROUND,
    *SEVENTH_ROUND,
    *EIGHTH_ROUND,
    *NINTH_ROUND,
    *TENTH_B_ROUND,
    *TENTH_A_ROUND,
    *ELEVENTH_ROUND,
    *TWELFTH_A_ROUND,
    *TWELFTH_B_ROUND,
    *THIRTEENTH_ROUND,
    *HELD_OUT,
    *(Case(f"ours-{name}", "healthy", CLEAN, laws=True) for name in healthy_programs()),
)

CASES = (*_KNOWN, *elsewhere.cases(_KNOWN))
EVERY_PROGRAM = (
    *PROGRAMS, *LATER_PROGRAMS, *QUIET_PROGRAMS, *SIXTH_PROGRAMS, *SEVENTH_PROGRAMS,
    *EIGHTH_PROGRAMS, *NINTH_PROGRAMS,
    *TENTH_B_PROGRAMS,
    *TENTH_A_PROGRAMS,
    *TWELFTH_A_PROGRAMS,
    *TWELFTH_B_PROGRAMS,
    *THIRTEENTH_PROGRAMS,
)  # fmt: skip
