"""`moediag env`: parse, call."""

from __future__ import annotations

import moediag
from moediag import extension
from moediag.cli import options as o
from moediag.report import stdout


def env(stack: o.StackPairs = [], as_json: o.Json = False) -> None:  # noqa: B006
    """Print system information for a bug report: machine, versions, builds, variables.

    It describes the Python that runs moediag, or with --stack an environment that is built. Values
    of variables that look like secrets are omitted.
    """
    from moediag import hardware, system_info

    request = o.pairs(stack, "--stack")
    if request:
        extension.require("--stack")
        found = extension.provided("stack")(request, tools=True)
    else:
        found = system_info.here()
    if as_json:
        facts = {"moediag": moediag.__version__, **hardware.machine(), **found.to_json()}
        stdout.data(facts)
    else:
        stdout.line("\n".join(["### moediag environment", "", *found.lines()]))
