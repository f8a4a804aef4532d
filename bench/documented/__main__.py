"""``python -m bench.documented WORK``: draws commands of the README and the docs with a seed and
runs each as written in a fresh environment, in a folder of its own.

WORK/venv is that environment (`pip install '.[run]'`); it is made if it is not there. What a page
takes for granted (a program, a model's configuration, a run, dumps) is put into the folder.
Answers are kept in WORK/answers.json, so a second call continues; after --seconds no further
command begins. --write puts the table into ``reports/first-hour.md``.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench import sections
from docs.record import MODEL, program
from tests.unit.test_docs import documented

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
PAGE = ROOT / "reports" / "first-hour.md"
# A line with a word to be replaced is no command yet.
_TEMPLATE = re.compile(r"…|\b(?:NAME|WORD|FILE|DIR|RUN\w*|SCENARIO|URL|COMMAND|RELEASE)\b")
# What this machine lacks: such a command must say so, with exit code 2 or 4.
_LACKING = {
    "GPUs": r"--gpus|--share-gpu",
    "Slurm": r"slurm|\bsrun\b",
    "Kubernetes": "--kubectl",
    "Ray": r"executor ray|with_ray",
    "DeepSpeed": r"-- deepspeed",
    "other hosts": r"--hosts|--nnodes|/nfs/",
    "a clone of transformers": r"--repo",
    "a webhook": r"hooks\.slack",
    "dumps of that day": r"--taken-at 2025",
}
# Commands for which "not known" (exit code 3) is an answer.
_UNDECIDED = {"diagnose": (3,), "check": (3,), "verify": (3,)}
# Lines about a job that hangs, which is started first.
_RUNNING = re.compile(r"moediag (?:attach|top)\b(?!.*--(?:slurm|hosts|kubectl))")
_TUTORIAL = re.compile(r"--nproc-per-node 2 train\.py")
# A path of a line, and what it stands for.
_EVIDENCE = {
    r"\S*expert-starvation(?=\s|$)|runs/[ab]\b|(?<=report )run\b": "scenario",
    r"moediag-runs/\S+-watch-train\.py|laws-run\b|\bjob$": "watched",
}


def drawn(seed: int, count: int) -> list[str]:
    """Returns ``count`` complete command lines of the documents. Which ones is decided for each
    line by itself, so a change elsewhere in the documents leaves most of the draw as it was."""
    lines = [line for line in documented() if not _TEMPLATE.search(line)]
    place = {line: hashlib.sha256(f"{seed} {line}".encode()).digest() for line in lines}
    return sorted(lines, key=place.__getitem__)[:count]


def lacking(line: str) -> str:
    """Returns what the line needs and this machine does not have; "" for nothing."""
    return next((name for name, words in _LACKING.items() if re.search(words, line)), "")


def variables(work: Path) -> Mapping[str, str]:
    """The environment of a new user who has activated WORK/venv; built stacks are shared."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    (work / "home").mkdir(parents=True, exist_ok=True)
    kept = {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "SSL_"))}
    path = f"{work / 'venv' / 'bin'}:/usr/local/bin:/usr/bin:/bin"
    own = {"HOME": str(work / "home"), "PATH": path, "LANG": "C.UTF-8", "COLUMNS": "100"}
    return kept | own | {"MOEDIAG_CACHE": str(cache / "moediag")}


def install(work: Path) -> None:
    if not (work / "venv" / "bin" / "moediag").exists():
        subprocess.run([sys.executable, "-m", "venv", work / "venv"], check=True)
        pip = [str(work / "venv" / "bin" / "python"), "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, f"{ROOT}[run]"], check=True)


def run(line: str, folder: Path, values: Mapping[str, str], limit: float) -> tuple[int, str, bool]:
    """Runs a line in a shell; returns its exit code, its output, and whether it was interrupted
    after ``limit`` seconds."""
    log, late = folder.with_suffix(".log"), False
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["bash", "-c", line if re.search(r" >>? ", line) else f"exec {line}"],
            cwd=folder, env=values, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            start_new_session=True,
        )  # fmt: skip
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            late = True
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(60)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return process.returncode, log.read_text(errors="replace"), late


