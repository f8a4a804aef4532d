"""Whether an expression in a program depends on the rank that evaluates it.

``rank == 0``, ``is_main_process()`` and ``trainer.is_global_zero`` do, and so does a variable,
attribute or function that the same file defines as such an expression. ``local_rank != -1`` does
not: it is the same on all ranks of a distributed job. Reads the syntax tree; nothing is executed.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator

_AXIS = "dp|ddp|fsdp|tp|pp|cp|ep|sp|mp|etp|pipe|pipeline|stage|dp_shard|dp_replicate"
# Names that hold a rank's number. `lora_rank`, `matrix_rank`, `rank_loss` are something else.
_NUMBER = re.compile(
    r"(?:(?:my|this|cur|current|self|process|proc|worker|world|global|local|node|group|mpi|dist"
    rf"|{_AXIS}|(?:{_AXIS})_(?:local|global|world|group))_)?rank|\w*parallel_(?:\w+_)?rank"
    r"|(?:local_)?process_index|(?:local|global|node)rank|rank_id"
)
_LONGEST = 100  # characters of such a name
# Names that are true on some ranks only.
_BOOLEAN = re.compile(
    r"(?:is|am|on|not)_?(?:the_)?(?:(?:global|local|world|node)_)?"
    r"(?:main|master|chief|primary|coordinator)(?:_?(?:process|rank|node|worker|proc))?"
    r"|(?:main|master|chief)_(?:process|rank|proc)|(?:is_)?rank_?(?:zero|0)"
    r"|is_(?:(?:world|local|global)_(?:process_|rank_)?|process_|rank_)zero|is_(?:last|first|root|leader)_"
    r"(?:rank|process|stage|node)|is_pipeline_(?:first|last)_stage|should_save",
    re.IGNORECASE,
)
# Names of a device's number, which is a rank's where it is compared with a number.
_DEVICE = frozenset(("gpu", "gpu_id", "device_id", "device_index", "local_gpu"))
_VARIABLES = frozenset(
    ("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "GLOBAL_RANK", "PMI_RANK", "SLURM_PROCID",
     "SLURM_LOCALID", "OMPI_COMM_WORLD_RANK")
)  # fmt: skip
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
_DEPTH = 3  # definitions followed from a name
_LENGTHS = frozenset(("range", "islice", "min", "max", "len", "list", "zip", "enumerate"))

Function = ast.FunctionDef | ast.AsyncFunctionDef
Values = dict[str, list[ast.expr]]  # by name


class RankNames:
    """Finds what depends on the rank in one file. ``one_node``: all ranks of the job are on one
    node, so that local and global ranks are the same numbers."""

    def __init__(self, tree: ast.Module, one_node: bool = False) -> None:
        self.tree = tree
        self._numbers = _GLOBAL | _LOCAL if one_node else _GLOBAL
        self._first = _FIRST | _FIRST_OF_NODE if one_node else _FIRST
        self._functions: dict[str, list[Function]] = {}
        self._attributes: Values = {}
        self._variables: dict[ast.AST, Values] = {}
        for node in ast.walk(tree):
            if isinstance(node, Function):
                self._functions.setdefault(node.name, []).append(node)
            for target, value in _assignments(node):
                if isinstance(target, ast.Attribute):
                    self._attributes.setdefault(target.attr, []).append(value)

    def names_rank(
        self, test: ast.expr, scope: ast.AST, anywhere: bool = False, depth: int = 0
    ) -> bool:
        """Whether the value of ``test`` depends on the rank. ``anywhere``: also if only part of an
        arithmetic expression does, as in the length of a loop."""
        if isinstance(test, ast.BoolOp):
            return any(self.names_rank(v, scope, anywhere, depth) for v in test.values)
        if isinstance(test, ast.UnaryOp):
            return self.names_rank(test.operand, scope, anywhere, depth)
        if isinstance(test, ast.NamedExpr):
            return self.names_rank(test.value, scope, anywhere, depth)
        if isinstance(test, ast.Compare):
            if _is_same_everywhere(test):
                return False
            sides = [test.left, *test.comparators]
            if last_name(test.left).lower() in _DEVICE and _is_number(test.comparators[0]):
                return True
            return any(self._is_rank(side, scope, depth) for side in sides)
        if anywhere and isinstance(test, ast.IfExp):
            return self.names_rank(test.test, scope, anywhere, depth)
        if anywhere and isinstance(test, ast.Call) and last_name(test.func) in _LENGTHS:
            return any(self._is_rank(a, scope, depth, anywhere=True) for a in test.args)
        return self._is_rank(test, scope, depth, anywhere)

    def holds(
        self, test: ast.expr, scope: ast.AST, rank: int, size: int, depth: int = 0
    ) -> bool | None:
        """Whether ``test`` is true on global rank ``rank`` of ``size``, if its names mean what they
        say; None where that is not known."""
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            inner = self.holds(test.operand, scope, rank, size, depth)
            return None if inner is None else not inner
        if isinstance(test, ast.BoolOp):
            parts = {self.holds(value, scope, rank, size, depth) for value in test.values}
            decisive = isinstance(test.op, ast.Or)
            return decisive if decisive in parts else None if None in parts else not decisive
        value = self._value(test, scope, rank, size, depth)
        return None if value is None else bool(value)

    def singled_out(self, test: ast.expr, scope: ast.AST, depth: int = 0) -> int | None:
        """The one global rank that ``test`` compares with: 0 of ``rank == 0``, ``rank != 0``,
        ``is_main_process`` and of these with ``and``; None of others."""
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            return self.singled_out(test.operand, scope, depth)
        if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
            found = {self.singled_out(value, scope, depth) for value in test.values} - {None}
            return found.pop() if len(found) == 1 else None
        if isinstance(test, ast.Compare):
            equal = len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq | ast.NotEq)
            number = test.comparators[0]
            if equal and self._value(test.left, scope, -7, 0, depth) == -7 and _is_number(number):
                return int(number.value)  # type: ignore[attr-defined]
            return None
        if isinstance(test, ast.Call) and (test.args or test.keywords):
            return None
        if last_name(test).lstrip("_").lower() in self._first:
            return 0
        if isinstance(test, ast.Name) and depth < _DEPTH:
            made = self._in(scope).get(test.id) or self._in(self.tree).get(test.id, [])
            return self.singled_out(made[0], scope, depth + 1) if len(made) == 1 else None
        return None

    def _value(
        self, node: ast.expr, scope: ast.AST, rank: int, size: int, depth: int
    ) -> int | bool | None:
        if isinstance(node, ast.Constant):
            return node.value if isinstance(node.value, int) else None
        act: Callable[[int, int], int] | None = None
        if isinstance(node, ast.BinOp):
            left, act, right = node.left, _ARITHMETIC.get(type(node.op)), node.right
        elif isinstance(node, ast.Compare) and len(node.ops) == 1:
            left, act, right = node.left, _COMPARE.get(type(node.ops[0])), node.comparators[0]
        if act is not None:
            first, second = (self._value(n, scope, rank, size, depth) for n in (left, right))
            try:
                return None if first is None or second is None else act(first, second)
            except ArithmeticError:
                return None
        if isinstance(node, ast.Call) and (node.args or node.keywords):
            return None  # get_rank(group) is the rank in that group
        name = last_name(node).lstrip("_").lower().removeprefix("get_")
        if name in self._numbers:
            return rank
        if name in ("world_size", "num_processes"):
            return size
        if name in self._first:
            return rank == 0
        if isinstance(node, ast.Name) and depth < _DEPTH:
            made = self._in(scope).get(node.id) or self._in(self.tree).get(node.id, [])
            return self.holds(made[0], scope, rank, size, depth + 1) if len(made) == 1 else None
        return None

    def _is_rank(self, value: ast.expr, scope: ast.AST, depth: int, anywhere: bool = False) -> bool:
        """Whether ``value`` is a rank's number, or true on some ranks only."""
        if isinstance(value, ast.BinOp):  # rank % 8
            return any(self._is_rank(v, scope, depth, anywhere) for v in (value.left, value.right))
        if isinstance(value, ast.IfExp) and anywhere:
            return self.names_rank(value.test, scope, anywhere, depth)
        if isinstance(value, ast.Subscript):  # os.environ["RANK"], data[rank::world_size]
            ends = (
                (value.slice.lower, value.slice.upper)
                if anywhere and isinstance(value.slice, ast.Slice)
                else ()
            )
            return _is_variable(value.slice) or any(
                end is not None and self._is_rank(end, scope, depth, anywhere) for end in ends
            )
        if isinstance(value, ast.Call):
            return self._is_called_so(value, scope, depth, anywhere)
        if isinstance(value, ast.Name):
            return _named(value.id) or self._is_defined_so(value.id, scope, depth)
        if isinstance(value, ast.Attribute):
            return _named(value.attr) or self._is_defined_so(value.attr, None, depth)
        return False

    def _is_called_so(self, call: ast.Call, scope: ast.AST, depth: int, anywhere: bool) -> bool:
        """Whether the call returns a rank or a comparison with one, by its name or, for a function
        of this file, by its definition."""
        name = last_name(call.func)
        if name.endswith("get_rank") or _named(name.removeprefix("get_")):
            return True
        if name in ("int", "str", "bool", "getenv", "get") and call.args:
            first = call.args[0]
            return _is_variable(first) or self._is_rank(first, scope, depth, anywhere)
        return depth < _DEPTH and any(
            self.names_rank(returned, definition, depth=depth + 1)
            for definition in self._functions.get(name, ())
            for returned in _returned(definition)
        )

    def _is_defined_so(self, name: str, scope: ast.AST | None, depth: int) -> bool:
        """Whether every definition of the variable ``name`` in ``scope``, else in the module, or of
        the attribute ``name`` (without a scope), is a rank or a comparison with one."""
        if depth >= _DEPTH:
            return False
        if scope is None:
            made = self._attributes.get(name, [])
        else:
            made = self._in(scope).get(name) or self._in(self.tree).get(name, [])
        values = [value for value in made if not isinstance(value, ast.Constant)]
        around = scope or self.tree
        return bool(values) and all(self.names_rank(v, around, depth=depth + 1) for v in values)

    def _in(self, scope: ast.AST) -> Values:
        """Values assigned to each variable in a function, or outside any in the module."""
        if scope not in self._variables:
            found = self._variables[scope] = {}
            for statement in getattr(scope, "body", ()):
                for node in _without_functions(statement):
                    for target, value in _assignments(node):
                        if isinstance(target, ast.Name):
                            found.setdefault(target.id, []).append(value)
        return self._variables[scope]


