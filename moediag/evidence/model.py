"""Evidence for the diagnosis: plain frozen data, whichever file it came from."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import field
from typing import TYPE_CHECKING, Any

from moediag.masking import masked
from moediag.records import dataclass

if TYPE_CHECKING:
    from moediag.evidence.law_model import LawCheck, RankLaws
    from moediag.evidence.looks import Looks
    from moediag.protocol import ExpertRows, Outcome


# How far a device is with a call, in Collective.on_device.
ISSUED, STARTED_THERE, COMPLETED_THERE = "issued", "started", "completed"


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective or point-to-point call of one rank."""

    #: Counts all calls of the rank, from 0.
    index: int
    group: str
    #: Counts the rank's calls on this group, from 0.
    position: int
    op: str
    #: Elements.
    numel_in: int
    #: Elements.
    numel_out: int
    dtype: str
    phase: str = "other"
    module: str = ""
    step: int = 0
    #: None for equal parts, unless ``parts_unknown``; so is ``splits_out``.
    splits_in: tuple[int, ...] | None = None
    splits_out: tuple[int, ...] | None = None
    peer: int | None = None
    tag: int = 0  # of a send or receive
    #: Global ranks of the group that new_group makes; None for other calls.
    members: tuple[int, ...] | None = None
    reduce: str | None = None
    #: FQNs it carries; None if unknown, which is different from none.
    parameters: tuple[str, ...] | None = None
    #: FQNs of the same FSDP group that it does not carry.
    parameters_missing: tuple[str, ...] = ()
    #: "file.py:12 function", the innermost line outside torch.
    site: str = ""
    #: The user's own lines that led there, the nearest first; at most three.
    callers: tuple[str, ...] = ()
    completed: bool = False
    #: The error that it raised or ended with; the program may have swallowed it. "" if none.
    failed: str = ""
    time: float = 0.0
    asynchronous: bool = False  # the rank continued without waiting for it
    started: bool = False  # the device is known to have started it
    on_device: str = ""  # ISSUED, STARTED_THERE or COMPLETED_THERE; "": unknown, or no device
    parts_unknown: bool = False

    @property
    def place(self) -> tuple[str, tuple[str, ...]]:
        """The lines that made it."""
        return self.site, self.callers

    @property
    def statement(self) -> tuple[object, ...]:
        """Its group, operation and place: the same for calls that the program repeats there."""
        return self.group, self.op, self.site, self.callers


@dataclass(frozen=True, slots=True)
class Group:
    """A process group."""

    name: str
    #: In group order.
    ranks: tuple[int, ...]
    #: Its mesh axis, if it has one.
    axis: str | None = None
    desc: str = ""
    backend: str = ""

    @property
    def label(self) -> str:
        """Its name for a person: the mesh axis, else the description, else the members."""
        nameless = self.desc in ("", "undefined")  # torch's word for no description
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
    """What one rank held at one moment."""

    #: loaded | prepared | resumed
    when: str
    #: One entry per expert parameter.
    experts: tuple[ExpertRows, ...]
    #: Other parameters and buffers that differ from the checkpoint.
    unequal: tuple[str, ...] = ()
    #: Number of other parameters and buffers that were compared.
    compared: int = 0
    #: Requested size of the expert-parallel axis, 1 for none.
    asked: int = 1
    #: Experts of a layer in the checkpoint.
    whole: int = 0
    #: Sharding was configured to skip the experts.
    left_out: bool = False
    #: What those of ``unequal`` hold, in words that follow the name; absent where unknown.
    instead: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Condition:
    """What in the program's source decides whether a line runs."""

    #: Base name of the file.
    file: str
    line: int
    #: As the user wrote it: ``if rank == 0``.
    text: str
    #: under | else: the line runs where it is true | false. after | after-else: ranks for which it
    #: is true | false left before the line. loop: it decides how often. inline: it is part of the
    #: line itself. with | decorator: lets one rank go first, or alone. handler: the line runs
    #: because an exception was caught.
    side: str
    #: Ranks may differ in it because it depends on the rank.
    names_rank: bool = False
    #: For after and after-else: return, continue, break, raise or exit.
    leaves: str = ""
    #: Global ranks that it keeps from the line, if its names mean what they say.
    keeps_out: frozenset[int] = frozenset()
    #: The global rank that it compares for equality: 0 of ``rank != 0`` and ``is_main_process``.
    #: None also if both of its branches communicate: they may meet each other.
    singles: int | None = None
    #: The comparison is one alternative of an ``or`` whose others are the same on all ranks, as in
    #: ``rank == 0 or step < 16``: it decides only where these are false.
    unless: bool = False


