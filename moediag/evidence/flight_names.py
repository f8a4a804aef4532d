"""Plain names for operations and dtypes as torch's Flight Recorder and watchdog call them."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from moediag.protocol import innermost_user

_LONGEST = 1000  # characters of a profiling_name
_PROFILED = re.compile(
    r"^(?:(?P<backend>\w+):)?(?P<op>\S+)(?: (?P<own>\d{1,7})(?:->|<-)(?P<peer>\d{1,7}))?$"
)
_DECORATION = re.compile(r"^_+|_(?:base|oop|single|sparse|coalesced|into_tensor|tensor|v)(?=_|$)")
_PLAIN = {"allreduce": "all_reduce", "allgather": "all_gather", "alltoall": "all_to_all",
          "reducescatter": "reduce_scatter", "sparse_all_reduce": "all_reduce",
          "all_reduce_barrier": "barrier"}  # fmt: skip
_DTYPES = {"float": "float32", "double": "float64", "half": "float16", "long": "int64",
           "int": "int32", "short": "int16", "char": "int8", "byte": "uint8"}  # fmt: skip


def user_site(frames: Any) -> str:
    """The innermost frame of the user's own code as ``file.py:12 function``, else the innermost of
    all; innermost frames come first. A dump does not say where its libraries are installed."""
    usable = tuple([_frame(f) for f in frames if isinstance(f, dict)])
    return _user_site(usable) if usable else ""


def _frame(frame: dict[str, Any]) -> tuple[str, int | str, str]:
    """File, line and function, of limited length."""
    file, line, name = frame.get("filename"), frame.get("line"), frame.get("name")
    if type(file) is type(name) is str and type(line) is int and len(file) + len(name) < 120:
        return file, line, name
    return plain_text(file)[-400:], plain_text(line)[:9], plain_text(name)[:120]


@lru_cache(maxsize=1024)  # the dumps of a job have the same stacks
def _user_site(usable: tuple[tuple[str, int | str, str], ...]) -> str:
    at = innermost_user([plain_text(file) for file, _, _ in usable]) or 0
    file, line, function = (plain_text(part) for part in usable[at])
    return f"{file.rpartition('/')[2]}:{line[:9] or 0} {function or '?'}"


@lru_cache(maxsize=4096)
def plain_op(name: str) -> str:
    """``all_gather`` for ``_all_gather_base``, ``ALLGATHER_coalesced`` and the like.

    An unknown name is returned in lower case.
    """
    lower = name.lower()
    if lower == "coalesced":
        return lower
    op = _DECORATION.sub("", lower)
    return _PLAIN.get(op, op)


@lru_cache(maxsize=4096)
def profiled(name: str) -> tuple[str, str, int | None, int | None]:
    """Backend, operation, own place and peer of a ``profiling_name`` such as ``nccl:send 0->1``.
    Raises ValueError for any other text."""
    found = _PROFILED.match(plain_text(name)) if len(name) <= _LONGEST else None
    if found is None:
        raise ValueError("profiling_name")
    place, peer = (None if text is None else int(text) for text in found.group("own", "peer"))
    return (found["backend"] or "").lower(), plain_op(found["op"]), place, peer


def plain_dtype(name: str) -> str:
    """``Float`` -> ``float32``, ``BFloat16`` -> ``bfloat16``."""
    lower = name.lower()
    return _DTYPES.get(lower, lower)


def plain_text(value: Any) -> str:
    """Printable text of a text or a number; "" for anything else."""
    if isinstance(value, str):
        # A lone surrogate cannot be written to any file or terminal.
        return value if value.isascii() else value.encode("utf-8", "replace").decode()
    return str(value) if type(value) is int else ""
