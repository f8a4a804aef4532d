"""The decision after which two ranks took different paths, from their last common call on."""

from __future__ import annotations

import re
import textwrap
from dataclasses import replace
from typing import Any

import pytest

from moediag.diagnosis import diagnose
from moediag.diagnosis.blame.culprits import Blame
from moediag.diagnosis.blame.forks import Fork
from moediag.diagnosis.blame.standings import by_condition
from moediag.diagnosis.facts import Facts
from moediag.evidence.line_conditions import Sources
from moediag.evidence.model import (
    BatchCount,
    Evidence,
    Frame,
    Left,
    PassedCondition,
    Stack,
    Stall,
)
from tests.unit.evidence_builder import Job, Op

GROUP: dict[str, tuple[tuple[int, ...], str | None]] = {"a": ((0, 1), "world")}
TIMES = 3  # common calls


def job(source: str, **known: Any) -> Evidence:
    """Ranks 0 and 1 made calls at the lines marked ``C``, then rank 0 makes one at ``A``, rank 1
    one at ``B``, or it ended, by the call at ``X`` if there is one. ``Cc``, ``Aa`` and ``Bb`` mark
    the lines that led there."""
    text = textwrap.dedent(source).lstrip()
    marks: dict[str, str] = {}
    name = "<module>"
    for number, line in enumerate(text.splitlines(), 1):
        if line and not line.startswith((" ", "#", "@")):
            name = "<module>"
        if "def " in line:
            name = line.partition("def ")[2].partition("(")[0]
        if "  # " in line:
            for mark in line.rpartition("  # ")[2].split():
                marks[mark] = f"train.py:{number} {name}"
    outer = {"A": "Aa", "B": "Bb", "C": "Cc"}
    common = [Op("a", step=n + 1) for n in range(TIMES)]
    last = {0: Op("a", "all_gather"), 1: Op("a", "barrier", numel=0)}
    ended = "B" not in marks
    programs = [[*common, last[0]], [*common, *([] if ended else [last[1]])]]
    evidence = Job(GROUP, programs).run()
    ranks = {}
    for rank, seen in evidence.ranks.items():
        made = ["C"] * TIMES + ["AB"[rank]]
        calls = tuple(
            replace(
                call,
                site=marks[mark],
                callers=tuple(marks[o] for o in [outer[mark]] if o in marks),
            )
            for call, mark in zip(seen.collectives, made, strict=False)
        )
        ranks[rank] = replace(seen, collectives=calls, **known.get(f"rank{rank}", {}))
    if "X" in marks:
        left = Left(known.get("how", "os._exit(0)"), (marks["X"],))
        ranks[1] = replace(ranks[1], left=left)
    read = Sources({"/me/train.py": text}, len(ranks), one_node=True)
    conditions = read.of_lines(marks.values(), read.files)
    ranks = {rank: replace(seen, conditions=conditions) for rank, seen in ranks.items()}
    sources = {"/me/train.py": text}
    return replace(evidence, ranks=ranks, watched=True, sources=sources, one_node=True)


def fork_of(source: str, **known: Any) -> Fork | None:
    return Facts(job(source, **known)).fork


def decisions(source: str, **known: Any) -> list[tuple[str, tuple[str, str]]]:
    """The decisions between ranks 0 and 1; the same the other way round, if both made a call."""
    found = fork_of(source, **known)
    assert found is not None
    told = [(one.text, one.ways) for one in found.decisions]
    if not known and re.search("# .*B", source) and "if rank ==" not in source:
        swapped = str.maketrans("ABab", "BAba")
        other = fork_of(re.sub("(?<=# ).*", lambda m: m[0].translate(swapped), source))
        assert other is not None
        assert [(one.text, one.ways[::-1]) for one in other.decisions] == told
    return told


BREAK = """
def main():
    for step in range(30):
        all_reduce()  # C A
        if loss > 100:
            raise ValueError
        if stopper.update(loss):
            print("stop")
            break
    barrier()  # B
"""


