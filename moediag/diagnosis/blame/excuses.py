"""Why a rank that others wait for may be innocent: it waits for one of them, or did as it was told.

The page then tells that, and names nobody.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from moediag.diagnosis.blame.culprits import Blame
from moediag.diagnosis.blame.forks import Fork
from moediag.diagnosis.blame.received import decided_by
from moediag.diagnosis.end_states.whereabouts import main_stack, program_lines
from moediag.diagnosis.schedules.diverge import Divergence
from moediag.evidence.definitions import last_name
from moediag.evidence.model import Evidence, Frame
from moediag.evidence.program_source import Program
from moediag.evidence.rank_stacks import of_user
from moediag.evidence.source_tree import own_expressions


def excuse(found: Blame, divergence: Divergence, forked: Fork | None, evidence: Evidence) -> str:
    """A sentence if each of the culprits has an excuse; else ""."""
    if not found.culprits or not evidence.sources:
        return ""
    told = [
        next(_excuses(rank, found, divergence, forked, evidence), "") for rank in found.culprits
    ]
    return " ".join(dict.fromkeys(told)) if all(told) else ""


def _excuses(
    rank: int, found: Blame, divergence: Divergence, forked: Fork | None, evidence: Evidence
) -> Iterator[str]:
    if forked is not None and len(forked.decisions) == 1:
        call = decided_by(evidence.ranks[rank], forked.decisions[0], evidence)
        if call is not None:
            yield f"What rank {rank} received by {call.op} at {call.line} decided that."
    if found.basis != "gone" or rank in divergence.ended:
        return
    program = Program(evidence.sources, evidence.one_node)
    here = next(iter(_nodes(rank, program, evidence)), None)
    if here is None:
        return
    frame, node = here
    if isinstance(node, ast.With):
        for other in divergence.calls:
            if any(node in around for around in _around(other, program, evidence)):
                yield (
                    f"Rank {rank} waits at {frame.name}:{frame.line} to enter what rank {other} "
                    f"is inside of while it waits for rank {rank}."
                )
    for one in own_expressions(node):
        on = one.func.value if isinstance(one, ast.Call) and isinstance(
            one.func, ast.Attribute) else None  # fmt: skip
        of_torch = on is not None and "store" in last_name(on) and _is_in_torch(rank, evidence)
        if of_torch and last_name(one) in ("get", "wait"):
            at = f"{frame.name}:{frame.line}"
            yield f"Rank {rank} waits at {at} for a key that another rank sets."


def _is_in_torch(rank: int, evidence: Evidence) -> bool:
    """Whether no other library runs in the program's line: a store of torch is not Python."""
    seen = evidence.ranks[rank]
    stack = main_stack(seen)
    inner = stack.python[0] if stack is not None and stack.python else None
    return inner is not None and (bool(of_user([inner], seen.libraries)) or "/torch/" in inner.file)


def _nodes(rank: int, program: Program, evidence: Evidence) -> Iterator[tuple[Frame, ast.stmt]]:
    """The statements in which a rank is, innermost first."""
    for text in program_lines(evidence.ranks[rank]):
        frame = Frame.at(text)
        file = program.file(frame.file, frame.line, frame.function) if frame is not None else None
        node = file.node(frame.line) if file is not None and frame is not None else None
        if frame is None or not isinstance(node, ast.stmt):
            return
        yield frame, node


def _around(rank: int, program: Program, evidence: Evidence) -> Iterator[list[ast.AST]]:
    """What is around each of these statements, without the statements themselves."""
    for frame, node in _nodes(rank, program, evidence):
        file = program.file(frame.file, frame.line, frame.function)
        yield file.around(node)[:-1] if file is not None else []
