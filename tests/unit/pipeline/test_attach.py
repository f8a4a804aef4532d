"""`moediag attach`: which job is taken, and evidence that travels as one file."""

from __future__ import annotations

import dataclasses
import errno
import io
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path

import pytest

from moediag.errors import EvidenceError, UsageError
from moediag.evidence import looks
from moediag.evidence.looks import Looks, RankLook
from moediag.launch.attach import archives, collecting
from moediag.launch.attach.found_jobs import Job, Rank
from moediag.launch.attach.machines import Answer
from moediag.launch.attach.proc import Proc
from moediag.launch.capture import py_spy
from moediag.pipeline import attach, attach_follow, attach_machines
from moediag.pipeline.examine import examine
from moediag.protocol import AttachTask, Trial, write_json
from moediag.result import RunResult

C10D = "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"
SOURCE = "rank = dist.get_rank()\nif rank == 0:\n    dist.all_gather(a, b)\ndist.barrier()\n"


def evidence(folder: Path, ranks: Mapping[int, tuple[str, int]], does: str = looks.WAITS,
             world_size: int = 2, job: str = "abc") -> Path:  # fmt: skip
    """What `attach` leaves of ranks that wait at these lines in these calls."""
    attempt = folder / "attempt-0"
    capture = attempt / "capture"
    capture.mkdir(parents=True)
    for rank, (op, line) in ranks.items():
        frames = [
            {"filename": C10D, "name": op, "line": 1},
            {"filename": "/home/me/train.py", "name": "<module>", "line": line},
        ]
        raw = [{"thread_name": "MainThread", "frames": frames}]
        write_json(capture / f"rank-{rank}.pyspy.json", raw)
        write_json(attempt / f"rank-{rank}.job.json", {"job": job})
    write_json(capture / "source.json", {"files": {"/home/me/train.py": SOURCE}, "lost": {}})
    seen = Looks(4.0, 30.0, {r: RankLook(1, does, 60.0) for r in ranks}, world_size)
    write_json(attempt / "looks.json", dataclasses.asdict(seen))
    trial = Trial("attempt-0", "train.py", "attached", task=AttachTask(), world_size=world_size)
    trial.write(attempt)
    return attempt


BOTH = {0: ("all_gather", 3), 1: ("barrier", 4)}


def test_evidence_as_one_file(tmp_path: Path) -> None:
    attempt = evidence(tmp_path / "run", BOTH)
    archive = tmp_path / "out.tgz"
    archives.pack(attempt, archive, redact=True)
    for path in (attempt.parent, archive):
        (trial,) = examine([path]).result.trials
        assert (trial.verdict, trial.culprits) == ("hang", (0,)), trial.cause
    assert trial.evidence == f"{archive}/attempt-0"
    with tarfile.open(archive) as packed:
        texts = [found.read() for one in packed if (found := packed.extractfile(one))]
    assert texts and not any(b"/home/me" in text for text in texts)


def test_several_machines_are_one_job(tmp_path: Path) -> None:
    found = []
    for node, rank in enumerate(BOTH):
        attempt = evidence(tmp_path / str(node), {rank: BOTH[rank]})
        found.append(tmp_path / f"node-{node}.tgz")
        archives.pack(attempt, found[-1], redact=False)
    (alone,) = examine(found[:1]).result.trials
    assert (alone.verdict, alone.culprits) == ("inconclusive", ())
    (trial,) = examine(found).result.trials
    assert (trial.verdict, trial.culprits) == ("hang", (0,)), trial.cause


def test_a_machine_that_works_ends_the_wait_of_another(tmp_path: Path) -> None:
    one = evidence(tmp_path / "0", {0: BOTH[0]})
    other = evidence(tmp_path / "1", {1: BOTH[1]}, does=looks.MOVES)
    (trial,) = examine([one, other]).result.trials
    assert (trial.verdict, trial.culprits) == ("clean", ())


def test_a_rank_that_ended_between_two_looks(tmp_path: Path) -> None:
    attempt = evidence(tmp_path / "run", {0: BOTH[0]})
    raw = json.loads((attempt / "looks.json").read_text())
    raw["ranks"]["1"] = dataclasses.asdict(RankLook(2, looks.GONE))
    write_json(attempt / "looks.json", raw)
    (trial,) = examine([attempt]).result.trials
    assert (trial.verdict, trial.culprits) == ("crash", (1,)), trial.cause


