"""Notifications, sent to a server of this test."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from moediag.errors import UsageError
from moediag.masking import masked_command
from moediag.pipeline.examine import examine
from moediag.report import notify
from moediag.report.notify import Message, Notifier
from moediag.result.answer_blocks import Answer, AnswerState, Case
from tests.unit.pipeline.test_attach import BOTH, evidence

TOLD = Message(
    "moediag: hang in train.py: rank 3", ("rank 3: train.py:9, api_key=sk-0123456789abcdef0123",),
    "/runs/1", {"verdict": "hang"},
)  # fmt: skip


class Server:
    """An endpoint that answers with ``code``."""

    def __init__(self) -> None:
        self.code = 200
        self.got: list[dict[str, object]] = []
        self.url = ""


@pytest.fixture
def server() -> Iterator[Server]:
    told = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            told.got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(told.code)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as running:
        told.url = f"http://127.0.0.1:{running.server_port}/services/SECRET"
        threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True).start()
        yield told
        running.shutdown()


def test_a_failure_is_reported_once(server: Server) -> None:
    notifier = Notifier(server.url)
    for failure in ("attempt-0 hang", "attempt-0 hang", "attempt-1 hang"):
        notifier.send(failure, TOLD)
    assert notifier.finish() == []
    assert len(server.got) == 2
    text = str(server.got[0]["text"])
    assert text.startswith("moediag: hang in train.py: rank 3\nrank 3: train.py:9")
    assert "moediag report /runs/1" in text
    assert "sk-0123" not in str(server.got)
    assert server.got[0]["verdict"] == "hang"


def test_not_more_than_so_many(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notify, "MOST", 2)
    notifier = Notifier(server.url)
    for number in range(5):
        notifier.send(str(number), TOLD)
    assert notifier.finish() == []
    assert len(server.got) == 2


def test_an_endpoint_that_fails(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    server.code = 404
    notifier = Notifier(server.url)
    notifier.send("a", TOLD)
    assert notifier.finish() == ["the notification to 127.0.0.1 was not sent (HTTP 404)"]
    assert len(server.got) == notify.ATTEMPTS
    monkeypatch.setattr(notify, "SECONDS", 0.05)
    nobody = Notifier("http://127.0.0.1:9/SECRET")
    nobody.send("a", TOLD)
    (why,) = nobody.finish()
    assert "SECRET" not in why and "Connection refused" in why


@pytest.mark.parametrize(
    ("host", "keys"),
    [
        ("hooks.slack.com", {"text"}),
        ("discord.com", {"content", "allowed_mentions"}),
        ("prod-1.westeurope.logic.azure.com", {"type", "attachments"}),
        ("example.org", {"text", "title", "page", "host", "verdict"}),
    ],
)
def test_each_service_gets_what_it_takes(host: str, keys: set[str]) -> None:
    found = notify.body(host, TOLD)
    assert found.keys() == keys
    assert "rank 3: train.py:9" in json.dumps(found)


@pytest.mark.parametrize("url", ["", "hooks.slack.com/x", "https:///x"])
def test_no_url(url: str) -> None:
    with pytest.raises(UsageError, match="not a URL"):
        Notifier(url)


def test_other_services_need_apprise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(UsageError, match="slack://…: only http and https") as error:
        Notifier("slack://SECRET/token")
    assert "SECRET" not in str(error.value)


def test_what_is_told_of_a_job(tmp_path: Path) -> None:
    found = examine([evidence(tmp_path, BOTH)]).result
    told = notify.of_result(found, tmp_path)
    assert told.text.splitlines() == [
        "moediag: hang in train.py: rank 0",
        "rank 0: train.py:3 <module>, waits in all_gather, under `if rank == 0` at train.py:2",
        "rank 1: train.py:4 <module>, waits in barrier",
        "Next: Make the call at train.py:3 on all ranks of its group, or on none.",
        told.text.splitlines()[-1],
    ]
    assert told.fields["culprits"] == [0]


def test_what_is_told_of_a_night(tmp_path: Path) -> None:
    cases = [Case(f"s{n}", "newest", AnswerState.FAILURE, "hang") for n in range(7)]
    cases.append(Case("fine", "newest", AnswerState.AS_EXPECTED))
    page = Answer("nightly", "", AnswerState.FAILURE, "7 new failures", cases=tuple(cases))
    told = notify.of_answer(page, tmp_path)
    assert told.title == "moediag nightly: failure found: 7 new failures"
    assert told.lines[0] == "newest s0: hang"
    assert told.lines[-1] == "and 2 more"


def test_the_url_is_a_secret() -> None:
    words = ("moediag", "watch", "--notify", "https://example.org/SECRET", "--", "train.py")
    for given in (words, (*words[:2], f"--notify={words[3]}", *words[4:])):
        assert "SECRET" not in str(masked_command(given))
