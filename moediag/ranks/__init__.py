"""The launcher's part in each rank's machine: the processes that start, watch and end the ranks.

``host`` and ``torchrun`` are the launchers' own processes, ``entry`` is where a rank begins,
``relay`` carries messages between nodes, and ``inject`` gets the recorder into a watched job.
Standard library and torch only.
"""

__all__ = ["agent", "entry", "host", "inject", "relay", "torchrun"]
