"""The command of one process for a distributed job, and the command that compares the two."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Sequence
from pathlib import PurePath

from moediag.masking import masked_command

# How launchers are told the number of processes: name of the program or module -> options.
_TORCHRUN = ("--nproc-per-node", "--nproc_per_node", "--nnodes")
_LAUNCHERS = {
    "torchrun": _TORCHRUN,
    "torch.distributed.run": _TORCHRUN,
    "torch.distributed.launch": _TORCHRUN,
    "accelerate": ("--num_processes", "--num-processes", "--num_machines"),
    "deepspeed": ("--num_gpus", "--num_nodes"),
    "mpirun": ("-n", "-np", "--np"),
    "mpiexec": ("-n", "-np"),
    "srun": ("-n", "--ntasks", "--ntasks-per-node", "-N", "--nodes"),
}
# Options of programs that are told it, too, or along how many ranks each kind of parallelism goes:
# --tp 2, --tensor-model-parallel-size 2, --parallelism.tensor_parallel_degree=2, trainer.cp_size=2.
_PROGRAMS = re.compile(
    r"world-size|([tpdces]p|etp|ddp|fsdp|hsdp|ulysses|ring"
    r"|(tensor|pipeline|context|expert|data|sequence|model)(-(model|tensor|data))?-parallel(ism)?)"
    r"(-(shard|replicate))?(-(size|degree|dim|world-size))?"
)
_COUNT = re.compile(r"\d+(?::\d+)?|auto|gpu|cpu")


def one_process(command: Sequence[str]) -> list[str]:
    """Returns ``command`` with one process; [] if it has no option of a launcher that is known.
    Options of the program that say how many ranks share a model or a batch become 1, too, where the
    number of ranks is a multiple of them."""
    names = [PurePath(word).name for word in command]
    at = next((i for i, name in enumerate(names) if name in _LAUNCHERS), None)
    if at is None:
        return []
    options, found = _LAUNCHERS[names[at]], list(command)
    counts: list[str] = []
    program = False
    for i in range(at + 1, len(found)):
        if found[i].endswith(".py") or (i > at + 1 and found[i - 1] in ("-m", "--module")):
            if not counts:
                return []
            program = True
        option, equals, count = found[i].partition("=")
        count = count if equals else "".join(found[i + 1 : i + 2])
        known = _divides(option, count, counts) if program else option in options
        if known and _COUNT.fullmatch(count):
            found[i if equals else i + 1] = f"{option}=1" if equals else "1"
            counts += [] if program else [count]
    return found if counts else []


def _divides(option: str, count: str, launched: Sequence[str]) -> bool:
    """Whether an option of the program tells how many of the ``launched`` processes do something
    together."""
    name = option.lstrip("-").rpartition(".")[2].replace("_", "-").lower()
    if not _PROGRAMS.fullmatch(name) or not count.isdecimal():
        return False
    known = all(one.isdecimal() for one in launched)
    return int(count) > 0 and (not known or math.prod(map(int, launched)) % int(count) == 0)


def verify_command(command: Sequence[str], reference: Sequence[str] = ()) -> str:
    """Returns the `moediag verify` that compares ``command`` with one process, to type. Without a
    ``reference`` it says where one must be given."""
    job, alone = (shlex.join(masked_command(one)) for one in (command, reference))
    if not alone and not one_process(command):
        alone = "COMMAND IN ONE PROCESS"
    given = f" --reference {shlex.quote(alone)}" if alone else ""
    return f"moediag verify{given} -- {job}"
