"""The answer as text: timeline, sentences, markdown and JSON."""

from __future__ import annotations

import json

import pytest

from moediag.lab.campaign.bisect.answer_page import Report, answer, sentences, to_json
from moediag.lab.campaign.bisect.probe_verdict import BAD, GOOD
from moediag.lab.campaign.bisect.search.search import Options, Probe, Search
from moediag.lab.campaign.bisect.timeline import ProbeRecord, timeline
from moediag.protocol import build
from moediag.report import answer_views
from moediag.result.answer_blocks import AnswerState
from tests.unit.bisect_worlds import KINDS, drive, history


def line(text: str) -> str:
    """``4.51.0 G, 4.52.0 B``, or a release alone where it was not probed."""
    words = [entry.split() for entry in text.split(", ")]
    releases = [word[0] for word in words]
    verdicts = {i: KINDS[word[1]] for i, word in enumerate(words) if len(word) > 1}
    return timeline(releases, verdicts)


@pytest.mark.parametrize(
    ("probed", "shown"),
    [
        (
            "4.51.3 G, 4.52.4 G, 4.53.0 B, 4.54.0 B, 4.55.0 B, 4.57.6 B, 5.0.0 G",
            "4.51 G  4.52 G  4.53 B … 4.57 B │ 5.0 G",
        ),
        ("4.52.3 G, 4.52.4 G, 4.53.0 G, 4.53.1 B", "4.52 G  4.53.0 G  4.53.1 B"),
        ("4.1.0 B, 4.2.0 B, 4.3.0 B", "4.1 B  4.2 B  4.3 B"),
        ("4.1.0 B, 4.2.0 B, 4.3.0 B, 4.4.0 B", "4.1 B … 4.4 B"),
        ("4.1.0 B, 4.2.0 B, 4.3.0 B, 4.4.0 B, 5.0.0 B", "4.1 B … 4.4 B │ 5.0 B"),
        ("4.1.0 G, 4.2.0, 4.3.0 S, 4.4.0 O, 4.5.0 F, 4.6.0 B", None),
        ("4.1.0", ""),
        ("2.13.0 B", "2.13 B"),
        ("1!2.0 G, 1!3.0 B", "1!2.0 G │ 1!3.0 B"),
    ],
)
def test_the_timeline_is_one_line(probed: str, shown: str | None) -> None:
    expected = "4.1 G  4.3 S  4.4 O  4.5 F  4.6 B" if shown is None else shown
    assert line(probed) == expected


def releases_of(count: int) -> tuple[str, ...]:
    return tuple(f"4.{minor}.0" for minor in range(count))


def told(letters: str, options: Options) -> list[str]:
    answer, _ = drive(Search(len(letters), options), history(letters))
    return sentences("transformers", releases_of(len(letters)), answer)


@pytest.mark.parametrize(
    ("letters", "options", "words"),
    [
        (
            "GGGBBBBGG",
            Options(5, window=True),
            [
                "transformers 4.3.0 is the first bad release; 4.2.0 is the last good one.",
                "transformers 4.7.0 is the first good release after it; 4.6.0 is the last bad one.",
            ],
        ),
        (
            "GGGSSBB",
            Options(6),
            [
                "The first bad release is one of transformers 4.3.0 to 4.5.0: 4.2.0 is still good, "
                "4.5.0 is bad; 2 could not be judged (4.3.0, 4.4.0: skipped (it cannot be "
                "imported))."
            ],
        ),
        (
            "BBOOG",
            Options(0, 4),
            [
                "The first good release after it is one of transformers 4.2.0 to 4.4.0: 4.1.0 is "
                "still bad, 4.4.0 is good; 2 could not be judged (4.2.0, 4.3.0: another failure "
                "(crash:KeyError:elsewhere.py load:one-rank))."
            ],
        ),
        (
            "BBBOOOOOO",
            Options(2, window=True, patience=3),
            [
                "Bad as far back as transformers 4.0.0, the oldest release that was searched.",
                "No good release newer than transformers 4.2.0, the last that is bad, was found up "
                "to 4.8.0; 4 could not be judged (4.3.0, 4.4.0, 4.6.0, 4.8.0: another failure "
                "(crash:KeyError:elsewhere.py load:one-rank)); 2 between them not tried "
                "(4.5.0, 4.7.0).",
            ],
        ),
        (
            "GBB",
            Options(1, window=True),
            [
                "transformers 4.1.0 is the first bad release; 4.0.0 is the last good one.",
                "Still bad in transformers 4.2.0, the newest release that was searched.",
            ],
        ),
        (
            "NNNNNBBBG",
            Options(6, window=True),
            [
                "Bad since transformers 4.5.0, the first release that can run it.",
                "transformers 4.8.0 is the first good release after it; 4.7.0 is the last bad one.",
            ],
        ),
        (
            "NNNNSBB",
            Options(6),
            [
                "No good release older than transformers 4.5.0, the last that is bad, was found up "
                "to 4.0.0; 5 could not be judged (4.0.0, 4.1.0, 4.2.0, 4.3.0: skipped "
                "(not-applicable: this release has no such family); 4.4.0: skipped (it cannot be "
                "imported)).",
            ],
        ),
        (
            "GBBGGB",
            Options(2, window=True),
            [
                "transformers 4.1.0 is the first bad release; 4.0.0 is the last good one.",
                "transformers 4.3.0 is the first good release after it; 4.2.0 is the last bad one.",
                "It is not one stretch: 4.2.0 is bad, 4.3.0 good, 4.5.0 bad. The answer is the "
                "stretch around 4.2.0.",
            ],
        ),
        (
            "GGBBB",
            Options(4, 2),
            [
                "transformers 4.2.0 is the first bad release; 4.1.0 is the last good one.",
                "4.2.0 was given as good; it is not: bad.",
            ],
        ),
        ("GG", Options(1), ["Not reproduced: transformers 4.1.0, the bad end, is good."]),
        (
            "GS",
            Options(1),
            [
                "transformers 4.1.0, the bad end, could not be judged: skipped (it cannot be "
                "imported)."
            ],
        ),
        (
            "GB",
            Options(1, verify=False),
            [
                "transformers 4.1.0 is the first bad release; 4.0.0 is the last good one. The two "
                "were not confirmed by a second probe."
            ],
        ),
    ],
)
def test_the_answer_is_described_in_sentences(
    letters: str, options: Options, words: list[str]
) -> None:
    assert told(letters, options) == words


