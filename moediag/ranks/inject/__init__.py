"""Loads the recorder into the ranks of a watched job, without a change to the job's source.

``path`` is put first on PYTHONPATH; the ``sitecustomize`` in it waits for torch.distributed to be
imported. Only then is anything of moediag imported: :mod:`moediag.ranks.inject.rank` in ranks, the
observer of :mod:`moediag.ranks.agent` in torchrun.
"""

__all__ = ["rank"]
