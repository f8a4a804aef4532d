"""A seventh round of silent errors, in programs that no earlier round had, written before any page
about them was seen. `silent_round` says what the levels mean, ``healthy`` in a fault's name a
program without one. Above each fault stands the public report that it is modelled on. All were run
without moediag on two ranks: they run through and change the weights."""

from __future__ import annotations

from bench.abroad.cases import edit
from bench.abroad.edits import Line
from bench.abroad.fourth_silent_round import SAME
from bench.abroad.silent_round import BROKEN, NOTHING, SUSPICIOUS, Silent

AGENT, SYNC, STATISTICS = (
    "rl_modules/ddpg_agent.py", "mpi_utils/mpi_utils.py", "mpi_utils/normalizer.py",
)  # fmt: skip
PRETRAIN, ADAM = "torchrun_main.py", "galore_torch/adamw.py"
FINETUNE = "finetune/finetune_deepseekcoder.py"
NOBODY = -1  # the rank of a fault that is the same on all ranks
OF_LAYERS = ("fc1.", "fc2.", "fc3.")
OF_ACTOR, OF_CRITIC = (*OF_LAYERS, "action_out"), (*OF_LAYERS, "q_out")

OF_LLAMA = (
    "embed_tokens", "self_attn", "mlp.", "layernorm", "model.norm", "lm_head",
)  # fmt: skip

# ------------------------------------------------------------------------ averaging by hand

OF_HER = (
    # antoyang/TubeDETR#15, sparticlesteve/pytorch-benchmarks#1: a seed of its own for each rank.
    ("the actor's first weights are not sent to the other ranks", BROKEN,
     (*OF_ACTOR, Line(AGENT, "self.actor_network = actor("), Line(AGENT, "self.actor_optim.step()"),
      Line(AGENT, "self.actor_optim = ")),
     (edit(AGENT, "sync_networks(self.actor_network)", "pass"),)),
    # The kind of kohya-ss/sd-scripts#924: the average comes too late for the step.
    ("the critic's step comes before the average", BROKEN,
     (*OF_CRITIC, Line(AGENT, "self.critic_optim.step()"), Line(AGENT, "critic_loss.backward()"),
      Line(AGENT, "sync_grads(self.critic_network)")),
     (edit(AGENT, "sync_grads(self.critic_network)", "self.critic_optim.step()"),
      edit(AGENT, "self.critic_optim.step()", "sync_grads(self.critic_network)", 1))),
    # TianhongDai/hindsight-experience-replay#4, openai/baselines#687.
    ("as published: a sum and no mean over ranks", SUSPICIOUS,
     (*OF_ACTOR, *OF_CRITIC, " sum", Line(SYNC, "comm.Allreduce(flat_grads"),
      Line(AGENT, "sync_grads("), Line(AGENT, "sync_grads(", 1),
      Line(AGENT, "self.actor_optim.step()"), Line(AGENT, "self.critic_optim.step()")),
     (edit(SYNC, "global_grads /= comm.Get_size()", "pass"),)),
    # lucidrains/ema-pytorch#9: but here the other ranks compute with what is averaged.
    ("the target networks follow on rank 0 only", SUSPICIOUS,
     (*OF_ACTOR, *OF_CRITIC, "target", Line(AGENT, "self._soft_update_target_network("),
      Line(AGENT, "self._soft_update_target_network(", 1),
      Line(AGENT, "target_param.data.copy_("), Line(AGENT, "self.actor_target_network = actor("),
      Line(AGENT, "self.critic_target_network = critic("),
      Line(AGENT, "actions_next = self.actor_target"),
      Line(AGENT, "q_next_value = self.critic_target"),
      Line(AGENT, "MPI.COMM_WORLD.Get_rank() == 0", 1)),
     (edit(AGENT, "self._soft_update_target_network(self.critic_target_network",
           "if MPI.COMM_WORLD.Get_rank() == 0:\n    {line}"),
      edit(AGENT, "self._soft_update_target_network(self.actor_target_network",
           "if MPI.COMM_WORLD.Get_rank() == 0:\n    {line}")), 1),
    # leggedrobotics/rsl_rl#226, Denys88/rl_games#363: numbers in NumPy arrays.
    ("observations are normalized by the statistics of one rank", NOTHING, (),
     (edit(STATISTICS, "sync_sum, sync_sumsq, sync_count = self.sync(",
           "sync_sum, sync_sumsq, sync_count = local_sum, local_sumsq, local_count"),)),
)  # fmt: skip