def test_results_of_other_probes_are_shown() -> None:
    search = Search(12, Options(11, 0))
    search.told(Probe(2), BAD)
    answer, _ = drive(search, history("GGGGGGBBBBBB"))
    said = sentences("transformers", releases_of(12), answer)
    assert said[1:] == ["It is not one stretch: 4.2.0 is bad."]


def report(letters: str, options: Options) -> Report:
    releases = releases_of(len(letters))
    search = Search(len(letters), options)
    answer, made = drive(search, history(letters))
    probes = [
        ProbeRecord(
            releases[p.index],
            KINDS[letters[p.index]],
            p.attempt,
            uploaded="2025-07-11T10:00:00+00:00",
            signature="hang:size all_gather|reduce_scatter:one-rank",
            seconds=1.25,
        )
        for p in made
    ]
    return Report(
        "transformers",
        "expert-starvation",
        answer,
        releases,
        search.verdicts,
        tuple(probes),
        ("hang:size all_gather|reduce_scatter:one-rank",),
        reproduce=("moediag run expert-starvation --stack transformers=4.3.0",),
        environment={"python": "3.11", "torch": "2.13.0"},
    )


def page(letters: str, options: Options) -> str:
    return answer_views.markdown(answer(report(letters, options)), level=3)


def test_the_page_of_an_answer_is_markdown() -> None:
    text = page("GGGSBBBGGG", Options(5, window=True))
    assert text.startswith("### expert-starvation by release of transformers\n\n✅ **answered**: ")
    assert "**answered**: The first bad release is one of transformers" in text
    assert "4.2 G  4.3 S  4.4 B  4.5 B  4.6 B" in text
    assert "Confidence medium" in text and "10 releases, 4.0.0 to 4.9.0" in text
    rows = [line for line in text.splitlines() if line.startswith("| 4.")]
    assert rows == sorted(rows, key=lambda r: (r.split()[1], "probe 2" in r))
    assert "| 4.2.0 (probe 2) | 2025-07-11 | good |" in text
    assert all(line.replace("\\|", "").count("|") == 6 for line in rows)
    assert "```console\nmoediag run expert-starvation --stack transformers=4.3.0\n```" in text
    assert "| torch | 2.13.0 |" in text
    assert text.endswith("|\n") and "\n\n\n" not in text


def test_the_page_of_a_search_without_an_answer() -> None:
    text = page("GG", Options(1))
    assert "❔ **inconclusive**: Not reproduced" in text
    assert "Confidence low. 1 probe of 1 of 2 releases" in text


def test_probes_without_a_verdict_are_errors_for_ci() -> None:
    cases = answer(report("GGGSBBBGGG", Options(5, window=True))).cases
    undecided = {case.name for case in cases if case.state != AnswerState.ANSWERED}
    assert undecided == {"4.3.0"}


def test_json_contains_releases_and_plain_values() -> None:
    raw = json.loads(json.dumps(to_json(report("GGGSBBBGGG", Options(5, window=True)))))
    assert raw["schema_version"] == 1 and raw["status"] == "found"
    assert raw["began"]["candidates"] == ["4.3.0", "4.4.0"]
    assert raw["began"]["undecided"][0]["verdict"]["kind"] == "skip"
    assert (raw["ended"]["bad"], raw["ended"]["good"]) == ("4.6.0", "4.7.0")
    assert raw["confidence"] == "medium" and raw["monotone"] is True
    assert raw["timeline"] in page("GGGSBBBGGG", Options(5, window=True))
    records = tuple(build(ProbeRecord, record) for record in raw["probes"])
    assert records == report("GGGSBBBGGG", Options(5, window=True)).probes
    alone = to_json(report("GB", Options(1)))
    assert alone["ended"] is None and alone["began"]["good"] == "4.0.0"


@pytest.mark.parametrize(
    "change",
    [{"attempt": 0}, {"attempt": "1"}, {"seconds": "1"}, {"version": 4}, {"verdict": None}],
)
def test_an_invalid_record_is_refused(change: dict[str, object]) -> None:
    raw = {**ProbeRecord("4.1.0", GOOD).to_json(), **change}
    with pytest.raises(ValueError):
        build(ProbeRecord, raw)
