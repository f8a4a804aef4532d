"""Records what must hold in any healthy job, for ``moediag watch --laws``: at some of the steps,
fingerprints of parameters, gradients, optimizers and samples, into a log of their own.

Nothing is compared here, and nothing is sent to another rank: the diagnosis compares the logs of
all ranks.
"""

from moediag.recorder.laws.watchers import record

__all__ = ["record"]
