"""Damages files of evidence: bits, pieces, lengths, types of values, text that a view would obey,
instructions that would run code."""

from __future__ import annotations

import json
import os
import pickle
import random
from typing import Any

CANARY = "MOEDIAG_FUZZ_CANARY"
EVIL = (
    "\x1b[2J\x1b]8;;http://x/\x1b\\\r\x9b\u202e<script>alert(1)</script><img src=x onerror=y> | `"
)


class _Runs:
    """An object whose unpickling would run code."""

    def __reduce__(self) -> Any:
        return os.putenv, (CANARY, "ran")


class _Evil(dict):  # type: ignore[type-arg]
    def __reduce__(self) -> Any:
        return exec, (f"import os; os.environ[{CANARY!r}] = 'ran'",)


def _flip(data: bytes, chance: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(chance.choice((1, 1, 3, 30))):
        if changed:
            changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def _cut(data: bytes, chance: random.Random) -> bytes:
    return data[: chance.randrange(len(data) + 1)]


def _splice(data: bytes, chance: random.Random) -> bytes:
    """Removes, repeats or moves a piece."""
    a, b = sorted(chance.randrange(len(data) + 1) for _ in range(2))
    piece = data[a : min(b, a + 400)]
    at = chance.randrange(len(data) + 1)
    return chance.choice((data[:a] + data[b:], data[:at] + piece * 3 + data[at:]))


def _huge(data: bytes, chance: random.Random) -> bytes:
    """Inserts huge lengths and numbers."""
    at = chance.randrange(len(data) + 1)
    blown = chance.choice((
        b"X\xff\xff\xff\x7f", b"\x8d" + b"\xff" * 8, b"\x8e" + b"\xff" * 7 + b"\x7f",
        b"r\xff\xff\xff\xff",
        b"\x8b\xff\xff\xff\x7f", b"\x95" + b"\xff" * 8, b"\x8a\xff", b"9" * 5000, b"[" * 3000,
        b"{" * 3000,
        b"(" * 3000, b"]" * 3000, b"\x85" * 3000, b"1e999", b"-1", b"18446744073709551616",
    ))  # fmt: skip
    return data[:at] + blown + data[at + chance.choice((0, len(blown))) :]


def _hostile(data: bytes, chance: random.Random) -> bytes:
    """Inserts pickle instructions that import or build, or replaces everything by them."""
    whole = chance.choice((
        pickle.dumps(_Runs(), chance.randint(0, 5)),
        pickle.dumps({"entries": [_Evil()], "pg_config": {}}, chance.randint(0, 5)),
        b"\x80\x02cposix\nputenv\n(X\x01\x00\x00\x00aX\x01\x00\x00\x00btR.",
        b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x04true\x85R.",
    ))  # fmt: skip
    at = chance.randrange(len(data) + 1)
    piece = chance.choice((b"cposix\nsystem\n", b"i__builtin__\neval\n", b"\x93", b"R", b"b",
                           b"\x81", b"\x82\x01", b"Q", b"Px\n", b"\x97", b"o"))  # fmt: skip
    return chance.choice((whole, data[:at] + piece + data[at:]))


def _retype(data: bytes, chance: random.Random) -> bytes:
    """Replaces some values; the file itself stays valid."""
    is_pickle = data[:1] == b"\x80"
    if data.count(b"\n{") > 1 and not is_pickle:  # a line each, as in a journal
        lines = data.split(b"\n")
        at = chance.randrange(len(lines))
        return b"\n".join([*lines[:at], _retype(lines[at], chance), *lines[at + 1 :]])
    try:
        raw = pickle.loads(data) if is_pickle else json.loads(data)  # noqa: S301 - undamaged
    except (ValueError, RecursionError):
        return data  # a log
    for _ in range(chance.choice((1, 3, 20))):
        raw = _replaced(raw, chance)
    try:
        return pickle.dumps(raw) if is_pickle else json.dumps(raw).encode()
    except (TypeError, ValueError, RecursionError):
        return data


_OTHERS: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2**31, 2**63, 2**100, 0.5, float("nan"), "", "x", "0", "nccl:",
    "recv 1<-0", "nccl:send 9->9", [], [[]], [None], [[2**62, 4]], {}, {"a": 1}, [1, "x", None],
    "completed", EVIL, 10**400, "9" * 5000, "\udc80", float("inf"),
    "2.10", "99.1", "[0, 1, 99999999]", "default_pg", ["0", "1"], ["0"],
)  # fmt: skip


def _replaced(raw: Any, chance: random.Random) -> Any:
    """Replaces one value in the tree."""
    if isinstance(raw, dict) and raw and chance.random() < 0.9:
        key = chance.choice(list(raw))
        if chance.random() < 0.05:
            return {k: v for k, v in raw.items() if k != key}
        return {**raw, key: _replaced(raw[key], chance)}
    if isinstance(raw, list) and raw and chance.random() < 0.9:
        at = chance.randrange(len(raw))
        return [*raw[:at], _replaced(raw[at], chance), *raw[at + 1 :]]
    return chance.choice(_OTHERS)


def _text(data: bytes, chance: random.Random) -> bytes:
    """Inserts text that terminals and browsers obey, where a text may be."""
    places = [at for at, byte in enumerate(data) if byte in b'" :']
    at = chance.choice(places) + 1 if places else 0
    # As in a file of JSON: escaped, because the raw characters would end it.
    evil = json.dumps(EVIL)[1:-1] if data[:1] in b"{[" else EVIL
    return data[:at] + evil.encode() + data[at:]


def _lines(data: bytes, chance: random.Random) -> bytes:
    """Repeats, drops, indents, moves or endlessly lengthens lines."""
    lines = data.split(b"\n")
    at = chance.randrange(len(lines))
    one = lines[at]
    long = one * min(200, 1 + 2**20 // max(1, len(one)))  # damaged lines may be long already
    lines[at : at + 1] = chance.choice((
        [], [one, one], [b"  " + one], [one.lstrip()], [one[::-1]], [long],
        [one + b" &a [*a, *a]"], [one + b" !!python/object:os.system x"],
        [one + b"\x00"], [b"\t" + one], [b"<<: *x", one], [b"? " + one], [b"---", one],
        [one, chance.choice(lines)],
    ))  # fmt: skip
    return b"\n".join(lines)


_DAMAGE = (
    _flip, _cut, _splice, _huge, _hostile, _text, _text, _lines, _retype, _retype, _retype,
)  # fmt: skip


def damaged(data: bytes, chance: random.Random) -> bytes:
    """Returns ``data`` with one to five damages."""
    # Values first: changing them reads the file, which then must not be hostile yet.
    some = chance.choices(_DAMAGE, k=chance.choice((1, 1, 1, 2, 5)))
    for one in sorted(some, key=lambda one: one is not _retype):
        data = one(data, chance)
    return data