def test_damaged_looks_are_told(tmp_path: Path) -> None:
    attempt = evidence(tmp_path / "run", BOTH)
    (attempt / "looks.json").write_text("{")
    (trial,) = examine([attempt]).result.trials
    assert trial.verdict == "inconclusive"
    assert "what the looks saw" in trial.diagnosis.not_seen[0]


def test_an_archive_that_leaves_its_folder_writes_nothing_there(tmp_path: Path) -> None:
    archive = tmp_path / "bad.tgz"
    with tarfile.open(archive, "w:gz") as packed:
        for name in ("../outside.json", "/tmp/outside.json", "inside.json"):
            member = tarfile.TarInfo(name)
            member.size = 2
            packed.addfile(member, io.BytesIO(b"{}"))
    with archives.unpacked([archive]) as (folder,):
        assert [path.name for path in folder.parent.rglob("*.json")] == ["inside.json"]


def test_an_archive_that_is_cut_off(tmp_path: Path) -> None:
    archive = tmp_path / "out.tgz"
    archives.pack(evidence(tmp_path / "run", BOTH), archive, redact=False)
    whole = archive.read_bytes()
    for damaged in (whole[:-60], whole[:40] + bytes(20) + whole[60:]):
        archive.write_bytes(damaged)
        with pytest.raises(EvidenceError, match="cannot be read"):
            archives.extract(archive, tmp_path / "into")


def test_a_folder_that_does_not_exist(tmp_path: Path) -> None:
    attempt = evidence(tmp_path / "run", BOTH)
    with pytest.raises(UsageError, match="--collect"):
        archives.pack(attempt, tmp_path / "no" / "out.tgz", redact=False)


# ------------------------------------------------------------------------ choosing


def job(root: int, *numbers: int | None, size: int = 2) -> Job:
    ranks = tuple(Rank(root + 1 + at, 5, number, size) for at, number in enumerate(numbers))
    return Job(ranks, "torchrun", root, ("python", "train.py"))


@pytest.mark.parametrize(
    ("found", "line"),
    [
        (job(10, 0, 1), "10  train.py  ranks 0, 1  torchrun"),
        (job(10, 2, 3, size=8), "10  train.py  ranks 2, 3 of 8  torchrun"),
        (job(10, None, None), "10  train.py  2 ranks  torchrun"),
    ],
)
def test_a_job_in_one_line(found: Job, line: str) -> None:
    assert attach.described(found) == line


def test_the_only_job_is_taken_and_several_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    running: list[Job] = []
    monkeypatch.setattr(attach.found_jobs, "of_user", lambda *_: running)
    with pytest.raises(UsageError, match="no training job of yours"):
        attach.choose(None)
    running.append(job(10, 0, 1))
    assert attach.choose(None).root == 10
    running.append(job(20, 0, 1))
    with pytest.raises(UsageError, match=r"2 training jobs.*\n  10  train\.py.*\n  20  train\.py"):
        attach.choose(None)


def test_a_process_that_is_no_job() -> None:
    with pytest.raises(UsageError, match="there is no process"):
        attach.choose(1 << 22)


def test_a_process_of_another_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "stat").write_text(f"7 (python) S 1 {' '.join('0' * 40)}")
    (tmp_path / "7" / "status").write_text("Uid:\t4242\t4242\t4242\t4242\n")
    monkeypatch.setattr(attach, "Proc", lambda: Proc(tmp_path))
    with pytest.raises(UsageError, match="belongs to another user"):
        attach.choose(7)


# ------------------------------------------------------------------------ following


def follow(tmp_path: Path, *kinds: str) -> tuple[attach_follow.Followed, list[str], list[float]]:
    """A job whose looks find these one after the other, "" for no job: what was said, and the
    seconds between the looks."""
    coming, told, pauses = iter(kinds), list[str](), list[float]()

    def look(out: Path | None) -> attach.Attached:
        if not (kind := next(coming)):
            raise UsageError("no job")
        assert out is not None
        attempt = evidence(out, BOTH, does=kind)
        trial = Trial.read(attempt / "trial.json")
        return attach.judged(out, trial, "attach 1", datetime.now(timezone.utc))

    found = attach_follow.follow(look, tmp_path / "run", 30.0, told.append, pauses.append)
    return found, told, pauses


