"""`moediag run` on several nodes without a rank: how nodes meet, and when they call a hang."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from moediag import protocol
from moediag.errors import NodeLost, UsageError
from moediag.evidence.launch_record import LaunchRecord
from moediag.evidence.model import ExitStatus, Stall
from moediag.lab.launch.rendezvous import Meeting
from moediag.lab.launch.several_nodes import NodesSupervisor
from moediag.launch.base import Running
from moediag.launch.rank_sample import RankSample
from moediag.launch.settings import LaunchOptions


def meetings(shared: Path, *plans: str, silence: float = 2.0) -> list[Meeting]:
    return [Meeting(shared, n, len(plans), p, silence, first=5.0) for n, p in enumerate(plans)]


@contextmanager
def closing(leave: Callable[[], None]) -> Iterator[None]:
    try:
        yield
    finally:
        leave()


def both(*calls: Callable[[], object]) -> list[object]:
    """Runs the calls in parallel; returns results or exceptions."""
    with ThreadPoolExecutor(len(calls)) as pool:
        found = [pool.submit(call) for call in calls]
        return [one.exception() or one.result() for one in found]


def test_nodes_meet_and_exchange_why_one_cannot_continue(tmp_path: Path) -> None:
    zero, one = meetings(tmp_path / "shared", "plan", "plan")
    assert both(zero.__enter__, one.__enter__) == [zero, one]
    with closing(zero.leave), closing(one.leave):
        assert zero.token == one.token
        assert both(zero.meet, one.meet) == ["", ""]
        told, own = both(zero.meet, lambda: one.meet("no room"))
        assert str(told).startswith("node 1 (")
        assert str(told).endswith("): no room")
        assert own == ""
        assert both(zero.meet, one.meet) == ["", ""]


def test_nodes_with_different_plans_are_refused(tmp_path: Path) -> None:
    zero, one = meetings(tmp_path, "plan", "another")
    found = both(zero.__enter__, one.__enter__)
    assert all(isinstance(error, UsageError) for error in found), found
    assert "node 1 (" in str(found[0])
    assert "node 0 (" in str(found[1])


def test_a_folder_is_used_once(tmp_path: Path) -> None:
    (tmp_path / "node-0.json").touch()
    with pytest.raises(UsageError, match="node 0 of an earlier"):
        meetings(tmp_path, "p", "p")[0].__enter__()


def test_an_unusable_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="cannot be used"):
        meetings(tmp_path / "file" / "d", "p", "p")[0].__enter__()


def test_a_missing_leaving_or_silent_node_ends_the_wait(tmp_path: Path) -> None:
    alone = Meeting(tmp_path / "a", 0, 2, "p", 2.0, first=0.2)
    with pytest.raises(NodeLost, match="node 1 did not start"):
        alone.__enter__()
    zero, one = meetings(tmp_path / "b", "p", "p")
    both(zero.__enter__, one.__enter__)
    one.leave()
    with closing(zero.leave), pytest.raises(NodeLost, match=r"node 1 \(.*\) has left the run"):
        zero.meet()
    zero, one = meetings(tmp_path / "c", "p", "p", silence=1.0)
    both(zero.__enter__, one.__enter__)
    one.leave()
    place = tmp_path / "c" / "node-1.json"  # like a node that lost its power
    place.write_text(json.dumps({**json.loads(place.read_text()), "over": False}))
    with closing(zero.leave), pytest.raises(NodeLost, match="has sent nothing for"):
        zero.meet()


# ------------------------------------------------------------------------ supervisors


class NotEnding(Running):
    root = 0

    def poll(self) -> int | None:
        return None


@pytest.fixture
def supervisors(tmp_path: Path) -> Iterator[list[NodesSupervisor]]:
    """Of one rank on each of two nodes."""
    trial = protocol.Trial("t", "s", "unfixed", world_size=2)
    with ExitStack() as stack:
        found = []
        for node in range(2):
            folder = tmp_path / str(node)
            folder.mkdir()
            options = LaunchOptions(
                quiescence=0.5, silence=2.0, nnodes=2, node_rank=node, shared=tmp_path / "shared",
                job="j",
            )  # fmt: skip
            one = NodesSupervisor(NotEnding(), trial, folder, 1, options, None)
            stack.callback(one.nodes.close, publish=False)
            found.append(one)
        yield found


def stalls(
    nodes: list[NodesSupervisor], sample: Callable[[int], RankSample], seconds: float
) -> list[Stall | None]:
    """Returns the first stall of each, within ``seconds`` of samples (by rank)."""
    found: list[Stall | None] = [None] * len(nodes)
    end = time.monotonic() + seconds
    while time.monotonic() < end and not all(found):
        for rank, node in enumerate(nodes):
            own = [sample(rank)]
            node.nodes.look(own, node, ())
            found[rank] = found[rank] or node._stalled(time.monotonic(), own)
        time.sleep(0.03)
    return found


WAITS = RankSample(0, state="in-collective", progress=7)


def test_waiting_for_a_computing_remote_rank_is_not_a_hang(
    supervisors: list[NodesSupervisor],
) -> None:
    """Returns the stall that each node calls from its own rank only."""

    def sample(rank: int) -> RankSample:
        return WAITS if rank == 0 else RankSample(1, state="running", progress=6, cpu=time.time())

    assert stalls(supervisors, sample, 2.5) == [None, None]
    alone = supervisors[0]
    alone.nodes.others = []
    own = [WAITS]
    begun, called = time.monotonic(), None
    while called is None and time.monotonic() - begun < 3.0:  # its own rank alone would be a hang
        called = alone.watchdog.observe(time.monotonic(), own)
        time.sleep(0.03)
    assert called is not None


def test_a_hang_of_all_ranks_is_reported_on_both_nodes(supervisors: list[NodesSupervisor]) -> None:
    found = stalls(supervisors, lambda rank: replace(WAITS, rank=rank), 20.0)
    assert [stall and (stall.waiting, stall.elsewhere) for stall in found] == [((0, 1), ())] * 2


def test_no_hang_is_called_before_every_node_has_sent(
    supervisors: list[NodesSupervisor],
) -> None:
    zero, one = supervisors
    one.nodes.close(publish=False)
    assert stalls([zero], lambda rank: WAITS, 1.5) == [None]
    assert zero.nodes.unheard()


def test_a_trial_interrupted_by_another_node_is_inconclusive(
    supervisors: list[NodesSupervisor], tmp_path: Path
) -> None:
    zero = supervisors[0]
    zero.seen.exits[0] = ExitStatus(code=1)
    place = tmp_path / "0" / "nodes" / "k"
    place.mkdir(parents=True)
    LaunchRecord(0.0, 1.0, interrupted=True).write(place)
    zero._judge_whole([place])
    assert zero.seen.deaths(zero.folder) == ()
    assert "interrupted" in zero.seen.launch_error


def test_losing_peers_stopped_by_another_node_is_not_a_death(
    supervisors: list[NodesSupervisor],
) -> None:
    """After a stall each node ends its ranks once it has the evidence."""
    zero = supervisors[0]
    zero.seen.exits[0] = ExitStatus(code=1)
    zero._ends_after_stall_are_ours()
    assert [death.rank for death in zero.seen.deaths(zero.folder)] == [0]
    zero._ended_before = frozenset()
    zero._ends_after_stall_are_ours()
    assert zero.seen.deaths(zero.folder) == ()


@pytest.mark.parametrize(
    "change",
    [{"token": "another run"}, {"node": 0}, {"stage": "9"}, {"problems": ["x"]}, {"count": "99"}],
)
def test_a_forged_file_of_a_node_is_refused_and_named(
    change: dict[str, object], tmp_path: Path
) -> None:
    zero, one = meetings(tmp_path, "p", "p", silence=0.5)
    both(zero.__enter__, one.__enter__)
    one.leave()
    place = tmp_path / "node-1.json"
    true = json.loads(place.read_text())
    forged = {**true, "count": true["count"] + 9, "stage": 9, "over": False, **change}
    place.write_text(json.dumps({**true, "over": False}))
    zero._heard[1] = replace(zero._heard[1][0], over=False), zero._heard[1][1]
    place.write_text(json.dumps(forged))
    with closing(zero.leave), pytest.raises(NodeLost, match="its file is refused"):
        zero.meet()
