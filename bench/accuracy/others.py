"""Reads the answers of torch's own tools, leniently: they need not name the class of a failure.
Pure.

``torchfrtrace`` prints findings in the order of rank 0's calls; its answer is the first one.
``TORCH_DISTRIBUTED_DEBUG=DETAIL`` makes ranks raise; the answer is the rank that these errors name.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from bench.accuracy.counting import Answer

# ------------------------------------------------------------------------ torchfrtrace

_FINDING = re.compile(
    r"^(?:Not all ranks joining collective, sequence number: .*"
    r"|Input/output mismatch in the collective sequence number: .*"
    r"|Collective sequence number: .* has errors)$",
    re.MULTILINE,
)
_MISSING = re.compile(r"^missing ranks: \{(.*)\}$", re.MULTILINE)
_CULPRIT = re.compile(r"Culprit rank (\d+); Error type: (\w+)")
_CALL = re.compile(r"^collective: (?:\w+:)?(.*)$", re.MULTILINE)
_FRAME = re.compile(r" at (\S+\.py):(\d+)")


def torchfrtrace(text: str, error: str = "", *, has_lines: bool = True) -> Answer:
    """Reads torchfrtrace's printed ``text`` and the ``error`` that it ended with."""
    if error:
        return Answer(alarm=False, refused=error, has_lines=has_lines)
    starts = [match.start() for match in _FINDING.finditer(text)]
    ends = [*starts, len(text)][1:]
    findings = [text[start:end] for start, end in zip(starts, ends, strict=True)]
    if not findings:
        undecided = "We cannot decide" in text
        said = "cannot decide" if undecided else "nothing"
        return Answer(alarm=False, text=said, has_lines=has_lines)
    named = tuple(_named(finding) for finding in findings)
    return Answer(True, named[0], _said(findings[0]), has_lines=has_lines, among=named)


def _named(finding: str) -> tuple[int, ...]:
    missing = _MISSING.search(finding)
    if missing:
        return tuple(sorted(map(int, missing[1].split(","))))
    return tuple(sorted({int(rank) for rank, _ in _CULPRIT.findall(finding)}))


def _said(finding: str) -> str:
    kinds = dict.fromkeys(kind for _, kind in _CULPRIT.findall(finding))
    call = _CALL.search(finding)
    what = ", ".join(kinds) if kinds else finding.split(",")[0].split(" sequence")[0]
    lines = " ".join(dict.fromkeys(f"{Path(p).name}:{n}" for p, n in _FRAME.findall(finding)))
    return f"{what} in {call[1] if call else 'a call'} {lines}".strip()


# ------------------------------------------------------------------------ DETAIL

_MISMATCH = re.compile(
    r"Detected mismatch between collectives on ranks\. Rank \d+ is running collective: .*?,?"
    r" but Rank (\d+) is running",
    re.DOTALL,
)
_BARRIER = re.compile(r"Ranks? ([\d, ]+) failed to pass monitoredBarrier")
_GAVE_UP = re.compile(r"[Tt]imed out|monitoredBarrier|imeout")
_ROOT = re.compile(
    r"Root Cause \(first observed failure\).*?rank\s*: (\d+).*?exitcode\s*: (-?\d+)", re.DOTALL
)
_TRACEBACK = re.compile(r'File "([^"]+\.py)", line (\d+)')


def detail(printed: Mapping[int, str], launcher: str, code: int | None) -> Answer:
    """Reads DETAIL's answer from the stderr of each rank (``printed``), torchrun's own
    (``launcher``) and its exit ``code`` (None if it had to be stopped). If the ranks' errors name
    no rank, torchrun's "first observed failure" counts, unless that rank only stopped waiting."""
    text = "\n".join(printed.values())
    lines = " ".join(dict.fromkeys(f"{Path(p).name}:{n}" for p, n in _TRACEBACK.findall(text)))
    if code == 0:
        return Answer(alarm=False, text="nothing")
    against = Counter(int(rank) for rank in _MISMATCH.findall(text))
    if against:
        most = max(against.values())
        named = tuple(sorted(rank for rank, count in against.items() if count == most))
        return Answer(True, named, f"mismatch between collectives {lines}")
    barred = {int(r) for ranks in _BARRIER.findall(text) for r in ranks.split(",") if r.strip()}
    if barred:
        return Answer(True, tuple(sorted(barred)), f"did not reach monitoredBarrier {lines}")
    root = _ROOT.search(launcher)
    if root is not None and not _GAVE_UP.search(printed.get(int(root[1]), "")):
        return Answer(True, (int(root[1]),), f"torchrun: exit code {root[2]} {lines}")
    if code is None:
        return Answer(alarm=False, text="nothing until it was ended")
    return Answer(True, (), f"ranks gave up waiting {lines}")
