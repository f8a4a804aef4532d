"""Follows data that a simulated collective wrote, and tells when the program reads some of it.

What another rank would have sent is not known, nor is what is calculated from it. A program that
reads such a value may take another branch than it would in the job, so from there on its calls
prove nothing. Values are assumed to be finite: a test for NaN or infinity is no read. Marks belong
to storages: a view of a marked tensor is marked, also where other rows of it were written.
"""

from __future__ import annotations

import os
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from moediag.lab.simulation import unreal_number
from moediag.lab.simulation.answers import COMMUNICATION, Answers, as_list, group_of

# (operator, group, tensors): whether the tensors now hold what the other rank really sends.
Known = Callable[[Any, Any, List[torch.Tensor]], bool]
_SENDING = ("send", "barrier", "monitored_barrier_", "wait_tensor")
_ASKING = ("isnan", "isinf", "isfinite", "_amp_foreach_non_finite_check_and_unscale_")
_MASKED = {"masked_select": 1, "index": 1}  # the argument that decides the shape of the result
_OVERWRITING = ("aten::copy_", "aten::fill_", "aten::zero_")
_PURGE = 4096  # marks after which those of freed storages are dropped


class UnrealData(Answers):
    """Marks what depends on other ranks. ``read`` is called with each read of marked data."""

    def __init__(self, read: Callable[[str], None], known: Optional[Known] = None) -> None:
        super().__init__()
        self._read = read
        self._known = known
        self._pid = os.getpid()
        self._marks: Dict[int, StorageWeakRef] = {}
        self._quiet = False
        self._purge_at = _PURGE
        self._seed_size = torch.get_rng_state().numel()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(kind.__name__ == "FakeTensor" for kind in types):
            return func(*args, **(kwargs or {}))  # has no data
        if any(kind not in (torch.Tensor, torch.nn.Parameter) for kind in types):
            return NotImplemented  # DTensor and others first become operations on plain tensors
        if func.namespace in COMMUNICATION:
            result = super().__torch_dispatch__(func, types, args, kwargs)
            self._communicated(func, args, result)
            return result
        if not self._marks:
            return func(*args, **(kwargs or {}))
        given = list(_tensors((args, kwargs)))
        overwrites = func._schema.name in _OVERWRITING
        unreal = any(map(self.marked, given[1:] if overwrites else given))
        if unreal:
            self._may_read(func, args, given)
        result = func(*args, **(kwargs or {}))
        if unreal:
            self._spread(func, args, result)
        elif overwrites:
            self._overwritten(args[0])
        return result

    def marked(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` depends on what other ranks would have sent."""
        storage = _storage(tensor)
        found = self._marks.get(storage._cdata) if storage is not None else None
        return found is not None and not found.expired()

    def mark(self, tensor: torch.Tensor) -> None:
        storage = _storage(tensor)
        if storage is None:
            self.read("a tensor without a storage")
            return
        if tensor.dtype == torch.uint8 and tensor.numel() == self._seed_size:
            self.read("the state of a random generator")  # set_state reads it without an operator
        if not storage.resizable() and tensor.device.type == "cpu":
            # Memory of numpy or of another process: the program may read it without torch.
            self.read("memory shared with numpy or another process")
        self._marks[storage._cdata] = StorageWeakRef(storage)
        if len(self._marks) > self._purge_at:
            self._marks = {k: v for k, v in self._marks.items() if not v.expired()}
            self._purge_at = max(_PURGE, 2 * len(self._marks))

    def read(self, what: str) -> None:
        if not self._quiet and os.getpid() == self._pid:
            self._read(what)

    # ------------------------------------------------------------------ operators

    def _communicated(self, func: Any, args: Tuple[Any, ...], result: Any) -> None:
        name = func._schema.name.rpartition("::")[2]
        group = group_of(func, args)
        if name in _SENDING or group.size() == 1:
            return
        in_place = func.namespace == "c10d" or name.endswith("_")
        outputs = list(_tensors(args[0] if in_place else result))
        if self._known is not None and self._known(func, args, outputs):
            return
        for tensor in outputs:
            self.mark(tensor)

    def _may_read(self, func: Any, args: Tuple[Any, ...], given: List[torch.Tensor]) -> None:
        if not {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & {*func.tags}:
            return
        name = func._schema.name.rpartition("::")[2]
        at = _MASKED.get(name)
        if at is not None and at < len(args):
            masks = [t for t in _tensors(args[at]) if t.dtype in (torch.bool, torch.uint8)]
            given = masks if name == "index" else list(_tensors(args[at]))
        if any(map(self.marked, given)):
            self.read("a tensor's value" if name == "_local_scalar_dense" else f"torch.{name}")

    def _spread(self, func: Any, args: Tuple[Any, ...], result: Any) -> None:
        if func._schema.name.rpartition("::")[2] in _ASKING and _all_finite(func, args, result):
            return
        for tensor in _tensors(result):
            self.mark(tensor)
        for tensor in _written(func, args):
            self.mark(tensor)

    def _overwritten(self, tensor: torch.Tensor) -> None:
        storage = _storage(tensor)
        if storage is not None and tensor.numel() * tensor.itemsize == storage.nbytes():
            self._marks.pop(storage._cdata, None)

    # ------------------------------------------------------------------ reads beside operators

    def replacements(self) -> List[Tuple[Any, str, Any]]:
        """Returns what replaces functions that read without an operator: (owner, name, function)"""
        kind = torch.Tensor
        reading = ("tolist", "numpy", "__array__")
        found = [(kind, "item", self._item(kind.item))]
        found += [(kind, n, self._reading(n, getattr(kind, n))) for n in reading]
        found += [(kind, n, self._silent(getattr(kind, n))) for n in ("__repr__", "__format__")]
        # DDP raises if the other ranks' parameters have other shapes, and else goes on.
        name = "_verify_params_across_processes"
        if hasattr(torch.distributed, name):
            found.append((torch.distributed, name, self._silent(getattr(torch.distributed, name))))
        return [*found, *unreal_number.replacements()]

    def _item(self, original: Any) -> Any:
        def item(tensor: Any) -> Any:
            if not self._marks or self._quiet or not self.marked(tensor):
                return original(tensor)
            value = self._silent(original)(tensor)
            return unreal_number.of_tensor(tensor, value, self.read)

        return item

    def _reading(self, name: str, original: Any) -> Any:
        def method(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if self._marks and self.marked(tensor):
                self.read(f"Tensor.{name}()")
            return original(tensor, *args, **kwargs)

        return method

    def _silent(self, original: Any) -> Any:
        """Returns ``original`` as a function whose reads decide nothing."""

        def silent(*args: Any, **kwargs: Any) -> Any:
            self._quiet, before = True, self._quiet
            try:
                return original(*args, **kwargs)
            finally:
                self._quiet = before

        return silent


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _tensors(one)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def _storage(tensor: torch.Tensor) -> Any:
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # sparse and other kinds without a storage
        return None


def _written(func: Any, args: Tuple[Any, ...]) -> Iterator[torch.Tensor]:
    """The arguments that the operator writes into."""
    for described, given in zip(func._schema.arguments, args):  # noqa: B905 - Python 3.9
        if described.alias_info is not None and described.alias_info.is_write:
            yield from _tensors(as_list(given))


def _all_finite(func: Any, args: Tuple[Any, ...], result: Any) -> bool:
    name = func._schema.name.rpartition("::")[2]
    if name.startswith("_amp"):
        return not bool(args[1].any())  # found_inf
    return bool(result.all()) if name == "isfinite" else not bool(result.any())
