"""Cases of ``tests/victims``: real jobs on gloo under torchrun. Our answer is that of `moediag
watch`; torchfrtrace reads the dumps collected for its page; for ``TORCH_DISTRIBUTED_DEBUG=DETAIL``
the job runs once more without moediag."""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path
from typing import Any

from bench.accuracy import bounded, others
from bench.accuracy.counting import Answer, Truth
from bench.accuracy.frtrace import TorchFrTrace
from moediag.result import FAILURES
from tests.victims.table import JOBS, Victim

BOUND = 240.0  # seconds for one job, start and end included
# After which DETAIL's groups give up: soon where nothing will come, late where only patience is
# asked for, so that a slow rank on a busy machine is no false alarm of ours making.
GIVES_UP, WAITS = 30.0, 180.0
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
GROUPS = Path(__file__).with_name("bounded_groups.py")


def truth(victim: Victim) -> Truth:
    return Truth(victim.name, victim.verdicts, victim.culprits, victim.lines, victim.says)


# ------------------------------------------------------------------------ ours


def watched(victim: Victim, folder: Path) -> Answer:
    """Returns the answer of `moediag watch --on-hang abort`; its run directory is
    ``folder/run``."""
    command = [
        sys.executable, "-m", "moediag", "watch", "--json", *victim.options, "--on-hang", "abort",
        "--out", str(folder / "run"), "--", *TORCHRUN, str(victim.ranks), str(JOBS), victim.name,
    ]  # fmt: skip
    said, log = folder / "page.json", folder / "watch.log"
    code = bounded.run(command, bounded.environment(), said, log, BOUND)
    if code is None:
        return Answer(alarm=False, refused=f"not done after {BOUND:.0f} s")
    try:
        trial = json.loads(said.read_text())["trials"][-1]
    except ValueError:
        return Answer(alarm=False, refused=f"exit code {code}: {log.read_text()[-300:]}")
    return Answer(
        trial["verdict"] in FAILURES, tuple(trial["culprits"]), trial["cause"],
        verdict=trial["verdict"],
    )  # fmt: skip


# ------------------------------------------------------------------------ torchfrtrace


def frtraced(victim: Victim, folder: Path, tool: TorchFrTrace) -> tuple[Answer, Answer]:
    """Returns torchfrtrace's answers for gloo's dumps, and for the same with the groups' members
    filled in, which gloo leaves out. moediag dumps without stacks, so no line is required."""
    dumps = _dumps(folder / "run")
    if not dumps:
        nothing = Answer(alarm=False, refused="no dump was written")
        return nothing, nothing
    incomplete = len(dumps) < victim.ranks
    found = []
    for name, change in (("as-written", _unchanged), ("helped", _helped)):
        place = folder / name
        place.mkdir()
        for rank, dump in dumps.items():
            raw = change(dump, victim.ranks)
            (place / f"trace_rank_{rank}").write_bytes(pickle.dumps(raw))
        found.append(tool.answer(place, incomplete=incomplete, has_lines=False))
    return found[0], found[1]


def _dumps(run: Path) -> dict[int, dict[str, Any]]:
    """Returns the dumps by rank, with the types of the pickle form that torchfrtrace reads."""
    found = {}
    for path in sorted(run.glob("attempt-*/rank-*.flight.json")):
        raw = json.loads(path.read_text())
        for entry in raw["entries"]:
            entry["process_group"] = tuple(entry["process_group"])
        found[int(path.name.split("-")[1].split(".")[0])] = raw
    return found


def _unchanged(dump: dict[str, Any], ranks: int) -> dict[str, Any]:  # noqa: ARG001
    return dump


def _helped(dump: dict[str, Any], ranks: int) -> dict[str, Any]:
    """Fills in the members of groups: every group of every victim has all ranks."""
    everyone = str(list(range(ranks)))
    groups = dict(entry["process_group"] for entry in dump["entries"])
    known = {name: {"name": name, "desc": d, "ranks": everyone} for name, d in groups.items()}
    return dump | {"pg_config": known}


# ------------------------------------------------------------------------ DETAIL


def detailed(victim: Victim, folder: Path) -> Answer:
    gives_up = WAITS if victim.healthy else GIVES_UP
    logs = folder / "ranks"
    command = [
        *TORCHRUN, str(victim.ranks), "--redirects", "3", "--log-dir", str(logs),
        str(GROUPS), str(gives_up), str(JOBS), victim.name,
    ]  # fmt: skip
    out, launcher = folder / "detail.out", folder / "detail.err"
    env = bounded.environment(TORCH_DISTRIBUTED_DEBUG="DETAIL")
    code = bounded.run(command, env, out, launcher, BOUND)
    printed = {
        int(path.parent.name): path.read_text(errors="replace")
        for path in sorted(logs.glob("*/attempt_0/*/stderr.log"))
    }
    return others.detail(printed, launcher.read_text(errors="replace"), code)
