"""``python -m bench.resumes --python PYTHON [NAME…]``: programs that save and resume by real
libraries, each with faults of kinds from public reports: what `moediag resume` says of them.

PYTHON has the libraries. The recordings are those of the command; a run that several faults have
in common is made once.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moediag.diagnosis.numbers import resumed_run
from moediag.pipeline.recorded_runs import Recording, Runs
from moediag.pipeline.resumed_states import compared
from moediag.protocol import StateRequest
from moediag.protocol import recorded_state as words
from moediag.result import FAILURES, Verdict

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).with_name("programs")
FIRST = Path(__file__).with_name("first.json")
HEALTHY = "healthy"
SAVE_AT, STEPS = 3, 3
# What each fault is. Those of SAVES happen at the save, the others at the load.
SAVES = ("ema-forgotten", "main-lost", "scheduler-dropped", "read-twice")
# At the save, these train otherwise from the first step on.
OTHERWISE = ("order-drawn", "read-twice", "sampler-restarted")
AHEAD = {"scheduler-ahead": (words.SCHEDULER, words.RESET)}
COUNTS = {"count-reset": (words.COUNT, words.RESET)}
PERMUTED = {"experts-permuted": (words.PARAMETER, words.MOVED)}
RESTARTED = {"sampler-restarted": (words.BATCH, words.RESTARTED)}


@dataclass(frozen=True)
class Program:
    """A program on a number of ranks, and the truth of its faults."""

    file: str
    faults: Mapping[str, tuple[str, str]]
    ranks: int = 1
    resumed: int = 0
    """Ranks of the resumed run; 0: as many."""
    options: tuple[str, ...] = ()
    at_save: tuple[str, ...] = SAVES

    @property
    def library(self) -> str:
        """The module that is imported once."""
        return {
            "trainer": "transformers", "dcp": "torch.distributed.fsdp",
            "torchtitan": "torch",  # what it imports does not survive a fork
        }.get(self.file, self.file)  # fmt: skip

    @property
    def name(self) -> str:
        ranks = f"{self.ranks} to {self.resumed}" if self.resumed else f"{self.ranks}"
        stage = f", stage {self.options[1]}" if self.options else ""
        return f"{self.file}{stage}, {ranks}"

    def job(self, request: StateRequest, folder: Path, fault: str, resumes: bool) -> dict[str, Any]:
        """One run, for ``forks.py``."""
        told = ["--fault", fault] if fault != HEALTHY else []
        return {
            "request": dataclasses.asdict(request),
            "ranks": self.resumed or self.ranks if resumes else self.ranks,
            "launched": self.ranks > 1,
            "arguments": [str(folder), *self.options, *told, *(["--resume"] if resumes else [])],
        }


# Written before any page was seen.
OF_DCP = {
    **PERMUTED, "moments-dropped": (words.STATE, words.NOT_LOADED),
    "scheduler-dropped": (words.SCHEDULER, words.NOT_SAVED), **AHEAD, **COUNTS, **RESTARTED,
}  # fmt: skip
OTHER_LAYOUT = {name: OF_DCP[name] for name in ("experts-permuted", "moments-dropped")}
OF_DEEPSPEED = {
    "moments-dropped": (words.MAIN, words.NOT_LOADED),
    "scheduler-dropped": (words.SCHEDULER, words.NOT_PUT),
    "generator-reset": (words.GENERATOR, words.NOT_PUT), **AHEAD, **RESTARTED,
}  # fmt: skip
TRUTH = (
    Program(
        "trainer",
        {"moments-dropped": (words.STATE, words.NOT_SAVED), **COUNTS, **AHEAD, **PERMUTED,
         **RESTARTED},
        at_save=("moments-dropped",),
    ),
    Program(
        "accelerate",
        {"moments-dropped": (words.STATE, words.NOT_LOADED), **COUNTS, **AHEAD,
         "scheduler-dropped": (words.SCHEDULER, words.NOT_SAVED),
         "generator-reset": (words.GENERATOR, words.RESET),
         "ema-forgotten": (words.COPY, words.NOT_SAVED),
         "main-lost": (words.PARAMETER, words.NOT_SAVED), **PERMUTED, **RESTARTED,
         "order-drawn": (words.BATCH, ""), "seed-drawn": (words.GENERATOR, words.DRAWN)},
        at_save=(*SAVES, "order-drawn"),
    ),
    Program(
        "accelerate", {"read-twice": (words.PARAMETER, words.FROM_RANK), **AHEAD, **RESTARTED}, 2
    ),
    Program(
        "lightning",
        {"moments-dropped": (words.STATE, words.NOT_PUT),
         "scheduler-dropped": (words.SCHEDULER, words.NOT_PUT), **AHEAD,
         "generator-reset": (words.GENERATOR, words.NOT_PUT),
         "ema-forgotten": (words.COPY, words.NOT_SAVED),
         "ema-behind": (words.COPY, words.NOT_SAVED), **PERMUTED, **RESTARTED},
        at_save=("ema-forgotten", "ema-behind", "sampler-restarted"),
    ),
    Program(
        "lightning",
        {"moments-dropped": (words.STATE, words.NOT_PUT), **RESTARTED,
         "order-drawn": (words.BATCH, "")},
        2, at_save=("sampler-restarted", "order-drawn"),
    ),
    Program("deepspeed", OF_DEEPSPEED, 2, options=("--stage", "1"), at_save=()),
    *(
        Program(
            "deepspeed", {"moments-dropped": (words.MAIN, reason)}, 2,
            options=("--stage", stage), at_save=(),
        )
        # Stage 0 has one file for everything; stage 3 takes the weights from the main weights.
        for stage, reason in (("0", words.NOT_PUT), ("2", words.NOT_LOADED), ("3", words.NOT_PUT))
    ),
    Program(
        "torchtitan",
        {"moments-dropped": (words.STATE, words.NOT_LOADED),
         "scheduler-dropped": (words.SCHEDULER, words.NOT_LOADED), **RESTARTED},
        2, at_save=(),
    ),
    Program("dcp", OF_DCP, 2),
    Program("dcp", OTHER_LAYOUT, 2, 1),
    Program("dcp", OTHER_LAYOUT, 2, 4),
)  # fmt: skip


class Forks:
    """A process that runs jobs of one program."""

    def __init__(self, program: Program, python: str) -> None:
        file = PROGRAMS / f"with_{program.file}.py"
        environ = {**os.environ, "PYTHONPATH": str(ROOT)}
        self._process = subprocess.Popen(
            [python, str(ROOT / "bench" / "resumes" / "forks.py"), str(file), program.library],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ,
        )  # fmt: skip

    def __call__(self, job: dict[str, Any]) -> None:
        """Runs a job. Raises RuntimeError if it failed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if answer.strip() or not answer:
            log = Path(job["request"]["folder"], "rank-0.log")
            told = log.read_text("utf-8")[-1500:] if log.exists() else ""
            raise RuntimeError(f"{answer.strip() or 'no answer'}: {told}")

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


