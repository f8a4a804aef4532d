"""Watchers of several nodes, without real nodes: messages and decisions."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moediag import protocol
from moediag.evidence.model import Stall
from moediag.launch.follow.patience import Patience
from moediag.launch.follow.watchdog import Watchdog
from moediag.launch.nodes import other_nodes, shared_folder, usable
from moediag.launch.nodes.declared import Declared, declared
from moediag.launch.nodes.exchange import Exchange
from moediag.launch.nodes.other_nodes import OtherNodes
from moediag.launch.nodes.peers import LATE_NODES, Peers
from moediag.launch.nodes.relay import RelayedFolder
from moediag.launch.nodes.shared_folder import SharedFolder
from moediag.launch.nodes.status import ObservedStall, Pulse, of_json
from moediag.launch.rank_sample import RankSample

US, THEM = "a" * 16, "b" * 16
JOB = "c" * 32
WAITS = RankSample(0, state="in-collective", progress=7, step=3, begun=True)
IDLE = RankSample(1, state="running", progress=6, step=3, begun=True, at=1e6)


def pulse(seq: int, *samples: RankSample, **values: Any) -> Pulse:
    return Pulse(THEM, "b", 1, seq=seq, look=seq, samples=samples or (IDLE,), **values)


def peers(silence: float = 20.0, joins: bool = True) -> Peers:
    return Peers(US, silence, joins, 0.0)


# ------------------------------------------------------------------------ pulses


def test_a_status_is_read_back_unchanged() -> None:
    said = pulse(
        3, replace(IDLE, work="imports", cpu=1.5), heard={US: 4}, deaths=(1,),
        stood=ObservedStall({0: 7, 1: 6}, (0,), (1,), False), published=2, over=True,
    )  # fmt: skip
    assert of_json(json.loads(json.dumps(said.to_json()))) == said


@pytest.mark.parametrize(
    "change",
    [
        {"schema_version": 9}, {"key": "../../etc"}, {"samples": {"x": {}}}, {"samples": None},
        {"seq": "many"}, {"stood": {"progress": 1}}, {"heard": []}, {"ranks": 1, "deaths": 5},
    ],
)  # fmt: skip
def test_an_invalid_status_is_refused(change: Mapping[str, Any]) -> None:
    raw = {**json.loads(json.dumps(pulse(1).to_json())), **change}
    with pytest.raises(ValueError):
        of_json(raw)


# ------------------------------------------------------------------------ presence


def test_a_node_that_sends_has_its_sent_state() -> None:
    known = peers()
    known.hear(1.0, [pulse(1)])
    assert known.samples(1.2, [0], 2) == [IDLE]


def test_an_old_sample_is_not_used() -> None:
    """Its watcher sends, but is busy reading a stack; or its messages are late."""
    known = peers()
    for second in range(1, 9):
        known.hear(second, [replace(pulse(second), look=1)])
    (sample,) = known.samples(8.0, [0], 2)
    assert (sample.known, sample.silent) == (False, False)


def test_a_node_without_a_heartbeat_is_silent_by_our_clock() -> None:
    known = peers(silence=20.0)
    for second in range(1, 22):
        known.hear(second, [pulse(1)])
    assert not known.samples(21.0, [0], 2)[0].silent
    known.hear(21.5, [pulse(1)])
    (sample,) = known.samples(21.5, [0], 2)
    assert (sample.silent, sample.known, sample.state) == (True, True, "silent")


def test_a_node_that_announced_its_end_is_not_silent() -> None:
    known = peers()
    gone = replace(IDLE, alive=False)
    for second in range(90):
        known.hear(second, [pulse(1, gone, over=True)])
    assert known.samples(90.0, [0], 2) == [gone]


def test_a_node_that_did_not_listen_reports_no_silent_node() -> None:
    """The shared disk did not answer for an hour, or this process was stopped."""
    known = peers()
    known.hear(1.0, [pulse(1)])
    (sample,) = known.samples(3600.0, [0], 2)
    assert (sample.unseen, sample.silent) == (True, False)
    known.hear(3600.0, [pulse(1)])
    assert not known.samples(3600.5, [0], 2)[0].silent


def test_a_node_that_never_sent_is_waited_for_and_then_left_out() -> None:
    known = peers()
    known.hear(LATE_NODES + 1, [])
    assert not known.samples(LATE_NODES - 1, [0], 2)[0].known
    (sample,) = known.samples(LATE_NODES + 1, [0], 2)
    assert (sample.known, sample.unseen) == (True, True)
    assert peers(joins=False).samples(0.0, [0], 2)[0].unseen


def test_messages_of_an_earlier_start_are_ignored() -> None:
    """Its ranks belong to a newer start."""
    known = peers()
    known.hear(1.0, [pulse(9, replace(IDLE, alive=False), over=True, deaths=(1,))])
    assert known.deaths == (1,)
    again = replace(pulse(1), key="d" * 16)
    known.hear(2.0, [pulse(9, replace(IDLE, alive=False), over=True, deaths=(1,)), again])
    assert known.samples(2.0, [0], 2) == [IDLE]
    assert known.deaths == ()


def test_a_stall_of_another_node_is_adopted_if_our_ranks_agree() -> None:
    known = peers()
    stood = ObservedStall({0: 7, 1: 6}, (0,), (1,), False)
    known.hear(1.0, [pulse(1, stood=stood)])
    assert known.stood([WAITS, IDLE]) == stood
    assert known.stood([replace(WAITS, progress=8), IDLE]) is None


# ------------------------------------------------------------------------ patience


def called(others: Any, until: float = 400.0) -> float | None:
    """Returns when a hang is called if rank 0 waits here, with a patience of 10 s."""
    patience = Patience(Watchdog(3.0, 100.0), 10.0, lambda ranks, _: dict.fromkeys(ranks, b"[]"))
    for turn in range(int(until * 5)):
        now = 1000.0 + turn / 5
        if patience.observe(now, [WAITS, others(turn / 5)]):
            return turn / 5
    return None


def test_a_remote_rank_has_its_own_clock() -> None:
    """It computes and sends every three seconds, with a clock that is 10 days ahead."""

    def computes(t: float) -> RankSample:
        last = t - t % 3.0
        return replace(IDLE, cpu=last, runnable=True, at=864_000.0 + last)

    at = called(computes)
    assert at is not None
    assert 40.0 <= at < 45.0


def test_patience_depends_on_whether_a_remote_rank_is_watched() -> None:
    silent = called(lambda _: replace(IDLE, silent=True, state="silent"))
    assert silent is not None
    assert 10.0 <= silent < 11.0
    unseen = called(lambda _: RankSample(1, unseen=True, state="unseen"))
    assert unseen is not None
    assert 40.0 <= unseen < 41.0


@pytest.mark.parametrize("ahead", [-900.0, 1e6])
def test_a_lost_node_has_no_clock(ahead: float) -> None:
    """It sent for two seconds, with its own clock."""

    def script(t: float) -> RankSample:
        if t < 2.0:
            return replace(IDLE, at=1000.0 + ahead + t)
        return replace(IDLE, unseen=True, state="unseen", at=None, looked=False)

    at = called(script)
    assert at is not None
    assert 40.0 <= at < 43.0


def test_the_stack_read_by_a_ranks_own_watcher_is_used() -> None:
    assert called(lambda t: replace(IDLE, at=t, work="compiles"), 390) is None
    at = called(lambda t: replace(IDLE, at=t, looked=False))
    assert at is not None
    assert 50.0 <= at < 51.0  # its watcher has time to sample


def test_a_node_that_is_late_is_waited_for() -> None:
    assert called(lambda _: replace(IDLE, known=False), 100) is None


# ------------------------------------------------------------------------ the shared folder


def evidence(folder: Path, rank: int) -> Path:
    (folder / "capture").mkdir(parents=True)
    (folder / protocol.events_file(rank)).write_text("log")
    (folder / "capture" / f"rank-{rank}.proc.txt").write_text("State")
    return folder


def test_a_node_shares_only_known_files(tmp_path: Path) -> None:
    source = evidence(tmp_path / "attempt", 1)
    (source / "secrets.txt").write_text("mine")
    (source / "rank-2.log").symlink_to("/etc/passwd")
    kept = {"capture/source.json", "capture/rank-1.worker-77.json"}
    for name in kept:
        (source / name).write_text("{}")
    ours, theirs = SharedFolder(tmp_path / "s", JOB, US), SharedFolder(tmp_path / "s", JOB, THEM)
    assert theirs.publish(source, 1) == []
    assert ours.fetch(THEM, 1, tmp_path / "here") == []
    found = {p.relative_to(tmp_path / "here").as_posix() for p in (tmp_path / "here").rglob("*")}
    assert found == {"rank-1.events.jsonl", "capture", "capture/rank-1.proc.txt", *kept}


def test_whether_nodes_can_meet_in_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert usable.unusable(tmp_path / "new" / "shared") == ""
    assert list((tmp_path / "new" / "shared").iterdir()) == []
    (tmp_path / "file").touch()
    assert usable.unusable(tmp_path / "file") == "File exists"

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        assert usable.unusable(tmp_path) == "No space left on device"
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    waits = threading.Event()
    monkeypatch.setattr(os, "fsync", lambda _: waits.wait(20))
    monkeypatch.setattr(usable, "_ANSWERS", 0.01)
    assert usable.unusable(tmp_path) == "does not answer in 0 s"
    waits.set()


# ------------------------------------------------------------------------ nodes that never come


@pytest.mark.parametrize(
    ("command", "environment", "nodes", "own"),
    [
        ("torchrun --nnodes 2 --node-rank 1 train.py --nnodes 9", {}, 2, 1),
        ("python -m torch.distributed.run --nnodes=2:4 --node_rank=0 train.py", {}, 2, 0),
        ("torchrun --nnodes 4 train.py", {"PET_NODE_RANK": "3"}, 4, 3),
        ("/venv/bin/torchrun train.py", {"PET_NNODES": "2"}, 2, None),
        ("torchrun --standalone train.py", {}, 1, None),
        ("python train.py --nnodes 2", {}, 1, None),
        ("torchrun --nnodes $N train.py", {}, 1, None),
    ],
)
def test_how_many_nodes_a_command_names(
    command: str, environment: dict[str, str], nodes: int, own: int | None
) -> None:
    assert declared(command.split(), environment) == Declared(nodes, own)


def test_a_node_that_never_comes_is_told() -> None:
    assert Declared(2, 0).awaited(40.0) == "waiting for node 1 of 2 since 40 s"
    assert Declared(2).awaited(40.0) == "waiting for the other node of 2 since 40 s"
    assert Declared(4, 1).awaited(40.0) == "waiting for the other nodes (of 4) since 40 s"
    assert Declared(2, 0).awaited(4.0) == Declared().awaited(40.0) == Declared().never_came(9) == ""
    assert Declared(2, 1).never_came(40.0) == (
        "node 0 of 2: did not come in 40 s, so no rank began to train"
    )


def test_evidence_beyond_the_limit_is_left_out_and_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_folder, "MOST_BYTES", 6)
    source = evidence(tmp_path / "attempt", 1)
    assert shared_folder.copied(source, tmp_path / "here") == ["rank-1.events.jsonl"]


def test_a_short_log_is_shared_with_its_older_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = evidence(tmp_path / "attempt", 1)
    (source / protocol.older_events_file(1)).write_text("older")
    shared_folder.copied(source, tmp_path / "both")
    assert (tmp_path / "both" / protocol.older_events_file(1)).exists()
    monkeypatch.setattr(shared_folder, "SHORT_LOG", 2)
    shared_folder.copied(source, tmp_path / "one")
    assert not (tmp_path / "one" / protocol.older_events_file(1)).exists()


def test_unreachable_nodes_are_not_waited_for() -> None:
    known = peers()
    known.hear(1.0, [pulse(1)])
    known.samples(30.0, [0], 2)
    assert not known.echoed(5)
    assert known.owing(1, {}) == known.lacking(1) == ["node 1"]
    known.samples(1.0 + LATE_NODES, [0], 2)
    assert known.echoed(5)
    assert known.owing(1, {}) == known.lacking(1) == []


def test_two_jobs_in_one_folder_are_separate(tmp_path: Path) -> None:
    SharedFolder(tmp_path, JOB, THEM).put(pulse(1))
    assert SharedFolder(tmp_path, "d" * 32, US).pulses() == []
    assert [p.key for p in SharedFolder(tmp_path, JOB, US).pulses()] == [THEM]


def test_unknown_files_in_the_folder_are_ignored(tmp_path: Path) -> None:
    for name, text in (("e" * 16, "{"), ("f" * 16, "[]"), ("no key", "{}")):
        (tmp_path / JOB / name).mkdir(parents=True)
        (tmp_path / JOB / name / protocol.PULSE_FILE).write_text(text)
    impostor = tmp_path / JOB / ("d" * 16)
    impostor.mkdir()
    (impostor / protocol.PULSE_FILE).write_text(json.dumps(pulse(1).to_json()))
    assert SharedFolder(tmp_path, JOB, US).pulses() == []


# ------------------------------------------------------------------------ two watchers


class Node:
    """One of two watchers, run step by step. ``rank`` is its number."""

    def __init__(self, root: Path, rank: int, shared: bool = True) -> None:
        self.folder = evidence(root / f"run-{rank}" / "attempt-0", rank)
        self.rank = rank
        self.writes_job(store=not shared)  # under an agent it is known before the ranks meet
        self.sample = RankSample(rank, state="in-collective", progress=5)
        self.nodes = OtherNodes(self.folder, root / "shared" if shared else None, 2.0)
        self.nodes.world = 2
        self.patience = Patience(Watchdog(3.0, 0.0), 10.0, lambda *_: {})
        self.look()

    def writes_job(self, store: bool = True) -> None:
        raw = {"job": JOB, "node": self.rank, "python": "python",
               "store": ["10.0.0.1", 29500] if store else None}  # fmt: skip
        protocol.write_json(self.folder / protocol.job_file(self.rank), raw)

    def look(self) -> None:
        self.nodes.look([self.sample], self.patience, ())

    def turn(self) -> None:
        assert self.nodes.exchange is not None
        self.nodes.exchange._turn()
        self.look()

    def agreed(self, waiting: Sequence[int] = (0, 1), early: bool = False) -> Stall | None:
        return self.nodes.agreed(Stall(1.0, 3.0, tuple(waiting), early=early), [self.sample])


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The job's store, to which relays carry at once."""

    class Relayed(RelayedFolder):
        def __init__(self, _: Path, job: str, own: str, *__: Any) -> None:
            SharedFolder.__init__(self, tmp_path / "store", job, own)

        pulses, want, close = SharedFolder.pulses, SharedFolder.want, SharedFolder.close

    monkeypatch.setattr(other_nodes, "RelayedFolder", Relayed)
    return tmp_path / "store"


