"""A probe and its target failure, as lines of the display."""

from __future__ import annotations

from collections.abc import Sequence

from moediag.lab.campaign.bisect.probe_verdict import describe
from moediag.lab.campaign.bisect.signature_match import Target
from moediag.lab.campaign.bisect.timeline import ProbeRecord
from moediag.lab.campaign.engine import Line
from moediag.result import wording


def target_lines(target: Target) -> list[str]:
    """Returns the target failure and how often it shows."""
    text = [f"looking for ({target.match}): {signature}" for signature in target.signatures]
    rate = target.rate
    if not rate.steady:
        repeats = wording.plural(rate.repeats(), "clean trial")
        text.append(
            f"it showed in {rate.shown} of {wording.plural(rate.trials, 'trial')}, so {repeats} "
            "make a release good"
        )
    return text


def probe_line(record: ProbeRecord, wanted: Sequence[str] = ()) -> Line:
    """Returns ``4.53.0  12.1 s  bad``, followed by what showed unless it is among ``wanted``."""
    spent = "" if record.seconds is None else f"  {wording.seconds(record.seconds)}"
    verdict = record.verdict
    what = str(verdict.kind) if verdict.text in wanted else describe(verdict)
    return Line(f"{record.name}{spent}  {what}", seconds=record.seconds)
