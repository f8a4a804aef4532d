"""How far apart two computations of the same number of a training step may be.

Both sides judge by these shares. They are measured on healthy controls: float32 differs by the
order of summation alone, a coarser dtype by the rounding of every activation. ``verify`` and the
relations measure rounding in the model itself; for them these are the floors.
"""

from __future__ import annotations

from dataclasses import dataclass

# One rounding error of a number near 1.
ROUNDING = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}


@dataclass(frozen=True)
class Share:
    """An allowed difference, relative to what its name says."""

    floor: float  # in float32
    roundings: float  # of a coarser dtype, if that is more

    def of(self, dtype: str) -> float:
        return max(self.floor, self.roundings * ROUNDING[dtype])


# Against the reference: of a gradient's largest element; also of how far training moves a weight.
GRADIENT = Share(1e-3, 25.6)
# Beside GRADIENT, of the largest gradient of the model: smaller errors are rounding.
SMALLEST = Share(1e-5, 2.56)
# Of the norm of all gradients: a norm that is the same on all ranks.
TRUE_NORM = Share(1e-2, 51.2)
# Of a multiple of the reference: how far its factor, and what the factor leaves, may be off.
FACTOR = Share(1e-3, 12.8)

# Between replicas, which deterministic kernels make bit-identical: of the gradient's norm; of the
# norm of an optimizer's moment; of the weight's own norm (sketches have nine digits).
REPLICA_GRADIENT = Share(1e-4, 5.12)
REPLICA_STATE = FACTOR
REPLICA_WEIGHT = Share(2e-7, 0.256)

# Of a tensor's norm: a difference that no rounding makes (bfloat16: 0.004).
LARGE = 0.2

# Numbers, relative: a loss, a learning rate, and of the largest logit of a generated token.
SAME_LOSS, SAME_RATE, SAME_LOGIT = 1e-5, 1e-6, 1e-3
