"""Which files of a job are the user's own code and which belong to installed libraries.

A rank records the folders of its libraries (:func:`moediag.recorder.library_folders`), and those
decide. What other tools left has no such record; then the path decides, by what only an
installation has: ``site-packages``, ``lib/python3.12``, modules that only torch or moediag has.
A folder that merely shares a library's name (``~/torch``, ``~/moediag``) is the user's.
"""

from __future__ import annotations

import os.path
import re
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import List, Optional, Sequence

_INSTALLED = re.compile(r"[/\\](?:site|dist)-packages[/\\]|[/\\]lib(?:64)?[/\\]python\d[\d.]*[/\\]")
# Python names these frames after no file; the user may have typed the code behind them.
_TYPED = ("<string>", "<stdin>", "<ipython-input")
# torch from a source checkout: each of these names the folder that torch is in.
_ONLY_TORCH = re.compile(
    r"(.*[/\\]torch[/\\])(?:distributed/(?:distributed_c10d|c10d_logger)|autograd/(?:__init__|graph)"
    r"|nn/modules/module|utils/(?:_contextlib|data/dataloader)|_dynamo/eval_frame|_ops|_tensor)\.py$"
)
# A module that torch.compile wrote: a hash in base 32, in a folder of two of its letters.
_COMPILED = re.compile(r"[/\\]([a-z2-7]{2})[/\\]c\1[a-z2-7]{49}\.py$")
# Cython tells the path from where the library was built: ``pyarrow/error.pxi``.
_CYTHON = re.compile(r"(?![/\\]).*\.(pyx|pxi|pxd)$")
_MOEDIAG = os.path.dirname(os.path.dirname(__file__))  # noqa: PTH120 - imports less than pathlib


def innermost_user(files: Sequence[str], folders: Sequence[str] = ()) -> Optional[int]:
    """The index of the first of ``files`` (of one stack, innermost first) that is the user's own;
    None where all belong to libraries. ``folders``: what the rank recorded, if it did."""
    return next((at for at, other in enumerate(in_libraries(files, folders)) if not other), None)


def in_libraries(files: Sequence[str], folders: Sequence[str] = ()) -> List[bool]:
    """For each of ``files`` of one stack whether it belongs to an installed library."""
    if folders:
        roots = tuple(f if f.endswith(("/", "\\")) else f"{f}/" for f in folders)
        return [_generated(file) or file.startswith(roots) for file in files]
    roots = tuple({found[1] for file in files if (found := _ONLY_TORCH.match(file))})
    return [
        _generated(file)
        or _INSTALLED.search(file) is not None
        or file.startswith(roots)
        or is_moediag(file)
        for file in files
    ]


def is_moediag(file: str) -> bool:
    """Whether ``file`` is a module of one of moediag's packages, wherever it is installed; other
    files in a folder of that name are the user's."""
    _, found, module = file.rpartition("/moediag/")
    return bool(found) and "/" in module and _is_module(module)


@lru_cache(maxsize=1024)
def _is_module(path: str) -> bool:
    return path.endswith(".py") and os.path.isfile(f"{_MOEDIAG}/{path}")  # noqa: PTH113 - no file has an endless name


def _generated(file: str) -> bool:
    if file.startswith("<"):
        return not file.startswith(_TYPED)
    return _CYTHON.match(file) is not None or _COMPILED.search(file) is not None
