"""No secret that a job has is in a file of its run or on a page."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.launchers import PLAIN

JOB = Path(__file__).parent.parent / "victims" / "keeps_secrets.py"
ARGUMENTS = (
    "--password", "planted09GGGGGGGGGGGGGGGG", "--api-key=planted20",
    "--wandb-api-key", "planted21", "--hf-token", "planted22", "--db", "postgresql://me:planted23@db:5432/runs",
    "--webhook", "https://hooks.slack.com/services/T0/B0/planted24",
    "--header", "Authorization: Bearer planted25planted25",
    "--url", "https://host/x?access_token=planted26&y=1", "--aws-secret-access-key", "planted27",
    "ENV_TOKEN=planted28", "sk-planted29planted29",
)  # fmt: skip
ENVIRONMENT = {
    "HF_TOKEN": "hf_planted30AAAAAAAAAAAAAAAA", "WANDB_API_KEY": "planted31",
    "AWS_SECRET_ACCESS_KEY": "planted32", "DB_PASSWORD": "planted33",
    "MLFLOW_TRACKING_URI": "https://me:planted34@host/x", "GITHUB_TOKEN": "planted35",
    "SLACK_URL": "https://hooks.slack.com/services/T0/B0/planted36",
    "SSH_PRIVATE_KEY": "planted37", "NCCL_SECRET": "planted38", "TORCH_AUTH": "planted39",
}  # fmt: skip


def moediag(*words: str, folder: Path) -> str:
    environment = dict(os.environ, OMP_NUM_THREADS="1", **ENVIRONMENT)
    line = [sys.executable, "-m", "moediag", *words]
    done = subprocess.run(
        line, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode in (0, 1), done.stderr
    return done.stdout


@pytest.mark.timeout(240)
def test_no_planted_secret_is_in_any_file_of_a_run(tmp_path: Path) -> None:
    given = JOB.read_text() + " ".join(ARGUMENTS) + " ".join(ENVIRONMENT.values())
    assert len(set(re.findall(r"planted\d\d", given))) == 40
    run = tmp_path / "run"
    page = moediag(
        "watch", "--json", "--laws", "--on-hang", "abort", "--out", str(run), "--",
        *PLAIN, "2", str(JOB), *ARGUMENTS, folder=tmp_path,
    )  # fmt: skip
    assert "all_reduce" in page and "barrier" in page
    views = [
        word for kind in ("html", "markdown", "junit", "trace") for word in (f"--{kind}", kind)
    ]
    page += moediag("report", str(run), *views, folder=tmp_path)
    page += moediag("diagnose", str(run), "--json", folder=tmp_path)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"html", "markdown", "result.json", "source.json", "job.json"} <= {p.name for p in files}
    leaks = {
        str(path): sorted(set(re.findall(rb"planted\d\d", path.read_bytes()))) for path in files
    }
    assert {path: found for path, found in leaks.items() if found} == {}
    assert re.findall(r"planted\d\d", page) == []