@pytest.fixture
def two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: Path) -> tuple[Node, Node]:
    monkeypatch.setattr(Exchange, "start", lambda _: None)
    monkeypatch.setattr(other_nodes, "_ASK_AGAIN", -1.0)
    nodes = Node(tmp_path, 0), Node(tmp_path, 1)
    for _ in range(2):
        for node in nodes:
            node.turn()
    return nodes


def test_a_stall_is_confirmed_after_other_nodes_sample_again(two: tuple[Node, Node]) -> None:
    here, there = two
    assert here.agreed() is None
    for _ in range(3):
        here.turn()  # one watcher alone never agrees
    assert here.agreed() is None
    for _ in range(4):  # it receives, samples and sends; we receive
        there.turn()
        here.turn()
    assert here.agreed() is not None


def test_a_stall_that_is_early_is_so_on_each_node_until_one_is_sure(two: tuple[Node, Node]) -> None:
    here, there = two
    while here.agreed(early=True) is None:
        here.turn()
        there.turn()
    for node in two:
        node.turn()
    told = there.nodes.agreed(None, [there.sample])
    assert told is not None and told.early
    while (sure := there.agreed()) is None:
        there.turn()
        here.turn()
    assert not sure.early


def test_progress_in_between_cancels_the_stall(two: tuple[Node, Node]) -> None:
    here, there = two
    assert here.agreed() is None
    there.sample = replace(there.sample, progress=6)
    for _ in range(3):
        here.turn()
        there.turn()
        assert here.agreed() is None


