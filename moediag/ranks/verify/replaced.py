"""What a measuring has replaced in torch, so that it can be put back."""

from __future__ import annotations

from typing import Any, List, Tuple


class Replaced:
    """Attributes with their originals."""

    def __init__(self) -> None:
        self._originals: List[Tuple[Any, str, Any]] = []

    def replace(self, owner: Any, name: str, value: Any) -> None:
        self._originals.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    def undo(self) -> None:
        """Restores everything, the last replacement first."""
        while self._originals:
            setattr(*self._originals.pop())