class TestOneDecision:
    def test_a_break_on_data(self) -> None:
        found = fork_of(BREAK)
        assert found is not None
        (one,) = found.decisions
        assert (one.file, one.line, one.text) == ("train.py", 6, "if stopper.update(loss)")
        assert one.ways == ("false", "true")
        assert one.only == ((0, ""), (7, 'print("stop")'))

    def test_a_handler_that_continues(self) -> None:
        source = """
            def main():
                for i in range(9):
                    try:
                        x = decode(i)
                    except ValueError as e:
                        print("skip", e)
                        continue
                    all_reduce(x)  # C A
                all_reduce(1)  # B
        """
        assert decisions(source) == [("except ValueError as e", ("", "caught"))]

    def test_a_branch_with_a_call_of_its_own(self) -> None:
        source = """
            def main():
                for n in lengths:
                    tokens += n
                    all_reduce(2)  # C A
                    if tokens >= BUDGET:
                        all_reduce(256)  # B
                        tokens = 0
        """
        assert decisions(source) == [("if tokens >= BUDGET", ("false", "true"))]

    def test_a_loop_on_data(self) -> None:
        source = """
            def solve():
                while err > tol:
                    all_reduce()  # C A
                    err *= 0.5
            def main():
                n = solve()  # Cc Aa
                all_reduce(n)  # B
        """
        assert decisions(source) == [("while err > tol", ("turn", "over"))]

    def test_an_early_return_of_a_function_that_only_one_side_is_in(self) -> None:
        source = """
            def lookup(key):
                if key in cache:
                    return cache[key]
                return gather(key)  # A
            def main():
                for k in keys:
                    y = lookup(k)  # Aa
                    all_reduce(y)  # C B
        """
        assert decisions(source) == [("if key in cache", ("false", "true"))]

    def test_an_early_return_before_the_next_epoch(self) -> None:
        source = """
            def gather_predictions(preds):
                if not preds:
                    return None
                return gather(preds)  # A
            def main():
                for epoch in range(4):
                    for _ in range(3):
                        all_reduce()  # C B
                    gather_predictions(predict(model))  # Aa
        """
        assert decisions(source) == [("if not preds", ("false", "true"))]

    @pytest.mark.parametrize(
        ("call", "holds"),
        [
            ("shown = reduced(x) if finite(x) else x", True),
            ("shown = x if finite(x) else reduced(x)", False),
            ("shown = finite(x) and reduced(x)", True),
            ("shown = finite(x) or reduced(x)", False),
        ],
    )
    def test_an_expression_that_decides_about_a_call(self, call: str, holds: bool) -> None:
        source = f"""
            def reduced(x):
                return gather(x)  # A
            def main():
                for x in items():
                    all_reduce(x)  # C B
                    {call}  # Aa
        """
        ways = ("true", "false") if holds else ("false", "true")
        assert decisions(source) == [("finite(x)", ways)]

    def test_an_element_of_a_list_of_lists_is_not_the_same_on_all_ranks(self) -> None:
        """Only the number of its elements is."""
        source = """
            def main():
                for chunk in [[1, 2], [3, odd(), 5]]:
                    for row in chunk:
                        all_reduce(row)  # C A
                        if row > 90:
                            break
                    barrier()  # B
        """
        assert decisions(source) == [("if row > 90", ("false", "true"))]

    def test_a_rank_that_ended(self) -> None:
        source = """
            def main():
                while True:
                    all_reduce()  # C A
                    if done():
                        return
        """
        assert decisions(source) == [("if done()", ("false", "true"))]


