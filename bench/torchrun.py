"""Runs a module of this folder on ranks of a stack's own Python, and ends them whatever happens."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from moediag.lab.stacks import environment

ROOT = Path(__file__).parent.parent
_DEATH = ("terminate called", "what():", "Fatal Python error", "Signal ")


def command(stack: environment.Stack, ranks: int, module: str) -> list[str]:
    """torchrun for ``module`` on this machine; the module's arguments are to be appended."""
    return [str(stack.python), "-m", "torch.distributed.run", "--standalone",
            "--nproc-per-node", str(ranks), "-m", module]  # fmt: skip


def variables(stack: environment.Stack) -> dict[str, str]:
    """The stack's environment, with this checkout importable from any folder."""
    values = stack.environ()
    paths = [str(ROOT), *(str(p) for p in stack.pythonpath)]
    values["PYTHONPATH"] = os.pathsep.join(paths)
    values.setdefault("OMP_NUM_THREADS", "1")
    return values


def launch(arguments: Sequence[str], values: Mapping[str, str], folder: str, timeout: float) -> str:
    """Runs to the end; returns "" or what went wrong. Nothing outlives the call."""
    log = Path(folder) / "log.txt"
    with log.open("wb") as output:
        process = subprocess.Popen(
            arguments, cwd=folder, env=values, stdout=output, stderr=output, start_new_session=True
        )
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            return f"it took more than {timeout:g} s"
        finally:
            if process.poll() is None:
                # torchrun starts each rank in a session of its own.
                for one in [*psutil.Process(process.pid).children(recursive=True), process]:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        one.kill()
                process.wait()
    return f"exit code {code}: {_cause(log.read_text(errors='replace'))}" if code else ""


def _cause(log: str) -> str:
    """The last exception in a log; without one, a rank's last words and its signal."""
    lines = [line.strip() for line in log.splitlines() if line.strip("=- \t")]
    raised = [line for line in lines if "Error" in line and "ChildFailed" not in line]
    if not raised:
        # A rank that aborts raises nothing: C++ says why, and torchrun's footer names the signal.
        lines = [line for line in lines if any(word in line for word in _DEATH)] or lines
        return "; ".join(line[:300] for line in lines[-3:]) or "no output"
    return raised[-1][:300]
