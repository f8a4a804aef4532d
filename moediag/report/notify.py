"""Sends a few lines about a failure to a webhook: Slack, Discord, Teams, or any server that accepts
JSON; other services through apprise, if it is installed (``pip install 'moediag[notify]'``).

Messages are sent from their own threads with time limits, so an endpoint that fails or hangs does
not affect the run. Errors name only the host: the rest of such a URL is a secret.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from moediag.errors import UsageError
from moediag.masking import masked
from moediag.records import dataclass
from moediag.report.finding import finding_of
from moediag.result import RunResult, wording
from moediag.result.answer_blocks import Answer, AnswerState

SECONDS = 10.0  # for one attempt
ATTEMPTS = 2
MOST = 20  # messages of one run: a job that restarts for ever must not fill a channel
_LONGEST = 1500  # characters: Discord takes 2,000
_PLACES, _CASES = 3, 5  # lines
_TEAMS = (".webhook.office.com", ".logic.azure.com", ".powerplatform.com")


@dataclass(frozen=True, slots=True)
class Message:
    """The notification about one failure."""

    title: str
    """``hang in train.py: rank 3``."""
    lines: tuple[str, ...]
    page: str
    """The run directory."""
    fields: Mapping[str, Any]
    """For programs: verdict, ranks, cause, next step."""

    @property
    def text(self) -> str:
        said = [self.title, *self.lines]
        where = f"Page: moediag report {self.page} (on {socket.gethostname()})"
        return masked("\n".join(said))[: _LONGEST - len(where)] + f"\n{where}"


def of_result(result: RunResult, folder: Path) -> Message:
    """Returns the message about the last trial of ``result``, whose run directory is ``folder``."""
    job, found = masked(result.scenario), result.trials[-1]
    shown = finding_of([found], result)
    who = f": {wording.ranks(found.culprits)}" if found.culprits else ""
    lines = [*shown.places[:_PLACES]] or [found.cause.partition(". ")[0]]
    lines += [f"Next: {found.diagnosis.next_step}"] if found.diagnosis.next_step else []
    fields = {"verdict": found.verdict, "job": job, "culprits": list(found.culprits),
              "places": [masked(one) for one in shown.places], "cause": masked(found.cause),
              "next_step": masked(found.diagnosis.next_step)}  # fmt: skip
    return Message(f"moediag: {found.verdict} in {job}{who}", tuple(lines), str(folder), fields)


def of_answer(page: Answer, folder: Path) -> Message:
    """Returns the message about the answer of a command with many runs."""
    failed = [one for one in page.cases if one.state is AnswerState.FAILURE]
    lines = [f"{one.group} {one.name}: {one.message}" for one in failed[:_CASES]]
    lines += [f"and {len(failed) - _CASES} more"] if len(failed) > _CASES else []
    fields = {"verdict": str(page.state), "failed": [f"{one.group} {one.name}" for one in failed]}
    return Message(f"moediag {page.command}: {page.sentence}", tuple(lines), str(folder), fields)


class Notifier:
    """Sends messages to ``url``, one for each failure. Raises UsageError if the URL is unusable."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self.url = url
        self.host = parts.hostname or parts.scheme
        self.web = parts.scheme in ("http", "https")
        if not parts.scheme or (self.web and not parts.hostname):
            raise UsageError("--notify: not a URL", "Example: --notify https://hooks.slack.com/…")
        if not self.web and importlib.util.find_spec("apprise") is None:
            raise UsageError(
                f"--notify {parts.scheme}://…: only http and https without apprise",
                "Type: pip install 'moediag[notify]'",
            )
        if not self.web and not _apprise(url):
            raise UsageError(f"--notify {parts.scheme}://…: apprise does not take this URL")
        self.lost: list[str] = []
        """Why messages were not sent."""
        self._sent: set[str] = set()
        self._threads: list[threading.Thread] = []

    def send(self, failure: str, message: Message) -> None:
        """Starts to send ``message``, unless one was sent for the same ``failure``."""
        if failure in self._sent or len(self._sent) >= MOST:
            return
        self._sent.add(failure)
        thread = threading.Thread(target=self._deliver, args=(message,), name="moediag-notify")
        thread.daemon = True
        thread.start()
        self._threads.append(thread)

    def finish(self) -> list[str]:
        """Waits a limited time for pending messages. Returns why others were not sent."""
        for thread in self._threads:
            thread.join(SECONDS * ATTEMPTS + 1.0)
            if thread.is_alive():
                self.lost.append("the server does not answer")
        return [f"the notification to {self.host} was not sent ({why})" for why in self.lost]

    def _deliver(self, message: Message) -> None:
        why = ""
        for _ in range(ATTEMPTS):
            try:
                if self.web:
                    _post(self.url, body(self.host, message))
                elif not _apprise(self.url).notify(title=message.title, body=message.text):
                    raise OSError(0, "the service refused it")
            except urllib.error.HTTPError as error:
                why = f"HTTP {error.code}"
            except (OSError, ValueError) as error:
                reason = getattr(error, "reason", error)
                why = str(getattr(reason, "strerror", None) or type(reason).__name__)
            except Exception as error:
                why = type(error).__name__
            else:
                return
        self.lost.append(why)


def body(host: str, message: Message) -> dict[str, Any]:
    """Returns the JSON that the service at ``host`` accepts."""
    if host == "hooks.slack.com":
        return {"text": message.text}
    if host in ("discord.com", "discordapp.com"):
        return {"content": message.text, "allowed_mentions": {"parse": []}}
    if host.endswith(_TEAMS):
        block = {"type": "TextBlock", "text": message.text.replace("\n", "\n\n"), "wrap": True}
        card = {"type": "AdaptiveCard", "version": "1.4", "body": [block]}
        kind = "application/vnd.microsoft.card.adaptive"
        return {"type": "message", "attachments": [{"contentType": kind, "content": card}]}
    named = {"title": message.title, "page": message.page, "host": socket.gethostname()}
    return {"text": message.text, **named, **message.fields}


def _post(url: str, content: Mapping[str, Any]) -> None:
    request = urllib.request.Request(  # noqa: S310 - http or https, checked above
        url, json.dumps(content).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=SECONDS):  # noqa: S310
        pass


def _apprise(url: str) -> Any:
    """The service at ``url``; false if it is unknown."""
    found = importlib.import_module("apprise").Apprise()
    found.add(url)
    return found