class TestDataLoaders:
    SOURCE = """
        def main():
            for step, x in enumerate(loader):
                loss = model(x)
                if not isfinite(loss):
                    continue
                for p in model.parameters():
                    all_reduce(p)  # C A
            all_reduce(total)  # B
    """

    def known(self, one: int, two: int) -> dict[str, Any]:
        line = "train.py:2 main"
        return {
            "rank0": {"batches": (BatchCount(line, one, False),)},
            "rank1": {"batches": (BatchCount(line, two, True),)},
        }

    def test_equal_batches_leave_the_skip(self) -> None:
        found = decisions(self.SOURCE, **self.known(10, 10))
        assert found == [("if not isfinite(loss)", ("false", "true"))]

    def test_without_counts_it_is_one_of_both(self) -> None:
        assert len(decisions(self.SOURCE)) == 2

    @pytest.mark.parametrize(
        ("rank", "skips"), [("rank == 0", 0), ("rank == 1", 1), ("chosen(rank)", 1)]
    )
    def test_a_helper_calls_for_each_parameter(self, rank: str, skips: int) -> None:
        """Rank 1 cannot have left the loop in a branch of rank 0."""
        source = f"""
            def reduce():
                for p in model.parameters():
                    all_reduce(p)  # A
            def main():
                for step, x in enumerate(loader):
                    if bad(x):
                        continue
                    reduce()  # Aa
                    if step % 3 == 0:
                        barrier()  # C
                        if {rank}:
                            print(step)
                            if args.dry_run:
                                break
                all_reduce(total)  # B
        """
        found = [text for text, _ in decisions(source)]
        loop = "for step, x in enumerate(loader)"
        assert found == [loop, "if bad(x)", *[f"if {rank}"] * skips]

    def test_a_branch_that_decides_nothing_is_never_named(self) -> None:
        source = """
            def main():
                for step, x in enumerate(loader):
                    if loss > 2:
                        print("high")
                    all_reduce()  # C A
                    if step % 3 == 0:
                        print(step)
                    elif loss > 7:
                        print("very high")
                all_gather()  # B
        """
        assert decisions(source) == [("for step, x in enumerate(loader)", ("turn", "over"))]


class TestCallsOfLibraries:
    SOURCE = """
        def main():
            while True:
                loss.backward()  # C A
                if done():
                    break
            barrier()  # B
    """

    def found(self, *, step: int) -> list[str]:
        """Rank 0 waits in a call of that step in ``backward``; the common ones were of 1 to 3."""
        evidence = job(self.SOURCE)
        ranks = {}
        for rank, seen in evidence.ranks.items():
            calls = [
                replace(c, site="engine.py:9 run", callers=(c.site,))
                if rank == 0 or c.completed
                else c
                for c in seen.collectives
            ]
            last = replace(calls[-1], step=step)
            ranks[rank] = replace(seen, collectives=(*calls[:-1], last))
        fork = Facts(replace(evidence, ranks=ranks)).fork
        assert fork is not None
        return [one.text for one in fork.decisions]

    @pytest.mark.parametrize(("op", "decided"), [("broadcast", ["if check()"]), ("all_reduce", [])])
    def test_a_forward_broadcasts_buffers_at_some_times(self, op: str, decided: list[str]) -> None:
        evidence = job("""
            def main():
                while True:
                    model(x)  # C
                    if check():
                        all_gather()  # A
                    model(y)
                    barrier()  # B
        """)
        ranks = {}
        for rank, seen in evidence.ranks.items():
            first, *common = (replace(c, op=op) for c in seen.collectives[:TIMES])
            first = replace(first, site="train.py:6 main")
            calls = (first, *common, *seen.collectives[TIMES:])
            ranks[rank] = replace(seen, collectives=calls)
        fork = Facts(replace(evidence, ranks=ranks)).fork
        assert fork is not None
        assert [one.text for one in fork.decisions] == decided

    @pytest.mark.parametrize(
        ("call", "decided"),
        [("model(x)", ["if check()"]), ("model(x) if x else None", []), ("run(model, x)", [])],
    )
    def test_one_side_is_still_in_the_forward(self, call: str, decided: list[str]) -> None:
        """DDP broadcast its buffers before it; the other side left it without a call."""
        evidence = job(f"""
            def model(x):
                if check():
                    all_gather()  # A
            def main():
                for x in data:
                    {call}  # C Aa
                    barrier()  # B
        """)
        op = "all_reduce" if call.startswith("run") else "broadcast"
        ranks = {}
        for rank, seen in evidence.ranks.items():
            common = (replace(c, op=op) for c in seen.collectives[:TIMES])
            ranks[rank] = replace(seen, collectives=(*common, *seen.collectives[TIMES:]))
        fork = Facts(replace(evidence, ranks=ranks)).fork
        assert fork is not None
        assert [one.text for one in fork.decisions] == decided

    def test_the_next_step_is_another_visit_of_the_line(self) -> None:
        assert self.found(step=TIMES + 1) == ["if done()"]

    def test_in_the_same_step_it_may_be_the_same_visit(self) -> None:
        assert self.found(step=TIMES) == []


