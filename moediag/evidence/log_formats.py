"""Messages in logs that moediag understands: how each is recognised, and whom it says to be at
fault. A new message is one row of :data:`FORMATS`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal

from moediag.evidence.model import Report
from moediag.records import dataclass

Fault = Literal[
    "named", "lagging", "unnamed", "suspected", "positions", "sides", "writer", "unknown", "nobody"
]
"""Who is at fault, by a message:

- named: the ranks in ``about``, which did not come;
- lagging: the ranks in ``about``, if the same list shows other ranks ahead of them;
- unnamed: a rank that did not come, and that the message does not name;
- suspected: the ranks in ``about`` may be, because the writer waited for them; they are told;
- positions: the rank that is behind, when the numbers of all ranks in the group are compared;
- sides: the rank whose call differs from those of all others;
- writer: the rank that wrote it, because an error of its own ended it;
- unknown: a process that ended, or a machine that broke; the message does not say which rank;
- nobody: the message does not tell.
"""


@dataclass(frozen=True, slots=True)
class Meaning:
    """What messages of one kind say."""

    #: `Report.kind`.
    kind: str
    fault: Fault = "nobody"
    #: The writer waited in a call until its library gave up, so its error is not a failure.
    waits: bool = False
    #: The sentence on the page if the fault is named, lagging, unnamed or suspected. It may contain
    #: the report's ``{about}`` ("rank 3"), ``{seconds:g}``, ``{seq}``, ``{place}`` and ``{why}``,
    #: and ``{writer}``, who wrote it, or its whole ``{text}``.
    says: str = ""
    #: What follows if the message names a single rank.
    of_one: str = ""
    #: A note repeats the message, whatever the verdict.
    noted: bool = False
    #: It is of the whole job: no rank wrote it.
    whole: bool = False
    #: The library that wrote it, if that is not torch with NCCL.
    library: str = ""


TIMEOUT = Meaning("timeout", "positions", waits=True)
STUCK = Meaning("stuck", noted=True)
CHECKED = Meaning("checked", "sides")  # a mismatch that names no sides
MACHINE = Meaning("machine", "unknown", noted=True)
NODE = Meaning("node", "unknown", noted=True)  # a machine that its launcher or scheduler lost
KILLED = Meaning("killed", "unknown", noted=True)
# How a process ended; `told_ends` says what follows for the rank in ``about``.
ENDED = Meaning("ended", "unknown", noted=True)
# The same, where the rank is that of the mark before the line.
CHILD = Meaning("child", "unknown", noted=True)
CANCELLED = Meaning("cancelled", noted=True)


def _peer(kind: str, says: str, fault: Fault = "unnamed", library: str = "") -> Meaning:
    """The writer's library gave up waiting for another rank."""
    return Meaning(kind, fault, waits=True, says=says, library=library)


# Of several lines, or of a whole log: no row has them.
SITE = Meaning("site", waits=True)  # the line of the program that made the call which timed out
STACK = Meaning("stack")  # a process of an unknown rank
ERROR = Meaning("error", "unknown", noted=True)  # an exception of an unknown rank
HANDLED = Meaning("handled", noted=True)  # the same; training went on after it
LOST_PEER = Meaning("lost", "unknown")  # the same, raised by a communication library
# Of tools that looked at the whole job, on several lines: `log_reports.TOOLS` reads them.
OF_TOOLS = (
    Meaning("quoted", whole=True),
    Meaning("ras-error", "unknown", whole=True),
    Meaning("ras-dead", "unknown", whole=True),
    Meaning("ras-silent", whole=True),
    Meaning("ras-apart", whole=True),
    Meaning("ras-equal", whole=True),
    Meaning(
        "not-submitted", "named", whole=True, library="Horovod",
        says="{about} did not submit {why}, for which others have waited for more than "
        "{seconds:g} s, as Horovod reports",
    ),
    Meaning(
        "submitted-apart", "unnamed", whole=True, library="Horovod",
        says="Horovod reports tensors that only some ranks have submitted for more than "
        "{seconds:g} s: {why}",
    ),
    Meaning("stall-over", whole=True),
    Meaning(
        "not-called", "named", whole=True, says="{why}; these have waited for up to {seconds:.0f} s"
    ),
    Meaning(
        "called-by-few", "unnamed", whole=True,
        says="{why}; these have waited for up to {seconds:.0f} s",
    ),
    Meaning("fr-missing", "named", whole=True, says="{text}"),
    Meaning("fr-apart", "unnamed", whole=True, says="{text}"),
    Meaning(
        "fr-mismatch", "sides", whole=True,
        of_one="It compares with the first rank that it reads, so it is not known which side is "
        "wrong.",
    ),
    Meaning("nccl-calls", "sides", whole=True),
    Meaning("nccl-unnamed-calls", "sides", whole=True),
    Meaning("fr-undecided", whole=True),
    Meaning("fr-equal", whole=True),
)  # fmt: skip

