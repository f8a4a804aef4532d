"""`make mutants`: what it changes, and that its table names what is there."""

from __future__ import annotations

import zlib
from pathlib import Path

import coverage
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


def test_only_tests_that_reach_the_line_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a line that none reaches, those that start another process."""
    monkeypatch.chdir(tmp_path)
    module, tests = mutation.TREE / "m.py", ["tests"]
    (mutation.TREE / "tests").mkdir(parents=True)
    (mutation.TREE / "tests" / "test_child.py").write_text("in_child")
    (mutation.TREE / "tests" / "test_pure.py").write_text("")
    name = mutation.MUTANTS / f"{zlib.crc32(repr(tests).encode())}.coverage"
    data = coverage.CoverageData(str(name))
    for context in ("tests/test_pure.py::one|run", "tests/test_fixture.py::two|setup"):
        data.set_context(context)
        data.add_lines({str(module.absolute()): [3]})
    data.write()
    reached = mutation.Reached(tests)
    right = "LIMIT = 1\ndef f():\n    return 2\ndef g():\n    return 3\n"

    def of(number: int) -> set[str]:
        return reached.tests(module, right, right.replace(str(number), "7"))

    assert of(2) == {"tests/test_pure.py::one", "tests/test_fixture.py"}
    assert of(3) == {"tests/test_child.py"}
    assert of(1) == set()  # all