class TestOneOfSeveral:
    def test_an_exit_at_a_step_is_decided_by_the_condition_around_it(self) -> None:
        source = """
            def main():
                for step in range(30):
                    for i in range(2):
                        all_reduce()  # C A
                    if master():
                        if step == 9:
                            exit()
        """
        assert "if master()" in [text for text, _ in decisions(source)]

    def test_exceptions_that_a_context_manager_swallows(self) -> None:
        source = """
            def main():
                for i in range(8):
                    with suppress(ValueError):
                        x = parse(i)
                        all_reduce(x)  # C A
                    if stop():
                        break
                barrier()  # B
        """
        assert [text for text, _ in decisions(source)] == [
            "with suppress(ValueError)",
            "if stop()",
        ]

    def test_a_handler_around_the_function_that_made_the_last_common_call(self) -> None:
        """The exception may have left it before its own `if`."""
        source = """
            def step(x):
                all_reduce(x)  # C
                if flag(x):
                    return
                all_gather(x)  # A
            def main():
                for x in range(3):
                    try:
                        step(x)  # Cc Aa
                    except RuntimeError:
                        pass
                    barrier()  # B
        """
        assert [text for text, _ in decisions(source)] == ["if flag(x)", "except RuntimeError"]

    def test_a_handler_around_all(self) -> None:
        source = """
            def main():
                try:
                    while True:
                        all_reduce()  # C A
                        if done():
                            break
                except RuntimeError:
                    log()
                barrier()  # B
        """
        assert [text for text, _ in decisions(source)] == ["if done()", "except RuntimeError"]
        ends = source.replace("log()", "raise")
        assert decisions(ends) == [("if done()", ("false", "true"))]

    def test_more_than_three_tell_nothing(self) -> None:
        exits = "".join(f"        if test{n}():\n            break\n" for n in range(4))
        source = f"def main():\n    while True:\n        all_reduce()  # C A\n{exits}"
        source += "    barrier()  # B\n"
        found = fork_of(source)
        assert found is not None and found.decisions == ()
        assert "Find out why ranks take different paths" in diagnose(job(source)).next_step