# `[PG ID 2 PG GUID 9(tp) Rank 7]` (2.5), `[PG 0 (default_pg) Rank 3]` (2.5 before its release),
# `[PG 3 Rank 5]` (2.3). The rank is the one in the group.
_PG = (
    r"\[PG (?:ID \d+ PG GUID )?(?P<group>[^\s(\]]+) ?(?:\((?P<desc>[^)\n]{0,200})\))? "
    r"Rank (?P<place>\d{1,7})\]"
)
# Without SeqNum before 1.12, with TensorShape in 2.0.
_WORK = (
    r"Work[A-Z]CCL\((?:SeqNum=(?P<seq>\d{1,15}),\s*)?OpType=(?P<op>\w+)"
    r"(?:,\s*TensorShape=\[[^\]\n]{0,200}\])?"
    r"(?:,\s*NumelIn=(?P<numel_in>\d{1,18}),\s*NumelOut=(?P<numel_out>\d{1,18}))?"
    r"(?:,\s*Timeout\(ms\)=(?P<ms>\d{1,12}))?"
)
_STATUS = (
    r"[Ll]ast\s*enqueued\s*(?:\w+ )?work:\s*(?P<issued>-?\d{1,20}),"
    r"\s*last\s*completed\s*(?:\w+ )?work:\s*(?P<completed>-?\d{1,20})"
)
_PRINT = (
    r"CollectiveFingerPrint\((?:SequenceNumber=(?P<seq{n}>\d{{1,15}}?),?\s*)?OpType=(?P<op{n}>\w+)"
    r"(?:,\s*TensorShape=\[(?P<shape{n}>[^\]]{{0,500}})\])?(?:,\s*TensorDtypes=(?P<dtype{n}>\w+))?"
)
_NOT_REPORTED = (
    "{about} did not reach a collective operation of Ray Train, such as ray.train.report"
)
_FOLLOWING = (
    "The following ranks (?:are not reaching the collective operation|have not called it|have not "
    "joined the collective operation)"
)
_RANKS = r"(?P<about>\d[\d, ]{0,8000})"


@dataclass(frozen=True, slots=True)
class Format:
    """One statement in a log."""

    meaning: Meaning
    #: A text that every such line contains, to skip all others quickly.
    hint: str
    #: Who writes it, and the oldest release in whose logs it was met.
    source: str
    pattern: str

    def matches(self, text: str) -> Iterator[re.Match[str]]:
        """Compiled on first use: most folders of dumps have no log."""
        return re.finditer(self.pattern, text, re.DOTALL)


def _format(meaning: Meaning, hint: str, source: str, *parts: str) -> Format:
    return Format(meaning, hint, source, "".join(parts))


