"""Where Python is and where the device is stuck, as a sentence and as a table."""

from __future__ import annotations

from collections.abc import Sequence

from moediag.diagnosis.schedules.device_frontier import Front
from moediag.diagnosis.words.calls import describe
from moediag.result import Cell, Table
from moediag.result.wording import agreeing, plural, ranks

_MOST = 2  # places in the sentence; the table has all


def sentence(found: Sequence[Front]) -> str:
    """``The device of rank 0 is stuck in reduce_scatter of model.layers.1 …``; "" where no device
    is stuck."""
    together: dict[tuple[object, ...], list[Front]] = {}
    for front in found:
        if front.stuck is not None:
            key = front.label, front.stuck.position, front.begun, _python(front)
            together.setdefault(key, []).append(front)
    pieces = []
    for those in list(together.values())[:_MOST]:
        first, device = those[0], "device" if len(those) == 1 else "devices"
        state = "is stuck in" if first.begun else "has not begun"
        if not first.begun and not first.timed:
            state = "has not completed"
        pieces.append(
            f"The {device} of {ranks(front.rank for front in those)} {agreeing(state, those)} "
            f"{_device(those)}. Python {_python(first)}."
        )
    return " ".join(pieces)


def _device(alike: Sequence[Front]) -> str:
    """The stuck call of ranks that share it; without its size where ranks disagree about that."""
    first = alike[0]
    calls = [front.stuck for front in alike if front.stuck is not None]
    called = {describe(call) for call in calls}
    call = calls[0]
    short = f"{call.op} of {call.module}" if call.module else call.op
    what = called.pop() if len(called) == 1 else short
    return f"{what}, operation {call.position} on {first.label}"


def _python(front: Front) -> str:
    call = front.stuck
    assert call is not None
    text = f"issued it{f' at {call.site}' if call.site else ''}"
    if front.behind:
        text += f", then queued {plural(front.behind, 'more operation')}"
    if front.at:
        text += f", and {'waits for the device' if front.waits else 'is'} at {front.at}"
    return text


def table(found: Sequence[Front]) -> Table | None:
    """The table; None where no device was recorded, or all completed."""
    if not any(front.stuck for front in found):
        return None
    rows: dict[tuple[Cell, ...], list[int]] = {}
    for front in found:
        rows.setdefault(_cells(front), []).append(front.rank)
    return Table(
        "Where Python and the device are",
        ("ranks", "Python", "device", "state", "issued at", "issued after it"),
        tuple((ranks(who), *cells) for cells, who in rows.items()),
        "The device's side is what torch's Flight Recorder says: an operation is begun once the "
        "event before its kernel completed. Where torch does not time events "
        "(TORCH_NCCL_ENABLE_TIMING; it does in moediag's own trials), one that runs is issued.",
    )


def _cells(front: Front) -> tuple[Cell, ...]:
    call = front.stuck
    if call is None:
        return front.at or None, "all completed", None, None, None
    device = f"{describe(call)} on {front.label}"
    state = "begun" if front.begun else "issued"
    return front.at or None, device, state, call.site or None, front.behind
