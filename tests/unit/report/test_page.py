"""The page: blame, honesty, exit codes. Laws 1 and 4 of the project."""

from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from moediag.errors import ExitCode
from moediag.report import html, markdown, terminal
from moediag.report.excerpt import ExcerptFile
from moediag.report.page import exit_code, page_of
from moediag.report.terminal import as_text, render
from moediag.report.text_layout import plain
from moediag.result import (
    Conclusion,
    FirstDivergence,
    FixJudgement,
    Place,
    RankSide,
    RunResult,
    TrialResult,
)
from moediag.result.answer_blocks import AnswerState
from tests.unit.trial_results import changed, trial_result

MISMATCH = trial_result(
    stack={"transformers": "4.53.2", "torch": "2.13.0"},
    world_size=8,
    verdict="collective-mismatch",
    expected="collective-mismatch or hang",
    signature="s",
    culprits=(1,),
    victims=(0, 2, 3, 4, 5, 6, 7),
    cause="expert 3 got no token on rank 1",
    evidence="unfixed",
)
FIX = changed(
    MISMATCH, variant="touch", role="fix", verdict="clean", expected="clean", culprits=(),
    victims=(), cause="", gradient_error=0.0, parameters_compared=69, evidence="touch",
)  # fmt: skip
CONTROL = changed(FIX, variant="identical", role="control")


def run_of(*trials: TrialResult, **conclusion: object) -> RunResult:
    values = {"reproduced": True, **conclusion}
    return RunResult("s", "2025-01-31T12:00:00+00:00", "0", {}, trials, Conclusion(**values))  # type: ignore[arg-type]


def page_text(*trials: TrialResult, width: int = 100, **conclusion: object) -> str:
    return as_text(page_of(run_of(*trials, **conclusion)), width)


def test_culprits_and_victims_are_shown_separately() -> None:
    text = page_text(MISMATCH)
    assert "CULPRIT  rank 1" in text
    assert "VICTIMS  ranks 0, 2..7" in text


def test_a_line_of_another_file_is_shown_with_the_program_s_line() -> None:
    inner = Place(
        (1,), "model.py:440 forward", "waits in barrier", ("model.py:9 f", "train.py:3 t")
    )
    own = Place((0,), "train.py:7 main", "waits in all_reduce", ("train.py:9 <module>",))
    alone = Place((2,), "train.py:28 loop", "raised ValueError", ("",))
    text = page_text(changed(MISMATCH, places=(inner, own, alone)))
    assert "rank 2: train.py:28 loop, raised ValueError" in text
    assert "rank 1: model.py:440 forward, from train.py:3, waits in barrier" in text
    assert "rank 0: train.py:7 main, waits in all_reduce" in text


def test_no_rank_is_blamed_without_a_culprit() -> None:
    text = page_text(changed(MISMATCH, culprits=(), victims=()))
    assert "not known which rank" in text
    assert "at fault" not in text, "that nobody is to blame was not measured"
    assert "CULPRIT" not in text
    assert "VICTIM" not in text


def test_ranks_with_the_same_side_share_a_line() -> None:
    sides = {str(rank): RankSide("reduce_scatter", 15696, "float32") for rank in (0, 2, 3)}
    sides["1"] = RankSide("reduce_scatter", 14160, "float32", ("e.3.up.w", "e.3.down.w"))
    at = FirstDivergence(6, "dp_shard", "backward", "model.layers.1", sides)
    text = page_text(changed(MISMATCH, first_divergence=at))
    assert "operation 6 on dp_shard, backward of model.layers.1" in text
    assert "ranks 0, 2, 3  reduce_scatter  15,696 elements\n" in text
    assert "rank 1         reduce_scatter  14,160 elements   missing: e.3.{up,down}.w" in text


def test_equal_stacks_are_shown_once() -> None:
    frames = ("c10d.py:1 all_gather", "model.py:2 forward")
    text = page_text(changed(MISMATCH, stacks={0: frames, 2: frames, 1: ("x.py:3 wait",)}))
    assert text.count("c10d.py:1 all_gather") == 1
    assert "ranks 0, 2, innermost frame first" in text


def test_a_claim_that_does_not_reproduce_is_shown_with_its_numbers() -> None:
    clean = changed(
        MISMATCH, verdict="clean", met=False, culprits=(), victims=(), parameters_compared=69,
        gradient_error=1.2e-8,
    )  # fmt: skip
    text = " ".join(page_text(clean, reproduced=False).split())
    assert "not reproduced: expected collective-mismatch or hang" in text
    assert "69 gradients equal to the reference (largest error 1.2e-08)" in text


def test_a_different_failure_is_not_the_expected_one() -> None:
    crash = changed(MISMATCH, verdict="crash", met=False)
    text = " ".join(page_text(crash, reproduced=False).split())
    assert "a different failure than the expected collective-mismatch or hang" in text
    assert "· not reproduced" in text


def test_other_culprits_are_not_called_another_failure() -> None:
    text = " ".join(page_text(changed(MISMATCH, met=False)).split())
    assert "but not with the expected ranks or signature" in text
    assert "a different failure" not in text


