"""How often the diagnosis is right, beside what torch itself answers on the same cases:
``python -m bench.accuracy``."""
