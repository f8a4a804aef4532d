"""What `moediag check` is asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from pathlib import Path

from moediag.lab.pipeline.check_cost import Bandwidth
from moediag.records import dataclass


@dataclass(frozen=True, slots=True)
class CheckOptions:
    """The question."""

    config: str
    """A folder with config.json, the file, or a hub name that the local cache has."""
    layout: Mapping[str, int]
    world: int | None = None
    """Number of ranks; None: the product of the axes."""
    stack: Mapping[str, str] = field(default_factory=dict)
    wrapper: str = ""
    """``transformers`` or ``fsdp2``: who shards. "": transformers for a layout that from_pretrained
    divides the model along, else fsdp2."""
    simulate: bool = True
    length: int = 0
    """Tokens of a sequence; 0: not told."""
    batch: int = 0
    """Sequences of a rank; 0: the peak of a step is not measured."""
    recompute: str = "none"
    """What backward computes again: ``none``, ``layers`` or ``selective``."""
    accumulate: bool = False
    """A step has several micro-batches, whose gradients are added."""
    reserved: bool = False
    """Also what torch's allocator reserves."""
    card: str = ""
    """GiB or a name of :data:`check_fit.CARDS`; "": the peak is held against none."""
    dtype: str = ""
    """That from_pretrained is given; "": the configuration's."""
    param_dtype: str = ""
    """In which fully_shard gathers and computes; "": the parameters' own."""
    reduce_dtype: str = ""
    """Of reduced gradients; "": that of the computation."""
    optimizer: str = "adamw"
    master: bool = False
    """The optimizer keeps a float32 copy of each parameter."""
    brief: bool = False
    """One of many: without notes, the worst load of experts and a change that would make it fit."""
    bandwidth: Bandwidth | None = None
    """None: no communication time is computed."""
    timeout: float = 600.0
    out: Path | None = None