def test_a_fix_that_is_not_applicable_is_one_row_with_its_reason() -> None:
    absent = changed(FIX, verdict="not-applicable", met=False, cause="no such attribute here")
    text = page_text(MISMATCH, absent, CONTROL)
    assert "touch  not applicable    no such attribute here" in text
    assert "2 of 2 expectations met · 1 not applicable here" in text


def test_a_fix_that_breaks_a_working_run_is_a_finding() -> None:
    healthy = changed(MISMATCH, verdict="clean", expected="clean", culprits=(), victims=())
    broken = changed(FIX, verdict="crash", expected="crash", cause="AssertionError")
    text = page_text(healthy, broken, fixes=(FixJudgement("touch", False),), reproduced=False)
    assert "it introduces the failure" in text
    assert "wrong: crash" in text


def test_a_wrong_fix_of_a_real_failure_is_one_row() -> None:
    wrong = changed(FIX, verdict="hang", expected="hang")
    text = page_text(MISMATCH, wrong, fixes=(FixJudgement("touch", False, 1.1),))
    assert "wrong: hang  1.10x" in text
    assert "introduces" not in text


def test_repeats_with_one_outcome_are_one_finding() -> None:
    again = changed(MISMATCH, repeat=1)
    other = changed(MISMATCH, repeat=2, verdict="hang", signature="other")
    page = page_of(run_of(MISMATCH, again, other))
    assert [finding.title[-1] for finding in page.findings] == ["2 of 3 repeats", "1 of 3 repeats"]


