"""The nightly workflow: YAML that GitHub accepts, shell that parses, command lines that exist."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from tests.unit.test_docs import parse

FILE = Path(__file__).parent.parent.parent / ".github" / "workflows" / "nightly.yml"
# YAML 1.2: `on` is a word, not a truth value.
WORKFLOW: dict[str, Any] = YAML(typ="safe").load(FILE.read_text(encoding="utf-8"))
JOBS: dict[str, Any] = WORKFLOW["jobs"]
JOB_KEYS = {"if", "runs-on", "timeout-minutes", "env", "steps", "needs", "strategy", "permissions"}
STEP_KEYS = {"name", "if", "uses", "with", "run", "env", "id", "shell"}
RUNS = [s["run"] for job in JOBS.values() for s in job["steps"] if "run" in s]


def moediag_lines(script: str) -> list[str]:
    """Returns each `moediag …` of a shell script, with continuation lines joined and variables and
    arrays filled in."""
    joined = re.sub(r"\s*\\\n\s*", " ", script)
    for name, held in re.findall(r"\b(\w+)=\(([^()\s][^()]*)\)", script):
        joined = joined.replace(f'"${{{name}[@]}}"', held)
    found = re.findall(r"^(?:\S*/)?(moediag .*)$", joined, re.MULTILINE)
    return [re.sub(r'"\$\{?\w+\}?"', "2", line) for line in found]


def test_the_workflow_has_githubs_keys() -> None:
    assert set(WORKFLOW) <= {"name", "on", "permissions", "concurrency", "jobs", "env"}
    assert re.fullmatch(r"\d+ \d+ \* \* \*", WORKFLOW["on"]["schedule"][0]["cron"])
    assert set(JOBS) == {"cpu", "gpu"}
    for job in JOBS.values():
        assert {"runs-on", "steps", "timeout-minutes"} <= set(job) <= JOB_KEYS
        for step in job["steps"]:
            assert set(step) <= STEP_KEYS
            assert ("uses" in step) != ("run" in step)
            if "uses" in step:
                assert re.fullmatch(r"[\w.-]+/[\w.-]+@v\d+", step["uses"])
    assert "self-hosted" in JOBS["gpu"]["runs-on"]
    assert JOBS["cpu"]["runs-on"] == "ubuntu-latest"


def test_the_workflow_has_read_permission_only_and_files_nothing() -> None:
    assert WORKFLOW["permissions"] == {"contents": "read"}
    assert not re.search(r"\bgh |issues: write|secrets\.", FILE.read_text(encoding="utf-8"))


@pytest.mark.parametrize("script", RUNS, ids=lambda text: text.split("\n")[0][:40])
def test_every_script_parses(script: str) -> None:
    done = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr


def test_a_broken_script_does_not_parse() -> None:
    done = subprocess.run(["bash", "-n"], input="if true; then", text=True, capture_output=True)
    assert done.returncode != 0


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_each_job_calls_moediag_nightly_once_with_options_that_exist(kind: str) -> None:
    scripts = [step.get("run", "") for step in JOBS[kind]["steps"]]
    (line,) = [line for script in scripts for line in moediag_lines(script)]
    words = shlex.split(line)
    assert words[1] == "nightly"
    assert {f"--{'cpu' if kind == 'cpu' else 'gpus'}", "--annotate", "--summary"} <= set(words)
    assert ("--share-gpu" in words) == (kind == "gpu"), "a runner with one GPU"
    parse(words[1:])
    minutes = sum(float(words[words.index(o) + 1]) for o in ("--minutes", "--bisect-minutes"))
    assert minutes < JOBS[kind]["timeout-minutes"]
    kept = words[words.index("--history") + 1]
    uploaded = [s["with"]["path"] for s in JOBS[kind]["steps"] if "upload-artifact" in str(s)]
    assert all(part in uploaded[0].split() for part in (kept, words[words.index("--out") + 1]))


def test_an_unknown_option_is_found() -> None:
    (line,) = moediag_lines('  x=1\n.venv/bin/moediag nightly --gpus "$gpus" \\\n  --no-such\n')
    assert line == "moediag nightly --gpus 2 --no-such"
    with pytest.raises(Exception, match=r"(?i)no such option"):
        parse(shlex.split(line)[1:])
