"""The speed benchmark without a GPU: counts, sizes, options and the report."""

from __future__ import annotations

import dataclasses
import json
import socket
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from bench import torchrun
from bench.speed import __main__ as command
from bench.speed import clock, flops, listed, rank, sizes, suite
from bench.speed.words import FIXES, FUSED, KERNELS, LOOP, OFF, RECORDED, ROUTINGS
from moediag import hardware
from moediag.errors import StackError
from moediag.lab.step import content
from moediag.lab.step.models import tiny
from moediag.protocol import ModelSpec
from moediag.recorder.not_applicable import NotApplicable

SMALL = ModelSpec(layers=2, hidden=10, intermediate=3, experts=5, top_k=2, heads=2, kv_heads=1,
                  head_dim=4, vocab=32)  # fmt: skip


def test_operations_match_a_manual_count() -> None:
    found = flops.forward(SMALL, seq_len=7)
    # Of each of two layers. q: 10 into 8; k and v: 10 into 4 each; o: 8 into 10.
    assert found["projections"] == 2 * 2 * (10 * 8 + 10 * 4 + 10 * 4 + 8 * 10)
    # Per head 7 scores of 4 products, and 4 values of 7; two heads.
    assert found["attention"] == 2 * 2 * (2 * 7 * 4 + 2 * 4 * 7)
    assert found["router"] == 2 * 2 * 10 * 5
    # Two experts: gate and up 10 into 3, down 3 into 10.
    assert found["experts"] == 2 * 2 * 2 * (10 * 3 + 10 * 3 + 3 * 10)
    assert found["head"] == 2 * 10 * 32
    assert flops.step(SMALL, batch=3, seq_len=7) == 3 * 3 * 7 * sum(found.values())


def test_parameter_count_matches_the_model() -> None:
    spec = ModelSpec()
    model = tiny.build(spec, seed=0)
    assert flops.parameters(spec) == sum(p.numel() for p in model.parameters())


def test_the_number_of_layers_fits_in_memory() -> None:
    large = sizes.SIZES["large"]
    h200 = 139 * 2**30
    fitted = sizes.fitted(large, h200)
    longer = dataclasses.replace(fitted.model, layers=fitted.model.layers + 1)
    assert sizes.planned_bytes(fitted) <= sizes.FILL * h200
    assert sizes.planned_bytes(dataclasses.replace(fitted, model=longer)) > sizes.FILL * h200
    assert sizes.planned_bytes(fitted) > 60 * 2**30  # it does fill the device
    assert sizes.fitted(large, h200, ranks=2).model.layers < fitted.model.layers
    assert sizes.fitted(large, 2**30).model.layers == 1
    assert sizes.shorter(fitted).model.layers < fitted.model.layers
    assert sizes.batched_bytes(sizes.SIZES["mid"]) > h200
    assert sizes.batched_bytes(sizes.SIZES["small"]) < sizes.FILL * h200 / 2


class FusedGate(torch.nn.Module):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(spec.experts, spec.hidden))
        self.top_k, self.norm_topk_prob = spec.top_k, True


def fused(spec: ModelSpec) -> Any:
    wide = torch.randn(spec.experts, 2 * spec.intermediate, spec.hidden)
    down = torch.randn(spec.experts, spec.hidden, spec.intermediate)
    experts = SimpleNamespace(gate_up_proj=wide, down_proj=down)
    return SimpleNamespace(gate=FusedGate(spec), experts=experts)


def test_a_split_block_gives_equal_results_with_the_dense_fix() -> None:
    torch.manual_seed(0)
    whole = fused(SMALL)
    block = listed.Block(whole)
    x = torch.randn(2, 6, SMALL.hidden)
    found, logits = block(x)
    flat = x.reshape(-1, SMALL.hidden)
    chosen = (flat @ whole.gate.weight.T).softmax(-1).topk(SMALL.top_k, dim=-1)
    expected = torch.zeros_like(flat)
    for token, (values, index) in enumerate(zip(*chosen, strict=True)):
        for value, expert in zip(values / values.sum(), index, strict=True):
            gate, up = (whole.experts.gate_up_proj[expert] @ flat[token]).chunk(2)
            product = torch.nn.functional.silu(gate) * up
            expected[token] += value * (whole.experts.down_proj[expert] @ product)
    assert torch.allclose(found.reshape(-1, SMALL.hidden), expected, atol=1e-4)
    assert logits.shape == (12, SMALL.experts)
    assert torch.equal(listed.First(block)(x), found)
    named = tuple((f"experts.{i}", expert) for i, expert in enumerate(block.experts))
    anatomy = tiny.Anatomy((), (tiny.MoeBlock("mlp", block, 0, named),), SMALL.experts)
    content.fix("dense-experts").before_wrap(block, anatomy, None)
    assert torch.allclose(block(x)[0], found, atol=1e-4)


