"""The rank that the name of a file tells, when its content does not.

Most numbers in names are no ranks: dates, seeds, jobs, versions, issues. Only the word "rank",
torchrun's own folders and sibling files that count from 0 give one.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from moediag.evidence.log_lines import MAX_RANK

# The rank of a low-rank adapter is something else.
_BY_WORD = re.compile(r"(?<!lora)(?<!lora[_.-])(?<![A-Za-z])rank[\s_.\-=]*0*(\d{1,7})(?!\d)", re.I)
_BY_NUMBER = re.compile(r"(?<![\d.])0*(\d{1,4})((?:\.[A-Za-z][\w.]*)?)$")
_BY_FOLDER = re.compile(r"^(?:attempt_(?P<attempt>\d{1,4})/)?(?P<rank>\d{1,5})$")
#: Files that torchrun writes into the folder of each rank.
OF_TORCHRUN = ("stdout.log", "stderr.log", "error.json")


class Names:
    """The names of all files that are read together."""

    def __init__(self, files: Iterable[Path]) -> None:
        series: dict[tuple[Path, str, str], dict[int, list[Path]]] = defaultdict(dict)
        for file in files:
            if number := _BY_NUMBER.search(file.name):
                alike = series[file.parent, file.name[: number.start()], number[2]]
                alike.setdefault(int(number[1]), []).append(file)
        self._counted: dict[Path, int] = {}
        for numbers in series.values():
            if len(numbers) > 1 and numbers.keys() == set(range(len(numbers))):
                for rank, found in numbers.items():
                    self._counted.update(dict.fromkeys(found, rank))

    def rank(self, path: Path, root: Path) -> int | None:
        """Returns the rank in a path that was found under ``root``.

        Examples: ``rank_3.log``, ``nccl_trace_rank_3``, ``rank3/out.txt``,
        ``attempt_0/3/stderr.log``; ``trace_0003.json`` beside those from ``trace_0000.json`` on.
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
                return int(words[-1]) if int(words[-1]) < MAX_RANK else None
        return self._counted.get(path)
