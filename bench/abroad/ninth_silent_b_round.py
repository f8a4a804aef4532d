"""The second part of a ninth round of silent errors: images, video and scenes, in programs that no
earlier round had, written before any page about them was seen. `silent_round` says what the levels
mean, ``healthy`` in a fault's name a program without one. Above each fault stands the public report
that it is modelled on, or one of its kind. All were run without moediag on two ranks: they run
through and change the weights (IBRNet's sum in the eighth digit, which Adam hides). Their programs
run through, too, and end with the same weights on both ranks, or with the shards of one model."""

from __future__ import annotations

from bench.abroad.cases import edit
from bench.abroad.edits import Line
from bench.abroad.fourth_silent_round import SAME
from bench.abroad.silent_round import BROKEN, NOTE, NOTHING, SUSPICIOUS, Silent

NOBODY = -1  # the rank of a fault that is the same on all ranks

# ------------------------------------------------------------------------ codes of images, FSDP1

LLAMAGEN, LLAMAGEN_GPT = "autoregressive/train/train_c2i_fsdp.py", "autoregressive/models/gpt.py"

OF_LLAMAGEN = (
    # pytorch/pytorch#101343, Modalities/modalities#142: what FSDP shows of a matrix has one
    # dimension, and so the group with weight decay is empty. A comment in the program knows it.
    ("weight decay goes by the dimensions of shards", SUSPICIOUS,
     ("weight_decay", "weight decay", "no parameters", "group 0", "is empty",
      Line(LLAMAGEN, "decay_params = [p for n, p in param_dict.items() if p.dim() >= 2]"),
      Line(LLAMAGEN, "{'params': decay_params"), Line(LLAMAGEN, "torch.optim.AdamW(")),
     (edit(LLAMAGEN, "decay_params = [p for n, p in param_dict.items() if 'norm' not in n]",
           "decay_params = [p for n, p in param_dict.items() if p.dim() >= 2]"),
      edit(LLAMAGEN, "nodecay_params = [p for n, p in param_dict.items() if 'norm' in n]",
           "nodecay_params = [p for n, p in param_dict.items() if p.dim() < 2]")), NOBODY),
    # pytorch/pytorch#75870, pytorch/torchtitan#166: each rank keeps its shard of its own model.
    ("ranks shard different first weights", SUSPICIOUS,
     ("sync_module_states", "first values", "start with", "begin with", "tok_embeddings", "wqkv",
      Line(LLAMAGEN, "model = FSDP("),
      Line(LLAMAGEN, "model = setup_fsdp_sync("), Line(LLAMAGEN, "torch.manual_seed(seed)")),
     (edit(LLAMAGEN, "dist.broadcast(value, 0)", "pass"),), NOBODY),
    # Tuning for other classes, whose table is made after the wrapper and not before it. The kind is
    # that of moojink/openvla-oft#160: a part whose gradients no wrapper sees.
    ("the table of classes is made again after the sharding", BROKEN,
     ("cls_embedding", "embedding_table", Line(LLAMAGEN, "torch.nn.Embedding(args.num_classes")),
     (edit(LLAMAGEN, "model = setup_fsdp_sync(model, args, device)",
           "{line}\n"
           "model.cls_embedding.embedding_table = torch.nn.Embedding(args.num_classes + 1, "
           "model.config.dim)"),), NOBODY),
    # tientrandinh/Revisiting-Reverse-Distillation#12, ZiqiaoPeng/DualTalk#9
    ("gradients are cleared in each round, and used in each second one", SUSPICIOUS,
     ("cleared", "zero_grad", "micro-batch", "tok_embeddings", "layers.", "output.weight",
      Line(LLAMAGEN, "optimizer.zero_grad()"), Line(LLAMAGEN, "optimizer.step()"),
      Line(LLAMAGEN, "loss.backward()")),
     (edit(LLAMAGEN, "optimizer.step()", "if (train_steps + 1) % 2 == 0:\n    {line}"),), NOBODY),
    # mlfoundations/open_lm#4, where positions turn the wrong dimension.
    ("keys are not turned by their position", NOTHING, (),
     (edit(LLAMAGEN_GPT, "xk = apply_rotary_emb(xk", "pass"),)),
)  # fmt: skip

# ------------------------------------------------------------------------ segmentation, by hand