_PLACE = re.compile(r"(?P<file>[^:]+):(?P<line>\d+) (?P<function>.+)")


@dataclass(frozen=True, slots=True)
class Frame:
    file: str
    line: int
    function: str
    native: bool = False

    @classmethod
    def at(cls, place: str) -> Frame | None:
        """The frame with that :attr:`place`; None if it is none. Its file is a base name."""
        found = _PLACE.fullmatch(place)
        if found is None:
            return None
        return cls(found["file"], int(found["line"]), found["function"].rpartition(".")[2])

    @property
    def name(self) -> str:
        """The base name of its file."""
        return self.file.rpartition("/")[2]

    @property
    def place(self) -> str:
        """``train.py:12 step``; without the class, which only some sources of stacks name."""
        return f"{self.name}:{self.line} {self.function.rpartition('.')[2]}"


@dataclass(frozen=True, slots=True)
class Stack:
    """One thread of one rank."""

    thread: str
    #: py-spy | pystack | faulthandler
    source: str
    #: Innermost first.
    frames: tuple[Frame, ...]
    #: It held the interpreter lock at that moment; False also if the source does not say.
    holds_gil: bool = False
    #: It ran, and did not sleep, at that moment; False also if the source does not say.
    active: bool = False

    @property
    def python(self) -> tuple[Frame, ...]:
        """Its frames of Python code."""
        return tuple(frame for frame in self.frames if not frame.native)


# The "signal" of a process that ended in a way that only its parent knows.
UNTOLD = "untold"


@dataclass(frozen=True, slots=True)
class ExitStatus:
    """How a process ended."""

    #: Exit code, 0 or more.
    code: int | None = None
    #: Name of the signal that ended it, such as SIGABRT.
    signal: str | None = None
    #: The launcher or watchdog sent that signal after another rank's failure.
    by_us: bool = False


@dataclass(frozen=True, slots=True)
class Left:
    """Where the program itself ended a rank's process."""

    #: As called: ``os._exit(0)``.
    how: str
    #: The user's lines that led there, innermost first.
    lines: tuple[str, ...]

    @property
    def at_once(self) -> bool:
        """The interpreter did not end: nothing that the program registered for its end ran."""
        return self.how.startswith("os._exit")

    @property
    def text(self) -> str:
        """``os._exit(0) at train.py:12``."""
        return f"{self.how} at {self.lines[0].partition(' ')[0]}"


@dataclass(frozen=True, slots=True)
class RankError:
    """The exception that ended a rank, from torchrun's error file, the recorder or its output."""

    type: str
    message: str
    where: str = ""  # innermost user frame, "file.py:12 function"
    time: float = 0.0
    frames: tuple[Frame, ...] = ()  # of its traceback, innermost first
    after: str = ""  # the first exception of its chain, "KeyError: 'x' at data.py:3 load"
    thread: str = ""  # the name of the thread that it ended, if it ended no rank

    def __post_init__(self) -> None:
        # A foreign log may hold secrets.
        object.__setattr__(self, "message", masked(self.message))
        object.__setattr__(self, "after", masked(self.after))


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem that a rank detected before it caused a failure."""

    #: optimizer-group
    what: str
    text: str
    step: int = 0
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PassedCondition:
    """A condition that a rank has passed, as its names were when the rank was examined."""

    holds: bool
    #: By name, as Python prints it: ``{"args.rank": "0"}``.
    values: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class BatchCount:
    """Batches that one data loader gave in one pass."""

    #: The user's line that asked for them, "file.py:12 function".
    line: str
    number: int
    #: The pass is over; otherwise the loader was in use when the rank ended or was examined.
    ended: bool


@dataclass(frozen=True, slots=True)
class Meeting:
    """What a rank passed to ``init_process_group``; "" or 0 where that is unknown."""

    backend: str = ""
    #: ``host:port``, or the text of ``init_method``.
    address: str = ""
    world_size: int = 0


@dataclass(frozen=True, slots=True)
class Worker:
    """A process of a rank's data loader."""

    pid: int
    stacks: tuple[Stack, ...] = ()


@dataclass(frozen=True, slots=True)
class Decision:
    """A branch that a rank took."""

    what: str
    #: A number, names, or words that follow "rank 1 ".
    value: float | str | tuple[str, ...]
    step: int = 0
    time: float = 0.0


