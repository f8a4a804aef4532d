"""The state file survives a kill at every byte, and never goes on with another bisect."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from moediag.campaign.bisect import state as states
from moediag.campaign.bisect.probe_verdict import BAD, GOOD, other, skip
from moediag.campaign.bisect.search.rates import Rate
from moediag.campaign.bisect.search.search import Options, Probe, Search
from moediag.campaign.bisect.signature_match import Match, Target
from moediag.campaign.bisect.state import STATE_FILE, State, create, read, resume, resume_command
from moediag.campaign.bisect.stored import Header
from moediag.campaign.bisect.timeline import ProbeRecord
from moediag.errors import EvidenceError, UsageError
from tests.unit.bisect_worlds import KINDS, drive, history

RELEASES = tuple(f"4.{minor}.{patch}" for minor in range(40, 60) for patch in range(3))
HEADER = Header(
    scenario="expert-starvation",
    digest="abc",
    package="transformers",
    python="3.11",
    platform="linux-x86_64",
    match=Match.EXACT,
    releases=RELEASES,
    options={"bad": "4.53.2", "window": True},
    command=("moediag", "bisect", "expert-starvation", "--set", "model.family=a b"),
    moediag_version="1",
)
TARGET = Target("unfixed", ("hang",), ("hang:size all_gather:one-rank",), rate=Rate(3, 4))
RECORDS = (
    ProbeRecord("4.53.2", BAD, uploaded="2025-07-11", signature="hang:…", seconds=1.25),
    ProbeRecord("4.40.0", GOOD, evidence="probes/4.40.0"),
    ProbeRecord("4.45.0", skip("it cannot be imported:\nno module named 'x'")),
    ProbeRecord("4.45.0", other("crash:OSError"), attempt=2),
)


def written(folder: Path) -> bytes:
    with create(folder, HEADER) as state:
        state.learned(TARGET)
        for record in RECORDS:
            state.finished(record)
    return (folder / STATE_FILE).read_bytes()


def test_what_is_written_is_read(tmp_path: Path) -> None:
    written(tmp_path)
    for stored in (read(tmp_path), read(tmp_path / STATE_FILE)):
        assert (stored.header, stored.target, stored.probes) == (HEADER, TARGET, RECORDS)


def test_cut_at_every_byte(tmp_path: Path) -> None:
    """Whatever the last write had reached: every finished line is there, and appending goes on."""
    whole = written(tmp_path / "whole")
    ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
    for cut in range(len(whole) + 1):
        folder = tmp_path / "cut"
        folder.mkdir(exist_ok=True)
        (folder / STATE_FILE).write_bytes(whole[:cut])
        # A line is finished with its last brace; the newline after it may be missing.
        finished = sum(end - 1 <= cut for end in ends)
        with resume(folder, HEADER) as state:
            assert state.stored.header == HEADER
            assert (state.stored.target is not None) == (finished >= 2)
            assert state.probes == RECORDS[: max(0, finished - 2)]
            if state.stored.target is None:
                state.learned(TARGET)
            for record in RECORDS[len(state.probes) :]:
                state.finished(record)
        assert (folder / STATE_FILE).read_bytes() == whole


VICTIM = """
import sys
from pathlib import Path
from tests.unit.campaign.test_bisect_state import HEADER, RELEASES
from moediag.campaign.bisect.state import create
from moediag.campaign.bisect.timeline import ProbeRecord
from moediag.campaign.bisect.probe_verdict import GOOD

with create(Path(sys.argv[1]), HEADER) as state:
    print("ready", flush=True)
    for attempt in range(1, 10**6):
        state.finished(ProbeRecord(RELEASES[attempt % len(RELEASES)], GOOD, attempt))
        print(attempt, flush=True)