class TestNothingIsNamed:
    def test_a_statement_that_makes_several_calls(self) -> None:
        source = """
            def main():
                for batch in stream:
                    outs = [all_reduce(x) for x in batch]  # C A
                    if done():
                        break
                barrier()  # B
        """
        found = fork_of(source)
        assert found is not None and found.decisions == ()

    @pytest.mark.parametrize(
        ("size", "decided"),
        [
            ("get_world_size()", 1), ("int(os.environ['WORLD_SIZE'])", 1), ("size_of(g)", 2),
            ("get_world_size(group)", 2), ("int(os.environ['LOCAL_WORLD_SIZE'])", 2),
            ("int(os.environ[key])", 2),
        ],
    )  # fmt: skip
    def test_the_size_of_the_job_is_the_same_on_all_ranks(self, size: str, decided: int) -> None:
        source = f"""
            def gather(x):
                n = {size}
                if n == 1:
                    return x
                all_gather(x)  # A
            def main():
                for i in range(9):
                    all_reduce(i)  # C
                    if good(i):
                        gather(i)  # Aa
                    barrier()  # B
        """
        assert len(decisions(source)) == decided

    @pytest.mark.parametrize(("test", "lines"), [("r != 1", [5, 6]), ("n == 2", [5])])
    def test_names_that_are_assigned_together_have_values_of_their_own(
        self, test: str, lines: list[int]
    ) -> None:
        source = f"""
            def main():
                r, n = dist.get_rank(), dist.get_world_size()
                for step in range(4):
                    all_reduce(step)  # C B
                    if good(step):
                        if {test}: all_gather(step)  # A
        """
        found = fork_of(source)
        assert found is not None and [one.line for one in found.decisions] == lines

    def test_a_list_that_is_changed_is_not_the_same_on_all_ranks(self) -> None:
        source = """
            def main():
                callbacks = [Log()]
                if here:
                    callbacks.append(Ema())
                for step in range(4):
                    all_reduce(1)  # C B
                    for callback in callbacks:
                        broadcast(callback)  # A
        """
        assert decisions(source) == [("for callback in callbacks", ("turn", "over"))]

    def test_both_in_one_line(self) -> None:
        source = """
            def main():
                for name in names:
                    if name == "x":
                        print(name)
                    all_reduce(sizes[name])  # C A B
        """
        assert fork_of(source) is None

    def test_other_source(self) -> None:
        evidence = replace(job(BREAK), sources={"/me/train.py": "def main(:"})
        found = Facts(evidence).fork
        assert found is not None and found.decisions == ()

    def test_without_source(self) -> None:
        assert Facts(replace(job(BREAK), sources={})).fork is None

    def test_calls_in_another_order_without_a_branch(self) -> None:
        source = """
            def main():
                all_reduce(0)  # C
                all_reduce(1)  # A
                all_reduce(2)  # B
        """
        found = fork_of(source)
        assert found is not None and found.decisions == ()


LINES = {
    "T": ("train.py:3 train", "train.py:15 main"),
    "B": ("train.py:5 train", "train.py:15 main"),
    "V": ("train.py:10 validate", "train.py:16 main"),
    "F": ("train.py:12 first", "train.py:17 main"),
}


class TestEqualCallsOfOtherLines:
    """Rank 1 leaves a loop, and its next call matches one that rank 0 still makes there."""

    SOURCE = textwrap.dedent("""\
        def train():
            for x in loader:
                all_reduce(x)
                if x.last():
                    barrier()
        def validate():
            for x in held:
                if x.skip():
                    break
                all_reduce(x)
        def first():
            all_reduce(1)
        def main():
            for epoch in range(3):
                train()
                validate()
                first()
    """)

    def evidence(self, *lines: str) -> Evidence:
        """Each rank's calls were made at these lines; only the last ones differ."""
        made = job(BREAK)
        ranks = {}
        for rank, marks in enumerate(lines):
            calls = tuple(
                replace(call, site=LINES[mark][0], callers=LINES[mark][1:])
                for call, mark in zip(made.ranks[rank].collectives, marks, strict=True)
            )
            ranks[rank] = replace(made.ranks[rank], collectives=calls)
        return replace(made, ranks=ranks, sources={"/me/train.py": self.SOURCE})

    def test_the_paths_parted_before_the_first_call_that_differs(self) -> None:
        found = diagnose(self.evidence("TVVT", "TVTB"))
        assert {7, 8} <= {one.line for one in found.paths if not one.certain}
        acts = {one.line: one.acts for one in found.paths}
        assert acts[3] == (((1,), "called all_reduce"),)  # it waits elsewhere

    def test_a_line_that_is_meant_for_one_rank_is_no_sign(self) -> None:
        found = Facts(self.evidence("TVFT", "TVVB")).fork
        assert found is not None
        assert [side.common and side.common.position for side in found.sides] == [2, 2]


