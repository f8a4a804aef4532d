"""Both sides of the first divergence, and the stacks, in the format of result.json."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence

from moediag.diagnosis.blame.culprits import Blame
from moediag.diagnosis.end_states.whereabouts import shown_stack
from moediag.diagnosis.schedules.diverge import Divergence
from moediag.diagnosis.schedules.matching import wire_numel
from moediag.evidence.model import Collective, Evidence, Frame
from moediag.protocol import in_libraries, is_moediag
from moediag.result import FirstDivergence, RankSide
from moediag.result.wording import plural

NO_CALL = "none"  # op of a rank that made no call
_FRAMES = 12  # without any of the user's
_INNERMOST = 6  # library frames: what the rank waits for
_USER_FRAMES = 40
_LONGEST_NAME = 120  # characters
# Torch's decorators and loggers between the meaningful frames.
_PLUMBING = (
    "c10d_logger.py",
    "utils/_contextlib.py",
    "_dynamo/eval_frame.py",
    "torch/_compile.py",
    "torch/_ops.py",
    "_fully_shard/_fsdp_common.py",
)
# moediag's own modules: wrappers around the user's calls, and the entry point of a rank; the
# launcher is outside it.
_WRAPPERS, _ENTRY = "/moediag/recorder/", "/moediag/ranks/entry.py"


def first_divergence(divergence: Divergence, blame: Blame) -> FirstDivergence:
    """The divergence for result.json. ``phase`` and ``module`` are what most sides name."""
    calls = [call for call in divergence.calls.values() if call is not None]
    sides = {
        str(rank): _side(call, blame.missing.get(rank, ()))
        for rank, call in sorted(divergence.calls.items())
    }
    phases = [call.phase for call in calls if call.phase != "other"]
    return FirstDivergence(
        index=divergence.position,
        axis=divergence.group.label,
        phase=_most(phases) or "other",
        module=_most(call.module for call in calls if call.module),
        ranks=sides,
    )


def _side(call: Collective | None, missing: tuple[str, ...]) -> RankSide:
    if call is None:
        return RankSide(NO_CALL, 0, "", missing)
    return RankSide(call.op, wire_numel(call), call.dtype, missing)


def _most(texts: Iterable[str]) -> str:
    counted = Counter(texts).most_common(1)
    return counted[0][0] if counted else ""


def stacks(evidence: Evidence) -> dict[int, tuple[str, ...]]:
    """Rank -> frames of the thread that counts, innermost first, as ``function (file.py:12)``. That
    is a thread inside a collective, else the main thread, else the traceback that ended the rank.
    The first source of the rank is the best: readers list them in that order. All frames of the
    user's code are there; of the libraries' frames the innermost ones, and ``... 7 library frames``
    for others."""
    shown = {}
    for rank, seen in sorted(evidence.ranks.items()):
        stack = shown_stack(seen)
        raised = seen.error.frames if seen.error is not None else ()
        if stack is not None or raised:
            found = stack.frames if stack is not None else raised
            frames = itertools.takewhile(lambda f: not f.file.endswith(_ENTRY), found)
            shown[rank] = _folded([f for f in frames if _tells(f)], seen.libraries)
    return shown


def _folded(frames: Sequence[Frame], libraries: tuple[str, ...]) -> tuple[str, ...]:
    python = [frame.file for frame in frames if not frame.native]
    of_library = iter(in_libraries(python, libraries))
    users = [not frame.native and not next(of_library) for frame in frames]
    texts: list[str] = []
    for own, run in itertools.groupby(zip(users, frames, strict=True), key=lambda pair: pair[0]):
        those = [frame_text(frame) for _, frame in run]
        room = _USER_FRAMES if own else _FRAMES if not any(users) else 0 if texts else _INNERMOST
        room += len(those) == room + 1  # the fold would take a line as well
        texts += those[:room]
        if hidden := len(those[room:]):
            texts.append(f"... {plural(hidden, 'frame' if own else 'library frame')}")
    return tuple(texts)


def _tells(frame: Frame) -> bool:
    """Whether a frame is meaningful. A GPU driver spins in a dozen frames without names."""
    nameless = frame.native and frame.function.startswith(("0x", "?"))
    wraps = _WRAPPERS in frame.file and is_moediag(frame.file)
    binds = frame.native and "pybind11::" in frame.function[:_LONGEST_NAME]
    return not (nameless or wraps or binds or frame.file.endswith(_PLUMBING))


def frame_text(frame: Frame) -> str:
    file, name = frame.file.rpartition("/")[2], frame.function
    if len(name) > _LONGEST_NAME:  # a C++ template, whose arguments may fill a page
        name = name.partition("<")[0][:_LONGEST_NAME] + "…"
    return f"{name} ({file}:{frame.line})" if frame.line else f"{name} ({file})"
