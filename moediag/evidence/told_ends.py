"""How ranks ended, as launchers say: mpirun, srun, Intel MPI, Lightning.

A launcher that loses one process ends the others, and says of those too that they ended. So only
the strongest ends count: a fatal signal, a kill for memory or an abort before a plain kill, and a
kill before an exit code, which may be anybody's. Several plain kills or exit codes show nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from moediag.evidence import signal_names
from moediag.evidence.log_formats import meaning
from moediag.evidence.model import ExitStatus, Report

_SIGNAL = re.compile(r"(?:signal:? |SIGNAL: |code:? (?:= )?-)(\d{1,3})\b")
_FATAL = re.compile(r"\bSIG(?:KILL|SEGV|BUS|FPE|ILL)\b")
_CODE = re.compile(r"(?:exit code|errorcode|Exit code:|EXIT CODE:|terminated with code) *(\d{1,5})")
# Launchers say these of the process that ended first.
_FIRST = re.compile(r"MPI_ABORT|Process name:|^process rank|Out Of Memory")
_NOTHING, _EXIT, _KILL, _CAUSE = range(4)


def exits(reports: Iterable[Report], others_failed: bool) -> dict[int, ExitStatus]:
    """The ends that explain a failure, by rank. ``others_failed``: a rank's own exception is known,
    so plain kills and exit codes are what followed."""
    found: dict[int, tuple[int, ExitStatus]] = {}
    reports = tuple(reports)
    gave_up = {rank for one in reports if meaning(one).waits for rank in (one.rank, one.place)}
    for one in reports:
        rank = one.rank if one.kind == "child" else next(iter(one.about), None)
        if one.kind in ("ended", "child") and rank is not None:
            end = _end(one.text)
            if end.signal == "SIGABRT" and rank in gave_up:  # a watchdog ended it
                continue
            found[rank] = max(found.get(rank, (_NOTHING, end)), (_weight(end, one.text), end),
                              key=lambda both: both[0])  # fmt: skip
    most = max((weight for weight, _ in found.values()), default=_NOTHING)
    strongest = {rank: end for rank, (weight, end) in found.items() if weight == most}
    if most == _NOTHING or (most < _CAUSE and (others_failed or len(strongest) > 1)):
        return {}
    return strongest


def is_cause(text: str) -> bool:
    """Whether an end of an unknown rank explains why others wait: not an abort or an exit code,
    with which ranks end that gave up waiting."""
    return bool(_FATAL.search(_end(text).signal or text))


def _end(text: str) -> ExitStatus:
    if number := _SIGNAL.search(text):
        return ExitStatus(signal=signal_names.name_of(int(number[1])))
    signal = signal_names.named_in(text)
    code = _CODE.search(text) if signal is None else None
    return ExitStatus(int(code[1]) if code else None, signal)


def _weight(end: ExitStatus, text: str) -> int:
    if end.signal == "SIGTERM" or end.code == 0:
        return _NOTHING
    if _FIRST.search(text) or end.signal not in (None, "SIGKILL"):
        return _CAUSE
    return _KILL if end.signal else _EXIT
