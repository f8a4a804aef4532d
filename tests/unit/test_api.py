"""`import moediag` is cheap, and the examples of docs/reference/python.md run."""

from __future__ import annotations

import math
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import moediag
from moediag.callbacks import sinks
from moediag.callbacks.job_laws import JobLaws
from moediag.errors import EvidenceError, ScenarioError, UsageError

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reference" / "python.md").read_text(encoding="utf-8")
EXAMPLES = {
    part.partition("\n")[0]: example
    for part in PAGE.split("\n## ")
    for example in re.findall(r"```python\n(.*?)```", part, flags=re.DOTALL)
}
HUNG = ROOT / "tests" / "samples" / "flight-recorder" / "gloo-stuck"


def test_importing_moediag_imports_nothing_else() -> None:
    code = "import sys; before = {*sys.modules}; import moediag; print({*sys.modules} - before)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "{'moediag'}"


def test_every_name_of_the_root_exists() -> None:
    assert all(getattr(moediag, name) for name in moediag.__all__ if name != "laws")
    with pytest.raises(AttributeError, match="no attribute 'frob'"):
        moediag.frob  # type: ignore[attr-defined] # noqa: B018


def test_the_page_has_an_example_of_each_function() -> None:
    named = {".".join(name.split(".")[:2]) for name in EXAMPLES}
    assert named == {f"moediag.{name}" for name in moediag.__all__ if name != "__version__"}


def test_the_page_has_every_public_name() -> None:
    for module in (moediag.laws, moediag.verify, sinks):
        for name in module.__all__:
            assert f"\n## {module.__name__}.{name}\n" in PAGE


def test_the_example_of_diagnose_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(HUNG, "dumps")
    exec(EXAMPLES["moediag.diagnose"], {})
    assert capsys.readouterr().out.startswith("hang ")


def step(**wrong: Any) -> None:
    """Begins a `verify.step` with arguments of which some are wrong."""

    class Optimizer:
        def step(self) -> None: ...

    right = {"reference": list, "loss": max, "batch": [], "model": max, "optimizer": Optimizer()}
    moediag.verify.step(**{**right, **wrong}).__enter__()


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda: moediag.run("expert-starvation", cpu=0), "cpu=0"),
        (lambda: moediag.run("expert-starvation", gpus=True), "gpus=True"),
        (lambda: moediag.run("expert-starvation", repeat=0), "repeat=0"),
        (lambda: moediag.run("expert-starvation", timeout=-1), "timeout=-1"),
        (lambda: moediag.run("expert-starvation", timeout=math.inf), "timeout=inf"),
        (lambda: moediag.run("expert-starvation", timeout=math.nan), "timeout=nan"),
        (lambda: moediag.run("expert-starvation", cpu=10**12), "cpu=1000000000000"),
        (lambda: moediag.run("expert-starvation", cost=3), "cost=3"),  # type: ignore[arg-type]
        (lambda: moediag.run("expert-starvation", stack=["torch"]), "stack=['torch']"),
        (lambda: moediag.run("expert-starvation", stack={"torch": ""}), "stack={'torch': ''}"),
        (lambda: moediag.run("a" * 300), "scenario='aaa"),
        (lambda: moediag.run(""), "scenario=''"),
        (lambda: moediag.check("config.json", {}), "layout={}"),
        (lambda: moediag.check("config.json", "ep=2"), "layout='ep=2'"),
        (lambda: moediag.check("config.json", {"ep": "2"}), "layout['ep']='2'"),
        (lambda: moediag.check("config.json", {"ep": 2}, wrapper="nosuch"), "wrapper='nosuch'"),
        (lambda: moediag.check("config.json", {"ep": 2}, world=0), "world=0"),
        (lambda: moediag.check("config.json", {"ep": 2}, timeout=None), "timeout=None"),  # type: ignore[arg-type]
        (lambda: moediag.check("config.json", {"ep": 2}, simulate=1), "simulate=1"),  # type: ignore[arg-type]
        (lambda: moediag.diagnose(), "diagnose() has no path"),
        (lambda: moediag.diagnose(""), "paths=''"),
        (lambda: moediag.diagnose("a\0b"), "paths='a"),
        (lambda: moediag.diagnose(__file__ + "/x"), "paths='"),
        (lambda: moediag.diagnose(".", taken_at=-5), "taken_at=-5"),
        (lambda: moediag.diagnose(".", taken_at=math.inf), "taken_at=inf"),
        (lambda: moediag.verify.jobs([], ["python"]), "command=[]"),
        (lambda: moediag.verify.jobs("torchrun t.py", ["python"]), "command='torchrun t.py'"),
        (lambda: moediag.verify.jobs(["torchrun"], []), "reference=[]"),
        (lambda: moediag.verify.jobs(["torchrun"], ["python"], steps=0), "steps=0"),
        (lambda: moediag.verify.jobs(["a\0b"], ["python"]), "command=['a"),
        (lambda: moediag.laws.record("", 0), "folder=''"),
        (lambda: moediag.laws.finish(3), "error=3"),  # type: ignore[arg-type]
        (lambda: moediag.laws.allow("replicas-apart:"), "law='replicas-apart:'"),
        (lambda: moediag.laws.record("laws-run", -1), "every=-1"),
        (lambda: moediag.run("expert-starvation", variants="unfixed"), "variants='unfixed'"),
        (lambda: moediag.run("expert-starvation", out=3), "out=3"),
        (lambda: moediag.check("config.json", None), "layout=None"),
        (lambda: moediag.check("config.json", {"ep": 2}, out=3), "out=3"),
        (lambda: moediag.verify.jobs(["true"], ["true"], out=""), "out=''"),
        (lambda: moediag.verify.jobs(["true"], [""]), "reference=['']"),
        (lambda: step(model=3), "model=3"),
        (lambda: step(optimizer=None), "optimizer.step=None"),
        (lambda: step(reference=3), "reference=3"),
        (lambda: step(loss=None), "loss=None"),
        (lambda: step(clip=-1), "clip=-1"),
        (lambda: step(collate=3), "collate=3"),
        (lambda: step(out=3), "out=3"),
        (lambda: sinks.send(HUNG, None), "sinks=None"),
        (lambda: sinks.send(HUNG, [sinks.JsonLines("o"), 3]), "sinks[1].tokens=None"),
        (lambda: sinks.JsonLines(""), "path=''"),
        (lambda: sinks.TensorBoard(None), "writer.add_text=None"),
        (lambda: sinks.WandB(3), "run.log=None"),
        (lambda: JobLaws(""), "folder=''"),
        (lambda: JobLaws(every=None), "every=None"),  # type: ignore[arg-type]
        (lambda: JobLaws(sinks=sinks.JsonLines("o")), "sinks=<"),
        (lambda: moediag.laws.allow("replicas-appart"), "law='replicas-appart'"),
        (lambda: moediag.laws.allow(3), "law=3"),  # type: ignore[arg-type]
    ],
)
def test_a_wrong_argument_is_named(call: Callable[[], object], argument: str) -> None:
    with pytest.raises(UsageError) as caught:
        call()
    assert caught.value.message.startswith(argument)
    assert caught.value.help_text


def test_the_root_lists_its_names() -> None:
    assert {*moediag.__all__} <= {*dir(moediag)}


def test_mistakes_are_errors_with_advice(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="exclude each other"):
        moediag.run("expert-starvation", cpu=2, gpus=2)
    with pytest.raises(ScenarioError, match="no scenario is called"):
        moediag.run("expert-starvaton")
    with pytest.raises(EvidenceError) as caught:
        moediag.diagnose(tmp_path / "none")
    assert caught.value.help_text
