"""What lies at the given paths: every file is recognised by its content, not by its name.

Only the rank comes from a name, when the content does not tell it. No file ends the search: one
that is refused, truncated or not understood is listed in ``not_seen``, and the others are read.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from moediag.evidence import console_output as outputs
from moediag.evidence import (
    exits,
    file_loading,
    flight_recorder,
    log_lines,
    log_reports,
    nccl_ras,
    one_job,
    stack_texts,
    unmarked,
)
from moediag.evidence import rank_stacks as stacks
from moediag.evidence.file_reader import Loaded
from moediag.evidence.flight_calls import Dump
from moediag.evidence.log_formats import meaning
from moediag.evidence.model import ExitStatus, RankError, Report, Stack
from moediag.evidence.rank_in_name import OF_TORCHRUN, Names

MAX_FILES = 50_000
_FEW = 4  # lines, errors or disagreeing marks of one log that are told


@dataclass(slots=True)
class Found:
    """Everything that was recognised, by rank."""

    #: The youngest of each rank.
    dumps: dict[int, Dump] = field(default_factory=dict)
    stacks: dict[int, list[Stack]] = field(default_factory=dict)
    errors: dict[int, RankError] = field(default_factory=dict)
    outputs: dict[int, str] = field(default_factory=dict)
    exits: dict[int, ExitStatus] = field(default_factory=dict)
    #: Exceptions that the launcher's summary tells.
    told: dict[int, RankError] = field(default_factory=dict)
    #: What libraries say in the logs, in order.
    reports: list[Report] = field(default_factory=list)
    #: Lines that nothing understands, of logs in which nothing was understood.
    quoted: list[Report] = field(default_factory=list)
    #: The number of ranks that a log gives; 0 if none does.
    size: int = 0
    #: The ranks that died first.
    first: tuple[int, ...] = ()
    #: When the dumps were written, in seconds of the wall clock; None: not known. A file's own time
    #: says nothing, because files are copied.
    taken_at: float | None = None
    #: The job is known to have stood still: its watchdog wrote the dumps, or two dumps of a rank
    #: show the same incomplete calls.
    stood: bool = False
    #: Two dumps of a rank show that it moved on.
    moved: bool = False
    #: Ranks with a file that could not be read.
    unread: set[int] = field(default_factory=set)
    #: Number of files that were understood.
    files: int = 0
    #: Each file that was not, with the reason.
    refused: list[str] = field(default_factory=list)


def read(paths: Iterable[Path]) -> Found:
    """Reads folders, with all folders below them, and files. No content of a file raises."""
    found = Found()
    listed = list(_files(paths))
    collector = _Collector(found, Names(file for file, _ in listed))
    files = []
    for number, (file, root) in enumerate(listed):
        if number == MAX_FILES:
            found.refused.append(f"files after the first {MAX_FILES:,}")
            break
        if collector.is_readable(file):
            files.append((file, root))
    for (file, root), loaded in zip(files, file_loading.loaded([f for f, _ in files]), strict=True):
        try:
            collector.file(file, root, loaded)
        except OSError as error:
            found.refused.append(f"{file} ({error.strerror})")
    collector.close()
    return found


def _files(paths: Iterable[Path]) -> Iterator[tuple[Path, Path]]:
    """Each file once, with the path that it was found under."""
    seen: set[Path] = set()
    for path in paths:
        for file in _below(path):
            if file not in seen:
                seen.add(file)
                yield file, path


def _below(path: Path) -> Iterator[Path]:
    if not path.is_dir():
        yield path
        return
    for folder, folders, files in os.walk(path):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(files):
            if not name.startswith("."):
                yield Path(folder) / name


class _Collector:
    def __init__(self, found: Found, names: Names) -> None:
        self.found = found
        self.names = names
        self.of_unknown_rank: list[tuple[Path, str]] = []  # recognised, but of an unknown rank
        self.source: dict[int, Path] = {}  # rank -> its dump's file
        self.attempt: dict[int, int] = {}

    def is_readable(self, path: Path) -> bool:
        """Whether it is a regular file with content; reading a pipe would never end."""
        try:
            status = path.stat()
        except OSError as error:
            self.found.refused.append(f"{path} ({error.strerror})")
            return False
        if not stat.S_ISREG(status.st_mode):
            self.found.refused.append(f"{path} (not a regular file)")
        elif status.st_size == 0:
            if path.name not in OF_TORCHRUN:  # a rank may write nothing
                self.found.refused.append(f"{path} (empty)")
        else:
            return True
        return False

    def file(self, path: Path, root: Path, loaded: Loaded) -> None:
        raw = loaded.json
        if loaded.refused:
            self.found.refused.append(f"{path} ({loaded.refused})")
            if (rank := self.names.rank(path, root)) is not None:
                self.found.unread.add(rank)
        elif loaded.dump is not None:
            self.dump(path, root, loaded.dump)
        elif raw is None:
            self.text(path, root)
        elif isinstance(raw, list) and stacks.is_pyspy(raw):
            self.add_stacks(path, root, stacks.pyspy(raw))
        elif (error := exits.elastic_error(raw)) is not None:
            self.error(path, root, error)
        elif (reports := nccl_ras.of_json(raw)) is not None:
            self.found.files += 1
            self.found.reports += reports
        else:
            self.found.refused.append(f"{path} (unrecognised JSON)")

    # -------------------------------------------------------------------- dumps

    def dump(self, path: Path, root: Path, dump: Dump) -> None:
        rank = self.whose_dump(path, root, dump)
        if rank is None:
            self.of_unknown_rank.append((path, "a Flight Recorder dump"))
            return
        self.found.files += 1
        older = self.found.dumps.get(rank)
        if older is not None:
            self.again(older, dump)
            young = _worth(dump) > _worth(older)
            dropped = self.source[rank] if young else path
            self.found.refused.append(f"{dropped} (rank {rank} has a younger or fuller dump)")
            if not young:
                return
        self.found.dumps[rank], self.source[rank] = dump, path

    def again(self, one: Dump, other: Dump) -> None:
        """Notes whether the rank moved between two dumps, unless one is of an earlier attempt."""
        ends = [dump.created[-1] for dump in (one, other) if dump.created]
        if len(ends) < 2 or abs(ends[0] - ends[1]) / 1e9 > one_job.FAR_APART:
            return
        opened = [list(dump.incomplete()) for dump in (one, other)]
        if opened[0] == opened[1]:
            self.found.stood |= bool(opened[0])
        else:
            self.found.moved = True

    def whose_dump(self, path: Path, root: Path, dump: Dump) -> int | None:
        """The rank of a dump: from its name, unless its content contradicts that."""
        named, own = self.names.rank(path, root), flight_recorder.own_rank(dump)
        if named is None or own is None or named == own:
            return own if named is None else named
        self.found.refused.append(f"the name of {path} (its content says rank {own})")
        return own

    # -------------------------------------------------------------------- other files

    def text(self, path: Path, root: Path) -> None:
        text = outputs.ends(path)
        sections = stack_texts.read(text)
        if not sections and re.search(r"\| +Thread \S+ \(", text):  # each line has a prefix
            plain = "\n".join(line.text for line in log_lines.read(text))
            sections = stack_texts.read(plain)
        if not sections or _is_also_log(text):
            self.log(path, root, text)
        if not sections:
            return
        if len(sections) == 1 and sections[0].rank is None:
            self.add_stacks(path, root, sections[0].stacks, sections[0].process)
        else:
            self.found.files += 1
            for number, section in enumerate(sections, start=1):
                whose = section.process or f"process {number} of {path.name}"
                if section.stacks:
                    self.section(section.rank, whose, section.stacks)
                else:
                    self.found.refused.append(f"{whose} (no frames in {path})")

    def section(self, rank: int | None, whose: str, found: tuple[Stack, ...]) -> None:
        """The stacks of one process; those of an unknown rank are only told."""
        if rank is not None:
            self.found.stacks.setdefault(rank, []).extend(found)
            return
        stack = stacks.that_counts(found)
        if stack is not None:
            what = stacks.stand(stack) or stack.frames[0].function
            waits = stacks.in_collective(stack) or stacks.in_backward(stack)
            kind = "communication" if waits else ""
            self.found.reports.append(Report("stack", op=kind, text=what, detail=whose))

    def of_processes(self, path: Path, found: tuple[Stack, ...]) -> None:
        """Threads in a text that names no process. A process has one main thread, which began at
        the top of a module; people paste those of several."""
        main = [one for one in found if one.frames and one.frames[-1].function == "<module>"]
        if len(main) < 2:
            self.section(None, f"a process in {path.name}", found)
            return
        for number, one in enumerate(main, start=1):
            self.section(None, f"process {number} of {path.name}", (one,))

    def log(self, path: Path, root: Path, text: str) -> None:
        """The output of one rank, of several with prefixes, or the launcher's."""
        lines = log_lines.read(text)
        whole = "\n".join(line.text for line in lines)
        ended, first = outputs.torchrun_summary(whole)
        self.found.exits.update(ended)
        self.found.told.update(outputs.summary_errors(whole))
        self.found.first = self.found.first or first
        parts = log_lines.by_rank(lines)
        named = self.names.rank(path, root)
        own = named if named is not None and not parts.keys() - {named, None} else None
        reports = log_reports.read(lines, own)
        if own is not None and not self.is_latest(path, own):
            self.found.files += 1
            return
        if not outputs.tasks_are_ranks(text):
            reports = tuple(replace(o, about=()) if o.kind == "ended" else o for o in reports)
        self.found.reports += reports
        self.found.size = max(self.found.size, log_reports.told_size(lines))
        self.disagreeing(path, lines)
        rest = parts.pop(None, "")
        if own is not None:
            parts = {own: "\n".join(line.text for line in lines)}
        elif not parts and not ended and not any(one.rank is not None for one in reports):
            self.without_rank(path, rest, reports)
            return
        elif named is not None and rest and named not in parts:
            parts[named] = rest
        else:
            marked = {(e.type, e.message) for part in parts.values() for e in unmarked.errors(part)}
            marked |= {(e.type, e.message) for e in self.found.told.values()}
            rest_errors = [e for e in unmarked.errors(rest) if (e.type, e.message) not in marked]
            self.found.reports += map(unmarked.report, rest_errors)
            self.of_processes(path, stacks.parse_faulthandler(rest))
        self.found.files += 1
        if not reports:
            self.found.quoted += unmarked.quoted(path, text)
        for rank, part in parts.items():
            if rank is not None and self.is_latest(path, rank):
                self.output(rank, part)

    def without_rank(self, path: Path, text: str, reports: tuple[Report, ...]) -> None:
        """A log that names no rank: its messages count, and so does an exception."""
        errors = unmarked.errors(text)
        dumped = stacks.parse_faulthandler(text)
        self.of_processes(path, dumped)
        self.found.reports += map(unmarked.report, errors)
        understood = bool(reports or dumped or errors)
        quoted = [] if understood else unmarked.quoted(path, text)
        self.found.quoted += quoted
        if understood or quoted or outputs.is_log(text):
            self.found.files += 1
            if reports and not errors and all(meaning(one).whole for one in reports):
                return  # no rank wrote it
            self.of_unknown_rank.append((path, "a log"))
        else:
            self.found.refused.append(f"{path} (unrecognised text)")

    def disagreeing(self, path: Path, lines: list[log_lines.Line]) -> None:
        """Notes marks that contradict the messages behind them."""
        pairs = {(o.against, o.rank): None for o in lines if o.against is not None}
        for mark, rank in list(pairs)[:_FEW]:
            self.found.refused.append(
                f"the mark of rank {mark} before messages in {path} (these say that they are of "
                f"rank {rank} of default_pg: the two disagree, and the message counts)"
            )

    def is_latest(self, path: Path, rank: int) -> bool:
        """Whether the file is of torchrun's last attempt; drops what earlier attempts left."""
        named = re.search(r"/attempt_(\d{1,4})/", path.as_posix())
        if named is None:
            return True
        attempt = int(named[1])
        before = self.attempt.get(rank, attempt)
        if attempt > before:
            for of_rank in (self.found.outputs, self.found.errors, self.found.stacks):
                of_rank.pop(rank, None)
            self.found.reports = [one for one in self.found.reports if one.rank != rank]
        self.attempt[rank] = max(attempt, before)
        return attempt >= before

    def output(self, rank: int, text: str) -> None:
        found = stacks.parse_faulthandler(text)
        if found:
            self.found.stacks.setdefault(rank, []).extend(found)
        before = self.found.outputs.get(rank)
        self.found.outputs[rank] = text if before is None else f"{before}\n{text}"

    def add_stacks(
        self, path: Path, root: Path, found: tuple[Stack, ...], process: str = ""
    ) -> None:
        if not found:
            self.found.refused.append(f"{path} (stacks without any frame)")
            return
        self.found.files += 1
        self.section(self.names.rank(path, root), process or path.name, found)

    def error(self, path: Path, root: Path, error: RankError) -> None:
        rank = self.names.rank(path, root)
        if rank is None:
            self.of_unknown_rank.append((path, "an error file"))
        elif self.is_latest(path, rank):
            self.found.files += 1
            self.found.errors[rank] = error

    def close(self) -> None:
        """Lists the files without a rank; of many only the first ones."""
        for path, what in self.of_unknown_rank[:8]:
            self.found.refused.append(
                f"{path} ({what}, but neither name nor content tells its rank)"
            )
        if len(self.of_unknown_rank) > 8:
            more = len(self.of_unknown_rank) - 8
            self.found.refused.append(f"{more} more files whose rank is unknown")


def _is_also_log(text: str) -> bool:
    """Whether a text with stacks also has messages or an exception, as when people paste both."""
    reported = bool(log_reports.read(log_lines.read(text)))
    return reported or exits.error_in_output(text) is not None


def _worth(dump: Dump) -> tuple[int, int, bool]:
    """Sorts dumps of one rank: the younger, then the fuller, then the one with lines of code."""
    last = dump.created[-1] if dump.created else 0
    return last, len(dump.kind), any(kind.site for kind in dump.kinds)
