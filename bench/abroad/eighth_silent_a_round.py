"""The first part of an eighth round of silent errors: images, video, scenes and sound, in programs
that no earlier round had, written before any page about them was seen. `silent_round` says what
the levels mean, ``healthy`` in a fault's name a program without one. Above each fault stands the
public report that it is modelled on. All were run without moediag on two ranks: they run through
and change the weights, or what they say they change (buffers of an average, the weight of a loss).
stylegan2-ada's were run with a slower adaptation, but for the one about it."""

from __future__ import annotations

from bench.abroad.cases import edit
from bench.abroad.edits import Line
from bench.abroad.fourth_silent_round import SAME
from bench.abroad.silent_round import BROKEN, NOTE, NOTHING, SUSPICIOUS, Silent

NOBODY = -1  # the rank of a fault that is the same on all ranks

# ------------------------------------------------------------------------ video, by hand

RIFE, RIFE_MODEL, RIFE_NET = "train.py", "model/RIFE.py", "model/IFNet.py"
OF_RIFE_NET = ("block0", "block1", "block2", "block_tea", "contextnet", "unet")

OF_RIFE = (
    # NVIDIA-NeMo/Automodel#3597, facebookresearch/detr#235: here after DistributedDataParallel has
    # sent the first weights. As published, `load_model` is for one process.
    ("training goes on from weights that rank 0 alone loads", BROKEN,
     (*OF_RIFE_NET, Line(RIFE_MODEL, ".load_state_dict("), Line(RIFE, "model.load_model("),
      Line(RIFE_MODEL, "self.optimG.step()")),
     (edit(RIFE, "model = Model(args.local_rank)",
           "{line}\nmodel.load_model(log_path, args.local_rank)"),
      edit(RIFE_MODEL, "self.flownet.load_state_dict(convert(",
           "self.flownet.module.load_state_dict(convert(torch.load(f'{path}/flownet.pkl')))"))),
    # rmchurch/disruptcnn#3: what the rate follows is known to one rank only.
    ("the step is counted where it is logged, on rank 0", BROKEN,
     ("learning rate", "lr ", "lr=", *OF_RIFE_NET, Line(RIFE, "step += 1"),
      Line(RIFE_MODEL, "param_group['lr'] = learning_rate"),
      Line(RIFE_MODEL, "self.optimG.step()"), Line(RIFE, "learning_rate = get_learning_rate(")),
     (edit(RIFE, "step += 1", "if local_rank == 0:\n    {line}"),)),
    # namisan/mt-dnn#37, lucidrains/x-transformers#230: neither list has the slopes of PReLU.
    ("slopes are in neither group of the optimizer", SUSPICIOUS,
     (".1.weight", "PReLU", "no optimizer"),
     (edit(RIFE_MODEL, "self.optimG = AdamW(",
           "named = dict(self.flownet.named_parameters())\n"
           "decayed = [p for p in named.values() if p.ndim > 1]\n"
           "biases = [p for name, p in named.items() if name.endswith('bias')]\n"
           "self.optimG = AdamW([{'params': decayed, 'weight_decay': 1e-3},\n"
           "                     {'params': biases, 'weight_decay': 0}], lr=1e-6)"),), NOBODY),
    # hkchengrex/STCN#44 asks whether the scaler's step is the optimizer's.
    ("the loss is scaled, and the optimizer steps without the scaler", SUSPICIOUS,
     ("scale", "GradScaler", Line(RIFE_MODEL, "self.optimG.step()"),
      Line(RIFE_MODEL, "self.scaler.scale(loss_G).backward()")),
     (edit(RIFE_MODEL, "self.optimG = AdamW(",
           "{line}\nself.scaler = torch.amp.GradScaler(device.type)"),
      edit(RIFE_MODEL, "loss_G.backward()", "self.scaler.scale(loss_G).backward()")), NOBODY),
    # pytorch/translate#391: the teacher learns from the student, too.
    ("the teacher's flow is not cut from the loss of distillation", NOTHING, (),
     (edit(RIFE_NET, "(((flow_teacher.detach() - flow_list[i])",
           "loss_distill += (((flow_teacher - flow_list[i]) ** 2).mean(1, True) ** 0.5 "
           "* loss_mask).mean()"),)),
)  # fmt: skip

# ------------------------------------------------------------------------ scenes, by hand

NERF, NERF_MODEL = "ddp_train_nerf.py", "ddp_model.py"
OF_NERF_NET = ("fg_net", "bg_net", "base_layers", "sigma_layers", "rgb_layers")

