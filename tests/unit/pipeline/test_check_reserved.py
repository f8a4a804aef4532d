"""What torch's allocator reserves, by its rules."""

from __future__ import annotations

import pytest

from moediag.lab.pipeline.check_cost import Memory
from moediag.lab.pipeline.check_reserved import Allocator, Reserved, of
from moediag.protocol import MemoryTimeline

MIB = 2**20


@pytest.mark.parametrize(
    ("size", "reserved"), [(100, 2), (MIB, 2), (MIB + 1, 20), (10 * MIB, 10), (11 * MIB + 1, 12)]
)
def test_a_request_has_the_segment_of_its_size(size: int, reserved: int) -> None:
    allocator = Allocator()
    allocator.allocate(size)
    assert allocator.reserved == reserved * MIB


def test_what_was_freed_serves_its_own_stream_alone() -> None:
    allocator = Allocator()
    allocator.free(allocator.allocate(64 * MIB))
    for _ in range(2):  # parts of the freed block
        allocator.allocate(32 * MIB)
    assert allocator.reserved == 64 * MIB
    allocator.allocate(32 * MIB, stream=1)
    assert allocator.reserved == 96 * MIB


@pytest.mark.parametrize(("expandable", "reserved"), [(False, 192), (True, 100)])
def test_joined_blocks_serve_a_larger_one_only_in_one_segment(
    expandable: bool, reserved: int
) -> None:
    allocator = Allocator(expandable)
    blocks = [allocator.allocate(32 * MIB) for _ in range(3)]
    for number in (0, 2, 1):  # the last one joins both neighbours
        allocator.free(blocks[number])
    allocator.allocate(96 * MIB)
    assert allocator.reserved == reserved * MIB


def test_states_take_the_place_that_the_first_step_freed() -> None:
    """A parameter, an activation and a gradient of 40 MiB each: the states of the first step are
    where the activation was, so that later steps need a segment more."""
    size = 40 * MIB
    events = [(1, size, 0), (2, size, 0), (3, size, 0), (2, 0, 0)]
    timeline = MemoryTimeline(events=events, before=1)

    def after(optimizer: int, step: int = 0, accumulate: bool = False) -> Reserved:
        return of(timeline, Memory(size, size, optimizer, 0, "", step=step), accumulate)

    assert after(0) == Reserved(3 * size, 3 * size)
    assert after(2 * size) == Reserved(5 * size, 5 * size)
    assert after(2 * size, step=size) == Reserved(5 * size, 5 * size)
    assert after(0, accumulate=True) == Reserved(3 * size, 3 * size)
