"""Every view of the sample results in tests/golden/results, compared with snapshot files.

`make golden` rewrites them; read the difference before you commit it.
"""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from moediag.report import html, json_view, junit, markdown
from moediag.report.page import page_of
from moediag.report.terminal import as_text
from moediag.result import RunResult, read_result
from tests.junit_reader import as_read

GOLDEN = Path(__file__).parent.parent.parent / "golden"
SAMPLES = sorted((GOLDEN / "results").glob("*.json"))
RUN = Path("moediag-runs/example")
VIEWS: dict[str, Callable[[RunResult], str]] = {
    "80.txt": lambda result: as_text(page_of(result), 80, RUN),
    "120.txt": lambda result: as_text(page_of(result), 120, RUN),
    "md": lambda result: markdown.render([result]),
    "xml": lambda result: junit.render([result]),
    "html": lambda result: html.render([result]),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("sample", SAMPLES, ids=lambda path: path.stem)
def test_view_matches_its_snapshot(sample: Path, view: str) -> None:
    text = VIEWS[view](read_result(sample))
    kept = GOLDEN / "pages" / f"{sample.stem}.{view}"
    if os.environ.get("MOEDIAG_GOLDEN") == "write":
        kept.parent.mkdir(exist_ok=True)
        kept.write_text(text, encoding="utf-8")
    assert kept.exists(), "run `make golden`"
    assert text == kept.read_text(encoding="utf-8")


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda path: path.stem)
def test_json_view_is_the_result_itself(sample: Path, tmp_path: Path) -> None:
    result = read_result(sample)
    copy = tmp_path / "result.json"
    copy.write_text(json_view.render(result), encoding="utf-8")
    assert read_result(copy) == result


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda path: path.stem)
def test_a_reader_of_junit_counts_the_same(sample: Path) -> None:
    result = read_result(sample)
    (outcomes,) = as_read(junit.render([result])).values()
    assert len(outcomes) == len(result.trials)


def test_no_snapshot_is_unused() -> None:
    wanted = {f"{sample.stem}.{view}" for sample in SAMPLES for view in VIEWS}
    assert {path.name for path in (GOLDEN / "pages").iterdir()} == wanted
