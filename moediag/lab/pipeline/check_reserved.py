"""What torch's CUDA caching allocator reserves for the tensors of a step, by its own rules.

It keeps what was freed, for each stream apart, and splits and joins blocks inside segments. Sizes
are those of torch 2.13. On a full card it gives segments back: what it reserves elsewhere does not
say what fits.
"""

from __future__ import annotations

from collections.abc import Iterable

from moediag.lab.pipeline.check_cost import Memory
from moediag.protocol import MemoryTimeline
from moediag.records import dataclass

_MIB = 2**20
_ROUND, _OWN_ROUND = 512, 2 * _MIB  # of a block; of a segment with one block
_SMALL, _LARGE = _MIB, 10 * _MIB  # the largest small request; the smallest with its own segment
_SMALL_SEGMENT, _SEGMENT = 2 * _MIB, 20 * _MIB
_STEPS = 3  # after which the cache no longer grows
_Pool = tuple[int, bool]  # stream, whether its requests are small
_Block = tuple[_Pool, int, int]  # pool, start, bytes


@dataclass(frozen=True, slots=True)
class Reserved:
    """Bytes of all segments after some steps."""

    segments: int
    """By torch's default."""
    expandable: int
    """With PYTORCH_ALLOC_CONF=expandable_segments:True."""


class Allocator:
    """Places tensors as torch does. ``expandable``: each pool is one segment that grows."""

    def __init__(self, expandable: bool = False) -> None:
        self.reserved = 0
        """Bytes of all segments."""
        self._expandable = expandable
        self._free: dict[_Pool, dict[int, int]] = {}  # start -> bytes
        self._ends: dict[_Pool, int] = {}

    def allocate(self, size: float, stream: int = 0) -> _Block:
        size = _up(size, _ROUND)
        pool = stream, size <= _SMALL
        free = self._free.setdefault(pool, {})
        fits = [(length, start) for start, length in free.items() if length >= size]
        length, start = min(fits) if fits else self._grown(pool, size)
        free.pop(start, None)
        rest = length - size
        if rest > _SMALL or (rest and (pool[1] or self._expandable)):
            free[start + size], length = rest, size
        return pool, start, length

    def _grown(self, pool: _Pool, size: int) -> tuple[int, int]:
        """Returns a block, bytes and start, of a new segment or at the end of the pool's own."""
        free, end = self._free[pool], self._ends.get(pool, 0)
        segment = _SMALL_SEGMENT if pool[1] else _SEGMENT
        if self._expandable:
            start = next((start for start, length in free.items() if start + length == end), end)
            more = _up(size - (end - start), segment)
        else:
            start = end = end + 1  # blocks of two segments are never joined
            more = segment if size < _LARGE else _up(size, _OWN_ROUND)
        self.reserved += more
        self._ends[pool] = end + more
        return end + more - start, start

    def free(self, block: _Block) -> None:
        pool, start, length = block
        free = self._free[pool]
        length += free.pop(start + length, 0)
        before = next((one for one, size in free.items() if one + size == start), None)
        if before is not None:
            start, length = before, length + free.pop(before)
        free[start] = length


def of(timeline: MemoryTimeline, memory: Memory, accumulate: bool) -> Reserved:
    """``timeline``: with its events; ``accumulate``: of two micro-batches."""
    plain, expandable = (
        _after_steps(Allocator(grows), timeline, memory, accumulate) for grows in (False, True)
    )
    return Reserved(plain, expandable)


def _after_steps(
    allocator: Allocator, timeline: MemoryTimeline, memory: Memory, accumulate: bool
) -> int:
    events, before = timeline.events, timeline.before
    last = {tensor: number for number, (tensor, _, _) in enumerate(events)}
    held: dict[int, _Block] = {}

    def play(numbers: Iterable[int], again: bool) -> None:
        for number in numbers:
            tensor, size, stream = events[number]
            if tensor in held:
                allocator.free(held.pop(tensor))
            if size:
                held[tensor] = allocator.allocate(size, stream)
                if again and last[tensor] == number:  # added to the gradient that there is
                    allocator.free(held.pop(tensor))

    play(range(before), False)
    parameters = {tensor: size for tensor, size, _ in events[:before]}
    kept, made = (part / max(memory.parameters, 1) for part in (memory.optimizer, memory.step))
    for number in range(_STEPS):
        for again in (False, True)[: 1 + accumulate]:
            play(range(before, len(events)), again)
        for size in parameters.values() if kept and not number else ():
            for _ in range(2):  # states
                allocator.allocate(size * kept / 2)
        for block in [allocator.allocate(size * made) for size in parameters.values() if made]:
            allocator.free(block)
        for tensor in held.keys() - parameters.keys():  # zero_grad
            allocator.free(held.pop(tensor))
    return allocator.reserved


def _up(size: float, step: int) -> int:
    return -int(-size // step) * step
