"""What a measuring has replaced in torch, so that it can be put back."""

from __future__ import annotations

from typing import Any, List, Tuple


class Replaced:
    """Attributes with their originals, and handles of hooks."""

    def __init__(self) -> None:
        self._originals: List[Tuple[Any, str, Any]] = []
        self._handles: List[Any] = []

    def replace(self, owner: Any, name: str, value: Any) -> None:
        self._originals.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    def hook(self, handle: Any) -> None:
        self._handles.append(handle)

    def undo(self) -> None:
        """Restores everything, the last replacement first."""
        while self._originals:
            setattr(*self._originals.pop())
        while self._handles:
            self._handles.pop().remove()
