"""Times the ways to load full weights into a sharded model: ``python -m bench.load_cost``."""
