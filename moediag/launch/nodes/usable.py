"""Whether a folder can be shared by the nodes of a job."""

from __future__ import annotations

import os
import threading
import uuid
from contextlib import suppress
from pathlib import Path

_ROOM = 1 << 20  # bytes that must fit into the folder before the job starts
_ANSWERS = 15.0  # seconds


def unusable(root: Path) -> str:
    """Why files cannot be written below ``root``, "" if they can. Asks for a limited time: a
    network file system may not answer."""
    found: list[str] = []

    def attempt() -> None:
        path = root / f".moediag-{uuid.uuid4().hex[:16]}"
        try:
            root.mkdir(parents=True, exist_ok=True)
            with path.open("xb") as file:
                file.write(bytes(_ROOM))
                os.fsync(file.fileno())
            found.append("")
        except OSError as error:
            found.append(error.strerror or str(error))
        finally:
            with suppress(OSError):
                path.unlink(missing_ok=True)

    thread = threading.Thread(target=attempt, name="moediag-shared", daemon=True)
    thread.start()
    thread.join(_ANSWERS)
    return found[0] if found else f"does not answer in {_ANSWERS:.0f} s"
