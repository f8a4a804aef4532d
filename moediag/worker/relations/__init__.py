"""Relations: what must hold for any model family, checked on tiny models in one process."""

from moediag.worker.relations.cell import listing, run

__all__ = ["listing", "run"]
