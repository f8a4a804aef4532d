"""What all instruments inside a user's program do alike."""

from __future__ import annotations

import threading
import traceback
from pathlib import Path
from typing import Any, Callable, Sequence

import torch

from moediag.recorder.not_applicable import NotApplicable


def guarded(
    doing: str, problem: Callable[[str], None], act: Callable[..., Any], args: Sequence[Any]
) -> Any:
    """Returns ``act(*args)``. An error ends what the instrument is ``doing``, not the program:
    ``problem`` is called with its text, and None is returned."""
    try:
        return act(*args)
    except NotApplicable as error:
        problem(str(error))
    except Exception as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(at.filename).name}:{at.lineno}"
        problem(f"{doing} failed: {error!r} ({where})")
    return None


def trains(module: Any) -> bool:
    """Whether a forward of ``module`` that begins now is one that trains."""
    return (
        torch.is_grad_enabled()
        and torch._C._current_graph_task_id() == -1  # else: recomputed in the backward
        and threading.current_thread() is threading.main_thread()
        and next(module.parameters(), None) is not None
    )