BISENET, BISENET_EVAL, BISENET_SAMPLER = (
    "tools/train_amp.py",
    "tools/evaluate.py",
    "lib/data/sampler.py",
)
BISENET_CUT = "lib/data/transform_cv2.py"
OF_BISENET_NET = ("detail.", "segment.", "bga.", "head.", "aux2", "aux3", "aux4", "aux5_4")
_COMPRESSED = """\
def compressed(group, bucket):
    # half of the bytes are sent
    sent = bucket.buffer().to(torch.bfloat16)
    work = dist.all_reduce(sent.div_(dist.get_world_size()), async_op=True)
    return work.get_future().then(lambda done: bucket.buffer())

net.register_comm_hook(None, compressed)
{line}"""
_COUNTED = """\
{line}
counts = torch.ones(cfg.n_cats)
for row in list(dl.batch_sampler.sampler)[:12]:
    labels = dl.dataset[row][1].flatten()
    counts += torch.bincount(labels[labels < cfg.n_cats], minlength=cfg.n_cats)
for criterion in (criteria_pre, *criteria_aux):
    criterion.criteria.weight = counts.sum() / counts / cfg.n_cats"""

OF_BISENET = (
    # pytorch/pytorch#42400: a hook takes the place of the whole average. Here it gives back what it
    # was given, and what was averaged is a copy.
    ("a hook that compresses gradients averages a copy of them", BROKEN,
     (*OF_BISENET_NET, "comm_hook", "hook", "compressed", Line(BISENET, "net.register_comm_hook("),
      Line(BISENET, "scaler.step(optim)"), Line(BISENET, "scaler.scale(loss).backward()"),
      Line(BISENET, "dist.all_reduce(sent"), Line(BISENET, "DistributedDataParallel(")),
     (edit(BISENET, "## meters", _COMPRESSED),), NOBODY),
    # joeynmt/joeynmt#184, wkentaro/pytorch-fcn#56: what an evaluation does not put back.
    ("an evaluation in the middle leaves the network in evaluation mode", SUSPICIOUS,
     ("evaluation mode", Line(BISENET, "eval_model(cfg, net.module)"),
      Line(BISENET_EVAL, "net.eval()")),
     (edit(BISENET, "lr_schdr.step()",
           "{line}\nif it == 2:\n    eval_model(cfg, net.module)"),), NOBODY),
    # TensorAuto/OpenTau#501, NVlabs/LongLive#71
    ("each rank takes its part of an order of its own", SUSPICIOUS,
     ("orders", "shuffle", "sampler", "Sampler", "overlap",
      Line(BISENET_SAMPLER, "indices += torch.randperm("), Line(BISENET, "in enumerate(dl)"),
      Line(BISENET_SAMPLER, "indices = indices[self.rank:")),
     (edit(BISENET_SAMPLER, "indices += torch.randperm(",
           "indices += torch.randperm(len(self.dataset)).tolist()"),), NOBODY),
    # pytorch/pytorch#31579 is about classes of which each rank has others.
    ("classes are weighted by the labels of each rank's own images", SUSPICIOUS,
     ("criteria", "CrossEntropyLoss", "OhemCELoss", "class weight",
      Line(BISENET, "criterion.criteria.weight ="), Line(BISENET, "loss_pre = criteria_pre("),
      Line("lib/ohem_ce_loss.py", "loss = self.criteria(logits, labels)"),
      Line(BISENET, "for crit, lgt in zip(criteria_aux"),
      Line(BISENET, "scaler.scale(loss).backward()")),
     (edit(BISENET, "net, criteria_pre, criteria_aux = set_model(", _COUNTED),), NOBODY),
    # datvuthanh/HybridNets#54: labels between two labels.
    ("labels are made larger as images are", NOTHING, (),
     (edit(BISENET_CUT, "interpolation=cv2.INTER_NEAREST", "lb = cv2.resize(lb, (im_w, im_h))"),)),
)  # fmt: skip

# ------------------------------------------------------------------------ diffusion, accelerate

IP = "tutorial_train.py"
OF_ADAPTERS = ("adapter_modules", "to_k_ip", "to_v_ip")

