"""What names, attributes and calls in a program's source stand for.

Follows assignments, returned values, arguments and enclosing functions, in the file of the
expression first, then in the program's other files. Reads syntax trees; nothing is executed.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field

from moediag.records import dataclass

Function = ast.FunctionDef | ast.AsyncFunctionDef
Values = dict[str, list[ast.expr]]  # by name

# Calls whose keywords become attributes of what they return.
_NAMESPACES = re.compile(r"_*[A-Z]\w*|dict")
# Conditions that hold in every rank of a distributed job.
_DISTRIBUTED = re.compile(r"initiali[sz]ed|available|distributed|world_size|is_dist|ddp\b")


class Definitions:
    """Definitions of one file. ``others``: those of the program's other files whose text has a
    name."""

    def __init__(
        self, tree: ast.Module, others: Callable[[str], Sequence[Definitions]] = lambda _: ()
    ) -> None:
        self.tree = tree
        self._others = others
        #: What expressions stand for in a scope, where it was asked.
        self.known: dict[tuple[ast.AST, ast.AST], list[Defined]] = {}
        self._functions: dict[str, list[Function]] = {}
        self._attributes: dict[str, list[tuple[ast.expr, ast.AST]]] = {}
        self._calls: dict[str, list[tuple[ast.Call, ast.AST]]] = {}
        self._outer: dict[ast.AST, ast.AST] = {}
        self._variables: dict[ast.AST, Values] = {}
        self._index(tree, tree)

    def _index(self, node: ast.AST, scope: ast.AST) -> None:
        waiting = [(node, scope)]
        while waiting:
            node, scope = waiting.pop()
            if isinstance(node, Function):
                self._functions.setdefault(node.name, []).append(node)
                self._outer[node] = scope
            elif isinstance(node, ast.Call):
                self._calls.setdefault(last_name(node.func), []).append((node, scope))
            for target, value in assignments(node):
                if isinstance(target, ast.Attribute):
                    self._attributes.setdefault(target.attr, []).append((value, scope))
            inner = node if isinstance(node, Function) else scope
            waiting += [(child, inner) for child in ast.iter_child_nodes(node)]

    def functions(self, name: str) -> list[tuple[Function, Definitions]]:
        """Functions of that name in this file, else in the others."""
        for file in (self, *self._elsewhere(name)):
            if made := file._functions.get(name):
                return [(one, file) for one in made]
        return []

    def variable(self, name: str, at: Where) -> list[Defined]:
        """Every value of a variable, by assignments in its function, by the arguments of the
        function's calls, in enclosing functions, in the module, in another module."""
        if name in at.arguments:
            return [at.arguments[name]]
        scope: ast.AST | None = at.scope
        while scope is not None:
            if made := self._in(scope).get(name):
                return [Defined(value, Where(self, scope)) for value in made]
            if isinstance(scope, Function) and name in parameters(scope):
                return list(self._passed(scope, name))
            scope = self._outer.get(scope)
        for file in self._elsewhere(name):
            if made := file._in(file.tree).get(name):
                return [Defined(value, Where(file, file.tree)) for value in made]
        return []

    def attribute(self, name: str) -> list[Defined]:
        """Every value that is assigned to an attribute of that name, or to a module's variable."""
        for file in (self, *self._elsewhere(name)):
            made = [*file._attributes.get(name, ()), *file._keywords(name)]
            made += [(value, file.tree) for value in file._in(file.tree).get(name, ())]
            if made:
                return [Defined(value, Where(file, scope)) for value, scope in made]
        return []

    def returned(self, call: ast.Call, at: Where) -> list[Defined]:
        """What the called functions of the program return, their parameters bound."""
        return [
            Defined(value, Where(file, function, _bound(call, function, at)))
            for function, file in self.functions(last_name(call.func))
            for value in _returned(function)
        ]

    def _elsewhere(self, name: str) -> Sequence[Definitions]:
        return [one for one in self._others(name) if one is not self]

    def _keywords(self, name: str) -> Iterator[tuple[ast.expr, ast.AST]]:
        for called, calls in self._calls.items():
            if _NAMESPACES.fullmatch(called) or called.endswith("Namespace"):
                for call, scope in calls:
                    yield from ((k.value, scope) for k in call.keywords if k.arg == name)

    def _passed(self, function: Function, name: str) -> Iterator[Defined]:
        """The argument for one parameter in all calls of a function."""
        for file in (self, *self._elsewhere(function.name)):
            for call, scope in file._calls.get(function.name, ()):
                at = Where(file, scope)
                given = _bound(call, function, at).get(name)
                if given is not None:
                    yield given

    def _in(self, scope: ast.AST) -> Values:
        """Values assigned to each variable in a function, or outside any in the module."""
        if scope not in self._variables:
            found = self._variables[scope] = {}
            for statement in getattr(scope, "body", ()):
                for node in without_functions(statement):
                    for target, value in assignments(node):
                        if isinstance(target, ast.Name):
                            found.setdefault(target.id, []).append(value)
        return self._variables[scope]


