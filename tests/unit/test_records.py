"""A dataclass that is completed late behaves as one of the standard library."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable
from dataclasses import field
from typing import Any, ClassVar

import pytest

from moediag.records import dataclass


@dataclass(frozen=True, slots=True)
class Late:
    """Two numbers and a list."""

    kind: ClassVar[str] = "late"
    first: int
    second: int = 2
    items: list[int] = field(default_factory=list)
    hidden: str = field(default="", repr=False, compare=False)

    @property
    def total(self) -> int:
        return self.first + self.second


@dataclasses.dataclass(frozen=True, slots=True)
class Standard:
    """Two numbers and a list."""

    kind: ClassVar[str] = "late"
    first: int
    second: int = 2
    items: list[int] = field(default_factory=list)
    hidden: str = field(default="", repr=False, compare=False)

    @property
    def total(self) -> int:
        return self.first + self.second


def outcome(action: Callable[[], Any]) -> Any:
    try:
        return action()
    except Exception as error:
        return type(error), str(error)


@pytest.mark.parametrize(
    "action",
    [
        lambda of: repr(of(1, 3)),
        lambda of: of(1, items=[2]) == of(1, 2, [2]),
        lambda of: of(1) == of(2),
        lambda of: of(1, hidden="a") == of(1, hidden="b"),
        lambda of: of(1) == (1, 2, [], ""),
        lambda of: of(1).items is of(1).items,
        lambda of: hash(of(1, 2, ())) == hash(of(1, 2, (), "other")),
        lambda of: hash(of(1)),
        lambda of: of(1).total,
        lambda of: of(),
        lambda of: of(1, 2, [], "", 5),
        lambda of: of(1, third=3),
        lambda of: setattr(of(1), "first", 2),
        lambda of: delattr(of(1), "first"),
        lambda of: of(1).__dict__,
        lambda of: dataclasses.asdict(of(1, 4)),
        lambda of: dataclasses.replace(of(1, 4), first=3).first,
        lambda of: [one.name for one in dataclasses.fields(of)],
        lambda of: of.__match_args__,
        lambda of: of.__slots__,
        lambda of: str(of.__dataclass_params__),
        lambda of: of.__doc__,
        lambda of: copy.deepcopy(of(1, 2, [3])).items,
        lambda of: copy.replace(of(1), first=2).first if hasattr(copy, "replace") else 2,
    ],
)
def test_it_does_what_a_dataclass_of_the_standard_library_does(
    action: Callable[[Any], Any],
) -> None:
    found, expected = (outcome(lambda of=of: action(of)) for of in (Late, Standard))
    if isinstance(found, str):
        found = found.replace("Late", "Standard")
    if isinstance(found, tuple):
        found = tuple(one.replace("Late", "Standard") if type(one) is str else one for one in found)
    assert found == expected


@dataclass(frozen=True, slots=True)
class Sent:
    value: int


def test_the_first_object_may_be_an_unpickled_one() -> None:
    state = [5]  # no object of the class was made in this process
    one, other = (Sent.__new__(Sent) for _ in range(2))
    one.__setstate__(state)  # type: ignore[attr-defined]
    other.__setstate__(state)  # type: ignore[attr-defined]
    assert one == other == Sent(5) and hash(one) == hash(other)
    assert repr(pickle.loads(pickle.dumps(one))) == "Sent(value=5)"


def test_a_subclass_and_other_options_are_those_of_the_standard_library() -> None:
    @dataclass(frozen=True, slots=True)
    class Longer(Sent):
        more: int = 1

    @dataclass
    class Changing:
        value: int = 0

    @dataclass(frozen=True, slots=True)
    class Checked:
        value: int

        def __post_init__(self) -> None:
            if self.value < 0:
                raise ValueError("negative")

    assert repr(Longer(2)).endswith("Longer(value=2, more=1)") and Longer(2) != Sent(2)
    changing = Changing()
    changing.value = 3
    assert changing == Changing(3)
    with pytest.raises(ValueError, match="negative"):
        Checked(-1)
