"""Runs a user's program as one rank of a job whose other ranks do not exist.

The program's own ``init_process_group`` and ``new_group`` create fake process groups of the size
that the environment says. The program runs until an optimizer has made the requested steps.
"""

from __future__ import annotations

import atexit
import functools
import inspect
import os
import sys
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch

from moediag.lab.simulation.answers import RootPayloads
from moediag.lab.simulation.unreal_data import UnrealData
from moediag.lab.simulation.written_files import WrittenFiles
from moediag.protocol import SimulatedRank, innermost_user
from moediag.recorder.core import Recorder
from moediag.recorder.library_folders import library_folders

_TORCH = str(Path(torch.__file__).parent) + os.sep
_OWN = str(Path(__file__).parent) + os.sep
_RECORDER = str(Path(__file__).parents[2] / "recorder") + os.sep
_OF_BACKENDS = ("backend", "pg_options", "device_id")


class ProgramRank:
    """This process. ``module`` is torch.distributed.distributed_c10d, ``steps`` the optimizer steps
    after which the program ends."""

    def __init__(self, module: Any, folder: Path, steps: int) -> None:
        self._module = module
        self._folder = folder
        self._steps = steps
        self._pid = os.getpid()
        self._recorder: Optional[Recorder] = None
        self._answer = SimulatedRank(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
        self._files = WrittenFiles(folder, self._answer.rank, self._issued, self._read)
        self._made: Dict[int, int] = {}  # id of an optimizer -> its steps
        self._keep: List[Any] = []  # those optimizers: ids stay theirs

    def install(self, recorder: Callable[[], Any]) -> None:
        """Replaces what creates process groups. ``recorder``: that of this rank, once it runs."""
        module = self._module
        for owner, name, new in self._files.replacements():
            setattr(owner, name, new)
        atexit.register(self._files.keep)
        module.init_process_group = self._joining(module.init_process_group, recorder)
        module.new_group = _faked(module.new_group)

    def _joining(self, original: Any, recorder: Callable[[], Any]) -> Any:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def init_process_group(*args: Any, **kwargs: Any) -> None:
            from torch.testing._internal.distributed.fake_pg import FakeStore

            given = signature.bind(*args, **kwargs).arguments
            answer = self._answer
            own = {"rank": answer.rank, "world_size": answer.world_size}
            if any(given.get(name, -1) not in (None, -1, own[name]) for name in own):
                self._tell(
                    problem="it starts its ranks itself; give the program that one rank runs"
                )
                self._leave()
            original("fake", store=FakeStore(), **own)
            if self._recorder is None:
                self._begin(recorder())

        return init_process_group

    def _begin(self, recorder: Any) -> None:
        """Follows the program from the first process group on."""
        if recorder is None:
            self._tell(problem="its calls could not be recorded")
            self._leave()
        self._recorder = recorder
        payloads = RootPayloads(self._folder, recorder, self._real)
        self._data = UnrealData(self._read, payloads.known)
        for owner, name, new in self._data.replacements():
            setattr(owner, name, new)
        self._data.__enter__()
        recorder.hooks.after_step(self._stepped)
        self._tell()

    def _issued(self) -> int:
        return self._recorder.issued if self._recorder is not None else 0

    def _real(self, tensors: List[torch.Tensor]) -> bool:
        return not self._answer.read and not any(map(self._data.marked, tensors))

    def _read(self, what: str) -> None:
        """Records the first read of data that other ranks would have sent."""
        if self._answer.read:
            return
        frames = _frames()
        if frames and frames[0][0].startswith(_RECORDER):
            return  # not the program
        own = innermost_user([file for file, _ in frames], library_folders())
        first = next((one for one in frames if not one[0].startswith(_TORCH)), frames[0])
        shown = dict.fromkeys([*([frames[own]] if own is not None else []), first])
        steps = max(self._made.values(), default=0)
        text = f"{what} at {', in '.join(map(_place, shown))}"
        self._tell(read=text, known=self._issued(), read_after=steps)

    def _stepped(self, optimizer: Any) -> None:
        if id(optimizer) not in self._made:
            self._keep.append(optimizer)
        made = self._made[id(optimizer)] = self._made.get(id(optimizer), 0) + 1
        if os.getpid() != self._pid:
            return
        self._tell(steps=max(self._made.values()), ended="steps" if made >= self._steps else "")
        if made >= self._steps:
            self._leave()

    def _tell(self, **known: Any) -> None:
        self._answer = self._answer.with_(self._folder, **known)

    def _leave(self) -> None:
        """Ends the process, without the program's own ways to catch that."""
        if self._recorder is not None:
            self._recorder.flush()
        self._files.keep()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(0)


def _place(frame: Tuple[str, int]) -> str:
    path = Path(frame[0])
    folder = f"{path.parent.name}/" if "-packages" in frame[0] else ""
    return f"{folder}{path.name}:{frame[1]}"


def _faked(original: Any) -> Any:
    """Returns ``new_group`` without what only another backend knows."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def new_group(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        for name in _OF_BACKENDS:
            given.pop(name, None)
        return original(**given, backend="fake")

    return new_group


def _frames() -> List[Tuple[str, int]]:
    """The frames of the program, innermost first, without those of this package."""
    found = []
    frame: Any = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_OWN):
            found.append((name, frame.f_lineno))
        frame = frame.f_back
    return found