@dataclass(frozen=True, slots=True)
class Where:
    """Where an expression is evaluated."""

    file: Definitions
    #: The function, or the module.
    scope: ast.AST
    #: What its parameters are bound to, as far as the call is known.
    arguments: Mapping[str, Defined] = field(default_factory=dict)

    def stands_for(self, node: ast.expr) -> list[Defined]:
        """What a name, an attribute or a call stands for; empty if unknown."""
        known = None if self.arguments else self.file.known.get((node, self.scope))
        if known is not None:
            return known
        if isinstance(node, ast.Name):
            found = self.file.variable(node.id, self)
        elif isinstance(node, ast.Attribute):
            found = self.file.attribute(node.attr)
        else:
            found = self.file.returned(node, self) if isinstance(node, ast.Call) else []
        if not self.arguments:
            self.file.known[node, self.scope] = found
        return found


@dataclass(frozen=True, slots=True)
class Defined:
    """An expression that a name stands for."""

    value: ast.expr
    at: Where


def last_name(node: ast.expr) -> str:
    """``is_main_process`` of ``accelerator.is_main_process`` and of a call of it; "" for others."""
    if isinstance(node, ast.Call):
        return last_name(node.func)
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def parameters(function: Function) -> list[str]:
    """Names of a function's parameters, those that can be given by position first."""
    of = function.args
    return [one.arg for one in (*of.posonlyargs, *of.args, *of.kwonlyargs)]


def _bound(call: ast.Call, function: Function, at: Where) -> dict[str, Defined]:
    names = parameters(function)
    if names[:1] in (["self"], ["cls"]) and isinstance(call.func, ast.Attribute):
        names = names[1:]
    given = dict(zip(names, _positional(call), strict=False))
    given |= {one.arg: one.value for one in call.keywords if one.arg}
    return {name: Defined(value, at) for name, value in given.items()}


def _positional(call: ast.Call) -> Iterator[ast.expr]:
    for one in call.args:
        if isinstance(one, ast.Starred):
            return
        yield one


def _returned(function: Function) -> list[ast.expr]:
    """The values that a function returns; without constants where these are for jobs that are not
    distributed."""
    nodes = list(_own(function))
    made = [n.value for n in nodes if isinstance(n, ast.Return) and n.value is not None]
    alone = any(isinstance(n, ast.If) and is_distributed(n.test) for n in nodes)
    return [one for one in made if not (alone and isinstance(one, ast.Constant))]


def is_distributed(test: ast.expr) -> bool:
    """Whether a test asks if the job is distributed, which holds in every rank of one."""
    return _DISTRIBUTED.search(ast.unparse(test)) is not None


def _own(function: Function) -> Iterator[ast.AST]:
    for statement in function.body:
        yield from without_functions(statement)


def assignments(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """(target, value) of what a node assigns; of several targets each with the whole value, unless
    the values are written one by one (``rank, size = get_rank(), get_world_size()``)."""
    pairs: list[tuple[ast.expr, ast.expr]] = []
    if isinstance(node, ast.Assign):
        pairs = [(target, node.value) for target in node.targets]
    elif isinstance(node, ast.AnnAssign | ast.AugAssign | ast.NamedExpr) and node.value is not None:
        pairs = [(node.target, node.value)]
    elif isinstance(node, ast.For | ast.AsyncFor):
        pairs = [(node.target, node.iter)]
    elif isinstance(node, ast.withitem) and node.optional_vars is not None:
        pairs = [(node.optional_vars, node.context_expr)]
    for target, value in pairs:
        several = target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
        values = [value] * len(several)
        if isinstance(node, ast.Assign) and isinstance(value, ast.Tuple | ast.List):
            values = value.elts if several != [target] else values
        yield from zip(several, values, strict=False)


def without_functions(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    if not isinstance(node, Function | ast.ClassDef | ast.Lambda):
        for child in ast.iter_child_nodes(node):
            yield from without_functions(child)
