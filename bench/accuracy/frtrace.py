"""Runs torchfrtrace on many folders, read from stdin, in one process, because the import of torch
is nearly all of the command's time. Answers on stdout."""

from __future__ import annotations

import gc
import io
import json
import logging
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench.accuracy import others
from bench.accuracy.counting import Answer

ROOT = Path(__file__).parents[2]


class TorchFrTrace:
    """``with TorchFrTrace() as tool: tool.answer(folder)``."""

    def __enter__(self) -> TorchFrTrace:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.accuracy.frtrace"], cwd=ROOT, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        return self

    def __exit__(self, *_: object) -> None:
        self._process.__exit__(None, None, None)  # closes its input, which ends it, and waits

    def run(self, folder: Path, *, incomplete: bool = False) -> dict[str, Any]:
        """Returns ``text``, ``error`` and CPU ``seconds`` of one analysis, without the import."""
        assert self._process.stdin is not None and self._process.stdout is not None
        question = {"folder": str(folder), "incomplete": incomplete}
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("torchfrtrace's process ended")
        found: dict[str, Any] = json.loads(line)
        return found

    def answer(self, folder: Path, *, incomplete: bool = False, has_lines: bool = True) -> Answer:
        """Returns the answer; ``incomplete`` passes the option for missing ranks."""
        found = self.run(folder, incomplete=incomplete)
        return others.torchfrtrace(found["text"], found["error"], has_lines=has_lines)


def serve() -> None:
    from torch.distributed.flight_recorder import fr_trace

    log, said = logging.getLogger("Flight Recorder"), io.StringIO()
    log.handlers = [logging.StreamHandler(said)]
    for line in sys.stdin:
        question = json.loads(line)
        said.seek(0)
        said.truncate()
        options = ["--allow-incomplete-ranks"] if question["incomplete"] else []
        error, began = "", time.process_time()
        try:
            fr_trace.main([question["folder"], *options])
        except (Exception, SystemExit) as raised:
            error = f"{type(raised).__name__}: {raised}"
        seconds = time.process_time() - began
        gc.enable()  # it turns it off for good
        print(  # noqa: T201
            json.dumps({"text": said.getvalue(), "error": error, "seconds": seconds}), flush=True
        )


if __name__ == "__main__":
    serve()
