"""Software stacks: which releases a package has, and environments that hold exact releases.

The functions below import what they need when they are called, so ``moediag --help`` stays fast.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from moediag.errors import UsageError

if TYPE_CHECKING:
    from moediag.stacks.built import EnvironmentInfo, Removed
    from moediag.stacks.environment import Stack
    from moediag.stacks.offline import Bundle

__all__ = ["build", "build_offline", "clean", "list_environments", "parse_request"]

Progress = Callable[[str, "float | None"], None]


def parse_request(text: str) -> dict[str, str]:
    """``transformers=4.53.2,accelerate=1.8.1`` as a request; no version means the newest.

    Raises UsageError.
    """
    request: dict[str, str] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, _, version = item.partition("=")
        if not name.strip() or not name.strip()[0].isalnum():
            raise UsageError(
                f"{text!r}: {item!r} is not NAME=VERSION",
                "Write e.g. transformers=4.53.2,accelerate=1.8.1",
            )
        request[name.strip()] = version.lstrip("=").strip()
    return request


def build(request: Mapping[str, str], progress: Progress | None = None) -> Stack:
    """The environment for ``request``, imported once: that proves that it starts, and leaves
    bytecode behind so that the first trial does not pay for it. Raises StackError."""
    from moediag.stacks.environment import ensure
    from moediag.stacks.first_import import import_once

    stack = ensure(request, progress)
    if progress:
        progress(f"importing {stack.key} once", None)
    import_once(stack)
    return stack


def build_offline(
    requests: Sequence[Mapping[str, str]],
    python_version: str,
    out: Path,
    progress: Progress | None = None,
    platform: str | None = None,
) -> Bundle:
    """A folder from which moediag and these stacks install without a network. Raises StackError."""
    from moediag.stacks.offline import make_bundle

    return make_bundle(requests, python_version, out, progress, platform)


def list_environments() -> list[EnvironmentInfo]:
    """The environments that exist, last used first."""
    from moediag.stacks import built

    return built.list_environments()


def clean(
    keys: Sequence[str] = (), older_than_days: float | None = None, everything: bool = False
) -> list[Removed]:
    """Removes environments: by key, by days since their last use, or all. Raises UsageError."""
    from moediag.stacks import built

    return built.clean(keys, older_than_days, everything)
