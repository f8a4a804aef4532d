"""Runs commands of the docs in a pseudo-terminal and writes their pages as docs/assets/NAME.svg.

    .venv/bin/python docs/record.py [NAME …]

A picture has stdout, which is the page; progress and a job's own output go to stderr and are left
out.
"""

import contextlib
import io
import json
import os
import pty
import re
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

from moediag.launch.attach import found_jobs
from moediag.launch.attach.looking import asleep
from moediag.launch.attach.proc import Proc

DOCS = Path(__file__).parent
ASSETS = DOCS / "assets"
WIDTH, HEIGHT = 92, 40
# The order counts: `diagnose` reads what `watch` left.
JOB = "torchrun --nproc-per-node 2 train.py"
COMMANDS = {
    "attach": "moediag attach {pid}",  # of a running JOB
    "watch": "moediag watch --on-hang abort --out job -- " + JOB,
    "diagnose": "moediag diagnose job",
    "run": "moediag run expert-starvation --cpu 2 -v unfixed -v zero-fill -v loops-over-all",
    "check": "moediag check ./Qwen3-30B-A3B --layout dp_shard=512 --stack transformers=4.53.2 "
    "--details",
    "bisect": "moediag bisect expert-starvation --good 4.52.4 --bad 4.53.2 --cpu 2",
    "hunt": "moediag hunt --release 5.23.0 --family zaya,jamba --cpu 2",
}
# What `config.json` of a real model has that its class does not have by default.
MODEL = {"model_type": "qwen3_moe", "num_hidden_layers": 48, "head_dim": 128}


def program() -> str:
    """The tutorial's `train.py`."""
    page = (DOCS / "tutorial.md").read_text(encoding="utf-8")
    return re.findall(r"File `train.py`:\n\n```python\n(.*?)```", page, re.DOTALL)[0]


def environment() -> dict[str, str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    size = {"COLUMNS": str(WIDTH), "LINES": str(HEIGHT)}
    return os.environ | size | {"TERM": "xterm-256color", "OMP_NUM_THREADS": "1", "PATH": path}


@contextlib.contextmanager
def running(folder: Path) -> Iterator[int]:
    """Starts JOB; yields its pid once its ranks have waited for 31 seconds."""
    with subprocess.Popen(
        JOB.split(), cwd=folder, env=environment(), stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:  # fmt: skip
        proc = Proc()
        while True:
            time.sleep(1.0)
            ranks = [one for job in found_jobs.of_process(proc, process.pid) for one in job.ranks]
            if len(ranks) == 2 and all((asleep(proc, one.pid) or 0) > 31 for one in ranks):
                break
        yield process.pid
        process.terminate()


def record(command: str, folder: Path) -> str:
    """Runs a command in a terminal; returns what it writes to stdout."""
    main, terminal = pty.openpty()
    text = f"$ {command}\r\n"
    with subprocess.Popen(
        command.split(), cwd=folder, env=environment(), stdin=subprocess.DEVNULL,
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


def svg(text: str, name: str) -> str:
    """The text with its colours as SVG."""
    console = Console(
        record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, color_system="truecolor"
    )
    console.print(Text.from_ansi(text.replace("\r\n", "\n").rstrip()))
    return console.export_svg(title=f"moediag {name}", theme=MONOKAI, unique_id=name)


def main() -> None:
    wanted = sys.argv[1:] or list(COMMANDS)
    ASSETS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="tutorial-") as place:
        folder = Path(place)
        (folder / "train.py").write_text(program(), encoding="utf-8")
        (folder / "Qwen3-30B-A3B").mkdir()
        (folder / "Qwen3-30B-A3B" / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
        if "diagnose" in wanted and "watch" not in wanted:
            record(COMMANDS["watch"], folder)
        for name in wanted:
            with running(folder) if name == "attach" else contextlib.nullcontext() as pid:
                picture = svg(record(COMMANDS[name].format(pid=pid), folder), name)
            (ASSETS / f"{name}.svg").write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    main()
