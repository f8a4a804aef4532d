"""``make mutants``: changes one expression at a time in the modules that decide verdicts, and
counts the changes that unit tests notice. None of these tests launches a rank.

A random sample of each package is tried in a copy of the tree, ``mutants/tree``; texts stay as they
are. ``mutants/tried.jsonl`` keeps what was tried: a run that was stopped resumes there. A mutant
runs in a process forked from one that imported torch and nothing of moediag. Only the tests that
reach its line run; where none does, those that start another process.
"""

from __future__ import annotations

import argparse
import ast
import collections
import contextlib
import copy
import importlib
import json
import os
import random
import re
import shutil
import signal
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple, NoReturn

import coverage
import pytest

# Package or module -> the tests that run against its mutants, the nearest first.
WORKER = "tests/unit/worker"
TESTS = {
    "moediag/diagnosis": ["tests/unit/diagnosis"],
    "moediag/diagnosis/rules": ["tests/unit/diagnosis"],
    "moediag/diagnosis/blame": ["tests/unit/diagnosis"],
    "moediag/diagnosis/end_states": ["tests/unit/diagnosis"],
    "moediag/diagnosis/schedules": ["tests/unit/diagnosis"],
    "moediag/lab/judgement": ["tests/unit/judgement"],
    "moediag/lab/scenario/plan.py": ["tests/unit/scenario/test_plan.py"],
    "moediag/evidence": [
        "tests/unit/evidence",
        *(f"tests/unit/diagnosis/test_{name}.py" for name in (
            "foreign", "pasted_logs", "tool_reports", "nccl_ras", "log_positions",
        )),
    ],
    "moediag/recorder/laws": ["tests/unit/recorder/laws", "tests/unit/test_laws.py"],
    "moediag/ranks/verify": [f"{WORKER}/test_verify_*.py", "tests/unit/test_verify_step.py"],
    "moediag/lab/step/measure": [
        f"{WORKER}/test_{name}.py"
        for name in (
            "gradients", "ownership", "replicas", "block_inputs", "training_state", "whole_state",
            "step", "collector", "trainer", "mixed",
        )
    ],
    "moediag/lab/relations": [f"{WORKER}/test_relations*.py"],
    "moediag/lab/check": [f"{WORKER}/test_check*.py"],
    "moediag/pipeline/examine.py": ["tests/unit/pipeline/test_[ea][xt]*.py"],
    "moediag/lab/campaign/bisect/signature_match.py": ["tests/unit/campaign/test_bisect_s*.py"],
    "moediag/lab/campaign/hunt/findings.py": ["tests/unit/campaign/test_hunt*.py"],
    "moediag/lab/campaign/engine/journal.py": ["tests/unit/campaign/test_journal.py"],
}  # fmt: skip
# Without the tests that draw or read thousands of calls.
PYTEST = [
    "-x", "-q", "-p", "no:cacheprovider", "-m", "not e2e and not stack",
    "-k", "not 2000 and not astray and not strange and not time_grows", "--deselect",
    "tests/unit/diagnosis/test_properties.py",
]  # fmt: skip
MUTANTS = Path("mutants")
# Imported once, not by the tests of every mutant.
IMPORTED = ("torch._dynamo", "torch.distributed.fsdp", "transformers.modeling_utils")
TREE = MUTANTS / "tree"
TRIED = MUTANTS / "tried.jsonl"
LONGEST = 240.0  # seconds; tests that run longer than this have noticed the mutant
KILLED, TIMEOUT, SURVIVED = "killed", "timeout", "survived"

OTHER = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE,
    ast.GtE: ast.Gt, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.And: ast.Or, ast.Or: ast.And, ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div,
    ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult, ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd, ast.Break: ast.Continue, ast.Continue: ast.Break,
}  # fmt: skip
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}

PROCESS = re.compile("subprocess|in_child|checked_model|forked")  # in files of tests
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
Code = ast.expr | ast.stmt
Place = tuple[str, int | None]  # field, and position if it is a list


class Mutant(NamedTuple):
    """``source`` is the whole changed module; the others identify the change."""

    module: str
    place: str  # line and column
    before: str
    after: str
    source: str

    @property
    def key(self) -> str:
        return f"{self.module}:{self.place}: {self.before} -> {self.after}"


def sample(package: str, size: int, seed: int) -> list[Mutant]:
    every: list[Callable[[], Mutant]] = []
    for module in modules(package):
        tree = ast.parse(module.read_text(encoding="utf-8"))
        for found in _running(tree):
            every += [
                partial(_mutant, str(module), tree, *found, new) for new in _changes(found[2])
            ]
    chance = random.Random(f"{seed} {package}")  # noqa: S311 - a sample that can be repeated
    return [make() for make in chance.sample(every, min(size, len(every)))]


def modules(package: str) -> list[Path]:
    return sorted(Path(package).rglob("*.py")) or [Path(package)]


def _mutant(
    module: str, tree: ast.AST, holder: ast.AST, place: Place, node: Code, new: Code
) -> Mutant:
    _put(holder, place, new)
    source = ast.unparse(tree)
    _put(holder, place, node)
    before, after = (ast.unparse(one).splitlines()[0] for one in (node, new))
    return Mutant(module, f"{node.lineno}:{node.col_offset}", before, after, source)


