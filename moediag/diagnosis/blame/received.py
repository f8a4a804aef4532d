"""Finds errors that a rank raised only because of what other ranks sent it.

A rank that compares what all ranks gathered, or looks up what it received, is the first to notice
another rank's fault. From what decides the raise, or what fails in an expression, assignments of
the program's source are followed back to the call by which the rank received it.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Callable, Iterator, Sequence

from moediag.diagnosis.blame.fork_search import Decision
from moediag.diagnosis.end_states.failures import Failure
from moediag.diagnosis.schedules.align import POINT_TO_POINT
from moediag.evidence.definitions import Where, assignments, last_name, without_functions
from moediag.evidence.model import Collective, Evidence, Frame, RankEvidence
from moediag.evidence.program_source import Program, ProgramFile
from moediag.evidence.rank_stacks import of_user
from moediag.evidence.source_tree import CALLS, Scope, leaves_by, own_expressions
from moediag.records import dataclass

_DEPTH = 8  # assignments and calls that are followed
_SENT = ("send", "barrier", "new_group")  # calls that receive nothing
# Calls that give each rank something of its own.
_OWN = ("recv", "gather", "scatter", "reduce", "reduce_scatter", "all_to_all")
_SECOND = ("gather", "gather_object")  # that receive in their second argument
_NO_DATA = ("src", "dst", "group", "op", "async_op", "obj", "root")  # arguments
_CHANGES = ("update", "append", "extend", "add", "insert", "setdefault", "copy_")  # methods
_LOOKUPS = ("KeyError", "IndexError")
_DECIDES = (ast.If, ast.While)


@dataclass(frozen=True, slots=True)
class Origin:
    """The call by which a rank received what it raised over."""

    op: str
    #: ``engine.py:40``.
    line: str


def origin(failure: Failure, evidence: Evidence) -> Origin | None:
    """Where the rank received what made it fail, if its fault may be another rank's; None where
    nothing shows that, or most ranks received the same and went on."""
    seen = evidence.ranks[failure.rank]
    if seen.error is not None and any(
        frame.function == "_tensor_to_object" for frame in seen.error.frames
    ):
        return Origin("the call", failure.where.partition(" ")[0])
    left = seen.left.lines if seen.left is not None else ()
    frames = [f for text in left if (f := Frame.at(text)) is not None]
    if failure.where:
        outer = of_user(seen.error.frames, seen.libraries) if seen.error is not None else []
        frames = [f for text in (failure.where, *(one.place for one in outer[1:]))
                  if (f := Frame.at(text)) is not None]  # fmt: skip
    return _Search(seen, evidence).origin(failure, frames) if frames else None


def decided_by(seen: RankEvidence, one: Decision, evidence: Evidence) -> Origin | None:
    """The call by which a rank alone received what it decided by; None where nothing shows that,
    or all ranks of a group received the same."""
    search = _Search(seen, evidence)
    call = search.of_test(one.file, one.line)
    return Origin(call[0].op, call[1]) if call is not None and call[0].op in _OWN else None


class _Search:
    def __init__(self, seen: RankEvidence, evidence: Evidence) -> None:
        self._evidence, self._seen = evidence, seen
        self._program = Program(evidence.sources, evidence.one_node)
        self._made: dict[tuple[str, int], Collective] = {}
        for call in seen.collectives:
            for frame in map(Frame.at, (call.site, *call.callers)):
                if frame is not None and call.op not in _SENT:
                    self._made[frame.file, frame.line] = call
        self._known: dict[tuple[ast.AST, int], tuple[Collective, str] | None] = {}

    def of_test(self, name: str, line: int) -> tuple[Collective, str] | None:
        """The call from which the test of an ``if`` or ``while`` comes."""
        file = self._program.file(name)
        node = file.node(line) if file is not None else None
        if file is None or not isinstance(node, _DECIDES):
            return None
        scope = [one for one in file.around(node) if isinstance(one, Scope)][-1]
        return self._first([node.test], Where(file.names.definitions, scope), line, 0)

    def origin(self, failure: Failure, frames: Sequence[Frame]) -> Origin | None:
        name = failure.name
        for inner, frame in enumerate(frames):
            file = self._program.file(frame.file, frame.line, frame.function)
            scope = file.scope(frame.line, frame.function) if file is not None else None
            node = file.node(frame.line) if file is not None else None
            if file is None or scope is None or not isinstance(node, ast.stmt):
                return None
            at = Where(file.names.definitions, scope)
            around = [n for n in file.around(node)[:-1] if n not in file.around(scope)[:-1]]
            raises = inner or isinstance(node, ast.Raise) or leaves_by([node]) == "exit"
            handler = any(isinstance(n, ast.ExceptHandler) for n in around)
            if raises and handler and failure.after:
                caught = Frame.at(failure.after.rpartition(" at ")[2])
                name = failure.after.partition(":")[0]
                if caught is None or caught.file != frame.file or not file.node(caught.line):
                    return None
                node, raises = file.node(caught.line), False
                if not isinstance(node, ast.stmt):
                    return None
            if isinstance(node, ast.Assert):
                decides: list[ast.expr] = [node.test]
            elif raises:
                decides = _test(around, node)
                if not decides:
                    continue  # a helper that always raises: its caller decides
            else:
                decides = list(self._failing(node, name, at))
            call = self._first(decides, at, node.lineno, 0)
            if call is None or self._others_went_on(call, frames):
                return None
            return Origin(call[0].op, call[1])
        return None

    def _failing(self, node: ast.stmt, name: str, at: Where) -> Iterator[ast.expr]:
        """What may have failed in a statement: a lookup, or all of it if all was received."""
        every = list(own_expressions(node))
        if name in _LOOKUPS:
            yield from (one for one in every if isinstance(one, ast.Subscript))
            return
        called = {one.func for one in every if isinstance(one, ast.Call)}
        names = [n for n in every if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)]
        data = [n for n in names if n not in called and not _is_module(n.id, at)]
        if data and all(self._first([n], at, node.lineno, 0) for n in data):
            yield from data

    # ------------------------------------------------------------------------ back to a call

    def _first(
        self, nodes: Sequence[ast.AST], at: Where, line: int, depth: int
    ) -> tuple[Collective, str] | None:
        """The call from which one of the expressions comes, with its line."""
        found = (self._of(node, at, line, depth) for node in nodes)
        return next(filter(None, found), None)

    def _of(self, node: ast.AST, at: Where, line: int, depth: int) -> tuple[Collective, str] | None:
        if depth > _DEPTH:
            return None
        if (node, line) not in self._known:
            self._known[node, line] = None  # of one that stands for itself
            self._known[node, line] = self._found(node, at, line, depth)
        return self._known[node, line]

    def _found(
        self, node: ast.AST, at: Where, line: int, depth: int
    ) -> tuple[Collective, str] | None:
        if isinstance(node, ast.Name):
            return self._of_name(node, at, line, depth + 1)
        parts: list[ast.AST] = list(ast.iter_child_nodes(node))
        if isinstance(node, ast.Call):
            if (made := self._receives(node, at)) is not None:
                return made
            method = isinstance(node.func, ast.Attribute)
            parts = [node.func.value] if isinstance(node.func, ast.Attribute) else []
            parts += [*node.args, *(k.value for k in node.keywords)]
            for one in at.stands_for(node) if not method or _is_of_program(node, at) else ():
                if found := self._of(one.value, one.at, one.value.lineno, depth + 1):
                    return found
        elif isinstance(node, ast.Attribute):
            for one in at.file.attribute(node.attr):
                if found := self._of(one.value, one.at, one.value.lineno, depth + 1):
                    return found
        return self._first(parts, at, line, depth)

    def _of_name(
        self, name: ast.Name, at: Where, line: int, depth: int
    ) -> tuple[Collective, str] | None:
        """By the changes of a variable before the line, the last one first, up to one that replaces
        it in any case; without any, by what it stands for elsewhere."""
        file = self._program.holding(at.file)
        every = [*self._changes(name, at, line)] if file is not None else []
        before = [one for one in every if one[0] < line or one[3]]
        for number, value, replaces, _ in sorted(before or every, key=lambda one: -one[0]):
            found = value if isinstance(value, tuple) else self._of(value, at, number, depth)
            if found or (replaces and before and _always(file, number, line)):
                return found
        outside = () if every else at.file.variable(name.id, at)
        return next(
            filter(None, (self._of(o.value, o.at, o.value.lineno, depth) for o in outside)), None
        )

    def _changes(
        self, name: ast.Name, at: Where, line: int
    ) -> Iterator[tuple[int, ast.AST | tuple[Collective, str], bool, bool]]:
        """(line, what it gets, whether that replaces it, whether it holds in that line itself)."""
        for statement in getattr(at.scope, "body", ()):
            for node in without_functions(statement):
                for target, value in assignments(node):
                    root = target
                    while isinstance(root, ast.Subscript | ast.Starred):
                        root = root.value
                    if isinstance(root, ast.Name) and root.id == name.id:
                        whole = root is target and not isinstance(node, ast.AugAssign)
                        yield target.lineno, value, whole, False
                if isinstance(node, ast.comprehension):
                    targets = {n.id for n in ast.walk(node.target) if isinstance(n, ast.Name)}
                    if name.id in targets and abs(node.iter.lineno - line) <= 1:
                        yield node.iter.lineno, node.iter, True, True
                if not isinstance(node, ast.Call):
                    continue
                if (made := self._receives(node, at)) and name.id in _into(node):
                    yield node.lineno, made, True, False
                elif last_name(node.func) in _CHANGES and _method_of(node) == name.id:
                    yield from ((node.lineno, one, False, False) for one in node.args)

    def _receives(self, call: ast.Call, at: Where) -> tuple[Collective, str] | None:
        """The recorded call that a call in the source made, if it receives, and its line."""
        file = self._program.holding(at.file)
        if file is None or not CALLS.fullmatch(last_name(call.func)):
            return None
        for line in range(call.lineno, (call.end_lineno or call.lineno) + 1):
            if made := self._made.get((file.name, line)):
                return made, f"{file.name}:{line}"
        return None

    def _others_went_on(self, found: tuple[Collective, str], frames: Sequence[Frame]) -> bool:
        """Whether more than half of all ranks got the same, went through the same test and made
        another call: what differs is on this rank then."""
        call = found[0]
        if call.op in _OWN or any(map(self._by_rank, frames)):
            return False
        until = sum(map(_same_group(call), self._seen.collectives[: call.index + 1]))
        every = (seen.collectives for seen in self._evidence.ranks.values())
        went_on = sum(sum(map(_same_group(call), calls)) > until for calls in every)
        return 2 * went_on > self._evidence.world_size

    def _by_rank(self, frame: Frame) -> bool:
        """Whether a condition around a line names a rank."""
        file = self._program.file(frame.file, frame.line, frame.function)
        node = file.node(frame.line) if file is not None else None
        around = file.around(node) if file is not None and node is not None else []
        scope = next((n for n in reversed(around) if isinstance(n, Scope)), None)
        return file is not None and any(
            file.names.names_rank(n.test, scope, anywhere=True)
            for n in around
            if isinstance(n, _DECIDES) and scope is not None
        )


def _same_group(call: Collective) -> Callable[[Collective], bool]:
    """Whether another call is a collective on its group; transfers concern only their ends."""
    return lambda one: one.group == call.group and one.op not in POINT_TO_POINT


def _test(around: Sequence[ast.AST], node: ast.AST) -> list[ast.expr]:
    """What decides that a statement runs: the innermost test around it, or that of a branch which
    leaves before it."""
    for outer, child in zip(reversed(around), [*reversed([*around[1:], node])], strict=False):
        for block in (getattr(outer, field, None) for field in ("body", "orelse")):
            if isinstance(block, list) and child in block:
                earlier = block[: block.index(child)]
                left = [n for n in earlier if isinstance(n, ast.If) and leaves_by(n.body)]
                if left:
                    return [left[-1].test]
        if isinstance(outer, _DECIDES):
            return [outer.test]
    return []


def _method_of(call: ast.Call) -> str:
    """The variable whose method is called, or ""."""
    of = call.func.value if isinstance(call.func, ast.Attribute) else None
    return of.id if isinstance(of, ast.Name) else ""


def _into(call: ast.Call) -> set[str]:
    """The variables into which a call receives."""
    name = last_name(call.func)
    place = 1 if name in _SECOND else 0
    given = [*call.args[place : place + 1]]
    given += [k.value for k in call.keywords if k.arg not in _NO_DATA]
    return {n.id for one in given for n in ast.walk(one) if isinstance(n, ast.Name)}


def _always(file: ProgramFile | None, number: int, line: int) -> bool:
    """Whether a statement runs in each way to a line below it."""
    node = file.node(number) if file is not None else None
    there = file.node(line) if file is not None else None
    if file is None or node is None or there is None:
        return False
    around = file.around(there)
    return all(n in around for n in file.around(node)[:-1] if isinstance(n, ast.If | ast.Try))


def _is_module(name: str, at: Where) -> bool:
    imported = (n for n in ast.walk(at.file.tree) if isinstance(n, ast.Import | ast.ImportFrom))
    names = {(a.asname or a.name).partition(".")[0] for n in imported for a in n.names}
    return name in names or hasattr(builtins, name)


def _is_of_program(call: ast.Call, at: Where) -> bool:
    """Whether the program defines exactly one function of that name."""
    return len(at.file.functions(last_name(call.func))) == 1
