"""The page of ``python -m bench.load_cost``: times, ratios and wrong bytes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.load_cost import __main__ as command
from bench.load_cost.page import growth, page, tables, wrong
from bench.load_cost.timing import METHODS, RankTimings, Spec, Timing
from moediag.errors import StackError
from moediag.lab.stacks import environment
from moediag.result import Table


def timing(
    method: str, parameters: int, seconds: list[float], bare: list[float] | None = None,
    wrong: list[str] | None = None,
) -> Timing:  # fmt: skip
    calls = {"local": {}, "coalesced": {"broadcast": 1}}.get(method, {"broadcast": parameters})
    size = parameters * 4_000
    return Timing(method, parameters, size, calls, seconds, bare or [], wrong or [])


TIMINGS = [
    timing("per-parameter", 100, [0.1, 0.2, 0.1], [0.08, 0.16, 0.08]),
    timing("per-parameter", 400, [0.4, 0.8, 0.4], [0.32, 0.64, 0.32]),
    timing("coalesced", 100, [0.05, 0.1, 0.05], [0.01, 0.02, 0.01]),
    timing("coalesced", 400, [0.1, 0.2, 0.08], [0.02, 0.04, 0.02]),
    timing("local", 100, [0.02, 0.02, 0.02]),
    timing("local", 400, [0.08, 0.08, 0.08]),
]


BAD = timing("coalesced", 400, [0.1], wrong=["layers.0.experts.3.weight"])


def test_correct_bytes_are_reported() -> None:
    by_rank = {0: RankTimings(TIMINGS, ["a note"], {"torch": "2.13.0"}), 1: RankTimings(TIMINGS)}
    text = page(by_rank, "python -m bench.load_cost --ranks 2")
    assert wrong(by_rank) == []
    assert "bit by bit, on every rank" in text
    assert "`python -m bench.load_cost --ranks 2`" in text
    assert "- a note" in text
    assert "torch 2.13.0" in text
    assert "**Loading the weights, in ms**" in text


def test_wrong_bytes_are_reported_before_the_times() -> None:
    by_rank = {0: RankTimings(TIMINGS), 1: RankTimings([*TIMINGS[:3], BAD, *TIMINGS[4:]])}
    assert wrong(by_rank) == [
        "coalesced of 400 parameters delivered wrong bytes to rank 1 (first in "
        "layers.0.experts.3.weight)"
    ]
    text = page(by_rank, "x")
    assert text.index("Wrong bytes, so the times mean nothing") < text.index("Loading the weights")
    assert "bit by bit" not in text


class TestCommand:
    @pytest.fixture
    def asked(self, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Spec, int]]:
        seen: list[tuple[Spec, int]] = []

        def measure(spec: Spec, stack: object, ranks: int, timeout: float) -> object:
            seen.append((spec, ranks))
            return self.answer

        self.answer: tuple[dict[int, RankTimings], str] = ({0: RankTimings(TIMINGS)}, "")
        monkeypatch.setattr(command, "measure", measure)
        monkeypatch.setattr(environment, "ensure", lambda request: None)
        return seen

    def test_options_are_passed_in_the_spec(self, asked: list[tuple[Spec, int]]) -> None:
        line = ["--ranks", "4", "--parameters", "5,7", "--method", "local", "--dtype", "bfloat16"]
        assert command.main(line) == 0
        assert asked == [(Spec([5, 7], methods=["local"], dtype="bfloat16"), 4)]
        assert command.main([]) == 0
        assert asked[-1] == (Spec(methods=list(METHODS)), 2)

    @pytest.mark.parametrize("sizes", ["0", "100,-1", "", "x"])
    def test_a_size_of_zero_is_refused(
        self, asked: list[tuple[Spec, int]], sizes: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit):
            command.main(["--parameters", sizes])
        assert "--parameters" in capsys.readouterr().err
        assert asked == []

    def test_wrong_bytes_and_lost_ranks_are_failures(
        self, asked: list[tuple[Spec, int]], capsys: pytest.CaptureFixture[str]
    ) -> None:
        self.answer = ({0: RankTimings([BAD])}, "")
        assert command.main([]) == 1
        assert "wrong bytes" in capsys.readouterr().out
        self.answer = ({}, "exit code 1: ValueError: no such thing")
        assert command.main([]) == 1
        assert "no such thing" in capsys.readouterr().err

    def test_a_stack_that_cannot_be_built_is_a_failure(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def refuse(request: object) -> object:
            raise StackError("transformers 5.23.0 cannot be installed")

        monkeypatch.setattr(environment, "ensure", refuse)
        assert command.main([]) == 1
        assert "transformers 5.23.0 cannot be installed" in capsys.readouterr().err


class TestTables:
    @pytest.fixture
    def by_title(self) -> dict[str, Table]:
        return {table.title: table for table in tables(TIMINGS)}

    def test_rows_are_methods_and_columns_sizes(self, by_title: dict[str, Table]) -> None:
        table = by_title["Loading the weights, in ms"]
        assert table.columns == (
            "method", "100 parameters", "400 parameters", "per 1,000", "growth",
        )  # fmt: skip
        assert table.rows == (
            ("per-parameter", 100.0, 400.0, 1000.0, 1.0),
            ("coalesced", 50.0, 100.0, 250.0, 0.5),
            ("local", 20.0, 80.0, 200.0, 1.0),
        )
        assert "1.6 MB at 400 parameters; median of 3 rounds" in table.note

    def test_ratios_are_computed_per_round(self, by_title: dict[str, Table]) -> None:
        table = by_title["Loading, times faster than one broadcast per parameter"]
        # Round 2 was slow for both; 4, 4 and 5 times in the rounds of 400 parameters.
        assert table.rows == (
            ("coalesced", 2.0, 4.0, "4.00 to 4.50"),
            ("local", 5.0, 5.0, "5.00 to 7.50"),
        )

    def test_communication_table_gives_the_number_of_calls(
        self, by_title: dict[str, Table]
    ) -> None:
        table = by_title["Communication alone, in ms"]
        assert [(row[0], row[1], row[-1]) for row in table.rows] == [
            ("per-parameter", 80.0, "400 broadcast"),
            ("coalesced", 10.0, "1 broadcast"),
            ("local", None, "none"),
        ]
        assert by_title["Communication, times faster"].rows == (
            ("coalesced", 8.0, 16.0, "16.00 to 16.00"),
        )

    def test_no_ratios_without_the_baseline(self) -> None:
        assert [table.title for table in tables(TIMINGS[4:])] == ["Loading the weights, in ms"]

    def test_one_size_in_one_round_has_no_growth_or_spread(self) -> None:
        times, ratios = tables([timing("per-parameter", 10, [0.2]), timing("local", 10, [0.1])])
        assert times.columns == ("method", "10 parameters", "per 1,000")
        assert times.rows == (("per-parameter", 200.0, 20_000.0), ("local", 100.0, 10_000.0))
        assert "Growth" not in times.note
        assert ratios.rows == (("local", 2.0, None),)

    def test_no_times_give_no_table(self) -> None:
        assert tables([]) == ()


@given(
    st.floats(0.1, 3.0),
    st.floats(1e-6, 10.0),
    st.lists(st.integers(1, 10**6), min_size=2, max_size=6, unique=True),
)
def test_growth_fits_the_exponent(exponent: float, factor: float, sizes: list[int]) -> None:
    found = growth({size: factor * size**exponent for size in sizes})
    assert found == pytest.approx(exponent, abs=1e-3)


def test_growth_needs_two_sizes() -> None:
    assert growth({100: 1.0}) is None
    assert growth({}) is None
    assert growth({100: 0.0, 200: 1.0}) is None
