"""A number that the program read from data which other ranks would have sent.

It can be printed and calculated with, as a loss is. Whatever else is asked of it, above all a
comparison, may decide what the program does: that is the read of which it tells.
"""

from __future__ import annotations

import math
import operator
from typing import Any, Callable, Dict, List, Tuple

import torch

Tell = Callable[[str], None]


class UnrealNumber:
    """Holds the simulated value. ``tell`` is called when the program may decide by it."""

    __slots__ = ("_tell", "_value")

    def __init__(self, value: Any, tell: Tell) -> None:
        self._value = value
        self._tell = tell

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # so that isinstance says what a number would
        return type(self._value)

    def __repr__(self) -> str:
        return repr(self._value)

    def __str__(self) -> str:
        return str(self._value)

    def __format__(self, spec: str) -> str:
        return format(self._value, spec)

    def __reduce__(self) -> Any:
        self._tell("a copy of a number")
        return type(self._value), (self._value,)

    def __getattr__(self, name: str) -> Any:
        self._tell(f"a number's {name}")
        return getattr(self._value, name)


def _plain(value: Any) -> Any:
    return value._value if type(value) is UnrealNumber else value


def _calculated(act: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Any, *others: Any) -> Any:
        try:
            return _unreal(act(self._value, *map(_plain, others)), self._tell)
        except ArithmeticError:
            self._tell("arithmetic")  # the real value may not raise
            raise

    return method


def _unreal(value: Any, tell: Tell) -> Any:
    if type(value) in (bool, int, float, complex):
        return UnrealNumber(value, tell)
    tell("arithmetic with a number")  # a tensor or an array, which says no more where it is from
    return value


def _deciding(act: Callable[..., Any], words: str) -> Callable[..., Any]:
    def method(self: Any, *others: Any) -> Any:
        self._tell(words)
        return act(self._value, *map(_plain, others))

    return method


_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
_UNARY: Dict[str, Callable[..., Any]] = {
    "neg": operator.neg,
    "pos": operator.pos,
    "abs": abs,
    "round": round,
}
_COMPARED = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_CONVERTED: Dict[str, Callable[..., Any]] = {
    "bool": bool, "int": int, "float": float, "complex": complex, "index": operator.index,
    "hash": hash, "trunc": math.trunc, "floor": math.floor, "ceil": math.ceil,
}  # fmt: skip


def _reflected(act: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda own, other: act(other, own)


for _name in _BINARY:
    _act = getattr(operator, _name)
    setattr(UnrealNumber, f"__{_name}__", _calculated(_act))
    setattr(UnrealNumber, f"__r{_name}__", _calculated(_reflected(_act)))
for _name, _one in _UNARY.items():
    setattr(UnrealNumber, f"__{_name}__", _calculated(_one))
for _name, _sign in _COMPARED.items():
    setattr(UnrealNumber, f"__{_name}__", _deciding(getattr(operator, _name), f"number {_sign}"))
for _name, _kind in _CONVERTED.items():
    setattr(UnrealNumber, f"__{_name}__", _deciding(_kind, f"{_name}(number)"))

# Functions of ``math`` that programs apply to losses: those that ask whether a value is finite, and
# those that calculate.
_ASKING = ("isnan", "isinf", "isfinite")
_CALCULATING = ("exp", "log", "log2", "log10", "sqrt")


def replacements() -> List[Tuple[Any, str, Any]]:
    """Returns what replaces functions of the module ``math``: (owner, name, function)."""
    return [
        *((math, name, _asking(getattr(math, name))) for name in _ASKING),
        *((math, name, _through(getattr(math, name))) for name in _CALCULATING),
    ]


def _asking(original: Callable[[Any], bool]) -> Callable[[Any], bool]:
    def ask(value: Any, /) -> bool:
        if type(value) is UnrealNumber and math.isfinite(float(value._value)):
            value = value._value  # values are assumed to be finite, so this says nothing new
        return original(value)

    return ask


def _through(original: Callable[..., Any]) -> Callable[..., Any]:
    def calculate(value: Any, /, *others: Any) -> Any:
        if type(value) is UnrealNumber:
            return _calculated(original)(value, *others)
        return original(value, *others)

    return calculate


def of_tensor(tensor: torch.Tensor, value: Any, tell: Tell) -> Any:
    """Returns what ``tensor.item()`` gives: ``value``, which must not decide anything."""
    finite = not isinstance(value, float) or math.isfinite(value)
    if tensor.dtype == torch.bool or not finite:
        tell("Tensor.item()")
        return value
    return UnrealNumber(value, tell)