def beside_a_hang(line: str, folder: Path) -> str:
    """Returns a line that starts the tutorial's program, waits until it hangs, and runs ``line``:
    in a pid namespace, where no other job is seen, if this user may make one."""
    (folder / "train.py").write_text(program(), encoding="utf-8")
    job = "torchrun --nproc-per-node 2 train.py >job.log 2>&1 & job=$!; sleep 90; "
    script = shlex.quote(job + line.replace("41237", "$job") + "; code=$?; kill $job; exit $code")
    alone = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    may = subprocess.run([*alone, "true"], check=False, capture_output=True).returncode == 0
    return " ".join([*alone * may, "bash", "-c", script])


def evidence(kind: str, work: Path, values: Mapping[str, str]) -> Path:
    """Returns a run directory: of a scenario, or of the tutorial's program under watch."""
    made = work / kind
    if not made.exists():
        folder = work / f"{kind}-folder"
        folder.mkdir(exist_ok=True)
        (folder / "train.py").write_text(program(), encoding="utf-8")
        line = {
            "scenario": "moediag run expert-starvation --cpu 2 -v unfixed -v zero-fill --out "
            "../scenario",
            "watched": "moediag watch --on-hang abort --out ../watched -- "
            "torchrun --nproc-per-node 2 train.py",
        }[kind]
        run(line, folder, values, 500)
    return made


