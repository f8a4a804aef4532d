"""Measures how often the diagnosis is right, beside torch's own tools on the same cases:
``python -m bench.accuracy``."""