class TestPage:
    @pytest.mark.parametrize(
        ("more", "told"),
        [
            ("trainer.stop = True", "; it is set at train.py:4."),
            ("trainer.stop = bool(value)", "."),  # what decides is not known
        ],
    )
    def test_the_next_step_tells_what_set_the_attribute_that_decides(
        self, more: str, told: str
    ) -> None:
        source = f"""
            class Stopper:
                def after(self, trainer, value):
                    if value > self.best:
                        {more}
            class Trainer:
                def __init__(self):
                    self.stop = False
                def main(self):
                    while True:
                        all_reduce(1)  # C A
                        if self.stop:
                            break
                    barrier()  # B
        """
        found = diagnose(job(source))
        assert found.next_step == (
            "Make all ranks decide the same way at train.py:11: `if self.stop` was false on rank "
            f"0, true on rank 1{told}"
        )

    def test_the_next_step_names_the_decision(self) -> None:
        found = diagnose(job(BREAK))
        assert found.culprits == ()
        assert found.next_step == (
            "Make all ranks decide the same way at train.py:6: `if stopper.update(loss)` was "
            "false on rank 0, true on rank 1."
        )

    def test_the_paths_from_the_last_common_call_on(self) -> None:
        found = [(p.line, p.acts) for p in diagnose(job(BREAK)).paths]
        assert found == [
            (3, (((0, 1), "last made the same call, all_reduce"),)),
            (6, (((0,), "false"), ((1,), "true"))),
            (7, (((1,), "alone came here"),)),
            (3, (((0,), "waits in all_gather"),)),
            (9, (((1,), "waits in barrier"),)),
        ]


EXIT = """
def main():
    for step in range(30):
        all_reduce()  # C A
        if loss > 100:
            os._exit(0)  # X
    print("done")
"""


class TestEndedByACall:
    def test_at_once_inside_the_loop_of_the_others(self) -> None:
        found = diagnose(job(EXIT))
        assert found.culprits == (1,) and found.victims == (0,)
        assert "rank 1 ended by os._exit(0) at train.py:5 without that call" in found.cause
        assert found.next_step == (
            "Make all ranks decide the same way at train.py:4: `if loss > 100` was true on rank 1, "
            "false on rank 0."
        )
        without = diagnose(replace(job(EXIT), sources={}))
        assert without.culprits == (1,)
        assert without.next_step == (
            "Do not end rank 1 at train.py:5 while others wait at train.py:3, or end all ranks "
            "there."
        )

    @pytest.mark.parametrize(
        "source",
        [
            EXIT.replace("    print", "    os._exit(0)  # X\n    print").replace("  # X", "", 1),
            EXIT.replace("os._exit(0)  # X", "break"),
        ],
        ids=["behind the loop", "not known where"],
    )
    def test_the_program_may_have_been_done(self, source: str) -> None:
        assert diagnose(job(source)).culprits == ()

    def test_a_program_may_leave_when_it_has_trained_enough(self) -> None:
        found = diagnose(job(EXIT, how="sys.exit(0)"))
        assert found.culprits == ()
        assert "rank 1 ended by sys.exit(0) at train.py:5" in found.cause
        assert found.next_step == (
            "Make all ranks decide the same way at train.py:4: `if loss > 100` was true on rank 1, "
            "false on rank 0."
        )

    def test_for_a_rank_that_the_program_singles_out(self) -> None:
        source = EXIT.replace("loss > 100", "rank == 1")
        found = diagnose(job(source, how="sys.exit()"))
        assert found.culprits == (1,)
        assert "under `if rank == 1` at train.py:4" in found.cause

    def test_an_exception_that_ends_the_program(self) -> None:
        source = EXIT.replace("os._exit(0)  # X", "raise SystemExit(0)")
        assert decisions(source) == [("if loss > 100", ("false", "true"))]


VALUES = """
def main():
    for step in range(30):
        if main_process or step == 0:
            all_gather()  # A
        all_reduce()  # C
        barrier()  # B
"""


def seen_as(main: bool, step: int = 4) -> dict[str, PassedCondition]:
    values = {"main_process": str(main), "step": str(step)}
    return {"train.py:3": PassedCondition(main or step == 0, values)}


