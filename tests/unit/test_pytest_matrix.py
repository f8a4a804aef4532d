"""``@pytest.mark.ranks`` beside other plugins of pytest has the same outcomes. A stand-in for
`moediag watch` forks the ranks one after the other; each runs pytest. The how-to has the table.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from moediag import pytest_plugin

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "howto" / "pytest.md"
WATCH = """
import json, os, pathlib, sys, pytest
out = pathlib.Path(sys.argv[sys.argv.index("--out") + 1])
count = int(sys.argv[sys.argv.index("--nproc-per-node") + 1])
codes = []
for rank in range(count):
    if os.fork() == 0:
        os.environ["RANK"] = str(rank)
        code = pytest.main(sys.argv[sys.argv.index("pytest") + 1:])
        sys.stdout.flush()
        os._exit(code)
    codes.append(os.waitstatus_to_exitcode(os.wait()[1]))
out.mkdir(parents=True, exist_ok=True)
verdict = "crash" if any(codes) else "clean"
found = {"verdict": verdict, "culprits": [r for r, code in enumerate(codes) if code]}
(out / "result.json").write_text(json.dumps({"trials": [found]}))
"""
CONFTEST = """
def pytest_addoption(parser):
    parser.addoption("--device", default="cpu")
    parser.addini("layout", "a layout", default="none")
"""
FIRST = """
import os, pathlib, unittest, pytest
RANK = os.environ.get("RANK")

@pytest.fixture(scope="module")
def shared():
    yield []

@pytest.fixture
def on_a_rank():
    assert RANK is not None, "set up in a rank only"

def test_before(shared):
    assert RANK is None

@pytest.mark.ranks(1)
def test_passes(on_a_rank, request, tmp_path, shared):
    assert request.config.getoption("--device") == "meta"
    assert request.config.getini("layout") == "tp"

@pytest.mark.ranks(2)
def test_fails(on_a_rank):
    assert RANK == "0"

@pytest.mark.skipif(True, reason="never")
@pytest.mark.ranks(2)
def test_skip_by_mark():
    pathlib.Path("started").touch()

@pytest.mark.xfail(reason="known")
@pytest.mark.ranks(2)
def test_xfail():
    assert RANK == "0"

def test_after(shared):
    assert RANK is None
"""
MORE = """
@pytest.mark.ranks(1)
def test_skip_in_body():
    pytest.skip("no GPU")

@pytest.mark.xfail(reason="known", raises=ValueError)
@pytest.mark.ranks(1)
def test_xfail_other_error():
    raise TypeError("another one")

@pytest.mark.xfail(reason="known", strict=True)
@pytest.mark.ranks(1)
def test_xfail_strict_that_passes():
    pass

@pytest.mark.xfail(reason="known", run=False)
@pytest.mark.ranks(1)
def test_xfail_not_run():
    pathlib.Path("started").touch()

@pytest.mark.parametrize("layout", ["ep=2, tp=1"])
@pytest.mark.ranks(1)
def test_parametrised(layout, on_a_rank):
    assert layout == "ep=2, tp=1"

class TestOfUnittest(unittest.TestCase):
    def setUp(self):
        assert RANK is not None

    @pytest.mark.ranks(1)
    def test_method(self):
        self.assertIsNotNone(RANK)
