"""What must divide what on the axes of `moediag check` that no plan shows."""

from __future__ import annotations

from pathlib import Path

import pytest

transformers = pytest.importorskip("transformers")

from moediag.axes import Layout  # noqa: E402
from moediag.lab.check import divisions  # noqa: E402
from moediag.protocol import (  # noqa: E402
    FAILS,
    MAY_FAIL,
    NOTE,
    Checked,
    PlannedParameter,
)
from tests.unit.worker.checked_model import SMALL, checked  # noqa: E402


def test_a_sequence_is_cut_into_two_parts_for_each_rank_of_cp() -> None:
    layout = Layout({"dp_shard": 2, "cp": 4})
    assert list(divisions.of_length(layout, 4096)) == []
    (found,) = divisions.of_length(layout, 4100)
    assert found.level == FAILS and "4,100 tokens are not a multiple of 8" in found.text
    (unknown,) = divisions.of_length(layout, 0)
    assert unknown.level == NOTE and "--length" in unknown.text
    assert list(divisions.of_length(Layout({"dp_shard": 8}), 4097)) == []


def test_sizes_that_a_framework_divides_equally() -> None:
    config = transformers.Qwen3MoeConfig(**{**SMALL, "num_hidden_layers": 4})

    def found(**axes: int) -> list[str]:
        told = list(divisions.unplanned(config, Layout(axes)))
        assert all(one.level == MAY_FAIL for one in told)
        return [one.text.partition(": ")[2] for one in told]

    assert found(ep=8, etp=2, tp=2, pp=2) == []
    assert found(ep=3) == ["8 cannot be divided by ep=3"]
    assert found(etp=5) == ["16 cannot be divided by etp=5"]
    assert found(tp=4) == ["2 cannot be divided by tp=4"]  # only the key/value heads
    assert found(pp=3) == ["4 cannot be divided by pp=3"]
    dense = transformers.LlamaConfig(num_hidden_layers=4)  # no experts: nothing to divide over etp
    assert list(divisions.unplanned(dense, Layout({"ep": 3, "etp": 5}))) == []


def stage(elements: int, *stages: int) -> Checked:
    row = PlannedParameter("model.layers.*.weight", 1, [elements], "float32", 4, most=elements)
    return Checked(plan=[row], stages=list(stages))


def test_the_stages_of_a_pipeline() -> None:
    (told,) = divisions.of_stages({0: stage(20, 2, 2, 2, 2)}, 0)
    assert told.level == NOTE and "the stages hold 2 layers each. The plan" in told.text
    uneven = {0: stage(80), 7: stage(160, 16, 16, 16, 16, 16, 16, 15, 15)}
    (told,) = divisions.of_stages(uneven, 7)
    assert "pp=8: 6 stages of 16 and 2 stages of 15 layers. The plan" in told.text
    assert "stage 7, which holds most: 2.00 times" in told.text
    (told,) = divisions.of_stages({0: stage(9, 1, 1, 1, 1, 0, 0, 0, 0)}, 0)
    assert told.level == FAILS and "4 of pp=8 stages hold no layer, the last one 0" in told.text
    assert list(divisions.of_stages({0: stage(10)}, 0)) == []  # no pipeline


def test_a_parameter_in_two_stages_is_told() -> None:
    def stage_of(*names: str) -> Checked:
        return Checked(plan=[PlannedParameter(n, 1, [4], "float32", 4, most=4) for n in names])

    first, last = stage_of("embed.weight", "layers.*.w"), stage_of("layers.*.w", "norm.weight")
    assert list(divisions.shared_by_stages({0: first, 1: first, 3: last})) == []
    assert list(divisions.shared_by_stages({0: first})) == []  # no pipeline
    tied = stage_of("embed.weight", "layers.*.w", "norm.weight")
    (found,) = divisions.shared_by_stages({0: first, 1: last, 3: tied})
    assert found.level == MAY_FAIL
    assert found.text.startswith("stages 0 and 3 of pp each hold embed.weight: one parameter in")


@pytest.mark.filterwarnings("ignore:Slicing a flattened dim")
def test_fully_shard_shards_over_context_parallel_ranks(tmp_path: Path) -> None:
    found = checked(tmp_path, {"dp_shard": 4, "cp": 2}, length=64)
    assert found.problem == "" and not [f for f in found.findings if f.level == FAILS]
    rows = {row.name: row for row in found.plan}
    assert rows["model.layers.*.self_attn.q_proj.weight"].most == 32 * 32 // 8
    assert {unit.shards for unit in found.units} == {8}
    assert any("keys and values" in text for text in found.not_seen)


@pytest.mark.filterwarnings("ignore:Slicing a flattened dim")
def test_a_length_that_cp_cannot_cut_fails(tmp_path: Path) -> None:
    found = checked(tmp_path, {"dp_shard": 4, "cp": 2}, length=66)
    assert any(f.level == FAILS and "not a multiple of 4" in f.text for f in found.findings)


def test_a_layout_that_nothing_here_shards_is_still_divided(tmp_path: Path) -> None:
    found = checked(tmp_path, {"dp_shard": 2, "etp": 5}, "transformers")
    assert "no mesh axis etp" in found.problem and found.experts == 8
    assert [f.level for f in found.findings] == [MAY_FAIL]
