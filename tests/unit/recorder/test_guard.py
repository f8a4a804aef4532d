"""The guard's side channel between threads of one process: its errors, and when it disables
itself."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from moediag.recorder import guard, guard_messages
from moediag.recorder.core import Recorder
from moediag.recorder.heartbeat import HeartbeatWriter
from moediag.recorder.log import EventLog
from moediag.recorder.side_channel import Absent, Board, Lost, Side, Told

Member = Callable[[Side, Board], Any]


def together(members: Sequence[Member], timeout: float = 60.0) -> list[Any]:
    """Runs each member on its own thread; returns what each returned or raised."""
    store = dist.HashStore()
    results: list[Any] = [None] * len(members)

    def run(rank: int) -> None:
        board = Board(dist.PrefixStore("board", store))
        side = Side(dist.PrefixStore("group", store), board, rank, len(members), timeout)
        try:
            results[rank] = members[rank](side, board)
        except Exception as error:
            results[rank] = error
        finally:
            side.close()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(members))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


class TestSideChannel:
    def test_exchange_returns_the_values_of_all_members(self) -> None:
        def member(rank: int) -> Member:
            return lambda side, _: (
                side.exchange([rank, -(2**63), 2**63 - 1]),
                side.exchange_texts("é" * rank),
                side.exchange([0, 0, rank]),
            )

        rows = [[rank, -(2**63), 2**63 - 1] for rank in range(3)]
        expected = (rows, ["", "é", "éé"], [[0, 0, 0], [0, 0, 1], [0, 0, 2]])
        assert together([member(rank) for rank in range(3)]) == [expected] * 3

    @pytest.mark.parametrize("before", [0, 1])
    def test_a_member_that_does_not_come_is_absent_for_all_others(self, before: int) -> None:
        """At the first exchange, where the group is made, and at a later one."""
        others_done = threading.Barrier(3)

        def waits(side: Side, _: Board) -> Any:
            for _ in range(before):
                side.exchange([1, 2, 3])
            try:
                return side.exchange([1, 2, 3])
            except Absent as absent:
                return absent.members
            finally:
                others_done.wait(60)

        def leaves(side: Side, _: Board) -> None:
            for _ in range(before):
                side.exchange([1, 2, 3])
            others_done.wait(60)

        assert together([waits, leaves, waits], timeout=0.4) == [(1,), None, (1,)]

    def test_a_slow_rank_is_waited_for(self) -> None:
        """It comes only after another member has reported that it waits."""
        waiting = threading.Event()

        class Seen(Board):
            def read(self) -> tuple[str, str] | None:
                waiting.set()
                return super().read()

        def early(side: Side, board: Board) -> Any:
            side._board = Seen(board._store)
            return side.exchange([1, 0, 0])

        def slow(side: Side, _: Board) -> Any:
            assert waiting.wait(60)
            return side.exchange([2, 0, 0])

        assert together([early, slow]) == [[[1, 0, 0], [2, 0, 0]]] * 2

    def test_waiting_members_get_a_notice_and_the_first_one_is_kept(self) -> None:
        def waits(side: Side, _: Board) -> Any:
            try:
                return side.exchange([1, 2, 3])
            except Told as told:
                return told.kind, told.text

        def tells(_: Side, board: Board) -> Any:
            return board.read(), board.put("off", "é"), board.put("mismatch", "later")

        notice = ("off", "é")
        assert together([waits, tells]) == [notice, (None, notice, notice)]

    def test_a_member_that_leaves_without_a_notice_is_lost(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("moediag.recorder.side_channel._PATIENCE", 0.1)

        def stays(side: Side, _: Board) -> Any:
            side.exchange([1, 2, 3])
            return side.exchange([1, 2, 3])

        lost, gone = together([stays, lambda side, _: side.exchange([1, 2, 3])])
        assert isinstance(lost, Lost)
        assert gone == [[1, 2, 3]] * 2


# ------------------------------------------------------------------------ messages

GROUP = SimpleNamespace(ranks=[0, 1, 2], axis="dp_shard")
NAMES = [f"model.layers.1.mlp.experts.{n}.up_proj.weight" for n in range(3)]


def side(*left_out: int, module: str = "model.layers.1", dtype: str = "float32") -> dict[str, Any]:
    carries = [[name, 512, dtype] for n, name in enumerate(NAMES) if n not in left_out]
    return {"module": module, "whole": NAMES, "carries": carries, "op": "reduce_scatter"}


def label() -> guard_messages.Label:
    return guard_messages.Label("reduce_scatter", GROUP, 2)


def test_the_error_names_ranks_and_missing_parameters() -> None:
    text = guard_messages.mismatch(label(), [side(), side(1), side()])
    assert text.splitlines()[:3] == [
        "ranks reached the reduce_scatter of model.layers.1 with different parameters, on ranks "
        "0..2 of dp_shard, step 2. It was stopped before it began.",
        "  ranks 0, 2: 3 of 3 parameters",
        f"  rank 1: 2 of 3 parameters; no gradient for {NAMES[1]}",
    ]
    assert "set_reduce_scatter_unused_params" in text


def test_a_parameter_missing_on_every_rank_is_not_a_difference() -> None:
    text = guard_messages.mismatch(label(), [side(0), side(0, 2), side(0)])
    assert NAMES[2] in text
    assert NAMES[0] not in text


def test_different_groups_are_reported() -> None:
    text = guard_messages.mismatch(label(), [side(), side(module="model.layers.0"), side()])
    assert "different FSDP2 groups" in text
    assert "rank 1: reduce_scatter of model.layers.0" in text
    assert "unused_params" not in text, "that switch does not bring a group back"


def test_a_different_dtype_is_reported() -> None:
    text = guard_messages.mismatch(label(), [side(), side(), side(dtype="bfloat16")])
    assert f"rank 2: 3 of 3 parameters; {NAMES[0]} has 512 elements of bfloat16" in text


def test_absent_and_waiting_ranks_are_listed() -> None:
    text = guard_messages.absent(label(), side(), (1,), 300.0, "model.layers.2")
    assert "rank 1 did not reach the reduce_scatter of model.layers.1 within 300 s" in text
    assert "ranks 0, 2 waited there" in text
    assert "all reached was that of model.layers.2" in text
    assert "MOEDIAG_GUARD_TIMEOUT" in text


@pytest.mark.parametrize(
    ("numbers", "text"), [([3], "rank 3"), ([1, 0], "ranks 0, 1"), ([0, 2, 3, 4], "ranks 0, 2..4")]
)
def test_ranks_are_listed_as_ranges(numbers: list[int], text: str) -> None:
    assert guard_messages.ranks(numbers) == text


# ------------------------------------------------------------------------ the guard in one process


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    log = EventLog(str(tmp_path / "log.jsonl"), str(tmp_path / "older.jsonl"))
    return Recorder(log, HeartbeatWriter(str(tmp_path / "heartbeat")), 0)


def lines(tmp_path: Path) -> str:
    return (tmp_path / "log.jsonl").read_text()


def test_fingerprint_depends_on_names_sizes_and_dtypes() -> None:
    whole = ["a.weight", "a.bias"]

    def of(module: str = "a", carried: Any = (("a.weight", 4, "float32"),)) -> list[int]:
        return guard.Brought(module, whole, carried).numbers

    assert of() == of()
    others = [
        of("b"),
        of(carried=(("a.bias", 4, "float32"),)),
        of(carried=(("a.weight", 8, "float32"),)),
        of(carried=(("a.weight", 4, "bfloat16"),)),
        of(carried=()),
    ]
    assert of() not in others
    assert all(-(2**63) <= number < 2**63 for row in [of(), *others] for number in row)


def test_a_failing_guard_disables_itself_and_the_job_continues(
    recorder: Recorder, tmp_path: Path
) -> None:
    """Here there is no process group to ask for a store."""
    watch = guard.Guard(recorder, 1.0, 1)
    reduced: list[str] = []
    method = watch.checked("reduce_scatter")(lambda group: reduced.append(group.group_name))
    reduce = watch.reducing(lambda params, gradients: method(SimpleNamespace(group_name="g")))
    reduce([SimpleNamespace()], [])
    assert reduced == ["g"]
    assert "the guard failed" in lines(tmp_path)
    assert watch.checks == 1
    reduce([SimpleNamespace()], [])
    assert (reduced, watch.checks) == (["g", "g"], 1), "it is off"


def test_only_reductions_of_fsdp2_are_checked(recorder: Recorder) -> None:
    watch = guard.Guard(recorder, 1.0, 1)
    method = watch.checked("all_reduce")(lambda group: "done")
    assert method(SimpleNamespace(group_name="g")) == "done"
    assert watch.checks == 0


def test_the_module_of_a_group_is_the_common_prefix() -> None:
    assert guard_messages.common(["a.b.weight", "a.b.c.weight"]) == "a.b"
    assert guard_messages.common(["a.bc.weight", "a.bd.weight"]) == "a"
    assert guard_messages.common(["a.weight", "b.weight"]) == guard_messages.common([]) == ""


@pytest.mark.parametrize(("text", "seconds"), [("", 300), ("2.5", 2.5), ("-1", 300), ("x", 300)])
def test_the_timeout_comes_from_the_environment(
    text: str, seconds: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MOEDIAG_GUARD_TIMEOUT", text)
    assert guard._timeout() == seconds
    assert ("MOEDIAG_GUARD_TIMEOUT" in capsys.readouterr().err) == (text in ("-1", "x"))


def test_the_cost_is_reported_once(
    recorder: Recorder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    watch = guard.Guard(recorder, 1.0, 1)
    watch.report()
    assert capsys.readouterr().err == ""
    watch.checks, watch.seconds, watch.longest = 4, 0.02, 0.011
    watch.report()
    watch.report()
    text = "guard on rank 0: 4 checks took 0.020 s (5.00 ms each, the longest 11.0 ms)"
    assert capsys.readouterr().err.count(text) == 1
    assert lines(tmp_path).count(text) == 1


def test_uninstall_restores_every_attribute(recorder: Recorder) -> None:
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as module

    owners = (module, module.FSDPParamGroup, dist.ProcessGroup)
    before = [dict(vars(owner)) for owner in owners]
    assert guard.install(recorder, 1.0) is not None
    assert [dict(vars(owner)) for owner in owners] != before
    recorder.uninstall()
    assert [dict(vars(owner)) for owner in owners] == before
