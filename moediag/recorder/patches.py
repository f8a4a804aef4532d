"""Replaces attributes of torch and restores them exactly."""

from __future__ import annotations

from typing import Any, Callable, List, Tuple

_ABSENT = object()


class Patches:
    """A stack of replaced attributes; :meth:`restore` undoes them newest first."""

    def __init__(self) -> None:
        self._undo: List[Tuple[Any, str, Any, Any]] = []

    def replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> bool:
        """Sets ``owner.name`` to ``make(current value)``; returns False without such an attribute.

        Keeps the raw entry of ``owner.__dict__``, so that a pybind method is restored as the same
        object and an inherited attribute does not become the owner's.
        """
        present = getattr(owner, name, _ABSENT)
        if present is _ABSENT:
            return False
        raw = vars(owner).get(name, _ABSENT)
        plain = raw is not _ABSENT and not isinstance(raw, (staticmethod, classmethod))
        new = make(raw if plain else present)
        setattr(owner, name, new)
        self._undo.append((owner, name, raw, new))
        return True

    def restore(self) -> None:
        """Restores every attribute except those that other code has replaced since: restoring would
        undo that. Ours only passes calls on once the recorder is off."""
        while self._undo:
            owner, name, raw, new = self._undo.pop()
            if vars(owner).get(name, _ABSENT) is not new:
                continue
            if raw is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, raw)
