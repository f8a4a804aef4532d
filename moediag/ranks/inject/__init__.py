"""How the recorder gets into the ranks of a job that is not ours, without a change to its source.

``path`` is put first on PYTHONPATH; the ``sitecustomize`` in it waits for torch.distributed to be
imported. Only then is anything of moediag imported: :mod:`moediag.ranks.inject.rank` in ranks, the
observer of :mod:`moediag.ranks.agent` in torchrun.
"""
