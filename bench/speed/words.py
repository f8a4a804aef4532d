"""What can be asked for, by name; without torch, so that the control side may read it."""

KERNELS = ("eager", "batched_mm", "grouped_mm", "triton")
ROUTINGS = ("balanced", "zero-token", "one-hot")
LOOP = "loop"  # experts one by one, those with tokens: the unfixed code path
FIXES = ("dense-experts", "touch", "zero-fill", "set-reduce-scatter-unused-params", "iterate-all")
FUSED = ("grouped_mm", "triton")  # needs no fix: all experts are one parameter
