"""The exact versions of a stack, as far as they are known without the network."""

from __future__ import annotations

from collections.abc import Mapping

from packaging.utils import canonicalize_name

from moediag.lab.stacks import environment
from moediag.lab.stacks.base import cache_root, current_base
from moediag.lab.upstream.export.write_file import NAMED


def versions_of(stack: Mapping[str, str]) -> dict[str, str]:
    """Versions without local parts; those that the stack leaves open come from its environment.

    Packages whose version is unknown, because that environment is not built, are left out.
    """
    named = {str(canonicalize_name(n)): v for n, v in stack.items()}
    ready = environment.ready(stack)
    if ready is not None:
        found = {n: v for n, v in ready.versions.items() if v}
    else:
        torch = current_base(cache_root()).torch
        found = {**({"torch": torch} if torch else {}), **named}
    return {name: found[name].split("+")[0] for name in NAMED if found.get(name)}
