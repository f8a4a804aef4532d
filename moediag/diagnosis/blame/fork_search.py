"""The search for the decisions after which two groups of ranks took different paths.

From the last call that both made, the control flow of the functions that both ran shows which
statements lead one side to its call and not the other. What the evidence rules out is left out.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Sequence

from moediag.diagnosis.blame.fork_sides import Side, made_at, part_from
from moediag.evidence.control_flow import BEGIN, CAUGHT, END, FALSE, TRUE, Edge, Flow, Node
from moediag.evidence.definitions import last_name
from moediag.evidence.model import Collective, Evidence, Frame
from moediag.evidence.program_source import Program, ProgramFile
from moediag.evidence.source_tree import Scope, calls_once, communicates, own_expressions
from moediag.records import dataclass

_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_SOMETIMES = "?"  # a library's function that does not always make a call
_DEEP = 4  # calls that are followed


@dataclass(frozen=True, slots=True)
class Decision:
    """A statement after which the two sides may have parted."""

    file: str
    line: int
    #: The ``if``, loop or ``except`` as the user wrote it.
    text: str
    #: How each side left it, as far as only one way leads to where it is; "" otherwise. One of
    #: control_flow's words.
    ways: tuple[str, str]
    #: The first line that only that side executed, and its text; 0 without one.
    only: tuple[tuple[int, str], tuple[int, str]]


class Search:
    """Finds the decisions between two sides."""

    def __init__(self, evidence: Evidence, sides: tuple[Side, Side]) -> None:
        self._sides = sides
        self._evidence = evidence
        self.program = Program(evidence.sources, evidence.one_node)
        self._calls = self._made()
        self._sure: dict[str, bool] = {}

    def _made(self) -> dict[tuple[str, str], set[tuple[int, str]]]:
        """By function, the lines that made calls, with the function called there, or ""."""
        found: dict[tuple[str, str], set[tuple[int, str]]] = {}
        for chain, always in self._chains(self._evidence.source_names):
            inner = [one.function for one in chain[1:]]
            for one, called in zip(chain, (*inner, "" if always else _SOMETIMES), strict=True):
                found.setdefault((one.file, one.function), set()).add((one.line, called))
        return found

    def _chains(self, own: Collection[str]) -> Iterator[tuple[tuple[Frame, ...], bool]]:
        """The lines that led to each place of calls, and whether the innermost certainly makes one:
        it is the call itself, or a library made one for it in every step."""
        for side in self._sides:
            calls = self._evidence.ranks[side.ranks[0]].collectives
            steps: dict[tuple[str, tuple[str, ...]], set[int]] = {}
            examples: dict[tuple[str, tuple[str, ...]], Collective] = {}
            for call in calls:
                steps.setdefault(call.place, set()).add(call.step)
                examples[call.place] = call
            every = {call.step for call in calls[:-1]} - {calls[-1].step} if calls else set()
            for place, call in examples.items():
                if chain := made_at(call, own):
                    direct = call.site.partition(":")[0] in own
                    often = direct or every <= steps[place]
                    yield chain, often and not self._of_buffers(call, chain[-1])

    def _of_buffers(self, call: Collective, line: Frame) -> bool:
        """Whether DDP seems to make the call in a forward: the next one after an evaluation
        broadcasts no buffers."""
        file = self.program.file(line.file, line.line, line.function)
        node = file.node(line.line) if file is not None else None
        written = isinstance(node, ast.stmt) and communicates([node])
        return call.op == "broadcast" and not written

    def decisions(self) -> list[Decision]:
        """Those in the functions that made the last common call, the innermost first, up to one in
        which both sides still are."""
        one, two = self._sides
        found: list[Decision] = []
        for level in self._levels():
            chains = (part_from(one.chain, level), part_from(two.chain, level))
            if not any(chains):
                continue
            found_there = self._scope(level)
            if found_there is None:
                return []
            file, scope = found_there
            start = file.node(level.line) if one.common is not None else BEGIN
            if any(self._same_visit(side, level, start) for side in self._sides):
                return []
            before = level == one.before[-1] if one.before else False
            again = self._called_again(level)
            found += self._between(file, scope, start, chains, 0, before, again)
            if all(chains):
                break
        return found

    def _same_visit(self, side: Side, level: Frame, start: Node | None) -> bool:
        """Whether a side may still be in the statement that made the last common call: one such as
        ``loss.backward()`` makes several."""
        if side.common is None or side.call is None or side.chain[-1] != side.before[-1]:
            return False
        if level != side.before[-1] or side.call.step > side.common.step:
            return False
        return not (isinstance(start, ast.stmt) and calls_once(start))

    def _called_again(self, level: Frame) -> bool:
        """Whether the function of ``level`` may have been called again from the same lines: one of
        these is in a loop, or they are not known."""
        before = self._sides[0].before
        above = before[: before.index(level)] if level in before else ()
        if not above or above[0].function != "<module>":
            return True
        for line in above:
            file = self.program.file(line.file)
            node = file.node(line.line) if file is not None else None
            if file is None or node is None:
                return True
            if any(isinstance(outer, _LOOPS) for outer in file.around(node)):
                return True
        return False

    def _levels(self) -> list[Frame]:
        """The lines of the last common call, innermost first, as far as both sides made it there;
        without one the innermost function in which both sides are."""
        one, two = self._sides
        if one.common is None or two.common is None:
            shared = [line for line in reversed(one.chain) if part_from(two.chain, line)]
            return shared[:1]
        return [line for line in reversed(one.before) if line in two.before]

    def _between(
        self,
        file: ProgramFile,
        scope: Scope,
        start: Node | None,
        chains: tuple[tuple[Frame, ...], tuple[Frame, ...]],
        depth: int,
        before: bool = False,
        again: bool = True,
    ) -> list[Decision]:
        """The decisions from ``start`` in a function to the places of both chains; an empty chain
        is the function's end. ``before``: the last common call was made in ``start`` itself, before
        what the user's functions did that it calls. ``again``: the function may run again from its
        beginning."""
        if depth > _DEEP:
            return []
        function = getattr(scope, "name", "<module>")
        # The last common call was made in `start` itself and completed.
        direct = any(
            not called and file.node(line) is start for line, called in self._lines(file, function)
        )
        nodes = [file.node(chain[0].line) if chain else END for chain in chains]
        targets = [node for node in nodes if node is not None]
        if start is None or len(targets) < len(nodes):
            return []
        repeats = again and function != "<module>" and END not in targets and start != BEGIN
        full = [n for n in file.around(start) if file.same_on_all_ranks(n, scope)]
        flow = Flow(scope, repeats=repeats, full=full)
        closed = self._closed(file, function)
        ways, possible = [], []
        for target, side in zip(targets, self._sides, strict=True):
            paths = flow.paths(start, target, closed - {target})
            ways.append(
                frozenset(
                    edge
                    for edge in paths
                    if edge.start is not start or edge.how != CAUGHT or not direct
                )
            )
            never = self._never(file, scope, paths, side)
            possible.append(flow.paths(start, target, closed - {target}, never) or paths)
        for own, other in ((0, 1), (1, 0)):
            if targets[own] is start and not direct and not ways[own]:
                # This side did not leave the function that is called there. The other may have left
                # it without a call, if the common call came before it (DDP's broadcast in a
                # forward), or an exception may have taken it out of it.
                inside = before and ways[other] and _calls_always(start)
                return (self._inside(chains[own][1:], own, depth) if inside else []) or [
                    _caught(file, edge, other)
                    for edge in ways[other]
                    if edge.start is start and edge.how == CAUGHT and isinstance(edge.to, ast.AST)
                ]
        if not all(ways):
            return []
        found = list(self._split(file, scope, ways, possible))
        for own, other in ((0, 1), (1, 0)):
            inner = chains[own][1:]
            through = any(edge.to is targets[own] for edge in ways[other])
            if through and targets[own] is not targets[other]:
                within = self._inside(inner, own, depth)
                found += within or _chosen(file, targets[own], inner, own)
        return found

    def _never(
        self, file: ProgramFile, scope: Scope, edges: Collection[Edge], side: Side
    ) -> frozenset[Edge]:
        """The branches that no rank of a side takes, by conditions that name the rank."""
        size = self._evidence.world_size
        found = set()
        for node in {edge.start for edge in edges if isinstance(edge.start, ast.If)}:
            held = {file.names.holds(node.test, scope, rank, size) for rank in side.ranks}
            if held in ({True}, {False}):
                other = FALSE if True in held else TRUE
                found |= {edge for edge in edges if edge.start is node and edge.how == other}
        return frozenset(found)

    def _inside(self, inner: tuple[Frame, ...], own: int, depth: int) -> list[Decision]:
        """Those in a function that one side is in, and that the other left without a call."""
        if not inner:
            return []
        found = self._scope(inner[0])
        chains = (inner, ()) if own == 0 else ((), inner)
        return self._between(*found, BEGIN, chains, depth + 1) if found is not None else []

    def _scope(self, line: Frame) -> tuple[ProgramFile, Scope] | None:
        """The file and the function of a line, if its source is known."""
        file = self.program.file(line.file, line.line, line.function)
        scope = file.scope(line.line, line.function) if file is not None else None
        return (file, scope) if file is not None and scope is not None else None

    def _lines(self, file: ProgramFile, function: str) -> set[tuple[int, str]]:
        return self._calls.get((file.name, function), set())

    def _closed(self, file: ProgramFile, function: str) -> frozenset[Node]:
        """Statements that certainly make a call when they run."""
        found = set()
        for line, called in self._lines(file, function):
            node = file.node(line)
            if node is not None and (not called or self._always(called)):
                found |= set() if _choice(node, called) else {node}
        return frozenset(found)

    def _always(self, function: str) -> bool:
        """Whether a function makes a call in every case."""
        if function not in self._sure:
            self._sure[function] = False  # as long as it is not known, of one that calls itself
            self._sure[function] = self._leaves_by_a_call(function)
        return self._sure[function]

    def _leaves_by_a_call(self, function: str) -> bool:
        made = [(f, lines) for (f, name), lines in self._calls.items() if name == function]
        if len(made) != 1:
            return False
        found = self._scope(Frame(made[0][0], min(made[0][1])[0], function))
        if found is None:
            return False
        file, scope = found
        # A loop over what all ranks have alike, such as the parameters, took a turn before.
        full = [
            loop
            for line, _ in made[0][1]
            for loop in file.around(file.node(line) or END)
            if isinstance(loop, ast.For) and file.same_on_all_ranks(loop, scope)
        ]
        return not Flow(scope, full=full).paths(BEGIN, END, self._closed(file, function))

    # -------------------------------------------------------------------- what parts them

    def _split(
        self,
        file: ProgramFile,
        scope: Scope,
        ways: Sequence[frozenset[Edge]],
        possible: Sequence[frozenset[Edge]],
    ) -> Iterator[Decision]:
        """``possible``: of ``ways``, without the branches that ranks of a side never take."""
        by_node: dict[Node, tuple[set[Edge], set[Edge]]] = {}
        for side, edges in enumerate(ways):
            for edge in edges:
                by_node.setdefault(edge.start, (set(), set()))[side].add(edge)
        for node, sides in by_node.items():
            if not all(sides) or not isinstance(node, ast.AST):
                continue
            one, two = plain = (
                {e for e in sides[0] if e.how != CAUGHT},
                {e for e in sides[1] if e.how != CAUGHT},
            )
            even = file.same_on_all_ranks(node, scope) or self._same_batches(file, node)
            told = not possible[0].isdisjoint(one - two) or not possible[1].isdisjoint(two - one)
            if one and two and told:
                decided = self._around_even(file, scope, node, by_node) if even else node
                if decided is not None:
                    yield _decision(file, decided, by_node[decided])
            for own, other in ((0, 1), (1, 0)):
                for edge in sides[own] - plain[own]:
                    # Only by the exception, or never by it on the other side.
                    if (plain[other] and not plain[own]) or edge not in sides[other]:
                        yield _caught(file, edge, own)

    def _around_even(
        self, file: ProgramFile, scope: Scope, node: Node, known: Collection[Node]
    ) -> ast.If | None:
        """The innermost ``if`` around a choice that is the same on all ranks that come to it."""
        for outer in reversed(file.around(node)[:-1]):
            if not isinstance(outer, ast.If) or outer not in known:
                continue
            if not file.same_on_all_ranks(outer, scope):
                return outer
        return None

    def _same_batches(self, file: ProgramFile, node: ast.AST) -> bool:
        """Whether a loop over a data loader took as many turns on both sides."""
        counts = [self._batches(file, node, side) for side in self._sides]
        return None not in counts and len(set(counts)) == 1

    def _batches(self, file: ProgramFile, node: ast.AST, side: Side) -> int | None:
        line = f"{file.name}:{getattr(node, 'lineno', 0)} "
        given = [
            one.number
            for one in self._evidence.ranks[side.ranks[0]].batches
            if one.line.startswith(line)
        ]
        return sum(given) if given else None


def _calls_always(node: Node) -> bool:
    """Whether a statement has no expression that may be left out."""
    sometimes = (ast.IfExp, ast.BoolOp, ast.Lambda, ast.comprehension)
    return isinstance(node, ast.stmt) and not any(isinstance(n, sometimes) for n in ast.walk(node))


def _choice(node: Node, called: str) -> tuple[ast.expr, bool] | None:
    """The expression in a statement that decides whether it calls a function, and its value if it
    does: ``x > 1`` of ``f(x) if x > 1 else y`` and of ``x > 1 and f(x)``."""
    for part in own_expressions(node) if isinstance(node, ast.stmt) and called else ():
        choices: list[tuple[ast.expr, ast.expr, bool]] = []
        if isinstance(part, ast.IfExp):
            choices = [(part.body, part.test, True), (part.orelse, part.test, False)]
        elif isinstance(part, ast.BoolOp):
            holds = isinstance(part.op, ast.And)
            pairs = zip(part.values[1:], part.values, strict=False)
            choices = [(value, before, holds) for value, before in pairs]
        for value, test, holds in choices:
            if any(isinstance(n, ast.Call) and last_name(n) == called for n in ast.walk(value)):
                return test, holds
    return None


def _chosen(
    file: ProgramFile, node: Node, inner: tuple[Frame, ...], own: int
) -> Iterator[Decision]:
    """That one side made a call which an expression of its statement decides."""
    if inner and (choice := _choice(node, inner[0].function)) is not None:
        test, holds = choice
        ways = (TRUE, FALSE) if holds == (own == 0) else (FALSE, TRUE)
        yield Decision(file.name, test.lineno, file.written(test), ways, ((0, ""), (0, "")))


def _caught(file: ProgramFile, edge: Edge, own: int) -> Decision:
    """That one side came into a handler."""
    edges = (set(), {edge}) if own else ({edge}, set())
    return _decision(file, edge.to, edges)


def _decision(file: ProgramFile, node: Node, sides: tuple[set[Edge], set[Edge]]) -> Decision:
    ways, only = [], []
    for own, other in (sides, sides[::-1]):
        taken = own - other or own
        edge = next(iter(taken)) if len({(e.to, e.how) for e in taken}) == 1 else None
        ways.append(edge.how if edge is not None else "")
        # A loop was executed before as well.
        again = isinstance(edge.to, _LOOPS) if edge is not None else True
        if edge is None or again or edge.to in {e.to for e in other}:
            line = 0
        else:
            line = getattr(edge.to, "lineno", 0)
        only.append((line, file.text(line)))
    line = getattr(node, "lineno", 0)
    head = file.head(node) if isinstance(node, ast.AST) else ""
    return Decision(file.name, line, head, (ways[0], ways[1]), (only[0], only[1]))
