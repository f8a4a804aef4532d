"""What is timed and what came of it; plain data, for the command and for its ranks."""

from __future__ import annotations

from dataclasses import dataclass, field

METHODS = (
    "per-parameter",  # one broadcast per parameter, then each rank cuts its shard
    "accelerate",  # accelerate's fsdp2_load_full_state_dict as installed
    "coalesced",  # one broadcast per bucket of parameters, then each rank cuts
    "torch",  # set_model_state_dict with broadcast_from_rank0
    "scatter",  # distribute_tensor with its defaults: one scatter per parameter
    "local",  # distribute_tensor(src_data_rank=None): every rank has all weights already
)
DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True, slots=True)
class Spec:
    """The loads that one run times, side by side."""

    #: Sizes of the model, in parameters (tensors). Growth needs two or more.
    parameters: list[int] = field(default_factory=lambda: [100, 200, 400])
    #: Elements of one matrix. Every eighth parameter is a vector of odd length.
    numel: int = 4096
    methods: list[str] = field(default_factory=lambda: list(METHODS))
    #: Timed loads of each method and size.
    rounds: int = 3
    #: Size of one broadcast of ``coalesced``, in 10^6 bytes.
    bucket_mb: float = 25.0
    dtype: str = "float32"


@dataclass(frozen=True, slots=True)
class Timing:
    """One method on a model of ``parameters`` parameters, as one rank saw it."""

    method: str
    parameters: int
    #: Size of the whole model.
    bytes: int
    #: Number of collectives of each kind that one whole load issued.
    calls: dict[str, int] = field(default_factory=dict)
    #: Seconds of the whole load, one entry per round.
    seconds: list[float] = field(default_factory=list)
    #: Seconds of its collectives alone on existing buffers, one per round; empty where it has none.
    communication: list[float] = field(default_factory=list)
    #: Parameters whose shard differed, in any bit and any round, from its cut of the true tensor.
    wrong: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class RankTimings:
    """What one rank measured, as its file holds it."""

    timings: list[Timing]
    #: Methods that the stack lacks and other facts that a reader needs.
    notes: list[str] = field(default_factory=list)
    versions: dict[str, str | None] = field(default_factory=dict)
