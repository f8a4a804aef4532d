"""`moediag doctor`: parse, call, exit code."""

from __future__ import annotations

import dataclasses

import typer

from moediag.cli import options as o
from moediag.errors import ExitCode
from moediag.report import stdout


def doctor(as_json: o.Json = False, no_color: o.NoColor = False) -> None:
    """Check this machine, and print what to type if something is missing."""
    from moediag import doctor as examiner
    from moediag.report import consoles, doctor_view

    checks = examiner.checks()
    if as_json:
        stdout.data({"checks": [dataclasses.asdict(check) for check in checks]})
    else:
        doctor_view.render(checks, consoles.output(no_color))
    failed = any(check.status == "fail" for check in checks)
    raise typer.Exit(ExitCode.CANNOT_RUN_HERE if failed else ExitCode.OK)
