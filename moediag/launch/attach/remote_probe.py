"""What `moediag attach` runs on each machine of a job: looks at the ranks there and writes the
evidence as one archive to stdout. It is sent as one file and needs only the standard library."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from moediag.launch.attach import archives, collecting, found_jobs
from moediag.launch.attach.collecting import AttachOptions
from moediag.launch.attach.found_jobs import Job
from moediag.launch.attach.proc import Proc

MOST_JOBS = 4  # of one machine


def main(folder: str, asked: str) -> str:
    """Looks, below the empty ``folder``, as the JSON object ``asked`` says. Returns why there is
    nothing, or ""."""
    raw: Mapping[str, Any] = json.loads(asked)
    options = AttachOptions(float(raw["patience"]), bool(raw["local_values"]))
    found = jobs(Proc(), str(raw["slurm"]))
    if not found:
        return "no training job of this user runs here"
    evidence = Path(folder, "evidence")
    for number, job in enumerate(found[:MOST_JOBS]):
        collecting.collect(job, evidence / str(number), options, lambda _: None)
    archive = Path(folder, "evidence.tgz")
    archives.pack(evidence, archive, redact=False)
    with archive.open("rb") as file:
        shutil.copyfileobj(file, sys.stdout.buffer)
    sys.stdout.flush()
    return ""


def jobs(proc: Proc, slurm: str) -> list[Job]:
    """The jobs of this user here; of the Slurm job ``slurm``, if it is given, only the ranks of
    this node."""
    found = found_jobs.of_user(proc, os.getuid())
    if not slurm:
        return found
    node = os.environ.get("SLURMD_NODENAME", "")
    here = []
    for job in found:
        own = {one: proc.environment(one.pid) for one in job.ranks}
        ranks = tuple(
            one for one, variables in own.items()
            if slurm in (variables.get("SLURM_JOB_ID"), variables.get("SLURM_ARRAY_JOB_ID"))
            and variables.get("SLURMD_NODENAME", node) in (node, "")
        )  # fmt: skip
        here += [replace(job, ranks=ranks)] if ranks else []
    return here