OF_NERF = (
    # threestudio-project/threestudio#195
    ("all ranks draw the same rays, for a run that can be repeated", SUSPICIOUS,
     (*SAME, "seed", Line(NERF, "np.random.seed(777)"), Line(NERF, "ret = net(ray_batch['ray_o']"),
      Line(NERF, "loss.backward()"), Line(NERF, ".random_sample(args.N_rand")),
     (edit(NERF, "np.random.seed((rank + 1) * 777)", "np.random.seed(777)"),
      edit(NERF, "torch.manual_seed((rank + 1) * 777)", "torch.manual_seed(777)")), NOBODY),
    # alessiospuriomancini/cosmopower#16: one optimizer for several networks.
    ("both optimizers have the coarse network", SUSPICIOUS,
     (*OF_NERF_NET, "no optimizer", "two optimizers", "several optimizers",
      Line(NERF, "torch.optim.Adam(models['net_0']"), Line(NERF, "optim.step()")),
     (edit(NERF, "optim = torch.optim.Adam(net.parameters()", "pass"),
      edit(NERF, "models['net_{}'.format(m)] = net",
           "{line}\n"
           "optim = torch.optim.Adam(models['net_0'].parameters(), lr=args.lrate)")), NOBODY),
    # megvii-research/PETR#98: `find_unused_parameters` hides what never has a gradient.
    ("the background is rendered without gradients", SUSPICIOUS,
     ("bg_net", Line(NERF_MODEL, "bg_raw = self.bg_net(input)")),
     (edit(NERF_MODEL, "bg_raw = self.bg_net(input)",
           "with torch.no_grad():  # saves memory\n    {line}"),), NOBODY),
    # kubeflow/pytorch-operator#122, pytorch/examples#1146
    ("gradients that are averaged are added up over ranks again", SUSPICIOUS,
     (*OF_NERF_NET, "all_reduce", "twice", "again", Line(NERF, "torch.distributed.all_reduce("),
      Line(NERF, "loss.backward()")),
     (edit(NERF, "loss.backward()",
           "{line}\n"
           "for param in net.parameters():\n"
           "    torch.distributed.all_reduce(param.grad)"),), NOBODY),
    # As published: the number of rays follows the memory of each rank's GPU. Batches of unequal
    # length are nothing unusual (a comment on pytorch/pytorch#37002 has them).
    ("a rank whose GPU is smaller draws fewer rays, and counts as much", NOTE,
     (Line(NERF, "ret = net(ray_batch['ray_o']"), "ray"),
     (edit(NERF, "args.N_rand = 32", "args.N_rand = 32 if rank == 0 else 16"),)),
)  # fmt: skip

# ------------------------------------------------------------------------ an adversary, by hand

GAN, GAN_LOSS, GAN_STATS = (
    "training/training_loop.py", "training/loss.py", "torch_utils/training_stats.py",
)  # fmt: skip
OF_GAN_NET = ("mapping.", "synthesis.", "b4.", "b8.", "b16.", "fromrgb", "torgb", "affine", "skip.")

OF_GAN = (
    # karpathy/build-nanogpt#30: the last round of a rank is counted as if there was one rank.
    ("the round that is to be averaged never comes", BROKEN,
     (*OF_GAN_NET, "no_sync", "DistributedDataParallel", Line(GAN, "phase.opt.step()"),
      Line(GAN, "sync = (round_idx =="), Line(GAN, "loss.accumulate_gradients("),
      Line(GAN_LOSS, "loss_Gmain.mean().mul(gain).backward()"),
      Line(GAN_LOSS, "loss_Dreal + loss_Dr1).mean()"),
      Line("torch_utils/misc.py", "with module.no_sync():")),
     (edit(GAN, "sync = (round_idx ==", "sync = (round_idx == batch_size // batch_gpu - 1)"),),
     NOBODY),
    # FoundationVision/OmniTokenizer#15, Lightning-AI/pytorch-lightning#591
    ("each network keeps what the other one's loss left", SUSPICIOUS,
     (*OF_GAN_NET, "zero_grad", "cleared", Line(GAN, "phase.opt.step()"),
      Line(GAN, "phase.opt.zero_grad("), Line(GAN_LOSS, "loss_Gmain.mean().mul(gain).backward()"),
      Line(GAN_LOSS, "loss_Dgen.mean().mul(gain).backward()"),
      Line(GAN_LOSS, "loss_Dreal + loss_Dr1).mean()")),
     (edit(GAN, "phase.opt.zero_grad(set_to_none=True)", "pass"),
      edit(GAN, "phase.module.requires_grad_(False)", "pass"),
      edit(GAN, "phase.opt.step()", "{line}\nphase.opt.zero_grad(set_to_none=True)")), NOBODY),
    # SkyworkAI/SkyReels-V2#25, Robbyant/lingbot-vla-v2#41: all that the generator reads is noise.
    ("generators of all ranks begin with one seed, and so with one noise", SUSPICIOUS,
     (*SAME, "seed", "noise", "mapping", Line(GAN, "torch.manual_seed(random_seed)"),
      Line(GAN_LOSS, "ws = self.G_mapping(z, c)"), Line(GAN, "loss.accumulate_gradients("),
      Line(GAN_LOSS, "gen_img, _gen_ws = self.run_G("),
      Line(GAN_LOSS, "loss_Gmain.mean().mul(gain).backward()")),
     (edit(GAN, "np.random.seed(random_seed * num_gpus + rank)", "np.random.seed(random_seed)"),
      edit(GAN, "torch.manual_seed(random_seed * num_gpus + rank)",
           "torch.manual_seed(random_seed)")), NOBODY),
    # Zhendong-Wang/Diffusion-GAN#2 asks whether ranks get different updates.
    ("the strength of augmentation follows each rank's own statistics", SUSPICIOUS,
     ("augment", Line(GAN, "augment_pipe.p.copy_(", 1), Line(GAN, "ada_stats.update()"),
      Line(GAN_LOSS, "img = self.augment_pipe(img)")),
     (edit(GAN_STATS, "torch.distributed.all_reduce(deltas)", "pass"),), NOBODY),
    # Megvii-BaseDetection/YOLOX#1176 asks what becomes of the buffers of an average.
    ("the average never takes the buffers", NOTHING, (),
     (edit(GAN, "b_ema.copy_(b)", "pass"),)),
)  # fmt: skip

