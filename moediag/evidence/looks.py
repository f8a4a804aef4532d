"""What was seen of a running job's processes, and whether the job makes progress."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import field, replace
from pathlib import Path

from moediag import protocol
from moediag.records import dataclass

# What a rank did over all looks.
WAITS = "waits"  # in one collective
ON_DEVICE = "on device"  # for its device, which computes or is itself in a collective
IDLE = "idle"  # outside communication, at one place, without using a CPU
STOPPED = "stopped"  # by SIGSTOP
WORKS = "works"  # it computes, reads or writes files, or waits for a child that works
MOVES = "moves"  # from one place of the program to another
GONE = "gone"  # it ended
UNREAD = "unread"  # its Python frames could not be read
# Counters of the whole run by the names that programs give them, and those that may begin anew in
# each epoch.
_OF_RUN = ("epoch", "global_step", "iter_num")
_OF_EPOCH = ("step", "iteration", "batch_idx")
COUNTERS = (*_OF_RUN, *_OF_EPOCH)
BUSY = 4.0  # times the patience: for a rank that may be slow, as for watched jobs
SHORTLY = 4.0  # seconds without progress that count for a rank that is held up for a known reason


@dataclass(frozen=True, slots=True)
class RankLook:
    """One rank over all looks."""

    pid: int
    does: str
    """One of the words above."""
    still: float = 0.0
    """Seconds since its main thread last ran, as far as that is known; at least the time between
    the looks that saw it at one place."""
    words: str = ""
    """What a rank that works does: ``writes model.pt at 0.4 MB/s``."""
    held: str = ""
    """Why a rank outside communication cannot continue, as words after ``Rank 1 ``."""
    stuck: bool = False
    """It waits for a lock that nothing in sight will release."""
    cpu: float = 0.0
    """Share of one CPU that its threads used."""
    gpu: float | None = None
    """Share of time that its GPU computed, when the looks ended; None if that is not known."""
    state: str = ""
    """State letter of its main thread."""
    values: Mapping[str, str] = field(default_factory=dict)
    """Numbers among the local variables of the user's functions, the innermost first."""

    @property
    def at_rest(self) -> bool:
        return self.does in (WAITS, ON_DEVICE, IDLE, STOPPED)


@dataclass(frozen=True, slots=True)
class Looks:
    """All ranks that were looked at."""

    seconds: float
    """From the first look to the last."""
    patience: float
    """Seconds after which ranks that wait are called hung."""
    ranks: Mapping[int, RankLook]
    world_size: int = 0
    host: str = ""
    missing: tuple[int, ...] = ()
    """Ranks of this machine without a process."""
    launcher: str = ""
    job: str = ""
    """What all ranks of this start of the job have in common."""

    def doing(self, *what: str) -> tuple[int, ...]:
        """The ranks that did one of ``what``."""
        return tuple(rank for rank, look in sorted(self.ranks.items()) if look.does in what)

    @property
    def elsewhere(self) -> tuple[int, ...]:
        """Ranks of the job that are on other machines."""
        here = {*self.ranks, *self.missing}
        return tuple(rank for rank in range(self.world_size) if rank not in here)

    @property
    def ended(self) -> tuple[int, ...]:
        """The ranks of this machine that ended before the others."""
        gone = self.doing(GONE)
        return tuple(sorted({*self.missing, *(gone if len(gone) < len(self.ranks) else ())}))

    @property
    def held(self) -> tuple[int, ...]:
        """Ranks that cannot continue, for a known reason."""
        return tuple(rank for rank, look in sorted(self.ranks.items()) if look.held)

    def behind(self, some: Iterable[int], others: Iterable[int]) -> str:
        """The loop counter by which the ranks ``some`` are behind all ``others``, as
        ``epoch=0 where the others have epoch=1``; "" if they are not, or that is not known."""
        late = [self.ranks[rank].values for rank in some if rank in self.ranks]
        early = [self.ranks[rank].values for rank in others if rank in self.ranks]
        every = (*late, *early)
        same = False  # a counter of the run is equal on all
        for name in COUNTERS:
            known = all(values.get(name, "").isdecimal() for values in every)
            if not known or (name in _OF_EPOCH and not same):
                continue
            most = max((int(values[name]) for values in late), default=0)
            least = min((int(values[name]) for values in early), default=0)
            if most < least:
                return f"{name}={most} where the others have {name}={least}"
            if len({values[name] for values in every}) > 1:
                return ""
            same = True
        return ""

    @property
    def slow(self) -> tuple[int, ...]:
        """Ranks outside communication that may work in small pieces, or wait for what is slow, as
        an evaluation waits for its device."""
        idle = self.doing(IDLE) or (self.doing(ON_DEVICE) if self.doing(WAITS) else ())
        return tuple(r for r in idle if not (self.ranks[r].held or self.ranks[r].stuck))

    @property
    def progresses(self) -> bool:
        """Whether a rank works or moves: the job may be slow, but does not stand still."""
        return bool(self.doing(WORKS, MOVES))

    @property
    def quiet(self) -> bool:
        """Whether all ranks here have slept for the patience, wherever they are."""
        there = [look for look in self.ranks.values() if look.does != GONE]
        still = all(look.still >= self.patience for look in there)
        return bool(there) and still and not self.progresses

    @property
    def rests(self) -> bool:
        """Whether no rank here was seen to make progress for the patience; for four times that if
        others wait for one that may be slow."""
        if self.progresses or not self.ranks or self.doing(UNREAD):
            return False
        resting = {rank: look.still for rank, look in self.ranks.items() if look.at_rest}
        known = bool(self.held or self.missing or self.doing(GONE))
        least = SHORTLY if known else self.patience
        most = BUSY * least if self.slow and not known else least
        wait = self.doing(WAITS) or self.doing(ON_DEVICE)
        enough = (still >= (most if rank in wait else least) for rank, still in resting.items())
        return bool(resting) and all(enough)

    @property
    def stands(self) -> bool:
        """Whether no rank here has made progress for long enough to call it a hang. Devices that
        all compute for as long look the same, so a rank must wait elsewhere."""
        only_devices = bool(self.doing(ON_DEVICE)) and not self.doing(WAITS, IDLE, STOPPED)
        known = bool(self.held or self.missing or self.doing(GONE))
        return self.rests and (known or not only_devices)


def merged(parts: Iterable[Looks | None]) -> Looks | None:
    """Looks at the ranks of several machines as one."""
    known = [one for one in parts if one is not None]
    if not known:
        return None
    return replace(
        known[0],
        ranks={rank: look for one in known for rank, look in one.ranks.items()},
        missing=tuple(sorted({rank for one in known for rank in one.missing})),
        world_size=max(one.world_size for one in known),
    )


def read(folder: Path) -> Looks | None:
    """What looks left in ``folder``; None if there is nothing, or it is damaged."""
    try:
        made: Looks = protocol.build(Looks, protocol.read_json(folder / protocol.LOOKS_FILE))
    except (OSError, ValueError):
        return None
    return made
