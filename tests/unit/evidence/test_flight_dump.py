"""One Flight Recorder dump as columns: names, sizes, states, batches, damage."""

from __future__ import annotations

import copy
import gc
import json
import pickle
import random
from pathlib import Path
from typing import Any

import pytest

from moediag.evidence import flight_dump, flight_kinds
from moediag.evidence.flight_calls import COMPLETED, SCHEDULED, STARTED, Dump, NoDump
from moediag.evidence.flight_dump import read
from moediag.evidence.flight_names import plain_dtype, plain_op, user_site

SAMPLES = Path(__file__).parents[2] / "samples/flight-recorder/gloo-collectives"


def entry(index: int, seq: int, name: str = "nccl:all_reduce", **more: Any) -> dict[str, Any]:
    return {
        "record_id": index, "pg_id": 0, "process_group": ("0", "default_pg"),
        "collective_seq_id": seq, "p2p_seq_id": 0, "op_id": index + 1, "profiling_name": name,
        "time_created_ns": 1_000 + index, "input_sizes": [[2, 4]], "input_dtypes": ["Float"],
        "output_sizes": [[8]], "output_dtypes": ["Float"], "state": "completed",
        "retired": True, "is_p2p": False, **more,
    }  # fmt: skip


def dump(*entries: dict[str, Any], **more: Any) -> dict[str, Any]:
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}}
    return {"version": "2.10", "pg_config": config, "entries": list(entries), **more}


def rows(made: Dump) -> list[tuple[str, int, int]]:
    """(operation, position, state) of each row."""
    return [
        (made.kinds[k].op, p, s)
        for k, p, s in zip(made.kind, made.position, made.state, strict=True)
    ]


def test_a_real_gloo_dump_is_read_as_pickle_and_json() -> None:
    from_pickle = read(pickle.loads((SAMPLES / "trace_rank_0").read_bytes()))
    from_json = read(json.loads((SAMPLES / "trace_rank_0.json").read_text()))
    for made in (from_pickle, from_json):
        assert made.backend == "gloo" and made.version == "2.10"
        assert made.groups["1"].desc == "tp" and made.groups["1"].ranks == ()
        assert [op for op, _, _ in rows(made)] == [
            "all_reduce", "all_gather", "all_reduce", "broadcast", "all_gather", "all_to_all",
            "all_to_all", "gather", "scatter", "reduce", "all_reduce", "barrier", "all_reduce",
            "all_reduce", "all_reduce", "all_reduce",
        ]  # fmt: skip
        assert made.kinds[made.kind[1]].numel_in == 8 and made.kinds[made.kind[1]].numel_out == 24
        assert made.kinds[0].dtype == "float32" and not made.wrapped
        assert all(state == COMPLETED for state in made.state[:-1])  # retired, never "completed"


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("_all_gather_base", "all_gather"), ("ALLGATHER_coalesced", "all_gather"),
        ("all_gather_into_tensor_coalesced", "all_gather"), ("all_gather_single", "all_gather"),
        ("_reduce_scatter_base", "reduce_scatter"), ("reduce_scatter_v", "reduce_scatter"),
        ("reduce_scatter_tensor_coalesced", "reduce_scatter"), ("_broadcast_oop", "broadcast"),
        ("allreduce_coalesced", "all_reduce"), ("sparse_all_reduce", "all_reduce"),
        ("all_reduce_barrier", "barrier"), ("all_to_all_v_single", "all_to_all"),
        ("ALLTOALL_BASE", "all_to_all"), ("_reduce_oop", "reduce"), ("new_window", "new_window"),
    ],
)  # fmt: skip
def test_operations_have_plain_names(name: str, plain: str) -> None:
    assert plain_op(name) == plain


def test_dtypes_have_torchs_python_names() -> None:
    assert [plain_dtype(d) for d in ("Float", "BFloat16", "Long", "Byte", "Float8_e4m3fn")] == [
        "float32", "bfloat16", "int64", "uint8", "float8_e4m3fn",
    ]  # fmt: skip


def test_states_of_calls_are_read() -> None:
    made = read(
        dump(
            entry(0, 1), entry(1, 2, state="started", retired=False),
            entry(2, 3, state="scheduled"),
            entry(3, 4, state="scheduled", time_discovered_completed_ns=5),
        )
    )  # fmt: skip
    # On NCCL a call that is retired and not completed has timed out.
    assert bytes(made.state) == bytes([COMPLETED, STARTED, SCHEDULED, COMPLETED])


