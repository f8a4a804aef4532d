"""The verdict of a probe of one release, and how several verdicts combine.

Only BAD (the target failure, by its signature) and GOOD (ran to its end, and its invariant held)
move a bound of the search. Other verdicts are only reported.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moediag.records import dataclass
from moediag.result.verdicts import StrEnum
from moediag.result.wording import plural


class Kind(StrEnum):
    BAD = "bad"
    GOOD = "good"
    OTHER = "other"
    SKIP = "skip"
    FLAKY = "flaky"

    @property
    def letter(self) -> str:
        return self.value[0].upper()


DECIDED = frozenset({Kind.BAD, Kind.GOOD})


@dataclass(frozen=True, slots=True)
class ProbeVerdict:
    """What a probe found."""

    kind: Kind
    text: str = ""  # signature of an OTHER, reason of a SKIP, description of a FLAKY
    rate: float | None = None  # of a FLAKY: share of its deciding trials with the failure, 0 to 1
    trials: int = 1  # trials that decided it; for a GOOD, the clean ones

    def __post_init__(self) -> None:
        if self.trials < 0 or not 0 <= (self.rate or 0.0) <= 1:
            raise ValueError(f"no verdict of a probe: {self}")

    @property
    def decided(self) -> bool:
        return self.kind in DECIDED

    def to_json(self) -> dict[str, Any]:
        """Returns JSON without fields at their default."""
        raw: dict[str, Any] = {"kind": str(self.kind)}
        if self.text:
            raw["text"] = self.text
        if self.rate is not None:
            raw["rate"] = round(self.rate, 6)
        if self.trials != 1:
            raw["trials"] = self.trials
        return raw


BAD = ProbeVerdict(Kind.BAD)
GOOD = ProbeVerdict(Kind.GOOD)


def other(signature: str) -> ProbeVerdict:
    return ProbeVerdict(Kind.OTHER, signature)


def skip(reason: str) -> ProbeVerdict:
    return ProbeVerdict(Kind.SKIP, reason)


def flaky(bad: int, good: int) -> ProbeVerdict:
    """Returns FLAKY: ``bad`` of ``bad + good`` deciding trials showed the failure."""
    trials = bad + good
    text = f"shows in {bad} of {plural(trials, 'trial')}"
    return ProbeVerdict(Kind.FLAKY, text, bad / trials, trials)


def describe(verdict: ProbeVerdict) -> str:
    """Returns the verdict and its text in words."""
    words = {Kind.OTHER: "another failure", Kind.SKIP: "skipped", Kind.FLAKY: "flaky"}
    word = words.get(verdict.kind, str(verdict.kind))
    return f"{word} ({verdict.text})" if verdict.text else word


def merged(attempts: Sequence[ProbeVerdict], steady: bool) -> ProbeVerdict:
    """Returns one verdict for several probes of the same release, in the order they were made.

    An intermittent failure (``steady`` false) is present once it has been seen. A steady one is
    FLAKY if probes disagree. Probes that decided nothing do not count. Raises ValueError without
    attempts.
    """
    if not attempts:
        raise ValueError("no attempt to merge")
    bad = [v for v in attempts if v.kind == Kind.BAD]
    good = [v for v in attempts if v.kind == Kind.GOOD]
    shaky = [v for v in attempts if v.kind == Kind.FLAKY]
    if bad and (not steady or not (good or shaky)):
        return ProbeVerdict(Kind.BAD, bad[0].text, trials=sum(v.trials for v in bad))
    if good and not bad and not shaky:
        return ProbeVerdict(Kind.GOOD, trials=sum(v.trials for v in good))
    if bad or shaky:
        shown = sum(v.trials for v in bad)
        shown += sum(round((v.rate or 0.0) * v.trials) for v in shaky)
        clean = sum(v.trials for v in (*good, *shaky, *bad)) - shown
        return flaky(shown, clean) if shown + clean else shaky[0]
    return attempts[-1]
