"""The GitHub action's script on a job that hung, and templates that parse and name what exists."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from tests.unit.test_docs import parse

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "integrations"
SCRIPT = FOLDER / "github" / "run_action.py"
HUNG = ROOT / "tests" / "samples" / "flight-recorder" / "gloo-stuck"


def load(path: Path) -> list[Any]:
    return list(YAML(typ="safe").load_all(path.read_text(encoding="utf-8")))


def act(command: str, arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs the action's script in ``folder`` with a command `moediag` on the path."""
    tool = folder / "bin" / "moediag"
    tool.parent.mkdir()
    tool.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m moediag "$@"\n', encoding="utf-8")
    tool.chmod(0o755)
    environment = {
        **os.environ, "PATH": f"{tool.parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT),
        "GITHUB_STEP_SUMMARY": str(folder / "summary"),
    }  # fmt: skip
    return subprocess.run(
        [sys.executable, str(SCRIPT), command, arguments, "out"],
        cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip


def test_the_action_diagnoses_annotates_and_keeps_the_pages(tmp_path: Path) -> None:
    done = act("diagnose", f"--taken-at timeout {shlex.quote(str(HUNG))}", tmp_path)
    assert done.returncode == 1, done.stderr
    (line,) = done.stdout.splitlines()
    result = json.loads((tmp_path / "out" / "run" / "result.json").read_text(encoding="utf-8"))
    (trial,) = result["trials"]
    assert line.startswith("::error title=") and trial["verdict"] in line
    assert line.endswith("::" + trial["cause"].replace("%", "%25").replace("\n", "%0A"))
    assert trial["verdict"] in (tmp_path / "summary").read_text(encoding="utf-8")
    assert "<html" in (tmp_path / "out" / "page.html").read_text(encoding="utf-8")
    assert "<testsuite" in (tmp_path / "out" / "junit.xml").read_text(encoding="utf-8")


def test_the_action_passes_on_that_the_input_is_wrong(tmp_path: Path) -> None:
    done = act("diagnose", "no-such-folder", tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "no-such-folder" in done.stderr
    assert not (tmp_path / "summary").exists()


def test_the_action_declares_what_it_uses() -> None:
    (action,) = load(ROOT / "action.yml")
    text = (ROOT / "action.yml").read_text(encoding="utf-8")
    assert set(re.findall(r"inputs\.([\w-]+)", text)) == set(action["inputs"])
    assert action["runs"]["using"] == "composite"
    for step in action["runs"]["steps"]:
        assert ("uses" in step) != ("run" in step and step["shell"] == "bash")
        assert "${{" not in step.get("run", ""), "an input in a script is code"
    assert SCRIPT.relative_to(ROOT).as_posix() in text


def commands(text: str) -> list[str]:
    """Every `moediag …` in a script, without redirections and what follows."""
    joined = re.sub(r"\s*\\\n\s*", " ", text)
    found = re.findall(r"(?:^|exec |- )\s*(moediag .+)$", joined, re.MULTILINE)
    return [re.sub(r" \|\| .*$", "", line).replace('"$@"', "train.py") for line in found]


@pytest.mark.parametrize(
    ("file", "count"),
    [("gitlab/moediag.yml", 4), ("slurm/watch.sbatch", 1), ("kubernetes/watch.yaml", 1)],
)
def test_every_command_of_a_template_parses(file: str, count: int) -> None:
    found = commands((FOLDER / file).read_text(encoding="utf-8"))
    assert len(found) == count
    for line in found:
        parse(shlex.split(re.sub(r"\$\{?\w+\}?", "2", line))[1:])


def test_the_templates_are_valid() -> None:
    assert subprocess.run(["bash", "-n", FOLDER / "slurm" / "watch.sbatch"]).returncode == 0
    service, job = load(FOLDER / "kubernetes" / "watch.yaml")
    name = service["metadata"]["name"]
    pod = job["spec"]["template"]["spec"]
    assert pod["subdomain"] == name == service["spec"]["selector"]["job-name"]
    assert job["metadata"]["name"] == name, "pods are called after the job"
    (container,) = pod["containers"]
    assert f"{name}-0.{name}:" in container["args"][0]
    assert {m["name"] for m in container["volumeMounts"]} == {v["name"] for v in pod["volumes"]}
    (gitlab,) = load(FOLDER / "gitlab" / "moediag.yml")
    assert all(job.get("extends", ".moediag") in gitlab for job in gitlab.values())
    assert gitlab[".moediag-nightly"]["cache"]["when"] == "always", "a red night is kept"