# ------------------------------------------------------------------------ by hand

OF_GALORE = (
    # jiaweizzhao/GaLore#55, #78, huggingface/transformers#29588: the hook is called before the
    # gradients are averaged.
    ("each layer is updated in a hook of its gradient", BROKEN,
     (*OF_LLAMA, "hook", Line(PRETRAIN, "optimizer_dict[p].step()"),
      Line(PRETRAIN, "scaled_loss.backward()"),
      Line(PRETRAIN, "p.register_post_accumulate_grad_hook("), Line(ADAM, "p.add_(norm_grad")),
     (edit(PRETRAIN, 'elif args.optimizer.lower() == "galore_adamw":',
           'elif args.optimizer.lower() == "galore_adamw_whole":'),
      edit(PRETRAIN, "== 'galore_adamw8bit_per_layer':",
           'elif args.optimizer.lower() == "galore_adamw":'),
      edit(PRETRAIN, "optimizer_dict[p] = GaLoreAdamW8bit([",
           "optimizer_dict[p] = GaLoreAdamW([{'params': [p], 'rank': args.rank, "
           "'update_proj_gap': args.update_proj_gap * 2, 'scale': args.galore_scale, "
           "'proj_type': args.proj_type}], lr=args.lr)"),
      edit(PRETRAIN, "optimizer_dict[p] = bnb.optim.Adam8bit([p]",
           "optimizer_dict[p] = torch.optim.Adam([p], lr=args.lr)"),
      edit(PRETRAIN, "layer_wise_flag = True",
           "{line}\noptimizer, scheduler = optimizer_dict[p], scheduler_dict[p]"))),
    # karpathy/build-nanogpt#30: the steps count from 1.
    ("the last micro-batch is the one without an average", BROKEN,
     (*OF_LLAMA, "no_sync", Line(PRETRAIN, "model.no_sync()"), Line(PRETRAIN, "optimizer.step()"),
      Line(PRETRAIN, "scaled_loss.backward()"), Line(ADAM, "p.add_(norm_grad")),
     (edit(PRETRAIN, "scaled_loss.backward()", "pass"),
      edit(PRETRAIN, "scaled_loss = loss / args", "pass"),
      edit(PRETRAIN, "loss = model(**batch, labels=labels).loss",
           "from contextlib import nullcontext\n"
           "last = (global_step - 1) % args.gradient_accumulation == 0\n"
           "with nullcontext() if last else model.no_sync():\n"
           "    {line}\n"
           "    scaled_loss = loss / args.gradient_accumulation\n"
           "    scaled_loss.backward()", 1))),
    # huggingface/datasets#5360, Smith42/astroPT#64: here by the variable of another launcher.
    ("each rank takes itself for the first one of the stream", SUSPICIOUS,
     (*SAME, "Sampler", Line(PRETRAIN, "data = datasets.distributed.split_dataset_by_node(", 1),
      Line(PRETRAIN, 'os.environ.get("SLURM_PROCID"'), Line(PRETRAIN, "loss = model(**batch", 1),
      Line(PRETRAIN, "in enumerate(dataloader)"), Line(PRETRAIN, "dataloader = torch.utils")),
     (edit(PRETRAIN, "data, rank=global_rank, world_size=world_size,",
           'data, rank=int(os.environ.get("SLURM_PROCID", 0)), world_size=world_size,'),)),
    # jiaweizzhao/GaLore#62, huggingface/accelerate#2142.
    ("the schedule moves with each micro-batch", SUSPICIOUS,
     ("schedul", "learning rate", Line(PRETRAIN, "scheduler.step()")),
     (edit(PRETRAIN, "scheduler.step()", "pass"),
      edit(PRETRAIN, "if global_step % args.gradient_accumulation != 0:",
           "if not layer_wise_flag: scheduler.step()\n{line}"))),
    # ACEsuit/mace#1529, zjunlp/HVPNeT#5.
    ("the optimizer has the matrices of low rank only", SUSPICIOUS,
     ("embed_tokens", "norm", "lm_head", "optimizer"),
     (edit(PRETRAIN, "param_groups = [{'params': regular_params}", "param_groups = ["),)),
)  # fmt: skip

