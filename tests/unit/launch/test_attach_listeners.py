"""What answers in a running job: the Flight Recorder through its pipe, torch's debug server, and
faulthandler on a signal."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from moediag.evidence import looks
from moediag.evidence.looks import Looks, RankLook
from moediag.launch.attach import debug_server, listeners, signal_dump, spy
from moediag.launch.attach.looking import Target
from moediag.launch.attach.proc import Proc
from moediag.launch.processes import Process
from tests.unit.launch import test_attach_jobs as processes


@pytest.fixture
def capture(tmp_path: Path) -> Path:
    made = tmp_path / "capture"
    made.mkdir()
    return made


def machine(root: Path, **variables: str) -> tuple[Proc, Target]:
    """A /proc in which this process has ``variables``."""
    folder = root / "proc" / str(os.getpid())
    folder.mkdir(parents=True)
    (folder / "root").symlink_to("/")
    (folder / "maps").write_text("")
    (folder / "environ").write_text("".join(f"{k}={v}\0" for k, v in variables.items()))
    return Proc(root / "proc"), Target(3, Process.of(os.getpid()))


def variables(root: Path) -> dict[str, str]:
    return {listeners.PIPES[0]: f"{root}/pipe-", listeners.DUMPS[0]: f"{root}/dump-"}


def test_a_dump_is_asked_for_and_kept(tmp_path: Path, capture: Path) -> None:
    proc, target = machine(tmp_path, **variables(tmp_path))
    os.mkfifo(tmp_path / "pipe-3.pipe")
    reader = os.open(tmp_path / "pipe-3.pipe", os.O_RDWR)  # waits for a writer

    def monitor() -> None:
        assert os.read(reader, 8) == b"1\n"
        (tmp_path / "dump-3").write_bytes(b"a dump")

    thread = threading.Thread(target=monitor)
    thread.start()
    try:
        assert listeners.ask(tmp_path, capture, [target], proc) == []
    finally:
        thread.join()
        os.close(reader)
    assert (capture / "rank-3.flight").read_bytes() == b"a dump"


def test_a_pipe_that_nobody_reads(tmp_path: Path, capture: Path) -> None:
    proc, target = machine(tmp_path, **variables(tmp_path))
    os.mkfifo(tmp_path / "pipe-3.pipe")
    assert listeners.ask(tmp_path, capture, [target], proc) == [
        "rank 3: Flight Recorder (the rank did not answer)"
    ]


@pytest.mark.parametrize(("written", "kept"), [(True, True), (False, False)])
def test_a_dump_that_the_watchdog_wrote(
    written: bool, kept: bool, tmp_path: Path, capture: Path
) -> None:
    """One of an earlier job at the same path is not taken."""
    proc, target = machine(tmp_path, **variables(tmp_path))
    (tmp_path / "dump-3").write_bytes(b"a dump")
    if not written:
        os.utime(tmp_path / "dump-3", (1.0, 1.0))
    listeners.ask(tmp_path, capture, [target], proc)
    assert (capture / "rank-3.flight").exists() == kept


def test_a_job_without_nccl_lacks_nothing(tmp_path: Path, capture: Path) -> None:
    proc, target = machine(tmp_path)
    assert listeners.ask(tmp_path, capture, [target], proc) == []
    assert not [*capture.iterdir()]


# ------------------------------------------------------------------------ torch's debug server

PAGE = """
<h2>Rank 0: http://vm:40437/handler/fr_trace_json?</h2> <pre>{&#34;entries&#34;: [{&#34;op_id&#34;: 1}]}</pre>
<h2>Rank 1: http://vm:40039/handler/fr_trace_json?</h2> <p>Failed to fetch: status=503</p>
<h2>Rank 2: http://vm:40040/handler/fr_trace_json?</h2> <pre>{&#34;entries&#34;: []}</pre>
"""  # noqa: E501
# What no rank sent.
PAGE += f"<h2>Rank {'9' * 5000}: x</h2><pre>{{&#34;entries&#34;: [1]}}</pre>"
PAGE += f"<h2>Rank 3: x</h2><pre>{'[' * 100_000}</pre>"


def test_dumps_of_the_debug_server(
    capture: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/fr_trace_json" else 404)
            self.end_headers()
            self.wfile.write(PAGE.encode())

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        monkeypatch.setattr(debug_server, "find", lambda *_: server.server_port)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        assert debug_server.ask(capture, [7], Proc(tmp_path)) == []
        server.shutdown()
    assert [path.name for path in capture.iterdir()] == ["rank-0.flight"]
    assert (capture / "rank-0.flight").read_text() == '{"entries": [{"op_id": 1}]}'
    (text,) = debug_server.ask(capture, [7], Proc(tmp_path))  # it is gone
    assert "torch's debug server at port" in text


@pytest.mark.parametrize(
    ("file", "there", "port"),
    [
        ("/v/torch/distributed/debug/_frontend.py", "net:[1]", 0x658F),
        ("/home/me/serve.py", "net:[1]", None),  # somebody else's server
        ("/v/torch/distributed/debug/_frontend.py", "net:[2]", None),  # in a container
    ],
)
def test_only_the_debug_server_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, there: str, port: int | None
) -> None:
    """Its process has the sockets of its rank as well, which must not be touched."""
    found = processes.Machine(tmp_path)
    found.add(10, 1, uid=os.getuid())
    found.add(11, 10, uid=os.getuid())
    for pid in (10, 11):
        (tmp_path / str(pid) / "ns").mkdir()
        (tmp_path / str(pid) / "ns" / "net").symlink_to(there)
        processes.connect(found, pid, 5, ("00000000:7530", "00000000:0000"), state="0A")
    processes.connect(found, 11, 6, ("00000000:658F", "00000000:0000"), state="0A")
    (tmp_path / str(os.getpid()) / "ns").mkdir(parents=True)
    (tmp_path / str(os.getpid()) / "ns" / "net").symlink_to("net:[1]")
    stack = json.dumps([{"thread_name": "MainThread", "frames": [{"filename": file}]}])
    monkeypatch.setattr(spy, "dump", lambda *_, **__: spy.Dump(stack.encode()))
    assert debug_server.find([10], found.proc) == port


# ------------------------------------------------------------------------ stacks on a signal

SERVES = """\
import faulthandler, os, signal, sys
faulthandler.register(signal.SIGUSR1)
def all_reduce():
    print(flush=True)
    sys.stdin.readline()