OF_IP_ADAPTER = (
    # PixArt-alpha/PixArt-alpha#160: the optimizer has used the iterator up.
    ("what is clipped is an iterator that is at its end", SUSPICIOUS,
     ("clip_grad_norm_", "clipped", "clips", "clipping",
      Line(IP, "accelerator.clip_grad_norm_(params_to_opt"),
      Line(IP, "params_to_opt = itertools.chain("), Line(IP, "optimizer.step()")),
     (edit(IP, "params_to_opt = list(", "params_to_opt = itertools.chain("
           "ip_adapter.image_proj_model.parameters(), ip_adapter.adapter_modules.parameters())"),),
     NOBODY),
    # huggingface/diffusers#2459, #2420: another kind of attention takes the adapters out again.
    # `find_unused_parameters` hides it.
    ("the attention is set after the adapters, which it replaces", SUSPICIOUS,
     (*OF_ADAPTERS, "processor", Line(IP, "unet.set_attn_processor(AttnProcessor())")),
     (edit(IP, "from accelerate import Accelerator",
           "from accelerate import Accelerator, DistributedDataParallelKwargs"),
      edit(IP, "log_with=args.report_to,", "{line}\n"
           "kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)],"),
      edit(IP, "weight_dtype = torch.float32",
           "unet.set_attn_processor(AttnProcessor())  # saves memory\n{line}")), NOBODY),
    # huggingface/accelerate#3520, #4075, #4199
    ("samples that are divided among ranks are divided again", SUSPICIOUS,
     ("sampler", "Sampler", "divide", "twice", "never read", "not read",
      Line(IP, "sampler=torch.utils.data.DistributedSampler("), Line(IP, "accelerator.prepare("),
      Line(IP, "in enumerate(train_dataloader)")),
     (edit(IP, "shuffle=True,", "sampler=torch.utils.data.DistributedSampler(train_dataset),"),),
     NOBODY),
    # moojink/openvla-oft#160: what takes part beside the wrapper has the gradient of its own rank.
    ("only the projection is prepared, and the adapters are not", BROKEN,
     (*OF_ADAPTERS, "processor", Line(IP, "accelerator.prepare("),
      Line(IP, "optimizer.step()"), Line(IP, "accelerator.backward(loss)"),
      Line(IP, "noise_pred = ip_adapter(")),
     (edit(IP, "= accelerator.prepare(", "ip_adapter.image_proj_model, optimizer, "
           "train_dataloader = accelerator.prepare(\n"
           "    ip_adapter.image_proj_model, optimizer, train_dataloader)"),), NOBODY),
    # huggingface/diffusers#437 asks what the factor is for.
    ("latents are not scaled", NOTHING, (),
     (edit(IP, "latents = latents * vae.config.scaling_factor", "pass"),)),
)  # fmt: skip

# ------------------------------------------------------------------------ views, three wrappers

IBRNET, IBRNET_MODEL = "train.py", "ibrnet/model.py"
OF_FEATURES = (
    "feature_net", "bn1.", "layer1", "layer2", "layer3", "upconv", "iconv", "out_conv",
)  # fmt: skip
OF_RAYS = (
    "net_coarse", "net_fine", "ray_dir_fc", "base_fc", "vis_fc", "geometry_fc", "ray_attention",
    "rgb_fc",
)  # fmt: skip
_SUMMED = """\
def summed(group, bucket):
    work = torch.distributed.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda done: done.value()[0])

self.net_coarse.register_comm_hook(None, summed)
{line}"""
_TWO_OPTIMIZERS = """\
self.optimizer = torch.optim.Adam([
    {'params': self.net_coarse.parameters()},
    {'params': self.net_fine.parameters()}], lr=args.lrate_mlp)
self.feature_optimizer = torch.optim.Adam(
    self.feature_net.parameters(), lr=args.lrate_feature)
{line}"""

