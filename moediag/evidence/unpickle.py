"""Pickles of strangers, read without running anything.

A pickle is a program for a small machine. This is a machine that lacks the dangerous
instructions: it knows plain containers, numbers, text and bytes, and three names by which torch's
own pickler marks lists of numbers; it never imports, never calls, never builds an object.

Nothing is trusted: lengths are held against what the file has, memo slots against what was put
into them, dictionary keys must be text or whole numbers (so that nothing nested is ever hashed).
An instruction adds at most one small object, so a hostile file costs at most about a gigabyte and,
as its size is bounded, seconds. Nesting costs no recursion.
"""

from __future__ import annotations

import re
import struct
from typing import Any

MAX_BYTES = 32 * 1024 * 1024  # a dump of 2,000 entries has a quarter of a million
_MAX_OBJECTS = 6_000_000
_MAX_INT_BYTES = 16
_MAX_MARKS = 1000

# torch's C++ pickler writes `torch.jit._pickle.build_intlist([1, 2])` for a list of integers.
LISTS = frozenset(
    f"torch.jit._pickle.build_{kind}list" for kind in ("int", "double", "bool", "tensor")
) - {"torch.jit._pickle.build_tensorlist"}
_PAD = 4
_BROKEN = "it breaks off, or is no pickle"
_LIST = object()  # stands for one of these names

# Instructions of one byte that take a hundred: lists, dictionaries, sets, tuples, memo slots.
_GROWING = (b"]", b"}", b"\x8f", b"\x85", b"\x86", b"\x87", b"\x94")

_GETS = re.compile(rb"(?:h.)+", re.DOTALL)  # a run of memo reads


class Refused(ValueError):
    """Not a pickle of plain data. The message says what it wanted, or where it breaks off."""


def loads(data: bytes) -> Any:
    """The value that ``data`` describes. Raises Refused; no other exception, whatever the bytes."""
    if len(data) > MAX_BYTES:
        raise Refused(f"{len(data):,} bytes, at most {MAX_BYTES:,} are read")
    if not is_moderate(data):
        raise Refused("it describes more objects than any dump holds")
    try:
        return _run(data)
    except (IndexError, struct.error):
        raise Refused(_BROKEN) from None
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        if isinstance(error, Refused):
            raise
        raise Refused(f"it is no pickle of plain data ({type(error).__name__})") from None


def is_moderate(data: bytes) -> bool:
    """Whether it can make no more objects than a dump may hold."""
    return (
        sum(map(data.count, _GROWING)) <= _MAX_OBJECTS
    )  # some are arguments: a dump has 15 in 100


