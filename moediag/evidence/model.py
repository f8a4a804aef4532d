"""Evidence as the diagnosis sees it: plain frozen data, whatever file it came from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from moediag.protocol import ExpertRows, Outcome

# How far a device is with a call, in Collective.on_device.
ISSUED, STARTED_THERE, COMPLETED_THERE = "issued", "started", "completed"


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective (or point-to-point) call of one rank.

    ``index`` counts all calls of the rank, ``position`` those on its group, both from 0.
    ``numel_in`` / ``numel_out`` in elements. ``parameters``: FQNs it carries, or None where that
    is not known (which is different from carrying none). ``parameters_missing``: those of the
    same FSDP group that are left out. ``splits_in`` / ``splits_out``: None for equal parts, unless
    ``parts_unknown``.
    """

    index: int
    group: str
    position: int
    op: str
    numel_in: int
    numel_out: int
    dtype: str
    phase: str = "other"
    module: str = ""
    step: int = 0
    splits_in: tuple[int, ...] | None = None
    splits_out: tuple[int, ...] | None = None
    peer: int | None = None
    reduce: str | None = None
    parameters: tuple[str, ...] | None = None
    parameters_missing: tuple[str, ...] = ()
    site: str = ""
    completed: bool = False
    time: float = 0.0
    asynchronous: bool = False  # the rank went on without waiting for it
    started: bool = False  # the device is known to have begun it
    on_device: str = ""  # ISSUED, STARTED_THERE or COMPLETED_THERE; "": not known, or no device
    parts_unknown: bool = False


@dataclass(frozen=True, slots=True)
class Group:
    """A process group: ``ranks`` in group order, ``axis`` its mesh axis name if it has one."""

    name: str
    ranks: tuple[int, ...]
    axis: str | None = None
    desc: str = ""
    backend: str = ""

    @property
    def label(self) -> str:
        """What a person calls it: its mesh axis, its description, else who is in it."""
        nameless = self.desc in ("", "undefined")  # torch's own word for no description
        return self.axis or (self._members if nameless else self.desc)

    @property
    def _members(self) -> str:
        first, last = min(self.ranks, default=0), max(self.ranks, default=0)
        if len(self.ranks) == last - first + 1 > 2:
            return f"ranks {first}-{last}"
        return f"ranks {', '.join(map(str, sorted(self.ranks)))}" if self.ranks else self.name


@dataclass(frozen=True, slots=True)
class TokenCount:
    """Tokens per expert that one forward of one MoE block routed on one rank."""

    step: int
    layer: str
    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class HeldWeights:
    """What one rank held at one moment. ``when``: loaded | prepared | resumed. ``experts``: one
    entry per expert parameter. ``unequal``: other parameters that differ from the checkpoint, of
    ``compared``. ``asked``: size of the expert-parallel axis that was asked for, 1 for none.
    ``whole``: experts of a layer in the checkpoint. ``left_out``: sharding was told to leave the
    experts alone."""

    when: str
    experts: tuple[ExpertRows, ...]
    unequal: tuple[str, ...] = ()
    compared: int = 0
    asked: int = 1
    whole: int = 0
    left_out: bool = False


@dataclass(frozen=True, slots=True)
class Frame:
    file: str
    line: int
    function: str
    native: bool = False


@dataclass(frozen=True, slots=True)
class Stack:
    """One thread of one rank; innermost frame first. ``source``: py-spy, pystack, faulthandler.
    ``holds_gil``: at that moment, where the source tells."""

    thread: str
    source: str
    frames: tuple[Frame, ...]
    holds_gil: bool = False


# The "signal" of a process that is gone, and of which only its parent knows why.
UNTOLD = "untold"


@dataclass(frozen=True, slots=True)
class ExitStatus:
    """``code`` >= 0: exit code; ``signal``: name such as SIGABRT when a signal ended it.
    ``by_us`` when the launcher or watchdog sent that signal after another rank's failure."""

    code: int | None = None
    signal: str | None = None
    by_us: bool = False


