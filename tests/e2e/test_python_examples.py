"""The examples of docs/reference/python.md that train or start ranks, word for word."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from moediag.lab.families import FAMILIES
from moediag.protocol import ModelSpec
from tests.unit.test_api import EXAMPLES, ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.wide, pytest.mark.stack]
SAYS = {
    "moediag.laws.recording": "",
    "moediag.run": "True (FixJudgement(variant='zero-fill', correct=True",
    "moediag.check": "",
    "moediag.verify.jobs": "clean ",
}


@pytest.mark.parametrize("name", SAYS)
def test_an_example_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    (tmp_path / "Qwen3-30B-A3B").mkdir()
    config = {"model_type": "qwen3_moe", **FAMILIES["qwen3_moe"].build(ModelSpec())}
    (tmp_path / "Qwen3-30B-A3B" / "config.json").write_text(json.dumps(config))
    shutil.copy(ROOT / "tests" / "victims" / "measured_job.py", "measured.py")
    launched = "'ddp' if 'WORLD_SIZE' in os.environ else 'alone'"
    (tmp_path / "train.py").write_text(
        f"import os, runpy, sys\nsys.argv.append({launched})\n"
        "runpy.run_path('measured.py', run_name='__main__')\n"
    )
    exec(EXAMPLES[name], {})
    lines = capfd.readouterr().out.splitlines()
    assert not SAYS[name] or any(line.startswith(SAYS[name]) for line in lines), lines
