"""What the laboratory's commands print with `--json` and write as JSON, as shapes of
:mod:`docs.generate.json_schema`. Each is held against real outputs by a test."""

from __future__ import annotations

from typing import Any, Literal

from docs.generate import job_outputs
from docs.generate.json_schema import fields
from moediag.lab.campaign.bisect.probe_verdict import Kind
from moediag.lab.campaign.bisect.search.answer import Status
from moediag.lab.campaign.bisect.search.corners import Blame
from moediag.lab.campaign.bisect.signature_match import Target
from moediag.lab.campaign.dry_run import DryTrial
from moediag.lab.campaign.hunt import findings
from moediag.lab.campaign.hunt.pursued import Pursued
from moediag.lab.campaign.matrix.cells import Cell
from moediag.lab.campaign.nightly import blame as nightly
from moediag.lab.campaign.nightly.changes import Change
from moediag.lab.campaign.nightly.night import Entry, Job, Night
from moediag.lab.campaign.sweep.summary import Sweep, SweepRow
from moediag.lab.pipeline import check_cost, check_fit, check_sweep, register
from moediag.lab.pipeline.known_scenarios import Known
from moediag.lab.scenario.catalogue import Summary
from moediag.lab.scenario.content import Fix
from moediag.lab.stacks.built import EnvironmentInfo
from moediag.protocol import (
    Checked,
    ReleaseListing,
    SimulatedCase,
    SimulatedRank,
    WayOutcome,
)
from moediag.result import Confidence, Verdict
from moediag.result.answer_blocks import AnswerState
from moediag.result.diagnosis import FirstDivergence

STATE = {"state": AnswerState, "exit_code": int}
Texts = list[str]
Versions = dict[str, str | None]

CHECK = {
    "schema_version": Literal[1], "config": str, "layout": dict[str, int], "ranks": int,
    "versions": Versions, "dtypes": str, **STATE, "undecided": str,
    **fields(Checked, without=("cases", "not_seen", "problem")),
    "cases": [{
        **fields(SimulatedCase), "parts": bool, "verdict": Verdict, "culprits": list[int],
        "first_divergence": FirstDivergence | None,
    }],
    "costs": [{**fields(check_cost.AxisCost), "sent": float}],
    "wires": [check_cost.Wire], "memory": check_cost.Memory | None,
    "fit": check_fit.Fit | None, "fits": check_fit.FitWord | None, "known": [Known],
    "found": [register.Entry], "not_seen": Texts,
}  # fmt: skip
CHECK_SWEEP = {
    "schema_version": Literal[1], "config": str, "model": str, "sweep": str, "versions": Versions,
    **STATE, "layouts": [check_sweep.Swept], "took": float,
}  # fmt: skip
CHECK_SCRIPT = {
    "schema_version": Literal[1], "script": str, "world_size": int, "versions": Versions, **STATE,
    "undecided": str, "cause": str, "next_step": str, "culprits": list[int],
    "first_divergence": FirstDivergence | None,
    "ranks": [{
        "rank": int, "answer": SimulatedRank | None, "calls": int, "compared": int, "raised": str,
        "code": int | None, "unseen": str, "problem": str,
    }],
}  # fmt: skip

_FINDING = {
    "signature": str, "state": findings.State, "relation": str, "kind": str, "what": str,
    "entry": register.Entry | None, "trace": Pursued | None,
    "shown": [{"family": str, "evidence": str, **fields(WayOutcome)}],
}  # fmt: skip
_UNDECIDED = [{"family": str, "relation": str, "reason": str}]
HUNT = {
    "schema_version": Literal[1], "versions": Versions, "incomplete": str, "missing": int,
    "families": dict[str, str], "resolutions": Texts, "not_built": dict[str, str],
    "undecided": _UNDECIDED, "not_run": dict[str, str], "findings": [_FINDING],
    "cells": [findings.HuntCell],
    "against": (None, {
        "versions": Versions, "appeared": [_FINDING], "gone": [_FINDING], "same": int,
        "undecided": _UNDECIDED, "added": Texts, "removed": Texts, "cells": [findings.HuntCell],
    }),
    **STATE,
}  # fmt: skip

