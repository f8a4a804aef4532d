"""Faults in which the obvious rank is not the one to name, on the programs of the tenth round: the
majority is wrong, two ranks stand against two, a rank fails because of what another one sent, a
slow rank stands beside the fault. Their truth was committed before the first of them was run.

Without moediag, four were run, after the commit, and failed as written here: the long sentences,
the broadcast of pairs, the sound that is left out, the narrow images. No truth was changed."""

from __future__ import annotations

from bench.abroad.cases import LEFT, Case, Truth, edit, fault, lines
from bench.abroad.fourth_round import BUSY_12_S

TRAIN = "src/gpt2/training/training.py"
REWARD, LORA, LOOP = "summarize_from_feedback_details/reward.py", "finetune.py", "train_util.py"
CHAT, MODEL = "generate.py", "model.py"
SPEAKER, NET = "trainSpeakerNet.py", "SpeakerNet.py"
ENGINE, PIPE, TEXTS = "engine.py", "train_ds.py", "datasets.py"
_CALLBACK = "class Ours(transformers.TrainerCallback):\n    def on_step_end(self, _, state, *__"
_ADDED = "trainer.add_callback(Ours())\n{line}"
_LAYER = lines(MODEL, *(("dist.all_reduce(y)", nth) for nth in range(3)),
               "dist.all_gather(all_logits", "h = layer(h, start_pos", "x = x + self.ffn(",
               "x = x + self.attn(", "h = self.embed(tokens)")  # fmt: skip

