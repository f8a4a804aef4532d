"""Numbers in names and logs."""

from __future__ import annotations

from typing import Optional


def natural(text: str) -> Optional[int]:
    """The number that a short text of decimal digits gives, else None. ``int`` raises for thousands
    of digits, and for digits such as a superscript, which ``str.isdigit`` accepts."""
    return int(text) if len(text) < 19 and text.isdecimal() else None