def test_a_job_is_followed_until_it_hangs(tmp_path: Path) -> None:
    found, told, pauses = follow(tmp_path, looks.MOVES, "", looks.MOVES, looks.WAITS, looks.MOVES)
    assert (found.ended, found.clean, told) == (False, 2, [])
    assert found.last.result.trials[0].culprits == (0,)
    assert pauses == [30.0, 10.0, 30.0]  # what is not found may only restart
    assert [p.name for p in (tmp_path / "run").iterdir() if p.is_dir()] == ["attempt-0"]


def test_a_job_is_followed_until_it_ends(tmp_path: Path) -> None:
    found, told, _ = follow(tmp_path, looks.MOVES, looks.UNREAD, looks.UNREAD, "", "", looks.WAITS)
    assert (found.ended, found.clean) == (True, 1)
    assert len(told) == 1  # once, not at each look
    assert (found.last.folder / "attempt-0" / "trial.json").is_file()
    assert [p.name for p in tmp_path.iterdir()] == ["run"]
    with pytest.raises(UsageError, match="no job"):
        follow(tmp_path, "")


def test_ranks_that_were_started_again_are_the_same_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attach, "choose", lambda pid: job(pid, 0, 1))
    (own,) = [seen for seen in [Proc().seen(os.getpid())] if seen is not None]
    here, gone = Rank(own.pid, own.started, 0, 2), Rank(own.pid, own.started + 1, 1, 2)
    part_of_it = Job((gone, here), "torchrun", 10)
    assert attach.again(part_of_it) is part_of_it
    assert attach.again(Job((gone,), "torchrun", 10)) == job(10, 0, 1)
    with pytest.raises(UsageError, match="has ended"):
        attach.again(Job((gone,), "python", 10))  # its parent may go on without ranks


# ------------------------------------------------------------------------ what is missing


def test_a_job_that_may_not_be_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tool = tmp_path / "py-spy"
    tool.write_text("#!/bin/sh\necho 'Error: Permission denied (os error 13)' >&2\nexit 1\n")
    tool.chmod(0o755)
    monkeypatch.setattr(py_spy, "find_tool", lambda _: str(tool))
    program = "import sys; print(flush=True); sys.stdin.readline()"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        found = attach.choose(process.pid)
        options = collecting.AttachOptions(patience=1.0)
        done = attach.attach(found, options, tmp_path / "run", lambda _: None)
        process.communicate("")
    (trial,) = done.result.trials
    assert (trial.verdict, process.returncode) == ("inconclusive", 0)
    assert "rank 0: Python stack (ptrace refused)" in trial.diagnosis.not_seen
    assert any(text.startswith("Python stacks: ") for text in trial.diagnosis.not_seen)


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(errno.ENOSPC, "full")])
def test_a_look_that_does_not_end_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: type[BaseException] | OSError
) -> None:
    def collect(_: Job, folder: Path, *__: object) -> None:
        folder.mkdir()
        (folder / "looks.json").touch()
        raise error

    monkeypatch.setattr(collecting, "collect", collect)
    with pytest.raises((KeyboardInterrupt, OSError)):
        attach.attach(job(10, 0, 1), collecting.AttachOptions(), tmp_path / "run", lambda _: None)
    assert not any(tmp_path.iterdir())


def test_use_of_gpus_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """``maps`` is a stand-in: this machine has no GPU."""
    seen = Looks(4.0, 30.0, {r: RankLook(r + 7, looks.WAITS, 60.0) for r in range(2)})
    monkeypatch.setattr(collecting.gpus, "busy", lambda *_: ({7: 0.5}, "why"))
    monkeypatch.setattr(Proc, "maps", lambda *_: True)
    found, why = collecting.with_gpus(seen, Proc())
    assert ({r: look.gpu for r, look in found.ranks.items()}, why) == ({0: 0.5, 1: None}, "why")
    monkeypatch.setattr(Proc, "maps", lambda *_: False)  # no rank uses one: nothing is missing
    assert collecting.with_gpus(seen, Proc()) == (seen, "")