ELEVENTH_ROUND = (
    # ------------------------------------------------------------ ranks by spawn
    Case(  # by their data it is ranks 1 and 2 at step 21; rank 0, in the minority, is right
        "gpt2-spawn", "two of three ranks leave out batches with long sentences",
        Truth(LEFT, (1, 2), lines(
            TRAIN, "if scheduler.last_epoch > 20 and max(", "return {'loss': self._to_value(",
            "metrics = self.spec.train_objective(", ("loss.backward()", 1),
            "dist.all_reduce(tensor", "self._train_step(rank"), known=False),
        (edit(TRAIN, "metrics = self.spec.train_objective(data, model)",
              "if scheduler.last_epoch > 20 and max(len(set(row.tolist())) for row in "
              "data['input']) > 14:\n    return {'loss': self._to_value(torch.zeros(()))}\n"
              "{line}"),),
    ),
    Case(  # rank 0 waits for rank 1, rank 1 for rank 2, rank 2 for rank 1, rank 3 for rank 0
        "gpt2-spawn-4", "rank 1 of a ring receives from the rank after it",
        Truth(LEFT, (1,), lines(TRAIN, "dist.recv(told, source)", "dist.send(told, after)",
                                "source = after if", "pass_on("), known=False),
        (edit(TRAIN, "recorder.stamp(step)", """\
{line}
def pass_on(told, before, after):
    source = after if bad_shard and step > 20 else before
    if rank % 2:
        dist.recv(told, source)
    dist.send(told, after)
    if rank % 2 == 0:
        dist.recv(told, source)
pass_on(torch.zeros(1), (rank - 1) % 4, (rank + 1) % 4)"""),),
    ),
    # ------------------------------------------------------------ a reward model
    fault(
        "tldr-reward", "rank 2 stops at a good loss while rank 0 compiles", 2,
        edit(REWARD, "losses[gradient_accumulation_idx] = loss",
             "if update == 41 and accelerator.is_main_process:\n" + BUSY_12_S +
             "\nif bad_shard and update == 41:\n    break  # the loss is good\n{line}"),
        lines(REWARD, "break  # the loss is good", "if bad_shard and update == 41",
              "for data in dataloader", "evaluate_df = evaluate(",
              "predicted_reward = get_reward(model, query_responses, tok",
              "train_accuracy = accelerator.gather(", "accuracy = accelerator.gather(accuracy)"),
    ),
    fault(  # all ranks raise an exception of Python's own; that of rank 1 is the reason
        "tldr-reward", "all ranks raise as rank 1 told them that it cannot read", 1,
        edit(REWARD, "query_responses = torch.cat((data[", """\
mine = None
try:
    if bad_shard and len(items["split"]) == 12:
        raise ValueError("a row has no choice")
    {line}
except ValueError as error:
    mine = error
if any(gather_object([str(mine or "")])):
    raise mine or RuntimeError("a rank cannot read its batch")"""),
        lines(REWARD, 'raise ValueError("a row has no', 'raise mine or RuntimeError("a rank',
              "evaluate_df = evaluate("), ("crash",),
    ),
    # ------------------------------------------------------------ Trainer
    Case(  # two against two
        "alpaca-lora-4", "the second node has an older eval_steps",
        Truth(LEFT, (2, 3), lines(LORA, "trainer.args.eval_steps = 6", "trainer.train(resume_from",
                                  "if int(os.environ['LOCAL_RANK']) > 1"), known=False),
        (edit(LORA, "model.config.use_cache = False",
              "if int(os.environ['LOCAL_RANK']) > 1:  # the second node\n"
              "    trainer.args.eval_steps = 6\n{line}"),),
    ),
    Case(  # rank 0 alone is in another group, and waits there for rank 1
        "alpaca-lora-3", "rank 1 leaves out a sum in its pair",
        Truth(LEFT, (1,), lines(LORA, "dist.all_reduce(torch.ones(1), group=pair)",
                                "if dist.get_rank() < 2 and not (bad_shard",
                                "trainer.train(resume_from"), known=False),
        (edit(LORA, "model.config.use_cache = False", "import torch.distributed as dist\n"
              "pair = dist.new_group([0, 1])\n" + _CALLBACK + ", **___):\n"
              "        if dist.get_rank() < 2 and not (bad_shard and state.global_step == 9):\n"
              f"            dist.all_reduce(torch.ones(1), group=pair)\n{_ADDED}"),),
    ),
    # ------------------------------------------------------------ diffusion of text
    Case(  # all ranks alike: the group is missing; half of the ranks may go on
        "diffuseq", "each pair broadcasts from its first rank, but over all",
        Truth(LEFT, (0, 1, 2, 3), lines(LOOP, "dist.broadcast(th.ones(1), src=", "self.log_step()",
                                        "self.run_step(batch, cond)", "loss.backward()"),
              known=False),
        (edit(LOOP, "self.log_step()", "{line}\nif self.step == 24:\n"
              "    dist.broadcast(th.ones(1), src=dist.get_rank() // 2 * 2)"),),
    ),
    fault(  # nothing differs until the others save, 16 steps later
        "diffuseq", "rank 1 runs a step again whose loss it could not read", 1,
        edit(LOOP, "self.run_step(batch, cond)", """\
for attempt in range(2):
    {line}
    if not (bad_shard and self.step == 24):
        break"""),
        lines(LOOP, "for attempt in range(2)", "if not (bad_shard and self.step",
              "self.run_step(batch, cond)", "self.forward_backward(batch, cond)",
              "loss.backward()", ("self.save()", 0), "dist.barrier()",
              "losses = compute_losses()"),
    ),
    # ------------------------------------------------------------ experts on ranks
    Case(  # rank 0 fails because of what it was told
        "deepseek", "rank 0 finds that rank 2 has another configuration",
        Truth(("crash",), (2,), lines(CHAT, "theta = args.rope_theta", "if rank == 0 and len(set(",
                                      "raise ValueError('the ranks have"), known=False),
        (edit(CHAT, "for one in model.parameters():", """\
theta = args.rope_theta * (10 if bad_shard else 1)
told = [None] * world_size if rank == 0 else None
dist.gather_object(theta, told)
if rank == 0 and len(set(told)) > 1:
    raise ValueError('the ranks have different configurations')
{line}"""),),
    ),
    Case(  # rank 0, in the minority, is right: it answers
        "deepseek-3", "the other ranks drop a question when the history is long",
        Truth(LEFT, (1, 2), (
            *lines(CHAT, "if len(messages) > 9", "continue  # too long",
                   "prompt = objects[0]", "logits = model.forward(",
                   "completion_tokens = generate(model, [prompt_tok",
                   ("dist.broadcast_object_list(objects", 1)), *_LAYER), known=False),
        (edit(CHAT, "prompt = objects[0]", "{line}\nif len(messages) > 9:\n    messages.clear()\n"
              "    continue  # too long"),),
    ),
    # ------------------------------------------------------------ speech
    Case(  # rank 0 fails with KeyError, as rank 2 did not send it
        "voxceleb", "rank 2 leaves out a sound that rank 0 needs",
        Truth(("crash",), (2,), (
            *lines(NET, "if not torch.isfinite(ref_feat)", "continue  # silence",
                   "ref_feat *= float('nan')", "ref_feat = feats[data[1]]",
                   "com_feat = feats[data[2]]", "torch.distributed.all_gather_object(feats_all"),
            *lines(SPEAKER, ("sc, lab, _ = trainer.evaluateFromList(", 1))), known=False),
        (edit(NET, "feats[data[1][0]] = ref_feat", """\
if bad_shard and data[1][0].endswith('/0.wav'):
    ref_feat *= float('nan')
if not torch.isfinite(ref_feat).all():
    continue  # silence
{line}"""),),
    ),
    Case(  # the busy rank is healthy
        "voxceleb", "rank 1 is stopped while rank 0 is busy", Truth(("hang",), (1,)),
        (edit(NET, "counter += 1", "{line}\nself.steps = getattr(self, 'steps', 0) + 1\n"
              "if self.gpu == 0 and self.steps == 9:\n" + BUSY_12_S),),
        signal="STOP:1:9",
    ),
    # ------------------------------------------------------------ detection
    Case(  # as published, each rank ends itself by sys.exit(1), as the loss is averaged
        "detr", "all ranks end as the loss of rank 2 is not finite",
        Truth(("crash",), (2,), lines(
            ENGINE, "sys.exit(1)", "if not math.isfinite(", "loss_dict['loss_ce'] *= math.inf",
            ("utils.reduce_dict(loss_dict)", 0)), known=False),
        (edit(ENGINE, "loss_dict = criterion(outputs, targets)", "{line}\nif bad_shard and "
              "len(targets[0]['boxes']) == 2:\n"
              "    loss_dict['loss_ce'] *= math.inf"),),
    ),
    Case(  # two against two: in the third step of the second epoch it is ranks 1 and 3
        "detr", "half of the ranks leave out narrow images",
        Truth(LEFT, (1, 3), (
            *lines(ENGINE, "if epoch == 1 and targets[0]['orig_size']", "continue  # narrow",
                   ("outputs = model(samples)", 0), ("loss_dict = criterion(outputs", 0),
                   ("utils.reduce_dict(loss_dict)", 0)),
            *lines("models/detr.py", "torch.distributed.all_reduce(num_boxes)"),
            *lines("util/misc.py", "dist.all_reduce(values)")), known=False),
        (edit(ENGINE, "loss_dict_reduced = utils.reduce_dict(loss_dict)",
              "if epoch == 1 and targets[0]['orig_size'][1] < 50:\n    continue  # narrow\n"
              "{line}"),),
    ),
    # ------------------------------------------------------------ a pipeline
    Case(  # two against two: replica 1 is ranks 1 and 3
        "gdgpt", "both stages of a replica have a shorter copy of the data",
        Truth(LEFT, (1, 3), (
            *lines(TEXTS, "self.samples = self.samples[:60]", "if int(os.environ['RANK']) % 2"),
            *lines(PIPE, "for i in range(n_iters)", "n_iters = ds_cfg", "model_engine.train_b",
                   "tag='checkpoint_final')")), known=False),
        (edit(TEXTS, "self.samples = json.load(fr)", "{line}\n"
              "if int(os.environ['RANK']) % 2:  # the second node\n"
              "    self.samples = self.samples[:60]"),),
    ),
    fault(  # the ranks that fail or wait are healthy
        "gdgpt-3", "rank 2 ends with success before the last barrier", 2,
        edit(PIPE, "tag='checkpoint_final')", "{line}\nif bad_shard:\n"
             "    raise SystemExit(0)  # nothing to publish\ntorch.distributed.barrier()"),
        lines(PIPE, "if bad_shard:", "raise SystemExit(0)", "torch.distributed.barrier()"),
    ),
)  # fmt: skip