FORMATS = (
    # -- a call that did not complete, as the watchdog of one process group sees it
    _format(
        TIMEOUT, "CCL(", "torch 1.12",
        rf"(?:{_PG}\s*(?:[^\[\n]{{0,160}}\[Rank \d{{1,7}}\]\s*)?|",
        r"\[Rank (?P<number>\d{1,7})\]\s*)?",
        rf"(?:Watchdog caught collective operation timeout:|(?<=\] )Work)\s*{_WORK}",
    ),
    _format(
        TIMEOUT, "milliseconds before", "torch 1.12",
        rf"(?<!timeout:)(?<!timeout: )(?<!Work ){_WORK}\) ran for \d+ milliseconds before timing",
    ),
    _format(
        Meaning("status", "positions", waits=True),
        "enqueued", "torch 2.3",
        rf"(?:{_PG})?\s*(?:Timeout at \w+ work:|Exception [^\[]{{0,80}} at work:|",
        r"failure detected by watchdog at work sequence\s*id:)\s*(?P<seq>\d{1,15})[\s,].{0,24}?",
        _STATUS,
    ),
    _format(
        Meaning("signal", "positions"),
        "enqueued", "torch 2.4",
        rf"(?:{_PG})?\s*Received a dump signal due to a collective timeout from\s*",
        rf"(?:this local\s*rank|rank (?P<about>\d{{1,15}})).{{0,160}}?{_STATUS}",
    ),
    # -- a process group's own threads
    _format(
        STUCK, "atchdog", "torch 2.2",
        rf"{_PG}[^\n]{{0,120}}?(?:watchdog got stuck for (?P<seconds>\d{{1,15}})|",
        r"due to ProcessGroup\w+ watchdog hang)",
    ),
    _format(
        STUCK, "Heartbeat monitor", "torch 2.2",
        rf"{_PG}\s*Heartbeat monitor timed out",
    ),
    _format(
        Meaning("failed", "writer"),
        "thread terminated", "torch 2.0",
        rf"(?:{_PG}\s*|\[Rank (?P<number>\d{{1,7}})\]\s*)?",
        r"(?:Process group|ProcessGroup\w*|NCCL) watchdog thread ",
        r"terminated with exception:(?!\s*\[Rank \d+\] Watchdog)\s*(?P<why>[^\n]{1,200})",
    ),
    _format(
        LOST_PEER, "what():", "torch 1.10",
        r"(?<=what\(\): )\s*NCCL error: remote process exited or there was a network error",
        r"[^\n]{0,200}",
    ),
    # -- CANN's own start on a device
    _format(
        Meaning("device", "unknown", noted=True), "HCCP process", "CANN, EJ0001",
        r"Failed to initialize the HCCP process[^\n]{0,120}",
    ),
    # -- TORCH_DISTRIBUTED_DEBUG=DETAIL; the ranks are those in the group
    _format(
        Meaning("mismatch", "sides"),
        "Detected mismatch", "torch 1.9",
        r"Detected mismatch between collectives on ranks\.\s*Rank (?P<one>\d{1,15}) is running ",
        rf"(?:inconsistent )?collective:\s*(?:{_PRINT.format(n=1)})",
        r"(?:.{0,900}?but\s*Rank (?P<two>\d{1,15}) is running (?:inconsistent )?collective:\s*",
        rf"(?:{_PRINT.format(n=2)}|(?P<bare>[A-Z_]+)))?",
    ),
    # -- NCCL's own checks: of the network's sizes, and of arguments before 2.7.6 (src/init.cc)
    _format(
        CHECKED,
        "collective mismatch error", "NCCL 2.10, src/transport/net_ib.cc",
        r"NCCL WARN NET/IB[^\n]{0,120}collective mismatch error[^\n]{0,120}",
    ),
    _format(
        CHECKED,
        "Mismatched collective", "NCCL 2.4",
        r"NCCL WARN Mismatched collective detected, please check your collective calls at and "
        r"around rank \d{1,7}",
    ),
    # -- gloo, in a send or a receive or a collective that consists of them
    _format(
        Meaning("gave-up", waits=True), "Timed out waiting", "torch 1.0",
        r"Timed out waiting (?P<ms>\d{1,12})ms for (?:send|recv) operation to complete",
    ),
    # -- monitored_barrier, gloo; rank 0 of the group asks the others in order
    _format(
        Meaning(
            "absent", "named",
            says="{about} did not reach monitored_barrier within {seconds:g} s",
            of_one="Rank 0 asks the others in order and stops at the first that does not answer, "
            "so ranks after it may be missing as well.",
        ),
        "monitoredBarrier", "torch 1.9",
        rf"(?:\[Rank (?P<number>\d{{1,15}})\]:? ?)?Ranks? {_RANKS}failed to pass ",
        r"monitoredBarrier in (?P<ms>\d{1,15})\s*ms",
    ),
    _format(
        _peer(
            "unanswered",
            "{writer} reached monitored_barrier and lost {about} of it, whose own message tells "
            "which rank was missing",
            "suspected",
        ),
        "monitoredBarrier", "torch 1.9",
        r"(?:\[Rank (?P<number>\d{1,15})\]:? ?)?Rank (?P<place>\d{1,7}) successfully reached ",
        r"monitoredBarrier, but received errors(?: while waiting for send/recv from rank ",
        r"(?P<about>\d{1,15}))?",
    ),
    _format(
        _peer("unanswered-all", "rank 0 of a group waited in monitored_barrier and gave up"),
        "monitoredBarrier", "torch 1.9",
        r"\[Rank (?P<number>\d{1,15})\]:? ?Rank \d+ timed out in monitoredBarrier",
    ),
    # -- HCCL, on Ascend: another rank did not answer, with its number in the group if that is known
    _format(
        Meaning(
            "unanswered-by-peer", "unnamed", waits=True, library="HCCL",
            says="{writer} waited for another rank until HCCL gave up (EI0006: {why})",
        ),
        "times out", "CANN 7",
        r"(?P<why>Getting socket times out\. Reason: (?:1\. )?[^\n.]{1,160})",
    ),
    # -- Ray Train: ranks that have not come to ray.train.report, by their ranks in the job. Of
    # several, those that did come may be wrong.
    _format(
        Meaning("not-reported", "named", waits=True, says=_NOT_REPORTED),
        "The following ranks", "Ray 2.44, train/v2/_internal/exceptions.py",
        rf"{_FOLLOWING}: \[(?P<about>\d{{1,7}})\]",
    ),
    _format(
        Meaning("not-reported-by-many", "unnamed", waits=True, says=_NOT_REPORTED),
        "The following ranks", "Ray 2.44, train/v2/_internal/exceptions.py",
        rf"{_FOLLOWING}: \[(?P<about>\d{{1,7}},[\d, ]{{1,8000}})\]",
    ),
    # -- TORCH_NCCL_DESYNC_DEBUG=1; the ranks are those in the group
    _format(
        Meaning("never", "named", says="{about} joined no collective of the group, others wait"),
        "lagging ranks", "torch 1.11",
        rf"ranks \[{_RANKS}\] are the lagging ranks",
    ),
    _format(
        Meaning(
            "open", "lagging",
            says="{about} joined call {seq} of the group, which did not finish there",
        ),
        "joined but", "torch 1.11",
        rf"\[{_RANKS}\] joined but didn't finish collective #(?P<seq>\d{{1,15}})",
    ),
    _format(
        Meaning("missing", "lagging", says="{about} did not join call {seq} of the group"),
        "but didn't join", "torch 1.11",
        rf"\[{_RANKS}\] finished collective #\d+, but didn't join collective #(?P<seq>\d{{1,15}})",
    ),
    _format(
        Meaning("snapshot"),
        " ranks:", "torch 1.11",
        r"#(?P<seq>\d{1,15}) (?:started|finished) ranks:",
    ),
    # -- the start of a job or a group
    _format(
        Meaning(
            "no-id", "unnamed",
            says="rank {place} of a group waited for {about} of that group to set up NCCL's "
            "communicator and gave up: {about} of that group did not reach its first collective in "
            "time, or its store was not reachable",
        ),
        "NCCL communicator", "torch 1.9",
        r"\[(?P<place>\d{1,15})\] is setting up NCCL communicator and retr\w+ ncclUniqueId from ",
        r"\[(?P<about>\d{1,15})\].{0,60}? by key '[^']*', but store->get\('[^']*'\) got error:",
    ),
    _format(
        _peer("clients", "{writer} waited {seconds:g} s for all ranks to join, and {why}"),
        "waiting for clients", "torch 1.13",
        r"Timed out after (?P<seconds>\d{1,9}) seconds waiting for clients\. ",
        r"(?P<why>\d{1,7}/\d{1,7} clients joined)",
    ),
    # -- a peer that did not answer, in other libraries
    _format(
        _peer("store", "{writer} waited {seconds:g} s in the store for keys that other ranks set"),
        "keys: ", "torch 2.4",
        r"wait timeout after (?P<ms>\d{1,15})ms, keys: \S{1,200}",
    ),
    _format(
        _peer("connect", "{writer} waited {seconds:g} s for the store at {why}"),
        "client socket has timed out", "torch 2.0",
        r"client socket has timed out after (?P<ms>\d{1,15})ms while trying to connect to ",
        r"\((?P<why>[^)\n]{1,120})\)",
    ),
    _format(
        _peer("socket", "{writer} waited for the store or for another rank and gave up"),
        "Timeout", "torch 1.9", r"(?<!got error: )\bSocket Timeout\b|\bRendezvousTimeoutError\b",
    ),
    _format(
        _peer("gloo", "{writer} waited {seconds:g} s in gloo to {why} (Timed out waiting for {why} "
                      "operation)", library="gloo"),
        "Timed out waiting", "gloo",
        r"Timed out waiting (?P<ms>\d{1,15})ms for (?P<why>send|recv) operation to complete",
    ),
    _format(
        _peer("mesh", "{writer} could not connect to the other ranks (gloo, connectFullMesh)",
              library="gloo"),
        "connectFullMesh", "gloo", r"Gloo connectFullMesh failed",
    ),
    _format(
        _peer("notify", "{writer} waited for {about} of its group, which did not send (HCCL)",
              "suspected", "HCCL"),
        "Notify re", "HCCL, EI0002",
        r"has not received the Notify record from remote rank:? ?\[(?P<about>\d{1,7})\]",
        r"(?:[^\n]{0,200}?hccl_world_group\], rankSize\[\d{1,7}\], rankId\[(?P<rank>\d{1,7}))?",
    ),
    _format(
        _peer("notify-by-any", "{writer} waited for another rank of its group, which did not send "
                               "(HCCL)", library="HCCL"),
        "Notify re", "HCCL, EI0002",
        r"has not received the Notify record from remote rank:? ?\[unknown\]",
    ),
    _format(
        _peer("link", "{writer} waited {seconds:g} s for {about} of a group to connect (HCCL: wait "
                      "socket establish timeout)", "suspected", "HCCL"),
        "socket establish timeout", "HCCL",
        r"wait socket establish timeout, role\[\d\] rank\[(?P<about>\d{1,7})\] ",
        r"timeout\[(?P<seconds>\d{1,9})\]",
    ),
    _format(
        _peer("ccl", "{writer} waited for another rank and gave up ({why})", library="oneCCL"),
        "oneCCL", "Intel's oneCCL",
        r"oneCCL:[^\n]{0,120}?(?P<why>(?:wait|time|peer)[^\n]{0,80})",
    ),
    _format(
        _peer("ucx", "{writer} lost the connection to another rank (UCX: {why})"),
        "UCX error", "UCX", r"UCX error: (?P<why>[^\n]{1,80})",
    ),
    _format(
        _peer("ucx", "{writer} lost the connection to another rank (UCX: {why})"),
        "retry count", "UCX", r"(?P<why>Transport retry count exceeded on [^\n(]{1,80})",
    ),
    _format(
        Meaning("store-lost", noted=True),
        "TCPStore", "torch 2.2",
        r"(?:\[c10d\] \w+ failed on SocketImpl[^\n]{0,120}|Failed to check the \"should dump\" ",
        r"flag on TCPStore[^\n]{0,160})",
    ),
    # -- the machine and the launchers
    _format(
        MACHINE, "NVRM: Xid", "NVIDIA's driver, in the kernel's log",
        r"(?:\S{1,80} kernel: (?:\[[ \d.]{1,20}\] )?)?NVRM: Xid \([^)]*\): \d+[^\n]{0,120}",
    ),
    _format(
        MACHINE, "fallen off", "NVIDIA's driver, in the kernel's log",
        r"NVRM:(?! Xid)[^\n]{0,60}fallen off the bus",
    ),
    _format(
        MACHINE, "by GPU node", "AMD's runtime",
        r"(?:HW Exception|Memory access fault) by GPU node[^\n]{0,160}",
    ),
    _format(
        NODE, "remote daemon", "mpirun",
        r"(?:ORTE|PRTE) has lost communication with a remote daemon",
    ),
    _format(
        NODE, "NCCL WARN", "NCCL 2.7",
        r"(?:\S{1,80}:\d{1,9}:\d{1,9} \[\d{1,3}\] )?(?:\S{1,60}:\d{1,6} )?NCCL WARN [^\n]{0,80}",
        r"(?:No route to host|Network is unreachable)[^\n]{0,80}",
    ),
    _format(NODE, "Remote daemon", "mpirun", r"Remote daemon *: \S{1,80} on node \S{1,80}"),
    _format(NODE, "Node failure", "Slurm", r"srun: error: Node failure on \S{1,80}"),
    _format(
        NODE, "DUE TO NODE", "Slurm",
        r"\*\*\* (?:JOB|STEP) \S{1,40} ON \S{1,80} CANCELLED AT \S{1,40} ",
        r"DUE TO NODE \S{1,80} FAILURE",
    ),
    _format(
        KILLED, "Killed process", "Linux",
        r"Out of memory:? Killed process \d+[^\n]{0,60}",
    ),
    _format(KILLED, "oom", "Slurm", r"[Dd]etected \d+ oom[-_ ]kill event[^\n]{0,80}"),
    _format(KILLED, "OOMKilled", "Kubernetes", r"OOMKilled"),
    _format(
        KILLED, "was low on resource", "Kubernetes",
        r"(?:pods?/\S{1,120} +)?The node was low on resource: [^\n]{1,120}",
    ),
    _format(
        KILLED, "Killed ", "a shell",
        r"^(?:[\w./-]{1,80}: line \d{1,6}: +)?\d{1,9} Killed  +\S[^\n]{0,80}",
    ),
    _format(
        KILLED, "running low on memory", "Ray",
        r"Task was killed due to the node running low on memory",
    ),
    _format(
        KILLED, "killed due to memory pressure", "Ray's raylet",
        r"[1-9]\d{0,6} Workers \(tasks / actors\) killed due to memory pressure[^\n]{0,240}",
    ),
    _format(
        ENDED, "srun: error", "Slurm",
        r"srun: error: \S+ (?:task (?P<about>\d{1,7})|tasks? [\d,-]+): [^\n]{0,80}",
    ),
    _format(
        CANCELLED, "CANCELLED AT", "Slurm",
        r"\*\*\* (?:JOB|STEP) \S{1,40} ON \S{1,80} CANCELLED AT [^*\n]{0,40}DUE TO[^*\n]{1,60}",
    ),
    _format(
        CANCELLED, "TERM_RUNLIMIT", "LSF", r"TERM_RUNLIMIT: job killed after reaching [^\n]{1,60}",
    ),
    _format(
        KILLED, "TERM_MEMLIMIT", "LSF", r"TERM_MEMLIMIT: job killed after reaching [^\n]{1,60}"
    ),
    _format(CANCELLED, "job killed: walltime", "PBS", r"PBS: job killed: walltime [^\n]{1,60}"),
    _format(KILLED, "job killed: ", "PBS", r"PBS: job killed: (?:p|v)?mem [^\n]{1,60}"),
    _format(
        ENDED, "crashed with exit code", "Composer",
        r"composer\.cli\.launcher:Rank (?P<about>\d{1,7}) crashed with exit code -?\d{1,5}",
    ),
    _format(
        ENDED, "exited with code", "Composer",
        r"Global rank (?P<about>\d{1,7}) \(PID \d{1,9}\) exited with code -?\d{1,5}",
    ),
    _format(
        ENDED, "terminated with signal", "torch.multiprocessing",
        r"process \d+ terminated with signal \w+",
    ),
    _format(
        ENDED, "exited on signal", "mpirun",
        r"process rank (?P<about>\d{1,7}) with PID \d+ on node \S+ exited on signal \d+[^\n]{0,30}",
    ),
    _format(
        ENDED, "exited due to process rank", "mpirun",
        r"(?<=exited due to )process rank (?P<about>\d{1,7}) with PID \d+ on node \S+ exiting",
    ),
    _format(
        ENDED, "Process name: [[", "mpirun",
        r"Process name: \[\[\d{1,9},\d{1,9}\],(?P<about>\d{1,7})\]\s+Exit code: +-?\d{1,5}",
    ),
    _format(
        ENDED, "MPI_ABORT was invoked", "MPI",
        r"MPI_ABORT was invoked on rank (?:(?P<about>\d{1,7}) in communicator MPI_COMM_WORLD|",
        r"\d{1,7}[^\n]{0,80}?)(?:\s*with errorcode -?\d{1,9}|$)",
    ),
    _format(
        ENDED, "RUNNING AT", "Intel MPI, MPICH",
        r"RANK (?P<about>\d{1,7}) PID \d{1,9} RUNNING AT [^\s=]{1,80}",
        r"(?:\s*=\s+(?:KILLED BY SIGNAL: \d{1,3}[^\n]{0,30}|EXIT CODE: \d{1,5}))?",
    ),
    _format(
        ENDED, "exitcode:", "torchrun",
        r"failed \(exitcode: -?\d+\) local_rank: \d+ \(pid: \d+\)",
    ),
    _format(
        CHILD, "Child process with PID", "Lightning",
        r"Child process with PID \d+ terminated with code -?\d+",
    ),
    _format(
        CHILD, "Fatal Python error", "Python's faulthandler", r"Fatal Python error: [^\n]{1,80}",
    ),
    _format(
        ENDED, "exits with return code", "DeepSpeed",
        r"exits with return code = -?\d+",
    ),
    _format(
        ENDED, "died, exit code", "vLLM", r"Worker \S{1,60} pid \d{1,9} died, exit code: -?\d{1,5}"
    ),
    _format(
        ENDED, "died with <Signals", "Python",
        r"died with <Signals\.\w{1,20}: \d{1,3}>",
    ),
    _format(
        ENDED, "A worker died", "Ray",
        r"A worker died or was killed while executing a task[^\n]{0,60}",
    ),
    _format(
        ENDED, "worker process has died", "Ray",
        r"The actor is dead because its worker process has died[^\n]{0,200}",
    ),
    _format(
        Meaning("warning", noted=True), "NCCL WARN", "NCCL 2.0",
        r"NCCL WARN (?!Mismatched collective|NET/IB[^\n]{0,120}collective mismatch)[^\n]{0,200}",
    ),
)  # fmt: skip
_OTHER = (SITE, STACK, ERROR, HANDLED, LOST_PEER, *OF_TOOLS)
_MEANINGS = {one.kind: one for one in (*(row.meaning for row in FORMATS), *_OTHER)}


def meaning(report: Report) -> Meaning:
    """What a message says."""
    return _MEANINGS[report.kind]
