"""The folder of nights: one JSON file each. Files of earlier nights are read, never written."""

from __future__ import annotations

import json
from pathlib import Path

from moediag.errors import UsageError, says_disk_full
from moediag.lab.campaign.nightly.night import Night, from_json
from moediag.protocol import read_json, write_json


class History:
    """Creates ``folder``. ``unreadable``: files that were ignored, each with the reason."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            paths = sorted(folder.glob("*.json"))
        except OSError as error:
            if says_disk_full(error):
                raise
            raise UsageError(
                f"--history {folder}: {error.strerror or error}",
                "Give a folder that can be made; the nights before are kept there.",
            ) from error
        self.nights: list[Night] = []
        self.unreadable: list[str] = []
        for path in paths:
            try:
                self.nights.append(from_json(read_json(path)))
            except (OSError, ValueError) as error:
                self.unreadable.append(f"{path.name}: {error}")

    def begin(self, started: str, lane: str) -> Path:
        """Creates the new night's file, empty until the first :meth:`keep`, to reserve it."""
        stamp = started.replace("-", "").replace(":", "").split("+")[0]
        number = 1
        while True:
            path = self.folder / f"{stamp}-{lane}{'' if number == 1 else f'-{number}'}.json"
            try:
                with path.open("x", encoding="utf-8") as new:
                    # Treated as complete: a killed night must not look like a broken file.
                    json.dump(Night(started, lane, "", {}).to_json(), new)
            except FileExistsError:
                number += 1
            else:
                return path

    @staticmethod
    def keep(path: Path, night: Night) -> None:
        write_json(path, night.to_json())
