"""What the control side and the ranks tell each other: files, environment variables, events.

What is where: ``files``, names of files and environment variables; ``events``, the recorder's log;
``trial``, ``specs`` and ``tasks``, what a rank is given;
``outcome``, what it measured; ``relations``, what a hunt measured; ``checked``, what a check found;
``user_code``, which frames are the user's own.
Both sides import this package, so it needs only the standard library and Python >= 3.9.
A trial is written once as ``trial.json``; each rank appends to ``rank-N.events.jsonl``
(one JSON object a line, written with a single ``write`` so that a killed rank loses
nothing it had recorded) and keeps ``rank-N.heartbeat``, a small memory-mapped record.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

# In this order they are searched for a name. The modules of dataclasses are last: they take longer
# to import than the rest of a short command.
__all__ = [
    "number_text", "user_code", "files", "process_start", "stored", "events",
    "specs", "tasks", "trial", "outcome", "relations", "measured", "checked", "recorded_state",
]  # fmt: skip

if TYPE_CHECKING:
    from moediag.protocol.checked import *
    from moediag.protocol.events import *
    from moediag.protocol.files import *
    from moediag.protocol.measured import *
    from moediag.protocol.number_text import *
    from moediag.protocol.outcome import *
    from moediag.protocol.process_start import *
    from moediag.protocol.recorded_state import *
    from moediag.protocol.relations import *
    from moediag.protocol.specs import *
    from moediag.protocol.stored import *
    from moediag.protocol.tasks import *
    from moediag.protocol.trial import *
    from moediag.protocol.user_code import *
else:

    def __getattr__(name: str) -> Any:
        """Imports the modules as far as the first one that defines ``name``."""
        of_module = (name,) if name in __all__ else __all__
        for module in of_module if not name.startswith("__") else ():
            found = import_module(f"{__name__}.{module}")
            if name == module or name in vars(found):
                globals()[name] = found if name == module else vars(found)[name]
                return globals()[name]
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
