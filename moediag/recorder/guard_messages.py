"""The guard's messages, as pure functions of all ranks' parameters: every rank prints the same."""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Sequence, Tuple

_NAMES = 12  # parameter names of one rank before "and N more"

_NEXT = (
    "Next: let every rank bring the same parameters. model.set_reduce_scatter_unused_params(True) "
    "of torch 2.13 reduces parameters without a gradient as zeros; an expert without tokens can "
    "run on an empty slice. `moediag diagnose` on the evidence folder says why they have none."
)
_NEXT_APART = (
    "Next: let every rank reduce the same groups in the same order: where each expert is a group "
    "of its own, group the whole block, or run experts without tokens on an empty slice. `moediag "
    "diagnose` on the evidence folder says where the ranks diverged."
)
_NEXT_ABSENT = (
    "Next: look at what that rank does (py-spy dump --pid PID, or its own output). A rank that is "
    "only slow needs a larger MOEDIAG_GUARD_TIMEOUT."
)


class Label:
    """Identifies a reduction: operation, process group (the recorder's entry) and training step."""

    def __init__(self, op: str, group: Any, step: int) -> None:
        self.op = op
        self.ranks: List[int] = list(group.ranks)
        self.axis = str(group.axis or "")
        self.step = step

    @property
    def where(self) -> str:
        on = f" of {self.axis}" if self.axis else ""
        return f"on {ranks(self.ranks)}{on}, step {self.step}"


def mismatch(label: Label, sides: Sequence[Mapping[str, Any]]) -> str:
    """The text of a mismatch. ``sides`` has each group member's Brought.details and op."""
    modules = list(dict.fromkeys(_place(side) for side in sides))
    together: Dict[str, List[int]] = {}
    for rank, side in zip(label.ranks, sides):  # noqa: B905 - Python 3.9
        together.setdefault(_side(side, sides, len(modules) > 1), []).append(rank)
    lines = [f"  {ranks(who)}: {text}" for text, who in together.items()]
    if len(modules) > 1:
        head = f"ranks reached reductions of different FSDP2 groups, {label.where}"
        lines.append(
            "A rank reduces no group of which no parameter has a gradient, and goes on to the next."
        )
    else:
        head = (
            f"ranks reached the {label.op} of {modules[0]} with different parameters, {label.where}"
        )
    lines.append(_NEXT_APART if len(modules) > 1 else _NEXT)
    return "\n".join([f"{head}. It was stopped before it began.", *lines])


def absent(
    label: Label, own: Mapping[str, Any], members: Tuple[int, ...], timeout: float, last: str
) -> str:
    """The text for ranks that did not come. ``members`` are their indices in the group; ``last`` is
    the module of this group's last complete reduction."""
    gone = [label.ranks[member] for member in members]
    there = [rank for rank in label.ranks if rank not in gone]
    if not gone:
        return (
            f"all ranks reached the {label.op} of {_place(own)} {label.where}, but could not tell "
            f"each other so within {timeout:g} s.\n"
            "Next: see whether their hosts reach each other."
        )
    before = f" The last one that all reached was that of {last}." if last else ""
    return (
        f"{ranks(gone)} did not reach the {label.op} of {_place(own)} within {timeout:g} s, "
        f"{label.where}; {ranks(there)} waited there.{before}\n{_NEXT_ABSENT}"
    )


def cost(rank: int, checks: int, seconds: float, longest: float) -> str:
    return (
        f"guard on rank {rank}: {checks:,} check{'s' * (checks != 1)} took {seconds:.3f} s "
        f"({1e3 * seconds / checks:.2f} ms each, the longest {1e3 * longest:.1f} ms), with the "
        "wait for the slowest rank that each reduction has anyway"
    )


def common(names: Sequence[str]) -> str:
    """Returns the module that contains all of ``names``; "" for the root."""
    shared: List[str] = names[0].split(".")[:-1] if names else []
    for name in names:
        parts = name.split(".")[:-1]
        alike = 0
        while alike < min(len(shared), len(parts)) and shared[alike] == parts[alike]:
            alike += 1
        shared = shared[:alike]
    return ".".join(shared)


def ranks(numbers: Sequence[int]) -> str:
    """Formats rank numbers as the reports do: ``rank 1``, ``ranks 0, 2..7``."""
    runs: List[List[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    texts = [str(a) if a == b else f"{a}, {b}" if b == a + 1 else f"{a}..{b}" for a, b in runs]
    return f"rank{'s' if len(numbers) != 1 else ''} {', '.join(texts)}"


def _place(side: Mapping[str, Any]) -> str:
    return str(side["module"]) or "the root module"


def _side(side: Mapping[str, Any], sides: Sequence[Mapping[str, Any]], apart: bool) -> str:
    """Describes one rank's side, in short if ranks are at different groups (``apart``)."""
    carried, whole = side["carries"], side["whole"]
    text = f"{len(carried)} of {len(whole)} parameters"
    if apart:
        return f"{side['op']} of {_place(side)}, {text}"
    names = [name for name, _, _ in carried]
    elsewhere = dict.fromkeys(name for other in sides for name, _, _ in other["carries"])
    lacks = [name for name in elsewhere if name not in set(names)]
    if lacks:
        return f"{text}; no gradient for {_listed(lacks)}"
    here = dict(_shapes(side))
    odd = [n for other in sides for n, shape in _shapes(other) if here.get(n, shape) != shape]
    if odd:
        name = odd[0]
        numel, dtype = here[name]
        return f"{text}; {name} has {numel:,} elements of {dtype}"
    return text


def _shapes(side: Mapping[str, Any]) -> List[Tuple[str, Tuple[int, str]]]:
    return [(name, (numel, dtype)) for name, numel, dtype in side["carries"]]


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _NAMES
    return ", ".join(names[:_NAMES]) + (f" and {more} more" if more > 0 else "")