@pytest.mark.parametrize(
    ("scope", "says"),
    [("1", "sysctl kernel.yama.ptrace_scope=0"), ("3", "until the machine restarts"),
     ("0", "--cap-add SYS_PTRACE")],
)  # fmt: skip
def test_the_setting_that_would_help(
    scope: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "scope").write_text(scope)
    monkeypatch.setattr(collecting, "_YAMA", tmp_path / "scope")
    monkeypatch.setattr(collecting.os, "geteuid", lambda: 1000)
    assert says in collecting.setting()


# ------------------------------------------------------------------------ several machines


def machine(tmp_path: Path, name: str, *of: tuple[str, int], after: float = 0.0) -> Answer:
    """What a machine sends that has the given ranks of ``BOTH`` of the given jobs."""
    folder = tmp_path / f"of-{name}" / "evidence"
    for job, rank in of:
        attempt = evidence(folder / job, {rank: BOTH[rank]}, job=job)
        attempt.rename(folder / f"{job}-0")
        (folder / job).rmdir()
    archive = tmp_path / f"{name}.tgz"
    archives.pack(folder, archive, redact=False)
    return Answer(name, archive, after=after)


def on_machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *answers: Answer) -> RunResult:
    monkeypatch.setattr(attach_machines.machines, "ask", lambda *_: [*answers])
    done = attach_machines.attach(
        "--hosts x", (), collecting.AttachOptions(), "", tmp_path / "run", lambda _: None
    )
    return done.result


def test_answers_of_several_machines_are_one_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = on_machines(
        tmp_path, monkeypatch, machine(tmp_path, "a", ("abc", 0)),
        Answer("b", None, "did not answer in 90 s"),
        machine(tmp_path, "c", ("abc", 1), ("def", 0)), Answer("d", None, "is down"),
    )  # fmt: skip
    (trial,) = found.trials
    assert (trial.verdict, trial.culprits) == ("hang", (0,)), trial.cause
    assert "b: did not answer in 90 s" in trial.diagnosis.not_seen
    assert any("c: rank 1" in note for note in trial.diagnosis.notes)
    (again,) = examine([tmp_path / "run"]).result.trials
    assert (again.cause, again.diagnosis.not_seen) == (trial.cause, trial.diagnosis.not_seen)


def test_a_late_answer_counts_from_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that have waited for 60 s when they are looked at 40 s later had waited for 20 s."""
    found = on_machines(
        tmp_path, monkeypatch, machine(tmp_path, "a", ("abc", 0)),
        machine(tmp_path, "b", ("abc", 1), after=40.0),
    )  # fmt: skip
    assert (found.trials[0].verdict, found.trials[0].culprits) == ("inconclusive", ())


@pytest.mark.parametrize("file", ["looks.json", "trial.json"])
@pytest.mark.parametrize("damage", [b"{", b'{"ranks": {"0": 3}}', b"\xd2", b"[" * 100_000])
def test_the_damaged_evidence_of_a_machine_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, damage: bytes
) -> None:
    whole, broken = machine(tmp_path, "a", ("abc", 0)), machine(tmp_path, "b", ("abc", 1))
    assert whole.archive is not None and broken.archive is not None
    (tmp_path / "of-b" / "evidence" / "abc-0" / file).write_bytes(damage)
    (tmp_path / "of-a" / "evidence" / "abc-0" / "not-seen.txt").write_bytes(b"stack \xd2")
    for name, archive in (("a", whole.archive), ("b", broken.archive)):
        archives.pack(tmp_path / f"of-{name}" / "evidence", archive, redact=False)
    (trial,) = on_machines(tmp_path, monkeypatch, whole, broken).trials
    assert trial.diagnosis.not_seen[:2] == ("b: its evidence is damaged", "stack \ufffd")


def test_machines_without_a_single_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"no training job was found on 1 machine:\n  a: is down"):
        on_machines(tmp_path, monkeypatch, Answer("a", None, "is down"))
    several = (machine(tmp_path, "a", ("abc", 0)), machine(tmp_path, "b", ("def", 1)))
    with pytest.raises(UsageError, match=r"2 training jobs .*\n  train\.py on a\n  train\.py on b"):
        on_machines(tmp_path, monkeypatch, *several)
    (tmp_path / "broken.tgz").write_bytes(b"no archive")
    with pytest.raises(UsageError, match="the archive cannot be read"):
        on_machines(tmp_path, monkeypatch, Answer("a", tmp_path / "broken.tgz"))