class Measured:
    """The recorded runs of one program."""

    def __init__(self, program: Program, forks: Forks, folder: Path) -> None:
        self._program, self._forks, self._folder = program, forks, folder
        self._made: dict[str, Recording] = {}

    def said(self, fault: str) -> dict[str, Any]:
        """Returns what is said of the program with this fault."""
        own = fault if fault in self._program.at_save else HEALTHY
        control = own if own in OTHERWISE else HEALTHY
        own_kind = f"-{control}" if control != HEALTHY else ""
        later = StateRequest("", SAVE_AT + 1, STEPS)
        try:
            found = compared(
                Runs(
                    self._run(own, own, StateRequest("")),
                    self._run(f"{fault}-resumed", fault, StateRequest("", 1, STEPS), own),
                    self._run(f"straight{own_kind}", control, later),
                    self._run(f"again{own_kind}", control, later),
                    after=SAVE_AT,
                )
            )
            said = resumed_run.said(found)
        except Exception as error:
            traceback.print_exc()
            return {"verdict": "not compared", "pattern": "", "text": str(error), "notes": []}
        return {
            "verdict": str(said.verdict), "pattern": said.pattern, "text": said.text,
            "next_step": said.next_step, "notes": list(said.notes),
        }  # fmt: skip

    def _run(self, name: str, fault: str, request: StateRequest, saved: str = "") -> Recording:
        """``saved``: the run whose checkpoint this one resumes from."""
        if name not in self._made:
            place, files = self._folder / name, self._folder / f"files-{name}"
            if saved:
                shutil.copytree(self._folder / f"files-{saved}", files)
            request = dataclasses.replace(request, folder=str(place))
            self._forks(self._program.job(request, files, fault, bool(saved)))
            self._made[name] = Recording.read(place)
        return self._made[name]


def run(names: Sequence[str], python: str, folder: Path) -> Iterator[tuple[Program, str, Any]]:
    for number, program in enumerate(TRUTH):
        keys = {fault: f"{program.name}: {fault}" for fault in (HEALTHY, *program.faults)}
        wanted = [f for f, key in keys.items() if not names or any(name in key for name in names)]
        if wanted:
            forks = Forks(program, python)
            measured = Measured(program, forks, folder / str(number))
            for fault in wanted:
                yield program, fault, measured.said(fault)
            forks.end()


