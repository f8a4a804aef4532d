"""`moediag check` after the worker: the question, the cost, the page and the exit code."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from moediag.axes import Layout
from moediag.diagnosis import diagnose
from moediag.errors import ExitCode, LayoutError, UsageError
from moediag.evidence.model import Collective, Evidence, Group, RankEvidence
from moediag.lab.pipeline import (
    check,
    check_cost,
    check_page,
    check_request,
    check_result,
    known_scenarios,
)
from moediag.lab.pipeline.check_result import CheckResult, JudgedCase
from moediag.lab.pipeline.register import Entry
from moediag.protocol import (
    FAILS,
    MAY_FAIL,
    Checked,
    CheckFinding,
    ExpertRange,
    MeshSlice,
    PlannedParameter,
    PlannedUnit,
    SimulatedCase,
)
from moediag.report import answer_views
from moediag.report.text_layout import plain
from moediag.result import Confidence, Diagnosis, FirstDivergence, RankSide, Verdict

LAYER = PlannedUnit(
    "model.layers.*", 2, "dp_shard", shards=4, replicas=1, element=4, parameters=3, elements=90,
    gathered=100, gathers=2,
)  # fmt: skip
ROOT = dataclasses.replace(LAYER, module="(root)", count=1, elements=40, gathered=40, gathers=1)
EXPERTS = PlannedParameter(
    "model.layers.*.mlp.experts.down_proj", 2, [16, 4, 4], "float32", 4,
    [MeshSlice("dp_shard", 4, 0)], most=64, least=64, routed=True, rule="fully_shard",
)  # fmt: skip
CHECKED = Checked(
    model="Model", model_type="qwen3_moe", parameters=512, experts=16, top_k=2, asked="fully_shard",
    plan=[EXPERTS], units=[ROOT, LAYER],
    owners=[ExpertRange(["experts.down_proj"], 16, 1, [[0, 4], [4, 8], [8, 12], [12, 16]])],
)  # fmt: skip
CLEAN = Diagnosis(Verdict.CLEAN, "clean", Confidence.HIGH)
CONTROL = SimulatedCase("control", "", [], "control")
PARTED = dataclasses.replace(
    CLEAN,
    verdict=Verdict.COLLECTIVE_MISMATCH,
    culprits=(1,),
    first_divergence=FirstDivergence(
        6, "dp_shard", "backward", "model.layers.1",
        {"0": RankSide("reduce_scatter", 100, "float32"),
         "1": RankSide("reduce_scatter", 60, "float32", ("model.layers.1.mlp.experts.3.up",))},
    ),
)  # fmt: skip


def test_findings_of_the_hunt_concern_a_family_or_an_axis() -> None:
    afmoe = Entry(("packing",), "unreported", "page", "masks", families=("afmoe",))
    tp = Entry(("layouts",), "unreported", "page", "heads", families=("doge",), ways=("tp-size",))
    any_ep = Entry(("layouts",), "known", "link", "refused", ways=("ep-size-empty",))
    any_model = Entry(("trainer",), "known", "link", "loss")
    shards = Entry(("generate",), "known", "link", "rows", ("kimi",), ways=("fsdp-size",))
    both = (afmoe, tp, any_ep, any_model, shards)
    assert [e for e in both if e.concerns("afmoe", ["dp_shard"])] == [afmoe]
    assert [e for e in both if e.concerns("doge", ["tp", "dp_shard"])] == [tp]
    assert [e for e in both if e.concerns("doge", ["ep"])] == [any_ep]
    assert [e for e in both if e.concerns("kimi", ["dp_shard"])] == [shards]
    assert [e for e in both if e.concerns("kimi", ["tp"])] == []
    assert "masks (not reported: page)" in page(result(found=(afmoe,)))


def test_the_time_on_the_wires() -> None:
    """Of 64 ranks, 8 on a node: tp stays inside, dp_shard crosses nodes, and so do replicas."""
    layout = {"dp_replicate": 2, "dp_shard": 4, "tp": 8}
    shards = dataclasses.replace(LAYER, replicas=2)
    tp = dataclasses.replace(LAYER, axis="tp", shards=8)
    costs = check_cost.by_axis([shards, tp])
    found = check_cost.wires(costs, layout, 64, check_cost.Bandwidth(400.0, 50.0, 8, step=1e-6))
    outer, replicas, inner = found
    assert outer.between and outer.gbps == 50.0 and not inner.between and inner.gbps == 400.0
    # 2 units x 100 elements x 4 bytes, gathered twice and reduced once, three quarters sent.
    assert (
        outer.bytes == 1800 and outer.seconds == 1800 / 50e9 and outer.share == pytest.approx(0.036)
    )
    assert replicas.bytes == 2 * 2 * 100 // 2 and replicas.between
    alone = check_cost.wires(costs, layout, 8, check_cost.Bandwidth(400.0, 50.0, 8))
    assert not any(wire.between for wire in alone) and alone[0].share is None


def judged(name: str, diagnosis: Diagnosis) -> JudgedCase:
    return JudgedCase(SimulatedCase(name, "an expert is idle", [1], name), diagnosis)


def result(checked: Checked = CHECKED, *cases: JudgedCase, **changes: object) -> CheckResult:
    found = CheckResult(
        config="config.json", layout=Layout({"dp_shard": 4}), ranks=4,
        versions={"transformers": "4.53.2"}, checked=checked, cases=cases,
        costs=check_cost.by_axis(checked.units),
        memory=check_cost.memory(checked.plan, checked.units), fit=None, wires=(), found=(),
        dtypes="", known=(), not_seen=tuple(checked.not_seen), folder=Path("out"),
    )  # fmt: skip
    return dataclasses.replace(found, **changes)  # type: ignore[arg-type]


def page(found: CheckResult) -> str:
    return "\n".join(plain(line) for line in answer_views.lines(check_page.answer(found), 400))


# ------------------------------------------------------------------------ the question


def test_a_configuration_is_a_folder_a_file_or_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "config.json"
    with pytest.raises(UsageError, match=r"no config\.json"):
        check_request.find_config(str(tmp_path))
    file.write_text("{}")
    assert (
        check_request.find_config(str(tmp_path))
        == check_request.find_config(str(file))
        == file.resolve()
    )
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UsageError) as caught:
        check_request.find_config("org/model")
    assert "hf download org/model config.json" in caught.value.help_text
    cached = tmp_path / "models--org--model" / "snapshots" / "1" / "config.json"
    cached.parent.mkdir(parents=True)
    cached.write_text("{}")
    assert check_request.find_config("org/model") == cached


def test_of_several_snapshots_refs_main_names_the_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    model = tmp_path / "models--org--model"
    files = {name: model / "snapshots" / name / "config.json" for name in ("0a", "7b", "ff")}
    for file in files.values():
        file.parent.mkdir(parents=True)
        file.write_text("{}")
    with pytest.raises(UsageError, match=r"3 snapshots, and no refs/main") as caught:
        check_request.find_config("org/model")
    assert str(files["0a"]) in caught.value.help_text
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("7b\n")
    assert check_request.find_config("org/model") == files["7b"]
    files["7b"].unlink()  # main's configuration was not downloaded: not that of another revision
    with pytest.raises(UsageError, match="no model of that name"):
        check_request.find_config("org/model")


def test_the_number_of_ranks() -> None:
    layout = Layout({"dp_shard": 16, "ep": 16, "tp": 8})
    assert check_request.number_of_ranks(layout, None) == 2048
    assert check_request.number_of_ranks(layout, 256) == 256  # tp inside ep
    with pytest.raises(LayoutError, match="--world is 512"):
        check_request.number_of_ranks(layout, 512)
    with pytest.raises(LayoutError):
        check_request.number_of_ranks(Layout({"dp_shard": 2, "tp": 8, "ep": 4}), 8)  # ep < tp


# ------------------------------------------------------------------------ cost


def test_the_cost_of_a_step() -> None:
    (cost,) = check_cost.by_axis([ROOT, LAYER])
    assert (cost.all_gathers, cost.reduce_scatters, cost.all_reduces) == (5, 3, 0)
    assert cost.gathered == (40 + 2 * 2 * 100) * 4 and cost.reduced == (40 + 2 * 100) * 4
    assert cost.padding == 2 * 2 * 10 * 4
    assert cost.sent == (cost.gathered + cost.reduced) * 3 // 4
    memory = check_cost.memory([EXPERTS], [ROOT, LAYER])
    assert (memory.parameters, memory.optimizer, memory.largest_gather) == (512, 1024, 400)
    assert memory.resident == 160  # the root, beside the largest layer
    assert memory.total == 512 + 512 + 1024 + 160 + 400


@pytest.mark.parametrize(
    ("dims", "rule", "gradient"),
    [((0,), "embedding_rowwise", 128), ((0, 0), "embedding_rowwise", 64), ((0,), "colwise", 64)],
)
def test_the_gradient_of_an_embedding_stays_whole_unless_fsdp_divides_it(
    dims: tuple[int, ...], rule: str, gradient: int
) -> None:
    slices = [MeshSlice(axis, 2, dim) for axis, dim in zip(("tp", "fsdp"), dims, strict=False)]
    row = dataclasses.replace(
        EXPERTS, count=1, shape=[8, 16], slices=slices, most=64, rule=f"tp_plan model.w: {rule}"
    )
    memory = check_cost.memory([row], [])
    assert (memory.parameters, memory.gradients) == (64 * row.element, gradient * row.element)


def recorded(*calls: tuple[str, int]) -> Evidence:
    """A job whose last step is its third."""
    made = tuple(
        Collective(n, "0", n, op, size, size, "float32", step=3, parameters=("p",))
        for n, (op, size) in enumerate(calls)
    )
    early = Collective(99, "0", 99, "all_gather", 7, 7, "float32", step=1, parameters=("p",))
    made = (early, *made)
    groups = {"0": Group("0", (0, 1, 2, 3), axis="dp_shard")}
    return Evidence(4, {0: RankEvidence(0, collectives=made, groups=groups)})


def test_the_formula_is_held_against_recorded_calls() -> None:
    gathers = [("all_gather", 40), *[("all_gather", 100)] * 4]
    reductions = [("reduce_scatter", 40), *[("reduce_scatter", 100)] * 2]
    assert check_cost.as_recorded([ROOT, LAYER], recorded(*gathers, *reductions)) == ""
    told = check_cost.as_recorded([ROOT, LAYER], recorded(*gathers[1:], *reductions))
    assert check_cost.as_recorded(iter([ROOT, LAYER]), recorded(*gathers, *reductions)) == ""
    assert "all_gather on dp_shard: 5 calls" in told and "reduce_scatter" not in told


# ------------------------------------------------------------------------ answer and page


def test_exit_codes() -> None:
    fails = CheckFinding("plan", FAILS, "it fails", "transformers/a.py:1")
    may = CheckFinding("plan", MAY_FAIL, "if so, it fails")
    assert result(CHECKED, judged("control", CLEAN)).state.exit_code == 0
    assert result(dataclasses.replace(CHECKED, findings=[may])).state.exit_code == 0
    assert result(dataclasses.replace(CHECKED, findings=[fails])).state.exit_code == 1
    assert result(CHECKED, judged("idle", PARTED)).state.exit_code == 1
    assert result(Checked(problem="unknown model")).state.exit_code == 3
    assert result(CHECKED, not_seen=("the schedule: it raised",)).state.exit_code == 3


def test_the_page_of_what_fails_names_call_parameters_and_condition() -> None:
    text = page(result(CHECKED, judged("idle", PARTED), judged("other", PARTED)))
    assert "CHECK    failure found: WILL FAIL" in text
    assert text.count("FAILS") == 2, "each place once, and as a reason"
    assert "If an expert is idle, the ranks diverge at call 6 on axis dp_shard, in backward" in text
    assert "rank 1: reduce_scatter of 60 elements" in text and "experts.3.up" in text
    assert "Also if an expert is idle." in text


def test_the_page_of_what_was_not_decided_claims_nothing() -> None:
    text = page(result(Checked(problem="unknown model")))
    assert "CHECK    inconclusive" in text and "NOT SEEN unknown model" in text
    assert "agree" not in text and "no failure" not in text


def test_a_table_wider_than_the_terminal_has_a_parameter_on_lines_of_its_own() -> None:
    found = result(CHECKED, judged("control", CLEAN))
    for width, alone in ((40, True), (400, False)):
        told = [plain(line) for line in answer_views.lines(check_page.answer(found), width)]
        assert any(line.strip() == "parameter:" for line in told) is alone
        assert max(map(len, told)) <= width


def test_the_page_says_how_many_layers_each_stage_of_a_pipeline_has() -> None:
    stages = dataclasses.replace(CHECKED, parameters=46_300_000, stages=[16] * 6 + [15] * 2)
    text = page(result(stages, layout=Layout({"pp": 8}), ranks=8))
    assert "pp=8, 8 ranks, 6 stages of 16 and 2 stages of 15 layers" in text
    assert "46.3 million parameters" in text


def test_the_page_of_a_clean_check() -> None:
    text = page(result(CHECKED, judged("control", CLEAN)))
    assert "CHECK    no failure found: SAFE" in text and "FAILS" not in text
    assert "the calls of simulated ranks agree" in text
    assert "4 of 16 experts on a rank; each expert is held once" in text
    assert "9% of the gathered bytes are padding" in text
    assert "NOT SEEN activations" in text


def test_ranks_without_logs_do_not_agree() -> None:
    """Nothing is known of them: neither that they agree nor that they part."""
    logs = Evidence(2, {rank: RankEvidence(rank) for rank in range(2)}, watched=True)
    nothing = diagnose(logs)
    found = result(CHECKED, JudgedCase(CONTROL, nothing))
    text = page(found)
    assert "CHECK    inconclusive" in text and f"NOT SEEN the schedule: {nothing.cause}" in text
    assert "agree" not in text.replace(nothing.cause, "")
    assert found.state.exit_code == ExitCode.INCONCLUSIVE
    assert check_result.to_json(found)["not_seen"] == [f"the schedule: {nothing.cause}"]


def test_simulated_ranks_that_fail_without_diverging_are_told() -> None:
    crashed = Diagnosis(Verdict.CRASH, "crash", Confidence.HIGH, cause="Rank 1 failed.")
    text = page(result(CHECKED, judged("a", crashed)))
    assert "the ranks' schedules differ: Rank 1 failed." in text


def test_ranks_that_a_simulated_router_parts_show_nothing() -> None:
    """Its weights differ between simulated ranks, not between real ones."""
    parted = JudgedCase(dataclasses.replace(CONTROL, routed=False), PARTED)
    found = result(CHECKED, parted)
    assert not parted.parts and found.state.exit_code == ExitCode.INCONCLUSIVE
    assert "with other weights on each rank" in found.undecided
    agreeing = result(CHECKED, JudgedCase(parted.case, CLEAN))
    assert agreeing.state.exit_code == ExitCode.OK


def test_a_condition_without_logs_is_left_out_of_those_that_agree() -> None:
    nothing = dataclasses.replace(CLEAN, verdict=Verdict.INCONCLUSIVE, cause="no log")
    found = result(CHECKED, JudgedCase(CONTROL, CLEAN), judged("idle", nothing))
    text = page(found)
    assert "the calls of simulated ranks agree" in text and "also if" not in text
    assert "NOT SEEN the schedule if an expert is idle: no log" in text
    assert found.state.exit_code == ExitCode.INCONCLUSIVE
    failing = result(CHECKED, JudgedCase(CONTROL, nothing), judged("idle", PARTED))
    assert failing.state.exit_code == ExitCode.FAILURE_FOUND and "agree" not in page(failing)


def test_json_has_the_same() -> None:
    found = check_result.to_json(result(CHECKED, judged("idle", PARTED)))
    assert found["exit_code"] == 1 and found["cases"][0]["parts"] is True
    assert found["cases"][0]["first_divergence"]["ranks"]["1"]["numel"] == 60
    assert found["units"][1]["gathered"] == 100 and found["schema_version"] == 1


def test_scenarios_that_concern_a_model() -> None:
    axes = ["dp_shard"]
    measured = {"transformers": "4.53.2", "torch": "2.13.0"}
    found = known_scenarios.concerning("qwen3_moe", axes, "fsdp2", measured)
    assert found[0].measured
    assert "expert-starvation" in [one.name for one in found if one.measured]
    later = known_scenarios.concerning("qwen3_moe", axes, "fsdp2", {"transformers": "5.23.0"})
    assert "expert-starvation" in [one.name for one in later if not one.measured]
    assert known_scenarios.concerning("no_such_family", axes, "fsdp2", measured) == ()


def test_sizes_of_token_exchanges_are_not_compared() -> None:
    call = Collective(0, "0", 0, "all_to_all", 4, 8, "int64", splits_in=(1, 3), splits_out=(4, 4))
    seen = check._without_counts(RankEvidence(0, collectives=(call,)))
    assert seen.collectives[0].splits_in is None and seen.collectives[0].numel_in == 0


def test_mixed_precision_and_optimizer_states() -> None:
    """Gathered in 2 bytes and reduced in 4; states by the optimizer's own rule."""
    unit = dataclasses.replace(LAYER, element=2, reduced_element=4)
    (cost,) = check_cost.by_axis([unit])
    assert (cost.gathered, cost.reduced) == (2 * 2 * 100 * 2, 2 * 100 * 4)
    own = 2 * 64  # elements of the rank that holds most
    vector = dataclasses.replace(EXPERTS, name="norm.weight", count=1, shape=[8], most=8, least=8)
    expected = {
        "adamw": 8 * own, "adamw-fused": 8 * own, "adamw-8bit": 2 * own + 2 * 2 * 4, "sgd": 0,
        "muon": 4 * own, "none": 0, "adafactor": 2 * 16 * (4 + 4) * 4 // 4,
    }  # fmt: skip
    for name, bytes_ in expected.items():
        assert check_cost.memory([EXPERTS], [unit], name).optimizer == bytes_, name
    assert check_cost.memory([EXPERTS], [unit], "sgd", master=True).optimizer == 4 * own
    half = dataclasses.replace(EXPERTS, element=2)
    mixed = check_cost.memory([half], [unit], master=True)  # the states are float32 too
    assert (mixed.optimizer, mixed.step) == ((4 + 8) * own, 4 * own)
    assert check_cost.memory([half], [unit]).step == 2 * own
    assert check_cost.memory([half], [unit], "adamw-fused").step == 0
    assert check_cost.memory([vector], [unit], "muon").optimizer == 2 * 8 * 4  # as AdamW
    assert check_cost.memory([vector], [unit], "adafactor").optimizer == 8 * 4


def test_the_page_says_which_dtypes_were_used() -> None:
    row = dataclasses.replace(EXPERTS, dtype="bfloat16", element=2)
    kept = dataclasses.replace(EXPERTS, name="gate", count=1)
    known = dataclasses.replace(
        CHECKED, plan=[row, kept], dtype="bfloat16", dtype_from="the configuration's"
    )
    options = check.CheckOptions("c", {}, optimizer="sgd", master=True, reduce_dtype="float32")
    words = check._dtypes(known, options)
    assert words == (
        "parameters bfloat16 (the configuration's), 1 parameter float32; gathered in bfloat16, "
        "gradients reduced in float32; sgd: no state (no momentum), and a float32 copy of each "
        "parameter"
    )
    assert words in page(result(known, dtypes=words))
    fused = dataclasses.replace(options, optimizer="adamw-fused")
    assert "adamw-fused: two moments in float32, and" in check._dtypes(known, fused)
    own = dataclasses.replace(fused, master=False)
    assert "adamw-fused: two moments in the parameters' dtype" in check._dtypes(known, own)
    assert check._dtypes(Checked(), options) == ""