def test_both_nodes_receive_all_evidence(two: tuple[Node, Node]) -> None:
    here, there = two
    while (stall := here.agreed()) is None:
        here.turn()
        there.turn()
    for node in two:
        node.turn()
    assert there.nodes.agreed(None, [there.sample]) is not None  # despite a longer patience
    for node in two:
        assert node.nodes.exchange is not None
        node.nodes.exchange.want()
        node.nodes.exchange.publish()

    def tick() -> None:
        for node in two:
            node.turn()

    for node in two:
        assert node.nodes.share(tick) == ()
    assert stall.waiting == (0, 1)
    for mine, other in ((0, 1), (1, 0)):
        folder = two[mine].folder
        (copy,) = (folder / protocol.NODES_FOLDER).iterdir()
        assert (copy / protocol.events_file(other)).read_text() == "log"
        raw = json.loads((folder / protocol.NODES_FILE).read_text())
        assert [(n["name"], n["ranks"], n["seen"]) for n in raw["nodes"]] == [
            (f"node {mine}", [mine], True), (f"node {other}", [other], True),
        ]  # fmt: skip


@pytest.mark.parametrize("broken", [False, True])
def test_a_node_that_cannot_use_the_shared_folder_is_met_at_the_store(
    two: tuple[Node, Node], tmp_path: Path, broken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``broken``: it could at first."""
    here, there = two
    if broken:
        exchange = there.nodes.exchange
        assert exchange is not None
        exchange.shared.own = Path("/proc/nowhere")
        exchange.shared.folder = Path("/proc/nowhere")
    else:
        here, there = Node(tmp_path / "2", 0), Node(tmp_path / "2", 1, shared=False)
    here.writes_job()
    there.writes_job()
    clock = [other_nodes.time.monotonic()]
    monkeypatch.setattr(other_nodes.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(other_nodes.time, "sleep", lambda _: None)

    def tick() -> None:
        clock[0] += 1.0
        for node in (here, there):
            assert node.nodes.exchange is not None
            with suppress(OSError):
                node.nodes.exchange._turn()
            node.nodes.exchange.error = "" if node is here or not broken else "it does not answer"
            node.look()

    for _ in range(int(other_nodes.UNHEARD) + 4):
        tick()
    assert [[s.known and not s.silent and not s.unseen for s in node.nodes.others]
            for node in (here, there)] == [[True], [True]]  # fmt: skip
    for node in (here, there):
        assert node.nodes.exchange is not None
        node.nodes.exchange.want()
        node.nodes.exchange.publish()
    for node in (here, there):
        assert node.nodes.share(tick) == () or broken
        (copy,) = (node.folder / protocol.NODES_FOLDER).iterdir()
        assert any(copy.iterdir())


@pytest.mark.parametrize("shared", [True, False])
def test_a_node_that_may_come_through_the_store_is_waited_for_longer(
    tmp_path: Path, two: tuple[Node, Node], shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [other_nodes.time.monotonic()]
    monkeypatch.setattr(other_nodes.time, "monotonic", lambda: clock[0])
    alone = Node(tmp_path / "2", 0, shared)
    alone.writes_job()
    known = {}
    for second in range(100):
        clock[0] += 1.0
        alone.turn()
        known[second] = alone.nodes.others[0].known
    assert not known[int(LATE_NODES + other_nodes.UNHEARD) - 3] and known[99]


def test_nodes_that_meet_in_the_folder_leave_the_store_alone(
    two: tuple[Node, Node], store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for node in two:
        node.writes_job()
    clock = [other_nodes.time.monotonic()]
    monkeypatch.setattr(other_nodes.time, "monotonic", lambda: clock[0])
    for _ in range(40):
        clock[0] += 1.0
        for node in two:
            node.turn()
    assert not store.exists()


def test_no_node_waits_for_a_silent_node(
    two: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, _ = two
    clock = [other_nodes.time.monotonic()]
    monkeypatch.setattr(other_nodes.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(other_nodes.time, "sleep", lambda s: None)
    begun = clock[0]

    def tick() -> None:
        clock[0] += 0.1
        here.turn()

    here.nodes.share(tick)
    assert clock[0] - begun < 4.0  # the silence limit is 2 s
    raw = json.loads((here.folder / protocol.NODES_FILE).read_text())
    assert raw["nodes"][1]["silent"] >= 2.0
    assert raw["nodes"][1]["seen"] is False


def test_an_unwritable_disk_is_noted(two: tuple[Node, Node]) -> None:
    here, _ = two
    exchange = here.nodes.exchange
    assert exchange is not None
    exchange.shared.own = Path("/proc/nowhere")
    exchange._stop.set()
    exchange._run()
    (said,) = here.nodes.not_seen()
    assert said.startswith("other nodes (/proc/nowhere")


def test_a_single_node_does_not_wait_for_others(tmp_path: Path) -> None:
    nodes = OtherNodes(tmp_path, tmp_path / "shared", 2.0)
    nodes.world = 1
    nodes.look([WAITS], Patience(Watchdog(3.0, 0.0), 10.0, lambda *_: {}), ())
    stall = Stall(1.0, 3.0, (0,))
    assert nodes.agreed(stall, [WAITS]) == stall
    assert nodes.share(lambda: None) == ()
    assert not list(tmp_path.iterdir())


def test_remote_ranks_are_unknown_without_a_shared_folder(tmp_path: Path) -> None:
    nodes = OtherNodes(tmp_path, None, 2.0)
    nodes.world = 2
    nodes.look([WAITS], Patience(Watchdog(3.0, 0.0), 10.0, lambda *_: {}), ())
    assert [s.unseen for s in nodes.others] == [True]
    stall = nodes.agreed(Stall(1.0, 3.0, (0,), (1,)), [WAITS])
    assert stall is not None
    assert stall.elsewhere == ()


def test_sample_fields_sent_and_read_are_equal() -> None:
    mine = {"rank", "known", "time", "silent", "unseen"}
    fields = {f.name for f in dataclasses.fields(RankSample)} - mine
    (told,) = pulse(1).to_json()["samples"].values()
    assert set(told) == fields


def test_a_message_that_is_no_pulse_is_refused_and_named(tmp_path: Path) -> None:
    there, here = SharedFolder(tmp_path, JOB, THEM), SharedFolder(tmp_path, JOB, US)
    there.put(pulse(1))
    place = there.own / protocol.PULSE_FILE
    good = json.loads(place.read_text())
    for forged in ({}, [], {**good, "key": "f" * 16}, {**good, "samples": {"-1": {}}}):
        place.write_text(json.dumps(forged))
        assert here.pulses() == []
        assert list(here.refused) == [THEM]
    there.put(pulse(2))
    assert [p.seq for p in here.pulses() or ()] == [2]
    assert here.refused == {}


def test_announced_evidence_that_is_not_there_does_not_silence_the_nodes(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    SharedFolder(tmp_path, JOB, THEM).put(dataclasses.replace(pulse(1), published=10**18))
    ours = SharedFolder(tmp_path, JOB, US)
    exchange = Exchange(ours, Pulse(US, "h"), tmp_path / "own", tmp_path / "into")
    exchange.want()
    exchange._turn()
    heard = exchange.heard()
    assert heard is not None
    assert [p.key for p in heard.pulses] == [THEM]
    assert heard.fetched == {}
