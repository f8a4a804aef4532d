"""The names of kernels, routings and fixes; imports no torch, for the control side."""

KERNELS = ("eager", "batched_mm", "grouped_mm", "triton")
ROUTINGS = ("balanced", "zero-token", "one-hot")
LOOP = "loop"  # the unfixed code path: a loop over the experts with tokens
FIXES = ("dense-experts", "touch", "zero-fill", "set-reduce-scatter-unused-params", "iterate-all")
FUSED = ("grouped_mm", "triton")  # need no fix: all experts are one parameter
OFF = "off"  # the step without the recorder
RECORDED = ("on", "guard", "laws", "checked")  # with it; a step that laws do not check, or do
WHATS = ("kernels", "fixes", "recording")
