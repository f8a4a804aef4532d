"""The rows of dumps by group."""

from __future__ import annotations

from moediag.evidence import flight_dump, group_rows
from moediag.evidence.flight_calls import Dump
from tests.unit.evidence.test_flight_dump import dump, entry

KEYS = {rank: {"0": ("world", (0, 1)), "1": (f"pair {rank}", (0, 1))} for rank in range(3)}


def made(*calls: tuple[str, str, int]) -> Dump:
    """(group, operation, elements) of each call."""
    seqs: dict[str, int] = {}
    entries = []
    for number, (group, name, elements) in enumerate(calls):
        seqs[group] = seqs.get(group, 0) + (0 if "send" in name else 1)
        one = entry(number, seqs[group], f"nccl:{name}", input_sizes=[[elements]])
        entries.append({**one, "process_group": (group, ""), "is_p2p": "send" in name,
                        "p2p_seq_id": 1})  # fmt: skip
    return flight_dump.read(dump(*entries))


ONE = (("0", "all_reduce", 8), ("1", "all_gather", 4), ("0", "send 0->1", 2), ("0", "barrier", 1))


def test_rows_are_sorted_by_group_and_sends_are_apart() -> None:
    found = group_rows.tracks({0: made(*ONE)}, KEYS)
    assert found.apart == {0: [2]}
    world, pair = (found.of_group[KEYS[0][name]][0] for name in ("0", "1"))
    assert (*world.rows,) == (0, 3) and (*pair.rows,) == (1,)
    assert (world.first, world.end, world.steady) == (0, 2, True)


def test_equal_dumps_share_their_rows_and_others_do_not() -> None:
    larger = (("0", "all_reduce", 16), *ONE[1:])
    found = group_rows.tracks({0: made(*ONE), 1: made(*ONE), 2: made(*larger)}, KEYS)
    zero, one, two = found.of_group["world", (0, 1)].values()
    assert zero.rows is one.rows and zero.signs is one.signs
    assert zero.rows == two.rows and zero.signs != two.signs
    assert zero.signs[1] == two.signs[1]  # the barrier


def test_collectives_on_groups_without_a_key_and_empty_dumps_are_left_out() -> None:
    found = group_rows.tracks({0: made(*ONE), 1: made()}, {0: {"1": ("pair", (0, 1))}, 1: {}})
    assert [*found.of_group] == [("pair", (0, 1))]
    assert found.apart == {0: [2], 1: []}