def test_a_model_of_modules_is_unchanged_and_other_fused_families_are_refused() -> None:
    spec = ModelSpec()
    model = tiny.build(spec, seed=0)
    before = dict(model.named_modules())
    listed.take_apart(model, tiny.anatomy(model, spec))
    assert dict(model.named_modules()) == before
    other = tiny.Anatomy((), (tiny.MoeBlock("mlp", torch.nn.Linear(1, 1), 0, ()),), 4)
    with pytest.raises(NotApplicable, match="Linear cannot be taken apart"):
        listed.take_apart(model, other)


def test_peak_is_measured_as_a_rate() -> None:
    assert 1e6 < clock.matrix_peak(torch.device("cpu"), 64) < 1e16
    assert clock.median([0.001, 0.002, 0.003]) == {"median": 2.0, "low": 1.5, "high": 2.5}


# ------------------------------------------------------------------------ the runs


def test_every_kernel_routing_and_fix_is_measured() -> None:
    runs = list(suite.runs("cuda"))
    assert {(r.what, r.size, r.ranks) for r in runs} == {
        ("kernels", "small", 1), ("kernels", "mid", 1), ("kernels", "large", 1),
        ("kernels", "mid", 2), ("fixes", "mid", 1), ("fixes", "mid", 2),
        ("recording", "small", 1), ("recording", "mid", 1), ("recording", "large", 1),
    }  # fmt: skip
    named = {"kernels": KERNELS, "fixes": (LOOP, *FIXES, *FUSED), "recording": (OFF, *RECORDED)}
    for run in runs:
        rows = suite.asked(run)
        assert {name for name, _ in rows} == set(named[run.what])
        if run.what == "kernels":
            assert {routing for _, routing in rows} == set(ROUTINGS)


def test_a_rank_measures_what_this_stack_supports(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One rank in this process: transformers 4.53 has experts as modules, and no fused kernels."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    where = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_PORT": port}
    for name, value in {**where, "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(rank.kernels, "interpret", lambda: None)
    out = tmp_path / "rows.json"
    rank.main(["--device", "cpu", "--size", "tiny", "--what", "fixes", "--routing", "zero-token",
               "--out", str(out)])  # fmt: skip
    report = json.loads(out.read_text())
    rows = {row["kernel"]: row for row in report["rows"]}
    assert list(rows) == [LOOP, *FIXES, *FUSED]
    for name in (LOOP, "dense-experts", "touch", "zero-fill", "iterate-all"):
        row = rows[name]
        assert row["reason"] == ""
        assert row["step_ms"]["low"] <= row["step_ms"]["median"] <= row["step_ms"]["high"]
        rate = row["tokens_per_second"] * row["step_ms"]["median"] / 1e3
        assert rate == pytest.approx(report["tokens"])
        share = row["share_of_peak"] * report["peak_tflops"]
        assert share == pytest.approx(row["tflops"])
    assert rows[LOOP]["ratio"]["median"] == 1.0
    assert all("has no experts_implementation" in rows[name]["reason"] for name in FUSED)


REPORT = {
    "device": "NVIDIA H200", "backend": "nccl", "world": 1, "shared": False, "layers": 8,
    "parameters": 489_000_000, "tokens": 8192, "peak_tflops": 700.0,
}  # fmt: skip
ROW = {
    "kernel": "grouped_mm", "routing": "balanced", "reason": "", "peak_gib": 31.25,
    "step_ms": {"median": 80.0, "low": 79.0, "high": 82.5}, "tokens_per_second": 102_400.0,
    "tflops": 210.0, "share_of_peak": 0.3, "experts_share": 0.55,
    "products_share": 0.66,
}  # fmt: skip


def test_the_page_shows_measurements_and_reasons_for_missing_ones() -> None:
    run = suite.Run("kernels", "mid", "cuda", kernels=("batched_mm", "grouped_mm"),
                    routings=("balanced", "one-hot"))  # fmt: skip
    big = {"kernel": "batched_mm", "routing": "balanced", "reason": "too | big"}
    one = suite.Measured(run, {**REPORT, "rows": [big, ROW]}, "it took more than 600 s")
    text = "\n".join(suite.page([one]))
    assert f"### `{run.command}`" in text
    rates = "102,400 | 210 | 30 % | 55 % | 66 % | 31.2 GiB |"
    assert f"| grouped_mm | balanced | 80.0 ms (79.0 to 82.5) | {rates}" in text
    assert f"| `{run.command}` | batched_mm balanced | too \\| big |" in text
    assert "| batched_mm one-hot, grouped_mm one-hot | it took more than 600 s |" in text
    kept = one.to_json()
    assert [r["reason"] for r in kept["rows"]].count("") == 1
    assert kept["command"] == run.command
    json.dumps(kept)


def test_gpu_rows_are_listed_with_the_reason_without_a_gpu() -> None:
    text = "\n".join(suite.page(suite.elsewhere()))
    assert text.count(f"| all | {suite.NO_GPU} |") == len(list(suite.runs("cuda")))


def _ended(pid: int) -> bool:
    """Whether a process that was killed ends; what adopted it may never notice."""
    for _ in range(100):
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.1)
    return False