@dataclass(frozen=True, slots=True)
class Report:
    """What one message in a log says of a call, of ranks or of a machine."""

    #: What it says, by the table of formats, `evidence/log_formats.py`.
    kind: str
    #: The rank in the job that wrote it; None if the log does not tell.
    rank: int | None = None
    #: torch's name of the process group, or "".
    group: str = ""
    desc: str = ""
    #: The writer's rank in that group.
    place: int | None = None
    #: The group's count of the call that the message is about.
    seq: int | None = None
    #: The last call of the group that the writer issued; 0 for none, None if unknown.
    issued: int | None = None
    #: The last call of the group that completed there.
    completed: int | None = None
    op: str = ""
    numel_in: int | None = None
    numel_out: int | None = None
    #: Ranks that the message names, by their numbers in the group.
    about: tuple[int, ...] = ()
    #: The number of ranks in the job at least, if the message tells it.
    size: int = 0
    #: The two ranks of a mismatch, each with its call.
    sides: tuple[tuple[int, str], ...] = ()
    seconds: float = 0.0
    #: Seconds since the beginning of the year on the writer's clock; 0.0 if unknown.
    time: float = 0.0
    text: str = ""
    #: Where: the line of the program (site), the file or process (stack, error).
    detail: str = ""
    #: The process that wrote it, if the log names processes.
    process: str = ""

    @property
    def of_all(self) -> bool:
        """Whether its group is that of all ranks."""
        return self.desc == "default_pg"


@dataclass(frozen=True, slots=True)
class RankEvidence:
    """Everything that is known of one rank."""

    rank: int
    collectives: tuple[Collective, ...] = ()
    groups: Mapping[str, Group] = field(default_factory=dict)
    tokens: tuple[TokenCount, ...] = ()
    no_gradient: Mapping[int, tuple[str, ...]] = field(default_factory=dict)  # by step
    weights: tuple[HeldWeights, ...] = ()
    experts_used: Mapping[str, int] = field(default_factory=dict)  # expert parameter -> rows
    notes: tuple[str, ...] = ()  # facts about how it was run, written before the end
    findings: tuple[Finding, ...] = ()
    decisions: tuple[Decision, ...] = ()
    stacks: tuple[Stack, ...] = ()
    exit: ExitStatus | None = None
    error: RankError | None = None
    outcome: Outcome | None = None
    versions: Mapping[str, str | None] = field(default_factory=dict)
    libraries: tuple[str, ...] = ()  # folders of its libraries; empty if it recorded none
    last_phase: str = ""
    #: How often the elastic agent has started ranks again on its own store; None without one.
    restart: int | None = None
    #: Optimizers that it constructed although it had peers and never created a process group; None
    #: if that is unknown, or it did create one.
    alone: tuple[str, ...] | None = None
    meeting: Meeting = Meeting()
    finished: bool = False
    not_seen: tuple[str, ...] = ()
    last_lines: tuple[str, ...] = ()
    #: Collectives and point-to-point calls have positions of their own.
    counts_apart: bool = False
    #: Group -> its calls so far, where none was recorded and all completed.
    settled: Mapping[str, int] = field(default_factory=dict)
    #: Only incomplete calls were recorded.
    open_only: bool = False
    #: Base names of the user's files that made calls; empty if it recorded none.
    user_files: frozenset[str] = frozenset()
    batches: tuple[BatchCount, ...] = ()  # of its data loaders, in order of time
    handling: RankError | None = None  # what the main thread handled when it was examined
    thread_errors: tuple[RankError, ...] = ()  # that ended threads of it; in order of time
    workers: tuple[Worker, ...] = ()  # of its data loader, if the rank waited for data
    #: None if the program did not end it by a call, or that is unknown.
    left: Left | None = None
    #: Conditions that it had passed when it was examined, by ``file.py:12``.
    tested: Mapping[str, PassedCondition] = field(default_factory=dict)
    #: What decides whether lines of its stacks run, by ``file.py:12 function``, outermost first.
    #: Only lines whose source is known.
    conditions: Mapping[str, tuple[Condition, ...]] = field(default_factory=dict)
    #: State letter of its main thread in /proc when evidence was collected (T: stopped), or "".
    os_state: str = ""
    #: Fingerprints for the laws; None if it recorded none.
    laws: RankLaws | None = None

    @property
    def ended_well(self) -> bool:
        """It came to its end by itself, as far as is known."""
        by_itself = self.exit is not None and self.exit.code == 0 and not self.exit.by_us
        return self.finished or by_itself

    def on(self, call: Collective) -> str:
        """The label of the group on which this rank made a call."""
        group = self.groups.get(call.group)
        return group.label if group is not None else call.group

    @property
    def last_step(self) -> int:
        """The training step of its last call, from 1; 0 without a call."""
        return self.collectives[-1].step if self.collectives else 0


