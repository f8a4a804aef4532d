"""Runs `moediag watch` on the tutorial's program and writes its page as docs/assets/watch.svg.

    .venv/bin/python docs/record.py

The command runs in a pseudo-terminal. The picture has its stdout, which is the page; progress and
the job's own output go to stderr and are left out.
"""

import io
import os
import pty
import re
import select
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

DOCS = Path(__file__).parent
ASSETS = DOCS / "assets"
WIDTH, HEIGHT = 92, 40
COMMAND = "moediag watch --on-hang abort -- torchrun --nproc-per-node 2 train.py"


def program() -> str:
    """The tutorial's `train.py`."""
    page = (DOCS / "tutorial.md").read_text(encoding="utf-8")
    return re.findall(r"File `train.py`:\n\n```python\n(.*?)```", page, re.DOTALL)[0]


def record(command: str, folder: Path) -> str:
    """Runs a command in a terminal; returns what it writes to stdout."""
    main, terminal = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(WIDTH)}
    environment |= {"LINES": str(HEIGHT), "OMP_NUM_THREADS": "1"}
    environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    text = f"$ {command}\r\n"
    with subprocess.Popen(
        command.split(), cwd=folder, env=environment, stdin=subprocess.DEVNULL,
        stdout=terminal, stderr=subprocess.DEVNULL,
    ) as process:  # fmt: skip
        os.close(terminal)
        while True:
            if not select.select([main], [], [], 0.2)[0]:
                if process.poll() is not None:
                    return text
                continue
            try:
                text += os.read(main, 65536).decode(errors="replace")
            except OSError:  # the terminal closed
                return text


def svg(text: str) -> str:
    """The text with its colours as SVG."""
    console = Console(
        record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, color_system="truecolor"
    )
    console.print(Text.from_ansi(text.replace("\r\n", "\n").rstrip()))
    return console.export_svg(title="moediag watch", theme=MONOKAI, unique_id="watch")


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="tutorial-") as name:
        folder = Path(name)
        (folder / "train.py").write_text(program(), encoding="utf-8")
        text = record(COMMAND, folder)
    ASSETS.mkdir(exist_ok=True)
    (ASSETS / "watch.svg").write_text(svg(text), encoding="utf-8")


if __name__ == "__main__":
    main()
