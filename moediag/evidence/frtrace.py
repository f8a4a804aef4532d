"""What torch's own analyser of Flight Recorder dumps prints, ``torchfrtrace``.

Formats: pytorch/pytorch, torch/distributed/flight_recorder/components/types.py (`EntryState.log`,
`MatchState`) and utils.py (`error_analysis`); tools/flight_recorder before 2.9; ``Collective 39 at
entry 38 errors`` before 2.7. Its ranks are those of the job. It compares with the first rank that
it reads, so "culprit" only says that a rank differs from that one.
"""

from __future__ import annotations

import re

from moediag.evidence.flight_names import plain_op
from moediag.evidence.model import Report
from moediag.result.wording import ranks

_BEGINS = re.compile(
    r"^(?:(?P<missing>Not all ranks joining collective)|Collective|"
    r"(?P<sizes>Input/output mismatch in the collective))[ ,]*(?:sequence number: )?"
    r"(?P<seq>\d{1,15})[^\n]{0,40}$",
    re.MULTILINE,
)
_FIELD = re.compile(r"^(?P<name>[a-z ]{4,24}): (?P<value>[^\n]{1,4000})$", re.MULTILINE)
_ERROR = re.compile(
    r"Culprit rank (?P<rank>\d{1,7}); (?:Error type: )?(?P<type>[A-Z_]+)"
    r"(?:, (?P<why>(?:Expected|Found)[^\n]{1,300}?))?(?=, Culprit rank|$)"
)
_LOST = re.compile(r"we missed FR dumps from ranks \((?P<ranks>[^)\n]{1,4000})\)")
_EQUAL = "No errors found for this collective entry"
_STATE = "COLLECTIVE_STATE_MISMATCH"


def read(text: str) -> tuple[Report, ...]:
    """What the analyser found first in each group; () if the text is not its output."""
    found: dict[str, Report] = {}
    begins = list(_BEGINS.finditer(text))
    ends = [*(one.start() for one in begins[1:]), len(text)]
    for head, end in zip(begins, ends, strict=False):
        fields = {one["name"]: one["value"] for one in _FIELD.finditer(text, head.end(), end)}
        if "collective" in fields:
            found.setdefault(fields.get("group info", ""), _report(head, fields))
    named = [one for one in found.values() if one.about]
    if len(found) > 1 and named:  # a rank may be missing in one group because it waits in another
        return tuple(
            Report("fr-apart", text=one.text, size=one.size) if one.about else one
            for one in found.values()
        )
    if found:
        return tuple(found.values())
    if lost := _LOST.search(text):
        who = ranks(map(int, re.findall(r"\d{1,7}", lost["ranks"])))
        return (Report("fr-undecided", text=f"torchfrtrace could not decide: no dump of {who}"),)
    return (Report("fr-equal", text="torchfrtrace found no error"),) if _EQUAL in text else ()


def _report(head: re.Match[str], fields: dict[str, str]) -> Report:
    op = plain_op(fields["collective"].rpartition(":")[2].partition(" ")[0])
    group = fields.get("group info", "").partition(":")[2]
    call = f"{op} number {head['seq']}" + (f" of {group}" if group else "")
    expected = _ranks(fields.get("expected ranks", ""))
    size = max(len(expected), max(expected, default=-1) + 1)
    if fields.get("world size", "").isdecimal():
        size = max(size, int(fields["world size"][:7]))
    missing = _ranks(fields.get("missing ranks", ""))
    if head["missing"] and missing:
        text = f"torchfrtrace says that {ranks(missing)} did not join {call}"
        few = missing if 2 * len(missing) < len(expected) else ()
        return Report("fr-missing" if few else "fr-apart", about=few, size=size, text=text)
    errors = list(_ERROR.finditer(fields.get("error msg", "")))
    told = "; ".join(
        f"rank {one['rank']} differs ({one['why'] or one['type']})" for one in errors[:4]
    )
    if head["sizes"]:
        numbers = (fields.get("total input numel", "?"), fields.get("total output numel", "?"))
        told = f"all ranks together send {numbers[0]} elements and expect {numbers[1]}"
    text = f"torchfrtrace found in {call}: {told or 'an error'}"
    if errors and all(one["type"] == _STATE for one in errors):
        return Report("fr-apart", size=size, text=text)
    return Report("fr-mismatch", size=size, text=text)


def _ranks(text: str) -> tuple[int, ...]:
    return tuple(sorted(map(int, re.findall(r"\d{1,7}", text))))
