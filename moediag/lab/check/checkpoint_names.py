"""Names and shapes in the headers of a folder's safetensors files, against those of the model.

No tensor is read. The release's own functions say which parameter a name is loaded into.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence, Set, Tuple

from moediag.lab.check.tensor_places import listed
from moediag.lab.step.models import checkpoint
from moediag.lab.step.models.plan_names import generic
from moediag.protocol import FAILS, MAY_FAIL, CheckFinding, read_json

CHECKPOINT = "checkpoint"
_LENGTH = 8  # bytes that hold the header's size
_LARGEST = 200_000_000  # bytes of a header
_UNREADABLE = (
    OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError,
)  # fmt: skip
Shapes = Dict[str, List[int]]
# Name in a file -> (name in the model, whether its tensor is converted too).
Mapping = Callable[[str], Tuple[str, bool]]


class NotRead(Exception):
    """Why the checkpoint is not compared."""


def shapes(folder: Path) -> Shapes:
    """Returns the shape of each tensor. Raises NotRead."""
    found: Shapes = {}
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise NotRead("there is no safetensors file beside config.json")
    absent = _listed_files(folder) - {file.name for file in files}
    if absent:
        raise NotRead(f"{listed(sorted(absent))} of its index is not in the folder")
    for file in files:
        try:
            with file.open("rb") as opened:
                size = int.from_bytes(opened.read(_LENGTH), "little")
                if not 0 < size <= _LARGEST:
                    raise NotRead(f"{file.name} is no safetensors file")
                header = json.loads(opened.read(size))
            tensors = {n: v for n, v in header.items() if n != "__metadata__"}
            found.update({n: [int(size) for size in v["shape"]] for n, v in tensors.items()})
        except _UNREADABLE as error:
            raise NotRead(f"{file.name} cannot be read: {error}") from error
    return found


def _listed_files(folder: Path) -> Set[str]:
    """Returns the files that an index beside them lists."""
    names: Set[str] = set()
    for index in folder.glob("*.safetensors.index.json"):
        try:
            raw = read_json(index)
            names.update(map(str, raw["weight_map"].values()))
        except _UNREADABLE as error:
            raise NotRead(f"{index.name} cannot be read: {error}") from error
    return names


def findings(folder: Path, model: Any, tied: Sequence[Sequence[str]]) -> List[CheckFinding]:
    """Compares the files in ``folder`` with the model. ``tied``: names that are one tensor. Raises
    NotRead."""
    stored = shapes(folder)
    wanted = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    named = _mapping(model, wanted)
    given: Dict[str, str] = {}
    wrong, unused = [], []
    for name, shape in stored.items():
        target, converted = named(name)
        if target not in wanted:
            unused.append(name)
            continue
        given[target] = name
        if not converted and shape != wanted[target]:
            wrong.append(f"{name} is {shape}, the model's {target} {wanted[target]}")
    return [*_shapes(wrong), *_missing(model, set(wanted) - set(given), given, tied, unused)]


def _shapes(wrong: List[str]) -> List[CheckFinding]:
    if not wrong:
        return []
    return [CheckFinding(CHECKPOINT, FAILS, f"shapes of the files differ: {listed(wrong)}")]


def _missing(
    model: Any, absent: Any, given: Any, tied: Sequence[Sequence[str]], unused: List[str]
) -> List[CheckFinding]:
    """Parameters that no file gives. from_pretrained initialises them, with a warning."""
    aliases = {name for names in tied for name in names if any(n in given for n in names)}
    known = getattr(model, "_keys_to_ignore_on_load_missing", None) or ()
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    lost = sorted(
        name for name in absent & parameters - aliases
        if not any(re.search(pattern, name) for pattern in known)
    )  # fmt: skip
    if not lost:
        return []
    names = sorted({generic(name) for name in lost})
    extra = sorted({generic(name) for name in unused})
    beside = f"; no parameter takes {listed(extra)}" if extra else ""
    return [CheckFinding(
        CHECKPOINT, MAY_FAIL,
        f"no file gives {len(lost)} parameters ({listed(names)}), which from_pretrained then "
        f"initialises at random{beside}",
    )]  # fmt: skip


def _mapping(model: Any, wanted: Shapes) -> Mapping:
    """Returns the release's mapping of names. Raises NotRead if it has none that can be called."""
    if int(checkpoint.version().split(".")[0]) < 5:
        return _before_5(model, wanted)
    try:
        loading = importlib.import_module("transformers.core_model_loading")
        collected = importlib.import_module("transformers.conversion_mapping")
        transforms = collected.get_model_conversion_mapping(model)
        rename: Any = loading.rename_source_key
        if len(inspect.signature(rename).parameters) < 5:
            raise NotRead(f"transformers {checkpoint.version()} maps names in another way")
    except (ImportError, AttributeError, TypeError) as error:
        raise NotRead(f"the release's mapping of names cannot be called: {error}") from error
    renamings = [t for t in transforms if isinstance(t, loading.WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, loading.WeightConverter)]
    prefix, state = model.base_model_prefix, model.state_dict()

    def mapped(name: str) -> Tuple[str, bool]:
        found, pattern = rename(name, renamings, converters, prefix, state)
        if found not in wanted and name in wanted:
            found, pattern = rename(name, [], [], prefix, state)
        return found, pattern is not None

    return mapped


def _before_5(model: Any, wanted: Shapes) -> Mapping:
    """Names are loaded as they are, up to the prefix of the base model."""
    if getattr(model, "_checkpoint_conversion_mapping", None):
        raise NotRead("this class renames the tensors of older checkpoints")
    prefix: Optional[str] = getattr(model, "base_model_prefix", None)

    def mapped(name: str) -> Tuple[str, bool]:
        for candidate in (name, f"{prefix}.{name}", name.partition(f"{prefix}.")[2]):
            if candidate in wanted:
                return candidate, False
        return name, False

    return mapped