exec(compile("def train():\\n    all_reduce()\\ntrain()", "/x/torch/distributed/c10d.py", "exec"))
"""


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Target]:
    """A process that has registered faulthandler, with a log as standard error."""
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", SERVES], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=log, text=True,
        )  # fmt: skip
        assert process.stdout is not None
        log.write("before\n")
        log.flush()
        process.stdout.readline()
        yield Target(0, Process.of(process.pid))
        process.communicate("\n")
        assert process.returncode == 0


def test_stacks_that_a_rank_writes_itself(tmp_path: Path, rank: Target) -> None:
    assert signal_dump.ask(tmp_path, [rank], signal.SIGUSR1, Proc()) == []
    text = (tmp_path / "rank-0.stacks.txt").read_text()
    assert "all_reduce" in text and "before" not in text
    seen = Looks(4.0, 3.0, {0: RankLook(1, looks.UNREAD, 9.0)}, 1)
    assert signal_dump.waiting(seen, tmp_path).ranks[0].does == looks.WAITS
    assert signal_dump.waiting(seen, tmp_path / "none").ranks[0].does == looks.UNREAD


def test_a_rank_without_a_handler_gets_no_signal(tmp_path: Path, rank: Target) -> None:
    assert signal_dump.ask(tmp_path, [rank], signal.SIGUSR2, Proc()) == [
        "rank 0: stacks on SIGUSR2 (not sent: it has no handler)"
    ]
    gone = Target(1, Process(1 << 22, 1))
    assert signal_dump.ask(tmp_path, [gone], signal.SIGUSR1, Proc()) == [
        "rank 1: stacks on SIGUSR1 (it is stopped or gone)"
    ]


@pytest.mark.parametrize(
    ("does", "quiet"),
    [
        (RankLook(1, looks.UNREAD, 40.0), True),
        (RankLook(1, looks.WAITS, 40.0), True),
        (RankLook(1, looks.UNREAD, 4.0), False),
        (RankLook(1, looks.UNREAD, 0.0), False),  # it uses a CPU
        (RankLook(1, looks.WORKS), False),
    ],
)
def test_a_signal_is_sent_only_where_all_ranks_sleep(does: RankLook, quiet: bool) -> None:
    waits = RankLook(2, looks.WAITS, 40.0)
    assert Looks(4.0, 30.0, {0: waits, 1: does}, 2).quiet == quiet