def _run(data: bytes) -> Any:
    """The machine. One loop without a call for each instruction: those would take half the time.
    Instructions stand in the order of their frequency in real dumps."""
    size = len(data)
    data += bytes(_PAD)  # no instruction: looking ahead needs no test
    memo: dict[int, Any] = {}
    stack: list[Any] = []
    below: list[list[Any]] = []  # the stacks under each mark
    at = 0
    while True:
        code = data[at]
        at += 1
        if code == 0x68:  # BINGET
            if data[at + 1] == 0x68 == data[at + 3]:
                end = _GETS.match(data, at - 1).end()  # type: ignore[union-attr]
                stack += map(memo.__getitem__, data[at:end:2])
                at = end
            else:
                stack.append(memo[data[at]])
                at += 1
        elif code == 0x28:  # MARK
            if len(below) >= _MAX_MARKS:
                raise Refused("it is nested too deeply")
            below.append(stack)
            stack = []
        elif code == 0x5D:  # EMPTY_LIST
            stack.append([])
            if data[at] == 0x94:  # MEMOIZE
                memo[len(memo)] = stack[-1]
                at += 1
        elif code == 0x65:  # APPENDS
            items, stack = stack, below.pop()
            if type(stack[-1]) is not list:
                raise Refused("it appends to what is no list")
            stack[-1] += items
        elif code == 0x4B:  # BININT1
            stack.append(data[at])
            at += 1
        elif code == 0x94:  # MEMOIZE
            memo[len(memo)] = stack[-1]
        elif code == 0x61:  # APPEND
            item = stack.pop()
            if type(stack[-1]) is not list:
                raise Refused("it appends to what is no list")
            stack[-1].append(item)
        elif code == 0x4D:  # BININT2
            stack.append(data[at] | data[at + 1] << 8)
            at += 2
        elif code == 0x4E:  # NONE
            stack.append(None)
        elif code == 0x7D:  # EMPTY_DICT
            stack.append({})
        elif code == 0x75:  # SETITEMS
            items, stack = stack, below.pop()
            _update(stack[-1], items)
        elif code == 0x6A:  # LONG_BINGET
            stack.append(memo[int.from_bytes(data[at : at + 4], "little")])
            at += 4
        elif code == 0x4A:  # BININT
            stack.append(int.from_bytes(data[at : at + 4], "little", signed=True))
            at += 4
        elif code == 0x88 or code == 0x89:  # NEWTRUE, NEWFALSE
            stack.append(code == 0x88)
        elif code == 0x86:  # TUPLE2
            stack[-2:] = [(stack[-2], stack[-1])]
        elif code == 0x8A:  # LONG1
            end = at + 1 + data[at]
            if data[at] > _MAX_INT_BYTES:
                raise Refused(f"it holds a number of {data[at]} bytes")
            stack.append(int.from_bytes(data[at + 1 : end], "little", signed=True))
            at = end
        elif code == 0x71:  # BINPUT
            memo[data[at]] = stack[-1]
            at += 1
        elif code == 0x72:  # LONG_BINPUT
            memo[int.from_bytes(_take(data, at, 4), "little")] = stack[-1]
            at += 4
        elif code == 0x47:  # BINFLOAT
            stack.append(struct.unpack_from(">d", data, at)[0])
            at += 8
        elif code in _COUNTED:
            width, of = _COUNTED[code]
            length = int.from_bytes(_take(data, at, width), "little")
            at += width
            stack.append(of(_take(data, at, length)))
            at += length
        elif code == 0x73:  # SETITEM
            items = stack[-2:]
            del stack[-2:]
            _update(stack[-1], items)
        elif code == 0x85:  # TUPLE1
            stack[-1] = (stack[-1],)
        elif code == 0x87:  # TUPLE3
            stack[-3:] = [(stack[-3], stack[-2], stack[-1])]
        elif code == 0x74:  # TUPLE
            items, stack = stack, below.pop()
            stack.append(tuple(items))
        elif code == 0x29:  # EMPTY_TUPLE
            stack.append(())
        elif code == 0x6C:  # LIST
            items, stack = stack, below.pop()
            stack.append(items)
        elif code == 0x64:  # DICT
            items, stack = stack, below.pop()
            made: dict[Any, Any] = {}
            _update(made, items)
            stack.append(made)
        elif code == 0x8F:  # EMPTY_SET
            stack.append(set())
        elif code == 0x90:  # ADDITEMS
            items, stack = stack, below.pop()
            if type(stack[-1]) is not set:
                raise Refused("it adds to what is no set")
            _keys(items)
            stack[-1].update(items)
        elif code == 0x91:  # FROZENSET
            items, stack = stack, below.pop()
            _keys(items)
            stack.append(frozenset(items))
        elif code == 0x30:  # POP
            stack.pop() if stack else below.pop()
        elif code == 0x31:  # POP_MARK
            stack = below.pop()
        elif code == 0x32:  # DUP
            stack.append(stack[-1])
        elif code == 0x52:  # REDUCE
            arguments = stack.pop()
            if stack.pop() is not _LIST or type(arguments) is not tuple or len(arguments) != 1:
                raise Refused("it wants to call a function")
            if type(arguments[0]) is not list:
                raise Refused("it wants to call a function")
            stack.append(arguments[0])
        elif code == 0x63:  # GLOBAL
            end = data.index(b"\n", data.index(b"\n", at) + 1)
            stack.append(_name(*data[at:end].decode("utf-8", "replace").split("\n", 1)))
            at = end + 1
        elif code == 0x93:  # STACK_GLOBAL
            name, module = stack.pop(), stack.pop()
            if type(module) is not str or type(name) is not str:
                raise Refused(_BROKEN)
            stack.append(_name(module, name))
        elif code == 0x80:  # PROTO
            if data[at] > 5:
                raise Refused(f"it is of pickle protocol {data[at]}, 2 to 5 are read")
            at += 1
        elif code == 0x95:  # FRAME
            at += 8
        elif code == 0x2E:  # STOP
            if below or len(stack) != 1 or stack[0] is _LIST:
                raise Refused("it is no pickle of plain data")
            return stack[0]
        else:
            raise Refused(_instruction(code, data, at) if at < size else _BROKEN)


