"""What the control side and the ranks tell each other: files, environment variables, events.

What is where: ``files``, names of files and environment variables; ``events``, the recorder's log;
``trial``, ``specs`` and ``tasks``, what a rank is given; ``programs``, steps of another kind;
``outcome``, what it measured; ``relations``, what a hunt measured; ``user_code``, which frames are
the user's own.
Both sides import this package, so it needs only the standard library and Python >= 3.9.
A trial is written once as ``trial.json``; each rank appends to ``rank-N.events.jsonl``
(one JSON object a line, written with a single ``write`` so that a killed rank loses
nothing it had recorded) and keeps ``rank-N.heartbeat``, a small memory-mapped record.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from moediag.protocol.events import (
    EVENT_KINDS,
    LAW_KINDS,
    OPS,
    Heartbeat,
)
from moediag.protocol.files import (
    AGENT_EVENTS,
    ENV_ATTEMPT,
    ENV_EVIDENCE,
    ENV_GUARD,
    ENV_GUARD_TIMEOUT,
    ENV_JOB,
    ENV_LAWS,
    ENV_MAIN_THREAD,
    ENV_PACKAGE,
    ENV_PARENT,
    ENV_RANK_PID,
    ENV_SEGMENT,
    ENV_TRIAL,
    ENV_WATCH,
    FAMILIES_FILE,
    GUARD_TIMEOUT,
    LAUNCH_FILE,
    LAUNCHER_LOG,
    LINK_FILE,
    NODES_FILE,
    NODES_FOLDER,
    NOT_RECORDED_FILE,
    PULSE_FILE,
    RELATION_FILE,
    RELEASE_FILE,
    SUSCEPTIBILITY_FILE,
    TRIAL_FILE,
    WANT_FILE,
    WATCHDOG_DUMPS,
    WATCHDOG_PIPES,
    alone_file,
    attempt_folder,
    dump_request_file,
    error_file,
    events_file,
    executed_file,
    flight_file,
    heartbeat_file,
    job_file,
    laws_file,
    older_events_file,
    older_laws_file,
    outcome_file,
    output_file,
    pid_file,
    stacks_file,
    watchdog_dump,
)
from moediag.protocol.process_start import (
    start_time,
    stat_fields,
)
from moediag.protocol.programs import (
    PROGRAMS,
    program_options,
)
from moediag.protocol.stored import (
    SCHEMA_VERSION,
    build,
    parse_json,
    write_json,
    write_text,
)
from moediag.protocol.user_code import (
    in_libraries,
    innermost_user,
    is_moediag,
)

# Modules of dataclasses, which take longer to make than the rest of a short command.
_LATER = ("specs", "tasks", "trial", "outcome", "relations", "measured")

if TYPE_CHECKING:
    from moediag.protocol.measured import (
        ENV_MEASURE,
        Measured,
        MeasuredStep,
        MeasureRequest,
        read_measured,
    )
    from moediag.protocol.outcome import (
        Applied,
        ExpertRows,
        GradientError,
        Multiple,
        Outcome,
        OutcomeTable,
        Replica,
        ResumeOutcome,
        Sketch,
        StateDifference,
        StepNumbers,
        StepReplicas,
        Susceptibility,
    )
    from moediag.protocol.relations import (
        CONDITIONS,
        ListedFamily,
        RelationOutcome,
        ReleaseListing,
        WayOutcome,
    )
    from moediag.protocol.specs import (
        SIZES,
        VOCAB,
        ModelSpec,
        RecorderSpec,
        Size,
        SkewSpec,
        Starve,
        StepSpec,
        WrapperSpec,
    )
    from moediag.protocol.tasks import (
        TRAINER_KINDS,
        CostTask,
        FamiliesTask,
        ProgramTask,
        ReferenceTask,
        RelationTask,
        ResumeTask,
        StepTask,
        SusceptibilityTask,
        Task,
        TrainerTask,
        VerifyTask,
        WatchTask,
        task_fields,
    )
    from moediag.protocol.trial import Trial
else:

    def __getattr__(name: str) -> Any:
        """Imports the modules in ``_LATER`` as far as the one that defines ``name``."""
        for module in _LATER if name in __all__ else ():
            found = vars(import_module(f"{__name__}.{module}"))
            if name in found:
                globals()[name] = found[name]
                return found[name]
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "AGENT_EVENTS",
    "CONDITIONS",
    "ENV_ATTEMPT",
    "ENV_EVIDENCE",
    "ENV_GUARD",
    "ENV_GUARD_TIMEOUT",
    "ENV_JOB",
    "ENV_LAWS",
    "ENV_MAIN_THREAD",
    "ENV_MEASURE",
    "ENV_PACKAGE",
    "ENV_PARENT",
    "ENV_RANK_PID",
    "ENV_SEGMENT",
    "ENV_TRIAL",
    "ENV_WATCH",
    "EVENT_KINDS",
    "FAMILIES_FILE",
    "GUARD_TIMEOUT",
    "LAUNCHER_LOG",
    "LAUNCH_FILE",
    "LAW_KINDS",
    "LINK_FILE",
    "NODES_FILE",
    "NODES_FOLDER",
    "NOT_RECORDED_FILE",
    "OPS",
    "PROGRAMS",
    "PULSE_FILE",
    "RELATION_FILE",
    "RELEASE_FILE",
    "SCHEMA_VERSION",
    "SIZES",
    "SUSCEPTIBILITY_FILE",
    "TRAINER_KINDS",
    "TRIAL_FILE",
    "VOCAB",
    "WANT_FILE",
    "WATCHDOG_DUMPS",
    "WATCHDOG_PIPES",
    "Applied",
    "CostTask",
    "ExpertRows",
    "FamiliesTask",
    "GradientError",
    "Heartbeat",
    "ListedFamily",
    "MeasureRequest",
    "Measured",
    "MeasuredStep",
    "ModelSpec",
    "Multiple",
    "Outcome",
    "OutcomeTable",
    "ProgramTask",
    "RecorderSpec",
    "ReferenceTask",
    "RelationOutcome",
    "RelationTask",
    "ReleaseListing",
    "Replica",
    "ResumeOutcome",
    "ResumeTask",
    "Size",
    "Sketch",
    "SkewSpec",
    "Starve",
    "StateDifference",
    "StepNumbers",
    "StepReplicas",
    "StepSpec",
    "StepTask",
    "Susceptibility",
    "SusceptibilityTask",
    "Task",
    "TrainerTask",
    "Trial",
    "VerifyTask",
    "WatchTask",
    "WayOutcome",
    "WrapperSpec",
    "alone_file",
    "attempt_folder",
    "build",
    "dump_request_file",
    "error_file",
    "events_file",
    "executed_file",
    "flight_file",
    "heartbeat_file",
    "in_libraries",
    "innermost_user",
    "is_moediag",
    "job_file",
    "laws_file",
    "older_events_file",
    "older_laws_file",
    "outcome_file",
    "output_file",
    "parse_json",
    "pid_file",
    "program_options",
    "read_measured",
    "stacks_file",
    "start_time",
    "stat_fields",
    "task_fields",
    "watchdog_dump",
    "write_json",
    "write_text",
]
