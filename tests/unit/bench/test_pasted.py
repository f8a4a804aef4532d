"""Every pasted text of `bench.pasted` gets its right answer."""

from __future__ import annotations

import pytest

from bench.pasted import RIGHT, Answer, Pasted, asked, first_run, problems, texts


@pytest.mark.parametrize("pasted", texts(), ids=lambda one: one.name)
def test_the_answer_is_right(pasted: Pasted) -> None:
    answer = asked(pasted)
    outcome, why = problems(pasted, answer)
    if pasted.known and outcome not in (RIGHT, "wrong"):
        pytest.xfail(pasted.known)
    assert outcome == RIGHT, f"{'; '.join(why)}\n{answer.page}"


def test_there_are_enough_texts_with_distinct_names_and_sources() -> None:
    names = [one.name for one in texts()]
    assert len(names) == len(set(names)) >= 100 and all(one.source for one in texts())
    assert {name for those in first_run().values() for name in those} <= set(names)


def test_wrong_answers_are_counted_as_wrong() -> None:
    """The scoring can fail: an innocent rank, a forbidden word, a missing word, a refusal."""
    some = Pasted("x", "x", "x", {}, ("hang",), (), ("rank 1 waits",), ("only one",), (1,))
    right = Answer("hang", (), "Rank 1 waits", 1)
    assert problems(some, right)[0] == RIGHT
    assert problems(some, Answer("hang", (2,), "Rank 1 waits", 1))[0] == "wrong"
    assert problems(some, Answer("hang", (), "rank 1 waits, the only one", 1))[0] == "wrong"
    assert problems(some, Answer("hang", (), "", 1))[0] == "weak"
    assert problems(some, Answer("inconclusive", (), "", 3))[0] == "silent"
    assert problems(some, Answer("", (), "", 2))[0] == "rejected"
