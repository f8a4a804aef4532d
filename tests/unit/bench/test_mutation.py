"""`make mutants`: what it changes, and that its table names what is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import mutation

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("package", mutation.TESTS)
def test_each_package_of_the_table_has_tests(package: str) -> None:
    assert (ROOT / package).exists()
    assert all(any(ROOT.glob(test)) for test in mutation.TESTS[package])


def test_mutants_of_a_module(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text(
        "limit: int = 3\n"
        "def longest(lines, strict=False):\n"
        '    """2 > 1."""\n'
        "    if not lines or strict: return 0\n"
        "    found = max(lines)\n"
        "    print(found)\n"
        "    return f'{found + 1}' if len(found) > limit else ''\n"
    )
    made = mutation.sample(str(module), 100, seed=1)
    assert {(one.before, one.after) for one in made} == {
        ("3", "4"), ("False", "True"), ("not lines or strict", "not lines and strict"),
        ("not lines", "lines"), ("return 0", "return None"), ("0", "1"), ("max", "min"),
        ("print(found)", "pass"), ("len(found) > limit", "len(found) >= limit"),
        ("return f'{found + 1}' if len(found) > limit else ''", "return None"),
    }  # fmt: skip
    assert len({one.source for one in made}) == len(made)
    assert all(compile(one.source, "module.py", "exec") for one in made)
    assert mutation.sample(str(module), 3, seed=1) == mutation.sample(str(module), 3, seed=1)
    assert mutation.sample(str(module), 3, seed=1) != mutation.sample(str(module), 3, seed=2)
