"""A parameter's or module's name in the user's model: without the parts that wrappers add.

FSDP1, activation checkpointing, torch.compile and Lightning's Fabric add names that no user gives.
Wrappers that only forward (DistributedDataParallel, DeepSpeed) add ``module``, which may also be a
user's own name.
"""

from __future__ import annotations

import re
from typing import Sequence

_SEGMENTS = (
    "_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_mod|_forward_module|_original_module"
)
_ADDED = re.compile(rf"(?:^|(?<=\.))(?:(?:{_SEGMENTS})\.)+|(?:(?:^|\.)(?:{_SEGMENTS}))+$")
_MODULE = re.compile(r"(?:^|(?<=\.))module\.")
_ROUTER = re.compile(r"(?:^|\.)(?:gate|wg|\w*(?:router|gating)\w*)(?:\.|$)")


def plain_name(fqn: object, forwarding: Sequence[str] = ()) -> str:
    """Returns ``fqn`` without what FSDP1, activation checkpointing, compiling and Fabric add, and
    without ``module`` below the modules ``forwarding``, which only forward to it. What is not text
    (in a damaged log) becomes text."""
    name = str(fqn)
    for wrapper in sorted(forwarding, key=len, reverse=True):
        begin = f"{wrapper}." if wrapper else ""
        if name.startswith(f"{begin}module."):
            name = begin + name[len(begin) + len("module.") :]
    return _ADDED.sub("", name) if "_mod" in name else name


def clean_fqn(fqn: str) -> str:
    """Returns the plain name without ``module`` at any level: only for models that have no module
    of that name themselves."""
    return _MODULE.sub("", plain_name(fqn))


def is_router(fqn: str) -> bool:
    """Whether the name is that of a module that chooses experts, or of something in it. Inside an
    expert, a gated feed-forward layer may have such a name, too."""
    found = _ROUTER.search(fqn.lower())
    return found is not None and "expert" not in fqn[: found.start()].lower()