def _take(data: bytes, at: int, length: int) -> bytes:
    left = len(data) - _PAD - at
    if length > left:
        raise Refused(f"it claims {length:,} bytes where {max(0, left):,} are left")
    return data[at : at + length]


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")


# Instruction: (bytes of the length that follows, what the bytes become).
_COUNTED: dict[int, tuple[int, Any]] = {
    0x58: (4, _text),  # BINUNICODE
    0x8C: (1, _text),  # SHORT_BINUNICODE
    0x8D: (8, _text),  # BINUNICODE8
    0x54: (4, _text),  # BINSTRING, of Python 2
    0x55: (1, _text),  # SHORT_BINSTRING
    0x42: (4, bytes),  # BINBYTES
    0x43: (1, bytes),  # SHORT_BINBYTES
    0x8E: (8, bytes),  # BINBYTES8
    0x96: (8, bytes),  # BYTEARRAY8
}


def _keys(keys: list[Any]) -> None:
    """Only what is hashed in constant time."""
    if not {*map(type, keys)} <= {str, int, bool, float, bytes, type(None)}:
        raise Refused("it has keys that are neither text nor numbers")


def _update(target: Any, items: list[Any]) -> None:
    if type(target) is not dict or len(items) % 2:
        raise Refused("it sets items of what is no dictionary")
    keys = items[::2]
    _keys(keys)
    target.update(zip(keys, items[1::2], strict=True))


def _name(module: str, name: str) -> object:
    """The stand-in for a known name; whatever else a pickle asks for would be imported."""
    wanted = f"{module}.{name}"
    if wanted not in LISTS:
        raise Refused(f"it wants {_shown(wanted)}; only plain data is read")
    return _LIST


def _shown(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text[:120])


def _instruction(code: int, data: bytes, at: int) -> str:
    """Why this instruction is refused."""
    if code == 0x69:  # INST: module and name follow as lines
        wanted = ".".join(_text(line) for line in data[at : at + 240].split(b"\n")[:2])
        return f"it wants {_shown(wanted)}; only plain data is read"
    what = _REFUSED.get(code)
    return f"it wants {what}; only plain data is read" if what else "it is no pickle of protocol 2+"


_REFUSED = {
    0x6F: "to build an object (OBJ)",
    0x62: "to set an object's state (BUILD)",
    0x81: "to build an object (NEWOBJ)",
    0x92: "to build an object (NEWOBJ_EX)",
    0x50: "an object from outside (PERSID)",
    0x51: "an object from outside (BINPERSID)",
    0x82: "an object by its extension code (EXT1)",
    0x83: "an object by its extension code (EXT2)",
    0x84: "an object by its extension code (EXT4)",
    0x97: "a buffer from outside (NEXT_BUFFER)",
    0x98: "a buffer from outside (READONLY_BUFFER)",
}