def _running(holder: ast.AST) -> Iterator[tuple[ast.AST, Place, Code]]:
    """Expressions and statements, without annotations, decorators, imports and texts."""
    for field, value in ast.iter_fields(holder):
        if field in ("annotation", "returns", "decorator_list"):
            continue
        for number, node in enumerate(value if isinstance(value, list) else [value]):
            if isinstance(node, (ast.Import, ast.ImportFrom, ast.JoinedStr)):
                continue
            if isinstance(node, (ast.expr, ast.stmt)):
                yield holder, (field, number if isinstance(value, list) else None), node
            if isinstance(node, ast.AST):
                yield from _running(node)


def _put(holder: ast.AST, place: Place, node: ast.AST) -> None:
    field, number = place
    if number is None:
        setattr(holder, field, node)
    else:
        getattr(holder, field)[number] = node


def _changes(node: Code) -> Iterator[Code]:
    new = copy.copy(node)
    if isinstance(new, ast.Compare) and len(new.ops) == 1:
        new.ops = [OTHER[type(new.ops[0])]()]
    elif isinstance(new, (ast.BoolOp, ast.BinOp)) and type(new.op) in OTHER:
        new.op = OTHER[type(new.op)]()
    elif isinstance(new, (ast.Break, ast.Continue)):
        new = OTHER[type(new)]()
    elif isinstance(new, ast.UnaryOp) and isinstance(new.op, ast.Not):
        new = new.operand
    elif isinstance(new, ast.Constant) and isinstance(new.value, (bool, int, float)):
        new.value = not new.value if isinstance(new.value, bool) else new.value + 1
    elif isinstance(new, ast.Name) and new.id in NAMES:
        new.id = NAMES[new.id]
    elif isinstance(new, (ast.If, ast.IfExp, ast.While)):
        if not isinstance(new.test, (ast.Name, ast.Attribute, ast.Call)):
            return  # what it compares is changed by itself
        new.test = ast.UnaryOp(ast.Not(), new.test)
    elif isinstance(new, ast.Return) and new.value and ast.unparse(new.value) != "None":
        new.value = ast.Constant(None)
    elif isinstance(new, ast.Expr) and isinstance(new.value, (ast.Call, ast.Yield)):
        new = ast.Pass()
    elif isinstance(new, ast.AugAssign):
        new = ast.Assign([new.target], new.value, lineno=new.lineno)
    else:
        return
    yield new


# ------------------------------------------------------------------------ the copy and its tests


def copy_tree() -> None:
    """Writes the copy, with the code of all modules that are changed in the form of the mutants."""
    shutil.rmtree(TREE, ignore_errors=True)
    for file in MUTANTS.glob("*.coverage"):
        file.unlink()
    shutil.copytree(".", TREE, ignore=shutil.ignore_patterns(".*", "__pycache__", str(MUTANTS)))
    for module in (module for package in TESTS for module in modules(package)):
        (TREE / module).write_text(ast.unparse(ast.parse(module.read_text(encoding="utf-8"))))


def outcome(mutant: Mutant, tests: list[str], reached: Reached) -> str:
    module = TREE / mutant.module
    right = module.read_text(encoding="utf-8")
    only = reached.tests(module, right, mutant.source)
    module.write_text(mutant.source, encoding="utf-8")
    try:
        code = run(tests, module.stem, only)
    finally:
        module.write_text(right, encoding="utf-8")
    return {0: SURVIVED, None: TIMEOUT}.get(code, KILLED)


class Reached:
    """Which tests ran a line, from their run without a mutant."""

    def __init__(self, tests: list[str]) -> None:
        """Raises SystemExit if these tests fail."""
        file = MUTANTS / f"{zlib.crc32(repr(tests).encode())}.coverage"
        if not file.exists() and run(tests, measured=file.name) != 0:
            file.unlink(missing_ok=True)
            sys.exit(f"without a mutant these tests fail, see mutants/pytest.txt: {tests}")
        self._tests = tests
        self._data = coverage.CoverageData(str(file))
        self._data.read()

    def tests(self, module: Path, right: str, changed: str) -> set[str]:
        """Names of tests, and of files if a fixture or perhaps another process ran the line; empty
        if all must run."""
        pairs = zip(right.splitlines(), changed.splitlines(), strict=False)
        line = next(number for number, (old, new) in enumerate(pairs, 1) if old != new)
        functions = (one for one in ast.walk(ast.parse(right)) if isinstance(one, FUNCTION))
        if not any(one.lineno <= line <= (one.end_lineno or 0) for one in functions):
            return set()
        contexts = self._data.contexts_by_lineno(str(module.absolute())).get(line, [])
        if not any(contexts):
            files = (file for file in _files(self._tests, TREE) if PROCESS.search(_read(file)))
            return {str(file.relative_to(TREE)) for file in files} or {"none"}
        split = [context.rpartition("|") for context in contexts]
        return {name.partition("::")[0] if when == "setup" else name for name, _, when in split}


