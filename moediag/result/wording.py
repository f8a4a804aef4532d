"""Formats parameter names, ranks, numbers and software stacks for reports."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence, Sized
from typing import TypeVar

from moediag.protocol import natural

T = TypeVar("T")
UNCHECKED = "numbers were not checked"


def compact(names: Iterable[str]) -> list[str]:
    """Merges fully qualified names that differ in one component, in order of appearance.

    ``…experts.3.gate_proj.weight``, ``…experts.3.up_proj.weight`` become
    ``…experts.3.{gate,up}_proj.weight``; three or more consecutive numbers become ``{3..5}``.
    Expanding the braces gives exactly the input names.
    """
    rows = [tuple(name.split(".")) for name in dict.fromkeys(names)]
    depth = max((len(row) for row in rows), default=0)
    for position in reversed(range(depth)):
        rows = _merge(rows, position)
    return [".".join(row) for row in rows]


def listed(names: Iterable[str], few: int = 3) -> str:
    """The first ``few`` patterns of ``names``, and how many more there are."""
    patterns = compact(names)
    more = len(patterns) - few
    return ", ".join(patterns[:few]) + (f" and {more} more" if more > 0 else "")


def counted(names: Collection[str], noun: str = "parameter") -> str:
    """``2 parameters (layers.{0,1}.bias)``: how many, and the first patterns."""
    return f"{plural(len(names), noun)} ({listed(names)})"


def few(numbers: Iterable[int]) -> str:
    """``1, 2, 3``: the first few numbers of steps."""
    return ", ".join(map(str, [*numbers][:6]))


def at_line(line: str) -> str:
    """``train.py:9`` -> `` at train.py:9``; "" without a line."""
    return f" at {line}" if line else ""


def _merge(rows: Sequence[tuple[str, ...]], position: int) -> list[tuple[str, ...]]:
    """Joins rows that are equal everywhere but at ``position``."""
    together: dict[tuple[tuple[str, ...], tuple[str, ...] | None], list[str]] = {}
    for row in rows:
        if position < len(row):
            key = (row[:position], row[position + 1 :])
            together.setdefault(key, []).append(row[position])
        else:
            together[(row, None)] = []
    merged = []
    for (before, after), values in together.items():
        merged.append(before if after is None else (*before, braces(values), *after))
    return merged


def braces(values: Sequence[str]) -> str:
    """``["gate_proj", "up_proj"]`` -> ``{gate,up}_proj``; ``["3", "4", "5"]`` -> ``{3..5}``."""
    if len(values) == 1:
        return values[0]
    numbers = [number for value in values if (number := natural(value)) is not None]
    if [str(number) for number in numbers] == list(values):
        return "{" + spans(numbers) + "}"
    tails = {value[value.rfind("_") :] if "_" in value else "" for value in values}
    tail = tails.pop() if len(tails) == 1 else ""
    heads = [value[: len(value) - len(tail)] for value in values]
    return "{" + ",".join(heads) + "}" + tail


def spans(numbers: Iterable[int], joint: str = ",") -> str:
    """The numbers, sorted; three or more consecutive ones become ``first..last``: ``0,2..5,8``."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    pieces: list[str] = []
    for run in runs:
        pieces += [f"{run[0]}..{run[-1]}"] if len(run) > 2 else [str(n) for n in run]
    return joint.join(pieces)


def ranks(numbers: Iterable[int]) -> str:
    """``rank 1``, ``ranks 0, 2..7``, ``none``."""
    listed = sorted(set(numbers))
    if not listed:
        return "none"
    return ("rank " if len(listed) == 1 else "ranks ") + spans(listed, ", ")


_PLURALS = {"is": "are", "was": "were", "has": "have", "goes": "go", "passes": "pass"}


def agreeing(text: str, who: Sized) -> str:
    """``text``, whose first word is a verb, for one rank or for several: ``wait in barrier``."""
    if len(who) == 1:
        return text
    first, blank, rest = text.partition(" ")
    return f"{_PLURALS.get(first) or first.removesuffix('s')}{blank}{rest}"


