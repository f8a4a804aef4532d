"""HTML, markdown, JUnit, trace, JSON: well-formed, escaped, within their readers' limits."""

import json
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from moediag.errors import EvidenceError, UsageError
from moediag.evidence.model import Collective, Evidence, Group, RankEvidence
from moediag.report import html, json_view, junit, markdown, page, stdout, trace, views
from moediag.result import FirstDivergence, RankSide, RunResult, Verdict, read_result
from tests.unit.trial_results import changed

RESULTS = Path(__file__).parent.parent.parent / "golden" / "results"
NASTY = "<script>alert(1)</script> | `x` *y* \x00\x1b[31m & \"q\" 'p' </details> ```"


@pytest.fixture
def starvation() -> RunResult:
    return read_result(RESULTS / "starvation.json")


@pytest.fixture
def nasty(starvation: RunResult) -> RunResult:
    """User text everywhere it can appear, in a trial that did not meet its expectation."""
    trial = changed(
        starvation.trials[0],
        variant=NASTY, cause=NASTY, not_seen=(NASTY,), notes=(NASTY,), met=False,
        stacks={0: (NASTY,)}, worst_parameter=NASTY, wrong_parameters=(NASTY,),
    )  # fmt: skip
    return replace(starvation, scenario=NASTY, trials=(trial, *starvation.trials[1:]))


def test_html_needs_no_network_and_no_script(starvation: RunResult) -> None:
    page = html.render([starvation])
    assert not re.search(r"(src|href)=\"(?!#)", page)
    assert "url(" not in page
    assert "<script" not in page


def test_html_escapes_text_from_the_run(nasty: RunResult) -> None:
    page = html.render([nasty])
    assert "<script" not in page
    assert "&lt;script&gt;" in page


def test_html_of_several_runs_links_to_each(starvation: RunResult) -> None:
    page = html.render([starvation, starvation])
    assert 'href="#run-2"' in page
    assert 'id="run-2"' in page


def test_rank_grid_marks_culprits_with_letters_too() -> None:
    grid = ElementTree.fromstring(html.rank_grid(4, [1], [0, 2]))
    assert [g.get("class") for g in grid] == ["victim", "culprit", "victim", "other"]
    assert ["".join(g[-1].itertext()) for g in grid] == ["V", "C", "V", ""]
    assert grid.get("aria-label") == "4 ranks; culprits: rank 1; victims: ranks 0, 2"


def test_rank_grid_of_many_ranks_stays_small() -> None:
    assert len(html.rank_grid(4096, [7], range(8))) < 1_000_000
    grid = html.rank_grid(1_000_000, [7], range(7))
    assert grid == (
        "<p>1000000 ranks; culprits: rank 7; victims: ranks 0..6; too many ranks to draw</p>"
    )


def test_markdown_escapes_text_from_the_run(nasty: RunResult) -> None:
    text = markdown.render([nasty])
    outside = re.sub(r"(?ms)^(`{3,})text$.*?^\1$", "", text)
    assert "<script" not in outside
    rows = [line for line in outside.splitlines() if line.startswith("|")]
    columns = [len(re.findall(r"(?<!\\)\|", row)) for row in rows]
    assert set(columns[: len(nasty.trials) + 2]) == {7}


def test_markdown_fits_in_an_issue_body(starvation: RunResult) -> None:
    text = markdown.render([starvation] * 60)
    assert len(text) <= markdown.LIMIT < 65_536
    assert len(text.encode()) < 2**20


def test_markdown_lists_omitted_parts(starvation: RunResult) -> None:
    whole = markdown.render([starvation] * 3)
    assert "left out" not in whole
    assert "1 finding left out here" in markdown.render([starvation] * 3, limit=len(whole) - 1)


def test_junit_counts_and_texts(nasty: RunResult) -> None:
    root = ElementTree.fromstring(junit.render([nasty]))
    suite = root[0]
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("11", "1", "0")
    assert "<script>" in str(suite[0].get("name"))
    assert suite[0][0].tag == "failure"


@pytest.mark.parametrize(
    ("verdict", "tag"),
    [("inconclusive", "error"), ("not-applicable", "skipped"), ("hang", "failure")],
)
def test_junit_distinguishes_failed_and_undecided_claims(
    starvation: RunResult, verdict: str, tag: str
) -> None:
    trial = changed(starvation.trials[0], verdict=verdict, met=False)
    root = ElementTree.fromstring(junit.render([replace(starvation, trials=(trial,))]))
    assert root[0][0][0].tag == tag


@pytest.mark.parametrize("verdict", list(Verdict))
def test_all_views_of_a_watched_job_agree(starvation: RunResult, verdict: Verdict) -> None:
    trial = changed(starvation.trials[0], verdict=verdict, expected="", met=True)
    job = replace(starvation, trials=(trial,))
    said = {
        Verdict.CLEAN: ("0", "0", 0),
        Verdict.NOT_APPLICABLE: ("0", "0", 0),
        Verdict.INCONCLUSIVE: ("0", "1", 3),
    }.get(verdict, ("1", "0", 1))
    suite = ElementTree.fromstring(junit.render([job]))[0]
    assert (suite.get("failures"), suite.get("errors"), page.exit_code(job)) == said
    if said[2] == 1:
        message = str(suite[0][0].get("message"))
        assert message.startswith(f"{verdict}: ")
    assert verdict == Verdict.CLEAN or verdict in markdown.render([job])