_VERDICT = {"kind": Kind, "text?": str, "rate?": float, "trials?": int}
_OF_VERSION = {"version": str, "verdict": _VERDICT}
_PROBE = {
    "version": str, "attempt": int, "verdict": _VERDICT, "uploaded": str, "signature": str,
    "seconds": float | None, "evidence": str,
}  # fmt: skip
_COMPANIONS = {
    "blame": Blame, "summary": Texts, "changed": [{"name": str, "old": str | None,
    "new": str | None}], "changed_but_idle": Texts,
    "corners": [{"package": str, "companions": str, "verdict": _VERDICT}], "guilty": Texts,
    "minimal": bool | None,
    "companion_boundary": (None, {"bad": str, "good": str, "exact": bool, "beside": str}),
    "probes": int, "problem": str,
}  # fmt: skip
_COMMITS = {
    "turns": str, "summary": str,
    "first": (None, {
        "hash": str, "date": str, "author": str, "subject": str, "on_the_older_branch": bool,
    }),
    "candidates": Texts, "commits": int, "probes": int, "problem": str,
}  # fmt: skip
_BOUNDARY = (None, {
    "bad": str, "good": str | None, "limit": str, "exact": bool, "candidates": Texts,
    "undecided": [_OF_VERSION], "untried": Texts, "confirmed": bool, "missed": float | None,
    "again": Texts, "companions?": (None, _COMPANIONS), "commits?": (None, _COMMITS),
    "compare?": str,
})  # fmt: skip
BISECT = {
    "schema_version": Literal[1], "scenario": str, "package": str, "status": Status,
    "confidence": Confidence, "bad_end": str, "bad_end_verdict": _VERDICT, "began": _BOUNDARY,
    "ended": _BOUNDARY, "monotone": bool, "beside": [{"version": str, "kind": Kind}],
    "given_good": (None, _OF_VERSION), "summary": Texts, "timeline": str, "signatures": Texts,
    "match": str, "releases": {"count": int, "oldest": str, "newest": str}, "probes": [_PROBE],
    "further_probes": [_PROBE], "reproduce": Texts, "environment": dict[str, str], **STATE,
}  # fmt: skip
FORECAST = {
    "scenario": str, "variant": str, "controls": Texts, "declared": Texts, "package": str,
    "releases": Texts, "bad": str | None, "good": str | None, "window": bool, "match": str,
    "hold": dict[str, str], "probes_at_most": int, "environments_built": int,
    "environments_to_build_at_most": int, "seconds_per_probe": float, "measured_probes": int,
    "seconds_at_most": float,
}  # fmt: skip

MATRIX = {
    "schema_version": Literal[1], "package": str, "subjects": Texts, "versions": Texts,
    "looked_for": dict[str, list[str]], "cells": [Cell],
    "stretches": dict[str, list[tuple[str, str]]], "missing": int, **STATE,
}  # fmt: skip
NIGHTLY = {
    "night": Night,
    "compared": [{
        "change": Change, **fields(Entry), "since": str | None, "last_good": str | None,
        "blame": nightly.Blame | None,
    }],
    **STATE,
}  # fmt: skip
SUMMARY = {
    **fields(Sweep, without=("rows",)), "rows": [{**fields(SweepRow), "status": str}], **STATE,
}  # fmt: skip


def _line(kind: str, value: Any) -> dict[str, Any]:
    """A finished item. ``kind``: of the item."""
    return {"e": Literal[kind], "name": str, "value": value}


_DIGESTS = dict[str, str]
JOURNAL = (
    {
        "e": Literal["header"], "schema_version": Literal[2], "moediag_version": str,
        "campaign": str, "question": dict[str, Any], "digests": _DIGESTS, "kept": dict[str, Any],
        "command": Texts,
    },
    {"e": Literal["resumed"], "digests": _DIGESTS},
    _line("trial", job_outputs.TRIAL),
    _line("reference", {"file": str, "verdict": str, "reason": str}),
    _line("probe", _PROBE),
    _line("extra", _PROBE),
    _line("learned", Target),
    _line("cell", (findings.HuntCell, Cell)),
    _line("listing", ReleaseListing),
    _line("pursued", Pursued),
    _line("scenario", SweepRow),
    _line("job", {"jobs": [Job], "entries": [Entry]}),
    _line("night", {"started": str, "path": str}),
)  # fmt: skip

OUTPUTS = {
    **job_outputs.OUTPUTS,
    "check": ("check.json of a model, and `check CONFIG --json`.", CHECK),
    "check-sweep": ("check.json of a sweep, and `check` with `--sweep` and `--json`.", CHECK_SWEEP),
    "check-script": ("check.json of a program, and `check` with `--json` of one.", CHECK_SCRIPT),
    "hunt": ("hunt.json, and `hunt --json`.", HUNT),
    "bisect": ("`bisect --json`.", BISECT),
    "bisect-dry-run": ("`bisect --dry-run --json`.", FORECAST),
    "matrix": ("matrix.json, and `matrix --json`.", MATRIX),
    "nightly": ("`nightly --json`; the history has the field `night` as a file.", NIGHTLY),
    "summary": ("summary.json, and `run --all --json`.", SUMMARY),
    "dry-run": (
        "`--dry-run --json` of `run`, `matrix` and `nightly`.",
        {"trials": [DryTrial], "cannot_run": Texts},
    ),
    "journal": ("A line of journal.jsonl, which every campaign keeps.", JOURNAL),
    "list": ("`list --json`.", {"scenarios": [Summary], "fixes": [Fix]}),
    "stacks-list": ("`stacks list --json`.", {"environments": [EnvironmentInfo]}),
}
