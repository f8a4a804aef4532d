"""Tells the user's files from those of libraries, and finds the user's line in a stack."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, List

from moediag import protocol
from moediag.recorder.library_folders import library_folders
from moediag.recorder.log import EventLog


class UserLines:
    """Looks at each file once. A user's file is recorded with its path, so that its source can be
    found."""

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self._known: Dict[str, bool] = {}
        self._folders: List[str] = []

    def is_user(self, file: str) -> bool:
        found = self._known.get(file)
        if found is None:
            self._folders = self._folders or library_folders()
            found = self._known[file] = not protocol.in_libraries([file], self._folders)[0]
            if found:
                self._log.event("file", keep=True, path=file)
        return found

    def innermost(self, frame: Any) -> str:
        """``train.py:12 function`` of the first user's frame from ``frame`` outwards, or ""."""
        while frame is not None:
            code = frame.f_code
            if self.is_user(code.co_filename):
                return f"{Path(code.co_filename).name}:{frame.f_lineno} {code.co_name}"
            frame = frame.f_back
        return ""
