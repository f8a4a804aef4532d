"""The source files of a program, and what of a file's statements is the same on all ranks."""

from __future__ import annotations

import ast
from collections.abc import Mapping

from moediag.evidence.control_flow import Node
from moediag.evidence.definitions import Definitions, Where
from moediag.evidence.rank_names import RankNames
from moediag.evidence.same_values import same
from moediag.evidence.source_tree import Scope, is_called, path_to
from moediag.records import dataclass


class Program:
    """Finds files by their base names; a name that several files have is not found."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        self._paths: dict[str, list[str]] = {}
        self._texts = texts
        for path in texts:
            self._paths.setdefault(path.rpartition("/")[2], []).append(path)
        self._files: dict[str, ProgramFile | None] = {}

    def file(self, name: str) -> ProgramFile | None:
        paths = self._paths.get(name, [])
        if len(paths) != 1:
            return None
        if name not in self._files:
            self._files[name] = ProgramFile.parse(name, self._texts[paths[0]])
        return self._files[name]


@dataclass(frozen=True, slots=True)
class ProgramFile:
    """A parsed file."""

    name: str
    tree: ast.Module
    lines: tuple[str, ...]
    names: RankNames

    @classmethod
    def parse(cls, name: str, text: str) -> ProgramFile | None:
        """None if the text is not Python that this interpreter can read."""
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None
        return cls(name, tree, tuple(text.splitlines()), RankNames(tree))

    @property
    def definitions(self) -> Definitions:
        return self.names.definitions

    def scope(self, line: int, function: str) -> Scope | None:
        """The function of that name around a line; None if there is none."""
        path = path_to(self.tree, line)
        around = [node for node in path if isinstance(node, Scope)][-1]
        return around if is_called(around, path[-1], function) else None

    def node(self, line: int) -> Node | None:
        """The innermost statement or handler of a line."""
        found = path_to(self.tree, line)[-1]
        return found if isinstance(found, ast.stmt | ast.ExceptHandler) else None

    def around(self, node: Node) -> list[ast.AST]:
        """The nodes around a statement, and itself."""
        return [] if isinstance(node, str) else path_to(self.tree, getattr(node, "lineno", 0))

    def text(self, line: int) -> str:
        """A line as written, without its indentation."""
        return self.lines[line - 1].strip() if 0 < line <= len(self.lines) else ""

    def head(self, node: ast.AST) -> str:
        """A statement without its block, on one line."""
        first = getattr(node, "lineno", 1)
        body = getattr(node, "body", None)
        last = body[0].lineno - 1 if isinstance(body, list) and body else first
        text = " ".join(self.text(line) for line in range(first, max(first, last) + 1))
        return text.partition("  #")[0].rstrip().removesuffix(":")

    def same_on_all_ranks(self, node: ast.AST, scope: ast.AST) -> bool:
        """Whether ranks in the same turn of the loops around it certainly leave a statement in the
        same way."""
        if isinstance(node, ast.For | ast.AsyncFor):
            decides = node.iter
        elif isinstance(node, ast.If | ast.While):
            decides = node.test
        else:
            return False
        by_rank = self.names.names_rank(decides, scope, anywhere=True)
        return not by_rank and same(decides, Where(self.definitions, scope))
