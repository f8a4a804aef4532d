"""A markdown report of sections that several commands write."""

from __future__ import annotations

import itertools
import re

_HEADING = re.compile(r"^## .*", re.MULTILINE)


def replaced(text: str, section: str) -> str:
    """Returns ``text`` with the section of the same title replaced, or with a new last section. A
    ``section`` without a title is what precedes all of them."""
    title = _HEADING.match(section)
    starts = [found.start() for found in _HEADING.finditer(text)] + [len(text)]
    parts = [text[: starts[0]]]
    parts += [text[a:b] for a, b in itertools.pairwise(starts)]
    at = 0
    if title is not None:
        named = (n for n, part in enumerate(parts) if part.splitlines()[:1] == [title[0]])
        at = next(named, len(parts))
    parts[at : at + 1] = [section]
    return "\n\n".join(part.strip("\n") for part in parts if part.strip("\n")) + "\n"
