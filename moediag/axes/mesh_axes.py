"""The mesh axes, one class each, outermost first. The last lines of the file fix their order.

Pipeline stages talk least and may lie on different hosts; tensor parallelism talks most, so its
ranks are neighbours. Expert axes lie inside data parallelism because expert parallelism is carved
out of it, and so does context parallelism, whose ranks FSDP shards over as well.
"""

from __future__ import annotations

from moediag.axes.axis import PER_REPLICA, Axis, register


class PipelineParallel(Axis):
    """Each rank holds other layers and passes activations on."""

    name = "pp"
    about = "pipeline parallelism: each rank holds some of the layers and passes activations on"
    alone = "every rank holds all layers"
    __slots__ = ()

    def shares_batch(self, batches: str) -> bool:
        return True  # the same micro-batches go through all stages

    def divides(self, experts: bool) -> bool:
        return True  # whole parameters: a stage has its own layers

    def mine(self, rows: int, index: int, size: int, experts: bool) -> range:
        return range(rows)  # a parameter of this rank's stage is not cut

    def equal(self, experts: bool) -> bool:
        return False


class DataReplicate(Axis):
    """Each rank holds a whole copy and works on its own batch."""

    name = "dp_replicate"
    about = "data parallelism with replicas: each rank holds a copy and has its own batch"
    alone = "there is one copy of the model, sharded or not"
    data_parallel = True
    __slots__ = ()

    def shares_batch(self, batches: str) -> bool:
        return False

    def divides(self, experts: bool) -> bool:
        return False


class DataShard(Axis):
    """Each rank holds a piece of every parameter and works on its own batch."""

    name = "dp_shard"
    about = "data parallelism with shards (FSDP): each rank holds a piece and has its own batch"
    alone = "parameters are not sharded over data-parallel ranks"
    data_parallel = True
    __slots__ = ()

    def shares_batch(self, batches: str) -> bool:
        return False

    def divides(self, experts: bool) -> bool:
        return True


class ContextParallel(Axis):
    """Each rank works on its part of every sequence."""

    name = "cp"
    about = "context parallelism: each rank computes its part of every sequence"
    alone = "every rank computes whole sequences"
    __slots__ = ()

    def shares_batch(self, batches: str) -> bool:
        return True

    def divides(self, experts: bool) -> bool:
        return False

    def divisor(self, size: int, batches: str) -> int:
        return size  # the same sequences, but each rank's loss is the mean over other tokens


class ExpertParallel(Axis):
    """Each rank holds some of the routed experts."""

    name = "ep"
    about = "expert parallelism: each rank holds some of the routed experts"
    alone = "every rank has all routed experts, sharded or not"
    experts_only = True
    by_loading = True
    __slots__ = ()

    def shares_batch(self, batches: str) -> bool:
        # Either is in use: ranks that exchange tokens have batches of their own.
        return batches == PER_REPLICA

    def divides(self, experts: bool) -> bool:
        return experts


class ExpertTensorParallel(Axis):
    """Each rank holds a piece of each of its experts' matrices."""

    name = "etp"
    about = "tensor parallelism of the experts: each rank holds a piece of every expert's matrices"
    alone = "an expert's matrices are not cut"
    experts_only = True
    __slots__ = ()

    def shares_batch(self, batches: str) -> bool:
        return True

    def divides(self, experts: bool) -> bool:
        return experts


class TensorParallel(Axis):
    """Each rank holds a piece of the matrices that the model's plan names."""

    name = "tp"
    about = "tensor parallelism: each rank holds a piece of the matrices in the model's tp_plan"
    alone = "no matrix is cut"
    by_loading = True
    __slots__ = ()

    def shares_batch(self, batches: str) -> bool:
        return True

    def divides(self, experts: bool) -> bool:
        return True  # what the plan leaves out is equal on all ranks; placements tell the two apart


PP = register(PipelineParallel())
DP_REPLICATE = register(DataReplicate())
DP_SHARD = register(DataShard())
CP = register(ContextParallel())
EP = register(ExpertParallel())
ETP = register(ExpertTensorParallel())
TP = register(TensorParallel())
