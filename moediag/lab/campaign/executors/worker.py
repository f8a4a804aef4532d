"""The worker's side: checks that this machine fits, then runs the call."""

from __future__ import annotations

import os
import pickle
import socket
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import moediag
from moediag.errors import MoediagError
from moediag.lab.campaign.executors.executor import Reply

KEPT = 2  # makers; each may keep a process that imported torch
_makers: dict[bytes, Any] = {}  # least recently used first


def perform(
    work: bytes, version: str, tokens: Mapping[str, str], environment: Mapping[str, str]
) -> Reply:
    """Runs a call of this release of moediag; see :class:`~.executor.Call`. Raises nothing."""
    problem = unfit(version, tokens)
    if problem:
        node = os.environ.get("SLURMD_NODENAME", "")
        return Reply(unfit=f"the worker on {node or socket.gethostname()} {problem}", node=node)
    os.environ.update(environment)
    try:
        return Reply(pickle.loads(work)())  # noqa: S301 - from the command that submitted it
    except MoediagError as error:
        return Reply(error=error)
    except Exception:
        return Reply(bug=traceback.format_exc())


def unfit(version: str, tokens: Mapping[str, str]) -> str:
    """Returns why this machine cannot run it, "" if it can."""
    if version != moediag.__version__:
        return f"has moediag {moediag.__version__}, this machine has {version}"
    for name, content in tokens.items():
        path = Path(name)
        try:
            seen = path.read_text(encoding="utf-8")
        except OSError:
            seen = ""
        if seen != content:
            return f"does not see the folder {path.parent} of this machine"
    return ""


def on_maker(make: bytes, method: str, *arguments: Any) -> Any:
    """Calls a method of what ``make``, a pickled callable, returns. This process keeps it for the
    next call: what it imported is then warm."""
    maker = _makers.pop(make, None)
    if maker is None:
        maker = pickle.loads(make)()  # noqa: S301 - from the command that submitted it
    _makers[make] = maker
    for spare in list(_makers)[:-KEPT]:
        _makers.pop(spare).close()
    return getattr(maker, method)(*arguments)


def close() -> None:
    """Closes the makers that this process keeps."""
    while _makers:
        _makers.popitem()[1].close()
