"""Runs one moediag command for the GitHub action and writes what the action shows.

    python run_action.py COMMAND 'ARGUMENTS' OUT

COMMAND is `run` or `diagnose`. OUT gets `run/result.json` with the evidence, `page.html` and
`junit.xml`. The tables go to the step summary, failures become annotations, and the exit code is
the command's own.
"""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

MOST_ANNOTATIONS = 10  # GitHub drops more of a kind in one step
FAILURE = 1
FINE = ("clean", "not-applicable", "inconclusive")


def main(command: str, arguments: str, out: Path) -> int:
    run = out / "run"
    run.mkdir(parents=True, exist_ok=True)
    where = ["--out", str(run)] if command == "run" else []
    done = subprocess.run(
        ["moediag", command, *shlex.split(arguments), *where, "--json"],
        stdout=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    if not done.stdout.strip():
        return done.returncode  # wrong usage, or nothing could run: stderr has the reason
    result = json.loads(done.stdout)
    (run / "result.json").write_text(done.stdout, encoding="utf-8")
    tables = out / "summary.md"
    subprocess.run(
        ["moediag", "report", str(run), "--html", str(out / "page.html"), "--junit",
         str(out / "junit.xml"), "--markdown", str(tables), "--for", "tables"],
        check=True,
    )  # fmt: skip
    summary = os.environ.get("GITHUB_STEP_SUMMARY")
    if summary:
        with Path(summary).open("a", encoding="utf-8") as file:
            file.write(tables.read_text(encoding="utf-8"))
    if done.returncode == FAILURE:
        for line in annotations(result["trials"]):
            print(line)
    return done.returncode


def annotations(trials: list) -> list:
    """`::error …` for each trial that is not as expected, or, without expectations, a failure."""
    bad = [
        trial
        for trial in trials
        if (not trial["met"] if trial["expected"] else trial["verdict"] not in FINE)
    ]
    lines = []
    for trial in bad[:MOST_ANNOTATIONS]:
        title = escaped(f"{trial['variant'] or 'job'}: {trial['verdict']}", of_property=True)
        lines.append(f"::error title={title}::{escaped(trial['cause'] or trial['verdict'])}")
    return lines


def escaped(text: str, of_property: bool = False) -> str:
    """The text as a workflow command needs it."""
    for mark, code in (("%", "%25"), ("\r", "%0D"), ("\n", "%0A")):
        text = text.replace(mark, code)
    return text.replace(":", "%3A").replace(",", "%2C") if of_property else text


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], Path(sys.argv[3])))
