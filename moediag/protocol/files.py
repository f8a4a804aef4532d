"""Environment variables and file names that a rank and the control side share."""

from __future__ import annotations

# Environment variables through which a rank learns that it is watched.
ENV_TRIAL = "MOEDIAG_TRIAL"  # path of trial.json
ENV_EVIDENCE = "MOEDIAG_EVIDENCE"  # folder that receives the rank's files
# "1": ranks compare what they bring to each reduction of FSDP2, see recorder.guard.
ENV_GUARD = "MOEDIAG_GUARD"
ENV_GUARD_TIMEOUT = "MOEDIAG_GUARD_TIMEOUT"  # seconds until a rank that others wait for is absent
GUARD_TIMEOUT = 300.0
# "0": each rank records fingerprints at steps 1, 2, 3, 6, 12, …; "N": at 1, 2, 3 and every N steps.
ENV_LAWS = "MOEDIAG_LAWS"
ENV_ALLOW = "MOEDIAG_ALLOW"  # a JSON list of LAW or LAW:PATTERN

# A watched job: its run directory, the folder of this package, the marker of a process that is a
# rank (its children inherit it), how often the elastic agent started its ranks before, and the size
# of a segment of the log in bytes.
ENV_WATCH = "MOEDIAG_WATCH"
ENV_PACKAGE = "MOEDIAG_PACKAGE"
ENV_RANK_PID = "MOEDIAG_RANK_PID"
ENV_ATTEMPT = "MOEDIAG_ATTEMPT"
ENV_SEGMENT = "MOEDIAG_SEGMENT_BYTES"
# What the elastic agents of all nodes agreed to call this start of their ranks, see job_file.
ENV_JOB = "MOEDIAG_JOB"

# From a launcher to the processes it starts: the pid that must stay their parent, and "1" where
# moediag forked from its main thread (see ranks.parent).
ENV_PARENT = "MOEDIAG_PARENT"
ENV_MAIN_THREAD = "MOEDIAG_FROM_MAIN_THREAD"

TRIAL_FILE = "trial.json"
LOOKS_FILE = "looks.json"  # of a job that was started without moediag, see evidence.looks
NOT_SEEN_FILE = "not-seen.txt"  # of that job: one line for each thing that could not be read
LAUNCH_FILE = "launch.json"  # how the launch went, as the control side saw it
# In a trial's folder: the launcher's own output; what the elastic agent reports (JSON lines); and
# the file that lets the agent end the other ranks after one died (see ranks.agent).
LAUNCHER_LOG = "launcher.log"
AGENT_EVENTS = "launcher.events.jsonl"
RELEASE_FILE = "launcher.release"
# In the run directory of a watched job: one line for each process that could not be recorded.
NOT_RECORDED_FILE = "not-recorded.txt"


# Under `check --script`: the optimizer steps after which a simulated rank ends.
ENV_SIMULATE = "MOEDIAG_SIMULATE"
# Then, what roots broadcast; * is the call.
ROOT_FILES = "broadcast-*.pt"


def attempt_folder(attempt: int) -> str:
    """The evidence of a watched job's ranks; an elastic agent may start them several times."""
    return f"attempt-{attempt}"


def pid_file(rank: int) -> str:
    """JSON: ``pid``; ``started``, see :func:`.start_time`; ``host``; ``time``, epoch
    seconds. Of a watched job also ``world_size`` and ``local_ranks`` (null where the rank does not
    know) and ``flight_dumps``, prefixes of what torch's watchdog writes. Lets the watchdog find the
    rank before its first heartbeat."""
    return f"rank-{rank}.pid"


def child_end_file(pid: int | str) -> str:
    """What the parent of that process got when it ended, if not 0; a signal is below 0."""
    return f"child-{pid}.end"


def job_file(rank: int) -> str:
    """JSON of a watched job: ``job``, a token that all ranks of one start of the job have in common
    and no other start has; ``node``, the number of this rank's node (null where nodes have no
    numbers); ``store``, ``[host, port]`` of the TCP store that ranks meet at (null: another kind of
    store); ``python``, its interpreter."""
    return f"rank-{rank}.job.json"


