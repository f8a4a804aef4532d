"""Measures steps of a user's own program, and compares them with those of one process.

``measuring`` runs in the user's processes; ``comparison`` afterwards, in a process of its own.
"""

__all__ = ["comparison", "measuring", "model_pieces", "samples", "tensor_files"]
