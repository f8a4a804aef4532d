"""The workflows: YAML that GitHub accepts, shell that parses, command lines and make targets that
exist, actions pinned to a commit; and the nightly workflow keeps its history."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from tests.unit.test_docs import parse

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".github" / "workflows"
YAML_1_2 = YAML(typ="safe")  # in it `on` is a word, not a truth value
WORKFLOWS: dict[str, dict[str, Any]] = {
    path.stem: YAML_1_2.load(path.read_text(encoding="utf-8")) for path in FOLDER.glob("*.yml")
}
JOBS: dict[str, Any] = WORKFLOWS["nightly"]["jobs"]
JOB_KEYS = {"if", "runs-on", "timeout-minutes", "env", "steps", "needs", "strategy", "permissions"}
STEP_KEYS = {"name", "if", "uses", "with", "run", "env", "id", "shell"}
STEPS = [
    (name, step)
    for name, workflow in WORKFLOWS.items()
    for job in workflow["jobs"].values()
    for step in job["steps"]
]
RUNS = list(dict.fromkeys(step["run"] for _, step in STEPS if "run" in step))


def moediag_lines(script: str) -> list[str]:
    """Returns each `moediag …` of a shell script, with continuation lines joined and variables and
    arrays filled in."""
    joined = re.sub(r"\s*\\\n\s*", " ", script)
    for name, held in re.findall(r"\b(\w+)=\(([^()\s][^()]*)\)", script):
        joined = joined.replace(f'"${{{name}[@]}}"', held)
    found = re.findall(r"^(?:\S*/)?(moediag .*)$", joined, re.MULTILINE)
    return [re.sub(r'"\$\{?\w+\}?"', "2", line) for line in found]


@pytest.mark.parametrize("name", WORKFLOWS)
def test_a_workflow_has_githubs_keys_and_may_only_read(name: str) -> None:
    workflow = WORKFLOWS[name]
    assert set(workflow) <= {"name", "on", "permissions", "concurrency", "jobs", "env"}
    assert workflow["permissions"] == {"contents": "read"}
    for entry in workflow["on"].get("schedule", []):
        assert re.fullmatch(r"\d+ \d+ \* \* [*\d]", entry["cron"])
    for job in workflow["jobs"].values():
        assert {"runs-on", "steps", "timeout-minutes"} <= set(job) <= JOB_KEYS
        for step in job["steps"]:
            assert set(step) <= STEP_KEYS
            assert ("uses" in step) != ("run" in step)
    text = (FOLDER / f"{name}.yml").read_text(encoding="utf-8")
    assert not re.search(r"\bgh |issues: write|secrets\.", text)


def test_the_nightly_jobs_run_where_they_can() -> None:
    assert set(JOBS) == {"cpu", "gpu"}
    assert "self-hosted" in JOBS["gpu"]["runs-on"]
    assert JOBS["cpu"]["runs-on"] == "ubuntu-latest"


def test_every_action_is_pinned_to_one_commit_with_its_version() -> None:
    versions: dict[str, set[str]] = {}
    for path in (*FOLDER.glob("*.yml"), *(ROOT / "integrations").rglob("*.yml")):
        for used in re.findall(r"uses: ([^.\s].*)", path.read_text(encoding="utf-8")):
            found = re.fullmatch(r"([\w-]+/[\w-]+)[\w/-]*@([0-9a-f]{40} # v\d+\.\d+\.\d+)", used)
            assert found, f"{path.name}: {used}"
            versions.setdefault(found[1], set()).add(found[2])
    assert {action: pins for action, pins in versions.items() if len(pins) > 1} == {}


def test_every_make_target_and_script_of_a_workflow_exists() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for script in RUNS:
        for target in re.findall(r"^make (\w+)", script, re.MULTILINE):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE)
        for file in re.findall(r"^(\.ci/\w+)$", script, re.MULTILINE):
            assert (ROOT / file).stat().st_mode & 0o111


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


@dataclass
class Runner:
    """What GitHub does with the steps of a job, as far as caches and failures go: after a failed
    step only steps with `if: always()` run, actions/cache saves at the end if nothing failed, and
    actions/cache/save saves at once."""

    saved: list[tuple[str, set[str]]] = field(default_factory=list)  # (key, files), oldest first
    runs: int = 0

    def night(self, steps: list[dict[str, Any]], work: Callable[[set[str]], bool]) -> None:
        """One run. ``work`` gets the files of the history, changes them as `moediag nightly` does,
        and returns whether it succeeded."""
        self.runs += 1
        files: set[str] = set()
        good, at_the_end = True, []
        for step in steps:
            if not good and step.get("if") != "always()":
                continue
            action = step.get("uses", "").partition("@")[0]
            key = str(step.get("with", {}).get("key", ""))
            key = key.replace("${{ github.run_id }}", str(self.runs))
            if action in ("actions/cache", "actions/cache/restore"):
                prefix = str(step["with"]["restore-keys"])
                fitting = [held for name, held in self.saved if name.startswith(prefix)]
                files |= fitting[-1] if fitting else set()
            if action == "actions/cache":
                at_the_end.append(key)
            if action == "actions/cache/save":
                self.saved.append((key, set(files)))
            if "moediag nightly" in step.get("run", ""):
                good = work(files)
        self.saved += [(key, set(files)) for key in at_the_end if good]


def history_after_a_red_night(steps: list[dict[str, Any]]) -> set[str]:
    """The history that the night after a night with a new failure begins with."""
    runner, begun_with = Runner(), []

    def red(files: set[str]) -> bool:
        begun_with.append(set(files))
        files.add(f"night-{len(begun_with)}.json")
        return False

    runner.night(steps, red)
    runner.night(steps, red)
    assert begun_with[0] == set()
    return begun_with[1]


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_a_red_night_is_kept_for_the_next_one(kind: str) -> None:
    assert history_after_a_red_night(JOBS[kind]["steps"]) == {"night-1.json"}
    keys = {s["with"]["key"] for s in JOBS[kind]["steps"] if "actions/cache" in str(s.get("uses"))}
    assert len(keys) == 1 and "github.run_attempt" in keys.pop(), "a key can be saved once"


def test_the_cache_action_alone_loses_a_red_night() -> None:
    cache = {"key": "h-${{ github.run_id }}", "restore-keys": "h-"}
    steps = [{"uses": "actions/cache@v5", "with": cache}, {"run": "moediag nightly"}]
    assert history_after_a_red_night(steps) == set()
