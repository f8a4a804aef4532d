"""Relays messages between the watchers of a job through the job's own rendezvous store.

If nodes share no folder, a watcher starts this script in a separate process with the job's Python,
so that an unresponsive store blocks this process and no rank. It is one more client of the store,
with its own keys, and mirrors a folder on each node: it sends the watcher's part and writes the
parts of the others. It imports only the standard library and torch, because it runs as a script.

    relay.py HOST PORT JOB KEY FOLDER PARENT PULSE_FILE WANT_FILE LINK_FILE
"""

from __future__ import annotations

import base64
import ctypes
import datetime
import json
import os
import re
import signal
import sys
import time
import zlib
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

PERIOD = 0.4  # seconds between two exchanges
ANSWER = 10.0  # timeout of the store in seconds
CHUNK = 512 * 1024  # characters per value
MOST_CHARACTERS = 8 * 1024 * 1024  # per node's evidence, compressed: the store keeps it
MOST_BYTES = 256 * 1024 * 1024  # received from one node
MOST_NODES = 4096
MOST_PULSE = 16 * 1024 * 1024  # characters
MOST_CHUNKS = 100_000
_NAME = re.compile(r"(?:capture/)?[A-Za-z0-9_-][A-Za-z0-9_.-]{0,100}")
_KEY = re.compile(r"[0-9a-f]{8,64}")
# The smallest and most useful files first; those that do not fit are omitted.
_LAST = (".events.jsonl", ".flight.json", ".native.txt", ".pystack.txt", ".older.jsonl", ".log")
# What a value that no relay wrote leads to. An error of the store is a RuntimeError.
_NO_MESSAGE = (
    ValueError, TypeError, AttributeError, OverflowError, RecursionError, OSError, zlib.error,
)  # fmt: skip


class Names(NamedTuple):
    """Names of files, as moediag.protocol spells them for the watcher."""

    pulse: str
    want: str
    link: str


class Relay:
    """``store``: anything with set, get, check and add of torch's stores. ``own``: key of the
    watcher, whose part of ``folder`` is sent."""

    def __init__(self, store: Any, job: str, own: str, folder: Path, names: Names) -> None:
        self._names = names
        self._store = store
        self._prefix = f"moediag/{job}/"
        self._own = own
        self._folder = folder
        self._turns = 0
        self._keys: Dict[int, str] = {}  # by order of arrival
        self._sent = 0
        self._came: Dict[str, int] = {}  # node -> received evidence version
        self._said = ""
        self._refused: Dict[str, str] = {}  # node -> why its last message was not taken
        self._joined = False

    def turn(self) -> None:
        """Sends what is new here, receives what is new elsewhere. Raises what the store raises."""
        if not self._joined:
            self._set(f"node/{self._store.add(self._prefix + 'nodes', 1)}", self._own)
            self._joined = True
        self._send()
        count = min(int(self._store.add(self._prefix + "nodes", 0)), MOST_NODES)
        for number in set(range(1, count + 1)) - self._keys.keys():
            try:
                key = self._get(f"node/{number}")
            except ValueError:
                continue
            if key is not None and _KEY.fullmatch(key):
                self._keys[number] = key
        for key in set(self._keys.values()) - {self._own}:
            try:
                self._receive(key)
                self._refused.pop(key, None)
            except _NO_MESSAGE as error:
                self._refused[key] = f"{type(error).__name__}: {error}"[:200]
        self._turns += 1
        link = {"turns": self._turns, "refused": self._refused}
        _write(self._folder / self._names.link, json.dumps(link).encode())

    def _send(self) -> None:
        mine = self._folder / self._own
        try:
            text = (mine / self._names.pulse).read_text(encoding="utf-8")
        except OSError:
            return
        number = int(json.loads(text).get("published", 0))
        if number > self._sent:  # before the pulse that announces it
            chunks = pack(mine / f"evidence-{number}")
            for at, chunk in enumerate(chunks):
                self._set(f"evidence/{self._own}/{number}/{at}", chunk)
            self._set(f"evidence/{self._own}/{number}", str(len(chunks)))
            self._sent = number
        if text != self._said:
            self._set(f"pulse/{self._own}", text)
            self._said = text

    def _receive(self, key: str) -> None:
        text = self._get(f"pulse/{key}")
        if text is None:
            return
        place = self._folder / key
        place.mkdir(parents=True, exist_ok=True)
        if len(text) > MOST_PULSE:
            raise ValueError("too large")
        pulse = json.loads(text)
        number = int(pulse.get("published", 0))
        wanted = (self._folder / self._own / self._names.want).exists()
        if wanted and number > self._came.get(key, 0):
            count = int(self._get(f"evidence/{key}/{number}") or 0)
            if count > MOST_CHUNKS:
                raise ValueError(f"{count} pieces of evidence")
            chunks, room = [], 2 * MOST_CHARACTERS
            for at in range(count):
                chunk = self._get(f"evidence/{key}/{number}/{at}") or ""
                room -= len(chunk)
                if room < 0:
                    raise ValueError("too much evidence")
                chunks.append(chunk)
            unpack([chunk for chunk in chunks if chunk], place / f"evidence-{number}")
            self._came[key] = number
        pulse["published"] = self._came.get(key, 0)  # the watcher fetches from here
        _write(place / self._names.pulse, json.dumps(pulse).encode())

    def _set(self, name: str, text: str) -> None:
        self._store.set(self._prefix + name, text)

    def _get(self, name: str) -> Optional[str]:
        """Returns the value, or None if the key is missing: a plain get would wait for it."""
        if not self._store.check([self._prefix + name]):
            return None
        return str(self._store.get(self._prefix + name).decode("utf-8"))


