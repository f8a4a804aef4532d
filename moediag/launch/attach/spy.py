"""Python frames of a running process by py-spy, and the numbers among their local variables."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from moediag.evidence.looks import COUNTERS
from moediag.launch.attach.proc import Proc
from moediag.launch.capture.py_spy import Dump as Dump
from moediag.launch.capture.py_spy import frames_of, main_frames, run, threads
from moediag.masking import is_secret
from moediag.protocol import in_libraries

NO_TOOL = "py-spy missing"
REFUSED = "ptrace refused"
_NUMBER = re.compile(r"-?\d{1,18}(?:\.\d{1,18})?(?:e[+-]?\d{1,3})?|True|False|None")
_MOST_VALUES = 8
_SPAWN = "torch/multiprocessing/spawn.py"
_RANKS = ("global_rank", "world_rank", "rank")


def dump(pid: int, seconds: float, *, pause: bool = True, local_values: bool = True) -> Dump:
    """The stacks of all threads of ``pid``. ``pause``: stop it for the milliseconds that this
    takes, which a process that runs needs and one that sleeps does not."""
    options = ["--json", *(["--locals"] if local_values else [])]
    options += [] if pause else ["--nonblocking"]
    return _run(pid, options, seconds)


def native(pid: int, seconds: float) -> Dump:
    """The same with native frames. This takes a second and stops the process meanwhile."""
    return _run(pid, ["--native", "--json"], seconds)


def _run(pid: int, options: list[str], seconds: float) -> Dump:
    made = run(["py-spy", "dump", *options, "-p", str(pid)], seconds)
    inner = Proc().inner_threads(pid) if made.json else {}
    return Dump(seen_from_here(made.json, inner), made.lost)


def seen_from_here(found: bytes, inner: Mapping[int, tuple[int, str]]) -> bytes:
    """The dump of a process in an inner pid namespace, with the numbers that its threads have here
    and whether they run: py-spy knows neither. ``inner``: see :meth:`.Proc.inner_threads`."""
    if not inner:
        return found
    every = threads(found)
    for thread in every:
        number, state = inner.get(thread.get("os_thread_id") or 0, (0, ""))
        if number:
            thread |= {"os_thread_id": number, "active": state == "R"}
    return json.dumps(every).encode()


def places(found: bytes) -> tuple[tuple[str, str, object], ...]:
    """(file, function, line) of the main thread's Python frames, innermost first."""
    return tuple(
        (str(f.get("filename")), str(f.get("name")), f.get("line"))
        for f in main_frames(found)
        if str(f.get("filename", "")).endswith((".py", ">"))
    )


def values(found: bytes) -> dict[str, str]:
    """Numbers among the local variables of the user's functions on the main thread, counters of the
    run first; of a name that several have, the innermost one."""
    numbers: dict[str, str] = {}
    for name, text in _locals(users_frames(found)):
        numbers.setdefault(name, text)
    names = sorted(numbers, key=lambda name: name not in COUNTERS)
    return {name: numbers[name] for name in names[:_MOST_VALUES]}


def rank_of(found: bytes) -> int | None:
    """The rank that a process gave itself, by its local variables: the number that
    ``torch.multiprocessing.spawn`` passed, else a variable named after it."""
    frames = main_frames(found)
    spawned = [f for f in frames if str(f.get("filename", "")).endswith(_SPAWN)]
    numbers = dict(_locals(f for f in spawned if f.get("name") == "_wrap"))
    users = dict(reversed([*_locals(_users(frames))]))
    for text in (*(users.get(name, "") for name in _RANKS), numbers.get("i", "")):
        if text.isdecimal():
            return int(text)
    return None


def without_text(found: bytes) -> bytes:
    """The dump with only the numbers among its local variables: others may be secret."""
    every = threads(found)
    for thread in every:
        for frame in frames_of(thread):
            if frame.get("locals"):
                frame["locals"] = [v for v in _variables(frame) if _is_number(v)]
    return json.dumps(every).encode()


def users_frames(found: bytes) -> Iterator[Mapping[str, Any]]:
    """The main thread's frames in the user's files, innermost first."""
    return _users(main_frames(found))


def _users(frames: list[dict[str, object]]) -> Iterator[Mapping[str, Any]]:
    files = [str(frame.get("filename", "")) for frame in frames]
    for frame, other in zip(frames, in_libraries(files), strict=True):
        if not other:
            yield frame


def _locals(frames: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    for frame in frames:
        for variable in _variables(frame):
            if _is_number(variable):
                yield str(variable.get("name")), str(variable.get("repr"))


def _variables(frame: Mapping[str, Any]) -> list[Any]:
    found = frame.get("locals")
    return found if isinstance(found, list) else []


def _is_number(variable: Any) -> bool:
    if not isinstance(variable, dict) or is_secret(str(variable.get("name"))):
        return False
    return bool(_NUMBER.fullmatch(str(variable.get("repr"))))
