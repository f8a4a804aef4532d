"""How moediag reads each kind of input that :mod:`bench.endurance.hostile` damages."""

from __future__ import annotations

import functools
import json
import os
import random
import tempfile
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import typer

from bench.endurance import originals, record_originals
from bench.endurance.damage import damaged
from bench.endurance.shown import no_number, show, show_answer
from moediag import configuration, pytest_plugin, rank_reports
from moediag.cli import app
from moediag.errors import MoediagError
from moediag.evidence.launch_record import LaunchRecord
from moediag.lab.campaign.bisect import state
from moediag.lab.campaign.engine import journal as journals
from moediag.lab.campaign.nightly import changes, night, summary
from moediag.lab.launch.rendezvous import Meeting
from moediag.lab.pipeline import check, check_page, check_request
from moediag.lab.pipeline import register as registers
from moediag.lab.pipeline.check_cost import Bandwidth
from moediag.lab.pipeline.check_options import CheckOptions
from moediag.lab.scenario import load as loading
from moediag.launch.attach import archives, debug_server, found_jobs, spy
from moediag.launch.attach.machines import Answer
from moediag.launch.attach.proc import Proc
from moediag.launch.nodes import status
from moediag.launch.nodes.peers import Peers
from moediag.pipeline import attach, attach_machines, resume, verify, watch
from moediag.pipeline.examine import examine
from moediag.pipeline.measured_jobs import MeasuringOptions
from moediag.protocol import parse_json
from moediag.ranks import relay
from moediag.report import trace, views
from moediag.result.result_file import trial_from_json

_NOW = datetime(2026, 11, 25, tzinfo=timezone.utc)


def folder(folder: Path) -> None:
    found = examine([folder])
    show(found.result)
    json.loads(trace.render(found.traced()), parse_constant=no_number)


def result(folder: Path) -> None:
    show(views.load(folder / "result.json")[0])


def journal(folder: Path) -> None:
    header, lines = journals.lines_of(folder)
    with tempfile.TemporaryDirectory() as place:
        again = journals.create(Path(place) / "run", header)
        again.lines += lines
        journals.Records(again, "trial", trial_from_json, lambda _: {})
        again.close()


def scenario(folder: Path) -> None:
    loading.load(folder / "scenario.yaml")


def register(folder: Path) -> None:
    registers.read(folder / "known.yaml")


def checkpoint(folder: Path) -> None:
    from moediag.lab.check import checkpoint_names

    try:
        checkpoint_names.shapes(folder)
    except checkpoint_names.NotRead as no:
        raise MoediagError(str(no)) from no


class _Store:
    """A job's store as another program may have filled it."""

    def __init__(self, values: dict[str, bytes]) -> None:
        self.values = {f"moediag/{originals.JOB}/{name}": value for name, value in values.items()}

    def check(self, names: Sequence[str]) -> bool:
        return all(name in self.values for name in names)

    def get(self, name: str) -> bytes:
        return self.values[name]

    def set(self, name: str, text: str) -> None:
        self.values[name] = text.encode()

    def add(self, _name: str, _by: int) -> int:
        return 2


def messages(folder: Path) -> None:
    """Nothing in the store, in another node's file or in its pulse ends the reader of it."""
    sent = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    them, own = originals.KEY, "f" * 16
    store = _Store({
        "node/1": own.encode(), "node/2": sent.get("node", them.encode()),
        f"pulse/{them}": sent.get("pulse", b""), f"evidence/{them}/1": sent.get("count", b""),
        f"evidence/{them}/1/0": sent.get("chunk", b""),
    })  # fmt: skip
    (folder / "job" / own).mkdir(parents=True)
    (folder / "job" / own / "want").touch()
    one = relay.Relay(store, originals.JOB, own, folder / "job", relay.Names("p", "want", "link"))
    for _ in range(2):
        one.turn()
    (folder / "node-1.json").write_bytes(sent.get("word", b""))
    meeting = Meeting(folder, 0, 2, "plan", 1.0)
    meeting._hear(time.monotonic())
    meeting._is_there(1, 1)
    try:
        pulse = status.of_json(parse_json(sent.get("pulse", b"")))
    except ValueError as no:
        raise MoediagError(str(no)) from no
    peers = Peers(own, 5.0, True, 0.0)
    peers.hear(1.0, [pulse])
    peers.stood(peers.samples(1.0, (0, 1), 4))
    peers.lacking(1)


