"""`moediag export`: written files, refusals, and agreement with the worker."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version

from moediag.cli import app
from moediag.errors import ExitCode, UsageError
from moediag.lab.scenario import catalogue, load, plan
from moediag.lab.scenario.plan import Plan
from moediag.lab.step import data
from moediag.lab.step.models import checkpoint as loading
from moediag.lab.upstream.export import write_file
from moediag.lab.upstream.export.export_facts import asked, refused, unsupported
from moediag.recorder.not_applicable import NotApplicable
from tests.depth import DEEP

VERSIONS = {"torch": "2.13.0", "transformers": "5.17.0", "accelerate": "1.15.0"}


@functools.cache
def planned(name: str, ranks: int | None = None) -> Plan:
    return plan.plan(load.load(catalogue.find(name)), ranks, "cpu")


def exported(name: str, variant: str = "unfixed", ranks: int | None = None) -> str:
    return write_file.export(planned(name, ranks), variant, VERSIONS, f"{name}.py")


def variants() -> list[tuple[str, str]]:
    return [(name, t.trial.variant) for name in catalogue.names() for t in planned(name).trials
            if t.expected is not None and t.repeat == 0]  # fmt: skip


def possible(name: str, variant: str) -> bool:
    found = next(t for t in planned(name).trials if t.trial.variant == variant)
    return not [*unsupported(found), *refused(found.trial, Version(VERSIONS["transformers"]))]


def test_every_variant_is_written_or_refused_with_a_reason() -> None:
    written = 0
    for name, variant in variants()[:: 1 if DEEP else 4]:
        if not possible(name, variant):
            with pytest.raises(UsageError, match="cannot be exported"):
                exported(name, variant)
            continue
        text = exported(name, variant)
        tree = ast.parse(text)
        imported = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
        imported |= {n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
        assert not any(module.startswith("moediag") for module in imported)
        assert max(map(len, text.splitlines())) <= 100, (name, variant)
        assert "\n\n\n\n" not in text
        assert 'transformers==5.17.0" "accelerate==1.15.0"' in text
        assert f"{name}.py" in text and variant in text
        written += 1
    assert written >= (40 if DEEP else 10)


@pytest.mark.parametrize(
    ("name", "variant", "reason"),
    [
        ("tp-router-divergence", "unfixed", "program tp-router"),
        ("ep-resume", "unfixed", "resume"),
        ("ep-sft", "unfixed", "wrapper.kind trl"),
        ("expert-starvation-wrappers", "zero2", "wrapper.kind zero2"),
        ("expert-starvation", "zero-fill", "fix zero-fill (of the fixes: set-reduce-scatter"),
        ("ep-clip-norm", "own-pieces", "step.clipping local"),
    ],
)
def test_a_refusal_names_what_cannot_be_exported(name: str, variant: str, reason: str) -> None:
    with pytest.raises(UsageError) as caught:
        exported(name, variant)
    assert reason in caught.value.message


def test_a_stack_without_transformers_is_refused() -> None:
    with pytest.raises(UsageError, match="a stack without transformers"):
        write_file.export(planned("expert-starvation"), "unfixed", {"torch": "2.13.0"}, "x.py")


# ------------------------------------------------------------------------ agreement


OF_A_RANK = r"environ|cuda|\btopk"


def namespace(text: str, *names: str) -> dict[str, Any]:
    """The constants of an exported file, and the named functions."""
    tree = ast.parse(text)
    kept = [
        node for node in tree.body
        if (isinstance(node, ast.FunctionDef) and node.name in names)
        or (isinstance(node, ast.Assign) and not re.search(OF_A_RANK, ast.unparse(node)))
    ]  # fmt: skip
    found: dict[str, Any] = {"torch": torch}
    exec(compile(ast.Module(kept, []), "exported", "exec"), found)  # its own text
    return found


@pytest.mark.parametrize("batches", ["distinct", "identical", "one-token"])
def test_batches_match_those_of_the_worker(batches: str) -> None:
    scenario = load.load(catalogue.find("expert-starvation"), [f"skew.batches={batches}"])
    made = plan.plan(scenario, 3, "cpu", variants=["unfixed"])
    batch = namespace(write_file.export(made, "unfixed", VERSIONS, "x.py"), "batch")["batch"]
    trial = made.trials[0].trial
    for rank in range(3):
        assert torch.equal(batch(rank, 2, 1), data.batch(trial, rank, 2, 1))


def test_ranks_of_one_copy_share_a_batch() -> None:
    made = planned("ep-router-gradient", 4)
    batch = namespace(write_file.export(made, "unfixed", VERSIONS, "x.py"), "batch")["batch"]
    (trial, *_) = [t.trial for t in made.trials if t.trial.variant == "unfixed"]
    for rank in range(4):
        assert torch.equal(batch(rank, 1, 0), data.batch(trial, rank, 1, 0))
    assert torch.equal(batch(0, 1, 0), batch(3, 1, 0))


def test_tolerance_and_starved_experts_match_the_worker() -> None:
    found = namespace(exported("expert-starvation-late"))
    assert found["STARVE"] == [{"expert": 3, "rank": 1, "layer": 1, "from_step": 3}]
    assert found["STEPS"] == 4


RELEASES = {  # fields of DistributedConfig, and the requested layout
    "5.12.1": ["enable_expert_parallel"],
    "5.17.0": ["enable_expert_parallel", "tp_size", "fsdp_size"],
    "5.19.0": ["tp_size", "fsdp_size", "ep_size", "tp_plan"],
    "5.23.0": ["tp_size", "fsdp_size", "ep_size", "tp_plan", "ep_implementation"],
}


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize(
    ("name", "variant"),
    [("ep-overwrite", "unfixed"), ("ep-overwrite", "native"), ("ep-overwrite", "fsdp2-by-hand"),
     ("ep-router-gradient", "no-expert-parallelism")],
)  # fmt: skip
def test_release_arguments_match_the_worker(
    release: str, name: str, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "distributed_fields", lambda: dict.fromkeys(RELEASES[release]))
    monkeypatch.setattr(loading, "version", lambda: release)
    trial = next(t.trial for t in planned(name).trials if t.trial.variant == variant)
    try:
        wanted = loading.spelling(trial)
    except NotApplicable:
        assert list(refused(trial, Version(release)))
        return
    assert not list(refused(trial, Version(release)))
    assert asked(trial, Version(release)) == wanted


def test_written_python_literals_are_read_back() -> None:
    value = {"a": [{"b": None, "c": "x\"'\\\n" * 9}, True], "d": {"e": 1.5, "f": "ü" * 90}}
    for shown in (value, {}, [], "x", {"short": [1]}):
        assert ast.literal_eval(write_file.literal(shown)) == shown


def test_a_description_cannot_end_the_docstring() -> None:
    made = planned("expert-starvation")
    text = 'ends """ here \\ and \\x'
    changed = Plan(made.scenario.model_copy(update={"description": text}), made.trials)
    module = ast.parse(write_file.export(changed, "unfixed", VERSIONS, "x.py"))
    assert "ends ''' here \\ and \\x" in (ast.get_docstring(module) or "")


# ------------------------------------------------------------------------ the command


def test_the_command_writes_a_file_or_stdout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert app.main(["export", "expert-starvation", "--file", str(tmp_path / "x" / "s.py")]) == 0
    text = (tmp_path / "x" / "s.py").read_text()
    assert "torchrun --nproc-per-node 2 s.py" in text
    assert capsys.readouterr().out == ""
    assert app.main(["export", "expert-starvation", "--cpu", "4", "-v", "touch"]) == 0
    out = capsys.readouterr().out
    assert "RANKS = 4" in out and "def touching(" in out
    assert app.main(["export", "expert-starvation", "-v", "touhc"]) == ExitCode.USAGE
    assert "no such variant" in capsys.readouterr().err
