"""The conditions of lines of a job's user code, whose source files were kept."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from moediag.evidence.model import Condition, Frame
from moediag.evidence.program_source import Program
from moediag.evidence.source_conditions import Source

Found = dict[str, tuple[Condition, ...]]  # by the frame's place


class Sources:
    """The source files of a job's user code. ``one_node``: see :class:`.RankNames`."""

    def __init__(self, files: Mapping[str, str], world_size: int, one_node: bool = False) -> None:
        self._world_size = world_size
        self.files = {path: text for path, text in files.items() if isinstance(text, str)}
        self._program = Program(self.files, one_node)
        self._known: dict[tuple[str, int, str], tuple[Condition, ...] | None] = {}

    def conditions(self, frames: Iterable[Frame], rank: int = -1) -> tuple[Found, tuple[str, ...]]:
        """(the conditions of each frame of a rank whose source is known, names of files that could
        not be used). A frame whose place also names a line of another file has none."""
        found: dict[str, set[tuple[Condition, ...]]] = {}
        unusable: dict[str, None] = {}
        for frame in frames:
            if frame.native or frame.file not in self.files:
                continue
            here = self._of_frame(frame, rank)
            if here is None:
                unusable[frame.name] = None
            else:
                found.setdefault(frame.place, set()).add(here)
        return {at: here.pop() for at, here in found.items() if len(here) == 1}, tuple(unusable)

    def _of_frame(self, frame: Frame, rank: int) -> tuple[Condition, ...] | None:
        key = frame.file, frame.line, frame.function
        if key in self._known:
            return self._known[key]
        file = self._program.at(frame.file)
        if file is None:
            return None
        found = Source(file).conditions(frame.line, frame.function, self._world_size, rank)
        # Only a choice within the line is another one on each rank.
        if not any(condition.side == "inline" for condition in found or ()):
            self._known[key] = found
        return found

    def of_lines(self, lines: Iterable[str], paths: Iterable[str], rank: int = -1) -> Found:
        """The conditions of ``train.py:12 step``, whose file is the one of ``paths`` with that base
        name; without lines of other files, and of base names that several of ``paths`` have."""
        by_name: dict[str, str] = {}
        for path in dict.fromkeys(paths):
            name = path.rpartition("/")[2]
            by_name[name] = "" if name in by_name else path
        frames = []
        for line in lines:
            frame = Frame.at(line)
            if frame is not None and by_name.get(frame.file):
                frames.append(replace(frame, file=by_name[frame.file]))
        return self.conditions(frames, rank)[0]