"""
NEXT = "def test_of_the_next_file():\n    pass\n"
STYLES = {  # style of the test: its outcome in pytest's words
    "passes": "PASSED",
    "fails": "FAILED",
    "skip_by_mark": "SKIPPED",
    "xfail": "XFAIL",
    "before": "PASSED",
    "after": "PASSED",
    "of_the_next_file": "PASSED",
}
STYLES_ALONE = {
    **STYLES,
    "skip_in_body": "SKIPPED",
    "xfail_other_error": "FAILED",
    "xfail_strict_that_passes": "FAILED",
    "xfail_not_run": "XFAIL",
    "parametrised[ep=2, tp=1]": "PASSED",
    "method": "PASSED",
}


@dataclass(frozen=True)
class Beside:
    """Plugins of pytest, by the names of their entry points, and the options of a session."""

    plugins: dict[str, tuple[str, ...]]
    outcomes: tuple[tuple[str, str], ...] = ()  # that they change


SESSIONS = (
    Beside({"rerunfailures": ("--reruns", "1")}, (("fails", "RERUN, FAILED"),)),
    Beside(
        {
            "xdist": ("-n", "1"),
            "timeout": ("--timeout", "300"),
            "asyncio": ("--asyncio-mode", "auto"),
            "pytest_cov": ("--cov", ".", "--cov-report="),
            "randomly": ("--randomly-seed=3",),
            "pytest_mock": (),
            "html": ("--html=page.html",),
            "pytest_jsonreport": ("--json-report",),
            "benchmark": ("--benchmark-disable",),
        }
    ),
)


def outcomes(folder: Path, options: Iterable[str], tests: str) -> tuple[dict[str, str], str]:
    """Runs a session; returns each style's outcome and what pytest printed."""
    (folder / "watch.py").write_text(WATCH)
    (folder / "conftest.py").write_text(
        "import sys\nfrom moediag import pytest_plugin\n"
        f"pytest_plugin.WATCH = (sys.executable, {str(folder / 'watch.py')!r})\n" + CONFTEST
    )
    (folder / "pytest.ini").write_text("[pytest]\naddopts = --device meta -rA --strict-markers\n")
    (folder / "test_a.py").write_text(tests)
    (folder / "test_b.py").write_text(NEXT)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # each process would import all of them
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-v", "-p", pytest_plugin.NAME, "-p", "no:cacheprovider",
         "-o", "layout=tp", *options],
        cwd=folder, env=environment, check=False, capture_output=True, text=True,
    )  # fmt: skip
    pattern = (
        r"^(?:\[gw\d\] \[ *\d+%\] )?(?:(PASSED|FAILED|SKIPPED|XFAIL|RERUN|ERROR) )?"
        r"test_[ab]\.py::(?:TestOfUnittest::)?test_(.+?) "
        r"(?:(PASSED|FAILED|SKIPPED|XFAIL|RERUN|ERROR)\b.*)?$"
    )
    text = done.stdout.partition(" FAILURES ")[0] + "\n"
    found: dict[str, str] = {}
    for first, style, last in re.findall(pattern, text.replace("\n", " \n"), re.MULTILINE):
        if first or last:
            name = style.strip()
            found[name] = ", ".join(filter(None, (found.get(name), first or last)))
    return found, done.stdout + done.stderr


def test_each_style_of_a_test(tmp_path: Path) -> None:
    found, text = outcomes(tmp_path, (), FIRST + MORE)
    assert found == STYLES_ALONE, text
    assert not (tmp_path / "started").exists()
    assert re.search(r"^rank 1: test_a.py:\d+: AssertionError", text, re.MULTILINE)


@pytest.mark.parametrize("beside", SESSIONS, ids=lambda beside: "+".join(beside.plugins))
def test_the_same_outcomes_beside(beside: Beside, tmp_path: Path) -> None:
    installed = {entry.name for entry in entry_points(group="pytest11")} & set(beside.plugins)
    if not installed:
        pytest.skip(f"none is installed: {', '.join(beside.plugins)}")
    options = [
        option for name in sorted(installed) for option in ("-p", name, *beside.plugins[name])
    ]
    found, text = outcomes(tmp_path, options, FIRST)
    assert found == {**STYLES, **dict(beside.outcomes)}, text


def table() -> str:
    """The outcome of each style alone and beside each group of plugins; the tests above hold it."""
    names = [", ".join(name.removeprefix("pytest_") for name in one.plugins) for one in SESSIONS]
    rows = [("style of the test", "alone", *(f"with {name}" for name in names))]
    rows.append(("---",) * len(rows[0]))
    for style, alone in STYLES_ALONE.items():
        beside = [dict(one.outcomes).get(style, STYLES.get(style, "")) for one in SESSIONS]
        rows.append((f"`{style}`", alone, *beside))
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def test_the_how_to_has_the_table() -> None:
    before, begin, rest = PAGE.read_text(encoding="utf-8").partition("<!-- matrix -->\n")
    shown, end, after = rest.partition("<!-- end -->")
    assert begin and end
    if os.environ.get("MOEDIAG_GOLDEN") == "write":
        shown = table()
        PAGE.write_text(f"{before}{begin}{shown}{end}{after}", encoding="utf-8")
    assert shown == table(), "run this test with MOEDIAG_GOLDEN=write"
