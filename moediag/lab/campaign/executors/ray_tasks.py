"""Ray: a job is a task."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Mapping
from typing import Any

from moediag.errors import MachineError, UsageError
from moediag.lab.campaign.executors.executor import Call, Executor, Job, Lost, Reply
from moediag.lab.campaign.executors.worker import perform
from moediag.launch import signals

KEYS = ("address", "num_cpus", "num_gpus", "memory")
PACKAGE = "ray"
CONNECTING = 10.0  # seconds
NEEDS = "Type: pip install 'moediag[ray]'   (on this machine and on every worker)"


class RayTasks(Executor):
    """Without ``address``, and without RAY_ADDRESS, the running cluster of this machine, else a new
    one on it."""

    def __init__(self, arguments: Mapping[str, str]) -> None:
        """Raises UsageError for a value that is not a number, MachineError if the cluster cannot be
        reached."""
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
        self._task: Any = ray.remote(perform)
        # Ray prints what happens to its workers; stdout is for the result alone.
        self._printing = contextlib.ExitStack()
        self._printing.enter_context(contextlib.redirect_stdout(sys.stderr))
        # A lost task is repeated by Remote, which counts.
        self._options = {"max_retries": 0, **options}

    def submit(self, name: str, call: Call) -> Job:
        return _Task(
            self._ray, self._task.options(name=name, **self._options).remote(*call.arguments)
        )

    def close(self) -> None:
        with self._printing:
            self._ray.shutdown()


class _Task(Job):
    def __init__(self, ray: Any, reference: Any) -> None:
        self._ray = ray
        self._reference = reference

    def reply(self) -> Reply | None:
        ray = self._ray
        done, _ = ray.wait([self._reference], timeout=0)
        if not done:
            return None
        try:
            reply: Reply = ray.get(self._reference)
        except ray.exceptions.RayTaskError as error:
            raise MachineError(
                f"a Ray worker cannot start moediag: {_line(error.cause)}", NEEDS
            ) from error
        except ray.exceptions.RayError as error:
            raise Lost(_line(error)) from error
        return reply

    def cancel(self) -> None:
        self._ray.cancel(self._reference, force=True)


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