@dataclass(frozen=True, slots=True)
class RankError:
    """The exception that ended a rank, from torchrun's error file, the recorder or its output."""

    type: str
    message: str
    where: str = ""  # innermost user frame, "file.py:12 function"
    time: float = 0.0


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that a rank found wrong before it showed. ``what``: ``optimizer-group``."""

    what: str
    text: str
    step: int = 0
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Decision:
    """A branch that a rank took. ``value``: a number, names, or words that follow "rank 1 "."""

    what: str
    value: float | str | tuple[str, ...]
    step: int = 0
    time: float = 0.0


@dataclass(frozen=True, slots=True)
class RankEvidence:
    """Everything one rank left behind. ``counts_apart``: positions of collectives do not count
    point-to-point calls, which have positions of their own. ``os_state``: its main thread's letter
    in /proc while ranks were looked at (T: stopped), "" where it was not looked at."""

    rank: int
    collectives: tuple[Collective, ...] = ()
    groups: Mapping[str, Group] = field(default_factory=dict)
    tokens: tuple[TokenCount, ...] = ()
    no_gradient: Mapping[int, tuple[str, ...]] = field(default_factory=dict)  # by step
    weights: tuple[HeldWeights, ...] = ()
    experts_used: Mapping[str, int] = field(default_factory=dict)  # expert parameter -> rows
    notes: tuple[str, ...] = ()  # facts about how it was run, told before the end
    findings: tuple[Finding, ...] = ()
    decisions: tuple[Decision, ...] = ()
    stacks: tuple[Stack, ...] = ()
    exit: ExitStatus | None = None
    error: RankError | None = None
    outcome: Outcome | None = None
    versions: Mapping[str, str | None] = field(default_factory=dict)
    libraries: tuple[str, ...] = ()  # folders of its libraries; empty where it recorded none
    last_phase: str = ""
    finished: bool = False
    not_seen: tuple[str, ...] = ()
    last_lines: tuple[str, ...] = ()
    counts_apart: bool = False
    os_state: str = ""

    @property
    def last_step(self) -> int:
        """The training step of its last call, from 1; 0 where there is none."""
        return self.collectives[-1].step if self.collectives else 0


@dataclass(frozen=True, slots=True)
class Stall:
    """What the watchdog saw: seconds from the launch to the last progress, the length of the
    quiescence window, the ranks that waited inside a collective, those elsewhere."""

    at: float
    window: float
    waiting: tuple[int, ...]
    elsewhere: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Node:
    """A machine that ranks of a watched job ran on. ``name``: "node 1", "host b", or "" for
    whatever nobody told of. ``silent``: for how many seconds nothing had come from its watcher,
    None while it spoke. ``seen``: its evidence is here."""

    name: str
    host: str
    ranks: tuple[int, ...]
    silent: float | None = None
    seen: bool = True


@dataclass(frozen=True, slots=True)
class Evidence:
    """All ranks of one trial. ``timed_out``: the launch's time bound ended it (no stall seen).
    ``deaths``: ranks that ended badly by themselves, first one first, as far as that is known.
    ``program``: the one that ran in place of a whole model's step, "" for none.
    ``foreign``: it was put together from what other tools left. Nothing was to be measured, and a
    call tells that it was issued and whether it completed, not whether the rank waited for it.
    ``watched``: a job of somebody else that our recorder was in; nothing was to be measured.
    ``oom_kills``: processes that the kernel ended for memory on this machine meanwhile, None where
    nobody counted. ``nodes``: of a watched job on several. ``layout``: mesh axis -> size as the
    trial asked for it, outermost first; empty where there is no trial. ``attached``: what other
    programs said of the machine while the ranks stood still, by title."""

    world_size: int
    ranks: Mapping[int, RankEvidence]
    backend: str = ""
    stall: Stall | None = None
    timed_out: bool = False
    launch_error: str = ""
    interrupted: bool = False
    deaths: tuple[int, ...] = ()
    program: str = ""
    not_seen: tuple[str, ...] = ()
    foreign: bool = False
    watched: bool = False
    oom_kills: int | None = None
    nodes: tuple[Node, ...] = ()
    layout: Mapping[str, int] = field(default_factory=dict)
    attached: Mapping[str, str] = field(default_factory=dict)

    @property
    def devices_known(self) -> bool:
        """Of some rank it is known what its device made of the calls."""
        return any(c.on_device for seen in self.ranks.values() for c in seen.collectives)

    @property
    def nccl(self) -> str:
        """The version of NCCL that the ranks ran on; empty where they did not use it."""
        backends = [g.backend for seen in self.ranks.values() for g in seen.groups.values()]
        if not any("nccl" in backend for backend in (self.backend, *backends)):
            return ""
        return next((v for s in self.ranks.values() if (v := s.versions.get("nccl"))), "")
