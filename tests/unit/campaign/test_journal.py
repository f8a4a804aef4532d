"""The journal, with a bisect's lines: survives a kill at every byte, and is never resumed with
another question."""

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

from moediag.errors import DiskFull, EvidenceError, UsageError
from moediag.lab.campaign.bisect.probe_verdict import BAD, GOOD, other, skip
from moediag.lab.campaign.bisect.search.rates import Rate
from moediag.lab.campaign.bisect.search.search import Options, Probe, Search
from moediag.lab.campaign.bisect.signature_match import Target
from moediag.lab.campaign.bisect.state import create, read, resume
from moediag.lab.campaign.bisect.timeline import ProbeRecord
from moediag.lab.campaign.engine import journal_file
from moediag.lab.campaign.engine.journal import (
    JOURNAL_FILE,
    Header,
    Records,
    opened,
    resume_command,
)
from tests.unit.bisect_worlds import KINDS, drive, history

RELEASES = tuple(f"4.{minor}.{patch}" for minor in range(40, 60) for patch in range(3))
QUESTION = {
    "scenario": "expert-starvation", "package": "transformers", "--match": "exact",
    "bad end": "4.53.2", "good end": None, "window": True, "hold": {},
}  # fmt: skip
HEADER = Header(
    "bisect",
    QUESTION,
    {"the scenario expert-starvation": "abc"},
    {"releases": list(RELEASES)},
    ("moediag", "bisect", "expert-starvation", "--set", "model.family=a b"),
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
    return (folder / JOURNAL_FILE).read_bytes()


def test_journal_round_trips(tmp_path: Path) -> None:
    written(tmp_path)
    stored = read(tmp_path)
    assert (stored.journal.header, stored.target, stored.probes) == (HEADER, TARGET, RECORDS)


def test_a_journal_truncated_at_any_byte_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the last write had reached: every finished line is there, and appending goes on."""
    monkeypatch.setattr(journal_file.os, "fsync", lambda _: None)  # thousands take a minute
    whole = written(tmp_path / "whole")
    ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
    for cut in range(len(whole) + 1):
        folder = tmp_path / "cut"
        folder.mkdir(exist_ok=True)
        (folder / JOURNAL_FILE).write_bytes(whole[:cut])
        # A line is finished with its last brace; the newline after it may be missing.
        finished = sum(end - 1 <= cut for end in ends)
        with resume(folder, HEADER) as state:
            assert state.journal.header == HEADER
            assert (state.target is not None) == (finished >= 2)
            assert state.probes == RECORDS[: max(0, finished - 2)]
            if state.target is None:
                state.learned(TARGET)
            for record in RECORDS[len(state.probes) :]:
                state.finished(record)
        assert (folder / JOURNAL_FILE).read_bytes() == whole


VICTIM = """
import sys
from pathlib import Path
from tests.unit.campaign.test_journal import HEADER, RELEASES
from moediag.lab.campaign.bisect.state import create
from moediag.lab.campaign.bisect.timeline import ProbeRecord
from moediag.lab.campaign.engine import journal_file
from moediag.lab.campaign.engine.journal import JOURNAL_FILE, Header, opened, resume_command
from moediag.lab.campaign.bisect.probe_verdict import GOOD

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
    with resume(tmp_path, HEADER) as state:  # the lock ended with the process
        kept = [record.attempt for record in state.probes]
    assert kept == list(range(1, len(kept) + 1))
    assert len(seen) <= len(kept) <= len(seen) + 1


def test_a_bisect_killed_twenty_times_gives_the_same_answer(tmp_path: Path) -> None:
    """At random moments, torn lines included; no release is probed again after it was recorded."""
    letters = "G" * 14 + "BBSBBOBBBBBBBBBBBBBBBBB" + "G" * 23
    assert len(letters) == len(RELEASES)
    options = Options(30, window=True)
    whole, needed = drive(Search(len(letters), options), history(letters))
    for seed in range(10):
        rng = random.Random(seed)
        folder = tmp_path / str(seed)
        made: list[Probe] = []
        create(folder, HEADER).journal.close()
        for _ in range(20):
            path = folder / JOURNAL_FILE
            with resume(folder, HEADER) as state:
                data = path.read_bytes()
                search = Search(len(letters), options)
                state.tell(search)
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
                lost = grown.count(b"\n") - len(read(folder).probes) - 1
                if lost:
                    del made[-lost:]
        with resume(folder, HEADER) as state:
            search = Search(len(letters), options)
            state.tell(search)
        answer, rest = drive(search, history(letters))
        assert answer == whole
        assert made + rest == needed


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("scenario", "ep-overwrite", "scenario: expert-starvation, not ep-overwrite"),
        ("package", "accelerate", "package: transformers, not accelerate"),
        ("--match", "any", "--match: exact, not any"),
        ("good end", "4.50.0", "good end: not given, not 4.50.0"),
        ("window", False, "window: True, not False"),
        ("hold", {"accelerate": "1.8.1"}, "hold: not given, not {'accelerate': '1.8.1'}"),
    ],
)
def test_another_question_is_refused(tmp_path: Path, name: str, value: object, words: str) -> None:
    before = written(tmp_path)
    with pytest.raises(UsageError) as refused:
        resume(tmp_path, dataclasses.replace(HEADER, question={**QUESTION, name: value}))
    assert words in refused.value.message and "another bisect" in refused.value.message
    assert "To resume that one: moediag bisect expert-starvation" in refused.value.help_text
    assert (tmp_path / JOURNAL_FILE).read_bytes() == before
    resume(tmp_path, HEADER).journal.close()  # the lock was released


