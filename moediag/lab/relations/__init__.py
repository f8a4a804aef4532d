"""Relations: what must hold for any model family, checked on tiny models in one process."""

from moediag.lab.relations.cell import listing, run, saved

__all__ = ["listing", "run", "saved"]