class TestValuesOfTheCondition:
    """Rank 0 is in the branch of a condition whose other clause is the same on all ranks."""

    def test_they_show_that_the_clause_of_the_rank_decided(self) -> None:
        found = diagnose(
            job(VALUES, rank0={"tested": seen_as(True)}, rank1={"tested": seen_as(False)})
        )
        assert found.culprits == (0,)
        assert found.cause.endswith(
            "At train.py:3, `main_process` is True on rank 0, False on rank 1."
        )

    @pytest.mark.parametrize(
        "known",
        [
            {},
            {"rank0": {"tested": seen_as(True)}},
            {"rank0": {"tested": seen_as(True)}, "rank1": {"tested": seen_as(False, step=5)}},
            {"rank0": {"tested": seen_as(True)}, "rank1": {"tested": seen_as(True)}},
        ],
        ids=["unknown", "of one rank", "another step", "the same on both"],
    )
    def test_without_them_nobody_is_named(self, known: dict[str, Any]) -> None:
        evidence = job(VALUES, **known)
        assert diagnose(evidence).culprits == ()


class TestOnce:
    """A break out of a loop in a function that runs once."""

    SOURCE = """
        def save(model):
            if full:
                for p in model:
                    gather(p)  # B
        def main():
            for step in range(10):
                if rank == 1 and step == 6:
                    break
                forward()  # A
                clip()  # C
            save(model)  # Bb
        main()  # Cc Aa
    """

    def test_it_is_the_decision_and_names_the_rank(self) -> None:
        assert decisions(self.SOURCE) == [("if rank == 1 and step == 6", ("false", "true"))]
        found = diagnose(job(self.SOURCE))
        assert (found.verdict, found.culprits) == ("hang", (1,)), found.cause

    def test_a_function_that_runs_again_may_have_parted_the_ranks_elsewhere(self) -> None:
        again = self.SOURCE.replace("main()  # Cc Aa", "while True: main()  # Cc Aa")
        assert ("if full", ("false", "true")) in decisions(again)
        assert diagnose(job(again)).culprits == ()

    def test_two_ranks_may_have_left_by_data(self) -> None:
        data = self.SOURCE.replace("rank == 1 and step == 6", "step == limit")
        assert diagnose(job(data)).culprits == ()


def test_a_rank_in_destroy_process_group_has_left_the_loop() -> None:
    """On NCCL it waits there for its peers."""
    source = """
        def main():
            for epoch in range(9):
                if rank == 1 and epoch == 3:
                    break
                all_reduce()  # C A
            destroy_process_group()  # X
        main()  # Cc Aa
    """
    evidence = job(source)
    frames = (Frame("/torch/distributed_c10d.py", 9, "destroy_process_group"),)
    at = (Frame("/me/train.py", 6, "main"), Frame("/me/train.py", 7, "<module>"))
    stack = Stack("MainThread", "py-spy", (*frames, *at))
    away = replace(evidence.ranks[1], left=None, finished=False, exit=None, stacks=(stack,))
    stall = Stall(1.0, 3.0, (0,), (1,))
    evidence = replace(evidence, ranks={**evidence.ranks, 1: away}, stall=stall)
    found = Facts(evidence).fork
    assert found is not None
    assert [one.text for one in found.decisions] == ["if rank == 1 and epoch == 3"]
    elsewhere = replace(away, stacks=(replace(stack, frames=at),))
    assert Facts(replace(evidence, ranks={**evidence.ranks, 1: elsewhere})).fork is None


class TestMajorityThatLeaves:
    """More ranks that leave something out are no more usual than fewer that do not."""

    LEAVES = """
    for batch in loader:
        dist.all_reduce(flag)  # C
        if bad(batch):
            {way}
        dist.all_gather(parts, part)  # A
    dist.barrier()  # B
    """

    def named(self, way: str, *culprits: int) -> tuple[int, ...]:
        facts = Facts(job(self.LEAVES.format(way=way)))
        assert facts.divergence is not None
        found = Blame(culprits, "majority")
        return by_condition(
            found, facts.divergence, facts.standings, facts.evidence, facts.fork
        ).culprits

    def test_the_ranks_that_did_not_leave_are_not_named(self) -> None:
        assert self.named("break", 0) == ()

    def test_the_ranks_that_left_are(self) -> None:
        assert self.named("break", 1) == (1,)

    def test_a_branch_that_leaves_nothing_out(self) -> None:
        assert self.named("log(batch)", 0) == (0,)