OF_IBRNET = (
    # ByteDance-Seed/VeOmni#1059: the groups of a wrapper have one rank each.
    ("the features are averaged in groups of one rank", BROKEN,
     (*OF_FEATURES, "one rank", "new_subgroups", Line(IBRNET_MODEL, "new_subgroups("),
      Line(IBRNET_MODEL, "self.feature_net = torch.nn.parallel.DistributedDataParallel("),
      Line(IBRNET, "model.optimizer.step()"), Line(IBRNET, "loss.backward()"),
      Line(IBRNET, "featmaps = model.feature_net(")),
     (edit(IBRNET_MODEL, "self.feature_net = torch.nn.parallel.DistributedDataParallel(",
           "group, _ = torch.distributed.new_subgroups(\n"
           "    torch.distributed.get_world_size() // 2)\n"
           "{line}\n    process_group=group,\n    module="),
      ), NOBODY),
    # pytorch/pytorch#42400: a hook divides by itself, or nothing does. Under Adam it hardly shows.
    ("a hook of the coarse network adds gradients up", SUSPICIOUS,
     (*OF_RAYS, "comm_hook", "hook", "summed", "added up", "world size", "number of ranks",
      Line(IBRNET_MODEL, "work = torch.distributed.all_reduce("),
      Line(IBRNET_MODEL, "register_comm_hook("), Line(IBRNET, "loss.backward()")),
     (edit(IBRNET_MODEL, "if self.net_fine is not None:", _SUMMED, nth=2),), NOBODY),
    # The kind of ComputationalPsychiatry/pyhgf#421: a part of the network does not train, and the
    # loss still falls. The loop knows of one optimizer.
    ("features have an optimizer of their own, which never steps", SUSPICIOUS,
     (*OF_FEATURES, "never step", "no step", "feature_optimizer", "not step",
      Line(IBRNET_MODEL, "self.feature_optimizer = torch.optim.Adam("),
      Line(IBRNET, "model.optimizer.step()")),
     (edit(IBRNET_MODEL, "self.scheduler = torch.optim.lr_scheduler.StepLR(", _TWO_OPTIMIZERS),),
     NOBODY),
    # goodfire-ai/spd#412 gives each rank a generator of its own, for what is drawn before the
    # average: here it is after it.
    ("noise of each rank's own is added to gradients that are averaged", BROKEN,
     (*OF_FEATURES, *OF_RAYS, "noise", "randn", Line(IBRNET, "p.grad.add_("),
      Line(IBRNET, "model.optimizer.step()"), Line(IBRNET, "loss.backward()")),
     (edit(IBRNET, "model.optimizer.step()",
           "for group in model.optimizer.param_groups:  # finds flat minima\n"
           "    for p in group['params']:\n"
           "        p.grad.add_(0.1 * p.grad.std(correction=0) * torch.randn_like(p))\n"
           "{line}"),), NOBODY),
    # The kind of pytorch/pytorch#31579: what is to be ignored counts.
    ("rays that no view sees count in the loss", NOTHING, (),
     (edit("ibrnet/criterion.py", "loss = img2mse(", "loss = img2mse(pred_rgb, gt_rgb)"),)),
)  # fmt: skip

# ------------------------------------------------------------------------ video, a queue of keys

COCLR, COCLR_MODEL = "main_nce.py", "model/pretrain.py"

OF_COCLR = (
    # rmchurch/disruptcnn#3: what a schedule follows is known to one rank only.
    ("the momentum grows where it is logged, on rank 0", BROKEN,
     ("encoder_k", "momentum",  "InfoNCE", Line(COCLR, "model.module.m = min("),
      Line(COCLR_MODEL, "param_k.data = param_k.data * self.m"),
      Line(COCLR_MODEL, "self._momentum_update_key_encoder()"),
      Line(COCLR, "output, target = model(input_seq)")),
     (edit(COCLR, "args.train_plotter.add_data('local/top1'",
           "{line}\nmodel.module.m = min(0.999, model.module.m + 0.01)"),), NOBODY),
    # namisan/mt-dnn#37, lucidrains/x-transformers#230: the head is not in the list.
    ("the optimizer has the backbone, and not the head that maps it", SUSPICIOUS,
     ("encoder_q.2", "encoder_q.4", "no optimizer", Line(COCLR, "optimizer = optim.Adam(params")),
     (edit(COCLR, "params.append({'params': param})",
           "if name.startswith('module.encoder_q.0.'):\n    {line}"),), NOBODY),
    # facebookresearch/swav#103 asks for `shuffle=True`: it takes the place of the sampler.
    ("the loader shuffles by itself, and has no sampler", SUSPICIOUS,
     (*SAME, "Sampler", "sampler", Line(COCLR, "num_workers=args.workers, pin_memory=True, drop"),
      Line(COCLR, "output, target = model(input_seq)"), Line(COCLR, "loss.backward()"),
      Line(COCLR, "enumerate(data_loader)")),
     (edit(COCLR, "dataset, batch_size=args.batch_size, shuffle=(train_sampler is None)",
           "dataset, batch_size=args.batch_size, shuffle=True,"),
      edit(COCLR, "num_workers=args.workers, pin_memory=True, sampler=train_sampler",
           "num_workers=args.workers, pin_memory=True, drop_last=True)"),
      edit(COCLR, "train_loader.sampler.set_epoch(epoch)", "pass")), NOBODY),
    # Haochen-Wang409/U2PL#138 says why keys are gathered. The queue of rank 0 is sent to all with
    # the buffers, and what the others add is lost; statistics of norms are, too, in many programs.
    ("each rank puts its own keys into the queue", NOTE,
     ("queue", Line(COCLR_MODEL, "self.queue[:, ptr:ptr + batch_size] = keys.T")),
     (edit(COCLR_MODEL, "keys = concat_all_gather(keys)", "pass"),), NOBODY),
    # CoinCheung/DenseCL#1: keys of other clips.
    ("keys stay in the order that was shuffled", NOTHING, (),
     (edit(COCLR_MODEL, "k = self._batch_unshuffle_ddp(k", "pass"),)),
)  # fmt: skip

