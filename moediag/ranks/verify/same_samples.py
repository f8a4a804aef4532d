"""Whether two runs saw the same samples. Pure."""

from __future__ import annotations

from collections import Counter
from typing import Dict, List, Mapping, Sequence

from moediag.protocol import MeasuredStep


def steps_alike(ranks: Mapping[int, Sequence[MeasuredStep]], alone: Sequence[MeasuredStep]) -> int:
    """Returns the number of first steps in which the ranks together saw the samples of ``alone``.

    Ranks that share a model (tensor parallelism) see the same rows, so each row may be seen by
    several ranks, but all rows by equally many.
    """
    count = 0
    for step, single in enumerate(alone):
        if any(step >= len(steps) for steps in ranks.values()):
            return count
        of_ranks = [steps[step] for steps in ranks.values()]
        split = split_alike([one.total for one in of_ranks], single.total)
        if not split and not _alike([one.samples for one in of_ranks], single.samples):
            return count
        count += 1
    return count


def _alike(ranks: Sequence[List[str]], single: Sequence[str]) -> bool:
    seen, expected = Counter(row for rows in ranks for row in rows), Counter(single)
    if set(seen) != set(expected) or not expected:
        return False
    return len({seen[row] / expected[row] for row in expected}) == 1


def split_alike(ranks: Sequence[str], alone: str) -> bool:
    """Whether the ranks together saw all elements of the samples of ``alone``, each equally often:
    parts of sequences, or the same documents in other rows. Totals as hexadecimal text."""
    if not alone or not all(ranks):
        return False
    found = sum(int(one, 16) for one in ranks) % (1 << 64)
    return any(
        (found - times * int(alone, 16)) % (1 << 64) == 0 for times in range(1, len(ranks) + 1)
    )


def repeated(ranks: Mapping[int, List[str]], single: Sequence[str], over: Sequence[int]) -> str:
    """Says that the ranks ``over`` which gradients are averaged saw the same part of one process's
    samples; "" if they did not."""
    own = [Counter(ranks.get(rank, [])) for rank in over]
    if len(own) < 2 or any(one != own[0] for one in own) or not own[0]:
        return ""
    alone = set(single)
    if not set(own[0]) < alone:
        return ""
    return (
        f"ranks {', '.join(map(str, over))} average their gradients and saw the same "
        f"{len(own[0])} samples in step 1, while one process saw {len(alone)} different ones: each "
        "rank repeats the work of the others"
    )


def sentence(ranks: Mapping[int, List[str]], single: Sequence[str], step: int) -> str:
    """Says how the samples of one step (from 1) differ."""
    seen = {row for rows in ranks.values() for row in rows}
    common = len(seen & set(single))
    text = f"the two runs saw different samples in step {step}: {common} of the reference's "
    text += f"{len(single)} samples are among the {len(seen)} different ones that the "
    text += "distributed run saw"
    same = _equal_ranks(ranks)
    if len(same) > 1 and common < len(single):
        listed = ", ".join(map(str, same))
        text += f"; ranks {listed} saw the same samples"
    return text


def _equal_ranks(ranks: Mapping[int, List[str]]) -> List[int]:
    """Returns the largest set of ranks that saw the same samples."""
    groups: Dict[str, List[int]] = {}
    for rank, rows in ranks.items():
        groups.setdefault(" ".join(sorted(rows)), []).append(rank)
    return max(groups.values(), key=len, default=[])
