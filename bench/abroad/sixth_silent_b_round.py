"""The second half of a sixth round of silent errors, in programs that no earlier round had, written
before any page about them was seen. `silent_round` says what the levels mean, ``healthy`` in a
fault's name a program without one. Each fault is modelled on the public report that stands above
it."""

from __future__ import annotations

from bench.abroad.cases import edit
from bench.abroad.edits import Line
from bench.abroad.fourth_silent_round import SAME
from bench.abroad.silent_round import BROKEN, NOTHING, SUSPICIOUS, Silent

FIX = "train.py"
OF_FIX_NET = ("conv1", "conv2", "block1", "block2", "block3", "fc.", "bn1")

# ------------------------------------------------------------------------ by hand, vision

OF_FIXMATCH = (
    # pytorch/pytorch#47260
    ("two losses go backward one after the other through one forward", BROKEN,
     (*OF_FIX_NET, Line(FIX, "Lx.backward("), Line(FIX, "(args.lambda_u * Lu).backward()")),
     (edit(FIX, "loss.backward()",
           "Lx.backward(retain_graph=True)\n(args.lambda_u * Lu).backward()", 1),)),
    # Spijkervet/SimCLR#26, huggingface/nanoVLM#124: of several loaders, one is forgotten.
    ("the loader without labels has no distributed sampler", SUSPICIOUS,
     (*SAME, "Sampler", "sampler", Line(FIX, "unlabeled_trainloader = DataLoader("),
      Line(FIX, "next(unlabeled_iter)", 1), Line(FIX, "next(unlabeled_iter)", 3),
      Line(FIX, "logits = model(inputs)")),
     (edit(FIX, "sampler=train_sampler(unlabeled_dataset)", "shuffle=True,"),
      edit(FIX, "unlabeled_trainloader.sampler.set_epoch(unlabeled_epoch)", "pass"),
      edit(FIX, "unlabeled_trainloader.sampler.set_epoch(unlabeled_epoch)", "pass"))),
    # PKU-YuanGroup/Open-Sora-Plan#186, harubaru/waifu-diffusion#31; here rank 0 alone evaluates.
    ("rank 0 evaluates averaged weights in its model, and keeps them", BROKEN,
     (*OF_FIX_NET, Line(FIX, "model.module.load_state_dict(ema_model")),
     (edit(FIX, "test_loss, test_acc = test(",
           "model.module.load_state_dict(ema_model.ema.state_dict())\n"
           "test_loss, test_acc = test(args, test_loader, model.module, epoch)\nmodel.train()"),),
     0),
    # The program's own default, without --seed.
    ("each rank draws the samples that have labels by itself", NOTHING, (),
     (edit(FIX, "labeled_dataset, unlabeled_dataset, test_dataset = DATASET",
           "np.random.seed(args.seed + args.local_rank)\n{line}"),)),
    ("gradients are cleared in the averaged model only", BROKEN,
     ("zero_grad", "cleared", "accumulat", *OF_FIX_NET, Line(FIX, "optimizer.step()"),
      Line(FIX, "ema_model.ema.zero_grad()")),
     (edit(FIX, "model.zero_grad()", "ema_model.ema.zero_grad()", 1),)),
)  # fmt: skip

SIXTH_SILENT_ROUND_B = tuple(
    Silent(program, *row)
    for program, rows in (("fixmatch", OF_FIXMATCH),)
    for row in rows
)  # fmt: skip
SIXTH_HEALTHY_B = tuple(
    Silent(program, "healthy", NOTHING, (), ())
    for program in dict.fromkeys(one.program for one in SIXTH_SILENT_ROUND_B)
)