def test_a_failing_or_slow_run_is_reported(tmp_path: Path) -> None:
    folder = str(tmp_path)
    failing = [sys.executable, "-c", "raise ValueError('no such thing')"]
    assert torchrun.launch(failing, {}, folder, 60) == "exit code 1: ValueError: no such thing"
    endless = [sys.executable, "-c", "import signal; signal.pause()"]
    assert torchrun.launch(endless, {}, folder, 0.2) == "it took more than 0.2 s"
    pause = "import os, signal; open('rank', 'w').write(str(os.getpid())); signal.pause()"
    rank = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {pause!r}], "
    rank += "start_new_session=True)"  # as torchrun does
    assert "more than" in torchrun.launch([sys.executable, "-c", rank], {}, folder, 5)
    assert _ended(int((tmp_path / "rank").read_text()))
    assert torchrun.launch([sys.executable, "-c", ""], {}, folder, 60) == ""


ABORTED = """\
terminate called after throwing an instance of 'gloo::IoException'
  what():  [pair.cc:553] Connection closed by peer
Traceback (most recent call last):
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
======================
rank FAILED
----------------------
  exitcode  : -6 (pid: 7)
  traceback : Signal 6 (SIGABRT) received by PID 7
======================
"""


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            ABORTED,
            "terminate called after throwing an instance of 'gloo::IoException'; "
            "what():  [pair.cc:553] Connection closed by peer; "
            "traceback : Signal 6 (SIGABRT) received by PID 7",
        ),
        ("no port left\n=====\n", "no port left"),
        ("=====\n", "no output"),
    ],
)
def test_a_rank_that_raised_nothing_is_reported_with_its_last_words(
    tmp_path: Path, said: str, told: str
) -> None:
    dying = [sys.executable, "-c", f"print({said!r}); raise SystemExit(3)"]
    assert torchrun.launch(dying, {}, str(tmp_path), 60) == f"exit code 3: {told}"


def test_an_unavailable_stack_is_reported_as_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(request: Any) -> Any:
        raise StackError("transformers 5.17.0 is wanted and 5.12.1 is installed")

    monkeypatch.setattr("moediag.lab.stacks.environment.ensure", refuse)
    found = suite.measure(suite.Run("kernels", "tiny", "cpu"))
    assert {row["reason"] for row in found.rows} == {
        "transformers 5.17.0 is wanted and 5.12.1 is installed"
    }


def test_the_command_accepts_one_run_or_all(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[suite.Run] = []

    def measure(run: suite.Run, timeout: float) -> suite.Measured:
        asked.append(run)
        return suite.Measured(run, {**REPORT, "rows": [ROW]})

    monkeypatch.setattr(suite, "measure", measure)
    monkeypatch.setattr(hardware, "gpus", list)
    monkeypatch.setattr(hardware, "driver_gpus", list)
    line = ["--size", "mid", "--device", "cuda", "--ranks", "2", "--kernel", "grouped_mm"]
    assert command.main([*line, "--out", str(tmp_path / "rows.json")]) == 0
    assert asked == [suite.Run("kernels", "mid", "cuda", 2, ("grouped_mm",))]
    assert json.loads((tmp_path / "rows.json").read_text())[0]["ranks"] == 2
    asked.clear()
    assert command.main([]) == 0
    assert asked == list(suite.runs("cpu"))
    assert suite.NO_GPU in capsys.readouterr().out


def test_the_interval_of_a_median_narrows_with_the_number_of_values() -> None:
    assert clock.median_within([3.0, 1.0, 2.0]) == (1.0, 3.0)
    low, high = clock.median_within([float(n) for n in range(1, 102)])
    assert (low, high) == (41.0, 61.0)  # of 101 values, by the binomial distribution