def last_name(node: ast.expr) -> str:
    """``is_main_process`` of ``accelerator.is_main_process`` and of a call of it; "" for others."""
    if isinstance(node, ast.Call):
        return last_name(node.func)
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _named(name: str) -> bool:
    bare = name.lstrip("_").lower()
    if len(bare) > _LONGEST:
        return False
    return _NUMBER.fullmatch(bare) is not None or _BOOLEAN.fullmatch(bare) is not None


def _is_variable(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value in _VARIABLES


def _is_same_everywhere(test: ast.Compare) -> bool:
    """``local_rank != -1``, ``rank is not None``, ``rank >= 0``: true on every rank of a job that
    is distributed."""
    if len(test.ops) != 1:
        return False
    op, (right,) = test.ops[0], test.comparators
    if isinstance(right, ast.Constant) and right.value is None:
        return True
    negative = isinstance(right, ast.UnaryOp) and isinstance(right.op, ast.USub)
    zero = isinstance(right, ast.Constant) and right.value == 0
    return negative or (zero and isinstance(op, ast.GtE | ast.Lt))


def _is_number(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int)


def _returned(function: Function) -> list[ast.expr]:
    return [
        node.value
        for node in ast.walk(function)
        if isinstance(node, ast.Return) and node.value is not None
    ]


def _assignments(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    if isinstance(node, ast.Assign):
        for target in node.targets:
            yield target, node.value
    elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
        yield node.target, node.value


def _without_functions(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    if not isinstance(node, Function | ast.ClassDef | ast.Lambda):
        for child in ast.iter_child_nodes(node):
            yield from _without_functions(child)