_PAGE = """# What `moediag resume` finds in real libraries

This page is generated: `python -m bench.resumes --python PYTHON --out reports/resume.md` writes it,
with a PYTHON that has them: %s.

Small programs in the style of each library's guide save after three steps and resume; the state
that the next step begins with and three steps are compared with uninterrupted runs. The faults are
of kinds from public reports. What is true of each was written before its page was seen, but for
`order-drawn`, `seed-drawn` and `ema-behind`, which the first pages led to. Rows of `first` are of
moediag as it was before these programs repaired it. A dash: it was not run then, or not run again,
and the other column counts.
The programs are ours, and moediag was repaired by them: no row is held out.

"""
_LATER = """
What the first runs showed, and what was changed:

- The first program for accelerate drew its order of samples anew (true, see below), and the bench
  imported safetensors before the recording, so the reasons of its saves were missing (a defect of
  the bench, not of the command).
- Lightning calls `step(closure)` with the forward inside it, and wraps optimizers in objects with
  the same state: a step's state was recorded a step late or not at all. `step(None)` is no closure.
- A scheduler that refers to accelerate's wrapper of an optimizer was not found.
- `dcp.load` of a `Stateful` object was read after its `load_state_dict`, so that a later change was
  called "not loaded".
- A rank that was still behind the one that saved ended a step early, and both waited.
- Other numbers of ranks were refused; now whole tensors are compared (`2 to 1`: two ranks saved,
  one resumed). A load by other ranks holds other parts, so why a tensor differs is known only
  where its rows moved.

- The layouts of the last round (two ranks of Lightning, ZeRO 0, 2 and 3, two ranks to four,
  torchtitan) were recorded in one run each. Wrong were the programs: the truth of stages 0 and 3
  (they read the moments with the weights), a permutation that did nothing to one expert for each
  rank, and Lightning's own sampler (`order-drawn`). One was moediag's: torchtitan's chunked loss
  calls the output layer by itself, its gathered parameter was taken for one of another model, and
  reading it after FSDP2 had freed it crashed the job.

What the libraries do by themselves:

- accelerate: `load_state` restores the random state, and the iterator of the data loader then draws
  its seed from it, so dropout differs (`seed-drawn`); without `use_seedable_sampler` the order of
  the samples differs, too (`order-drawn`). The program without a fault restores the state again
  once the first batch was fetched.
- Lightning: `ModelCheckpoint` saves before the module's own `on_train_batch_end`, so an average
  that is updated there is saved one update behind (`ema-behind`); a plain `DataLoader` begins anew
  in the middle of an epoch (`sampler-restarted`), a `StatefulDataLoader` continues. On two ranks
  the sampler that Lightning puts into it draws another order after the resume; the program without
  a fault brings its own.
- torchtitan 0.3.0 trains on CPU ranks with stand-ins for flex attention's backward, a sum of gloo
  and what it asks of a device (`programs/titan_on_cpu.py`). It saves no random state, so its
  program without a fault is none for this command. Its optimizers are in one
  `Optimizer` without a state of its own, whose `state_dict` is read now; before, the page said that
  moments left out of the load were not saved.
- DeepSpeed: ZeRO 1 in bfloat16 restores everything that was compared; with
  `load_optimizer_states=False` the main weights are rounded as well.
"""


def page(answers: Mapping[str, dict[str, str]], first: Mapping[str, dict[str, str]]) -> str:
    rows, found, exact, seen = [], 0, 0, [0, 0]
    for program in TRUTH:
        for fault in (HEALTHY, *program.faults):
            now, before = (of.get(f"{program.name}: {fault}") for of in (answers, first))
            answer = now or before
            if answer is None:
                continue
            truth = program.faults.get(fault)
            wanted = " ".join(truth).strip() if truth is not None else ""
            right = answer["pattern"] == wanted
            seen[truth is not None] += 1
            exact += truth is None and answer["verdict"] == Verdict.CLEAN
            found += truth is not None and answer["verdict"] in FAILURES and right
            rows.append(
                f"| {program.name} | `{fault}` | {wanted or 'exact'} | "
                f"{_told(before) if before else '-'} | {_told(now) if now else '-'} |"
            )
    head = "| library, ranks | fault | true | first | now |\n| --- | --- | --- | --- | --- |"
    total = (
        f"Of {seen[True]} programs with a fault {found} are failures whose first difference and "
        f"reason are the true ones; of {seen[False]} without a fault {exact} are exact."
    )
    return "\n".join([head, *rows, "", total]) + "\n"


def _told(answer: Mapping[str, str]) -> str:
    return "exact" if answer["verdict"] == Verdict.CLEAN else answer["pattern"] or answer["verdict"]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.resumes", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="a part of a name; default: all")
    parser.add_argument("--python", default=sys.executable, metavar="FILE")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="keep the runs there")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the report")
    asked = parser.parse_args()
    os.environ.update(OMP_NUM_THREADS="1", DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="")
    answers: dict[str, dict[str, str]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = asked.folder or Path(temporary)
        for program, fault, said in run(asked.names, asked.python, folder.resolve()):
            key = f"{program.name}: {fault}"
            print(f"{key} | {program.faults.get(fault)} | {said['verdict']} | {said['pattern']}")
            print("   ", said["text"], *said["notes"], "->", said.get("next_step"), flush=True)
            answers[key] = said
    if asked.out is not None:
        first = json.loads(FIRST.read_text("utf-8"))
        text = _PAGE % _versions(asked.python) + page(answers, first) + _LATER
        asked.out.write_text(text, "utf-8")
    return 0


def _versions(python: str) -> str:
    code = "import sys; from importlib.metadata import version as of; "
    code += "print(*(f'{name} {of(name)}' for name in sys.argv[1:]), sep=', ')"
    names = ("torch", "accelerate", "deepspeed", "lightning", "torchtitan", "transformers")
    done = subprocess.run([python, "-c", code, *names], capture_output=True, text=True, check=True)
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