@pytest.mark.parametrize(
    ("looks", "written"),
    [
        ([(True, 40, 40), (False, 900, None)], 900),  # a call that runs, as its start is recorded
        ([(True, 40, 40), (False, None, 900), (False, 900, None)], 900),
        ([(True, 40, 40), (False, None, None)], 0),
        ([(False, 900, None), (False, 900 + 2 * 10**9, None)], 0),  # another recorder's look
        ([(False, "900", None), (False, True, None), (False, -1, None)], 0),
    ],
)
def test_a_call_that_is_not_retired_tells_when_the_dump_was_written(
    looks: list[tuple[bool, Any, Any]], written: int
) -> None:
    entries = [
        entry(i, i + 1, retired=retired, time_discovered_started_ns=started,
              time_discovered_completed_ns=completed)
        for i, (retired, started, completed) in enumerate(looks)
    ]  # fmt: skip
    assert read(dump(*entries)).written == written


def test_a_wrapped_ring_buffer_keeps_positions() -> None:
    made = read(dump(entry(5000, 4001), entry(5001, 4002)))
    assert made.wrapped and list(made.position) == [4000, 4001] and made.index[0] == 5000


def test_a_batch_of_collectives_is_one_call() -> None:
    """Only the entry that closes the batch completes."""
    parts = [entry(i, 1, "nccl:_all_gather_base", state="scheduled", retired=False) for i in (0, 1)]
    closing = entry(2, 1, "nccl:ALLGATHER_coalesced", input_sizes=[], output_sizes=[])
    made = read(dump(*parts, closing, entry(3, 2)))
    assert rows(made) == [("all_gather", 0, COMPLETED), ("all_reduce", 1, COMPLETED)]
    assert made.kinds[made.kind[0]].numel_in == 16


def test_a_batch_is_as_far_as_its_last_collective() -> None:
    """The entry that closes it was overwritten or not yet written."""
    states = ("completed", "started")
    parts = [entry(i, 1, "nccl:_all_gather_base", state=state) for i, state in enumerate(states)]
    assert rows(read(dump(*parts))) == [("all_gather", 0, STARTED)]


def p2p(index: int, batch: int, name: str, seq: int = 0, **more: Any) -> dict[str, Any]:
    return entry(index, seq, name, p2p_seq_id=batch, is_p2p=True, **more)


@pytest.mark.parametrize("tells", [True, False])
def test_a_batch_of_sends_and_receives_completes_as_one(tells: bool) -> None:
    waiting = {"state": "scheduled", "retired": False}
    entries = [
        p2p(0, 1, "nccl:recv 0<-1", **waiting), p2p(1, 1, "nccl:send 0->1", **waiting),
        p2p(2, 1, "nccl:coalesced", input_sizes=[], output_sizes=[]),
        entry(3, 1), p2p(4, 2, "nccl:send 0->1", **waiting),
    ]  # fmt: skip
    if not tells:  # formats before 2.5 have no is_p2p
        for one in entries:
            del one["is_p2p"]
    made = read(dump(*entries))
    assert rows(made) == [
        ("recv", 0, COMPLETED), ("send", 0, COMPLETED), ("all_reduce", 0, COMPLETED),
        ("send", 1, SCHEDULED),
    ]  # fmt: skip
    assert made.places == {"0": 0} and made.kinds[made.kind[0]].peer == 1 and not made.batched


def test_older_releases_count_a_batch_as_a_collective() -> None:
    made = read(dump(entry(0, 1), p2p(1, 1, "nccl:send 0->1", seq=2), entry(2, 3), entry(3, 4)))
    assert [p for op, p, _ in rows(made) if op == "all_reduce"] == [0, 1, 2]
    assert made.batched == {"0"}


def test_the_call_site_is_user_code_not_torch() -> None:
    frames = [
        {"name": "all_reduce", "filename": "/v/site-packages/torch/d.py", "line": 9},
        {"name": "step", "filename": "/job/train.py", "line": 40},
    ]
    assert user_site(frames) == "train.py:40 step"
    assert user_site(frames[:1]) == "d.py:9 all_reduce"
    assert read(dump(entry(0, 1, frames=frames))).kinds[0].site == "train.py:40 step"


def test_a_dump_of_only_open_calls_is_recognised() -> None:
    assert read(dump(entry(4, 5, state="started"), entry(9, 9, state="scheduled"))).open_only
    assert not read(dump(entry(4, 5), entry(5, 6))).open_only


@pytest.mark.parametrize(
    ("ranks", "known"),
    [([0, 3], (0, 3)), ("[0, 3]", (0, 3)), ([0, -1], ()), ([0, 1 << 20], ()), ([0, "3"], ())],
)
def test_the_members_of_a_group_are_all_known_or_none(ranks: Any, known: tuple[int, ...]) -> None:
    raw = {"version": "2.10", "pg_config": {"7": {"name": "7", "desc": "x", "ranks": ranks}}}
    assert read(raw).groups["7"].ranks == known


def test_a_dump_without_groups_is_recognised_by_its_calls() -> None:
    """Older releases write no groups; other programs write lists of entries, too."""
    assert flight_dump.is_dump({"entries": [{"profiling_name": "nccl:all_reduce"}]})
    assert not flight_dump.is_dump({"entries": [{"name": "all_reduce"}]})
    assert not flight_dump.is_dump({"entries": []})


