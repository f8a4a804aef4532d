"""Lines of logs as people have them: wrapped lines joined, prefixes removed, the rank of each line.

A log went through launchers, schedulers, cloud tools and terminals, and each left its mark before a
line. :data:`PREFIXES` lists these marks; :func:`read` is the only place that removes them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace

from moediag.evidence import tracebacks
from moediag.records import dataclass

MAX_RANK = 1 << 20
_MAX_JOINED = 4096  # characters of one joined line
_LONGEST = 16_384  # characters of a line that are read
_MOST_MARKS = 32  # in front of a line


@dataclass(frozen=True, slots=True)
class Prefix:
    """A mark that a tool puts before each line."""

    #: Who writes it.
    tool: str
    #: Groups: ``rank`` (in the job), ``local`` (on its node), ``process``.
    pattern: re.Pattern[str]


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a log without its prefixes."""

    #: The rank in the job, None if no mark tells it.
    rank: int | None
    text: str
    #: The rank comes from a mark that is local to a node.
    local: bool = False
    #: The process that wrote it, as its launcher names it; "" if it does not.
    process: str = ""
    #: The rank of the mark before it, if the message itself tells another one; else None.
    against: int | None = None


def _prefix(tool: str, pattern: str) -> Prefix:
    return Prefix(tool, re.compile(pattern))


