"""What the patterns of a release's parallel plans name, by the model's names and its source."""

from __future__ import annotations

import inspect
import re
import sys
from typing import Any, List, Sequence

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


def generic(name: str) -> str:
    """Returns the name with ``*`` for the numbers of layers and experts, as plans spell them."""
    return _NUMBER.sub("*", name)


def names(model: Any) -> List[str]:
    """Returns the names of modules and parameters."""
    found = [name for name, _ in model.named_modules()]
    return found + [name for name, _ in model.named_parameters()]


def matches_any(pattern: str, known: Sequence[str]) -> bool:
    return any(matches(pattern, name) for name in known)


def matches(pattern: str, name: str) -> bool:
    """Plans are written relative to the base model."""
    relative = re.escape(pattern).replace(r"\*", "[^.]+")
    return re.search(rf"(^|\.){relative}$", name) is not None


def source(model: Any) -> str:
    """Returns the source of the modules of transformers that define the model's parts."""
    modules = {type(module).__module__ for module in model.modules()}
    return "".join(
        inspect.getsource(sys.modules[name]) for name in modules if name.startswith("transformers.")
    )


def mentioned(pattern: str, text: str) -> bool:
    """Whether each part of the pattern is assigned as an attribute somewhere in ``text``."""
    parts = [part for part in pattern.split(".") if part not in ("*", "weight", "bias")]
    return all(re.search(rf"self\.{re.escape(part)}\s*=", text) is not None for part in parts)