def test_a_dump_without_entries_is_recognised() -> None:
    raw = dump(pg_status={"0": {"last_enqueued_collective": 7}})
    assert read(raw).recording
    del raw["entries"]
    assert not read(raw).recording


@pytest.mark.parametrize(
    "raw",
    [None, [], {}, {"entries": [{}]}, {"entries": {}, "pg_config": {}}, {"message": "x"},
     {"version": "3.0", "pg_config": {}}],
)  # fmt: skip
def test_other_files_are_refused(raw: Any) -> None:
    with pytest.raises(NoDump):
        read(raw)


BOMB: Any = ()
for _ in range(64):
    BOMB = (BOMB, BOMB)  # small in memory, endless to hash, print or compare


@pytest.mark.parametrize("field", sorted({*entry(0, 1)} - {"retired", "is_p2p"}))
@pytest.mark.parametrize("value", [None, "x", -(2**70), 1.5, [[["x"]]], [[2**62, 2**62]], {}, BOMB])
def test_a_malformed_entry_does_not_affect_the_others(field: str, value: Any) -> None:
    bad = {**entry(1, 2), field: value}
    made = read(dump(entry(0, 1), bad, entry(2, 3)))
    kept = [op for op, _, _ in rows(made)]
    assert len(kept) + made.unreadable >= 2 and kept[0] == "all_reduce"
    assert made.position[0] == 0 and made.position[-1] == 2


@pytest.mark.parametrize("bad", [None, 7, "text", [], BOMB])
def test_invalid_entries_and_groups_are_counted(bad: Any) -> None:
    raw = dump(entry(0, 1), bad, entry(1, 2))
    raw["pg_config"] |= {"5": bad, "6": {"name": bad, "desc": bad, "ranks": bad}}
    assert read(raw).unreadable == 1


def test_limits_are_enforced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight_dump, "MAX_ENTRIES", 2)
    with pytest.raises(NoDump, match="at most 2"):
        read(dump(entry(0, 1), entry(1, 2), entry(2, 3)))
    monkeypatch.setattr(flight_kinds, "_MAX_SHAPES", 10)
    with pytest.raises(NoDump, match="more tensors"):
        read(dump(entry(0, 1, input_sizes=[[1]] * 20)))
    monkeypatch.setattr(flight_dump, "_MAX_MEMBERS", 5)
    raw = copy.deepcopy(dump(entry(0, 1)))
    raw["pg_config"]["0"]["ranks"] = list(range(6))
    with pytest.raises(NoDump, match="more members"):
        read(raw)


FRAMES = [{"name": "step", "filename": "/job/train.py", "line": 3}]
VALUES = {
    "profiling_name": ["nccl:all_gather", "nccl:send 0->1", 5, BOMB],
    "process_group": [("1", "tp"), ["0", "default_pg"], ("0", "other"), ("0",), BOMB, ("2", BOMB)],
    "input_sizes": [[[8]], [[2], [4]], [], [[2, BOMB]], BOMB, {(8,): BOMB}],
    "input_dtypes": [["Half"], [], ["Float", "Half"], [BOMB]],
    "output_dtypes": [["Half"], []],
    "frames": [FRAMES, copy.deepcopy(FRAMES), [{"line": BOMB}], [5], None],
    "collective_seq_id": [None, BOMB],
    "record_id": [0, 50, "1", BOMB],
    "time_created_ns": [None, 1 << 70, 1.5, BOMB],
}


@pytest.mark.parametrize("seed", range(60))
def test_what_followed_before_does_not_change_what_an_entry_means(seed: int) -> None:
    """Entries are recognized by those before them. Each alone gives the same kind."""
    chance = random.Random(seed)
    program = [{"input_sizes": [[8]], "frames": FRAMES}, {"input_sizes": [[16]], "frames": []}]
    entries = [entry(n, n + 1, **copy.deepcopy(program[n % 2])) for n in range(30)]
    for changed in chance.sample(entries, 8):
        name = chance.choice([*VALUES])
        changed[name] = copy.copy(chance.choice(VALUES[name]))
    made = read(dump(*entries))
    alone = [read(dump(one)) for one in entries]
    kinds = [one.kinds[one.kind[0]] for one in alone if one.kind]
    assert made.unreadable == sum(one.unreadable for one in alone)
    assert [made.kinds[number] for number in made.kind] == kinds
    assert [*made.created] == [one.created[0] for one in alone if one.kind]


def test_a_dump_leaves_nothing_for_the_garbage_collector() -> None:
    raw = dump(*(entry(n, n + 1, frames=FRAMES, input_sizes=[[n % 3]]) for n in range(20)))
    gc.collect()
    gc.disable()  # as in the process that reads pickles, which would keep each dump
    try:
        read(raw)
        assert gc.collect() == 0
    finally:
        gc.enable()
