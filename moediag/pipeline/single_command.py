"""The command of one process for a distributed job, and the command that compares the two."""

from __future__ import annotations

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
# Options of programs that are told it, too.
_PROGRAMS = ("--world-size", "--world_size")
_COUNT = re.compile(r"\d+(?::\d+)?|auto|gpu|cpu")


def one_process(command: Sequence[str]) -> list[str]:
    """Returns ``command`` with one process; [] if it has no option of a launcher that is known."""
    names = [PurePath(word).name for word in command]
    at = next((i for i, name in enumerate(names) if name in _LAUNCHERS), None)
    if at is None:
        return []
    wanted, found, changed = _LAUNCHERS[names[at]], list(command), False
    for i in range(at + 1, len(found)):
        if found[i].endswith(".py"):
            if not changed:
                return []
            wanted = _PROGRAMS
        option, equals, count = found[i].partition("=")
        if option not in wanted:
            continue
        if equals and _COUNT.fullmatch(count):
            found[i], changed = f"{option}=1", True
        elif not equals and i + 1 < len(found) and _COUNT.fullmatch(found[i + 1]):
            found[i + 1], changed = "1", True
    return found if changed else []


def verify_command(command: Sequence[str], reference: Sequence[str] = ()) -> str:
    """Returns the `moediag verify` that compares ``command`` with one process, to type. Without a
    ``reference`` it says where one must be given."""
    job, alone = (shlex.join(masked_command(one)) for one in (command, reference))
    if not alone and not one_process(command):
        alone = "COMMAND IN ONE PROCESS"
    given = f" --reference {shlex.quote(alone)}" if alone else ""
    return f"moediag verify{given} -- {job}"
