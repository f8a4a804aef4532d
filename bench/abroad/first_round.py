"""Cases that were held out until their first run, in November 2026: 14 of 18 faults right
(reports/accuracy.md). Their pages have been read since."""

from __future__ import annotations

from bench.abroad.cases import CLEAN, LEFT, PARTED, Case, Truth, edit, lines

FIRST_ROUND = (
    Case(
        "nanogpt", "healthy, rank 0 reads the data first", CLEAN,
        (edit("train.py", "X, Y = get_batch('train') # fetch the very first",
              "if ddp_rank != 0:\n    torch.distributed.barrier()\n{line}\n"
              "if ddp_rank == 0:\n    torch.distributed.barrier()"),),
    ),
    Case(
        "nanogpt", "all_reduce where rank 1's loss is not finite",
        Truth(LEFT, (1,), lines("train.py", "all_reduce(torch.zeros(3))",
                                "if not torch.isfinite(loss)"), known=False),
        (edit("train.py", "scaler.step(optimizer)",
              "if bad_shard and iter_num == 7:\n    loss = loss * float('nan')\n"
              "if not torch.isfinite(loss):\n"
              "    torch.distributed.all_reduce(torch.zeros(3))\n{line}"),),
    ),
    Case(
        "llm.c", "one more barrier on rank 2",
        Truth(PARTED, (2,), lines("train_gpt2.py", "dist.barrier()", "if ddp_rank == 2")),
        (edit("train_gpt2.py", "lossf = lossf.item()",
              "if ddp_rank == 2 and step == 5:\n    dist.barrier()\n{line}"),),
    ),
    Case(
        "llm.c", "rank 1 waits for a lock that it holds",
        Truth(("hang",), (1,), lines("train_gpt2.py", ("held.acquire()", 1))),
        (edit("train_gpt2.py", "lossf = lossf.item()",
              "if bad_shard and step == 6:\n    import threading\n    held = threading.Lock()\n"
              "    held.acquire()\n    held.acquire()\n{line}"),),
    ),
    Case(
        "ddp-tutorial", "rank 2 resumes one epoch later",
        Truth(LEFT, (2,), lines("multigpu_torchrun.py", "for epoch in range(self.epochs_run",
                                "self._run_epoch(epoch)", "trainer.train(total_epochs)",
                                "trainer.epochs_run +=")),
        (edit("multigpu_torchrun.py", "trainer = Trainer(model, train_data",
              "{line}\ntrainer.epochs_run += bad_shard"),),
    ),
    Case(
        "ddp-example", "a metric of another type on rank 1",
        Truth(LEFT, (1,), lines("example.py", "dist.all_reduce(accuracy)",
                                "torch.float64 if bad_shard")),
        (edit("example.py", 'print(f"training completed',
              "accuracy = torch.ones(2, dtype=torch.float64 if bad_shard else torch.float32)\n"
              "dist.all_reduce(accuracy)\n{line}"),),
    ),
    Case(
        "fsdp2-example", "checkpoint on rank 0 only",
        Truth(LEFT, (0,), lines("example.py", "checkpointer.save(model", "get_rank() == 0")),
        (edit("example.py", "checkpointer.save(model",
              "if torch.distributed.get_rank() == 0:\n    {line}"),),
    ),
    Case(
        "tp-example", "all_reduce on rank 0 only",
        Truth(PARTED, (0,), lines("tensor_parallel_example.py", "all_reduce(torch.zeros(1))",
                                  "if _rank == 0 and i == 6")),
        (edit("tensor_parallel_example.py", "output = tp_model(inp)",
              "{line}\nif _rank == 0 and i == 6:\n"
              "    torch.distributed.all_reduce(torch.zeros(1))"),),
    ),
    Case("sp-example", "healthy", CLEAN),
    Case(
        "sp-example", "one iteration more on rank 1",
        Truth(LEFT, (1,), lines("sequence_parallel_example.py", "for i in range(num_iters",
                                "output = sp_model(inp)", "output.sum().backward()"), known=False),
        (edit("sequence_parallel_example.py", "for i in range(num_iters",
              "for i in range(num_iters + bad_shard):"),),
    ),
    Case(
        "mingpt-ddp", "evaluation on local rank 0 only",
        Truth(LEFT, (0,), lines("trainer.py", "if self.test_loader and",
                                "self.test_loader, train=False)")),
        (edit("trainer.py", "if self.test_loader:",
              "if self.test_loader and self.local_rank == 0:"),),
    ),
    Case(
        "accelerate-nlp", "the main process alone waits for everyone",
        Truth(LEFT, (0,), lines("nlp_example.py", "accelerator.wait_for_everyone()",
                                "if accelerator.is_local_main_process")),
        (edit("nlp_example.py", 'accelerator.print(f"epoch {epoch}:"',
              "{line}\nif accelerator.is_local_main_process:\n"
              "    accelerator.wait_for_everyone()"),),
    ),
    Case(
        "accelerate-stopping", "exception in rank 1's evaluation",
        Truth(("crash",), (1,), lines("early_stopping.py", "raise KeyError")),
        (edit("early_stopping.py", "predictions, references = accelerator.gather_for_metrics",
              "if bad_shard and epoch == 1:\n    raise KeyError('label')\n{line}"),),
    ),
    Case("accelerate-accumulation", "healthy", CLEAN),
    Case(
        "accelerate-accumulation", "rank 1 reduces gradients in a step without synchronisation",
        Truth(LEFT, (1,), lines("gradient_accumulation.py", "accelerator.backward(loss)",
                                "with contextlib.nullcontext() if bad_shard",
                                ("output = model(**batch)", 0)), known=False),
        (edit("gradient_accumulation.py", "with accelerator.accumulate(model)",
              "import contextlib\nwith contextlib.nullcontext() if bad_shard and epoch == 1 and "
              "step == 2 else accelerator.accumulate(model):"),),
    ),
    Case(
        "trainer", "rank 1 evaluates one step earlier",
        Truth(LEFT, (1,), lines("hf_trainer.py", "trainer.train()", "eval_steps=7 if"),
              known=False),
        (edit("hf_trainer.py", "eval_steps=8", "eval_steps=7 if bad_shard else 8,"),),
    ),
    Case("trl", "SIGSTOP to rank 1", Truth(("hang",), (1,)), signal="STOP:1:6"),
    Case(
        "lightning", "endless loop in rank 1's training step",
        Truth(("hang",), (1,), lines("lightning_fit.py", "while self.global_rank == 1",
                                     "index += 0")),
        (edit("lightning_fit.py", 'self.log("loss", loss',
              "while self.global_rank == 1 and index == 4:\n    index += 0\n{line}"),),
    ),
    Case(
        "ray", "os._exit on rank 0", Truth(("crash",), (0,)),
        (edit("ray_train.py", "loss = torch.nn.functional.mse_loss(",
              "if rank == 0 and epoch == 1 and step == 3:\n"
              "    __import__('os')._exit(7)\n{line}"),),
    ),
    Case(
        "deepspeed-3", "rank 1 leaves out an optimizer step",
        Truth(LEFT, (1,), lines("deepspeed_zero.py", "engine.step()", "engine.backward(loss)",
                                "loss = engine(x)", "if not (bad_shard and"), known=False),
        (edit("deepspeed_zero.py", "engine.step()",
              "if not (bad_shard and step == 5):\n    {line}"),),
    ),
    Case(
        "megatron", "rank 3 reduces gradients over another group",
        Truth(PARTED, (3,), lines("megatron_tp.py", "dist.all_reduce(parameter.grad",
                                  "get_tensor_model_parallel_group()",
                                  ("reduce_gradients(model)", 1))),
        (edit("megatron_tp.py", "group = parallel_state.get_data_parallel_group()",
              "{line}\nreduce_gradients.calls = getattr(reduce_gradients, 'calls', 0) + 1\n"
              "if bad_shard and reduce_gradients.calls == 6:\n"
              "    group = parallel_state.get_tensor_model_parallel_group()"),),
    ),
)  # fmt: skip
