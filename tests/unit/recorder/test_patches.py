"""Replaced attributes are restored as the same object; replacements by others stay."""

from __future__ import annotations

from moediag.recorder.patches import Patches


class Base:
    def greet(self) -> str:
        return "base"


class Child(Base):
    @staticmethod
    def fixed() -> str:
        return "fixed"


def test_own_inherited_and_static_attributes_are_restored() -> None:
    own, fixed = vars(Base)["greet"], vars(Child)["fixed"]
    patches = Patches()
    assert patches.replace(Base, "greet", lambda original: lambda self: "new " + original(self))
    assert patches.replace(Child, "greet", lambda original: lambda self: "child " + original(self))
    assert patches.replace(Child, "fixed", lambda original: staticmethod(lambda: original() + "!"))
    assert Base().greet() == "new base"
    assert Child().greet() == "child new base"
    assert Child.fixed() == "fixed!"
    patches.restore()
    assert vars(Base)["greet"] is own
    assert "greet" not in vars(Child)
    assert vars(Child)["fixed"] is fixed


def test_an_attribute_replaced_later_is_not_restored() -> None:
    own = vars(Base)["greet"]
    patches = Patches()
    patches.replace(Base, "greet", lambda original: lambda self: original(self))
    later = lambda self: "later"  # noqa: E731
    Base.greet = later  # type: ignore[method-assign]
    try:
        patches.restore()
        assert Base.greet is later
    finally:
        Base.greet = own  # type: ignore[method-assign]


def test_a_missing_attribute_is_not_created() -> None:
    patches = Patches()
    assert patches.replace(Base, "missing", lambda original: original) is False
    assert not hasattr(Base, "missing")
