"""Where a call comes from: its innermost line outside torch, and the user's lines that led there.

Training and evaluation often share the innermost line; the lines around it tell them apart.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any, Dict, List, Tuple

import torch

from moediag.recorder.log import EventLog
from moediag.recorder.user_lines import UserLines

_TORCH = str(Path(torch.__file__).parent) + os.sep
_ENGINE = f"{_TORCH}autograd{os.sep}"
_PACKAGE = Path(__file__).parents[1]
# This package, and what answers the calls of simulated ranks.
_OWN = tuple(f"{p}{os.sep}" for p in (_PACKAGE / "recorder", _PACKAGE / "lab" / "simulation"))
_DECORATORS = ("typing_extensions.py", "contextlib.py", "functools.py", "<string>")
# DeepSpeed's wrapper of torch.distributed: all its calls would have the same few sites.
_LAYERS = (f"{os.sep}deepspeed{os.sep}comm{os.sep}", f"{os.sep}deepspeed{os.sep}utils{os.sep}nvtx")
_MAX_FRAMES = 96  # searched; the backward of a deep model has about 40
_MAX_CALLERS = 3
_MAX_KNOWN = 10_000  # chains whose text is kept

_TORCHS, _PLUMBING, _LIBRARY, _USER = range(4)  # what a file is


class CallSites:
    """Describes the place of a call as the JSON fields ``site`` and ``callers``."""

    def __init__(self, log: EventLog, user: UserLines) -> None:
        self._log = log
        self._user = user
        self._kinds: Dict[str, int] = {}  # file name -> what it is
        # Id of the code and instruction of each frame -> JSON, and the codes: while they live, no
        # other code has their ids. Hashing a code reads all of it, and a line has to be decoded.
        self._texts: Dict[Tuple[int, ...], Tuple[str, List[Any]]] = {}

    def fields(self, frame: Any) -> str:
        """``site`` is the first frame outside torch and outside wrappers, ``callers`` up to three
        user's frames around it. In autograd's own thread, where all frames are torch's, they are
        those of the main thread, which waits for it; else ``site`` is the innermost frame."""
        key, frames, fallback = self._chain(frame)
        if not frames:
            key, frames, _ = self._chain(_backward())
        if not frames and fallback is not None:
            key, frames = [id(fallback.f_code), fallback.f_lasti], [fallback]
        known = self._texts.get(tuple(key))
        return self._text(tuple(key), frames) if known is None else known[0]

    def _chain(self, frame: Any) -> Tuple[List[int], List[Any], Any]:
        """The key and the frames of a place, and torch's innermost frame, from ``frame`` on."""
        kinds = self._kinds
        key: List[int] = []
        frames: List[Any] = []
        fallback = None
        for _ in range(_MAX_FRAMES):
            if frame is None:
                break
            code = frame.f_code
            kind = kinds.get(code.co_filename)
            if kind is None:
                kind = self._kind(code.co_filename)
            if kind == _USER or (not frames and kind == _LIBRARY):
                key += (id(code), frame.f_lasti)
                frames.append(frame)
                if len(frames) > _MAX_CALLERS:
                    break
            elif kind == _TORCHS and fallback is None:
                fallback = frame
            frame = frame.f_back
        return key, frames, fallback

    def _text(self, key: Tuple[int, ...], frames: List[Any]) -> str:
        if len(self._texts) > _MAX_KNOWN:
            self._texts.clear()
        lines = [
            f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}"
            for frame in frames
        ]
        site = json.dumps(lines[0] if lines else "")
        callers = self._log.names(tuple(lines[1:])) if len(lines) > 1 else "null"
        text = f'"site":{site},"callers":{callers}'
        self._texts[key] = text, [frame.f_code for frame in frames]
        return text

    def _kind(self, file: str) -> int:
        if file.startswith(_TORCH):
            found = _TORCHS
        elif file.startswith(_OWN) or file.endswith(_DECORATORS) or any(a in file for a in _LAYERS):
            found = _PLUMBING
        else:
            found = _USER if self._user.is_user(file) else _LIBRARY
        self._kinds[file] = found
        return found


def _backward() -> Any:
    """The frame of the main thread if another thread asks and it waits there for autograd's."""
    main = threading.main_thread().ident
    frame = None if threading.get_ident() == main else sys._current_frames().get(main or 0)
    return frame if frame is not None and frame.f_code.co_filename.startswith(_ENGINE) else None
