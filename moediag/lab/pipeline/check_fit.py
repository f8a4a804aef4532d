"""Whether a step fits on a card: the peak of a rank, where it is, and what would make it fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping

from moediag.axes import DP_SHARD
from moediag.errors import UsageError
from moediag.lab.pipeline.check_cost import Memory
from moediag.lab.pipeline.check_options import CheckOptions
from moediag.lab.pipeline.check_reserved import Reserved
from moediag.protocol import MemoryPhase, MemoryTimeline
from moediag.records import dataclass
from moediag.result.verdicts import StrEnum

GIB = 2**30
LENGTH = 4096  # tokens of a sequence, if --length is not given
MARGIN = 0.1  # of the card, for what is not modelled
UNMODELLED = "fragmentation, NCCL's buffers and the CUDA context"
OPTIMIZER_STEP = "optimizer step"
# GiB that torch reports as the total of a card.
CARDS: Mapping[str, float] = {
    "H100": 79.1, "H100-NVL": 93.1, "H200": 139.8, "B200": 178.4, "GH200": 94.5, "A100": 79.2,
    "A100-40": 39.4, "A10G": 22.1, "L4": 22.1, "L40S": 44.4, "V100": 31.7, "V100-16": 15.8,
    "RTX4090": 23.6, "RTX3090": 23.6, "MI250X": 64.0, "MI300X": 192.0, "MI325X": 256.0,
}  # fmt: skip


class FitWord(StrEnum):
    FITS = "FITS"
    TIGHT = "TIGHT"
    NO = "DOES NOT FIT"


@dataclass(frozen=True, slots=True)
class Moment:
    """What is alive on the rank that holds most at one time, in bytes."""

    at: str
    state: int
    """Its parameters, gradients and optimizer states."""
    gathered: int
    """Whole parameters and gradients of FSDP units, and their communication buffers."""
    activations: int
    """Made in forward, or again in backward."""
    temporary: int
    """Made in backward, such as gradients of activations."""

    @property
    def total(self) -> int:
        return self.state + self.gathered + self.activations + self.temporary


@dataclass(frozen=True, slots=True)
class Fit:
    """The peak of a step, and the card that it is held against."""

    batch: int
    length: int
    recompute: str
    peak: Moment
    """With experts that all get the same number of tokens."""
    worst: Moment | None
    """With expert parallelism: if the peers send this rank as much as they can."""
    layers: int
    """That ran on fake tensors."""
    measured: bool
    """False: activations are not part of the peak."""
    card: str = ""
    capacity: int = 0
    """Bytes of the card; 0: none was given."""
    change: str = ""
    """The smallest change that makes it fit; "": none was found, or none is needed."""
    reserved: Reserved | None = None
    """None: it was not asked."""

    @property
    def word(self) -> FitWord | None:
        """None: no card was given, or what was not measured decides."""
        if not self.capacity or (not self.measured and self.peak.total <= self.capacity):
            return None
        if self.peak.total > self.capacity:
            return FitWord.NO
        return FitWord.TIGHT if self.peak.total > (1 - MARGIN) * self.capacity else FitWord.FITS


def capacity(text: str) -> int:
    """Returns the bytes of a card, by its name or in GiB. Raises UsageError."""
    known = {name.lower(): size for name, size in CARDS.items()}
    try:
        size = known.get(text.lower()) or float(text)
    except ValueError:
        size = 0.0
    if not 0 < size < float("inf"):
        raise UsageError(
            f"--card {text!r} is neither a number of GiB nor a known card",
            f"Known: {', '.join(CARDS)}. For example: --card 80",
        )
    return round(size * GIB)


def of(timeline: MemoryTimeline, memory: Memory, options: CheckOptions) -> Fit:
    """Returns the peak of a step of ``options.batch`` sequences."""
    adds = options.accumulate
    peak = max(_moments(timeline.phases, memory, adds), key=lambda moment: moment.total)
    worst = max(_moments(timeline.worst, memory, adds), key=lambda moment: moment.total)
    return Fit(
        options.batch, options.length, options.recompute, peak, worst if timeline.worst else None,
        timeline.layers, bool(timeline.phases), options.card,
        capacity(options.card) if options.card else 0,
    )  # fmt: skip


def _moments(phases: Iterable[MemoryPhase], memory: Memory, accumulate: bool) -> Iterator[Moment]:
    """``accumulate``: the gradients of earlier micro-batches are always there."""
    whole = memory.parameters + memory.gradients + memory.optimizer
    yield Moment(OPTIMIZER_STEP, whole, 0, 0, memory.step)
    for one in phases:
        gradients = max(one.gradients, memory.gradients if accumulate else 0)
        own = max(memory.parameters, one.parameters) + memory.optimizer + gradients
        yield Moment(one.name, own, one.gathered, one.activations, one.temporary)


def resharded(timeline: MemoryTimeline, before: Memory, now: Memory) -> MemoryTimeline:
    """Returns the moments of a layout with another number of data-parallel ranks. Only what a rank
    holds of parameters and gradients depends on it."""

    def phase(one: MemoryPhase) -> MemoryPhase:
        return dataclasses.replace(
            one,
            parameters=one.parameters * now.parameters // max(before.parameters, 1),
            gradients=one.gradients * now.gradients // max(before.gradients, 1),
        )

    return dataclasses.replace(timeline, phases=[phase(one) for one in timeline.phases])


def changes(options: CheckOptions, fit: Fit, ranks: int) -> Iterator[tuple[str, CheckOptions]]:
    """Yields what may make the step fit, the smallest change first, without those whose parameters
    and states alone are too much."""
    state = fit.peak.state
    if state < fit.capacity and fit.measured:
        for kind in ("selective", "layers")[fit.recompute == "selective" :]:
            if fit.recompute != "layers":
                yield f"--recompute {kind}", dataclasses.replace(options, recompute=kind)
        if fit.batch > 1:
            for batch in sorted({fit.batch // 2, 1}, reverse=True):
                words = f"--batch {batch} --recompute layers"
                yield words, dataclasses.replace(options, batch=batch, recompute="layers")
    for times in (2, 4, 8, 16):
        if state // times < fit.capacity:
            size = options.layout.get(DP_SHARD, 1) * times
            layout = {**options.layout, str(DP_SHARD): size}
            world = options.world * times if options.world else None
            words = f"{DP_SHARD}={size} ({ranks * times:,} ranks) --recompute layers"
            yield (
                words,
                dataclasses.replace(options, layout=layout, world=world, recompute="layers"),
            )