def attached(folder: Path) -> None:
    """Machine ``a`` sends a whole archive; ``b`` one whose bytes are damaged, too."""
    for path in filter(Path.is_file, folder.iterdir()):
        found = path.read_bytes()
        dict(debug_server.dumps(found.decode("utf-8", "replace")))
        for read in (spy.rank_of, spy.places, spy.values, spy.without_text):
            read(found)  # type: ignore[operator]
    with tempfile.TemporaryDirectory() as place:
        answers = []
        for name in ("a", "b"):
            archive = Path(place) / f"{name}.tgz"
            if (folder / "evidence").is_dir():
                archives.pack(folder / "evidence", archive, redact=False)
            else:
                archive.write_bytes(b"")
            answers.append(Answer(name, archive, after=1.5))
        data = answers[1].archive.read_bytes()
        answers[1].archive.write_bytes(damaged(data, random.Random(data[-8:])))  # noqa: S311
        done = attach_machines.page_of(answers, "--hosts a,b", Path(place) / "out", "ab", _NOW)
        show(done.result)


def resumed(folder: Path) -> None:
    """What `moediag resume` makes of the recordings of its four runs."""
    commands = resume.Commands(["python", "train.py"], ["python", "train.py", "--resume"])
    show(_Resumed(commands, MeasuringOptions(out=folder), folder, "train.py").run().result)


class _Resumed(resume._Proof):
    """Nothing is run."""

    def _job(self, *_: Any) -> Any:
        (self._folder / "attempt-0").mkdir(exist_ok=True)
        one = SimpleNamespace(evidence="attempt-0")
        return SimpleNamespace(result=SimpleNamespace(trials=[one]))


def measured(folder: Path) -> None:
    """What `moediag verify` makes of what ranks measured, without the comparison, which a rank
    makes."""
    show(verify.conclude(folder, "train.py", "the reference took no step").result)


def reported(folder: Path) -> None:
    """How a test ended on its ranks."""
    said = dict(rank_reports.read(folder))
    failed = {rank: one for rank, one in said.items() if one.outcome == "failed"}
    pytest_plugin._first_line({}, failed, [2], "")


def campaign(folder: Path) -> None:
    """A journal, read and resumed by the command that wrote it."""
    header, _ = journals.lines_of(folder)
    again = journals.resume(folder, header)
    try:
        if header.campaign == "bisect":
            state.State(again)
        elif header.campaign in record_originals.CAMPAIGNS:
            kind = header.campaign.split()[-1]
            journals.Records.of(again, kind, record_originals.CAMPAIGNS[header.campaign])
    finally:
        again.close()


def nights(folder: Path) -> None:
    """The nights before, and the page of the last one."""
    before = night.History(folder)
    if before.nights:
        last = before.nights[-1]
        compared = changes.compare(last, before.nights[:-1])
        show_answer(summary.answer(
            summary.Summary(last, compared, unreadable=tuple(before.unreadable))
        ))  # fmt: skip


def settings(folder: Path) -> None:
    """A configuration file, and what it allows."""
    group = _commands()
    found = configuration.read(folder, list(group.commands))
    for values in found.defaults(group).values():
        watch.check_allowed(values.get("allow") or ())


@functools.cache
def _commands() -> Any:
    return typer.main.get_command(app.whole())


def checked(folder: Path) -> None:
    """A model's configuration, and what its simulated ranks recorded."""
    config = folder / check_request.CONFIG
    check_request.settings(config)
    if not config.is_file():
        return
    (folder / "worker").mkdir(exist_ok=True)
    record_originals.answer_of_check().write(folder / "worker")
    worker = SimpleNamespace(run=lambda *_: LaunchRecord(exits={}))
    asked = CheckOptions(str(config), {"dp_shard": 4, "ep": 2}, batch=1,
                         card="80", reserved=True, bandwidth=Bandwidth(400.0, 50.0))  # fmt: skip
    with (
        mock.patch.object(check.register, "read", return_value=()),
        mock.patch.object(check.known_scenarios, "concerning", return_value=()),
    ):
        told = check.answered(
            check_request.completed(asked), worker, {"torch": "2.13.0"}, folder, "worker",
            lambda *_: None,
        )  # fmt: skip
    show_answer(check_page.answer(told))


def processes(folder: Path) -> None:
    """Processes whose environment and command line anyone may choose."""
    with tempfile.TemporaryDirectory() as place:
        proc = Proc(Path(place))
        pids = sorted({int(path.name.split(".")[0]) for path in folder.iterdir()})
        for pid in pids:
            own = proc.root / str(pid)
            own.mkdir()
            for name in ("environ", "cmdline", "maps"):
                path = folder / f"{pid}.{name}"
                (own / name).write_bytes(path.read_bytes() if path.is_file() else b"")
            above = 1 if pid == pids[0] else pids[0]
            times = [above, pid, pid, *[0] * 7, 100, 50, *[0] * 6, 10_000 + pid, 0]
            (own / "stat").write_text(f"{pid} (a (b) c) S {' '.join(map(str, times))}\n")
            (own / "status").write_text(f"Name:\tx\nUid:\t{os.getuid()}\n")
        found = [*found_jobs.of_user(proc, os.getuid()),
                 *(job for pid in pids for job in found_jobs.of_process(proc, pid))]  # fmt: skip
        for job in found:
            attach.described(job)
            assert len(job.missing) < 10_000
