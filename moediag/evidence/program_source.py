"""The parsed source files of a program."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence

from moediag.evidence.control_flow import Node
from moediag.evidence.definitions import Definitions, Where
from moediag.evidence.rank_names import RankNames
from moediag.evidence.same_values import same
from moediag.evidence.source_tree import Scope, is_called, path_to
from moediag.records import dataclass

_LOOPS = (ast.For, ast.AsyncFor, ast.While)


class Program:
    """The files of a program by path and by base name. ``one_node``: see :class:`.RankNames`."""

    def __init__(self, texts: Mapping[str, str], one_node: bool = False) -> None:
        self._texts = texts
        self._one_node = one_node
        self._files: dict[str, ProgramFile | None] = {}
        self._with: dict[str, list[Definitions]] = {}

    def at(self, path: str) -> ProgramFile | None:
        """None if the file is not known, or not Python that this interpreter can read."""
        if path not in self._files and path in self._texts:
            name, text = path.rpartition("/")[2], self._texts[path]
            self._files[path] = ProgramFile.parse(name, text, self._one_node, self._having)
        return self._files.get(path)

    def file(self, name: str, line: int = 0, function: str = "") -> ProgramFile | None:
        """The file of that base name; of several the only one in which the line is in the
        function. None if it is not known."""
        paths = self._named(name)
        found = [file for path in paths if (file := self.at(path)) is not None]
        if len(paths) > 1:
            found = [file for file in found if function and file.scope(line, function)]
        return found[0] if len(found) == 1 else None

    def holding(self, definitions: Definitions) -> ProgramFile | None:
        """The file of these definitions, once it was read."""
        files = (file for file in self._files.values() if file is not None)
        return next((file for file in files if file.names.definitions is definitions), None)

    def shown(self, file: ProgramFile) -> str:
        """Its base name, after that of its folder if other files have the same."""
        paths = self._named(file.name)
        path = next(path for path in paths if self._files.get(path) is file)
        return "/".join(path.split("/")[-2:]) if len(paths) > 1 else file.name

    def _named(self, name: str) -> list[str]:
        return [path for path in self._texts if path.rpartition("/")[2] == name]

    def set_at(self, test: ast.expr, file: ProgramFile) -> list[str]:
        """``callbacks.py:15``: where the program gives an attribute that is tested a constant, but
        for the constructors of its classes."""
        while isinstance(test, ast.UnaryOp):
            test = test.operand
        if not isinstance(test, ast.Attribute):
            return []
        names = {f.names.definitions: f.name for f in self._files.values() if f is not None}
        return [
            f"{names[one.at.file]}:{one.value.lineno}"
            for one in file.names.definitions.attribute(test.attr)
            if isinstance(one.value, ast.Constant) and one.at.file in names
            if getattr(one.at.scope, "name", "") != "__init__"
        ]

    def _having(self, name: str) -> list[Definitions]:
        """The definitions of the files whose text has ``name``."""
        if name not in self._with:
            files = [self.at(path) for path, text in self._texts.items() if name in text]
            self._with[name] = [file.names.definitions for file in files if file is not None]
        return self._with[name]


@dataclass(frozen=True, slots=True)
class ProgramFile:
    """A parsed file."""

    name: str
    """Its base name, for reports."""
    tree: ast.Module
    source: str
    lines: tuple[str, ...]
    names: RankNames

    @classmethod
    def parse(
        cls,
        name: str,
        text: str,
        one_node: bool = False,
        others: Callable[[str], Sequence[Definitions]] = lambda _: (),
    ) -> ProgramFile | None:
        """None if the text is not Python that this interpreter can read. ``others``: see
        :class:`.Definitions`."""
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None
        return cls(name, tree, text, tuple(text.split("\n")), RankNames(tree, one_node, others))

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

    def written(self, node: ast.expr) -> str:
        """An expression as the user wrote it, on one line."""
        text = ast.get_source_segment(self.source, node) or ast.unparse(node)
        return " ".join(text.split())

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
        return not by_rank and same(decides, Where(self.names.definitions, scope))

    def leaves(self, line: int) -> tuple[bool, list[ast.If]]:
        """Of a loop: whether it certainly takes as many turns on all ranks, and the conditions on
        which some ranks may leave it or skip the rest of a turn. ``(False, [])`` without a loop."""
        path = path_to(self.tree, line)
        loop, scope = path[-1], [node for node in path if isinstance(node, Scope)][-1]
        if not isinstance(loop, _LOOPS):
            return False, []
        found = []
        for jump in ast.walk(loop):
            if isinstance(jump, ast.Break | ast.Continue | ast.Return):
                inside = path_to(self.tree, jump.lineno)
                inside = inside[inside.index(loop) + 1 :]
                ifs = [one for one in inside if isinstance(one, ast.If)]
                uneven = [one for one in ifs if not self.same_on_all_ranks(one, scope)]
                own = not any(isinstance(one, _LOOPS) for one in inside)
                if uneven and (own or isinstance(jump, ast.Return)):
                    found.append(uneven[-1])
        return self.same_on_all_ranks(loop, scope), found
