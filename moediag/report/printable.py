"""Text that a terminal, a browser and an editor show as it is.

File names, parameter names and log lines come from whoever wrote them. Every view passes its text
through :func:`printable`, so that none of them can move the cursor, hide text or reverse it.
"""

from __future__ import annotations

_BIDI = (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_SHOWN = {
    **{code: 0x2400 + code for code in range(0x20) if code not in b"\t\n"},  # U+241B is ESC's
    0x7F: 0x2421,
    # Other controls, bytes of a file name that are no text, and what XML cannot hold.
    **dict.fromkeys((*range(0x80, 0xA0), *_BIDI, *range(0xD800, 0xE000), 0xFFFE, 0xFFFF), 0xFFFD),
}


_ESCAPED = {code: f"\\u{code:04x}" for code in _SHOWN if code >= 0x7F}


def in_json(text: str) -> str:
    """Returns JSON of the same value in which a terminal finds nothing to obey. What is below 0x20
    is escaped by any writer of JSON."""
    return text.translate(_ESCAPED)


def printable(text: str) -> str:
    """Returns the text, each control character but tab and line end replaced by a visible one. The
    length stays, so it can be laid out before."""
    return text.translate(_SHOWN)
