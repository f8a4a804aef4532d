"""``@pytest.mark.ranks``: what the parent makes of the ranks' reports and of moediag's verdict; the
end-to-end tests start real ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moediag import pytest_plugin, rank_reports
from moediag.rank_reports import Said

PASSED = Said()
SKIPPED = Said("skipped", reason="Skipped: no GPU")
XFAILED = Said("skipped", reason="known", expected=True)
FAILED = Said("failed", "assert 2 == 3", "test_it.py:7: assert")
CASES = {  # test: moediag's verdict, the ranks' reports; under laws where the name says so
    "good": ("clean", (PASSED, PASSED)),
    "no_collective": ("inconclusive", (PASSED, PASSED)),
    "unchecked_under_laws": ("inconclusive", (PASSED, PASSED)),
    "expected_under_laws": ("inconclusive", (XFAILED, XFAILED)),
    "skipped": ("clean", (SKIPPED, SKIPPED)),
    "skipped_on_one": ("clean", (SKIPPED, PASSED)),
    "expected": ("clean", (XFAILED, XFAILED)),
    "says_nothing_on_one": ("clean", (PASSED,)),
    "asserts": ("crash", (PASSED, FAILED)),
    "hangs": ("hang", ()),
    "parts": ("replica-divergence", (PASSED, PASSED)),
    "full_disk": ("", ()),
}
# Stands in for `moediag watch`: writes the verdict and the reports of the test.
WATCH = """
import json, os, pathlib, sys
verdict, reports = json.loads(os.environ["CASES"])[sys.argv[-1].partition("::test_")[2]]
if not verdict:
    sys.exit("error: the disk is full")
culprits = [1] if verdict == "crash" else []
out = pathlib.Path(sys.argv[sys.argv.index("--out") + 1])
out.mkdir(parents=True, exist_ok=True)
trial = {"verdict": verdict, "culprits": culprits}
(out / "result.json").write_text(json.dumps({"trials": [trial]}))
print("a rank's words")
print(" train.py · watched · 2 ranks")
print(" CAUSE of", pathlib.Path(sys.argv[-1]).name)
for rank, report in enumerate(reports):
    path = pathlib.Path(os.environ["MOEDIAG_RANK_REPORTS"]) / f"rank-{rank}.json"
    path.write_text(json.dumps(report))
