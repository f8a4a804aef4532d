"""Environments of jobs are built on this machine: nodes often lack a network."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping

from moediag.errors import StackError
from moediag.lab.stacks import environment


def build_here(
    requests: Iterable[Mapping[str, str]], say: Callable[[str, float | None], None]
) -> None:
    """Builds them in the cache that the workers share. What cannot be built is left to the job,
    which fails for the same reason and reports it."""
    for request in requests:
        with contextlib.suppress(StackError):
            environment.ensure(request, say)
