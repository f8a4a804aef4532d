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
        cls.__doc__ = cls.__doc__ or cls.__name__  # else its signature is looked up
        made = dataclasses.dataclass(init=False, repr=False, eq=False, slots=True)(cls)
        made.__dataclass_params__ = _STANDARD.__dataclass_params__
        for name, method in _SHARED.items():
            setattr(made, name, method)
        return made

    def _complete(cls):
        """Compiles the methods, as those of an equal class."""
        fields = [(one.name, one.type, one) for one in dataclasses.fields(cls)]
        equal = dataclasses.make_dataclass(
            cls.__name__, fields, namespace={"__doc__": cls.__doc__}, frozen=True
        )
        for name in ("__init__", "__repr__", "__eq__", "__hash__"):
            setattr(cls, name, equal.__dict__[name])

    def _init(self, *args, **values):
        _complete(type(self))
        self.__init__(*args, **values)

    def _refuse(_, name, *value):
        done = "assign to" if value else "delete"
        raise dataclasses.FrozenInstanceError(f"cannot {done} field {name!r}")

    def _state(self):
        return [getattr(self, one.name) for one in dataclasses.fields(self)]

    def _restore(self, state):
        if type(self).__init__ is _init:  # an unpickled object may be the first one
            _complete(type(self))
        for one, value in zip(dataclasses.fields(self), state, strict=True):
            object.__setattr__(self, one.name, value)

    _SHARED = {
        "__init__": _init, "__setattr__": _refuse, "__delattr__": _refuse,
        "__getstate__": _state, "__setstate__": _restore,
    }  # fmt: skip

    _OWN = {*_SHARED, "__post_init__", "__repr__", "__eq__", "__hash__"}

    @dataclasses.dataclass(frozen=True)
    class _STANDARD:
        """Has the parameters that a frozen dataclass shows."""
