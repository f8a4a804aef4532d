"""A stand-in for moediag itself: launches one victim and waits; tests interrupt or kill it.

``python launch_parent.py KIND VARIANT FOLDER MARK``: MARK is put into the environment of everything
below, so that a test can see what is left. Exit code 130 when interrupted.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

from moediag.errors import MoediagError
from moediag.lab.launch.launcher import launcher
from moediag.launch.settings import LaunchOptions
from moediag.protocol import Trial


def main(kind: str, variant: str, folder: str, mark: str) -> int:
    root = Path(__file__).parent
    stack = SimpleNamespace(python=Path(sys.executable), pythonpath=[root], key="here")
    environment = {
        "MOEDIAG_RANK_MAIN": "launched:main",
        "MOEDIAG_WARM": "launched:warm",
        "MOEDIAG_TEST_MARK": mark,
    }
    options = LaunchOptions(quiescence=300.0, environment=environment)
    trial = Trial(name=variant, scenario="test", variant=variant, timeout=300.0)
    try:
        with launcher(kind, stack, Path(folder), options) as launch:
            record = launch.run(trial, Path(folder) / variant)
    except MoediagError as error:
        return error.exit_code
    return 0 if record.succeeded else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
