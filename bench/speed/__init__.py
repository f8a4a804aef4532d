"""How fast the real step is: FSDP2 with expert parallelism in bf16, by kernel, routing and fix.

``python -m bench.speed`` on whatever is here; ``make gpu`` takes the rows into its report.
"""
