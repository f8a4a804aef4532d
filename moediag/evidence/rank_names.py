"""Whether an expression in a program depends on the rank that evaluates it.

``rank == 0``, ``is_main_process()`` and ``trainer.is_global_zero`` do, and so does a variable,
attribute or function that the program defines as such an expression. ``local_rank != -1`` does
not: it is the same on all ranks of a distributed job. Reads the syntax tree; nothing is executed.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Sequence

from moediag.evidence.definitions import Defined, Definitions, Where, is_distributed, last_name
from moediag.evidence.rank_words import (
    DEVICE,
    is_number,
    is_same_everywhere,
    is_variable,
    named,
    variable,
)
from moediag.evidence.same_values import same

_GLOBAL = frozenset(("rank", "global_rank", "world_rank", "ddp_rank", "process_index"))
_LOCAL = frozenset(("local_rank", "localrank", "ddp_local_rank", "local_process_index"))
# Of these, the names that are true on global rank 0 alone.
_FIRST = frozenset(
    ("is_main_process", "main_process", "is_global_zero", "master_process", "is_master",
     "is_main", "is_rank_zero", "is_rank0", "is_world_process_zero", "is_master_process")
)  # fmt: skip
# Those that are true on the first rank of each node.
_FIRST_OF_NODE = frozenset(
    ("is_local_main_process", "local_main_process", "is_local_master", "is_local_zero",
     "is_local_process_zero", "is_local_master_process")
)  # fmt: skip
_COMPARE: dict[type, Callable[[int, int], bool]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le,
    ast.Gt: operator.gt, ast.GtE: operator.ge,
}  # fmt: skip
_ARITHMETIC: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Mod: operator.mod,
    ast.FloorDiv: operator.floordiv,
}  # fmt: skip
_DEPTH = 4  # definitions followed from a name
_LENGTHS = frozenset(("range", "islice", "min", "max", "len", "list", "zip", "enumerate"))


class RankNames:
    """Finds what depends on the rank in one file. ``one_node``: all ranks of the job are on one
    node, so that local and global ranks are the same numbers. ``others``: see
    :class:`.Definitions`."""

    def __init__(
        self,
        tree: ast.Module,
        one_node: bool = False,
        others: Callable[[str], Sequence[Definitions]] = lambda _: (),
    ) -> None:
        self.definitions = Definitions(tree, others)
        self._on_all: dict[tuple[ast.expr, int], tuple[bool | None, ...]] = {}
        self._numbers = _GLOBAL | _LOCAL if one_node else _GLOBAL
        self._first = _FIRST | _FIRST_OF_NODE if one_node else _FIRST

    def names_rank(self, test: ast.expr, scope: ast.AST, anywhere: bool = False) -> bool:
        """Whether the value of ``test`` depends on the rank. ``anywhere``: also if only part of an
        arithmetic expression does, as in the length of a loop."""
        return self._depends(test, Where(self.definitions, scope), 0, anywhere)

    def holds(self, test: ast.expr, scope: ast.AST, rank: int, size: int) -> bool | None:
        """Whether ``test`` is true on global rank ``rank`` of ``size``, if its names mean what they
        say; None where that is not known."""
        return self._holds(test, Where(self.definitions, scope), rank, size, 0)

    def on_all(self, test: ast.expr, scope: ast.AST, size: int) -> tuple[bool | None, ...]:
        """:meth:`holds` on each of ``size`` ranks."""
        known = self._on_all.get((test, size))
        if known is None:
            by_rank = size and self.names_rank(test, scope)
            ranks = range(size) if by_rank else ()
            known = tuple(self.holds(test, scope, rank, size) for rank in ranks)
            self._on_all[test, size] = known
        return known

    def singled_out(self, test: ast.expr, scope: ast.AST, size: int = 0) -> int | None:
        """The one global rank that ``test`` compares with: 0 of ``rank == 0``, ``rank != 0``,
        ``is_main_process`` and of these with ``and``, the last one of ``rank == world_size - 1``;
        None of others."""
        return self._singled(test, Where(self.definitions, scope), size, 0)

    def alternative(self, test: ast.expr, scope: ast.AST, size: int = 0) -> int | None:
        """The one rank that an alternative of ``test`` singles out, if all else in it is the same
        on all ranks: 0 of ``rank == 0 or step < 16``."""
        if not isinstance(test, ast.BoolOp):
            return None
        at, naming = Where(self.definitions, scope), []
        for part in test.values:
            if self._depends(part, at, 0):
                naming.append(part)
            elif not same(part, at):
                return None
        if len(naming) != 1:
            return None
        inner = self.alternative(naming[0], scope, size)
        if inner is None and isinstance(test.op, ast.Or):
            return self._singled(naming[0], at, size, 0)
        return inner

    def definition(self, node: ast.expr, scope: ast.AST) -> ast.expr | None:
        """The one expression that a name stands for, if there is one."""
        one = self._only(node, Where(self.definitions, scope), 0)
        return one.value if one is not None else None

    # ------------------------------------------------------------------------ whether it depends

    def _depends(self, test: ast.expr, at: Where, depth: int, anywhere: bool = False) -> bool:
        if isinstance(test, ast.BoolOp):
            return any(self._depends(v, at, depth, anywhere) for v in test.values)
        if isinstance(test, ast.UnaryOp):
            return self._depends(test.operand, at, depth, anywhere)
        if isinstance(test, ast.NamedExpr):
            return self._depends(test.value, at, depth, anywhere)
        if isinstance(test, ast.Compare):
            if is_same_everywhere(test):
                return False
            sides = [test.left, *test.comparators]
            if last_name(test.left).lower() in DEVICE and is_number(test.comparators[0]):
                return True
            return any(self._is_rank(side, at, depth) for side in sides)
        if anywhere and isinstance(test, ast.IfExp):
            return self._depends(test.test, at, depth, anywhere)
        if anywhere and isinstance(test, ast.Call) and last_name(test.func) in _LENGTHS:
            return any(self._is_rank(a, at, depth, anywhere=True) for a in test.args)
        return self._is_rank(test, at, depth, anywhere)

    def _is_rank(self, value: ast.expr, at: Where, depth: int, anywhere: bool = False) -> bool:
        """Whether ``value`` is a rank's number, or true on some ranks only."""
        if isinstance(value, ast.BinOp):  # rank % 8
            return any(self._is_rank(v, at, depth, anywhere) for v in (value.left, value.right))
        if isinstance(value, ast.IfExp) and anywhere:
            return self._depends(value.test, at, depth, anywhere)
        if isinstance(value, ast.IfExp) and is_distributed(value.test):
            return self._depends(value.body, at, depth)
        if isinstance(value, ast.Subscript):  # os.environ["RANK"], data[rank::world_size]
            ends = (
                (value.slice.lower, value.slice.upper)
                if anywhere and isinstance(value.slice, ast.Slice)
                else ()
            )
            return is_variable(value.slice) or any(
                end is not None and self._is_rank(end, at, depth, anywhere) for end in ends
            )
        if isinstance(value, ast.Call):
            return self._is_called_so(value, at, depth, anywhere)
        if isinstance(value, ast.Name | ast.Attribute):
            return named(last_name(value)) or self._is_defined_so(value, at, depth)
        return False

    def _is_called_so(self, call: ast.Call, at: Where, depth: int, anywhere: bool) -> bool:
        """Whether the call returns a rank or a comparison with one, by its name or, for a function
        of the program, by its definition."""
        name = last_name(call.func)
        if name.endswith("get_rank") or named(name.removeprefix("get_")):
            return True
        if name in ("int", "str", "bool", "getenv", "get") and call.args:
            first = call.args[0]
            return is_variable(first) or self._is_rank(first, at, depth, anywhere)
        return depth < _DEPTH and any(
            self._depends(one.value, one.at, depth + 1) for one in at.stands_for(call)
        )

    def _is_defined_so(self, name: ast.expr, at: Where, depth: int) -> bool:
        """Whether every definition of the variable or attribute is a rank or a comparison with
        one."""
        if depth >= _DEPTH:
            return False
        made = [one for one in at.stands_for(name) if not isinstance(one.value, ast.Constant)]
        return bool(made) and all(self._depends(one.value, one.at, depth + 1) for one in made)

    # ------------------------------------------------------------------------ on which ranks

    def _holds(self, test: ast.expr, at: Where, rank: int, size: int, depth: int) -> bool | None:
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            inner = self._holds(test.operand, at, rank, size, depth)
            return None if inner is None else not inner
        if isinstance(test, ast.BoolOp):
            parts = {self._holds(value, at, rank, size, depth) for value in test.values}
            decisive = isinstance(test.op, ast.Or)
            return decisive if decisive in parts else None if None in parts else not decisive
        if isinstance(test, ast.Call) and last_name(test.func) == "bool" and len(test.args) == 1:
            return self._holds(test.args[0], at, rank, size, depth)
        value = self._value(test, at, rank, size, depth)
        return None if value is None else bool(value)

    def _value(
        self, node: ast.expr, at: Where, rank: int, size: int, depth: int
    ) -> int | bool | None:
        if isinstance(node, ast.Constant):
            number = node.value
            if isinstance(number, str) and number.isdecimal() and len(number) < 10:
                return int(number)  # os.environ["RANK"] == "0"
            return number if isinstance(number, int) else None
        if isinstance(node, ast.Call) and last_name(node.func) == "int" and len(node.args) == 1:
            return self._value(node.args[0], at, rank, size, depth)
        if (told := variable(node)) in ("RANK", "WORLD_SIZE"):
            return rank if told == "RANK" else size or None
        if told == "LOCAL_RANK" and "local_rank" in self._numbers:
            return rank
        if isinstance(node, ast.IfExp) and is_distributed(node.test):
            return self._value(node.body, at, rank, size, depth)
        act: Callable[[int, int], int] | None = None
        if isinstance(node, ast.BinOp):
            left, act, right = node.left, _ARITHMETIC.get(type(node.op)), node.right
        elif isinstance(node, ast.Compare) and len(node.ops) == 1:
            left, act, right = node.left, _COMPARE.get(type(node.ops[0])), node.comparators[0]
        if act is not None:
            first, second = (self._value(n, at, rank, size, depth) for n in (left, right))
            try:
                return None if first is None or second is None else act(first, second)
            except ArithmeticError:
                return None
        # get_rank(group) is the rank in that group.
        if not _has_arguments(node) and not _is_bound(node, at):
            name = last_name(node).lstrip("_").lower().removeprefix("get_")
            if name in self._numbers:
                return rank
            if name in ("world_size", "num_processes"):
                return size
            if name in self._first:
                return rank == 0
        one = self._only(node, at, depth)
        return None if one is None else self._holds_value(one, rank, size, depth + 1)

    def _holds_value(self, one: Defined, rank: int, size: int, depth: int) -> int | bool | None:
        if isinstance(one.value, ast.BoolOp | ast.UnaryOp):
            return self._holds(one.value, one.at, rank, size, depth)
        return self._value(one.value, one.at, rank, size, depth)

    def _singled(self, test: ast.expr, at: Where, size: int, depth: int) -> int | None:
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            return self._singled(test.operand, at, size, depth)
        if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
            found = {self._singled(value, at, size, depth) for value in test.values} - {None}
            return found.pop() if len(found) == 1 else None
        if isinstance(test, ast.Compare):
            equal = len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq | ast.NotEq)
            if not equal or self._value(test.left, at, -7, size, depth) != -7:
                return None
            number = {self._value(test.comparators[0], at, r, size, depth) for r in (-7, -9)}
            return number.pop() if len(number) == 1 else None
        by_name = not _has_arguments(test) and not _is_bound(test, at)
        if by_name and last_name(test).lstrip("_").lower() in self._first:
            return 0
        one = self._only(test, at, depth)
        return None if one is None else self._singled(one.value, one.at, size, depth + 1)

    def _only(self, node: ast.expr, at: Where, depth: int) -> Defined | None:
        """The one definition that ``node`` may have."""
        made = at.stands_for(node) if depth < _DEPTH else []
        return made[0] if len(made) == 1 else None


def _has_arguments(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and bool(node.args or node.keywords)


def _is_bound(node: ast.expr, at: Where) -> bool:
    return isinstance(node, ast.Name) and node.id in at.arguments
