"""What lives during a step, from steps of a few layers on fake tensors."""

from __future__ import annotations

import pytest

from moediag.lab.check.activations import chosen, extended
from moediag.protocol import MemoryPhase
from moediag.recorder.not_applicable import NotApplicable


def test_the_first_and_the_last_layer_of_each_kind_are_kept() -> None:
    assert chosen("aaaa") == ([0, 3], [(1, 2)])
    assert chosen("aabbbb") == ([0, 1, 2, 5], [(3, 2)])
    assert chosen("abab") == ([0, 1, 2, 3], [])
    assert chosen("a") == ([0], [])
    with pytest.raises(NotApplicable, match="5 kinds"):
        chosen("abcde")


def test_each_layer_more_adds_what_one_more_added() -> None:
    base = [MemoryPhase("loss", parameters=4, activations=10), MemoryPhase("start", parameters=4)]
    one = [MemoryPhase("loss", parameters=5, activations=13), MemoryPhase("start", parameters=5)]
    found = extended(base, [(one, 10)])
    assert found[0] == MemoryPhase("loss", parameters=14, activations=40)
    assert found[1] == MemoryPhase("start", parameters=14) and found[0].total == 54
    assert extended(base, []) == base
