"""Cases that were held out until their first run, after the changes that the second round led to:
10 of 12 faults right. Their pages have been read since."""

from __future__ import annotations

from bench.abroad.cases import LEFT, PARTED, Case, Truth, edit, lines

THIRD_ROUND = (
    Case(
        "llm.c", "an assertion on rank 1's tokens",
        Truth(("crash",), (1,), lines("train_gpt2.py", "assert not (bad_shard and step == 7)")),
        (edit("train_gpt2.py", "lossf = lossf.item()",
              "assert not (bad_shard and step == 7), 'token out of range'\n{line}"),),
    ),
    Case(
        "ddp-example", "rank 2 expects a broadcast from another rank",
        Truth(PARTED, (2,), lines("example.py", "dist.broadcast(table",
                                  "src=1 if bad_shard else 0")),
        (edit("example.py", 'print(f"training completed',
              "table = torch.ones(4)\ndist.broadcast(table, src=1 if bad_shard else 0)\n{line}"),),
    ),
    Case(
        "tp-example", "another batch size on rank 1",
        Truth(LEFT, (1,), lines("tensor_parallel_example.py", "inp = torch.rand(",
                                "output = tp_model(inp)"), known=False),
        (edit("tensor_parallel_example.py", "inp = torch.rand(20",
              "inp = torch.rand(20 + 4 * (bad_shard and i == 6), 10, device=device_type)"),),
    ),
    Case(
        "mingpt-ddp", "rank 1's DataLoader worker exits",
        Truth(("crash",), (1,), lines("trainer.py", "for iter, (source, targets) in enumerate(",
                                      ("self._run_epoch(epoch, self.train_loader", 0))),
        (edit("char_dataset.py", "chunk = self.data[idx",
              "{line}\nif bad_shard and idx % 13 == 5:\n    __import__('os')._exit(3)"),),
    ),
    Case(
        "checkpointing", "rank 1 cannot write its state",
        Truth(("crash",), (1,), lines("checkpointing.py", "raise OSError")),
        (edit("checkpointing.py", 'output_dir = f"epoch_{epoch}"',
              "{line}\nif bad_shard:\n    raise OSError(28, 'No space left on device')"),),
    ),
    Case(
        "fabric", "rank 1 waits for an event that never comes",
        Truth(("hang",), (1,), lines("fabric_loop.py", "threading').Event().wait()")),
        (edit("fabric_loop.py", "total = torch.zeros(())",
              "if bad_shard:\n    __import__('threading').Event().wait()\n{line}"),),
    ),
    Case(
        "ignite", "rank 1 stops training after two epochs",
        Truth(LEFT, (1,), lines("ignite_engine.py", "engine.terminate()", "evaluator.run(held)",
                                "trainer.run(train, max_epochs=4)"), known=False),
        (edit("ignite_engine.py", "evaluator.run(held)",
              "{line}\nif bad_shard and engine.state.epoch == 2:\n    engine.terminate()"),),
    ),
    Case(
        "deepspeed-2", "rank 1 calls step once more",
        Truth(LEFT, (1,), lines("deepspeed_zero.py", "if bad_shard and step == 9", "engine.step()",
                                "engine.backward(loss)", "loss = engine(x)"), known=False),
        (edit("deepspeed_zero.py", "engine.step()",
              "{line}\nif bad_shard and step == 9:\n    engine.backward(engine(x).pow(2).mean())\n"
              "    engine.step()"),),
    ),
    Case(
        "megatron", "a barrier of its data-parallel group on rank 2",
        Truth(PARTED, (2,), lines("megatron_tp.py", "dist.barrier(parallel_state",
                                  "if rank == 2 and step == 5")),
        (edit("megatron_tp.py", "optimizer.zero_grad()",
              "{line}\nif rank == 2 and step == 5:\n"
              "    dist.barrier(parallel_state.get_data_parallel_group())"),),
    ),
    Case(
        "trainer", "metrics gathered in a callback of the main process",
        Truth(PARTED, (0,), lines("hf_trainer.py", "all_reduce(torch.zeros(2))",
                                  "if state.is_world_process_zero and")),
        (edit("hf_trainer.py", 'print(f"step {state.global_step}"',
              "{line}\ntorch.distributed.all_reduce(torch.zeros(2))"),),
    ),
    Case("lightning", "SIGSTOP to rank 0", Truth(("hang",), (0,)), signal="STOP:0:7"),
    Case(
        "local-sgd", "rank 1 leaves out an evaluation batch",
        Truth(LEFT, (1,), lines("local_sgd.py", "for step, batch in enumerate(eval_dataloader)",
                                "accelerator.gather_for_metrics((predictions",
                                "if bad_shard and step == 1"), known=False),
        (edit("local_sgd.py", "predictions = outputs.logits.argmax",
              "if bad_shard and step == 1:\n    continue\n{line}"),),
    ),
)  # fmt: skip