def test_json_has_no_nonfinite_numbers(starvation: RunResult) -> None:
    trial = changed(starvation.trials[0], gradient_error=float("nan"))
    raw = json.loads(
        json_view.render(replace(starvation, trials=(trial,))),
        parse_constant=lambda name: pytest.fail(name),
    )
    assert raw["trials"][0]["gradient_error"] == "nan"


def test_json_keeps_text_that_a_terminal_would_obey_as_escapes(
    starvation: RunResult, capsys: pytest.CaptureFixture[str]
) -> None:
    obeyed = "\x1b[2J \x7f \x9b2J \u202e \ufffe é"
    text = json_view.render(replace(starvation, scenario=obeyed))
    stdout.data({"scenario": obeyed})
    for shown in (text, capsys.readouterr().out):
        assert json.loads(shown)["scenario"] == obeyed
        assert "é" in shown
        assert not set(shown) & set("\x1b\x7f\x9b\u202e\ufffe")


def call(index: int, op: str, time: float, completed: bool = True) -> Collective:
    return Collective(index, "g", index, op, 8, 4, "float32", "backward", "layers.1",
                      completed=completed, time=time)  # fmt: skip


def test_trace_marks_the_divergence_and_draws_unfinished_calls() -> None:
    group = {"g": Group("g", (0, 1), "dp_shard")}
    ranks = {
        0: RankEvidence(0, (call(0, "all_gather", 5.0), call(1, "all_gather", 6.0, False)), group),
        1: RankEvidence(1, (call(0, "all_gather", 5.5), call(1, "reduce_scatter", 7.0)), group),
    }
    sides = {"0": RankSide("all_gather", 8, "f"), "1": RankSide("reduce_scatter", 8, "f")}
    at = FirstDivergence(1, "dp_shard", "backward", "layers.1", sides)
    events = json.loads(trace.render({"unfixed": trace.Traced(Evidence(2, ranks), at)}))[
        "traceEvents"
    ]
    spans = [e for e in events if e["ph"] == "X"]
    assert [(e["pid"], e["ts"]) for e in spans] == [
        (0, 0), (0, 1_000_000), (1, 500_000), (1, 2_000_000),
    ]  # fmt: skip
    assert spans[0]["dur"] == 1_000_000
    assert spans[1]["ts"] + spans[1]["dur"] == 2_100_000  # to the end of the trace
    marks = [e for e in events if e["name"] == "first divergence"]
    assert [(e["pid"], e["ts"]) for e in marks] == [(0, 1_000_000), (1, 2_000_000)]


def test_trace_of_a_rank_without_calls_has_no_spans() -> None:
    """It only measured, as after a recorder that was switched off."""
    evidence = Evidence(1, {0: RankEvidence(0)})
    found = json.loads(trace.render({"t": trace.Traced(evidence)}))["traceEvents"]
    assert not [event for event in found if event["ph"] == "X"]


def test_trace_of_a_damaged_dump_has_no_million_of_processes() -> None:
    for world, drawn in ((3, {0, 1, 2}), (1_000_000, {1})):
        evidence = Evidence(world, {1: RankEvidence(1)})
        found = json.loads(trace.render({"t": trace.Traced(evidence)}))["traceEvents"]
        assert {event["pid"] for event in found} == drawn


def test_trace_without_a_divergence_has_no_marks() -> None:
    ranks = {0: RankEvidence(0, (call(0, "all_gather", 5.0),), {"g": Group("g", (0,))})}
    events = json.loads(trace.render({"control": trace.Traced(Evidence(1, ranks))}))["traceEvents"]
    assert [e["ph"] for e in events if e["name"] == "first divergence"] == []
    assert len([e for e in events if e["ph"] == "X"]) == 1


def test_a_path_without_a_result_is_an_error_with_advice(tmp_path: Path) -> None:
    with pytest.raises(EvidenceError, match=r"result\.json does not exist"):
        views.load(tmp_path)
    (tmp_path / "hunt.md").touch()
    with pytest.raises(EvidenceError) as raised:
        views.load(tmp_path)
    assert f"The answer of this one is in {tmp_path / 'hunt.md'}." in raised.value.help_text
    (tmp_path / "result.json").write_text('{"schema_version": 1}')
    with pytest.raises(EvidenceError, match="is not a result of moediag"):
        views.load(tmp_path)


def test_a_view_that_cannot_be_written_is_a_usage_error(
    starvation: RunResult, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="--html"):
        views.write([starvation], {"html": tmp_path}, dict)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"schema_version": 2}', "schema_version 2, this moediag reads 1"),
        ("{}", "no schema_version"),
        ("[]", "no schema_version"),
        ("null", "no schema_version"),
        ('{"schema_version": 1, "trials": 3}', "trials is no list"),
        ('{"schema_version": 1, "trials": [{}]}', "scenario is missing"),
        ('{"schema_version": 1', "not JSON"),
    ],
)
def test_an_invalid_result_file_is_an_error(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "result.json").write_text(text)
    with pytest.raises(EvidenceError, match=why):
        views.load(tmp_path)


def test_stdout_accepts_only_one_format(starvation: RunResult, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="stdout can hold only one format"):
        views.write([starvation], {"html": Path("-"), "junit": Path("-")}, dict)


def test_a_full_disk_is_not_a_usage_error(starvation: RunResult, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No space left"):
        views.write([starvation], {"html": Path("/dev/full")}, dict)
