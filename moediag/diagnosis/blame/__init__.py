"""Which ranks diverged, and which decisions and nodes explain it."""
