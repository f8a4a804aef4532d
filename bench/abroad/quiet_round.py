"""Fifth round: programs of kinds that no earlier round had, and jobs that are slow for a reason.
All are healthy, so no alarm is right, but for two that were expected to be."""

from __future__ import annotations

from bench.abroad.cases import CLEAN, Case, Truth, edit, lines
from bench.abroad.edits import Edit
from bench.abroad.quiet_programs import QUIET_PROGRAMS, SLOW

GRPO, PPO = "trainer/train_grpo.py", "trainer/train_ppo.py"
# As published, the loss is that of the model inside DistributedDataParallel, so nothing is reduced:
# jingyaogong/minimind#853, repaired in #854.
_REPAIRED: dict[str, tuple[Edit, ...]] = {
    "minimind-grpo": (edit(GRPO, "model_unwrapped = model.module", "model_unwrapped = model"),),
    "minimind-ppo": (
        edit(PPO, "actor_unwrapped = actor_model.module", "actor_unwrapped = actor_model"),
        edit(PPO, "critic_unwrapped = critic_model.module", "critic_unwrapped = critic_model"),
    ),
}
_AS_PUBLISHED = "as published: the model is called without its wrapper"
_SLOW = {f"slow-{name}" for name in SLOW}

QUIET_ROUND = (
    *(
        Case(
            program.name, "healthy", CLEAN, _REPAIRED.get(program.name, ()),
            laws=program.name not in _SLOW, patience="30" if program.name in _SLOW else "5",
        )
        for program in QUIET_PROGRAMS
    ),
    *(
        Case(
            name, _AS_PUBLISHED, laws=True,
            truth=Truth(("replica-divergence",), (), lines(file, line), says="called without it"),
        )
        for name, file, line in (
            ("minimind-grpo", GRPO, "res = model_unwrapped(outputs"),
            ("minimind-ppo", PPO, "mb_values_seq = critic_unwrapped("),
        )
    ),
)  # fmt: skip