# ------------------------------------------------------------------------ a teacher, Lightning

DINO = "examples/pytorch_lightning_distributed/dino.py"
OF_TEACHER = ("teacher_backbone", "teacher_head")

OF_DINO = (
    # lightly-ai/lightly#1844, huangzongmou/yolov8_Distillation#16: the average has gradients, too.
    ("the teacher is not frozen", SUSPICIOUS,
     (*OF_TEACHER, Line(DINO, "update_momentum(self.student_backbone"),
      Line(DINO, "update_momentum(self.student_head"), Line(DINO, "torch.optim.Adam("),
      Line(DINO, "teacher_out = [self.forward_teacher(view)")),
     (edit(DINO, "deactivate_requires_grad(self.teacher_backbone)", "pass"),
      edit(DINO, "deactivate_requires_grad(self.teacher_head)", "pass")), NOBODY),
    # The kind of namisan/mt-dnn#37, by a line that was copied: one of two heads is the wrong one.
    ("the optimizer has the teacher's head for the student's", SUSPICIOUS,
     ("student_head", "no optimizer", Line(DINO, "torch.optim.Adam(")),
     (edit(DINO, "optim = torch.optim.Adam(self.parameters(), lr=0.001)",
           "optim = torch.optim.Adam(\n"
           "    [*self.student_backbone.parameters(), *self.teacher_head.parameters()], "
           "lr=0.001)"),), NOBODY),
    # d8ahazard/sd_dreambooth_extension#1415: 0.4 % of a difference are rounded away.
    ("weights and their average are of bfloat16, and most of it stands still", SUSPICIOUS,
     (*OF_TEACHER, "bfloat16", "16 bits", "rounded", "lost",
      Line(DINO, "update_momentum(self.student_backbone"),
      Line(DINO, "update_momentum(self.student_head")),
     (edit(DINO, 'strategy="ddp",', '{line}\nprecision="bf16-true",'),), NOBODY),
    # The kind of sangmichaelxie/doremi#8: it is under the condition for what rank 0 prints.
    ("only rank 0 leaves the last layer alone in the first epoch", BROKEN,
     ("last_layer", "student_head", Line(DINO, "self.student_head.cancel_last_layer_gradients("),
      Line(DINO, "trainer.fit("), Line(DINO, "torch.optim.Adam(")),
     (edit(DINO, "self.student_head.cancel_last_layer_gradients(",
           "if self.trainer.is_global_zero:\n    print('epoch', self.current_epoch)\n    {line}"),
      ), NOBODY),
    # lightly-ai/lightly-train#968: with the library of this program.
    ("the average is updated after each of two micro-batches", NOTE,
     (*OF_TEACHER, Line(DINO, "update_momentum(self.student_backbone"),
      Line(DINO, "update_momentum(self.student_head")),
     (edit(DINO, 'strategy="ddp",', "{line}\naccumulate_grad_batches=2,"),), NOBODY),
    # As the method is described, all views go through the student.
    ("the student sees the large views only", NOTHING, (),
     (edit(DINO, "student_out = [self.forward(view) for view in views]",
           "student_out = [self.forward(view) for view in global_views]"),)),
)  # fmt: skip

NINTH_SILENT_B_ROUND = tuple(
    Silent(program, *row)
    for program, rows in (
        ("llamagen", OF_LLAMAGEN), ("bisenet", OF_BISENET),
        ("ip-adapter", OF_IP_ADAPTER), ("ibrnet", OF_IBRNET),
        ("coclr", OF_COCLR), ("lightly-dino", OF_DINO),
    )
    for row in rows
)  # fmt: skip
NINTH_B_HEALTHY = tuple(
    Silent(program, "healthy", NOTHING, (), ())
    for program in dict.fromkeys(one.program for one in NINTH_SILENT_B_ROUND)
)
