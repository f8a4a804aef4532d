"""The page on detectors: its code works, and the modules it names exist."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "add-a-detector.md").read_text(encoding="utf-8")


def test_the_example_and_its_tests_run(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("moediag_docs_example")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # dataclasses look it up
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        exec(compile(block, "add-a-detector.md", "exec"), module.__dict__)
    tests = [value for name, value in vars(module).items() if name.startswith("test_")]
    assert len(tests) == 2
    for test in tests:
        test()


def test_every_module_it_names_exists() -> None:
    named = set(re.findall(r"`((?:diagnosis|tests/unit|moediag)/[\w/]+\.py)`", PAGE))
    assert len(named) >= 8
    for name in named:
        assert (ROOT / name).exists() or (ROOT / "moediag" / name).exists(), name
