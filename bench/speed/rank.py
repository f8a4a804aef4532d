"""The program of each rank of a speed run; rank 0 rewrites the rows after each one.

``torchrun … -m bench.speed.rank --device cpu --size tiny --out ROWS.json``
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.speed import built, clock, flops, recording, sizes
from bench.speed.words import FIXES, FUSED, KERNELS, LOOP, OFF, RECORDED, ROUTINGS, WHATS
from moediag import hardware
from moediag.lab.step import kernels
from moediag.lab.step.collector import versions
from moediag.lab.step.shard.wrapped import Wrapped, synchronize
from moediag.protocol import Trial, write_json
from moediag.recorder.not_applicable import NotApplicable
from moediag.result import devices

EAGER_EP = "under expert parallelism it raises in 5.17 and hangs in 5.18 with one-hot: see ep-step"
Row = dict[str, Any]


class Run:
    """One launch. ``rows`` are the results so far; ``peak`` (FLOP/s) is measured first."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.device, self.backend = _device(options.device)
        dist.init_process_group(self.backend)
        size = sizes.SIZES[options.size]
        if self.device.type == "cuda" and options.size == "large":
            free, _ = torch.cuda.mem_get_info(self.device)
            size = sizes.fitted(size, free, dist.get_world_size())
        # One rank has nobody to divide with; the fixes are for experts that FSDP2 shards.
        self.ep = dist.get_world_size() > 1 and options.what == "kernels"
        self.batches = 1 if self.ep else dist.get_world_size()  # different ones in a step
        self.peak = clock.matrix_peak(self.device, size.peak)
        self.rows: list[Row] = []
        self._take(size)

    def _take(self, size: sizes.Size) -> None:
        self.size = size
        scratch = self.options.out.parent
        self.trial: Trial = built.trial(size, self.device, self.backend, scratch, self.ep)

    def measure(self) -> None:
        for row in getattr(self, self.options.what)():
            self.rows.append(row)
            if dist.get_rank() == 0:
                write_json(self.options.out, self.report())

    def report(self) -> dict[str, Any]:
        name = "cpu"
        if self.device.type == "cuda":
            name = torch.cuda.get_device_name(self.device)
        return {
            "device": name, "backend": self.backend, "world": dist.get_world_size(),
            "shared": self.trial.shared_gpu, "what": self.options.what, "size": self.size.name,
            "layers": self.size.model.layers, "parameters": flops.parameters(self.size.model),
            "tokens": self.size.tokens * self.batches, "peak_tflops": self.peak / 1e12,
            "versions": versions(), "rows": self.rows,
        }  # fmt: skip

    # ------------------------------------------------------------------ kernels

    def kernels(self) -> Iterator[Row]:
        """Times every kernel with every routing, on the same model."""
        wrapped = self._that_fits()
        alone: built.Experts | None = None
        for kernel in self.options.kernel or KERNELS:
            for routing in self.options.routing or ROUTINGS:
                row = {"kernel": kernel, "routing": routing, "reason": self._impossible(kernel)}
                if row["reason"]:
                    yield row
                    continue
                try:
                    wrapped = wrapped or built.fused(self.trial, self.device)
                    built.use(wrapped.model, kernel)
                    row.update(self._timed(wrapped, routing))
                    if not self.ep:
                        alone = alone or built.Experts(self.size, self.device)
                        row.update(self._share("experts", alone.stepping(kernel, routing)))
                        products = alone.products(kernel, routing)
                        row.update(self._share("products", products) if products else {})
                except Exception as error:
                    row["reason"] = _words(error)
                if row["reason"]:
                    # A step that broke off leaves FSDP2 in the middle of it. Not while the error
                    # is handled: its traceback holds on to the tensors.
                    wrapped = None
                    _clear()
                yield row

    def _that_fits(self) -> Wrapped | None:
        """Returns the model after one step. If the large size runs out of memory it gets fewer
        layers, because the plan of its memory is rough. None if that did not help; the rows say
        why."""
        for _ in range(4):
            try:
                return self._stepped()
            except torch.OutOfMemoryError:
                if self.size.name != "large" or dist.get_world_size() > 1:
                    return None
            except Exception:
                return None
            _clear()
            self._take(sizes.shorter(self.size))
        return None

    def _stepped(self) -> Wrapped:
        wrapped = built.fused(self.trial, self.device)
        built.use(wrapped.model, "grouped_mm")
        built.stepping(wrapped, "balanced", self.device)()
        return wrapped

    def _impossible(self, kernel: str) -> str:
        """Returns why not to try it: if one rank fails, the others would wait."""
        if kernel == "eager" and dist.get_world_size() > 1:
            return EAGER_EP
        if kernel == "batched_mm" and self.device.type == "cuda":
            wanted = sizes.batched_bytes(self.size)
            _, whole = torch.cuda.mem_get_info(self.device)
            if wanted > sizes.FILL * whole / dist.get_world_size():
                gib = f"{wanted / 2**30:,.0f} GiB where there are {whole / 2**30:,.0f}"
                return f"it copies an expert's weights for each of its tokens: {gib}"
        return ""

    def _timed(self, wrapped: Wrapped, routing: str) -> Row:
        one = built.stepping(wrapped, routing, self.device)
        for _ in range(self.size.warmup):
            one()
        self._forget_memory()
        times = [self._one(one) for _ in range(self.size.rounds)]
        return {"step_ms": clock.median(times), **self._rates(times), **self._memory()}

    def _share(self, name: str, one: Callable[[], None]) -> Row:
        """Times the experts of one layer, or their matrix products, without the rest of the
        step."""
        for _ in range(self.size.warmup):
            one()
        middle = statistics.median(self._one(one) for _ in range(self.size.rounds))
        rate = flops.experts(self.size.model, self.size.tokens) / middle
        return {f"{name}_ms": 1e3 * middle, f"{name}_share": rate / self.peak}

    def _one(self, work: Any) -> float:
        synchronize()
        return clock.seconds(work, self.device)

    def _rates(self, times: list[float]) -> Row:
        middle = statistics.median(times)
        batch = self.size.batch * self.batches
        work = flops.step(self.size.model, batch, self.size.seq_len)
        return {
            "tokens_per_second": self.size.tokens * self.batches / middle,
            "tflops": work / middle / 1e12,
            "share_of_peak": work / middle / self.peak,
        }

    def _forget_memory(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def _memory(self) -> Row:
        """Returns this rank's peak memory; torch counts none on the CPU."""
        if self.device.type != "cuda":
            return {"peak_gib": None}
        return {"peak_gib": torch.cuda.max_memory_allocated(self.device) / 2**30}

    # -------------------------------------------------------------------- fixes

    def fixes(self) -> Iterator[Row]:
        """Times every fix, the loop that it fixes, and the fused kernels that need none, in
        alternating steps, so that other work on the machine affects all of them equally."""
        for routing in self.options.routing or ("balanced", "zero-token"):
            steps: dict[str, Any] = {}
            reasons: dict[str, str] = {}
            for name in (LOOP, *FIXES, *FUSED):
                try:
                    steps[name] = built.stepping(self._candidate(name), routing, self.device)
                    steps[name]()
                except Exception as error:
                    steps.pop(name, None)
                    reasons[name] = _words(error)
                if name in reasons:
                    _clear()
            times = self._in_turn(steps)
            for name in (LOOP, *FIXES, *FUSED):
                row: Row = {"kernel": name, "routing": routing, "reason": reasons.get(name, "")}
                if name in times:
                    row.update(self._against(LOOP, times, name))
                yield row
            steps.clear()
            _clear()

    def _candidate(self, name: str) -> Wrapped:
        if name not in FUSED:
            fix = None if name == LOOP else name
            return built.apart(self.trial, self.device, fix)
        wrapped = built.fused(self.trial, self.device)
        built.use(wrapped.model, name)
        return wrapped

    def _in_turn(self, steps: dict[str, Any]) -> dict[str, list[float]]:
        times: dict[str, list[float]] = {name: [] for name in steps}
        for number in range(self.size.warmup + self.size.rounds):
            order = list(steps)[number % len(steps) :] + list(steps)[: number % len(steps)]
            for name in order:
                took = self._one(steps[name])
                if number >= self.size.warmup:
                    times[name].append(took)
        return times

    def _against(self, base: str, times: dict[str, list[float]], name: str) -> Row:
        row = {"step_ms": clock.median(times[name]), **self._rates(times[name])}
        if base in times:
            pairs = zip(times[name], times[base], strict=True)
            ratios = [mine / other for mine, other in pairs]
            low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
            row["ratio"] = {"median": middle, "low": low, "high": high}
            row["median_within"] = clock.median_within(ratios)
        return row

    # ---------------------------------------------------------------- recording

    def recording(self) -> Iterator[Row]:
        """Times the step of grouped_mm without the recorder and with it, its guard and laws."""
        wrapped = self._that_fits() or built.fused(self.trial, self.device)
        built.use(wrapped.model, "grouped_mm")
        step = built.stepping(wrapped, "balanced", self.device)
        for _ in range(self.size.warmup):
            step()
        folder = str(self.options.out.parent)
        times = recording.in_turn(lambda: self._one(step), 2 * self.size.rounds, folder)
        for name in (OFF, *RECORDED):
            row: Row = {"kernel": name, "routing": "balanced", "reason": ""}
            yield {**row, **self._against(OFF, times, name)}


def _device(asked: str) -> tuple[torch.device, str]:
    """Returns this rank's device, and the backend: NCCL if each rank has its own GPU, or if this
    NCCL lets ranks share one."""
    if asked == "cpu":
        kernels.interpret()
        torch.set_num_threads(1)
        return torch.device("cpu"), "gloo"
    local, world = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    gpus = torch.cuda.device_count()
    device = torch.device("cuda", local % gpus)
    torch.cuda.set_device(device)
    nccl = world <= gpus or devices.shared(hardware.nccl()) == devices.SHARED_NCCL
    return device, "nccl" if nccl else "gloo"


def _clear() -> None:
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _words(error: Exception) -> str:
    if isinstance(error, NotApplicable):
        return str(error)
    first = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}"[:300]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.speed.rank", description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--size", choices=tuple(sizes.SIZES), required=True)
    parser.add_argument("--what", choices=WHATS, default="kernels")
    parser.add_argument("--kernel", action="append", choices=KERNELS)
    parser.add_argument("--routing", action="append", choices=ROUTINGS)
    parser.add_argument("--out", type=Path, required=True)
    run = Run(parser.parse_args(arguments))
    run.measure()
    if dist.get_rank() == 0:
        sys.stdout.write(json.dumps({"rows": len(run.rows)}) + "\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
