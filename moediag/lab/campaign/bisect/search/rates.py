"""How many clean trials make a release good?

A failure that shows in a share p of its trials is missed by k trials with chance (1 - p)^k. p is
only measured, and from few trials. So the chance is averaged over every p that the measurement
allows (uniform prior, so p ~ Beta(shown + 1, trials - shown + 1)), which has the closed form below.
The prior says that nine failures in ten always show, until one trial does not show it; otherwise
three of three would require repeats of every release. That prior is an assumption, not a
measurement.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from moediag.lab.campaign.bisect.probe_verdict import Kind, ProbeVerdict, flaky, skip
from moediag.records import dataclass

SURE = 0.95  # required confidence in a clean release
STEADY_PRIOR = 0.9  # assumed share of failures that show in every trial
MOST_REPEATS = 200  # a failure that needs more is too rare to be bisected


@dataclass(frozen=True, slots=True)
class Rate:
    """Measured at the bad end: ``shown`` of ``trials`` showed the failure. Raises ValueError unless
    1 <= shown <= trials."""

    shown: int = 1
    trials: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.shown <= self.trials:
            raise ValueError(f"shown {self.shown} of {self.trials}: at least one of them must")

    @property
    def steady(self) -> bool:
        """Whether it showed in every trial."""
        return self.shown == self.trials

    def missed(self, clean: int) -> float:
        """Returns the chance, 0 to 1, that ``clean`` trials all miss an existing failure."""
        if clean < 0:
            raise ValueError(f"{clean} clean trials")
        hidden = self.trials - self.shown
        log = sum(math.log(hidden + 1 + i) - math.log(self.trials + 2 + i) for i in range(clean))
        uneven = math.exp(log)
        if not self.steady:
            return uneven
        if clean == 0:
            return 1.0
        # If all trials showed it: likely for any rate, certain if it always shows.
        doubt = (1 - STEADY_PRIOR) / (self.trials + 1)
        return uneven * doubt / (STEADY_PRIOR + doubt)

    def repeats(self) -> int:
        """Returns how many clean trials make a release good. Raises ValueError if that takes more
        than MOST_REPEATS."""
        for count in range(1, MOST_REPEATS + 1):
            if self.missed(count) <= 1 - SURE:
                return count
        raise ValueError(
            f"a failure that shows in {self.shown} of {self.trials} trials needs more than "
            f"{MOST_REPEATS} repeats to be {SURE:.0%} sure"
        )


def combined(trials: Sequence[ProbeVerdict], rate: Rate) -> ProbeVerdict:
    """Returns the verdict of a probe from those of its trials.

    BAD if the failure showed (once is enough if it is intermittent). GOOD if enough trials were
    clean and none showed it. FLAKY if a failure that always shows did so in some only. With too few
    clean trials: the first OTHER, else the first SKIP, else a SKIP with the number. Trials that
    decided nothing do not count. Raises ValueError without trials.
    """
    if not trials:
        raise ValueError("a probe without trials")
    bad = sum(v.trials for v in trials if v.kind == Kind.BAD)
    good = sum(v.trials for v in trials if v.kind == Kind.GOOD)
    if bad and good and rate.steady:
        return flaky(bad, good)
    if bad:
        text = next(v.text for v in trials if v.kind == Kind.BAD)
        return ProbeVerdict(Kind.BAD, text, trials=bad)
    needed = rate.repeats()
    if good >= needed:
        return ProbeVerdict(Kind.GOOD, trials=good)
    for kind in (Kind.FLAKY, Kind.OTHER, Kind.SKIP):
        for verdict in trials:
            if verdict.kind == kind:
                return verdict
    return skip(f"clean in {good} trials, {needed} are needed")