# In an attempt's folder: the nodes of the job as the watcher of one of them knows them, see
# evidence.nodes. The evidence of the others is in NODES_FOLDER, a folder for each.
NODES_FILE = "nodes.json"
NODES_FOLDER = "nodes"

# Between the watchers of several nodes, in the folder that they share or that ranks.relay carries
# to the others: a node's state; the watcher reads the others' evidence; the relay's turns so far.
PULSE_FILE = "pulse.json"
WANT_FILE = "want"
LINK_FILE = "link.json"


def events_file(rank: int) -> str:
    """The recorder's log: JSON lines, one of EVENT_KINDS in field ``e``."""
    return f"rank-{rank}.events.jsonl"


def older_events_file(rank: int) -> str:
    """The segment of the log before ``events_file``, once that has grown to its bound; the newer
    segment repeats what its lines refer to (start, group, names), so it can be read alone."""
    return f"rank-{rank}.events.older.jsonl"


def laws_file(rank: int) -> str:
    """What ranks record for the laws, one JSON object a line, see :mod:`moediag.protocol.events`.
    Apart from ``events_file``, whose ring soon loses the first steps."""
    return f"rank-{rank}.laws.jsonl"


def older_laws_file(rank: int) -> str:
    """The segment before ``laws_file``, as ``older_events_file``."""
    return f"rank-{rank}.laws.older.jsonl"


def heartbeat_file(rank: int) -> str:
    """The memory-mapped progress record, see :class:`Heartbeat`."""
    return f"rank-{rank}.heartbeat"


def output_file(rank: int) -> str:
    """The rank's own standard output and error, together."""
    return f"rank-{rank}.log"


def stacks_file(rank: int) -> str:
    """What ``faulthandler`` wrote (on a fatal signal, on SIGTERM, or when asked)."""
    return f"rank-{rank}.stacks.txt"


def error_file(rank: int) -> str:
    """The exception that ended the rank, as torch elastic's error file (JSON)."""
    return f"rank-{rank}.error.json"


def alone_file(rank: int) -> str:
    """Written at the end of a watched rank that had peers (WORLD_SIZE) but never created a process
    group: ``optimizers``, the classes of torch.optim that it constructed."""
    return f"rank-{rank}.alone.json"


def meeting_file(rank: int) -> str:
    """What a watched rank passed to ``init_process_group``: ``backend``; ``address``, where it
    meets the others (empty: at a store of its own); ``world_size``."""
    return f"rank-{rank}.meeting.json"


def simulated_file(rank: int) -> str:
    """How far a simulated rank of a user's program came, see :class:`SimulatedRank`."""
    return f"rank-{rank}.simulated.json"


def outcome_file(rank: int) -> str:
    """What the worker measured on this rank, see :class:`Outcome`; absent if it died."""
    return f"rank-{rank}.outcome.json"


def executed_file(rank: int) -> str:
    """The files of installed packages of which this rank ran a function: one a line, as imported
    (``transformers/modeling_utils.py``). Only where the trial asks for it."""
    return f"rank-{rank}.executed.txt"


def flight_file(rank: int) -> str:
    """Flight Recorder dump of this rank (JSON, without stacks)."""
    return f"rank-{rank}.flight.json"


# torch writes a dump to this prefix plus the rank's number when a collective times out, and creates
# a pipe at the other prefix: a write to it requests that dump, without Python.
WATCHDOG_DUMPS = "rank-flight-dump-"
WATCHDOG_PIPES = "rank-flight-pipe-"


def watchdog_dump(rank: int) -> str:
    """Flight Recorder dump of this rank by torch's own watchdog (a pickle with stacks)."""
    return f"{WATCHDOG_DUMPS}{rank}"


# What a trial of a hunt found, see :class:`ReleaseListing` and :class:`RelationOutcome`.
FAMILIES_FILE = "families.json"
RELATION_FILE = "relation.json"
# What `moediag check` found out, see :class:`Checked`.
CHECKED_FILE = "checked.json"


# A file that, once created by the control side, asks the rank's recorder thread to dump the
# Flight Recorder into flight_file(rank).
def dump_request_file(rank: int) -> str:
    return f"rank-{rank}.dump-request"