def test_another_campaign_or_scenario_file_is_refused(tmp_path: Path) -> None:
    written(tmp_path)
    with pytest.raises(UsageError, match="it is a bisect, not a matrix"):
        resume(tmp_path, dataclasses.replace(HEADER, campaign="matrix"))
    edited = {"the scenario expert-starvation": "def"}
    with pytest.raises(UsageError, match="the scenario expert-starvation was different then"):
        resume(tmp_path, dataclasses.replace(HEADER, digests=edited))


def test_more_columns_extend_the_same_question(tmp_path: Path) -> None:
    """A later command may ask for another column: from then on that one is compared as well."""
    written(tmp_path)
    for _ in range(2):
        resume(tmp_path, dataclasses.replace(HEADER, digests={"another": "1"})).journal.close()
    assert len((tmp_path / JOURNAL_FILE).read_text().splitlines()) == 2 + len(RECORDS) + 1
    with pytest.raises(UsageError, match="another was different then"):
        resume(tmp_path, dataclasses.replace(HEADER, digests={"another": "2"}))


def test_irrelevant_changes_do_not_change_the_question(tmp_path: Path) -> None:
    """More releases since then, another spelling of the command: the journal's releases are kept,
    and the present command is the one to resume with."""
    written(tmp_path)
    wanted = dataclasses.replace(
        HEADER,
        kept={"releases": [*RELEASES, "5.0.0"]},
        command=("moediag", "bisect", "x", "--jobs", "3"),
    )
    with resume(tmp_path, wanted) as state:
        assert state.releases == RELEASES
        assert "bisect x --jobs 3 --out" in state.journal.resume_command


def test_resume_command_is_built() -> None:
    command = ("moediag", "bisect", "x", "--set", "a=b c", "--resume")
    line = resume_command(command, Path("runs/my bisect"))
    assert shlex.split(line) == [*command[:-1], "--out", "runs/my bisect", "--resume"]
    for out in (["--out", "here"], ["--out=here"]):
        line = resume_command(["moediag", "bisect", "x", *out], Path("here"))
        assert shlex.split(line) == ["moediag", "bisect", "x", *out, "--resume"]
    assert resume_command(shlex.split(line), Path("here")) == line


def test_a_journal_in_use_is_refused(tmp_path: Path) -> None:
    state = create(tmp_path, HEADER)
    with pytest.raises(UsageError, match="in use by another moediag"):
        resume(tmp_path, HEADER)
    state.journal.close()
    state.journal.close()
    with pytest.raises(UsageError, match="a bisect was started here"):
        create(tmp_path, HEADER)
    with resume(tmp_path, HEADER) as again:
        assert again.probes == ()
        command = again.journal.resume_command
    assert command.endswith(f"--out {shlex.quote(str(tmp_path))} --resume")


