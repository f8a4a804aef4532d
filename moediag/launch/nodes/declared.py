"""How many nodes a job is started on, by its command, before a rank tells."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from moediag.records import dataclass

NEVER_CAME = "did not come"
_SOON = 10.0  # seconds in which nodes may start one after the other
_LAUNCHER = re.compile(r"(?:^|/)torchrun$|^torch\.distributed\.(?:run|launch)$")


@dataclass(frozen=True, slots=True)
class Declared:
    """The nodes of a job."""

    nodes: int = 1
    own: int | None = None
    """The number of this one."""

    @property
    def others(self) -> str:
        if self.nodes == 2 and self.own in (0, 1):
            return f"node {1 - self.own} of 2"
        return f"the other nodes (of {self.nodes})" if self.nodes > 2 else "the other node of 2"

    def awaited(self, seconds: float) -> str:
        """``waiting for node 1 of 2 since 40 s``; "" if that is usual."""
        if self.nodes < 2 or seconds < _SOON:
            return ""
        return f"waiting for {self.others} since {seconds:.0f} s"

    def never_came(self, seconds: float) -> str:
        """For what was not seen at the end of a job in which no rank met the others."""
        if self.nodes < 2:
            return ""
        return f"{self.others}: {NEVER_CAME} in {seconds:.0f} s, so no rank began to train"


def declared(command: Sequence[str], environment: Mapping[str, str]) -> Declared:
    """What torchrun's options say, or the variables that stand for them; one node otherwise."""
    if not any(_LAUNCHER.search(word) for word in command):
        return Declared()
    given = {"nnodes": environment.get("PET_NNODES"), "node_rank": environment.get("PET_NODE_RANK")}
    for at, word in enumerate(command):
        name, equals, value = word.partition("=")
        name = name.removeprefix("--").replace("-", "_")
        if word.startswith("--") and name in given:
            given[name] = value if equals else next(iter(command[at + 1 :]), None)
        elif word.endswith(".py"):
            break  # the script's own options follow
    least = (given["nnodes"] or "1").partition(":")[0]
    own = given["node_rank"] or ""
    return Declared(int(least) if least.isdecimal() else 1, int(own) if own.isdecimal() else None)
