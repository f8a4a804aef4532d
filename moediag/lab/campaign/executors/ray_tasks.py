"""Ray: a job is a task."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import shutil
import signal
import socket
import sys
import time
import traceback
import types
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from moediag.errors import MachineError, UsageError
from moediag.lab.campaign.executors.executor import Avoided, Call, Executor, Job, Lost, Reply
from moediag.launch import signals

KEYS = ("address", "num_cpus", "num_gpus", "memory")
PACKAGE = "ray"
CONNECTING = 10.0  # seconds
NEEDS = "Type: pip install 'moediag[ray]'   (on this machine and on every worker)"
FOLDER = "ray"  # a file for each running task, in the campaign's folder
SILENCE = 30.0  # seconds without a free node before that is printed
_AMOUNTS = {"num_cpus": "CPU", "num_gpus": "GPU", "memory": "memory"}  # ray's names


class RayTasks(Executor):
    """Without ``address``, and without RAY_ADDRESS, the running cluster of this machine, else a new
    one on it."""

    def __init__(
        self, arguments: Mapping[str, str], folder: Path, say: Callable[[str], None]
    ) -> None:
        """Raises UsageError for a value that is not a number, MachineError if the cluster cannot be
        reached or no node of it has what a task asks for."""
        options = {k: _number(k, v) for k, v in arguments.items() if k != "address"}
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # a warning on import
        import ray

        self._ray = ray
        address = arguments.get("address")
        _listens(address or os.environ.get("RAY_ADDRESS") or "")
        handlers = {sig: signal.getsignal(sig) for sig in signals.ENDING}
        try:
            ray.init(
                address=address, log_to_driver=False, logging_level=logging.ERROR,
                include_dashboard=None if address else False,
            )  # fmt: skip
        except Exception as error:  # ray raises several kinds, ValueError and RuntimeError too
            where = address or os.environ.get("RAY_ADDRESS") or "this machine"
            raise _unreached(where, error) from error
        finally:  # ray installs its own
            for sig, handler in handlers.items():
                signal.signal(sig, handler)
        self._task: Any = ray.remote(_by_value(_perform))
        # Ray prints what happens to its workers; stdout is for the result alone.
        self._printing = contextlib.ExitStack()
        self._printing.enter_context(contextlib.redirect_stdout(sys.stderr))
        # A lost task is repeated by Remote, which counts.
        self._options = {"max_retries": 0, **options}
        self._asked = {_AMOUNTS[name]: amount for name, amount in options.items()}
        self._folder = folder.resolve() / FOLDER
        shutil.rmtree(self._folder, ignore_errors=True)  # tasks end with the command
        self._folder.mkdir(parents=True, exist_ok=True)
        self._avoided = Avoided(say)
        self._say = say
        self._told = 0.0
        if problem := lacking(self._asked or {"CPU": 1.0}, self._nodes()):
            self.close()
            raise MachineError(problem, "Ask for less with --executor-arg num_cpus=, memory=, ….")

    def submit(self, name: str, call: Call) -> Job:
        mark = self._folder / uuid.uuid4().hex
        options = {"name": name, **self._options}
        if self._avoided.reasons:
            from ray.util.scheduling_strategies import NodeLabelSchedulingStrategy, NotIn

            options["scheduling_strategy"] = NodeLabelSchedulingStrategy(
                hard={"ray.io/node-id": NotIn(*self._avoided.reasons)}
            )
        reference = self._task.options(**options).remote(str(mark), call.arguments)
        return RayJob(self, self._ray, reference, mark)

    def avoid(self, node: str, why: str) -> None:
        self._avoided.add(node, why)
        if not node or {n["NodeID"] for n in self._nodes()} <= self._avoided.reasons.keys():
            raise self._avoided.none_left()

    def waits(self, seconds: float) -> None:
        """Tells that a task has waited for so long, once in a while."""
        if seconds >= SILENCE and time.monotonic() - self._told >= 10 * SILENCE:
            self._told = time.monotonic()
            free = self._ray.available_resources()
            amounts = ", ".join(
                f"{name} {free.get(name, 0):g} free, {amount:g} asked"
                for name, amount in (self._asked or {"CPU": 1.0}).items()
            )
            self._say(f"waiting for a free node of the Ray cluster: {amounts}")

    def close(self) -> None:
        with self._printing:
            self._ray.shutdown()
        self._avoided.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _nodes(self) -> list[dict[str, Any]]:
        return [node for node in self._ray.nodes() if node["Alive"]]


class RayJob(Job):
    def __init__(self, executor: RayTasks, ray: Any, reference: Any, mark: Path) -> None:
        self._executor = executor
        self._ray = ray
        self._reference = reference
        self._mark = mark
        self._submitted = time.monotonic()

    def reply(self) -> Reply | None:
        ray = self._ray
        done, _ = ray.wait([self._reference], timeout=0)
        if not done:
            self.running = self.running or self._mark.exists()
            if not self.running:
                self._executor.waits(time.monotonic() - self._submitted)
            return None
        self._mark.unlink(missing_ok=True)
        try:
            node, reply, why = ray.get(self._reference)
        except ray.exceptions.RayError as error:
            raise Lost(_line(error)) from error
        return Reply(unfit=why, node=node) if why else dataclasses.replace(reply, node=node)

    def cancel(self) -> None:
        self._ray.cancel(self._reference, force=True)
        self._mark.unlink(missing_ok=True)


def lacking(asked: Mapping[str, float], nodes: Sequence[Mapping[str, Any]]) -> str:
    """Returns why no node can ever run a task, "" if one can. A cluster that starts nodes when they
    are needed may have none of them yet; ray labels its nodes with their group."""
    if any("ray.io/node-group" in node.get("Labels", {}) for node in nodes):
        return ""
    every = [node["Resources"] for node in nodes]
    if any(all(has.get(name, 0) >= amount for name, amount in asked.items()) for has in every):
        return ""
    most = (
        f"{name} {amount:g} (the largest has {max((h.get(name, 0) for h in every), default=0):g})"
        for name, amount in asked.items()
    )
    return f"no node of the Ray cluster has what a task asks for: {', '.join(most)}"


def _perform(mark: str, arguments: tuple[Any, ...]) -> tuple[str, Any, str]:
    """Returns (node, reply, why this node cannot run anything). Runs on a worker that may lack
    moediag, so it uses no name of this module."""
    import contextlib
    import pathlib
    import socket

    import ray

    node = ray.get_runtime_context().get_node_id()
    try:
        from moediag.lab.campaign.executors.worker import perform
    except Exception as error:
        return node, None, f"the worker on {socket.gethostname()} cannot start moediag: {error}"
    with contextlib.suppress(OSError):  # perform says what this machine does not see
        pathlib.Path(mark).touch()
    return node, perform(*arguments), ""


def _by_value(function: Any) -> Any:
    """Returns the function such that ray sends its code instead of its name."""
    alone = types.FunctionType(function.__code__, {"__builtins__": __builtins__}, "perform")
    alone.__module__ = "__main__"
    return alone


def _listens(address: str) -> None:
    """Raises MachineError if nothing listens at HOST:PORT: ray waits many minutes for it."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECTING).close()
    except (OSError, OverflowError) as error:
        raise _unreached(address, error) from error


def _unreached(where: str, error: BaseException) -> MachineError:
    if "InvalidAuthToken" in "".join(traceback.format_exception(error)):
        return MachineError(
            f"the Ray cluster on {where} requires a token; this command gave none or a wrong one",
            "Type: export RAY_AUTH_MODE=token   (ray reads it from ~/.ray/auth_token or "
            "RAY_AUTH_TOKEN)",
        )
    return MachineError(
        f"no Ray cluster can be reached on {where}: {_line(error)}",
        "Type `ray status` to check it; name another one with --executor-arg address=….",
    )


def _number(key: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"--executor-arg {key}={text}: {text!r} is not a number") from None


def _line(error: BaseException) -> str:
    said = str(error).strip().splitlines()
    return said[0] if said else type(error).__name__
