"""Measures the speed of the real step: FSDP2 with expert parallelism in bf16, by kernel, routing,
fix.

``python -m bench.speed`` uses the available devices; ``make gpu`` includes the rows in its report.
"""
