"""The Flight Recorder of all ranks, also of those on other machines, from torch's debug server
(``torch.distributed.debug.start_debug_server``), if the job has started it.

Rank 0 has it as a child process. Only a process that shows that server on its stack is asked, at
the port that it does not share with its rank: other sockets of a rank, such as gloo's, must not get
a connection from outside.
"""

from __future__ import annotations

import html
import os
import re
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

from moediag.launch.attach import spy
from moediag.launch.attach.proc import LISTENS, Proc, below
from moediag.launch.capture.py_spy import frames_of, threads
from moediag.protocol import parse_json

SECONDS = 20.0  # the first dump of a rank takes seconds
_SPY = 5.0  # seconds
_MOST_BYTES = 256 << 20
_FRONTEND = "torch/distributed/debug/_frontend.py"
_RANK = re.compile(r"<h2>Rank ([0-9]{1,7}):[^<]*</h2>(.*?)(?=<h2>Rank|\Z)", re.DOTALL)
_ANSWER = re.compile(r"<pre>(.*?)</pre>", re.DOTALL)


def ask(capture: Path, pids: Sequence[int], proc: Proc) -> list[str]:
    """Writes each rank's dump into ``capture``, unless there is one; returns what is missing."""
    port = find(pids, proc)
    if port is None:
        return []
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://127.0.0.1:{port}/fr_trace_json", timeout=SECONDS) as answer:
            page = answer.read(_MOST_BYTES).decode("utf-8", "replace")
    except (OSError, ValueError) as error:
        return [f"torch's debug server at port {port} ({error})"]
    found = dict(dumps(page))
    for rank, text in found.items():
        path = capture / f"rank-{rank}.flight"
        if not path.exists():
            path.write_text(text, encoding="utf-8")
    return [] if found else [f"torch's debug server at port {port} (no rank answered it)"]


def find(pids: Sequence[int], proc: Proc) -> int | None:
    """The port of the server that a child of one of the ranks ``pids`` runs."""
    owner = proc.owner(pids[0]) if pids else None
    every = proc.owned(owner) if owner is not None else {}
    here = proc.link(os.getpid(), "ns/net")
    for pid in pids:
        if proc.link(pid, "ns/net") != here:
            continue  # in a container: the port there is not the port here
        for child in below(pid, every):
            own = _ports(proc, child) - _ports(proc, pid)
            if len(own) == 1 and _serves(child):
                return own.pop()
    return None


def _ports(proc: Proc, pid: int) -> set[int]:
    return {int(end.rpartition(":")[2], 16) for end, _ in proc.connections(pid, LISTENS)}


def _serves(pid: int) -> bool:
    found = threads(spy.dump(pid, _SPY, local_values=False).json)
    frames = [frame for thread in found for frame in frames_of(thread)]
    return any(str(frame.get("filename", "")).endswith(_FRONTEND) for frame in frames)


def dumps(page: str) -> Iterator[tuple[int, str]]:
    """Yields (rank, dump as JSON) of the server's page."""
    for number, part in _RANK.findall(page):
        answer = _ANSWER.search(part)
        text = html.unescape(answer[1]) if answer is not None else ""
        try:
            raw = parse_json(text)
        except ValueError:
            continue
        if isinstance(raw, dict) and raw.get("entries"):
            yield int(number), text
