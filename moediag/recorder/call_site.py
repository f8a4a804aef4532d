"""Where a call comes from: its innermost line outside torch, and the user's lines that led there.

Training and evaluation often share the innermost line; the lines around it tell them apart.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Dict, List, Tuple

import torch

from moediag import protocol
from moediag.recorder.library_folders import library_folders
from moediag.recorder.log import EventLog

_TORCH = str(Path(torch.__file__).parent) + os.sep
_OWN = str(Path(__file__).parent) + os.sep
_DECORATORS = ("typing_extensions.py", "contextlib.py", "functools.py", "<string>")
# DeepSpeed's wrapper of torch.distributed: all its calls would have the same few sites.
_LAYERS = (f"{os.sep}deepspeed{os.sep}comm{os.sep}", f"{os.sep}deepspeed{os.sep}utils{os.sep}nvtx")
_MAX_FRAMES = 96  # searched; the backward of a deep model has about 40
_MAX_CALLERS = 3
_MAX_KNOWN = 10_000  # chains whose text is kept

_TORCHS, _PLUMBING, _LIBRARY, _USER = range(4)  # what a file is


class CallSites:
    """Describes the place of a call as the JSON fields ``site`` and ``callers``."""

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self._kinds: Dict[str, int] = {}  # file name -> what it is
        self._texts: Dict[Tuple[Any, ...], str] = {}  # code and line of each frame -> JSON
        self._folders: List[str] = []

    def fields(self, frame: Any) -> str:
        """``site`` is the first frame outside torch and outside wrappers, ``callers`` up to three
        user's frames around it. In autograd's own thread, where all frames are torch's, ``site`` is
        the innermost frame."""
        kinds = self._kinds
        chain: List[Any] = []
        site = fallback = None
        for _ in range(_MAX_FRAMES):
            if frame is None:
                break
            code = frame.f_code
            kind = kinds.get(code.co_filename)
            if kind is None:
                kind = self._kind(code.co_filename)
            if site is None:
                if kind >= _LIBRARY:
                    site = frame
                    chain = [code, frame.f_lineno]
                elif kind == _PLUMBING and fallback is None:
                    fallback = frame
            elif kind == _USER:
                chain += (code, frame.f_lineno)
                if len(chain) > 2 * _MAX_CALLERS:
                    break
            frame = frame.f_back
        if site is None and fallback is not None:
            chain = [fallback.f_code, fallback.f_lineno]
        key = tuple(chain)
        text = self._texts.get(key)
        return self._text(key) if text is None else text

    def _text(self, chain: Tuple[Any, ...]) -> str:
        if len(self._texts) > _MAX_KNOWN:
            self._texts.clear()
        lines = [
            f"{Path(code.co_filename).name}:{number} {code.co_name}"
            for code, number in zip(chain[::2], chain[1::2])  # noqa: B905 - Python 3.9
        ]
        site = json.dumps(lines[0] if lines else "")
        callers = self._log.names(tuple(lines[1:])) if len(lines) > 1 else "null"
        text = self._texts[chain] = f'"site":{site},"callers":{callers}'
        return text

    def _kind(self, file: str) -> int:
        if file.startswith(_TORCH):
            found = _TORCHS
        elif file.startswith(_OWN) or file.endswith(_DECORATORS) or any(a in file for a in _LAYERS):
            found = _PLUMBING
        else:
            self._folders = self._folders or library_folders()
            found = _LIBRARY if protocol.in_libraries([file], self._folders)[0] else _USER
        self._kinds[file] = found
        return found