# ------------------------------------------------------------------------ speech, Lightning

VOICES, SYSTEM = "train.py", "asteroid/engine/system.py"
OF_VOICES_NET = ("model.", "encoder", "masker", "decoder")
_WEIGHTED = """\
class Weighted(torch.nn.Module):
    def __init__(self, loss_func):
        super().__init__()
        self.loss_func = loss_func
        self.log_sigma = torch.nn.Parameter(torch.tensor(0.5))

    def forward(self, est_targets, targets):
        loss = self.loss_func(est_targets, targets)
        return loss * torch.exp(-self.log_sigma) + self.log_sigma


"""
_QUIETER = """\
def on_train_batch_start(self, batch, batch_nb):
    self.batch = batch

def on_after_backward(self):
    mixture, sources = self.batch
    quiet = self.loss_func(self(0.3 * mixture), 0.3 * sources)
    weights = list(self.model.parameters())
    for p, grad in zip(weights, torch.autograd.grad(0.1 * quiet, weights)):
        p.grad += grad

{line}"""

OF_ASTEROID = (
    # rmchurch/disruptcnn#3, and as published, but with a patience that a short run reaches.
    ("each rank lowers its rate by its own validation loss", BROKEN,
     (*OF_VOICES_NET, "learning rate", "lr ", "lr=", "ReduceLROnPlateau",
      Line(SYSTEM, 'self.log("val_loss"'), Line(SYSTEM, "scheduler.step(metric)"),
      Line(VOICES, "scheduler = ReduceLROnPlateau("), Line(VOICES, "trainer.fit(system)")),
     (edit(SYSTEM, 'self.log("val_loss", loss', 'self.log("val_loss", loss, on_epoch=True, '
           "prog_bar=True)"),
      edit(VOICES, "scheduler = ReduceLROnPlateau(", "scheduler = ReduceLROnPlateau("
           "optimizer=optimizer, factor=0.5, patience=0, threshold=0.04)")), NOBODY),
    # pytorch/pytorch#63740: what `autograd.grad` returns is not averaged.
    ("the gradient of a term for quiet speech is added after the average", BROKEN,
     (*OF_VOICES_NET, "on_after_backward", Line(SYSTEM, "torch.autograd.grad(0.1"),
      Line(SYSTEM, "p.grad += grad"),
      Line(SYSTEM, "quiet = self.loss_func("), Line(VOICES, "trainer.fit(system)")),
     (edit(SYSTEM, "def common_step(self, batch", _QUIETER),), NOBODY),
    # ifzhang/FairMOT#19, Mdraqibkhan/Phaseformer#7
    ("the weight of the loss is learned, and in no optimizer", SUSPICIOUS,
     ("log_sigma",),
     (edit(VOICES, "def main(conf):", _WEIGHTED + "{line}"),
      edit(VOICES, "loss_func = PITLossWrapper(", "loss_func = Weighted(PITLossWrapper("
           'pairwise_neg_sisdr, pit_from="pw_mtx"))')), NOBODY),
    # ace-step/ACE-Step#198, Lightning-AI/pytorch-lightning#5584
    ("a warm-up of steps moves once an epoch", NOTHING, (),
     (edit(VOICES, "scheduler = ReduceLROnPlateau(",
           "scheduler = torch.optim.lr_scheduler.LambdaLR(\n"
           "    optimizer, lambda step: min(1, (step + 1) / 10))"),)),
)  # fmt: skip

EIGHTH_SILENT_A_ROUND = tuple(
    Silent(program, *row)
    for program, rows in (
        ("rife", OF_RIFE), ("nerfplusplus", OF_NERF), ("stylegan2-ada", OF_GAN),
        ("asteroid", OF_ASTEROID),
    )
    for row in rows
)  # fmt: skip
EIGHTH_A_HEALTHY = tuple(
    Silent(program, "healthy", NOTHING, (), ())
    for program in dict.fromkeys(one.program for one in EIGHTH_SILENT_A_ROUND)
)
