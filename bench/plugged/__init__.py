"""Other libraries' own tests with moediag's pytest plugin and without, and faults planted in their
style. `python -m bench.plugged` writes reports/plug.md."""
