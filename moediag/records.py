"""`dataclass`, with methods that are compiled when the first object is made.

Python compiles six methods of each frozen dataclass at import: half a millisecond a class. A
diagnosis imports 140 of them and makes objects of a third. Whatever is not frozen and slotted, or
has a base or such methods of its own, is left to `dataclasses.dataclass`.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:

    def dataclass(cls=None, /, **options):
        """The same decorator as `dataclasses.dataclass`."""

        def decorated(cls):
            simple = cls.__bases__ == (object,) and not _OWN & cls.__dict__.keys()
            if simple and options == {"frozen": True, "slots": True}:
                return _deferred(cls)
            return dataclasses.dataclass(**options)(cls)

        return decorated if cls is None else decorated(cls)

    def _deferred(cls):
        """The class with slots in place of its fields' defaults, and without methods."""
        attributes = dict(cls.__dict__)
        fields = {
            name: (kind, *([attributes.pop(name)] if name in attributes else []))
            for name, kind in cls.__annotations__.items()
            if not str(kind).startswith(("ClassVar", "typing.ClassVar"))
        }
        for name in ("__dict__", "__weakref__"):
            attributes.pop(name, None)
        attributes |= _SHARED
        attributes["__slots__"] = attributes["__match_args__"] = tuple(fields)
        attributes["__dataclass_fields__"] = _Fields(fields)
        return type(cls)(cls.__name__, cls.__bases__, attributes)

    class _Fields:
        """The attribute that `dataclasses` looks for, until it is used."""

        def __init__(self, fields):
            self.fields = fields

        def __get__(self, _, cls):
            owner = next(c for c in cls.__mro__ if c.__dict__.get("__dataclass_fields__") is self)
            return _complete(owner, self.fields)

    def _complete(cls, fields):
        """Gives the class the methods of an equal one, which are compiled now."""
        equal = dataclasses.make_dataclass(
            cls.__name__,
            [(name, *field) for name, field in fields.items()],
            namespace={"__doc__": cls.__name__},  # else it looks for the signature
            frozen=True,
        )
        for name in ("__init__", "__repr__", "__eq__", "__hash__", "__replace__"):
            if name in equal.__dict__:
                setattr(cls, name, equal.__dict__[name])
        cls.__dataclass_params__ = equal.__dataclass_params__
        cls.__dataclass_fields__ = equal.__dataclass_fields__
        return cls.__dataclass_fields__

    def _init(self, *args, **values):
        dataclasses.fields(self)
        self.__init__(*args, **values)

    def _refuse(_, name, *value):
        done = "assign to" if value else "delete"
        raise dataclasses.FrozenInstanceError(f"cannot {done} field {name!r}")

    def _state(self):
        return [getattr(self, one.name) for one in dataclasses.fields(self)]

    def _restore(self, state):
        for one, value in zip(dataclasses.fields(self), state, strict=True):
            object.__setattr__(self, one.name, value)

    _SHARED = {
        "__init__": _init, "__setattr__": _refuse, "__delattr__": _refuse,
        "__getstate__": _state, "__setstate__": _restore,
    }  # fmt: skip

    _OWN = {*_SHARED, "__post_init__", "__repr__", "__eq__", "__hash__"}
