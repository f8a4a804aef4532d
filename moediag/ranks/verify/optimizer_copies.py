"""An optimizer of one process that continues like the one of a distributed job: same class, same
settings by parameter, same state."""

from __future__ import annotations

import contextlib
from collections import Counter
from pathlib import Path
from typing import Any, Dict, List, Sequence, Tuple

import torch

from moediag.protocol.measured import read_measured, start_tensors
from moediag.ranks.verify import tensor_files
from moediag.ranks.verify.model_pieces import Piece
from moediag.ranks.verify.tensor_files import Stored, Tensors
from moediag.recorder.step.pieces import WHOLE, Where, local

Settings = Dict[str, Dict[str, Any]]  # parameter -> setting of its group -> value

_PLAIN = (bool, int, float, str, type(None))
# How a step is computed, not what it computes. The copy has torch's defaults.
_HOW = ("foreach", "fused", "capturable", "differentiable", "initial_lr")
_BETWEEN = "\n"  # between the key of a state and the parameter's name


class CannotCopy(Exception):
    """No equal optimizer can be made; the text says why."""


def inner(optimizer: Any) -> Any:
    """Returns the optimizer of torch.optim inside a wrapper (accelerate's, say). Raises
    CannotCopy."""
    one = optimizer
    while not type(one).__module__.startswith("torch.optim."):
        one = getattr(one, "optimizer", None)
        if one is None:
            raise CannotCopy(f"{type(optimizer).__name__} is not an optimizer of torch.optim")
    return one


def settings(optimizer: Any, pieces: Sequence[Piece]) -> Settings:
    """Returns what the groups of ``optimizer`` say, by parameter. Raises CannotCopy."""
    by_owner = {id(p): group for group in inner(optimizer).param_groups for p in group["params"]}
    found: Settings = {}
    for piece in pieces:
        group = by_owner.get(id(piece.owner)) if piece.owner is not None else None
        if group is not None:
            kept = {key: value for key, value in group.items() if key not in ("params", *_HOW)}
            found[piece.name] = {key: _value(key, value) for key, value in kept.items()}
    return found


def _value(key: str, value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return float(value)
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, (tuple, list)) and all(isinstance(one, _PLAIN) for one in value):
        return tuple(value)
    raise CannotCopy(f"its setting {key} is a {type(value).__name__}")


def agreed(of_ranks: Sequence[Settings]) -> Tuple[Settings, str]:
    """Returns by parameter the settings of most ranks that have it, and "" or, where no majority
    has the same, which parameter and setting differ."""
    names = {name: None for one in of_ranks for name in one}
    found: Settings = {}
    for name in names:
        own = [one[name] for one in of_ranks if name in one]
        counted = Counter(repr(sorted(one.items())) for one in own)
        text, count = counted.most_common(1)[0]
        chosen = next(one for one in own if repr(sorted(one.items())) == text)
        if 2 * count <= len(own):
            return {}, _difference(name, own)
        found[name] = chosen
    return found, ""


def _difference(name: str, own: Sequence[Dict[str, Any]]) -> str:
    keys = sorted({key for one in own for key in one})
    key = next(k for k in keys if len({repr(one.get(k)) for one in own}) > 1)
    values = sorted({repr(one.get(key)) for one in own})
    return f"{key} of {name} is {' and '.join(values)}"


# ------------------------------------------------------------------------ state


def states(optimizer: Any, pieces: Sequence[Piece]) -> Tensors:
    """Returns this rank's part of the state of each parameter. Raises CannotCopy."""
    found: Tensors = {}
    of_owner = inner(optimizer).state
    for piece in pieces:
        own = of_owner.get(piece.owner, {}) if piece.owner is not None else {}
        shape = tuple(piece.read().shape) if own else ()
        for key, value in own.items():
            found[f"{key}{_BETWEEN}{piece.name}"] = _state(piece, key, value, shape)
    return found


def _state(piece: Piece, key: str, value: Any, shape: Tuple[int, ...]) -> Stored:
    if isinstance(value, (bool, int, float)):
        return Stored(Where(WHOLE, ()), torch.tensor(value))
    part = local(value) if isinstance(value, torch.Tensor) else None
    if part is None or (part.dim() and tuple(part.shape) != shape):
        raise CannotCopy(f"its state {key} does not have the shape of {piece.name}")
    return Stored(piece.where if part.dim() else Where(WHOLE, ()), part.cpu().clone())


def copy(optimizer: Any, chosen: Settings, pieces: Sequence[Piece], job: Path) -> Any:
    """Returns an optimizer of the parameters of ``pieces`` with the ``chosen`` settings and the
    state that the ranks of ``job`` have written. Raises CannotCopy."""
    groups: List[Dict[str, Any]] = []
    by_settings: Dict[str, Dict[str, Any]] = {}
    for piece in pieces:
        if piece.name not in chosen:
            continue
        own = chosen[piece.name]
        key = repr(sorted(own.items()))
        if key not in by_settings:
            by_settings[key] = {**own, "params": []}
            groups.append(by_settings[key])
        by_settings[key]["params"].append(piece.owner)
    missing = set(chosen) - {piece.name for piece in pieces}
    if missing or not groups:
        raise CannotCopy(f"the reference has no {next(iter(sorted(missing)), 'parameter')}")
    kind = type(inner(optimizer))
    try:
        found = kind(groups)
    except (TypeError, ValueError) as error:
        raise CannotCopy(f"{kind.__name__} cannot be made with its groups: {error}") from error
    by_name = {piece.name: piece for piece in pieces}
    for (key, name), value in _whole_states(job).items():
        owner = by_name[name].owner
        like = owner if value.dim() else value
        found.state[owner][key] = value.to(device=like.device)
    return found


def _whole_states(job: Path) -> Dict[Tuple[str, str], torch.Tensor]:
    parts: Dict[str, List[Stored]] = {}
    for rank in sorted(read_measured(job)):
        with contextlib.suppress(KeyError):
            for name, stored in tensor_files.load(job / start_tensors(rank))["states"].items():
                parts.setdefault(name, []).append(stored)
    found: Dict[Tuple[str, str], torch.Tensor] = {}
    for text, own in parts.items():
        key, _, name = text.partition(_BETWEEN)
        one, reason = tensor_files.whole(own)
        if one is None:
            raise CannotCopy(f"state {key} of {name}: {reason}")
        found[key, name] = one
    return found