def test_a_journal_of_any_campaign_is_begun_once_and_resumed(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    with opened(HEADER, folder, False, "x") as journal:
        records = Records(journal, "sum", int, int)
        records.add("one", 1)
        assert journal.lines == [{"e": "sum", "name": "one", "value": 1}]
        assert (len(records), dict(records)) == (1, {"one": 1})
    with pytest.raises(UsageError, match="a bisect was started here"):
        opened(HEADER, folder, False, "x")
    with opened(HEADER, folder, True, "x") as journal:  # the lock was released
        assert dict(Records(journal, "sum", int, int)) == {"one": 1}


def test_resume_without_a_journal_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no"):
        resume(tmp_path, HEADER)
    with pytest.raises(EvidenceError, match="No such file"):
        read(tmp_path)
    with pytest.raises(UsageError, match="--resume needs the folder of the bisect"):
        opened(HEADER, None, True, "x")


def test_a_journal_without_a_complete_first_line_is_restarted(tmp_path: Path) -> None:
    for content in (b'{"e":"header","schema_ver', b""):
        (tmp_path / JOURNAL_FILE).write_bytes(content)
        with pytest.raises(EvidenceError, match="before its first line"):
            read(tmp_path)
        with resume(tmp_path, HEADER) as state:
            assert state.journal.header == HEADER
        assert read(tmp_path).journal.header == HEADER


def test_a_finished_probe_is_recorded_once(tmp_path: Path) -> None:
    with create(tmp_path, HEADER) as state:
        state.finished(RECORDS[0])
        with pytest.raises(ValueError, match=r"4.53.2 was finished before"):
            state.finished(RECORDS[0])
        state.learned(TARGET)
        with pytest.raises(ValueError, match="finished before"):
            state.learned(TARGET)


DAMAGED = json.dumps({
    "e": "header", "schema_version": 2, "campaign": "bisect", "question": {}, "digests": "x",
    "kept": {}, "command": [],
})  # fmt: skip


def line_of(name: str, kind: str = "good") -> str:
    value = {"version": name, "verdict": {"kind": kind}}
    return json.dumps({"e": "probe", "name": name, "value": value})


@pytest.mark.parametrize(
    ("number", "line", "words"),
    [
        (1, '{"e":"probe"}', "not a header that this moediag reads"),
        (1, '{"e":"header","schema_version":1}', "schema_version 1, not 2"),
        (1, '{"e":"header","schema_version":2}', "the header is incomplete: 'campaign'"),
        (1, DAMAGED, "the header is incomplete: digests: 'x' is not an object"),
        (3, "not json", "not a JSON object"),
        (3, "[1]", "not a JSON object"),
        (3, '{"a":' * 100_000, "not a JSON object"),
        (3, '{"e":"probe","name":"x","value":{}}', "version is missing"),
        (3, line_of("9.9"), "9.9 is none of the releases"),
        (3, line_of("4.40.0", "worse"), "worse"),
        (4, line_of("4.53.2"), "4.53.2 is there twice"),
        (3, '{"e":"learned","name":"target","value":{}}', "target is there twice"),
    ],
)
def test_an_edited_journal_is_refused(tmp_path: Path, number: int, line: str, words: str) -> None:
    lines = written(tmp_path).decode().splitlines()
    lines[number - 1] = line
    (tmp_path / JOURNAL_FILE).write_text("\n".join(lines) + "\n")
    with pytest.raises(EvidenceError) as problem:
        resume(tmp_path, HEADER)
    assert words in problem.value.message
    assert f"{JOURNAL_FILE}:{number}:" in problem.value.message


def test_lines_of_a_later_moediag_are_ignored(tmp_path: Path) -> None:
    data = written(tmp_path)
    (tmp_path / JOURNAL_FILE).write_bytes(data + b'{"e":"attribution","of":"4.53.0"}\n')
    assert read(tmp_path).probes == RECORDS


@pytest.mark.parametrize("limit", [0, 1, 40])
def test_a_full_disk_leaves_the_journal_valid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    real = os.write

    def full(fd: int, data: bytes) -> int:
        if limit == 0:
            raise OSError(28, "No space left on device")
        return real(fd, data[:limit])

    with create(tmp_path, HEADER) as state:
        state.finished(RECORDS[0])
        before = state.journal.path.read_bytes()
        monkeypatch.setattr(journal_file.os, "write", full)
        with pytest.raises(DiskFull, match="cannot be written") as full_disk:
            state.finished(RECORDS[1])
        monkeypatch.setattr(journal_file.os, "write", real)
        assert full_disk.value.help_text.endswith("--resume")
        assert state.journal.path.read_bytes() == before
        state.finished(RECORDS[1])
    assert read(tmp_path).probes == RECORDS[:2]


def test_the_file_is_plain_json_lines(tmp_path: Path) -> None:
    kinds = [json.loads(line)["e"] for line in written(tmp_path).splitlines()]
    assert kinds == ["header", "learned", "probe", "probe", "probe", "probe"]


def test_probes_of_mixed_environments_are_stored_by_name(tmp_path: Path) -> None:
    mixed = ProbeRecord("1.1 with the companions of 1.0", BAD, seconds=1.0)
    again = dataclasses.replace(mixed, attempt=2)
    with create(tmp_path, HEADER) as state:
        state.finished_extra(mixed)
        state.finished_extra(again)
        assert state.known(mixed.name) == mixed
        assert state.known("1.0") is None
        with pytest.raises(ValueError, match="finished before"):
            state.finished_extra(mixed)
    stored = read(tmp_path)
    assert stored.extras == (mixed, again)
    assert stored.probes == ()
