"""The rank that the name of a file tells, when its content does not."""

from __future__ import annotations

import re
from pathlib import Path

from moediag.evidence.log_lines import MAX_RANK

_BY_WORD = re.compile(r"rank[\s_.\-=]*0*(\d{1,7})(?!\d)", re.IGNORECASE)
_BY_NUMBER = re.compile(r"(?<![\d.])0*(\d{1,4})(?:\.[A-Za-z][\w.]*)?$")
# Numbers in names that count something else than ranks.
_OF_OTHERS = re.compile(
    r"(?:node|host|worker|master|pod|job|run|exp|epoch|step|version|part)[-_.]?0*$", re.I
)
_BY_FOLDER = re.compile(r"^(?:attempt_(?P<attempt>\d{1,4})/)?(?P<rank>\d{1,5})$")
#: Files that torchrun writes into the folder of each rank.
OF_TORCHRUN = ("stdout.log", "stderr.log", "error.json")


def rank_of(path: Path, root: Path) -> int | None:
    """The rank in a path: the number after "rank", torchrun's folder, else the last number.

    Examples: ``rank_3.log``, ``nccl_trace_rank_3``, ``trace_0003.json``, ``rank3/out.txt``,
    ``attempt_0/3/stderr.log``.
    """
    below = path.relative_to(root).parts if path != root else (path.name,)
    if path.name in OF_TORCHRUN:
        folder = path.parent
        above = folder.parent.name
        prefix = f"{above}/" if above.startswith("attempt_") else ""
        if found := _BY_FOLDER.match(prefix + folder.name):
            return int(found["rank"])
    for part in reversed(below):
        if words := _BY_WORD.findall(part):
            return _sane(words[-1])
    number = _BY_NUMBER.search(path.name)
    if number and _OF_OTHERS.search(path.name[: number.start(1)]):
        return None
    return _sane(number[1]) if number else None


def _sane(number: str) -> int | None:
    return int(number) if int(number) < MAX_RANK else None