class _Only:
    def __init__(self, tests: set[str]) -> None:
        self.tests = tests

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [
            one for one in items if {one.nodeid, one.nodeid.partition("::")[0]} & self.tests
        ]


def run(
    tests: list[str], first: str = "", only: set[str] | None = None, measured: str = ""
) -> int | None:
    """Returns the exit code of pytest, None if it took too long. Files that name the module
    ``first`` run first, of ``only`` these tests and files."""
    child = os.fork()
    if child == 0:
        os.setsid()
        _pytest(tests, first, only, measured)
    ends, code = time.monotonic() + LONGEST * (3 if measured else 1), None
    while code is None and time.monotonic() < ends:
        time.sleep(0.05)
        done, status = os.waitpid(child, os.WNOHANG)
        code = os.waitstatus_to_exitcode(status) if done else None
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # also what a test left behind
    if code is None:
        os.waitpid(child, 0)
    return code


def _pytest(tests: list[str], first: str, only: set[str] | None, measured: str) -> NoReturn:
    """Never returns. Bytecode of a mutant must not be there for the next one."""
    os.chdir(TREE)
    sys.path[0] = os.environ["PYTHONPATH"] = str(Path.cwd())
    del sys.modules["bench"]
    sys.dont_write_bytecode = not measured
    os.environ |= {"PYTHONDONTWRITEBYTECODE": ""} if measured else {"PYTHONDONTWRITEBYTECODE": "1"}
    log = os.open("../pytest.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    files = sorted(_files(tests, Path()), key=lambda file: first not in _read(file))
    if only:
        chosen = {name.partition("::")[0] for name in only}
        files = [file for file in files if str(file) in chosen]
    arguments = [*PYTEST, *map(str, files)]
    if measured:
        os.environ["COVERAGE_FILE"] = f"../{measured}"
        arguments += ["--cov=moediag", "--cov-context=test", "--cov-report="]
    # Without files, pytest would run all tests.
    os._exit(int(pytest.main(arguments, [_Only(only)] if only else [])) if files else 0)


def _files(tests: list[str], tree: Path) -> list[Path]:
    paths = [path for test in tests for path in sorted(tree.glob(test))]
    return [f for path in paths for f in (sorted(path.glob("test_*.py")) or [path])]


def _read(file: Path) -> str:
    return file.read_text(encoding="utf-8")


# ------------------------------------------------------------------------ what was found


def tried() -> dict[str, str]:
    """Key of a mutant -> outcome; the last one counts."""
    if not TRIED.exists():
        return {}
    return dict(json.loads(line) for line in TRIED.read_text(encoding="utf-8").splitlines())


def table(samples: dict[str, list[Mutant]], known: dict[str, str]) -> Iterator[str]:
    yield "| package | tried | killed | timeout | survived |"
    yield "| --- | ---: | ---: | ---: | ---: |"
    whole: collections.Counter[str] = collections.Counter()
    for package, chosen in samples.items():
        counts = collections.Counter(known[m.key] for m in chosen if m.key in known)
        whole += counts
        yield _row(f"`{package.removeprefix('moediag/')}`", counts)
    yield _row("all", whole)


def _row(name: str, counts: collections.Counter[str]) -> str:
    columns = (counts.total(), *(counts[one] for one in (KILLED, TIMEOUT, SURVIVED)))
    return f"| {name} | " + " | ".join(map(str, columns)) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.mutation", description=__doc__)
    parser.add_argument("packages", nargs="*", help="e.g. moediag/evidence; all by default")
    parser.add_argument("--size", type=int, default=30, metavar="N", help="mutants of each package")
    parser.add_argument("--seed", type=int, default=1, help="of the sample")
    parser.add_argument("--minutes", type=float, default=1e9, help="start no mutant after these")
    parser.add_argument("--again", action="store_true", help="try again what survived")
    options = parser.parse_args()
    ends = time.monotonic() + 60 * options.minutes
    packages = options.packages or list(TESTS)
    samples = {package: sample(package, options.size, options.seed) for package in packages}
    known = tried()
    left = {
        package: [m for m in chosen if known.get(m.key) in (None, SURVIVED)[: 1 + options.again]]
        for package, chosen in samples.items()
    }
    copy_tree()
    for name in IMPORTED:
        importlib.import_module(name)
    for package, chosen in left.items():
        reached = Reached(TESTS[package]) if chosen and time.monotonic() < ends else None
        for mutant in chosen:
            if reached and time.monotonic() < ends:
                known[mutant.key] = outcome(mutant, TESTS[package], reached)
                with TRIED.open("a", encoding="utf-8") as file:
                    file.write(json.dumps([mutant.key, known[mutant.key]]) + "\n")
    survivors = [m.key for of in samples.values() for m in of if known.get(m.key) == SURVIVED]
    rest = sum(mutant.key not in known for of in samples.values() for mutant in of)
    lines = [*table(samples, known), "", *survivors, "", f"{rest} not tried"]
    sys.stdout.write("".join(f"{line}\n" for line in lines))


if __name__ == "__main__":
    main()
