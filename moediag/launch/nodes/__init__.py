"""Protocol between the supervisors of several nodes of one job.

Each node has its own supervisor. ``status`` is what it tells about its ranks, ``shared_folder``
where they exchange it, ``exchange`` the thread that reads and writes, ``relay`` the way without a
shared folder, ``peers`` what the others' messages mean, and ``other_nodes`` all of it together.
``rendezvous`` lets the nodes of a run begin the same trial.
"""

__all__ = ["other_nodes", "rendezvous"]
