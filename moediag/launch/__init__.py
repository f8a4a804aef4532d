"""Starting ranks, following them until they end, and keeping what they leave behind."""

__all__ = [
    "follow",
    "hosts",
    "launcher",
    "nodes",
    "processes",
    "record",
    "settings",
    "shutdown",
    "signals",
    "watched",
]
