"""The control flow of one function: which statements may run after which, from its syntax tree.

A statement is one node. The edges of an ``if`` say whether its test was true, those of a loop
whether it went on, those into a handler that an exception was caught there.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Sequence
from dataclasses import replace

from moediag.evidence.definitions import last_name
from moediag.evidence.source_tree import Scope, leaves_by
from moediag.records import dataclass

Node = ast.AST | str
#: The beginning and the end of the function.
BEGIN, END = "begin", "end"
#: How a node was left.
TRUE, FALSE, TURN, OVER, CAUGHT, NEXT = "true", "false", "turn", "over", "caught", ""


_NEVER_RAISE = (ast.Break, ast.Continue, ast.Pass)


@dataclass(frozen=True, slots=True)
class Edge:
    """From a node to one that may run next."""

    start: Node
    to: Node
    how: str = NEXT


@dataclass(frozen=True, slots=True)
class _Targets:
    """Where statements that jump go."""

    on_break: Node = END
    on_continue: Node = END
    handlers: tuple[Node, ...] = ()
    """Of the exceptions that may be raised here."""


class Flow:
    """The control flow of a function or of a module. ``repeats``: it is called again and again, so
    that its beginning may follow its end. ``full``: loops that always take a turn."""

    def __init__(
        self, scope: Scope, *, repeats: bool = False, full: Collection[ast.AST] = ()
    ) -> None:
        self._full = full
        self.edges: dict[Node, list[Edge]] = {}
        self._before: dict[Node, list[Edge]] = {}
        self._add(BEGIN, self._block(scope.body, END, _Targets()))
        if repeats:
            self._add(END, BEGIN)

    def paths(
        self, start: Node, to: Node, closed: Collection[Node], never: Collection[Edge] = ()
    ) -> frozenset[Edge]:
        """The edges of all ways from ``start`` to ``to`` that pass no node of ``closed`` and no
        edge of ``never``; both ends may be among the nodes."""
        ahead = self._reached(start, to, (closed, never), forward=True)
        back = self._reached(to, start, (closed, never), forward=False)
        return ahead & back

    def _reached(
        self,
        start: Node,
        to: Node,
        without: tuple[Collection[Node], Collection[Edge]],
        *,
        forward: bool,
    ) -> frozenset[Edge]:
        closed, never = without
        table = self.edges if forward else self._before
        found: set[Edge] = set()
        waiting, seen = [start], {start}
        while waiting:
            for edge in table.get(waiting.pop(), ()):
                if edge in never:
                    continue
                found.add(edge)
                node = edge.to if forward else edge.start
                if node not in seen and node not in closed and node != to:
                    seen.add(node)
                    waiting.append(node)
        return frozenset(found)

    # ------------------------------------------------------------------------ construction

    def _add(self, start: Node, to: Node, how: str = NEXT) -> None:
        edge = Edge(start, to, how)
        self.edges.setdefault(start, []).append(edge)
        self._before.setdefault(to, []).append(edge)

    def _block(self, block: Sequence[ast.stmt], after: Node, to: _Targets) -> Node:
        """Adds a block that is followed by ``after``; its first node."""
        for statement in reversed(block):
            after = self._statement(statement, after, to)
        return after

    def _statement(self, node: ast.stmt, after: Node, to: _Targets) -> Node:
        if not isinstance(node, _NEVER_RAISE):
            for handler in to.handlers:
                self._add(node, handler, CAUGHT)
        if isinstance(node, ast.If):
            self._add(node, self._block(node.body, after, to), TRUE)
            self._add(node, self._block(node.orelse, after, to), FALSE)
        elif isinstance(node, ast.For | ast.AsyncFor | ast.While):
            inside = replace(to, on_break=after, on_continue=node)
            body = self._block(node.body, node, inside)
            self._add(node, body, TURN)
            test = node.test if isinstance(node, ast.While) else None
            if not (isinstance(test, ast.Constant) and test.value):
                self._add(node, self._block(node.orelse, after, to), OVER)
            return body if node in self._full else node
        elif isinstance(node, ast.Try):
            self._try(node, after, to)
        elif isinstance(node, ast.With | ast.AsyncWith):
            if any(last_name(item.context_expr) == "suppress" for item in node.items):
                silent = ast.ExceptHandler(None, None, [], lineno=node.lineno)
                self._add(silent, after)
                to = replace(to, handlers=(silent, *to.handlers))
            self._add(node, self._block(node.body, after, to))
        elif isinstance(node, ast.Match):
            for case in node.cases:
                self._add(node, self._block(case.body, after, to), TRUE)
            self._add(node, after, FALSE)
        else:
            self._leave(node, after, to)
        return node

    def _leave(self, node: ast.stmt, after: Node, to: _Targets) -> None:
        way = leaves_by([node])
        if way == "break":
            self._add(node, to.on_break)
        elif way == "continue":
            self._add(node, to.on_continue)
        elif way in ("return", "exit"):
            self._add(node, END)
        elif way != "raise":  # one that is not caught ends the rank
            self._add(node, after)

    def _try(self, node: ast.Try, after: Node, to: _Targets) -> None:
        after = self._block(node.finalbody, after, to)
        for handler in node.handlers:
            self._add(handler, self._block(handler.body, after, to))
        handlers = (*node.handlers, *(() if _catches_all(node) else to.handlers))
        ended = self._block(node.orelse, after, to)
        self._add(node, self._block(node.body, ended, replace(to, handlers=handlers)))


def _catches_all(node: ast.Try) -> bool:
    return any(h.type is None or ast.unparse(h.type) == "BaseException" for h in node.handlers)