"""


def test_a_killed_process_loses_no_finished_probe(tmp_path: Path) -> None:
    command = [sys.executable, "-c", VICTIM, str(tmp_path)]
    root = Path(__file__).parents[3]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, cwd=root, env={**os.environ, "PYTHONPATH": str(root)}
    ) as victim:
        assert victim.stdout is not None
        assert victim.stdout.readline() == b"ready\n"
        seen = [victim.stdout.readline() for _ in range(50)]
        victim.send_signal(signal.SIGKILL)
        seen += [line for line in victim.stdout if line.endswith(b"\n")]
    with resume(tmp_path, HEADER) as state:  # the lock went with the process
        kept = [record.attempt for record in state.probes]
    assert kept == list(range(1, len(kept) + 1))
    assert len(seen) <= len(kept) <= len(seen) + 1


def test_killed_twenty_times_and_the_same_answer(tmp_path: Path) -> None:
    """At random moments, torn lines included; no release is probed again after it was recorded."""
    letters = "G" * 14 + "BBSBBOBBBBBBBBBBBBBBBBB" + "G" * 23
    assert len(letters) == len(RELEASES)
    options = Options(30, window=True)
    whole, needed = drive(Search(len(letters), options), history(letters))
    for seed in range(10):
        rng = random.Random(seed)
        folder = tmp_path / str(seed)
        made: list[Probe] = []
        create(folder, HEADER).close()
        for _ in range(20):
            path = folder / STATE_FILE
            with resume(folder, HEADER) as state:
                data = path.read_bytes()
                search = Search(len(letters), options)
                state.stored.tell(search)
                for _ in range(rng.randint(0, 2)):
                    for probe in search.next():
                        made.append(probe)
                        verdict = KINDS[letters[probe.index]]
                        search.told(probe, verdict)
                        state.finished(ProbeRecord(RELEASES[probe.index], verdict, probe.attempt))
            if rng.random() < 0.5:  # killed within the last write
                grown = path.read_bytes()
                cut = rng.randint(len(data), len(grown))
                path.write_bytes(grown[:cut])
                lost = grown.count(b"\n") - len(read(path).probes) - 1
                if lost:
                    del made[-lost:]
        with resume(folder, HEADER) as state:
            search = Search(len(letters), options)
            state.stored.tell(search)
        answer, rest = drive(search, history(letters))
        assert answer == whole
        assert made + rest == needed


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"scenario": "ep-overwrite"}, "its scenario is expert-starvation, not ep-overwrite"),
        ({"digest": "def"}, "the scenario expert-starvation was another then"),
        ({"package": "accelerate"}, "its package is transformers, not accelerate"),
        ({"python": "3.13"}, "its Python is 3.11, not 3.13"),
        ({"platform": "darwin-arm64"}, "its platform is linux-x86_64, not darwin-arm64"),
        ({"match": Match.ANY}, "its --match is exact, not any"),
        ({"signature": "crash:KeyError"}, "its signature is hang:size all_gather:one-rank, not"),
        ({"options": {"bad": "4.50.0"}}, "its bad is 4.53.2, not 4.50.0; its window is True, not"),
    ],
)
def test_another_bisect_is_refused(tmp_path: Path, change: dict[str, object], words: str) -> None:
    before = written(tmp_path)
    with pytest.raises(UsageError) as refused:
        resume(tmp_path, dataclasses.replace(HEADER, **change))  # type: ignore[arg-type]
    assert words in refused.value.message and "another bisect" in refused.value.message
    assert "moediag bisect expert-starvation" in refused.value.help_text
    assert "--out" in refused.value.help_text
    assert (tmp_path / STATE_FILE).read_bytes() == before
    resume(tmp_path, HEADER).close()  # the lock was given back


def test_what_does_not_matter_is_no_other_bisect(tmp_path: Path) -> None:
    """More releases since then, another spelling of the command, a newer moediag; the file's
    releases are kept. The learned signature may be typed."""
    written(tmp_path)
    wanted = dataclasses.replace(
        HEADER,
        releases=(*RELEASES, "5.0.0"),
        command=("moediag", "bisect", "x", "--jobs", "3"),
        moediag_version="2",
        signature=TARGET.signatures[0],
    )
    with resume(tmp_path, wanted) as state:
        assert state.stored.header.releases == RELEASES


def test_the_command_that_resumes() -> None:
    command = ("moediag", "bisect", "x", "--set", "a=b c", "--resume")
    line = resume_command(command, Path("runs/my bisect"))
    assert shlex.split(line) == [*command[:-1], "--out", "runs/my bisect", "--resume"]
    for out in (["--out", "here"], ["--out=here"]):
        line = resume_command(["moediag", "bisect", "x", *out], Path("here"))
        assert shlex.split(line) == ["moediag", "bisect", "x", *out, "--resume"]
    assert resume_command(shlex.split(line), Path("here")) == line


def test_only_one_at_a_time(tmp_path: Path) -> None:
    state = create(tmp_path, HEADER)
    with pytest.raises(UsageError, match="another moediag is at work"):
        resume(tmp_path, HEADER)
    state.close()
    state.close()
    with pytest.raises(UsageError, match="was begun here"):
        create(tmp_path, HEADER)
    with resume(tmp_path, HEADER) as again:
        assert again.probes == ()
        assert again.resume_command.endswith(f"--out {shlex.quote(str(tmp_path))} --resume")


def test_nothing_to_resume(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no"):
        resume(tmp_path, HEADER)
    with pytest.raises(EvidenceError, match="No such file"):
        read(tmp_path / STATE_FILE)


def test_killed_before_the_first_line_was_whole(tmp_path: Path) -> None:
    for start in (create, resume):
        (tmp_path / STATE_FILE).write_bytes(b'{"e":"header","schema_ver')
        with start(tmp_path, HEADER) as state:
            assert state.stored.header == HEADER
    (tmp_path / STATE_FILE).write_bytes(b"")
    with pytest.raises(EvidenceError, match="before its first line"):
        read(tmp_path)


def test_a_finished_probe_is_recorded_once(tmp_path: Path) -> None:
    with create(tmp_path, HEADER) as state:
        state.finished(RECORDS[0])
        with pytest.raises(ValueError, match=r"4.53.2 was probed before"):
            state.finished(RECORDS[0])
        state.learned(TARGET)
        with pytest.raises(ValueError, match="learned before"):
            state.learned(TARGET)


@pytest.mark.parametrize(
    ("number", "line", "words"),
    [
        (1, '{"e":"probe"}', "the first line must be the header"),
        (1, '{"e":"header","schema_version":9}', "schema_version 9"),
        (3, "not json", "Expecting value"),
        (3, "[1]", "not a JSON object"),
        (3, '{"e":"probe","verdict":{"kind":"bad"}}', "field 'version' is missing"),
        (3, '{"e":"probe","version":"9.9","verdict":{"kind":"bad"}}', "9.9 is none of the"),
        (3, '{"e":"probe","version":"4.40.0","verdict":{"kind":"worse"}}', "worse"),
        (3, '{"e":"probe","version":"4.40.0","verdict":{"kind":"bad"}}', "is there twice"),
        (3, '{"e":"learned","variant":"x"}', "second line"),
    ],
)
def test_a_file_that_was_edited(tmp_path: Path, number: int, line: str, words: str) -> None:
    lines = written(tmp_path).decode().splitlines()
    lines[number - 1] = line
    if words == "is there twice":
        number = 4
    (tmp_path / STATE_FILE).write_text("\n".join(lines) + "\n")
    with pytest.raises(EvidenceError) as problem:
        resume(tmp_path, HEADER)
    assert words in problem.value.message
    assert f"{STATE_FILE}:{number}:" in problem.value.message


def test_lines_of_a_later_moediag_are_left_alone(tmp_path: Path) -> None:
    data = written(tmp_path)
    (tmp_path / STATE_FILE).write_bytes(data + b'{"e":"attribution","of":"4.53.0"}\n')
    assert read(tmp_path).probes == RECORDS


@pytest.mark.parametrize("limit", [0, 1, 40])
def test_a_full_disk_leaves_the_file_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    real = os.write

    def full(fd: int, data: bytes) -> int:
        if limit == 0:
            raise OSError(28, "No space left on device")
        return real(fd, data[:limit])

    with create(tmp_path, HEADER) as state:
        state.finished(RECORDS[0])
        before = state.path.read_bytes()
        monkeypatch.setattr(states.os, "write", full)
        with pytest.raises(EvidenceError, match="cannot be written"):
            state.finished(RECORDS[1])
        monkeypatch.setattr(states.os, "write", real)
        assert state.path.read_bytes() == before
        state.finished(RECORDS[1])
    assert read(tmp_path).probes == RECORDS[:2]


def test_the_file_is_plain_json_lines(tmp_path: Path) -> None:
    kinds = [json.loads(line)["e"] for line in written(tmp_path).splitlines()]
    assert kinds == ["header", "learned", "probe", "probe", "probe", "probe"]
    assert isinstance(create(tmp_path / "other", HEADER), State)


def test_probes_of_something_else_than_a_release_are_kept_by_name(tmp_path: Path) -> None:
    mixed = ProbeRecord("1.1 with the companions of 1.0", BAD, seconds=1.0)
    again = dataclasses.replace(mixed, attempt=2)
    with states.create(tmp_path, HEADER) as state:
        state.finished_extra(mixed)
        state.finished_extra(again)
        assert state.known(mixed.version) == mixed
        assert state.known("1.0") is None
        with pytest.raises(ValueError, match="probed before"):
            state.finished_extra(mixed)
    stored = states.read(tmp_path)
    assert stored.extras == (mixed, again)
    assert stored.probes == ()