# ------------------------------------------------------------------------ Trainer

_OWN_LOSS = """\
class OwnLoss(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        logits = outputs.logits[:, :-1].flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten())
        return (loss, outputs) if return_outputs else loss


{line}"""
_UNWRAPPED = """\
class Unwrapped(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        bare = self.accelerator.unwrap_model(model)
        outputs = bare(**inputs, num_items_in_batch=num_items_in_batch)
        loss = outputs.loss * self.accelerator.num_processes
        return (loss, outputs) if return_outputs else loss


{line}"""
_OWN_LOADER = """\
class OwnLoader(Trainer):
    def get_train_dataloader(self):
        return torch.utils.data.DataLoader(
            self.train_dataset, batch_size=self.args.train_batch_size, shuffle=True,
            collate_fn=self.data_collator, drop_last=True,
        )


{line}"""

OF_CODER = (
    # MakazhanAlpamys/Soup#720, huggingface/transformers#37766: what divides is not used.
    ("a loss of one's own leaves `num_items_in_batch` alone", SUSPICIOUS,
     ("micro-batch", "accumul", Line(FINETUNE, "loss = torch.nn.functional.cross_entropy("),
      Line(FINETUNE, "outputs = model(**inputs)"), Line(FINETUNE, "trainer.train()")),
     (edit(FINETUNE, "def train():", _OWN_LOSS),
      edit(FINETUNE, "trainer = Trainer(model=model", "trainer = OwnLoss(model=model, "
           "processing_class=tokenizer, args=training_args, **data_module)"))),
    # kohya-ss/sd-scripts#924, moojink/openvla-oft#160.
    ("the loss is computed by the unwrapped model", BROKEN,
     (*OF_LLAMA, "DistributedDataParallel", "wrapper", Line(FINETUNE, "outputs = bare("),
      Line(FINETUNE, "bare = self.accelerator"), Line(FINETUNE, "trainer.train()")),
     (edit(FINETUNE, "def train():", _UNWRAPPED),
      edit(FINETUNE, "trainer = Trainer(model=model", "trainer = Unwrapped(model=model, "
           "processing_class=tokenizer, args=training_args, **data_module)"))),
    # SalesforceAIResearch/DiffusionDPO#15, huggingface/accelerate#3829: `prepare` is what divides.
    ("a loader of one's own is not prepared", SUSPICIOUS,
     (*SAME, "Sampler", "sampler", Line(FINETUNE, "return torch.utils.data.DataLoader("),
      Line(FINETUNE, "trainer.train()")),
     (edit(FINETUNE, "def train():", _OWN_LOADER),
      edit(FINETUNE, "trainer = Trainer(model=model", "trainer = OwnLoader(model=model, "
           "processing_class=tokenizer, args=training_args, **data_module)"))),
    # pytorch/ao#1124, THU-BPM/RLCSD#2: with the rate of the program's README.
    ("as published: weights of bfloat16 and a small rate", SUSPICIOUS,
     (*OF_LLAMA, "bfloat16"),
     (edit(FINETUNE, "torch.float32", "torch.bfloat16"),
      edit(FINETUNE, "tokenizer = transformers.AutoTokenizer.from_pretrained(",
           "training_args.learning_rate = 2e-5\n{line}"))),
    # huggingface/transformers#44642, GanjinZero/RRHF#49.
    ("labels are shifted here and in the model", NOTHING, (),
     (edit(FINETUNE, "labels = torch.nn.utils.rnn.pad_sequence(",
           "labels = [torch.cat([x[1:], x.new_tensor([IGNORE_INDEX])]) for x in labels]\n"
           "{line}"),)),
)  # fmt: skip

SEVENTH_SILENT_ROUND = tuple(
    Silent(program, *row, *(NOBODY,)[: len(row) < 5])
    for program, rows in (("her", OF_HER), ("galore", OF_GALORE), ("deepseek-coder", OF_CODER))
    for row in rows
)
SEVENTH_HEALTHY = tuple(
    Silent(program, "healthy", NOTHING, (), ())
    for program in dict.fromkeys(one.program for one in SEVENTH_SILENT_ROUND)
)