@dataclass(frozen=True, slots=True)
class Stall:
    """What the watchdog saw."""

    #: Seconds from the launch to the last progress.
    at: float
    #: Length of the quiescence window in seconds.
    window: float
    #: Ranks that waited inside a collective.
    waiting: tuple[int, ...]
    elsewhere: tuple[int, ...] = ()
    #: False: ranks wait, and nothing shows for how long.
    certain: bool = True
    #: What is known was written just after the newest call.
    at_once: bool = False
    #: Ranks prepare or wait for what is no rank, before they train or after the job's last call,
    #: and may still continue.
    early: bool = False


@dataclass(frozen=True, slots=True)
class Node:
    """A machine that ran ranks of a watched job."""

    #: "node 1", "host b", or "" if unknown.
    name: str
    host: str
    ranks: tuple[int, ...]
    #: Seconds since the last message of its watcher, None if it was not silent.
    silent: float | None = None
    #: Its evidence is here.
    seen: bool = True


@dataclass(frozen=True, slots=True)
class Evidence:
    """All ranks of one trial or job."""

    world_size: int
    ranks: Mapping[int, RankEvidence]
    backend: str = ""
    stall: Stall | None = None
    #: The launch's timeout ended it, and no stall was seen.
    timed_out: bool = False
    launch_error: str = ""
    interrupted: bool = False
    #: Ranks that failed by themselves, first one first, as far as that is known.
    deaths: tuple[int, ...] = ()
    #: When its watcher noticed the death of a rank, in seconds since the epoch.
    noticed: Mapping[int, float] = field(default_factory=dict)
    #: The program that ran in place of a whole model's step, or "".
    program: str = ""
    not_seen: tuple[str, ...] = ()
    #: Put together from what other tools recorded. Nothing was measured, and a call tells whether
    #: it completed, not whether the rank waited for it.
    foreign: bool = False
    #: A user's job with our recorder in it; nothing was measured.
    watched: bool = False
    #: Processes that the kernel killed for memory on this machine meanwhile, None if not counted.
    oom_kills: int | None = None
    #: A sentence: why the evidence is not of one job. Nothing else is known then.
    mixed: str = ""
    #: False: there are at least ``world_size`` ranks, and nothing tells how many.
    size_known: bool = True
    #: Messages of libraries, schedulers and the kernel in the logs of a job of other tools.
    reports: tuple[Report, ...] = ()
    #: Of a watched job on several nodes.
    nodes: tuple[Node, ...] = ()
    #: All ranks of the job ran on one machine, as far as each was told.
    one_node: bool = False
    #: Mesh axis -> size as requested, outermost first; empty without a trial.
    layout: Mapping[str, int] = field(default_factory=dict)
    #: Of a job that was started without moediag: what looks at its processes saw.
    looks: Looks | None = None
    #: Output of other programs about the machine during the stall, by title.
    attached: Mapping[str, str] = field(default_factory=dict)
    #: The program's source files that were kept, by path.
    sources: Mapping[str, str] = field(default_factory=dict)
    #: Rank -> the first steps after saves of earlier attempts of this job, the newest one last.
    earlier: Mapping[int, tuple[LawCheck, ...]] = field(default_factory=dict)

    @property
    def source_names(self) -> frozenset[str]:
        """The base names of the program's source files that were kept."""
        return frozenset(path.rpartition("/")[2] for path in self.sources)

    @property
    def devices_known(self) -> bool:
        """Whether it is known for any rank how far its device got with the calls."""
        return any(c.on_device for seen in self.ranks.values() for c in seen.collectives)

    @property
    def nccl(self) -> str:
        """The version of NCCL that the ranks used, or ""."""
        backends = [g.backend for seen in self.ranks.values() for g in seen.groups.values()]
        if not any("nccl" in backend for backend in (self.backend, *backends)):
            return ""
        return next((v for s in self.ranks.values() if (v := s.versions.get("nccl"))), "")


def recorded(evidence: Evidence) -> dict[int, RankLaws]:
    """What each rank recorded for the laws, of those that did."""
    return {r: seen.laws for r, seen in sorted(evidence.ranks.items()) if seen.laws is not None}