def test_fixes_are_called_equal_by_paired_rounds() -> None:
    """Rounds differ by 10 %; `near` is as fast as `quick` in the same rounds, `later` is always
    slower although its interval overlaps."""

    def timed(variant: str, *rounds: float) -> TrialResult:
        spread = (min(rounds), max(rounds))
        median = sorted(rounds)[len(rounds) // 2]
        return changed(FIX, variant=variant, step_time_ratio=median, step_time_spread=spread,
                       step_time_rounds=rounds)  # fmt: skip

    unfixed = changed(MISMATCH, step_time_ratio=1.0, step_time_spread=(0.9, 1.1))
    quick = timed("quick", 0.95, 1.0, 1.05)
    near = timed("near", 0.94, 1.01, 1.05)
    later = timed("later", 0.97, 1.02, 1.07)
    fixes = (later, near, quick)
    judged = tuple(FixJudgement(t.variant, True, t.step_time_ratio) for t in fixes)
    page = page_of(run_of(unfixed, *fixes, fixes=judged, cheapest_correct_fix="quick"))
    assert {row.variant: row.remark for row in page.fixes} == {
        "quick": "no slower than unfixed within the noise",
        "near": "equal to the cheapest within the noise",
        "later": "",
    }
    assert [row.variant for row in page.fixes] == ["quick", "near", "later"]


def test_the_answer_for_a_chat_is_plain_and_unwrapped() -> None:
    text = terminal.short(run_of(MISMATCH))
    assert "collective-mismatch" in text and f"CAUSE    {MISMATCH.cause}"[:40] in text
    assert len(text.splitlines()) <= 8 and "\x1b" not in text
    assert terminal.short(run_of(CONTROL)).count("\n") == 2


@pytest.mark.parametrize(("next_step", "told"), [("Fix it.", True), ("word " * 80, False)])
def test_beside_a_source_excerpt_the_answer_has_the_cause_where_it_fits(
    next_step: str, told: bool
) -> None:
    (finding,) = page_of(run_of(MISMATCH)).findings
    answer = replace(finding.found, next_step=next_step)
    shown = replace(finding, excerpt=(ExcerptFile("train.py", ()),), found=answer)
    lines = [plain(line) for line in terminal.answer_lines(shown, 80)]
    assert any("got no token on rank 1" in line for line in lines) == told
    assert len(lines) <= terminal.MOST_LINES or not told


def test_a_page_without_findings_is_a_few_lines() -> None:
    text = page_text(CONTROL, reproduced=None)
    assert "1 of 1 expectation met · clean in 1 trial" in text
    assert len(text.splitlines()) <= 4


@pytest.mark.parametrize(
    ("trials", "code"),
    [
        ((MISMATCH, FIX, CONTROL), ExitCode.OK),
        ((changed(MISMATCH, met=False), CONTROL), ExitCode.FAILURE_FOUND),
        ((MISMATCH, changed(FIX, met=False, verdict="hang")), ExitCode.FAILURE_FOUND),
        # a control that fails makes everything else inconclusive
        ((changed(MISMATCH, met=False), changed(CONTROL, met=False)), ExitCode.INCONCLUSIVE),
        ((changed(MISMATCH, met=False, verdict="inconclusive"),), ExitCode.INCONCLUSIVE),
        ((changed(MISMATCH, met=False, verdict="not-applicable"),), ExitCode.INCONCLUSIVE),
        ((), ExitCode.INCONCLUSIVE),
        # trials that are not applicable are ignored, unless there are no others
        ((MISMATCH, changed(FIX, met=False, verdict="not-applicable")), ExitCode.OK),
        ((MISMATCH, changed(CONTROL, met=False, verdict="not-applicable")), ExitCode.OK),
        (
            (changed(MISMATCH, met=False, verdict="not-applicable"), CONTROL),
            ExitCode.INCONCLUSIVE,
        ),
        # nothing was expected: a diagnosis
        ((changed(MISMATCH, expected=""),), ExitCode.FAILURE_FOUND),
        ((changed(FIX, expected=""),), ExitCode.OK),
        ((changed(FIX, expected="", verdict="inconclusive"),), ExitCode.INCONCLUSIVE),
    ],
)
def test_exit_codes(trials: tuple[TrialResult, ...], code: int) -> None:
    assert exit_code(run_of(*trials)) == code


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    name = "language_model.model.layers.11.mlp.experts.127.gate_up_proj.weight_scale_inverse"
    sides = {"0": RankSide("reduce_scatter", 10**9, "bfloat16"),
             "1": RankSide("all_to_all", 12, "float32", (name, "b.c"))}  # fmt: skip
    trial = changed(
        MISMATCH,
        first_divergence=FirstDivergence(6, "dp_shard", "backward", name, sides),
        wrong_parameters=tuple(f"{name}.{i}.{i * 7}" for i in range(12)),
        worst_parameter=name,
        gradient_error=0.1,
        stacks={0: tuple(f"{'deep/' * 30}file.py:{i} function" for i in range(20))},
        notes=("a note " * 30,),
        not_seen=("everything " * 20,),
        evidence="e" * 130,
    )
    fix = changed(FIX, variant="a-fix-with-a-rather-long-name-" * 2, notes=("because " * 30,),
                  step_time_ratio=1.0, step_time_spread=(0.9, 1.1))  # fmt: skip
    judged = (FixJudgement(fix.variant, True, 1.0),)
    text = page_text(
        trial, fix, CONTROL, width=width, fixes=judged, cheapest_correct_fix=fix.variant
    )
    assert not [line for line in text.splitlines() if len(line) > width]


def test_rendering_to_a_pipe_has_no_escape_codes() -> None:
    out = StringIO()
    result = run_of(MISMATCH, FIX, CONTROL)
    render(result, Console(file=out, width=90), Path("runs/x"))
    assert "\x1b" not in out.getvalue()
    assert out.getvalue() == as_text(page_of(result), 90, Path("runs/x"))


def test_rendering_to_a_terminal_is_coloured_unless_disabled() -> None:
    coloured, plain = StringIO(), StringIO()
    render(run_of(MISMATCH), Console(file=coloured, force_terminal=True, width=90))
    render(run_of(MISMATCH), Console(file=plain, force_terminal=True, no_color=True, width=90))
    assert "\x1b[1;31m" in coloured.getvalue()
    assert "\x1b[1;31m" not in plain.getvalue()


def test_brackets_in_a_cause_are_not_markup() -> None:
    out = StringIO()
    render(
        run_of(changed(MISMATCH, cause="got [bold]x[/] and :smile:")), Console(file=out, width=90)
    )
    assert "got [bold]x[/] and :smile:" in out.getvalue()


def test_unfixed_code_that_fails_is_not_called_clean() -> None:
    text = page_text(changed(MISMATCH, expected="clean", met=False), reproduced=False)
    assert "is clean" not in text
    assert "unfixed fails, which was expected to be clean" in text


def test_an_incomplete_run_is_inconclusive() -> None:
    whole = run_of(MISMATCH)
    short = replace(whole, incomplete="interrupted after 1 of 9 trials")
    assert (page_of(whole).state, page_of(short).state) == (
        AnswerState.AS_EXPECTED, AnswerState.INCONCLUSIVE
    )  # fmt: skip
    assert page_of(short).conclusion[0] == "incomplete: interrupted after 1 of 9 trials"


def test_attached_output_is_folded_in_files_and_listed_in_the_terminal() -> None:
    said = {"nvidia-smi": "0, NVIDIA H200, 100 %", "NCCL's RAS": "rank 1 <lags>" + "`" * 4}
    with_it, without = run_of(changed(MISMATCH, attached=said)), run_of(MISMATCH)
    page = html.render([with_it])
    assert "<summary>nvidia-smi</summary><pre>0, NVIDIA H200, 100 %</pre>" in page
    assert "rank 1 &lt;lags&gt;" in page
    assert "`````text\nrank 1 <lags>````" in markdown.render([with_it])
    assert "ATTACHED nvidia-smi, NCCL's RAS" in " ".join(as_text(page_of(with_it)).split())
    assert "ATTACHED" not in as_text(page_of(without))
    assert "Attached" not in html.render([without])


def test_the_title_contains_the_nccl_version() -> None:
    on_nccl = changed(MISMATCH, backend="nccl", stack={**MISMATCH.stack, "nccl": "2.29.3"})
    assert "nccl 2.29.3" in page_text(on_nccl) and "nccl 2" not in page_text(MISMATCH)
