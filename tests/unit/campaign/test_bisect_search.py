"""The search against brute force over thousands of random histories, and the number of probes.

Truth is a string, one letter a release: B bad, G good, O another failure, S skipped, F flaky.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moediag.lab.campaign.bisect.probe_verdict import BAD, GOOD, Kind, ProbeVerdict, other
from moediag.lab.campaign.bisect.search.answer import Boundary, Status
from moediag.lab.campaign.bisect.search.rates import Rate, combined
from moediag.lab.campaign.bisect.search.search import Options, Probe, Search, most_probes
from moediag.result import Confidence
from tests.depth import DEEP, cases
from tests.unit.bisect_worlds import KINDS, drive, history, one_stretch, tightest

QUICK = settings(max_examples=cases(300), deadline=None)
LETTERS = st.text(alphabet="BGOSF", min_size=1, max_size=40).filter(lambda t: "B" in t)


def checked(letters: str, boundary: Boundary) -> None:
    """What every boundary must satisfy, whatever the history: its neighbours are what they are said
    to be, and nothing between them is known."""
    assert letters[boundary.bad] == "B"
    low, high = sorted((boundary.bad, boundary.limit if boundary.good is None else boundary.good))
    if boundary.good is not None:
        assert letters[boundary.good] == "G"
        assert boundary.candidates[0] == low + 1 and boundary.candidates[-1] == high
        assert boundary.confirmed
        between = range(low + 1, high)
    elif boundary.after:
        between = range(boundary.bad + 1, boundary.limit + 1)
    else:
        between = range(boundary.limit, boundary.bad)
    told = {i for i, _ in boundary.undecided}
    assert sorted({*told, *boundary.untried}) == list(between)
    assert not told & set(boundary.untried)
    for index, verdict in boundary.undecided:
        assert verdict.kind == KINDS[letters[index]].kind
        assert letters[index] in "OSF"
    for index in boundary.again:
        assert letters[index] == "B"


def random_options(rng: random.Random, letters: str, bad: int) -> Options:
    others = [i for i in range(len(letters)) if i != bad]
    good = rng.choice(others) if others and rng.random() < 0.4 else None
    return Options(bad, good, window=rng.random() < 0.5)


def test_one_stretch_with_unknowns_matches_brute_force() -> None:
    rng = random.Random(20)
    for _ in range(cases(4000)):
        letters, bad = one_stretch(rng, rng.randint(1, 45))
        options = random_options(rng, letters, bad)
        answer, _ = drive(Search(len(letters), options), history(letters))
        assert answer.monotone and answer.boundaries
        for boundary in answer.boundaries:
            checked(letters, boundary)
            assert not boundary.untried
            found = (boundary.bad, boundary.good)
            assert found == tightest(letters, bad, 1 if boundary.after else -1), letters


def test_bounds_are_correct_for_any_history() -> None:
    """Any number of stretches: the boundary is a true one, and the one without a good release is
    at least not hidden by unknowns."""
    rng = random.Random(21)
    for _ in range(cases(4000)):
        weights = [rng.random() for _ in range(5)]
        letters = "".join(rng.choices("BGOSF", weights, k=rng.randint(1, 50)))
        bad = rng.randrange(len(letters))
        letters = f"{letters[:bad]}B{letters[bad + 1 :]}"
        options = random_options(rng, letters, bad)
        answer, _ = drive(Search(len(letters), options), history(letters))
        for boundary in answer.boundaries:
            checked(letters, boundary)
            assert not boundary.untried
            if boundary.good is None and not boundary.to_the_end:
                step = 1 if boundary.after else -1
                beyond = range(boundary.bad + step, boundary.limit + step, step)
                assert not {letters[i] for i in beyond} & {"B", "G"}


@QUICK
@given(LETTERS, st.data())
def test_the_answer_does_not_depend_on_jobs_or_order(letters: str, data: st.DataObject) -> None:
    bad = data.draw(st.sampled_from([i for i, c in enumerate(letters) if c == "B"]))
    rng = random.Random(data.draw(st.integers(0, 10**6)))
    options = random_options(rng, letters, bad)
    alone, needed = drive(Search(len(letters), options), history(letters))
    jobs = data.draw(st.integers(2, 9))
    together, made = drive(Search(len(letters), options), history(letters), jobs, rng)
    assert together == alone
    # What one job needed is what the answer rests on, and it is all there.
    assert set(needed) <= set(made)
    # A resumed search is told everything at once, in another order, and something besides.
    resumed = Search(len(letters), options)
    everything = [*made, *(Probe(i) for i in range(len(letters)) if rng.random() < 0.3)]
    rng.shuffle(everything)
    for probe in everything:
        resumed.told(probe, KINDS[letters[probe.index]])
    assert resumed.answer == alone
    assert resumed.path == tuple(needed)


def test_the_answer_is_the_same_after_twenty_kills() -> None:
    rng = random.Random(5)
    for _ in range(cases(100)):
        letters, bad = one_stretch(rng, 60)
        options = Options(bad, window=True)
        whole, needed = drive(Search(60, options), history(letters))
        known: dict[Probe, ProbeVerdict] = {}
        for _kill in range(20):
            search = Search(60, options)
            for probe, verdict in known.items():
                search.told(probe, verdict)
            for _ in range(rng.randint(0, 3)):
                wanted = search.next()
                if not wanted:
                    break
                assert wanted[0] not in known
                known[wanted[0]] = history(letters)(wanted[0])
                search.told(wanted[0], known[wanted[0]])
        search = Search(60, options)
        for probe, verdict in known.items():
            search.told(probe, verdict)
        answer, rest = drive(search, history(letters))
        assert answer == whole
        assert [*known, *rest] == needed


def ceil_log2(number: int) -> int:
    return math.ceil(math.log2(number)) if number > 1 else 0


@pytest.mark.parametrize("distance", [*range(1, 70), 127, 128, 129, 200])
def test_number_of_probes_with_both_ends_is_minimal(distance: int) -> None:
    """Two ends, ceil(log2) between them, two neighbours again: reached and never exceeded."""
    counts = []
    for first_bad in range(1, distance + 1):
        letters = "G" * first_bad + "B" * (distance + 1 - first_bad)
        options = Options(distance, 0)
        answer, made = drive(Search(len(letters), options), history(letters))
        assert answer.began is not None and answer.began.exact and answer.began.confirmed
        assert answer.began.candidates == (first_bad,)
        assert answer.confidence == Confidence.HIGH
        counts.append(len(made))
        mirrored = letters[::-1]
        reverse, mirror = drive(Search(len(letters), Options(0, distance)), history(mirrored))
        assert reverse.ended is not None and reverse.began is None
        assert reverse.ended.candidates == (distance + 1 - first_bad,)
        assert len(mirror) == len(made)
    assert max(counts) == 2 + ceil_log2(distance) + 2
    assert ceil_log2(distance) <= ceil_log2(distance + 1)


@pytest.mark.parametrize("steps", range(1, 200 if DEEP else 40))
def test_number_of_probes_without_a_good_end_is_bounded(steps: int) -> None:
    """The good end is 2 ** j releases back, the first such that is far enough: j + 1 growing steps
    and j - 1 halvings, besides the bad end and the two neighbours."""
    letters = "G" * 300 + "B" * steps
    answer, made = drive(Search(len(letters), Options(len(letters) - 1)), history(letters))
    assert answer.began is not None and answer.began.candidates == (300,)
    j = ceil_log2(steps)
    assert len(made) <= 1 + (j + 1) + max(0, j - 1) + 2
    first = [p.index for p in made if p.attempt == 1]
    growing = [299 + steps, 298 + steps, *(299 + steps - 2**i for i in range(1, j + 1))]
    assert first[: len(growing)] == growing


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 13] if DEEP else [1, 2, 3, 5, 8])
def test_the_maximum_number_of_probes_is_known_in_advance(count: int) -> None:
    """Of every clean history that fits the options; reached, but for one probe that the two sides
    of a window share when the bad end is the whole stretch."""
    for bad, window in itertools.product(range(count), (False, True)):
        for good in [None, *range(count)]:
            if good == bad:
                continue
            options = Options(bad, good, window)
            made = [
                len(drive(Search(count, options), history(letters))[1])
                for start, end in itertools.product(range(bad + 1), range(bad + 1, count + 1))
                if good is None or not start <= good < end
                for letters in ["G" * start + "B" * (end - start) + "G" * (count - end)]
            ]
            assert most_probes(count, options) - 1 <= max(made) <= most_probes(count, options)


def test_three_parallel_probes_quarter_the_range() -> None:
    letters = "G" * 100 + "B" * 157
    search = Search(len(letters), Options(256, 0))
    search.told(Probe(0), GOOD)
    search.told(Probe(256), BAD)
    assert sorted(p.index for p in search.next(3)) == [64, 128, 192]
    rounds = 0
    while search.answer is None:
        rounds += 1
        for probe in search.next(3):
            search.told(probe, history(letters)(probe))
    assert rounds <= 4 + 1  # log4(256) and the neighbours
    assert search.answer.began is not None and search.answer.began.candidates == (100,)


def test_the_first_probe_does_not_depend_on_jobs() -> None:
    """What --jobs 1 would probe is the first of what --jobs 8 probes, at every moment."""
    rng = random.Random(8)
    for _ in range(cases(40)):
        letters, bad = one_stretch(rng, 40)
        search = Search(40, Options(bad, window=True))
        while search.answer is None:
            first, *others = search.next(8)
            assert search.next(1) == [first] and first not in others
            search.told(first, history(letters)(first))


def test_a_window_is_found_without_a_good_end() -> None:
    letters = "G" * 8 + "B" * 21 + "G" * 40
    answer, made = drive(Search(len(letters), Options(10, window=True)), history(letters))
    assert answer.status == Status.FOUND
    assert answer.began is not None and answer.ended is not None
    assert answer.began.candidates == (8,) and answer.ended.candidates == (29,)
    assert made[:2] == [Probe(10), Probe(68)]
    assert answer.confidence == Confidence.HIGH


def test_a_boundary_with_only_skipped_releases_is_an_answer() -> None:
    answer, _ = drive(Search(9, Options(8, 0)), history("GGGSOBBBB"))
    began = answer.began
    assert answer.status == Status.FOUND and began is not None
    assert began.candidates == (3, 4, 5)
    assert [(i, v.kind) for i, v in began.undecided] == [(3, Kind.SKIP), (4, Kind.OTHER)]
    assert answer.confidence == Confidence.MEDIUM


def test_an_error_instead_of_silence_is_not_a_fix() -> None:
    """ep-overwrite: wrong weights until 5.16, a crash from then on; nothing newer is good."""
    letters = "G" * 5 + "B" * 10 + "O" * 20
    answer, made = drive(Search(35, Options(9, window=True)), history(letters))
    assert answer.status == Status.OPEN
    assert answer.began is not None and answer.began.candidates == (5,)
    ended = answer.ended
    assert ended is not None and ended.good is None and ended.bad == 14
    assert not ended.to_the_end and len(ended.undecided) == 20
    patient, fewer = drive(Search(35, Options(9, window=True, patience=4)), history(letters))
    assert patient.ended is not None and patient.ended.bad == 14
    assert {14, 15} <= {p.index for p in fewer}, "the last bad one and its neighbour are known"
    assert len(fewer) < len(made) and patient.ended.untried


def test_a_failure_in_all_releases_has_no_boundary() -> None:
    answer, _ = drive(Search(30, Options(12, window=True)), history("B" * 30))
    assert answer.status == Status.OPEN
    assert all(b.to_the_end for b in answer.boundaries)
    assert answer.confidence == Confidence.HIGH
    single, made = drive(Search(1, Options(0, window=True)), history("B"))
    assert single.status == Status.OPEN and made == [Probe(0)]


@pytest.mark.parametrize(
    ("letter", "status"),
    [("G", Status.NOT_REPRODUCED), ("O", Status.UNDECIDED), ("S", Status.UNDECIDED)],
)
def test_nothing_is_searched_without_a_bad_end(letter: str, status: Status) -> None:
    answer, made = drive(Search(5, Options(4, 0, window=True)), history("GGGG" + letter))
    assert answer.status == status and not answer.boundaries
    assert answer.confidence == Confidence.LOW and made == [Probe(4)]


def test_a_bad_release_given_as_good_is_reported() -> None:
    letters = "GGGGBBBBBBBB"
    answer, made = drive(Search(12, Options(11, 8)), history(letters))
    assert answer.given_good == (8, BAD)
    assert answer.began is not None and answer.began.candidates == (4,)
    assert [p.index for p in made[:4]] == [11, 8, 7, 6]


def test_bad_good_bad_is_reported() -> None:
    """The newest release is bad again; the answer is the stretch around the bad end."""
    letters = "GGGG" + "BBBB" + "GGGG" + "BBBB"
    answer, _ = drive(Search(16, Options(5, window=True)), history(letters))
    assert answer.ended is not None and answer.ended.candidates == (8,)
    assert answer.ended.again == (15,) and answer.ended.returns == ((7, 8, 15),)
    assert not answer.monotone and answer.confidence == Confidence.LOW


def test_results_of_extra_probes_do_not_move_a_bound() -> None:
    letters = "GGGGGGGGBBBBBBBBBBBBBBBB"
    search = Search(24, Options(23, 0))
    search.told(Probe(3), BAD)  # by a probe of an earlier picture of the range
    answer, _ = drive(search, history(letters))
    assert answer.beside == ((3, Kind.BAD),) and not answer.monotone
    assert answer.began is not None and answer.began.candidates == (8,)


# ------------------------------------------------------------------------ noise


def per_attempt(
    letters: str, seed: int, disturb: Callable[[random.Random, str], ProbeVerdict]
) -> Callable[[Probe], ProbeVerdict]:
    """Each probe has its own chance, the same whenever and wherever it is made."""

    def world(probe: Probe) -> ProbeVerdict:
        rng = random.Random(f"{seed}/{probe.index}/{probe.attempt}")
        return disturb(rng, letters[probe.index])

    return world


@pytest.mark.parametrize("share", [0.05, 0.3])
def test_unrelated_failures_never_move_a_bound(share: float) -> None:
    """The right release is always among the candidates; a failure that passes costs a retry, not
    the answer."""

    def disturb(rng: random.Random, letter: str) -> ProbeVerdict:
        return other("crash:OSError:network") if rng.random() < share else KINDS[letter]

    rng = random.Random(22)
    exact = reproduced = 0
    histories = cases(1500)
    for seed in range(histories):
        letters, bad = one_stretch(rng, rng.randint(2, 60), unknown="")
        options = Options(bad, window=True)
        answer, _ = drive(Search(len(letters), options), per_attempt(letters, seed, disturb))
        reproduced += bool(answer.boundaries)
        for boundary in answer.boundaries:
            inner, good = tightest(letters, bad, 1 if boundary.after else -1)
            if boundary.good is None:
                assert letters[boundary.bad] == "B"
                continue
            assert good is not None
            first = good if boundary.after else inner
            assert first in boundary.candidates
            exact += boundary.exact
    assert reproduced > (1 - share) * histories * 0.95
    assert exact > (1 - share) * histories


def test_contradicting_probes_of_a_steady_failure_are_flaky() -> None:
    """Release 5 shows the failure once and then not: neither bad nor good."""
    told = {Probe(5): BAD, Probe(5, 2): GOOD}
    letters = "GGGGG?BBBB"
    world = lambda p: told[p] if p.index == 5 else KINDS[letters[p.index]]  # noqa: E731
    search = Search(10, Options(9, 0, rate=Rate(3, 3)))
    answer, _ = drive(search, world)
    assert answer.began is not None and answer.began.candidates == (5, 6)
    assert [(i, v.kind, v.rate) for i, v in answer.began.undecided] == [(5, Kind.FLAKY, 0.5)]
    assert answer.confidence == Confidence.LOW
    assert search.verdicts[5].kind == Kind.FLAKY
    # The same of a failure that is known to show at times: it is there.
    search = Search(10, Options(9, 0, rate=Rate(2, 4)))
    answer, _ = drive(search, world)
    assert answer.began is not None and answer.began.candidates == (5,)


def test_a_flaky_bad_end_is_undecided() -> None:
    world = lambda p: (GOOD if p.attempt > 1 else BAD) if p.index == 9 else GOOD  # noqa: E731
    answer, _ = drive(Search(10, Options(9, 0, rate=Rate(3, 3))), world)
    assert answer.status == Status.UNDECIDED and answer.end_verdict.kind == Kind.FLAKY


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
def test_an_intermittent_failure_is_found_with_the_stated_confidence(share: float) -> None:
    """Calibrated at the bad end, repeated accordingly, each neighbour twice: the answers that are
    wrong are no more than the answers themselves say."""
    rng = random.Random(23)
    wrong = total = 0
    claimed = 0.0
    searches = 600
    for seed in range(searches):
        letters, bad = one_stretch(rng, rng.randint(2, 60), unknown="")
        shown = max(1, sum(rng.random() < share for _ in range(12)))
        rate = Rate(shown, 12)
        repeats = rate.repeats()

        def disturb(
            chance: random.Random, letter: str, rate: Rate = rate, repeats: int = repeats
        ) -> ProbeVerdict:
            hit = [letter == "B" and chance.random() < share for _ in range(repeats)]
            return combined([BAD if h else GOOD for h in hit], rate)

        search = Search(len(letters), Options(bad, window=True, rate=rate))
        search.told(Probe(bad), BAD)  # calibrated
        answer, _ = drive(search, per_attempt(letters, seed, disturb))
        if not answer.boundaries:  # it took itself for steady, and saw that it is not
            assert rate.steady and answer.end_verdict.kind == Kind.FLAKY
        for boundary in answer.boundaries:
            if boundary.good is None:
                continue
            inner, good = tightest(letters, bad, 1 if boundary.after else -1)
            total += 1
            wrong += boundary.exact and (boundary.bad, boundary.good) != (inner, good)
            assert boundary.missed is not None and boundary.missed <= 0.05
            claimed += boundary.missed
    assert total > searches / 2
    assert wrong <= claimed + 3 * math.sqrt(claimed) + 1, (wrong, claimed, total)


def test_skips_and_other_failures_do_not_move_a_bound() -> None:
    """Whatever a release that decides nothing says, the bounds are the same."""
    for letters in map("".join, itertools.product("GBS", repeat=5)):
        letters += "B"
        first, _ = drive(Search(6, Options(5)), history(letters))
        for stand_in in "OF":
            second, _ = drive(Search(6, Options(5)), history(letters.replace("S", stand_in)))
            assert first.began is not None and second.began is not None
            assert (first.began.bad, first.began.good) == (second.began.bad, second.began.good)


# ------------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("count", "options", "words"),
    [
        (3, Options(3), "bad is 3"),
        (3, Options(-1), "bad is -1"),
        (3, Options(1, 3), "good is 3"),
        (3, Options(1, 1), "same release"),
        (0, Options(0), "bad is 0"),
    ],
)
def test_contradicting_options_are_refused(count: int, options: Options, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Search(count, options)


def test_invalid_verdicts_are_refused() -> None:
    search = Search(3, Options(2))
    for probe in (Probe(3), Probe(0, 0), Probe(-1)):
        with pytest.raises(ValueError, match="of 3 releases"):
            search.told(probe, GOOD)
    search.told(Probe(0), GOOD)
    search.told(Probe(0), GOOD)
    with pytest.raises(ValueError, match="was told good, and now bad"):
        search.told(Probe(0), BAD)
    with pytest.raises(ValueError, match="at least 1"):
        search.next(0)


def test_patience_leaves_only_releases_between_undecided_ones() -> None:
    """However few are tried, the nearest neighbours of bad and good are; the rest is named."""
    rng = random.Random(24)
    shortened = 0
    tries = cases(1500)
    for _ in range(tries):
        letters, bad = one_stretch(rng, rng.randint(2, 60))
        patience = rng.randint(1, 5)
        options = Options(bad, window=True, patience=patience)
        answer, _ = drive(Search(len(letters), options), history(letters))
        for boundary in answer.boundaries:
            checked(letters, boundary)
            shortened += bool(boundary.untried)
            if boundary.untried:
                tried = [i for i, _ in boundary.undecided]
                assert len(tried) >= patience
                step = 1 if boundary.after else -1
                assert boundary.bad + step in tried
                assert boundary.good is None or boundary.good - step in tried
    assert shortened > tries / 15
