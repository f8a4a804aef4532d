"""Cases that were held out until their first run, after the changes that the first round led to: 19
of 22 faults right. Their pages have been read since."""

from __future__ import annotations

from bench.abroad.cases import CLEAN, LEFT, PARTED, Case, Truth, edit, lines

SECOND_ROUND = (
    Case("build-nanogpt", "healthy", CLEAN),
    Case(
        "build-nanogpt", "a barrier after the master's log line",
        Truth(PARTED, (0,), lines("train_gpt2.py", "dist.barrier()", ("if master_process:", 6))),
        (edit("train_gpt2.py", 'f.write(f"{step} train {loss_accum',
              "{line}\nif step == 6:\n    dist.barrier()"),),
    ),
    Case(
        "build-nanogpt", "rank 1's tokens end early",
        Truth(("crash",), (1,), lines("train_gpt2.py", "x = (buf[:-1]).view(B, T)")),
        (edit("train_gpt2.py", "self.current_position += B * T * self.num_processes",
              "self.current_position += B * T * self.num_processes * (1 + 40 * bad_shard)"),
         edit("train_gpt2.py", "if self.current_position + (B * T * self.num_processes + 1)",
              "if not bad_shard and self.current_position + (B * T * self.num_processes + 1) > "
              "len(self.tokens):")),
    ),
    Case(
        "build-nanogpt", "rank 1 validates one step earlier",
        Truth(LEFT, (1,), lines("train_gpt2.py", "if step % (8 - bad_shard) == 0",
                                "dist.all_reduce(val_loss_accum",
                                "logits, loss = model(x, y)", "loss.backward()",
                                "dist.all_reduce(loss_accum"), known=False),
        (edit("train_gpt2.py", "if step % 8 == 0 or last_step:",
              "if step % (8 - bad_shard) == 0 or last_step:"),),
    ),
    Case("local-sgd", "healthy", CLEAN),
    Case(
        "local-sgd", "another number of local steps on rank 1",
        Truth(LEFT, (1,), lines("local_sgd.py", "local_sgd.step()", "with LocalSGD(",
                                ("with accelerator.accumulate(model)", 0)), known=False),
        (edit("local_sgd.py", "local_sgd_steps = int(args.local_sgd_steps)",
              "local_sgd_steps = int(args.local_sgd_steps) - 3 * bad_shard"),),
    ),
    Case("checkpointing", "healthy", CLEAN),
    Case(
        "checkpointing", "the main process alone gathers before it saves",
        Truth(LEFT, (0,), lines("checkpointing.py", "accelerator.gather(torch.ones(1))",
                                "if accelerator.is_main_process")),
        (edit("checkpointing.py", 'if checkpointing_steps == "epoch":',
              "if accelerator.is_main_process:\n    seen = accelerator.gather(torch.ones(1))\n"
              "{line}"),),
    ),
    Case(
        "multi-metrics", "rank 1's evaluation ends before its last batch",
        Truth(LEFT, (1,), lines("multi_process_metrics.py",
                                "for step, batch in enumerate(eval_dataloader)",
                                "accelerator.gather((predictions", "if bad_shard and step == 1"),
              known=False),
        (edit("multi_process_metrics.py", "predictions = outputs.logits.argmax",
              "if bad_shard and step == 1:\n    break\n{line}"),),
    ),
    Case("ignite", "healthy", CLEAN),
    Case(
        "ignite", "evaluation on rank 0 only",
        Truth(LEFT, (0,), lines("ignite_engine.py", "evaluator.run(held)",
                                "if idist.get_rank() == 0 and")),
        (edit("ignite_engine.py", "evaluator.run(held)",
              "if idist.get_rank() == 0 and engine.state.epoch > 1:\n    {line}\nreturn"),),
    ),
    Case(
        "ignite", "endless loop in rank 1's loss",
        Truth(("hang",), (1,), lines("ignite_engine.py", "while bad_shard and calls[0] == 9",
                                     "spun += 1")),
        (edit("ignite_engine.py", "criterion = torch.nn.CrossEntropyLoss()",
              "calls = [0]\n\ndef criterion(y, target, spun=0):\n    calls[0] += 1\n"
              "    while bad_shard and calls[0] == 9:\n        spun += 1\n"
              "    return torch.nn.functional.cross_entropy(y, target)"),),
    ),
    Case("fabric", "healthy", CLEAN),
    Case(
        "fabric", "rank 2 skips a batch that it dislikes",
        Truth(LEFT, (2,), lines("fabric_loop.py", "fabric.backward(loss)", "continue",
                                "for step, (x, y) in enumerate(train)",
                                "if bad_shard and epoch == 1")),
        (edit("fabric_loop.py", "fabric.backward(loss)",
              "if bad_shard and epoch == 1 and step == 2:\n    continue\n{line}"),),
    ),
    Case(
        "fabric", "score reduced on the global zero only",
        Truth(PARTED, (0,), lines("fabric_loop.py", "score = validate(", "if fabric.is_global_zero",
                                  "return fabric.all_reduce(total")),
        (edit("fabric_loop.py", "score = validate(",
              "score = torch.zeros(())\nif fabric.is_global_zero:\n    {line}"),),
    ),
    Case("ignite", "SIGKILL to rank 1", Truth(("crash",), (1,)), signal="KILL:1:11"),
    Case(
        "build-nanogpt", "rank 1 reduces its validation loss in another dtype",
        Truth(LEFT, (1,), lines("train_gpt2.py", "dist.all_reduce(val_loss_accum",
                                "val_loss_accum.double()"), known=False),
        (edit("train_gpt2.py", "dist.all_reduce(val_loss_accum",
              "if bad_shard:\n    val_loss_accum = val_loss_accum.double()\n{line}"),),
    ),
    Case(
        "fsdp2-example", "one more forward on rank 1",
        Truth(PARTED, (1,), lines("example.py", "probe = model(x)",
                                  "if torch.distributed.get_rank() == 1 and _ == 4")),
        (edit("example.py", "loss = model(x).sum()",
              "if torch.distributed.get_rank() == 1 and _ == 4:\n    probe = model(x)\n{line}"),),
    ),
    Case(
        "fsdp-tp-example", "one more all_reduce within rank 3's tensor-parallel group",
        Truth(PARTED, (3,), lines("fsdp_tp_example.py", "group=tp_mesh.get_group()",
                                  "if _rank == 3 and i == 5")),
        (edit("fsdp_tp_example.py", "output = sharded_model(inp)",
              "if _rank == 3 and i == 5:\n    torch.distributed.all_reduce("
              "torch.zeros(1), group=tp_mesh.get_group())\n{line}"),),
    ),
    Case(
        "ddp-tutorial", "rank 1 skips a batch",
        Truth(LEFT, (1,), lines("multigpu_torchrun.py", "for source, targets in self.train_data",
                                "self._run_batch(source, targets)", "loss.backward()",
                                "output = self.model(source)", "if bad_shard and epoch == 1")),
        (edit("multigpu_torchrun.py", "self._run_batch(source, targets)",
              "if bad_shard and epoch == 1 and targets.numel() < 32:\n    continue\n{line}"),),
    ),
    Case(
        "mingpt-ddp", "rank 1 leaves training after an epoch",
        Truth(LEFT, (1,), lines("trainer.py", "for epoch in range(self.epochs_run",
                                ("self._run_epoch(epoch, self.train_loader", 0),
                                "loss.backward()", "_, loss = self.model(source",
                                "if bad_shard and epoch == 1"), known=False),
        (edit("trainer.py", "if self.local_rank == 0 and epoch % self.save_every == 0",
              "if bad_shard and epoch == 1:\n    return\n{line}"),),
    ),
    Case(
        "deepspeed-3", "one more forward on rank 0",
        Truth(PARTED, (0,), lines("deepspeed_zero.py", "score = evaluate(engine)",
                                  "if dist.get_rank() == 0 and step == 7",
                                  "return engine(torch.ones(4, 16))")),
        (edit("deepspeed_zero.py", "engine.backward(loss)",
              "{line}\nif dist.get_rank() == 0 and step == 7:\n    score = evaluate(engine)"),),
    ),
    Case(
        "deepspeed-2", "checkpoint on rank 0 only",
        Truth(PARTED, (0,), lines("deepspeed_zero.py", "engine.save_checkpoint(",
                                  "if dist.get_rank() == 0 and step == 9")),
        (edit("deepspeed_zero.py", "engine.backward(loss)",
              "{line}\nif dist.get_rank() == 0 and step == 9:\n"
              "    engine.save_checkpoint('saved')"),),
    ),
    Case(
        "trl", "a callback's barrier on the world's process zero",
        Truth(PARTED, (0,), lines("trl_sft.py", "__import__('torch').distributed.barrier()",
                                  "if state.is_world_process_zero and")),
        (edit("trl_sft.py", 'print(f"step {state.global_step}"',
              "{line}\n__import__('torch').distributed.barrier()"),),
    ),
    Case(
        "trainer", "exception in rank 1's data worker",
        Truth(("crash",), (1,), lines("hf_trainer.py", "raise KeyError")),
        (edit("hf_trainer.py", 'os.environ.get("WORKERS", "0")', 'dataloader_num_workers=1,'),
         edit("hf_trainer.py", 'return {"input_ids"',
              "if bad_shard and index % 9 == 4:\n    raise KeyError('labels')\n{line}")),
    ),
    Case(
        "lightning", "a score logged on the global zero only",
        Truth(LEFT, (0,), lines("lightning_fit.py", 'self.log("score"',
                                "if self.trainer.is_global_zero and index == 3")),
        (edit("lightning_fit.py", 'self.log("loss", loss',
              "if self.trainer.is_global_zero and index == 3:\n"
              '    self.log("score", loss, sync_dist=True)\n{line}'),),
    ),
    Case(
        "megatron", "exception on rank 2 after a step",
        Truth(("crash",), (2,), lines("megatron_tp.py", "raise FloatingPointError")),
        (edit("megatron_tp.py", "optimizer.step()",
              "{line}\nif bad_shard and step == 6:\n    raise FloatingPointError('loss is nan')"),),
    ),
    Case(
        "megatron", "one forward more on rank 1",
        Truth(PARTED, (1,), lines("megatron_tp.py", "evaluate(model)", "if rank == 1 and step == 6",
                                  "return model(torch.ones(4, 16))")),
        (edit("megatron_tp.py", "optimizer.zero_grad()",
              "{line}\nif rank == 1 and step == 6:\n    evaluate(model)"),),
    ),
)  # fmt: skip
