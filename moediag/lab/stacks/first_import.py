"""Imports everything that a rank needs once, in a finished environment."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

from moediag.errors import StackError

if TYPE_CHECKING:
    from moediag.lab.stacks.environment import Stack

# The second list has lazy imports of the first training step. Releases differ in them, so a missing
# one is not an error.
_PROGRAM = """
import contextlib, importlib, sys
for name in sys.argv[1].split(","):
    importlib.import_module(name)
for name in sys.argv[2].split(","):
    with contextlib.suppress(Exception):
        importlib.import_module(name)
"""
_LAZY = (
    "torch.distributed.fsdp", "torch.distributed.tensor", "torch._dynamo",
    "torch.distributed.checkpoint", "transformers.modeling_utils",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "transformers.models.mixtral.modeling_mixtral",
)  # fmt: skip
_LIMIT = 600.0  # seconds; a cold import takes 5 to 20


def import_once(stack: Stack) -> None:
    """Imports the stack's libraries in a separate process, which writes their bytecode.

    Raises StackError with the end of the traceback if an import fails.
    """
    candidates = ("torch", "transformers", "accelerate")
    needed = ",".join(n for n in candidates if stack.versions.get(n))
    try:
        done = subprocess.run(
            [str(stack.python), "-c", _PROGRAM, needed, ",".join(_LAZY)],
            env=stack.environ(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_LIMIT,
        )
    except subprocess.TimeoutExpired as error:
        raise StackError(f"{stack.key}: importing {needed} took over {_LIMIT:.0f} s") from error
    if done.returncode != 0:
        tail = "\n".join(done.stderr.strip().splitlines()[-6:])
        raise StackError(
            f"{stack.key}: {needed} cannot be imported\n{tail}",
            "These releases do not work together; pin others, e.g. --stack numpy=1.26.4",
        )
