"""Crashes of ranks whose models DistributedDataParallel found to differ."""

from __future__ import annotations

import pytest

from moediag.diagnosis import diagnose
from moediag.evidence.model import RankError
from tests.unit.evidence_builder import died, fsdp2_job

TEXT = (
    "DDP expects same model across all ranks, but Rank {} has {} params, while rank {} has "
    "inconsistent {} params."
)


@pytest.mark.parametrize(
    ("counts", "told", "culprits"),
    [
        ((70, 70, 72), 3, (2,)),
        ((72, 70, 70, 70), 4, (0,)),
        ((70, 72), 2, ()),
        ((70, 70, 72, 72), 4, ()),
        ((70, 71, 72), 3, ()),
        # The messages of the ranks that are right were lost.
        ((70, 70, 72, 72, 72), 2, ()),
    ],
)
def test_the_ranks_unlike_most_are_named(
    counts: tuple[int, ...], told: int, culprits: tuple[int, ...]
) -> None:
    evidence = fsdp2_job(*[set() for _ in counts]).run()
    for rank, count in enumerate(counts[:told]):
        other = next(r for r, of in enumerate(counts) if of != count)
        message = TEXT.format(rank, count, other, counts[other])
        evidence = died(evidence, rank, RankError("RuntimeError", message, "train.py:7 main", 5.0))
    found = diagnose(evidence)
    assert (found.verdict, found.culprits) == ("crash", culprits), found.cause
    assert ("not known which" in found.cause) is (not culprits)
    assert found.next_step.startswith("Make the same model on all ranks")


SIZES = (
    "[{}]: params[3] in this process with sizes [{}] appears not to match sizes of the same param "
    "in process 0."
)


@pytest.mark.parametrize(
    ("sizes", "culprits"),
    [
        ((8, 8, 9), (2,)),
        ((9, 8, 8), (0,)),  # ranks 1 and 2 raise it, though they agree
        ((9, 8, 8, 8), (0,)),
        ((8, 9), ()),
        ((8, 8, 9, 9), ()),
        ((7, 8, 9), ()),
    ],
)
def test_ranks_whose_parameters_are_unlike_those_of_the_first(
    sizes: tuple[int, ...], culprits: tuple[int, ...]
) -> None:
    evidence = fsdp2_job(*[set() for _ in sizes]).run()
    for rank, size in enumerate(sizes):
        if size != sizes[0]:
            error = RankError("RuntimeError", SIZES.format(rank, size), "train.py:7 main", 5.0)
            evidence = died(evidence, rank, error)
    found = diagnose(evidence)
    assert (found.verdict, found.culprits) == ("crash", culprits), found.cause
    assert ("not known which" in found.cause) is (not culprits)


def test_another_error_of_all_ranks_names_them_all() -> None:
    evidence = fsdp2_job(set(), set(), set()).run()
    for rank in range(3):
        error = RankError("RuntimeError", "expects a mask", "train.py:7 main", 5.0)
        evidence = died(evidence, rank, error)
    assert diagnose(evidence).culprits == (0, 1, 2)
