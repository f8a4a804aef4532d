"""Messages through a job's store: two relays on one store, without ranks."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest
from torch.distributed import HashStore

from moediag import protocol
from moediag.launch.nodes import relay as control
from moediag.launch.nodes.relay import RelayedFolder
from moediag.launch.nodes.shared_folder import SharedFolder
from moediag.launch.nodes.status import Pulse
from moediag.ranks import relay
from moediag.ranks.relay import Names, Relay, pack, unpack

NAMES = Names(protocol.PULSE_FILE, protocol.WANT_FILE, protocol.LINK_FILE)
US, THEM, JOB = "a" * 16, "b" * 16, "c" * 32


class Side:
    def __init__(self, folder: Path, key: str, store: HashStore, job: str = JOB) -> None:
        self.shared = SharedFolder(folder, job, key)
        self.key = key
        self.shared.put(Pulse(key, "h"))
        self.relay = Relay(store, job, key, folder / job, NAMES)

    def says(self, seq: int, published: int = 0) -> None:
        self.shared.put(Pulse(self.key, "h", seq=seq, published=published))
        self.relay.turn()

    def hears(self) -> list[tuple[str, int, int]]:
        self.relay.turn()
        return [(p.key, p.seq, p.published) for p in self.shared.pulses()]


@pytest.fixture
def sides(tmp_path: Path) -> tuple[Side, Side]:
    store = HashStore()
    return Side(tmp_path / "n0", US, store), Side(tmp_path / "n1", THEM, store)


def test_a_message_of_one_node_reaches_the_other(sides: tuple[Side, Side]) -> None:
    here, there = sides
    there.says(3)
    assert here.hears() == [(THEM, 3, 0)]
    there.says(4)
    assert here.hears() == [(THEM, 4, 0)]


def test_evidence_reaches_the_nodes_that_ask_for_it(
    sides: tuple[Side, Side], tmp_path: Path
) -> None:
    here, there = sides
    source = tmp_path / "attempt"
    (source / "capture").mkdir(parents=True)
    (source / "rank-1.events.jsonl").write_text("log " * 400_000)
    (source / "capture" / "rank-1.proc.txt").write_bytes(b"\xffState")
    there.shared.publish(source, 1)
    there.says(3, published=1)
    assert here.hears() == [(THEM, 3, 0)]  # not requested, so not here
    (here.shared.own / protocol.WANT_FILE).touch()
    assert here.hears() == [(THEM, 3, 1)]
    here.shared.fetch(THEM, 1, tmp_path / "here")
    assert (tmp_path / "here/rank-1.events.jsonl").read_text() == "log " * 400_000
    assert (tmp_path / "here/capture/rank-1.proc.txt").read_bytes() == b"\xffState"


def test_another_job_at_the_same_store_is_separate(tmp_path: Path) -> None:
    store = HashStore()
    here, other = Side(tmp_path / "n0", US, store), Side(tmp_path / "n1", THEM, store, "d" * 32)
    other.says(1)
    assert here.hears() == []


def test_evidence_too_large_for_the_store_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rank-0.pid").write_text("1")
    (tmp_path / "rank-0.events.jsonl").write_bytes(bytes(range(256)) * 8)
    monkeypatch.setattr(relay, "MOST_CHARACTERS", 100)
    assert [json.loads(chunk)[0] for chunk in pack(tmp_path)] == ["rank-0.pid"]


@pytest.mark.parametrize("name", ["../out", "/tmp/out", "capture/../../out", ".hidden", "a/b"])
def test_paths_outside_the_folder_are_left_out(name: str, tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "x").write_text("x")
    (chunk,) = pack(tmp_path / "source")
    unpack([json.dumps([name, json.loads(chunk)[1]])], tmp_path / "into")
    assert not list((tmp_path / "into").iterdir())
    assert not (tmp_path / "out").exists()


def test_a_compression_bomb_does_not_fill_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "x").write_bytes(bytes(10_000))
    chunks = pack(tmp_path / "source")
    monkeypatch.setattr(relay, "MOST_BYTES", 9_999)
    unpack(chunks, tmp_path / "into")
    assert not list((tmp_path / "into").iterdir())


def test_a_store_that_does_not_answer_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relay that ran once and then ended, as it does when the store is gone."""
    script = tmp_path / "relay.py"
    script.write_text(
        "import sys, pathlib\npathlib.Path(sys.argv[5], sys.argv[9]).write_text('{\"turns\": 1}')\n"
    )
    monkeypatch.setattr(control, "RELAY", script)
    box = RelayedFolder(tmp_path, JOB, US, ("10.0.0.1", 29500), sys.executable)
    deadline = time.monotonic() + 30
    with pytest.raises(OSError, match="does not answer") as caught:
        while time.monotonic() < deadline:
            box.pulses()
    assert caught.value.filename == "the job's store at 10.0.0.1:29500"
    box.close()


def test_a_missing_python_is_reported(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        RelayedFolder(tmp_path, JOB, US, ("10.0.0.1", 29500), "/in/a/container/python")


@pytest.mark.parametrize(
    ("pulse", "count", "chunk"),
    [
        (b"{", b"1", b""),
        (b"\xff", b"1", b""),
        (b"[1]", b"1", b""),
        (b"[" * 100_000, b"1", b""),
        (b'{"published": "x"}', b"1", b""),
        (b'{"published": 1}', b"9" * 18, b""),
        (b'{"published": 1}', b"1", b'["rank-0.log", "!"]'),
        (b'{"published": 1}', b"1", b'["rank-0.log", "QUJD"]'),
        (b'{"published": 1}', b"1", b"7"),
    ],
)
def test_a_forged_message_is_refused_and_named_and_the_next_one_is_taken(
    sides: tuple[Side, Side], pulse: bytes, count: bytes, chunk: bytes
) -> None:
    here, there = sides
    there.says(1)
    (here.shared.own / protocol.WANT_FILE).touch()
    store, prefix = here.relay._store, f"moediag/{JOB}/"
    for name, value in (
        (f"evidence/{THEM}/1", count), (f"evidence/{THEM}/1/0", chunk), (f"pulse/{THEM}", pulse),
    ):  # fmt: skip
        store.set(prefix + name, value)
    here.relay.turn()
    link = here.shared.folder / protocol.LINK_FILE
    assert list(json.loads(link.read_text())["refused"]) == [THEM]
    store.set(f"{prefix}evidence/{THEM}/1", b"0")
    there.says(2)
    assert [seq for _, seq, _ in here.hears()] == [2]
    assert json.loads(link.read_text())["refused"] == {}
