"""The second part of a ninth round of silent errors: images, video and scenes, in programs that no
earlier round had, written before any page about them was seen. `silent_round` says what the levels
mean, ``healthy`` in a fault's name a program without one. Above each fault stands the public report
that it is modelled on. All were run without moediag on two ranks: they run through and change the
weights."""

from __future__ import annotations

from bench.abroad.cases import edit
from bench.abroad.edits import Line
from bench.abroad.silent_round import BROKEN, NOTHING, SUSPICIOUS, Silent

NOBODY = -1  # the rank of a fault that is the same on all ranks

# ------------------------------------------------------------------------ codes of images, FSDP1

LLAMAGEN, LLAMAGEN_GPT = "autoregressive/train/train_c2i_fsdp.py", "autoregressive/models/gpt.py"

OF_LLAMAGEN = (
    # pytorch/pytorch#101343, Modalities/modalities#142: what FSDP shows of a matrix has one
    # dimension, and so the group with weight decay is empty. A comment in the program knows it.
    ("weight decay goes by the dimensions of shards", SUSPICIOUS,
     ("weight_decay", "weight decay", "decay", "no parameters", "group 0", "empty",
      Line(LLAMAGEN, "decay_params = [p for n, p in param_dict.items() if p.dim() >= 2]"),
      Line(LLAMAGEN, "{'params': decay_params"), Line(LLAMAGEN, "torch.optim.AdamW(")),
     (edit(LLAMAGEN, "decay_params = [p for n, p in param_dict.items() if 'norm' not in n]",
           "decay_params = [p for n, p in param_dict.items() if p.dim() >= 2]"),
      edit(LLAMAGEN, "nodecay_params = [p for n, p in param_dict.items() if 'norm' in n]",
           "nodecay_params = [p for n, p in param_dict.items() if p.dim() < 2]")), NOBODY),
    # pytorch/pytorch#75870, pytorch/torchtitan#166: each rank keeps its shard of its own model.
    ("ranks shard different first weights", SUSPICIOUS,
     ("sync_module_states", "first values", "begin", "start", "seed", "tok_embeddings", "wqkv",
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

NINTH_SILENT_B_ROUND = tuple(
    Silent(program, *row)
    for program, rows in (
        ("llamagen", OF_LLAMAGEN),
        ("ip-adapter", OF_IP_ADAPTER),
    )
    for row in rows
)  # fmt: skip
NINTH_B_HEALTHY = tuple(
    Silent(program, "healthy", NOTHING, (), ())
    for program in dict.fromkeys(one.program for one in NINTH_SILENT_B_ROUND)
)
