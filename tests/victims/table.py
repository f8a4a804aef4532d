"""What a diagnosis of each job in ``jobs.py`` must find. Used by the end-to-end tests and by
``make accuracy``."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

JOBS = Path(__file__).with_name("jobs.py")
TRAINERS = Path(__file__).with_name("trainers.py")
MARK = "# HERE"
IMPATIENT = ("--quiescence", "1", "--patience", "1")


@dataclass(frozen=True)
class Victim:
    """``verdicts``: any of these is right; ``culprits``: exactly these; ``says``: in the cause."""

    name: str
    verdicts: tuple[str, ...]
    culprits: tuple[int, ...] = ()
    ranks: int = 3
    says: str = ""
    options: tuple[str, ...] = ("--quiescence", "1", "--patience", "2")

    @property
    def healthy(self) -> bool:
        return self.verdicts == ("clean",)

    def names_the_line(self, cause: str) -> bool:
        """Whether ``cause`` names one of the marked lines, as ``jobs.py:42``."""
        return not self.lines or any(f"{line} " in f"{cause} " for line in self.lines)

    @property
    def lines(self) -> tuple[str, ...]:
        return marked(self.name)

    @property
    def command(self) -> tuple[str, ...]:
        """The program and its arguments."""
        return str(JOBS), self.name


VICTIMS = (
    Victim("skips", ("hang",), (1,)),
    Victim("other_op", ("hang", "collective-mismatch"), (1,)),
    Victim("other_order", ("hang",), (1,)),
    Victim("micro_batches", ("hang", "collective-mismatch"), (1,)),
    Victim("starves", ("collective-mismatch", "hang"), (1,), ranks=2, says="1.{weight,bias}"),
    # On gloo the receiver may abort; a pair does not show which end is wrong.
    Victim("splits", ("hang", "collective-mismatch"), (), says="rank 1 sends rank 0 3 rows"),
    # Nothing shows whose order is wrong: both ends run the program as written.
    Victim("receives", ("hang",), (), says="in a circle"),
    Victim("data_loader", ("hang",), (1,), says="waits for data"),
    Victim("endless", ("hang",), (1,), says="computes"),
    Victim("stopped", ("hang",), (1,), says="SIGSTOP"),
    Victim("holds_gil", ("hang",), (1,), says="holds the GIL"),
    Victim("killed", ("crash",), (1,), says="SIGKILL"),
    Victim("out_of_memory", ("crash",), (1,), says="MemoryError"),
    Victim("raises", ("crash",), (1,), ranks=2, says="the batch is empty"),
    Victim("swallows", ("collective-mismatch",), (1,), says="the program continued"),
    Victim("alone", ("replica-divergence",), ranks=2, says="each rank trained alone"),
    Victim("unmet", ("hang",), ranks=2, says="cannot find each other"),
    Victim("clean", ("clean",), ranks=2),
    Victim("late", ("clean",), ranks=2, options=IMPATIENT),
    Victim("slow", ("clean",), ranks=2, options=IMPATIENT),
    Victim("compiles", ("clean",), ranks=2, options=IMPATIENT),
    Victim("saves", ("clean",), ranks=2, options=IMPATIENT),
)


@dataclass(frozen=True)
class Trainer(Victim):
    """A victim of ``trainers.py``; ``name`` is the library."""

    fault: str = ""
    ranks: int = 2

    @property
    def lines(self) -> tuple[str, ...]:
        return marked("Batches" if self.fault == "loader" else self.fault, TRAINERS)

    @property
    def command(self) -> tuple[str, ...]:
        return str(TRAINERS), self.name, self.fault


_SAYS = {"endless": "computes", "stopped": "SIGSTOP", "loader": "waits for data"}
LIBRARIES = ("ddp", "ddp_without_buffers", "fsdp2", "accelerate", "lightning", "ray")
WAITS = tuple(
    Trainer(library, ("hang",), (1,), says=says, fault=fault)
    for library in LIBRARIES
    for fault, says in _SAYS.items()
) + tuple(
    Trainer(library, ("clean",), fault="slow", options=IMPATIENT) for library in LIBRARIES
) + tuple(
    Trainer(library, ("crash",), (1,), says="bad row", fault="raises") for library in LIBRARIES
)  # fmt: skip


def marked(name: str, program: Path = JOBS) -> tuple[str, ...]:
    """Where the function or class called ``name`` ends a line with the mark."""
    source = program.read_text(encoding="utf-8")
    (function,) = [
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name
    ]
    assert function.end_lineno is not None
    lines = source.splitlines()[function.lineno - 1 : function.end_lineno]
    numbers = [n for n, text in enumerate(lines, function.lineno) if text.endswith(MARK)]
    return tuple(f"{program.name}:{number}" for number in numbers)


LAW_JOBS = Path(__file__).with_name("law_jobs.py")
MODEL_JOBS = Path(__file__).with_name("model_jobs.py")
LAW_RUNS = Path(__file__).with_name("law_runs.py")


HEALTHY_JOBS = Path(__file__).with_name("healthy_jobs.py")
PREMISE_JOBS = HEALTHY_JOBS.with_name("premise_jobs.py")


def healthy_programs() -> tuple[str, ...]:
    """The names in ``healthy_jobs.py`` and ``premise_jobs.py``, read without importing torch."""
    return (*_programs(HEALTHY_JOBS), *_programs(PREMISE_JOBS))


def _programs(file: Path) -> tuple[str, ...]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    table = next(node for node in tree.body if isinstance(node, ast.AnnAssign))
    names = (node.id for node in ast.walk(table) if isinstance(node, ast.Name))
    return tuple(name for name in names if name in functions)


@dataclass(frozen=True)
class LawVictim(Victim):
    """A silent error, or a healthy job; ``note``: in one of the notes."""

    note: str = ""
    program: Path = LAW_JOBS

    @property
    def command(self) -> tuple[str, ...]:
        return str(self.program), self.name


REPLICAS = ("replica-divergence",)
LAW_VICTIMS = (
    LawVictim("healthy", ("clean",), ranks=2, says="no law was broken in 4 checked steps"),
    LawVictim("lr_by_rank", REPLICAS, ranks=2, says="0.01 on rank 0, 0.02 on rank 1"),
    LawVictim("decay_by_rank", REPLICAS, (1,), says="`weight_decay` differs since step 1"),
    LawVictim("load_on_rank_0", REPLICAS, says="ranks 1, 2 agree, rank 0 differs"),
    LawVictim("extra_step", REPLICAS, (1,), says="rank 1 6 times"),
    LawVictim(
        "no_sampler",
        ("wrong-gradients",),
        ranks=2,
        says="come from a SequentialSampler at law_jobs",
    ),
    LawVictim("same_part", ("wrong-gradients",), ranks=2, says="for part 0 of 2"),
    LawVictim("no_set_epoch", ("clean",), ranks=2, note="nothing called set_epoch"),
    LawVictim("adapters", ("wrong-gradients",), ranks=2, says="these adapters train nothing"),
    LawVictim("adapters_healthy", ("clean",), ranks=2),
    LawVictim("local_norms", ("wrong-gradients",), ranks=2, says="each rank's own shard"),
    LawVictim("shards_healthy", ("clean",), ranks=2),
    LawVictim("not_finite", ("nonfinite",), ranks=2, says="in step 2 they were finite"),
    LawVictim("tp_dropout", REPLICAS, ranks=2, says="the gradients of norm."),
    LawVictim("own_seeds", REPLICAS, ranks=2, says="Before the first call of AdamW.step()"),
    *[
        LawVictim(name, ("clean",), ranks=2)
        for name in (
            "replicated_shards",
            "two_optimizers",
            "accumulating",
            "checkpointed",
            "local_sgd",
            "joined",
            "tensor_parallel",
        )
    ],
    LawVictim(
        "tp_batches",
        ("wrong-gradients",),
        ranks=2,
        program=MODEL_JOBS,
        says="differs between ranks 0, 1, though the program declares it",
    ),
    LawVictim(
        "scaler_apart",
        REPLICAS,
        ranks=2,
        program=MODEL_JOBS,
        says="the loss scale of SGD.step() at model_jobs.py",
    ),
    LawVictim(
        "part_loaded",
        ("wrong-weights",),
        ranks=2,
        program=MODEL_JOBS,
        says="rank 0 loaded the whole parameter at model_jobs.py",
    ),
    *[
        LawVictim(name, ("clean",), ranks=2, program=MODEL_JOBS, note=note)
        for name, note in (
            ("average_on_rank_0", "0 times on rank 1"),
            ("stage_embedding", "embedding.weight on rank 0 and head.weight on rank 1"),
            ("frozen_router", "The router's 0.gate.weight does not require gradients"),
            ("left_out", "no optimizer that stepped has them"),
            ("forgets_optimizer", "AdamW began without state"),
            ("other_names", "(2.{weight,bias})"),
            ("buffers_apart", "each computes with different constants"),
            ("summed_again", "Sum at model_jobs.py"),
            ("own_mean", "1 buffer (0.mean) follows each rank's own samples"),
            ("own_orders", "of the same samples (of 48 that are known of each rank)"),
            ("in_parts", ""),
            ("one_mean", ""),
            ("one_order", ""),
            ("tp_same_batches", ""),
            ("scaler_together", ""),
            ("averages", ""),
            ("stages", ""),
            ("routes", ""),
            ("resumes", ""),
            ("all_loaded", ""),
            ("buffers", ""),
        )
    ],
)
