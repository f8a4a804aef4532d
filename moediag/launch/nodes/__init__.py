"""Protocol between the supervisors of several nodes of one job.

Each node has its own supervisor. ``status`` has the message about its ranks, ``shared_folder`` the
folder for messages, ``exchange`` the thread that reads and writes them, ``relay`` the exchange
without a shared folder, and ``peers`` the meaning of other nodes' messages. ``other_nodes``
combines them.
"""

__all__ = ["other_nodes"]