def prepare(line: str, folder: Path, work: Path, values: Mapping[str, str]) -> None:
    """Puts into ``folder`` what the line's page takes for granted."""
    (folder / "train.py").write_text(
        program() if _TUTORIAL.search(line) else (HERE / "train.py").read_text(), encoding="utf-8"
    )
    model = folder / "Qwen3-30B-A3B"
    model.mkdir()
    for place in (model, folder):
        (place / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
    if "--markdown reports/" in line:  # typed in a clone
        (folder / "reports").mkdir()
    if "run my-failure" in line:
        run("moediag init my-failure.yaml --from expert-starvation", folder, values, 60)
    if re.search(r"dumps/|collected/|nccl_trace|train\.log|\.tgz", line):
        samples = ROOT / "tests" / "samples"
        shutil.copy(samples / "torchrun" / "launcher.log", folder / "train.log")
        for name in ("dumps", "collected"):
            shutil.copytree(samples / "flight-recorder" / "gloo-stuck", folder / name)
        for path in re.findall(r"\S+/nccl_trace_rank_\d", line):
            shutil.copy(folder / "dumps" / f"trace_rank_{path[-1]}", path)
    for pattern, kind in _EVIDENCE.items():
        for path in re.findall(pattern, line):
            if re.search(r"^moediag (?:report|diagnose)", line):
                target = folder / path
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copytree(evidence(kind, work, values), target)
    if "moediag-runs/*" in line:
        for kind in ("scenario", "watched"):
            shutil.copytree(evidence(kind, work, values), folder / "moediag-runs" / kind)


def answer(line: str, number: int, work: Path, limit: float) -> dict[str, Any]:
    """Runs one line; returns what came of it."""
    values = variables(work)
    folder = work / f"{number:02}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    prepare(line, folder, work, values)
    if _RUNNING.match(line):
        typed, limit = beside_a_hang(line, folder), limit + 90
    else:
        typed = line
    began = time.monotonic()
    code, said, late = run(typed, folder, values, limit)
    last = [text for text in said.splitlines() if text.strip()][-8:]
    return {
        "line": line, "code": code, "late": late, "seconds": round(time.monotonic() - began),
        "lacking": lacking(line), "works": works(line, code, said, late), "last": last,
    }  # fmt: skip


def works(line: str, code: int, said: str, late: bool) -> bool:
    """Whether the line did what its page says: it found something or nothing, refused what the
    machine lacks, or could be interrupted after the limit."""
    if "Traceback" in said and "moediag" in said.split("Traceback")[-1][:400]:
        return False
    if lacking(line):
        return code in (2, 3, 4) or (late and code in (0, 130))
    return code in (0, 130) if late else code in (0, 1, *_UNDECIDED.get(line.split()[1], ()))


def read(kept: Path) -> dict[str, dict[str, Any]]:
    """The answers so far, by line."""
    return {one["line"]: one for one in json.loads(kept.read_text())} if kept.exists() else {}


def section(lines: list[str], known: Mapping[str, dict[str, Any]], seed: int) -> str:
    """The report's section."""
    answers = [known[line] for line in lines if line in known]
    good = [one for one in answers if one["works"]]
    late = sum(one["late"] for one in good)
    refused = sum(bool(one["lacking"]) and not one["late"] for one in good)
    left = [f"`{line}`" for line in lines if line not in known]
    rows = [
        f"| `{one['line'].replace('|', chr(92) + '|')}` | {_outcome(one)} | {one['seconds']} |"
        for one in answers
    ]
    return (
        f"## {len(lines)} documented commands\n\n"
        f"`python -m bench.documented WORK --seed {seed}` draws complete command lines from the "
        "README and the docs and runs each\nas written in a new virtual environment with "
        "`pip install '.[run]'`, an empty home and a folder of its own; built environments\nof "
        "releases are shared. What a page takes for granted is there: `train.py`, a model's "
        "`config.json`, a run, dumps, a job that\nhangs (its process is put for 41237). "
        f"Of {len(answers)} that were run, {len(good) - late - refused} gave their answer, {late} "
        f"were interrupted at the limit and said how\nto resume or what was known, {refused} need "
        f"what this machine lacks and said so, {len(answers) - len(good)} failed.\n\n"
        "| command | outcome | s |\n|---|---|---|\n"
        + "\n".join(rows)
        + (f"\n\nDrawn and not run yet: {', '.join(left)}." if left else "")
    )


def _outcome(one: Mapping[str, Any]) -> str:
    if not one["works"]:
        return f"**failed**: exit code {one['code']}"
    if one["late"]:
        return f"interrupted at the limit, exit code {one['code']}"
    if one["lacking"]:
        return f"needs {one['lacking']}: refused, exit code {one['code']}"
    return f"exit code {one['code']}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.documented")
    parser.add_argument("work", type=Path)
    parser.add_argument("--seed", type=int, default=38)
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--limit", type=float, default=400, help="interrupt a command after this")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no command after this")
    parser.add_argument("--only", default="", help="run lines in which this expression is found")
    parser.add_argument("--again", action="store_true", help="run what failed once more")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job of a script ignores it
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends what it started
    work = options.work.resolve()
    install(work)
    kept = work / "answers.json"
    known = read(kept)
    lines = drawn(options.seed, options.count)
    end = time.monotonic() + options.seconds
    for number, line in enumerate(lines):
        if time.monotonic() > end:
            break
        if line in known and (known[line]["works"] or not options.again):
            continue
        if not re.search(options.only, line):
            continue
        found = answer(line, number, work, options.limit)
        known = {**read(kept), line: found}
        kept.write_text(json.dumps(list(known.values()), indent=1))
        print(number, "ok" if known[line]["works"] else "FAILED", line, flush=True)
    done = [known[line] for line in lines if line in known]
    if options.write:
        text = sections.replaced(
            PAGE.read_text(encoding="utf-8"), section(lines, known, options.seed)
        )
        PAGE.write_text(text, encoding="utf-8")
    sys.exit(any(not one["works"] for one in done) or len(done) < len(lines))


if __name__ == "__main__":
    main()
