"""Copies the source files of the user's frames, and those that they import from the program's own
folders, into ``capture/source.json``, while the job runs.

Later they may be changed or gone, and on another node the same path may hold another file. A file
that changed after the rank started is not what it runs, so it is left out.
"""

from __future__ import annotations

import ast
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from moediag import protocol
from moediag.evidence import rank_stacks
from moediag.launch.capture.masked_source import masked_source
from moediag.launch.processes import Process

CAPTURE_FOLDER = "capture"
SOURCE_FILE = "source.json"
_FILE_EVENT = b'{"e":"file"'
_MOST_FILES = 64
_MOST_READ = 256
_OF_RANKS = re.compile(r"rank|process_index|is_main|master|primary|chief", re.IGNORECASE)
_IN_TRACEBACK = re.compile(r'File \\?"([^"\\]+)\\?", line \d')  # JSON escapes the quotes
_LARGEST = 1 << 20  # bytes
_ABOVE = 5  # folders from which an absolute import may start: the file's own and those above it
_SLACK = 0.05  # seconds; an interpreter needs about as long until it reads its first file


def keep(folder: Path, ranks: Mapping[int, Process]) -> None:
    """Writes ``{"files": {path: text}, "lost": {path: reason}}`` for the user's files on the stacks
    of ``ranks`` and in their logs; files that are there already stay."""
    target = folder / CAPTURE_FOLDER / SOURCE_FILE
    files: dict[str, str] = {}
    lost: dict[str, str] = {}
    with suppress(OSError, ValueError, KeyError):
        raw = json.loads(target.read_text(encoding="utf-8"))
        files, lost = raw["files"], raw["lost"]
    before = len(files) + len(lost)
    for rank, process in ranks.items():
        for path in _user_files(folder, rank):
            if path in files or path in lost or len(files) >= _MOST_FILES:
                continue
            try:
                files[path] = _read(path, process)
            except (OSError, ValueError) as error:
                lost[path] = str(error) if isinstance(error, ValueError) else error.strerror or "?"
        _add_imported(files, process)
    if len(files) + len(lost) > before:
        target.parent.mkdir(exist_ok=True)
        shown = {path: masked_source(text) for path, text in files.items()}
        protocol.write_json(target, {"files": shown, "lost": lost})


def _user_files(folder: Path, rank: int) -> Iterator[str]:
    for names in (*_stacks(folder, rank), _recorded(folder, rank), _raised(folder, rank)):
        for path, library in zip(names, protocol.in_libraries(names), strict=True):
            if not library and not path.startswith("<"):
                yield path


def _add_imported(files: dict[str, str], process: Process) -> None:
    """Adds files that those of ``files`` import and that have to do with ranks: a condition may be
    defined there."""
    waiting, seen = list(files.items()), set(files)
    while waiting and len(seen) < _MOST_READ and len(files) < _MOST_FILES:
        for other in imported(*waiting.pop(0)):
            if other not in seen:
                with suppress(OSError, ValueError):
                    text = _read(other, process)
                    seen.add(other)
                    waiting.append((other, text))
                    if _OF_RANKS.search(text):
                        files[other] = text


def imported(path: str, text: str) -> list[str]:
    """Paths that may be the modules that a file imports, in its own folder and those above it."""
    if not path.startswith("/"):
        return []
    found: dict[str, None] = {}
    for dots, module, names in _imports(text):
        folders = [path]
        for _ in range(len(dots) or _ABOVE):
            folders.append(folders[-1].rpartition("/")[0])
        for folder in folders[len(dots) or 1 : len(dots) + 1 if dots else None]:
            if not folder:
                break
            base = "/".join(filter(None, (folder, *module.split("."))))
            for name in (base, *(f"{base}/{one}" for one in names)):
                found |= dict.fromkeys((f"{name}.py", f"{name}/__init__.py"))
    known = list(found)
    libraries = protocol.in_libraries(known)
    return [one for one, library in zip(known, libraries, strict=True) if not library]


def _imports(text: str) -> Iterator[tuple[str, str, list[str]]]:
    """(dots, module, names) of each import statement; empty if the text is not Python."""
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            yield "." * node.level, node.module or "", [one.name for one in node.names]
        elif isinstance(node, ast.Import):
            yield from (("", one.name, []) for one in node.names)


def _stacks(folder: Path, rank: int) -> Iterator[list[str]]:
    spied = folder / CAPTURE_FOLDER / f"rank-{rank}.pyspy.json"
    written = folder / protocol.stacks_file(rank)
    for path, parse in (
        (spied, rank_stacks.parse_pyspy),
        (written, rank_stacks.parse_faulthandler),
    ):
        if path.is_file():
            for stack in parse(path.read_text(encoding="utf-8", errors="replace")):
                yield [frame.file for frame in stack.frames if not frame.native]


def _raised(folder: Path, rank: int) -> list[str]:
    """The files of the exception that ended the rank, which may have made no call before."""
    try:
        text = (folder / protocol.error_file(rank)).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return list(dict.fromkeys(_IN_TRACEBACK.findall(text)))


def _recorded(folder: Path, rank: int) -> list[str]:
    """The files of the user's lines that made calls, by the rank's log."""
    found = []
    for path in folder.glob(f"rank-{rank}.events*"):
        with path.open("rb") as log:
            for line in log:
                if line.startswith(_FILE_EVENT):
                    with suppress(ValueError, KeyError):
                        found.append(str(json.loads(line)["path"]))
    return found


def _read(path: str, process: Process) -> str:
    """The text of ``path`` as the process sees it. Raises ValueError if it cannot be what runs."""
    if not path.startswith("/"):
        if not process.alive:
            raise ValueError("its folder is not known")
        path = f"{os.readlink(f'/proc/{process.pid}/cwd')}/{path}"  # noqa: PTH115
    # The job may run in a container. An ended process leaves only the path as it is here.
    seen = Path(f"/proc/{process.pid}/root{path}" if process.alive else path)
    status = seen.stat()
    if status.st_size > _LARGEST:
        raise ValueError("larger than 1 MiB")
    # A change of the content or a file moved here both set the time of the last status change.
    if status.st_ctime > process.epoch + _SLACK:
        raise ValueError("changed after the job started")
    return seen.read_text(encoding="utf-8", errors="replace")
