"""Files that a rank simulated before this one wrote.

In the job all ranks run at once. Whether a file of another rank exists when this rank looks is only
certain after a call that both make; before it, the look may decide by what the job does not have.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, Callable, Dict, List, Tuple

import torch

_FILE = "rank-{}.written.json"
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
# Caches, whose content does not depend on who wrote it, and devices.
_SHARED = ("/.cache/", "/__pycache__/", "/dev/", "/proc/", "/site-packages/")


class WrittenFiles:
    """``issued``: the number of this rank's recorded calls; ``read``: called with a path that this
    rank looks at too early."""

    def __init__(
        self, folder: Path, rank: int, issued: Callable[[], int], read: Callable[[str], None]
    ) -> None:
        self._folder = str(folder)
        self._own = folder / _FILE.format(rank)
        self._issued = issued
        self._read = read
        self._pid = os.getpid()
        self._written: Dict[str, int] = {}  # path -> calls of this rank before
        self._others: Dict[str, int] = {}  # path -> calls of the other rank before
        for path in folder.glob(_FILE.format("*")):
            if path != self._own:
                for name, calls in json.loads(path.read_text(encoding="utf-8")).items():
                    self._others[name] = max(calls, self._others.get(name, 0))
                    parent = str(Path(name).parent)
                    self._others[parent + os.sep] = max(calls, self._others.get(parent, 0))
        sys.addaudithook(self._audit)

    def replacements(self) -> List[Tuple[Any, str, Any]]:
        """Returns what replaces functions of which Python tells no audit hook."""
        look, save = os.stat, torch.save

        def stat(path: Any, *args: Any, **kwargs: Any) -> Any:
            if self._others:
                self._looked(path, "")
            return look(path, *args, **kwargs)

        def saved(obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(f, (str, os.PathLike)):
                self._wrote(f)
            return save(obj, f, *args, **kwargs)

        return [(os, "stat", stat), (torch, "save", saved)]

    def keep(self) -> None:
        """Writes what this rank has written, for the ranks after it."""
        if self._written:
            self._own.write_text(json.dumps(self._written), encoding="utf-8")

    def _audit(self, event: str, args: Tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = args
            if isinstance(flags, int) and flags & _WRITES:
                self._wrote(path)
            elif self._others:
                self._looked(path, "")
        elif event in ("os.listdir", "os.scandir"):
            if self._others:
                self._looked(args[0] or ".", os.sep)
        elif event == "os.rename":
            self._wrote(args[1])

    def _wrote(self, path: Any) -> None:
        name = self._name(path)
        if name and os.getpid() == self._pid:
            self._written.setdefault(name, self._issued())

    def _looked(self, path: Any, end: str) -> None:
        name = self._name(path)
        calls = self._others.get(name + end) if name else None
        if calls is not None and self._issued() <= calls and os.getpid() == self._pid:
            self._read(f"{Path(name).name}, a file of another rank")

    def _name(self, path: Any) -> str:
        """Returns the absolute path; "" for what is no path, and for shared files."""
        if isinstance(path, int) or path is None:
            return ""
        name = os.path.abspath(os.fsdecode(path))  # noqa: PTH100 - resolves no link
        shared = name.startswith(self._folder) or any(part in name for part in _SHARED)
        return "" if shared else name