def pack(place: Path) -> List[str]:
    """Returns a folder of evidence as texts, most useful first, at most MOST_CHARACTERS."""
    paths = [path for path in place.rglob("*") if path.is_file()] if place.is_dir() else []
    chunks: List[str] = []
    room = MOST_CHARACTERS
    for name, path in sorted(((p.relative_to(place).as_posix(), p) for p in paths), key=_rank):
        body = base64.b64encode(zlib.compress(path.read_bytes(), 6)).decode("ascii")
        if len(body) <= room:
            room -= len(body)
            pieces = range(0, max(len(body), 1), CHUNK)
            chunks += [json.dumps([name, body[at : at + CHUNK]]) for at in pieces]
    return chunks


def unpack(chunks: List[str], place: Path) -> None:
    """Writes what :func:`pack` made; skips names that lead outside ``place``."""
    place.mkdir(parents=True, exist_ok=True)
    bodies: Dict[str, List[str]] = {}
    for chunk in chunks:
        name, body = json.loads(chunk)
        bodies.setdefault(str(name), []).append(str(body))
    room = MOST_BYTES
    for name, parts in bodies.items():
        if not _NAME.fullmatch(name):
            continue
        data = zlib.decompressobj().decompress(
            base64.b64decode("".join(parts), validate=True), room + 1
        )
        if len(data) <= room:
            room -= len(data)
            (place / name).parent.mkdir(exist_ok=True)
            _write(place / name, data)


def _rank(found: Tuple[str, Path]) -> Tuple[int, str]:
    name = found[0]
    return next((n for n, end in enumerate(_LAST, 1) if name.endswith(end)), 0), name


def _write(path: Path, data: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_bytes(data)
    temporary.replace(path)


def _end_with(parent: int) -> None:
    """Makes the kernel end this process with the watcher."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(0)


def main() -> None:
    host, port, job, own, folder, parent, *names = sys.argv[1:]
    _end_with(int(parent))
    os.nice(10)
    # Files beside this one must not be imported as modules of the same name.
    here = Path(__file__).resolve().parent
    sys.path[:] = [path for path in sys.path if Path(path).resolve() != here]
    from torch.distributed import TCPStore

    limit = datetime.timedelta(seconds=ANSWER)
    store = TCPStore(host, int(port), None, False, timeout=limit, wait_for_workers=False)
    relay = Relay(store, job, own, Path(folder), Names(*names))
    while os.getppid() == int(parent):
        relay.turn()
        time.sleep(PERIOD)


if __name__ == "__main__":
    main()
