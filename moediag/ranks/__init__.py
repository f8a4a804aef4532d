"""The launcher's part in each rank's machine: the processes that start, watch and end the ranks.

``entry`` is where a rank begins, ``relay`` carries messages between nodes, ``inject`` gets the
recorder into a watched job, and ``verify`` measures its first steps. Standard library and torch
only.
"""

__all__ = ["agent", "entry", "inject", "relay", "verify"]
