"""Reads a YAML file as plain data, with the position of each value."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.error import MarkedYAMLError
from ruamel.yaml.reader import ReaderError

from moediag.errors import ScenarioError
from moediag.records import dataclass

KeyPath = tuple[str | int, ...]

# A scenario is a page or two. A larger one is a wrong file, or has aliases that multiply.
LARGEST_FILE = 1_000_000  # bytes
MOST_NODES = 20_000
DEEPEST = 100  # brackets open at once


def dotted(path: KeyPath) -> str:
    """``("skew", "starve", 0, "rank")`` -> ``skew.starve[0].rank``."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def nearest(word: str, valid: Iterable[str]) -> str:
    """Returns ``; did you mean "experts"?``, or the valid names if none is near."""
    names = list(valid)
    near = difflib.get_close_matches(word.lower(), [n.lower() for n in names], n=1, cutoff=0.6)
    if near:
        return f'; did you mean "{next(n for n in names if n.lower() == near[0])}"?'
    return f"; known: {', '.join(names)}" if names else ""


@dataclass(frozen=True, slots=True, order=True)
class Mark:
    """Line and column, both from 1."""

    line: int
    column: int


@dataclass(frozen=True, slots=True)
class Source:
    """A YAML file as plain data, with positions."""

    path: Path
    data: dict[str, Any]  # dicts, lists and scalars
    keys: Mapping[KeyPath, Mark]  # position of each field's name
    values: Mapping[KeyPath, Mark]  # position of each field's value

    def mark(self, path: KeyPath, of_key: bool) -> Mark:
        """Returns the position of the value of ``path`` (or of its key), otherwise of the nearest
        enclosing part."""
        for end in range(len(path), 0, -1):
            table = self.keys if of_key or end < len(path) else self.values
            found = table.get(path[:end]) or self.values.get(path[:end])
            if found:
                return found
        return Mark(1, 1)


def read(path: Path) -> Source:
    """Reads the YAML mapping in ``path``. Raises ScenarioError with FILE:LINE:COLUMN."""
    document = parsed(path)
    if document is None:
        raise _error(path, Mark(1, 1), "the file is empty; a scenario starts with schema_version")
    if not isinstance(document, CommentedMap):
        raise _error(path, Mark(1, 1), "a scenario is a mapping of fields, e.g. `name: …`")
    reader = _Reader(path)
    data = reader.plain(document, ())
    return Source(path, data, reader.keys, reader.values)


def _error(path: Path, mark: Mark, message: str) -> ScenarioError:
    return ScenarioError(f"{path}:{mark.line}:{mark.column}: {message}")


def _text(path: Path) -> str:
    try:
        if path.is_dir():
            raise _error(path, Mark(1, 1), "this is a folder; name a scenario file")
        with path.open("rb") as file:
            raw = file.read(LARGEST_FILE + 1)
    except OSError as error:
        raise _error(path, Mark(1, 1), f"cannot be read: {error.strerror or error}") from None
    if len(raw) > LARGEST_FILE:
        raise _error(path, Mark(1, 1), f"too large for a scenario (over {LARGEST_FILE:,} bytes)")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = raw[: error.start]
        line, column = before.count(b"\n") + 1, error.start - (before.rfind(b"\n") + 1) + 1
        raise _error(path, Mark(line, column), "not a text file (UTF-8 expected)") from None
    if "\0" in text:
        raise _error(path, Mark(1, 1), "not a text file (it contains zero bytes)")
    return text


def parsed(path: Path, kind: str = "rt") -> Any:
    """Returns the document in ``path``: with ruamel's containers, which know positions, or as plain
    data (``kind`` "safe"). Raises ScenarioError."""
    text = _text(path)
    # The parser would find this out in quadratic time.
    steps = accumulate((char in "[{") - (char in "]}") for char in text)
    if max(steps, default=0) > DEEPEST:
        raise _error(path, Mark(1, 1), "nested too deeply for a scenario")
    try:
        return YAML(typ=kind, pure=True).load(text)
    except MarkedYAMLError as error:
        at = error.problem_mark or error.context_mark
        mark = Mark(at.line + 1, at.column + 1) if at else Mark(1, 1)
        problem = " ".join(str(error.problem or error.context or "not valid YAML").split())
        if "duplicate key" in problem:
            problem = problem.split(" with value")[0]
            raise _error(path, mark, f"{problem}: give each field once") from None
        raise _error(path, mark, f"not valid YAML: {problem}") from None
    except ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise _error(path, Mark(line, 1), "not a text file (special characters)") from None
    except RecursionError:
        raise _error(path, Mark(1, 1), "nested too deeply for a scenario") from None
    except Exception as error:
        # Misused tags (`!!set x`) end in AttributeError and the like inside ruamel.
        problem = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise _error(path, Mark(1, 1), f"not valid YAML: {problem}") from None


class _Reader:
    """Converts ruamel's round-trip tree to plain data and records positions."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.keys: dict[KeyPath, Mark] = {}
        self.values: dict[KeyPath, Mark] = {}
        self._nodes = 0

    def plain(self, node: Any, path: KeyPath) -> Any:
        self._nodes += 1
        if self._nodes > MOST_NODES:
            raise _error(self.path, self._near(path), f"{dotted(path)}: too many aliases")
        if isinstance(node, CommentedMap):
            return {key: self._entry(node, key, path) for key in node}
        if isinstance(node, CommentedSeq):
            for index in range(len(node)):
                self._note(self.values, (*path, index), node.lc.item, index)
            return [self.plain(item, (*path, i)) for i, item in enumerate(node)]
        return self._scalar(node, path)

    def _entry(self, node: CommentedMap, key: Any, path: KeyPath) -> Any:
        if not isinstance(key, str):
            raise _error(
                self.path,
                self._near(path),
                f"{dotted((*path, str(key)))}: a field name is text",
            )
        self._note(self.keys, (*path, key), node.lc.key, key)
        # An empty value has no position: ruamel gives that of the next one.
        place = node.lc.key if node[key] is None else node.lc.value
        self._note(self.values, (*path, key), place, key)
        return self.plain(node[key], (*path, key))

    def _scalar(self, node: Any, path: KeyPath) -> Any:
        if node is None or isinstance(node, bool):
            return node
        # ruamel's scalars keep their notation; pydantic's strict mode needs plain ones.
        for kind in (str, int, float):
            if isinstance(node, kind):
                plain = kind(node)
                return bool(plain) if type(node).__name__ == "ScalarBoolean" else plain
        raise _error(
            self.path,
            self._near(path),
            f"{dotted(path)}: not text, a number, true or false; quote it if it is text",
        )

    def _note(self, table: dict[KeyPath, Mark], path: KeyPath, find: Any, key: Any) -> None:
        # Merged keys (<<) and flow sequences may have no position of their own.
        try:
            line, column = find(key)
        except (KeyError, TypeError, AttributeError):
            return
        table[path] = Mark(line + 1, column + 1)

    def _near(self, path: KeyPath) -> Mark:
        return Source(self.path, {}, self.keys, self.values).mark(path, of_key=False)
