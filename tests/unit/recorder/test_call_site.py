"""Where a call comes from: the innermost line, and the user's lines around it."""

from __future__ import annotations

import _thread
import json
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from moediag.recorder import call_site, user_lines
from moediag.recorder.call_site import CallSites
from moediag.recorder.user_lines import UserLines


class Log:
    def __init__(self) -> None:
        self.lists: list[tuple[str, ...]] = []
        self.files: list[str] = []

    def event(self, kind: str, keep: bool, path: str) -> None:
        assert (kind, keep) == ("file", True)
        self.files.append(path)

    def names(self, lines: tuple[str, ...]) -> str:
        if lines not in self.lists:
            self.lists.append(lines)
        return str(self.lists.index(lines))


def program(folder: Path, name: str, text: str, **names: Any) -> dict[str, Any]:
    """The functions of a file called ``name`` in ``folder``."""
    found = dict(names)
    exec(compile(text, str(folder / name), "exec"), found)
    return found


@pytest.fixture
def sites(monkeypatch: pytest.MonkeyPatch) -> tuple[CallSites, Log]:
    monkeypatch.setattr(user_lines, "library_folders", lambda: ["/lib"])
    log = Log()
    return CallSites(log, UserLines(log)), log  # type: ignore[arg-type]


def here(sites: CallSites) -> Any:
    return lambda: json.loads("{" + sites.fields(sys._getframe(1)) + "}")


MODEL = "def forward():\n    return call()\n"
TRAIN = "def train():\n    return forward()\ndef evaluate():\n    return forward()\n"
MAIN = "def main(what):\n    return what()\n"


def test_training_and_evaluation_share_a_line_but_not_the_lines_around_it(
    sites: tuple[CallSites, Log],
) -> None:
    where, log = sites
    model = program(Path("/me"), "model.py", MODEL, call=here(where))
    train = program(Path("/me"), "train.py", TRAIN, forward=model["forward"])
    main = program(Path("/me"), "main.py", MAIN)["main"]
    one, other, again = (main(train[name]) for name in ("train", "evaluate", "train"))
    assert one["site"] == other["site"] == "model.py:2 forward"
    assert [path for path in log.files if path.startswith("/me/")] == [
        "/me/model.py", "/me/train.py", "/me/main.py"
    ]  # fmt: skip
    assert log.lists[one["callers"]][:2] == ("train.py:2 train", "main.py:2 main")
    assert log.lists[other["callers"]][:2] == ("train.py:4 evaluate", "main.py:2 main")
    assert len(log.lists[one["callers"]]) == 3
    assert again == one and len(log.lists) == 2
    assert log.files[:3] == ["/me/model.py", "/me/train.py", "/me/main.py"]
    assert len(set(log.files)) == len(log.files)


def test_frames_of_libraries_are_no_callers(sites: tuple[CallSites, Log]) -> None:
    where, log = sites
    gather = program(Path("/lib/accelerate"), "operations.py", MODEL, call=here(where))["forward"]
    wrapped = program(Path("/lib/accelerate"), "utils.py", MAIN)["main"]
    train = program(Path("/me"), "train.py", TRAIN, forward=lambda: wrapped(gather))["train"]
    found = train()
    assert found["site"] == "operations.py:2 forward"
    callers = log.lists[found["callers"]]
    assert not any("/lib" in path for path in log.files)
    assert "train.py:2 train" in callers and not any("utils.py" in line for line in callers)


@pytest.mark.parametrize(
    ("layer", "site"),
    [
        ("/lib/deepspeed/comm/torch.py", "train.py:2 train"),
        ("/lib/deepspeed/utils/nvtx.py", "train.py:2 train"),
        ("/lib/deepspeed/runtime/engine.py", "engine.py:2 forward"),
        ("/me/comm/torch.py", "torch.py:2 forward"),
    ],
)
def test_torch_and_deepspeeds_wrapper_are_no_site(
    sites: tuple[CallSites, Log], layer: str, site: str
) -> None:
    torch = Path(call_site._TORCH, "distributed")
    inner = program(torch, "distributed_c10d.py", MODEL, call=here(sites[0]))["forward"]
    wrapper = program(Path(layer).parent, Path(layer).name, MODEL, call=inner)["forward"]
    train = program(Path("/me"), "train.py", TRAIN, forward=wrapper)["train"]
    assert train()["site"] == site


@pytest.mark.parametrize("waits", [True, False])
def test_a_call_of_autograds_thread_has_the_line_that_waits_for_it(
    sites: tuple[CallSites, Log], waits: bool
) -> None:
    """On a GPU, hooks run in a thread without frames of the program."""
    found: list[Any] = []
    done = threading.Lock()
    done.acquire()
    text = "def reduce():\n    found.append(call())\n    done.release()\n"
    torchs = Path(call_site._TORCH)
    known = {"found": found, "done": done, "call": here(sites[0])}
    hook = program(torchs / "distributed", "fsdp.py", text, **known)["reduce"]
    text = "def run():\n    start(reduce, ()); done.acquire()\n"
    known = {"start": _thread.start_new_thread, "reduce": hook, "done": done}
    engine = program(torchs / ("autograd" if waits else "utils"), "graph.py", text, **known)
    program(Path("/me"), "train.py", TRAIN, forward=engine["run"])["train"]()
    assert found[0]["site"] == ("train.py:2 train" if waits else "fsdp.py:2 reduce")
