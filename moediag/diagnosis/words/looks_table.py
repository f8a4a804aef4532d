"""The table of what looks at a running job saw, ranks that did the same together."""

from __future__ import annotations

from moediag.diagnosis.end_states.whereabouts import program_line
from moediag.evidence import looks
from moediag.evidence.looks import RankLook
from moediag.evidence.model import Evidence
from moediag.result import Table
from moediag.result.wording import ranks

TITLE = "What the ranks did"
_COLUMNS = ("ranks", "did", "at", "for at least", "CPU")
_GPU, _LAST = "GPU", "numbers there"
_MOST_NUMBERS = 4


def table(evidence: Evidence) -> Table | None:
    """None if the job was not looked at."""
    seen = evidence.looks
    if seen is None or not seen.ranks:
        return None
    together: dict[tuple[str, str], list[int]] = {}
    for rank, look in sorted(seen.ranks.items()):
        line = program_line(evidence.ranks[rank]) if rank in evidence.ranks else ""
        together.setdefault((_did(look), line), []).append(rank)
    gpus = any(look.gpu is not None for look in seen.ranks.values())
    rows = []
    for (did, line), who in together.items():
        those = [seen.ranks[rank] for rank in who]
        still = min(look.still for look in those)
        cpu = max(look.cpu for look in those)
        rows.append((ranks(who), did, line or None, f"{still:.0f} s" if still else None,
                     f"{cpu:.0%}", *((_gpu(those),) if gpus else ()),
                     _numbers(those) or None))  # fmt: skip
    return Table(TITLE, (*_COLUMNS, *((_GPU,) if gpus else ()), _LAST), tuple(rows))


def _gpu(those: list[RankLook]) -> str | None:
    known = [look.gpu for look in those if look.gpu is not None]
    return f"{max(known):.0%}" if known else None


def _did(look: RankLook) -> str:
    if look.does in (looks.IDLE, looks.STOPPED) and look.held:
        return look.held
    return look.words or {looks.WAITS: "waits in communication", looks.IDLE: "sleeps",
                          looks.MOVES: "moved on", looks.GONE: "ended",
                          looks.UNREAD: "could not be read"}.get(look.does, look.does)  # fmt: skip


def _numbers(those: list[RankLook]) -> str:
    """``step=3``: local variables that all of these ranks have alike; others say how many values
    there are."""
    told: list[str] = []
    for name in those[0].values:
        found = {look.values.get(name, "") for look in those}
        if "" not in found and len(told) < _MOST_NUMBERS:
            told.append(f"{name}={found.pop()}" if len(found) == 1 else f"{name}=({len(found)})")
    return ", ".join(told)
