"""A seventh round of silent errors, in programs that no earlier round had, written before any page
about them was seen. `silent_round` says what the levels mean, ``healthy`` in a fault's name a
program without one. Above each fault stands the public report that it is modelled on. All were run
without moediag on two ranks: they run through and change the weights."""

from __future__ import annotations

from bench.abroad.cases import edit
from bench.abroad.edits import Line
from bench.abroad.silent_round import BROKEN, NOTHING, SUSPICIOUS, Silent

AGENT, SYNC, STATISTICS = (
    "rl_modules/ddpg_agent.py", "mpi_utils/mpi_utils.py", "mpi_utils/normalizer.py",
)  # fmt: skip
NOBODY = -1  # the rank of a fault that is the same on all ranks
OF_LAYERS = ("fc1.", "fc2.", "fc3.")
OF_ACTOR, OF_CRITIC = (*OF_LAYERS, "action_out"), (*OF_LAYERS, "q_out")

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

SEVENTH_SILENT_ROUND = tuple(
    Silent(program, *row, *(NOBODY,)[: len(row) < 5])
    for program, rows in (("her", OF_HER),)
    for row in rows
)
SEVENTH_HEALTHY = tuple(
    Silent(program, "healthy", NOTHING, (), ())
    for program in dict.fromkeys(one.program for one in SEVENTH_SILENT_ROUND)
)
