"""Makes accelerate run a Trainer on the CPU through the code that it runs on GPUs.

accelerate enters its FSDP path, and accepts a ParallelismConfig, only if each process has a device
of a listed kind; the CPU is not listed. Both checks compare a name. With the answers below
everything after them is the released code.
"""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Iterator

FSDP = (
    "accelerate never enters its FSDP path on the CPU: its AcceleratorState was told that "
    "distributed_type is FSDP where it had an FSDP plugin; everything after that is the released "
    "code"
)
PARALLELISM = (
    "accelerate refuses a ParallelismConfig on the CPU: its check of the kind of device took the "
    "CPU's processes for those of GPUs; every other check of it ran as released"
)


@contextlib.contextmanager
def as_on_gpus(note: Callable[[str], None]) -> Iterator[None]:
    """Patches an Accelerator created inside. Calls ``note`` with any change."""
    from accelerate import state
    from accelerate.utils import DistributedType

    made = state.AcceleratorState.__init__

    def with_plugin(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        plugin = kwargs.get("fsdp_plugin")
        if plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.FSDP
            self.fsdp_plugin = plugin
            state.PartialState._shared_state["distributed_type"] = DistributedType.FSDP
            note(FSDP)

    initialised: Any = state.AcceleratorState
    initialised.__init__ = with_plugin
    try:
        with _parallelism_accepted(note):
            yield
    finally:
        initialised.__init__ = made


@contextlib.contextmanager
def _parallelism_accepted(note: Callable[[str], None]) -> Iterator[None]:
    """Makes accelerate accept a ParallelismConfig. No effect before accelerate 1.10."""
    try:
        from accelerate import ParallelismConfig
    except ImportError:
        yield
        return
    from accelerate.utils import DistributedType

    config: Any = ParallelismConfig
    released = config._validate_accelerator

    def validate(self: Any, accelerator: Any) -> Any:
        if accelerator.distributed_type == DistributedType.MULTI_CPU:
            note(PARALLELISM)
            accelerator = _MultiDevice(accelerator)
        return released(self, accelerator)

    config._validate_accelerator = validate
    try:
        yield
    finally:
        config._validate_accelerator = released


class _MultiDevice:
    """Pretends that each process of the accelerator has its own device."""

    multi_device = True

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accelerator, name)