def does(who: Collection[int], text: str) -> str:
    """``ranks 0, 1 wait in barrier``: ``text`` begins with the verb for one rank."""
    return f"{ranks(who)} {agreeing(text, who)}"


def by_value(values: Mapping[int, T]) -> dict[T, tuple[int, ...]]:
    """Each value with its ranks, in order of the lowest rank."""
    found: dict[T, list[int]] = {}
    for rank, value in sorted(values.items()):
        found.setdefault(value, []).append(rank)
    return {value: tuple(who) for value, who in found.items()}


def each_does(told: Mapping[int, str]) -> list[str]:
    """:func:`does` for each text of ``told``, with the ranks that share it."""
    return [does(who, text) for text, who in by_value(told).items()]


def on_each(values: Mapping[int, object]) -> list[str]:
    """``8 on rank 0``, ``4 on ranks 1, 2``: each value with its ranks."""
    return [f"{value} on {ranks(who)}" for value, who in by_value(values).items()]


def few_on_each(values: Mapping[int, object], form: str = "") -> str:
    """``8 on rank 0, 8 on rank 1``: the values of the first ranks, as ``form`` formats them."""
    return ", ".join(f"{format(value, form)} on rank {r}" for r, value in [*values.items()][:4])


def capital(text: str) -> str:
    """``text`` with its first letter in upper case, and the others as they are."""
    return text[:1].upper() + text[1:]


def plural(number: int, noun: str) -> str:
    """``1 element``, ``15,696 elements``."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def seconds(value: float) -> str:
    """``0.42 s``, ``1.4 s``, ``2 min 5 s``."""
    if value < 1:
        return f"{value:.2f} s"
    if value < 60 or not math.isfinite(value):
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    return f"{minutes} min {rest} s"


def error_size(value: float | None) -> str:
    """A gradient error: ``0``, ``3.0e-03``, ``nan``; ``not compared`` when there is none."""
    if value is None:
        return "not compared"
    number = float(value)  # a reader of JSON may have kept "nan" or "inf" as text
    return f"{number:.1e}" if number and math.isfinite(number) else f"{number:g}"


def ratio(value: float | None, spread: tuple[float, float] | None = None) -> str:
    """A step-time ratio with its quartiles: ``1.02x [0.99-1.05]``; empty when not measured."""
    if value is None:
        return ""
    text = f"{value:.2f}x"
    return text if spread is None else f"{text} [{spread[0]:.2f}-{spread[1]:.2f}]"


def stack(versions: Mapping[str, str | None]) -> list[str]:
    """``["transformers 4.53.2", "torch 2.13.0"]``: the packages that identify a stack first."""
    return [
        f"{package} {version.split('+')[0]}"
        for package in ("transformers", "torchtitan", "torch", "deepspeed")
        if (version := versions.get(package))
    ]


def backend(name: str, shared_gpu: bool, version: str | None = None) -> str:
    """``nccl 2.29.3``; ``gloo on a shared GPU`` where several ranks computed on one. ``version``:
    NCCL's, if the ranks reported it."""
    told = f"{name} {version}" if version and name == "nccl" else name
    return f"{told} on a shared GPU" if shared_gpu else told


def backticks(text: str, least: int = 1) -> str:
    """A delimiter for ``text`` as code: more backticks than it has in a row."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    return "`" * max(least, longest + 1)


def code(text: str) -> str:
    """Text as code inside a markdown paragraph."""
    flat, ticks = " ".join(text.split()), backticks(text)
    gap = " " if "`" in flat else ""
    return f"{ticks}{gap}{flat}{gap}{ticks}"


def html(text: str) -> str:
    """Text escaped for HTML or markdown."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def inline(text: str) -> str:
    """Text escaped for a cell of a markdown table: no cell border, no tag, no emphasis. An
    underscore inside a word emphasises nothing, so that names stay as they are."""
    flat = html(" ".join(text.split()))
    return re.sub(r"([\\`*~\[\]|]|(?<![^\W_])_|_(?![^\W_]))", r"\\\1", flat)