"""
WRONG = ("ranks(0)", "ranks()", "ranks(2, slow=True)", "ranks(2, timeout=float('inf'))")
TEST = "@pytest.mark.{}\ndef test_{}():\n    {}\n"


def stand_in(folder: Path, watch: str) -> None:
    """Makes sessions in ``folder`` run ``watch`` in place of `moediag watch`."""
    (folder / "watch.py").write_text(watch)
    (folder / "conftest.py").write_text(
        "import sys\nfrom moediag import pytest_plugin\n"
        f"pytest_plugin.WATCH = (sys.executable, {str(folder / 'watch.py')!r})\n"
    )


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a session in which each case is a test, and what pytest printed."""
    folder = tmp_path_factory.mktemp("session")
    stand_in(folder, WATCH)
    mark = "ranks(2, laws={})"
    tests = [TEST.format(mark.format("under_laws" in name), name, "pass") for name in CASES]
    tests += [TEST.format(mark, f"wrong_{at}", "pass") for at, mark in enumerate(WRONG)]
    (folder / "test_it.py").write_text("import pytest\n" + "".join(tests))
    environment = {k: v for k, v in os.environ.items() if k != "PYTEST_ADDOPTS"}
    environment["PYTHONPATH"] = str(Path(pytest_plugin.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", pytest_plugin.NAME, "-rA", "test_it.py"],
        cwd=folder, check=False, capture_output=True, text=True,
        env={**environment, "CASES": json.dumps(CASES, default=asdict)},
    )  # fmt: skip
    return folder, done.stdout + done.stderr


class TestTheParent:
    @pytest.mark.parametrize(
        ("name", "said"),
        [
            ("good", "PASSED"),
            ("no_collective", "PASSED"),
            ("unchecked_under_laws", "FAILED"),
            ("expected_under_laws", "XFAIL"),
            ("skipped_on_one", "PASSED"),
            ("expected", "XFAIL"),
            ("says_nothing_on_one", "FAILED"),
            ("asserts", "FAILED"),
            ("hangs", "FAILED"),
            ("parts", "FAILED"),
        ],
    )
    def test_it_takes_the_worst(self, session: tuple[Path, str], name: str, said: str) -> None:
        folder, text = session
        assert f"{said} test_it.py::test_{name}" in text
        assert bool(list(folder.glob(f"moediag-runs/*test-test_{name}"))) == (said == "FAILED")
        page = f"CAUSE of test_it.py::test_{name}\n" in text
        assert page == (said == "FAILED" and name != "asserts")

    def test_a_test_that_all_ranks_skip_is_skipped(self, session: tuple[Path, str]) -> None:
        assert "SKIPPED [1]" in session[1] and "no GPU" in session[1]

    def test_a_rank_s_assertion_says_more_than_the_page(self, session: tuple[Path, str]) -> None:
        assert "rank 1 of 2:\nassert 2 == 3" in session[1]

    def test_the_error_of_the_watcher_is_the_first_line(self, session: tuple[Path, str]) -> None:
        assert "_ test_full_disk _" in session[1]
        assert "\nmoediag watch: the disk is full\n" in session[1]

    def test_a_wrong_mark_is_told(self, session: tuple[Path, str]) -> None:
        folder, text = session
        assert text.count("\nFAILED test_it.py::test_wrong_") == len(WRONG)
        assert "mark ranks: count=0 cannot be used. Give a whole number of 1 or more." in text
        assert "mark ranks: timeout=inf cannot be used. Give a number of seconds above 0" in text
        assert "a mark has wrong arguments" in text
        assert "During handling" not in text
        assert not list(folder.glob("moediag-runs/*wrong*"))


SIDES = [
    {"ranks": [0], "line": "test_it.py:5 test_it"},
    {"ranks": [1], "line": "test_it.py:6 test_it"},
]
GONE = {"ranks": [1], "line": "", "what": "finished"}


@pytest.mark.parametrize(
    ("culprits", "places", "begins"),
    [
        ([1], SIDES, "rank 1 at test_it.py:6 test_it: hang. why"),
        ([2], SIDES, "rank 2: hang. why"),
        ([], SIDES, "rank 0 at test_it.py:5 test_it, rank 1 at test_it.py:6 test_it: hang. why"),
        ([], [{"ranks": [0], "line": ""}], "hang. why"),
        ([], [SIDES[0], {"ranks": [1], "line": ""}], "hang. why"),
        ([], SIDES[:1], "rank 0 at test_it.py:5 test_it: hang. why"),
        ([], [SIDES[0], GONE], "rank 0 at test_it.py:5 test_it, rank 1 finished: hang. why"),
        ([0], [*SIDES, {"ranks": [0], "line": "other.py:1 f"}], "rank 0: hang. why"),
    ],
)
def test_the_first_line_has_ranks_and_lines(
    culprits: list[int], places: list[dict[str, object]], begins: str
) -> None:
    trial = {"verdict": "hang", "cause": "why", "culprits": culprits, "places": places}
    failed = {0: replace(FAILED, line="test_it.py:5: Connection closed by peer")}
    for said in ({}, failed):
        assert pytest_plugin._first_line(trial, said, [], "") == begins


def test_where_ranks_were_that_ran_out_of_time() -> None:
    trial = {"verdict": "inconclusive", "cause": "why", "culprits": [], "places": SIDES}
    said = pytest_plugin._first_line(trial, {}, [0, 1], "Ended after 9 seconds.")
    ranks = "rank 0 at test_it.py:5 test_it, rank 1 at test_it.py:6 test_it"
    assert said == f"{ranks}: Ended after 9 seconds. why"


def item(root: Path, name: str = "test_it[a/b]") -> Any:
    config = SimpleNamespace(rootpath=root, getoption=lambda _: "runs")
    return SimpleNamespace(name=name, config=config)


def test_two_workers_never_share_a_run_directory(tmp_path: Path) -> None:
    folders = {pytest_plugin._folder(item(tmp_path)) for _ in range(3)}
    assert len(folders) == 3
    assert {folder.parent for folder in folders} == {tmp_path / "runs"}


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "runs").touch()
    with pytest.raises(pytest.fail.Exception, match=r"--ranks-out .*runs: Not a directory"):
        pytest_plugin._folder(item(tmp_path))


@pytest.mark.parametrize("text", ['{"outcome": "pas', "[1]", '{"text": 7}', "[" * 3000])
def test_a_report_that_was_cut_off_or_damaged_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "rank-0.json").write_text(json.dumps(asdict(PASSED)))
    (tmp_path / "rank-1.json").write_text(text)
    assert dict(rank_reports.read(tmp_path)) == {0: PASSED}


class TestARank:
    @pytest.mark.parametrize(
        ("body", "outcome", "text"),
        [
            ("pass", "passed", ""),
            ("assert 2 == 3", "failed", "assert 2 == 3"),
            ("pytest.skip('no GPU')", "skipped", "no GPU"),
            ("pytest.xfail('known')", "skipped", "known"),
            ("raise KeyboardInterrupt", "failed", "test_it.py:4: KeyboardInterrupt"),
            ("pytest.exit('enough')", "failed", "test_it.py:4: _pytest.outcomes.Exit: enough"),
            ("import json; json.loads('{')", "failed", "test_it.py:4: json.decoder"),
            ("import os; assert os.fork() == 0 or os.wait()", "passed", ""),
            ("import os; assert os.fork() and os.wait(), 'child'", "passed", ""),
        ],
    )
    def test_it_writes_how_its_test_ended(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, outcome: str, text: str
    ) -> None:
        (tmp_path / "test_it.py").write_text(
            "import pytest\n" + TEST.format("ranks(2)", "it", body)
        )
        monkeypatch.setenv("MOEDIAG_RANK_REPORTS", str(tmp_path))
        monkeypatch.setenv("RANK", "3")
        monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
        line = [sys.executable, "-m", "pytest", "-p", pytest_plugin.NAME, str(tmp_path)]
        line += ["-o", "addopts=", "--rootdir", str(tmp_path), "-c", "/dev/null"]
        subprocess.run(line, check=False, capture_output=True)
        said = json.loads((tmp_path / "rank-3.json").read_text())
        assert said["outcome"] == outcome
        assert text in said["text"] + said["line"] + said.get("reason", "")
        assert bool(said.get("expected")) == ("xfail" in body)
