"""Every JSON that moediag prints or keeps, as shapes of :mod:`docs.generate.json_schema`."""

from __future__ import annotations

from typing import Literal

from docs.generate.json_schema import fields
from moediag.doctor import Check
from moediag.reference.word_entry import Entry
from moediag.result import Diagnosis, RunResult, TrialResult

TRIAL = {**fields(TrialResult, without=("diagnosis",)), **fields(Diagnosis)}
_RESULT = {
    **fields(RunResult, without=("trials", "schema_version")),
    "trials": [TRIAL],
    "schema_version": Literal[1],
}
_TEXTS = dict[str, str]
_ENV = {
    "moediag": str, "os": str, "kernel": str, "arch": str, "cores": int, "memory_gb": float,
    "gpus": list[str], "driver": str | None, "stack": str | None, "python": str,
    "packages": dict[str, str | None], "torch_build": _TEXTS, "variables": _TEXTS,
    "tools": _TEXTS, "problem": str | None,
}  # fmt: skip
#: Name -> (what has this form, its shape).
OUTPUTS = {
    "result": (
        "result.json, and `--json` of `attach`, `watch`, `diagnose`, `verify`, `resume` and `run`.",
        _RESULT,
    ),
    "doctor": ("`doctor --json`.", {"checks": [Check]}),
    "env": ("`env --json`.", _ENV),
    "explain": ("`explain WORD --json`.", {"entries": [Entry]}),
    "explain-all": ("`explain --json`.", {"words": dict[str, list[str]]}),
}
