"""Conditions in a program's source that decide which ranks reach a line.

Those around the line, and those under which a rank left before it. Reads the syntax tree; nothing
is executed.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from moediag.evidence.definitions import Function, last_name
from moediag.evidence.model import Condition
from moediag.evidence.program_source import ProgramFile
from moediag.evidence.source_tree import (
    Scope,
    blocks,
    communicates,
    is_called,
    leaves_by,
    own_expressions,
    path_to,
)
from moediag.records import dataclass

# Decorators and context managers that let one rank go first, or alone.
_ALONE = re.compile(
    r"rank_zero_\w+|on_(?:local_)?main_process|on_last_process|on_process|main_process_only"
    r"|(?:master|main|rank0|rank_0)_only|only_on_(?:rank_?0|main|master)\w*"
)
_FIRST = re.compile(r"(?:local_)?main_process_first|\w*(?:rank_?)?(?:zero|0|main|master)_first")
_WIDEST = 100  # characters of a condition's text
MOST = 8  # conditions of one line, and as many loops that are the same on all ranks


@dataclass(frozen=True, slots=True)
class Source:
    """The conditions in one file of a program."""

    file: ProgramFile

    def conditions(
        self, line: int, function: str, world_size: int = 0, rank: int = -1
    ) -> tuple[Condition, ...] | None:
        """What decides whether ``line`` of ``function`` runs on ``rank`` once that function is
        called, outermost first. None if the line is not in a function of that name: then this is
        not the source that ran."""
        path = path_to(self.file.tree, line)
        scope = max((i for i, node in enumerate(path) if isinstance(node, Scope)), default=0)
        if not is_called(path[scope], path[-1], function):
            return None
        if function == "<lambda>":
            return ()  # it may have been called from anywhere
        try:
            found = [*self._decorated(path[scope]), *self._around(path[scope:], world_size, rank)]
        except RecursionError:
            return None
        loops = [one for one in found if one.side == "loop" and not one.names_rank]
        kept = [one for one in found if one not in loops][-MOST:]
        return tuple(one for one in found if one in kept or one in loops[:MOST])

    # ------------------------------------------------------------------------ along the path

    def _around(self, path: Sequence[ast.AST], size: int, rank: int) -> Iterator[Condition]:
        scope = path[0]
        for parent, child in itertools.pairwise(path):
            yield from self._earlier_exits(parent, child, scope, size)
            if isinstance(parent, ast.If | ast.While):
                yield from self._branch(parent, child, scope, size)
            elif isinstance(parent, ast.For | ast.AsyncFor) and child in parent.body:
                uneven = self.file.names.names_rank(parent.iter, scope, anywhere=True)
                text = f"for {self.file.written(parent.target)} in {self.file.written(parent.iter)}"
                yield Condition(self.file.name, parent.lineno, _short(text), "loop", uneven)
            elif isinstance(parent, ast.With | ast.AsyncWith) and child in parent.body:
                for item in parent.items:
                    if _FIRST.fullmatch(last_name(item.context_expr)):
                        yield self._condition(parent, item.context_expr, "with", True, scope)
            elif isinstance(parent, ast.ExceptHandler):
                head = f"except {self.file.written(parent.type)}" if parent.type else "except"
                yield Condition(self.file.name, parent.lineno, head, "handler")
            elif isinstance(parent, ast.match_case):
                match = path[path.index(parent) - 1]
                if isinstance(match, ast.Match):
                    by_rank = self.file.names.names_rank(match.subject, scope)
                    text = f"match {self.file.written(match.subject)}"
                    yield Condition(self.file.name, match.lineno, _short(text), "under", by_rank)
        if isinstance(path[-1], ast.stmt) and not isinstance(path[-1], Function | ast.ClassDef):
            yield from self._inline(path[-1], scope, size, rank)

    def _branch(
        self, parent: ast.If | ast.While, child: ast.AST, scope: ast.AST, size: int
    ) -> Iterator[Condition]:
        test = parent.test
        if isinstance(test, ast.Compare) and last_name(test.left) == "__name__":
            return
        rank = self.file.names.names_rank(parent.test, scope)
        if isinstance(parent, ast.If):
            side = "under" if child in parent.body else "else"
            out = self._kept_out(parent.test, scope, size, when=side == "else")
            one = self._condition(parent, parent.test, side, rank, scope)
            met = communicates(parent.body) and communicates(parent.orelse)
            met = met or self._met(parent, out, scope, size)
            single = None if met else self.file.names.singled_out(parent.test, scope, size)
            if single is None and not met:
                other = self.file.names.alternative(parent.test, scope, size)
                one = replace(one, unless=other is not None)
                single = other
            yield replace(one, keeps_out=out, singles=single)
        elif child in parent.body:
            yield self._condition(parent, parent.test, "loop", rank, scope)

    def _met(self, node: ast.If, out: frozenset[int], scope: ast.AST, size: int) -> bool:
        """Whether another condition lets a rank of ``out`` communicate: that call may be meant to
        meet the one at ``node``, as in "rank 0 first", which is two barriers. In the order of their
        lines such calls meet those of conditions that keep ``out`` away."""
        ahead, passed, counted = 0, False, set[ast.AST]()  # calls of ``out`` that none has met
        every = (one for one in ast.walk(scope) if isinstance(one, ast.If))
        for other in sorted(every, key=lambda one: one.lineno):
            below = {*ast.walk(other)}
            if other is node:
                if ahead > 0:
                    return True
                passed, counted = True, counted | below
            if (
                node in below
                or other in counted
                or not self.file.names.names_rank(other.test, scope)
            ):
                continue
            counted |= below
            for branch, runs in ((other.body, True), (other.orelse, False)):
                if not communicates(branch):
                    continue
                if out <= self._kept_out(other.test, scope, size, when=not runs):
                    ahead -= not passed
                elif passed and ahead >= 0:
                    return True
                else:
                    ahead += 1
        return False

    def _kept_out(self, test: ast.expr, scope: ast.AST, size: int, *, when: bool) -> frozenset[int]:
        """The ranks on which ``test`` is certainly ``when``."""
        held = self.file.names.on_all(test, scope, size)
        return frozenset(rank for rank, holds in enumerate(held) if holds is when)

    def _earlier_exits(
        self, parent: ast.AST, child: ast.AST, scope: ast.AST, size: int
    ) -> Iterator[Condition]:
        """Conditions under which a rank left before it came to ``child``."""
        before = (
            earlier
            for block in blocks(parent)
            if child in block
            for earlier in block[: block.index(child)]
        )
        for earlier in before:
            if isinstance(earlier, ast.If) and self.file.names.names_rank(earlier.test, scope):
                for branch, side in ((earlier.body, "after"), (earlier.orelse, "after-else")):
                    if way := leaves_by(branch):
                        made = self._condition(earlier, earlier.test, side, True, scope)
                        out = self._kept_out(earlier.test, scope, size, when=side == "after")
                        met = communicates(branch) or self._met(earlier, out, scope, size)
                        single = (
                            None if met else self.file.names.singled_out(earlier.test, scope, size)
                        )
                        yield replace(made, leaves=way, keeps_out=out, singles=single)

    def _inline(
        self, statement: ast.stmt, scope: ast.AST, size: int, rank: int
    ) -> Iterator[Condition]:
        """``f() if rank == 0 else g()``, ``rank == 0 and f()``, ``ACTIONS[rank == 0]()`` in a
        statement itself."""
        for node in own_expressions(statement):
            test, single = self._choice(node, scope), None
            if test is None or not self.file.names.names_rank(test, scope):
                continue
            out: frozenset[int] = frozenset()
            own = self.file.names.holds(test, scope, rank, size) if rank >= 0 else None
            if isinstance(node, ast.Call) and own is not None:
                out = self._kept_out(test, scope, size, when=not own)
                single = (
                    None
                    if self._all_meet(node, scope)
                    else self.file.names.singled_out(test, scope, size)
                )
            text = _short(self.file.written(node))
            yield Condition(self.file.name, node.lineno, text, "inline", True, "", out, single)

    def _all_meet(self, call: ast.Call, scope: ast.AST) -> bool:
        """Whether more than one of the functions that a call chooses from communicates, as far as
        these are known."""
        table = self._called(call, scope)
        if isinstance(table, ast.Call) and isinstance(table.func, ast.Attribute):  # TABLE.get(…)
            table = table.func.value
        elif isinstance(table, ast.Subscript):
            table = table.value
        if isinstance(table, ast.Name | ast.Attribute):
            table = self.file.names.definition(table, scope) or table
        if not isinstance(table, ast.Dict | ast.IfExp):
            return True
        names = {last_name(n) for n in ast.walk(table) if isinstance(n, ast.Name | ast.Attribute)}
        made = [f for name in names for f, _ in self.file.names.definitions.functions(name)]
        return sum(communicates(function.body) for function in made) > 1

    def _called(self, call: ast.Call, scope: ast.AST) -> ast.expr:
        """The expression of the called function; of a variable the one that it stands for."""
        named = call.func if isinstance(call.func, ast.Name) else None
        return (named and self.file.names.definition(named, scope)) or call.func

    def _choice(self, node: ast.expr, scope: ast.AST) -> ast.expr | None:
        """What decides in an expression which function is called."""
        if isinstance(node, ast.IfExp):
            chosen = (n for side in (node.body, node.orelse) for n in ast.walk(side))
            return node.test if any(isinstance(n, ast.Call) for n in chosen) else None
        if isinstance(node, ast.BoolOp) and any(
            isinstance(part, ast.Call) and not self.file.names.names_rank(part, scope)
            for part in node.values[1:]
        ):
            return node.values[0]
        if isinstance(node, ast.Call):
            called = self._called(node, scope)
            if isinstance(called, ast.Call) and last_name(called.func) == "get" and called.args:
                return called.args[0]
            if isinstance(called, ast.Subscript):
                return called.slice
            return called.test if isinstance(called, ast.IfExp) else None
        return None

    def _decorated(self, scope: ast.AST) -> Iterator[Condition]:
        if isinstance(scope, Function):
            for one in scope.decorator_list:
                if _ALONE.fullmatch(last_name(one)):
                    text = f"@{self.file.written(one)}"
                    yield Condition(self.file.name, one.lineno, text, "decorator", True)

    # ------------------------------------------------------------------------ words

    def _condition(
        self,
        node: ast.If | ast.While | ast.With | ast.AsyncWith,
        test: ast.expr,
        side: str,
        rank: bool,
        scope: ast.AST,
    ) -> Condition:
        word = (
            "if" if isinstance(node, ast.If) else "while" if isinstance(node, ast.While) else "with"
        )
        text = f"{word} {self.file.written(test)}"
        if len(text) > _WIDEST and isinstance(test, ast.BoolOp):
            text = f"{word} {self._telling(test, scope)}"
        return Condition(self.file.name, node.lineno, _short(text), side, rank)

    def _telling(self, test: ast.BoolOp, scope: ast.AST) -> str:
        """The condition with its clauses that name a rank, the others as ``…`` from the longest."""
        word = " and " if isinstance(test.op, ast.And) else " or "
        clauses = [
            f"({self.file.written(v)})" if isinstance(v, ast.BoolOp) else self.file.written(v)
            for v in test.values
        ]
        free = [i for i, v in enumerate(test.values) if not self.file.names.names_rank(v, scope)]
        for i in sorted(free, key=lambda i: -len(clauses[i])):
            if len(word.join(clauses)) <= _WIDEST - 6:
                break
            clauses[i] = "…"
        return word.join(clause for clause, _ in itertools.groupby(clauses))


def _short(text: str) -> str:
    return text if len(text) <= _WIDEST else f"{text[: _WIDEST - 1]}…"