PREFIXES = (
    # torch 2.2 and newer, before C++ messages and uncaught exceptions of an initialised job
    _prefix("torch", r"\[rank(?P<rank>\d{1,7})[\[\]]{1,2}:? ?"),
    # torchrun --tee, --redirects: role and local rank
    _prefix("torchrun", r"\[default(?P<local>\d{1,6})\]: ?"),
    # TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE with both numbers, in either order: `[trainer22|6]:`
    _prefix(
        "torchrun, with a template",
        r"\[(?!(?i:epoch|ep|step|iter|it|batch|train|eval|val|fold)\d)"
        r"[A-Za-z_][\w.-]{0,60}?/?(?P<rank>\d{1,7})\|(?P<local>\d{1,7})\]: ?",
    ),
    # mpirun --tag-output, --timestamp-output: job and rank
    _prefix("mpirun", r"(?:[A-Z][a-z]{2} [A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d \d{4})?"
                      r"\[\d+,(?P<rank>\d{1,7})\]<std(?:out|err)>: ?"),
    # SageMaker: job, rank and host
    _prefix("SageMaker", r"\[\d+,mpirank:(?P<rank>\d{1,7})(?:,[\w.-]{1,60})?\]<std(?:out|err)>: ?"),
    # Lightning's and others' loggers
    # (not the rank in a group that torch's own messages begin with)
    _prefix("logger", r"\[(?:RANK|Rank|rank)(?::? |=)(?P<rank>\d{1,7})\]"
                      r"(?!:| ?(?:Watchdog|Work |NCCL )) ?"),
    # Ray: the actor's process, and its node if it is another one
    _prefix(
        "ray",
        r" ?\((?P<process>[\w.:<>+-]+(?: rank=\d+)? pid=\d+(?:, ip=[^)\s]+)?)\)"
        r"(?: \[repeated \d+x[^\]]*\])? ?",
    ),
    # torch_npu, and the line of CANN that follows: `EI0002: [PID: 29] 2025-10-11-15:09:34.713.335`
    _prefix(
        "torch_npu",
        r"\[ERROR\] [\d:-]{10,30} \(PID:(?P<process>\d{1,9}), Device:-?\d+, "
        r"RankID:(?:(?P<rank>\d{1,7})|-\d+)\) ",
    ),
    _prefix("CANN", r"E[A-Z\d]\d{4}: \[PID: (?P<process>\d{1,9})\] [\d.:-]{10,40} "),
    # stern, Kubeflow's SDK and others: the pod of a training job
    _prefix("pod", r"(?P<process>[a-z0-9][\w.-]{0,80}-(?:worker|master|launcher)-\d{1,5}): ?"),
    _prefix("kubectl --prefix", r"\[(?P<process>pod/[^\]\s]+)\] ?"),
    # docker compose, overmind
    _prefix("docker compose", r"[\w.-]{1,60} +\|(?: |$)"),
    # Slurm wrappers, benchmark harnesses: "node [stderr] "
    _prefix("Determined", r"[\da-f]{8} \|\| ?"),
    _prefix("stream", r"(?:[\w./:-]{1,80} )?\[std(?:out|err)\] ?"),
    # (a stack behind it keeps its margin)
    _prefix(
        "timestamp",
        r"\[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)?\]?"
        r"(?:[ \t]*(?=[\[(])|[ \t]?)",
    ),
    _prefix(
        "vLLM's logger",
        r"(?:CRITICAL|ERROR|WARNING|INFO|DEBUG) \d\d-\d\d \d\d:\d\d:\d\d \[?[\w./]+\.py:\d+\] ?",
    ),
    _prefix("Python's logging", r"-? ?[\w.]{1,60} - (?:DEBUG|INFO|WARNING|ERROR|CRITICAL) - "),
    _prefix("syslog", r"[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d \S{1,80} [\w./-]{1,60}(?:\[\d+\])?: "),
    _prefix("time", r"\[?\d\d:\d\d:\d\d(?:[.,]\d{1,9})?\]?[ \t]+"),
    _prefix("seconds since the start", r"\d{1,7}\.\d+s(?: +\d+)? +(?=\S)"),
    _prefix("line number", r"\[\d{1,9}\] (?!is setting up)(?=\S)|\d{1,7} \| "),
    _prefix("quotation", r"> ?"),
)  # fmt: skip
# `srun -l` and `mpirun --prefix`: the number of the task. A line may begin so by chance, so it
# counts only in a file where most lines do.
_TASK = re.compile(r" {0,6}(?P<rank>\d{1,7}): ?")
_LISTS = "waiting for remainder of ranks"  # Horovod: lines of ranks follow
# Colours, also where a web page dropped the escape character.
_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|(?<!\S)\[\d{1,2}(?:;\d{1,3})*m ?")
_ENTRY = re.compile(
    r"\s*(?:[EWIF]\d{3,4} |\[[EWIF]|Traceback |terminate called|what\(\)|File \"|frame #|#\d|```|$)"
)
# Signs that a job runs on one node, where a local rank is the rank in the job.
_ONE_NODE = re.compile(r"--standalone\b|\b(?:nnodes|max_nodes)[ =:]+1\b", re.IGNORECASE)
# torchrun's summary tells both numbers of a rank.
_BOTH = re.compile(r"\brank +: (\d{1,7}) \(local_rank: (\d{1,6})\)")
# A message of the group of all ranks: its number is the rank in the job.
_OF_ALL = re.compile(r"\(default_pg\) Rank (\d{1,7})\]")
# Composer's launcher around what a rank wrote, and Lightning before the traceback of a rank.
_SECTION = re.compile(
    r"-{4,}(?:Begin global rank (?P<rank>\d{1,7})|End global rank \d{1,7}) STD(?:ERR|OUT)-{4,}|"
    r"DeadLock detected from rank: (?P<trace>\d{1,7})\s*$"
)
# What tmux shows in the upper right corner while its user scrolls: it hides the text there.
_COVERED = re.compile(r"\[\d{1,6}/\d{1,6}\]$")
_BEGINS = f" {tracebacks.BEGINS}"
_MARK = re.compile(r"\[rank(\d{1,7})[\[\]]{1,2}:")
# What a message contains that may be continued on the next line.
_STATEMENTS = (
    "ProcessGroup", "CCL(", "collective:", "operation timeout:", "thread terminated",
    "MPI_ABORT was", "Process name: [[", " RUNNING AT ", "timed out task names:",
)  # fmt: skip
# Statements that are cut where a terminal wrapped them, or that have two lines: an opening text,
# and what ends it.
_OPEN = (
    (re.compile(r"collective operation timeout:"), re.compile(r"CCL\(")),
    (re.compile(r"terminated with exception:"), re.compile(r"\w")),
    (re.compile(r"Work[A-Z]CCL\("), None),
    (re.compile(r"is running (?:inconsistent )?collective:"), re.compile(r"[Cc]ollectives "
                                                                         r"differ|\)\)\)\.")),
    (re.compile(r"MPI_ABORT was invoked"), re.compile("errorcode")),
    (re.compile(r"Process name: \[\["), re.compile("Exit code")),
    (re.compile(r" RUNNING AT "), re.compile("KILLED BY|EXIT CODE")),
    (re.compile(r"Some timed out task names:"), re.compile(r"task:\d")),
    (re.compile(r"[Ll]ast enqueued"), re.compile(r"last\s*completed\s*(?:\w+ )?work: -?\d")),
)  # fmt: skip


def read(text: str) -> list[Line]:
    """The lines of a log, joined where they were wrapped, without prefixes."""
    # A progress bar overwrites its line; only the last state counts.
    whole = _ANSI.sub("", text).removesuffix("\n").split("\n")
    raw = [line.rstrip("\r").rpartition("\r")[2][:_LONGEST] for line in whole]
    tasks = _has_tasks(raw)
    seen = [_stripped(line, tasks) for line in _joined(raw, tasks)]
    alone = bool(_ONE_NODE.search(text))
    for marks, _ in seen:
        if "local" in marks:
            marks.setdefault("process", f"local rank {marks['local']}")
    owners = _owners(seen, text)
    found = []
    for marks, rest in seen:
        rank = marks.get("rank")
        if rank is None and "process" in marks:
            rank = owners.get(marks["process"])
        local = rank is None and alone and "local" in marks
        number, against = _sane(marks["local"] if local else rank), None
        told = _OF_ALL.search(rest) if "(default_pg) R" in rest else None
        if told is not None and (own := _sane(told[1])) is not None and own != number:
            number, against, local = own, number, False
        found.append(Line(number, rest, local, marks.get("process", ""), against))
    sections = "Begin global rank" in text or "DeadLock detected from rank" in text
    return list(_of_sections(found)) if sections else found


def _of_sections(lines: Iterable[Line]) -> Iterator[Line]:
    """The lines, those without a rank with that of the section that they are in."""
    rank, trace = None, False
    for line in lines:
        if found := _SECTION.search(line.text):
            trace = found["trace"] is not None
            rank = _sane(found["trace"] or found["rank"])
        text = line.text.removeprefix(" ") if trace and line.text.startswith(_BEGINS) else line.text
        yield line if rank is None or line.rank is not None else replace(line, rank=rank, text=text)
        if trace and found is None and tracebacks.is_error(line.text):
            rank = None


def by_rank(lines: Iterable[Line]) -> dict[int | None, str]:
    """The text of each rank; None for lines without a rank."""
    found: dict[int | None, list[str]] = {}
    for line in lines:
        found.setdefault(line.rank, []).append(line.text)
    return {rank: "\n".join(texts) for rank, texts in found.items()}


def marked(text: str, before: int, otherwise: int | None) -> int | None:
    """The rank of what is at ``before`` in a line: the last mark in front of it, because a progress
    bar may share the line, or two ranks; else ``otherwise``."""
    marks = list(_MARK.finditer(text, 0, before))
    return _sane(marks[-1][1]) if marks else otherwise


def prefixed(head: str) -> bool:
    """Whether a text that starts with a bracket is a log, not JSON."""
    first = head.lstrip().partition("\n")[0]
    return any(
        prefix.pattern.match(first) for prefix in PREFIXES if prefix.tool != "quotation"
    ) or bool(re.match(r"\[(?:[EWIF]\d{0,4} |[EWIF] |INFO|WARN|ERROR|DEBUG|Rank )", first))


def _stripped(line: str, tasks: bool) -> tuple[dict[str, str], str]:
    """The marks in front of a line, and the rest. torch's rank counts more than a launcher's."""
    marks: dict[str, str] = {}
    task = None
    if tasks and (found := _TASK.match(line)):
        task, line = found["rank"], line[found.end() :]
    for _ in range(_MOST_MARKS):
        for prefix in PREFIXES:
            found = prefix.pattern.match(line)
            if found is None or not found.end():
                continue
            values = {key: value for key, value in found.groupdict().items() if value is not None}
            if "rank" in values and "local" in values:  # no rank is less than its number on a node
                values = {"rank": max(values["rank"], values["local"], key=int)}
            if prefix.tool == "torch":
                marks.update(values)
            else:
                marks = {**values, **marks}
            line = line[found.end() :]
            break
        else:
            break
    if task is not None:
        marks.setdefault("rank", task)
    return marks, line


def _owners(seen: Iterable[tuple[dict[str, str], str]], text: str) -> dict[str, str]:
    """The rank of each process that one of its lines, or torchrun's summary, tells."""
    found: dict[str, set[str]] = {}
    for rank, local in _BOTH.findall(text):
        found.setdefault(f"local rank {local}", set()).add(rank)
    for marks, _ in seen:
        if "process" in marks and "rank" in marks:
            found.setdefault(marks["process"], set()).add(marks["rank"])
    return {process: next(iter(ranks)) for process, ranks in found.items() if len(ranks) == 1}


def _has_tasks(raw: list[str]) -> bool:
    """Whether the numbers before most lines are those of tasks, one rank each. With one task per
    node, torch's own mark contradicts the number."""
    lines = [line for line in raw if line.strip()]
    if any(_LISTS in line and not _TASK.match(line) for line in lines):
        return False
    numbered = [found for line in lines if (found := _TASK.match(line))]
    if len(numbered) < 2 or len(numbered) < 0.8 * len(lines):
        return False
    for found in numbered:
        own = _MARK.search(found.string, found.end(), found.end() + 120)
        if own is not None and int(own[1]) != int(found["rank"]):
            return False
    return True


def _joined(raw: list[str], tasks: bool) -> list[str]:
    """The lines, with those together that a terminal wrapped."""
    width = _width(raw)
    lines: list[str] = []
    covered: list[tuple[int, re.Match[str]]] = []
    last = ""
    for line in raw:
        said = lines and any(word in lines[-1] for word in _STATEMENTS)
        if said and len(lines[-1]) < _MAX_JOINED:
            full = width and len(last) >= width - 1
            if (full or _is_cut(lines[-1])) and not _starts(line, tasks):
                if width == len(last) and (found := _COVERED.search(lines[-1])):
                    covered.append((len(lines) - 1, found))
                lines[-1] += line
                last = line
                continue
        lines.append(line)
        last = line
    for at, found in covered:
        lines[at] = _uncovered(lines[at], found, lines)
    return lines


def _uncovered(line: str, found: re.Match[str], lines: list[str]) -> str:
    """The line with the characters that tmux hid, if the same message of another rank has them."""
    start, end = found.span()
    before, after = line[max(0, start - 20) : start], line[end : end + 6]
    same = re.compile(f"{re.escape(before)}([^[]{{{end - start}}}){re.escape(after)}")
    hidden = next((other[1] for text in lines if (other := same.search(text))), found[0])
    return line[:start] + hidden + line[end:]


def _starts(line: str, tasks: bool) -> bool:
    """Whether a line begins an entry, so that it does not continue a wrapped one."""
    if _ENTRY.match(line) or (tasks and _TASK.match(line)):
        return True
    weak = ("quotation", "line number", "time")
    return any(prefix.pattern.match(line) for prefix in PREFIXES if prefix.tool not in weak)


def _is_cut(line: str) -> bool:
    """Whether a statement in the line has no end yet."""
    for opening, ending in _OPEN:
        begun = list(opening.finditer(line))
        if not begun:
            continue
        rest = line[begun[-1].end() :]
        if ending is not None:
            if not ending.search(rest):
                return True
        elif rest.count("(") + 1 > rest.count(")"):
            return True
    return False


def _width(raw: list[str]) -> int:
    """The width of the terminal that wrapped the lines; 0 if none did. One line may be longer by a
    wide character."""
    lengths = Counter(map(len, raw))
    longest = max(lengths, default=0)
    width = next((n for n in (longest, longest - 1, longest - 2) if lengths[n] >= 2), 0)
    return width if 60 <= width <= 400 else 0


def _sane(number: str | None) -> int | None:
    return int(number) if number is not None and int(number) < MAX_RANK else None
