"""The worker's part of `moediag check`: arithmetic, the plan, simulated ranks."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from moediag.axes import Layout  # noqa: E402
from moediag.lab import check  # noqa: E402
from moediag.lab.check import (  # noqa: E402
    checkpoint_names,
    configured,
    divisions,
    expert_owners,
    fsdp_units,
    indexed_pieces,
    loaded_dtypes,
    own_structure,
    placed,
    planned,
    sharding,
    simulated_group,
    simulated_step,
    tensor_places,
)
from moediag.lab.check.plan_rules import Rules  # noqa: E402
from moediag.lab.step.models import moe_configs  # noqa: E402
from moediag.protocol import (  # noqa: E402
    FAILS,
    MAY_FAIL,
    NOTE,
    CheckTask,
    MeshSlice,
    PlannedParameter,
    Trial,
    WrapperSpec,
)
from moediag.recorder.not_applicable import NotApplicable  # noqa: E402
from tests import golden_lines  # noqa: E402
from tests.unit.worker.checked_model import SMALL, checked  # noqa: E402

# ------------------------------------------------------------------------ arithmetic


def test_pieces_are_those_of_chunk() -> None:
    for rows, ranks in itertools.product((1, 7, 8, 16), (1, 2, 4, 8)):
        expected = [len(piece) for piece in torch.arange(rows).chunk(ranks)]
        expected += [0] * (ranks - len(expected))
        found = [len(placed.part(rows, [ranks], [(0, 0, False)], [at])) for at in range(ranks)]
        assert found == expected


def test_pieces_on_two_axes_are_those_of_a_dtensor(tmp_path: Path) -> None:
    """FSDP shards what another axis has divided before: a strided placement on the outer axis."""

    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    def rows_of(rank: int) -> list[int]:
        with simulated_group.joined(rank, 4):
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))
            module = torch.nn.Module()
            rows = torch.arange(10, dtype=torch.float32)[:, None]
            there = distribute_tensor(rows, mesh["ep"], [Shard(0)], src_data_rank=None)
            module.weight = torch.nn.Parameter(there)
            fully_shard(module, mesh=mesh["efsdp"])
            return [int(row) for row in module.weight.to_local().flatten()]

    ours = placed.by_coordinate(10, [2, 2], [(0, 0, True), (1, 0, False)])
    found = simulated_group.in_child(lambda: rows_of(2), tmp_path)
    assert found == [*list(ours.values())[2]]


def test_who_holds_which_experts(tmp_path: Path) -> None:
    """Two ranks of ep hold half of the experts each, and dp_replicate has two copies of them."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    def found(local: int) -> list[Any]:
        with simulated_group.joined(0, 4):
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "ep"))
            model = torch.nn.Module()
            model.experts = torch.nn.Module()
            model.experts.num_experts = local
            weight = distribute_tensor(torch.ones(8, 4, 6), mesh, [Replicate(), Shard(0)])
            model.experts.gate_up_proj = torch.nn.Parameter(weight)
            model.experts.bias = torch.nn.Parameter(torch.ones(8, 4))
            named = list(model.named_parameters())
            held, wrong = expert_owners.owners(model, 8, named, ways=2)
            assert expert_owners.owners(model, 0, named, ways=2) == ([], [])
            return [*held, *(one.text for one in wrong)]

    (held,) = simulated_group.in_child(lambda: found(4), tmp_path)
    assert (held.names, held.experts, held.copies) == (["experts.gate_up_proj"], 8, 2)
    assert held.ranges == [(0, 4), (4, 8)] * 2
    _, wrong = simulated_group.in_child(lambda: found(8), tmp_path)
    assert "tokens are sent for 8 experts to each of 2 ranks, which is not 8 in all" in wrong
    whole = torch.nn.ParameterDict({"experts_w": torch.nn.Parameter(torch.ones(8, 4, 6))})
    model = torch.nn.ModuleDict({"experts": whole})
    (held,), wrong = expert_owners.owners(model, 8, list(model.named_parameters()), ways=1)
    assert (held.copies, held.ranges, wrong) == (1, [(0, 8)], [])


def test_a_mesh_without_names_is_called_mesh(tmp_path: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    def found() -> list[MeshSlice]:
        with simulated_group.joined(0, 4):
            mesh = init_device_mesh("cpu", (2, 2))
            return tensor_places.slices(
                distribute_tensor(torch.ones(4, 2), mesh, [Replicate(), Shard(1)])
            )

    assert simulated_group.in_child(found, tmp_path) == [
        MeshSlice("mesh", 2, None), MeshSlice("mesh", 2, 1),
    ]  # fmt: skip


def test_skewed_ranks_are_half_of_those_with_tokens_of_their_own() -> None:
    assert simulated_step._skewed(Layout({"dp_shard": 2}), 2) == [1]
    assert simulated_step._skewed(Layout({"pp": 2, "dp_shard": 2, "tp": 2}), 8) == [2, 3, 6, 7]
    assert simulated_step._skewed(Layout({"tp": 2}), 2) == [0, 1]


# ------------------------------------------------------------------------ the plan


@pytest.mark.parametrize("own_axis", [True, False])
def test_the_arguments_of_a_release(monkeypatch: pytest.MonkeyPatch, own_axis: bool) -> None:
    """``ep_size``: the release's expert parallelism has an axis of its own."""
    known = {"ep_size": None} if own_axis else {}
    monkeypatch.setattr(sharding.checkpoint, "distributed_fields", lambda: known)
    experts = Layout({"dp_shard": 2, "ep": 2})
    both = Layout({"dp_replicate": 2, "dp_shard": 2, "ep": 2, "tp": 2})
    assert sharding.arguments(Layout({"pp": 2, "dp_shard": 4}), 8) == {"pp_size": 2, "fsdp_size": 4}
    if own_axis:
        assert sharding.arguments(experts, 4) == {"ep_size": 2, "fsdp_size": 4}
        assert sharding.arguments(both, 16) == {
            "dp_replicate_size": 2, "tp_size": 2, "ep_size": 2, "fsdp_size": 4,
        }  # fmt: skip
    else:
        assert sharding.arguments(experts, 4) == {
            "tp_size": 2, "fsdp_size": 2, "enable_expert_parallel": True,
        }  # fmt: skip
        with pytest.raises(NotApplicable, match="divides experts over tp_size"):
            sharding.arguments(both, 16)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (sharding.NATIVE, "from_pretrained with DistributedConfig(fsdp_size=2)"),
        ("fsdp2", "fully_shard of torch on each module of _no_split_modules and on the root"),
    ],
)
def test_what_the_page_says_was_asked(
    monkeypatch: pytest.MonkeyPatch, kind: str, words: str
) -> None:
    monkeypatch.setattr(sharding.checkpoint, "distributed_fields", dict)
    trial = Trial(
        "c", "c", "c", layout={"dp_shard": 2}, world_size=2, wrapper=WrapperSpec(kind=kind)
    )
    assert sharding.words(trial) == words


def test_a_layout_that_a_release_cannot_express_says_what_can() -> None:
    with pytest.raises(NotApplicable, match="no mesh axis cp; --wrapper fsdp2"):
        sharding.arguments(Layout({"dp_shard": 2, "cp": 2}), 4)
    with pytest.raises(NotApplicable, match=r"no mesh axis cp and no etp$"):
        sharding.arguments(Layout({"cp": 2, "etp": 2}), 4)


def row(name: str, *cut: str, routed: bool = False) -> PlannedParameter:
    """A parameter of 10 elements that these axes divide; fsdp divides all others."""
    slices = [MeshSlice(axis, 2, 0) for axis in cut or ("fsdp",)]
    return PlannedParameter(name, 1, [10], "float32", 4, slices, most=5, least=5, routed=routed)


@pytest.mark.parametrize(
    ("axes", "rows", "told"),
    [
        ({"tp": 2}, [row("layers.*.q", "tp")], []),
        ({"tp": 2}, [row("layers.*.q")], ["fails: no parameter is divided over tp=2"]),
        (
            {"tp": 2}, [row("layers.*.q"), row("head", "tp")],
            ["fails: no parameter of a layer is divided over tp=2, only head"],
        ),
        ({"tp": 2}, [row("layers.*.q", "tp"), row("norm")], ["note: norm: whole along tp, 50.0%"]),
        # Only the experts are to be divided over ep.
        ({"ep": 2}, [row("layers.*.w", "ep", routed=True), row("norm")], []),
        (
            {"ep": 2}, [row("layers.*.w", "ep", routed=True), row("layers.*.v", routed=True)],
            ["note: layers.*.v: whole along ep, 50.0%"],
        ),
        ({"dp_shard": 2}, [row("layers.*.q", "efsdp"), row("norm", "dp_shard_cp")], []),
    ],
)  # fmt: skip
def test_axes_that_divide_nothing(
    axes: dict[str, int], rows: list[PlannedParameter], told: list[str]
) -> None:
    plan = planned._Plan.__new__(planned._Plan)
    plan.layout, plan.elements, plan.rules = Layout(axes), 20, SimpleNamespace(file="file")
    plan.trial = SimpleNamespace(wrapper=WrapperSpec(kind=sharding.NATIVE))
    found = [f"{one.level}: {one.text}" for one in plan._undivided(rows)]
    assert len(found) == len(told)
    assert all(one.startswith(start) for one, start in zip(found, told, strict=True)), found
    plan.trial = SimpleNamespace(wrapper=WrapperSpec(kind="fsdp2"))
    assert "dp_shard" in axes or not list(plan._undivided(rows))  # shards over nothing else


def test_the_layers_of_a_stage_are_counted_once() -> None:
    plan = planned._Plan.__new__(planned._Plan)
    names = ("embed", "model.layers.4.q", "model.layers.4.k", "model.layers.15.q", "norm")
    plan.parameters = [(name, None) for name in names]
    assert plan._layers() == 2


def test_the_root_of_fully_shard_stays_gathered_if_that_is_left_to_torch(tmp_path: Path) -> None:
    from torch.distributed.fsdp import fully_shard

    def gathers(**options: bool) -> list[tuple[str, int]]:
        with simulated_group.joined(0, 2):
            model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
            fully_shard(model[0], **options)
            fully_shard(model, **options)
            return sorted((unit.module, unit.gathers) for unit in fsdp_units.units(model))

    assert simulated_group.in_child(gathers, tmp_path) == [("(root)", 1), ("0", 2)]
    again = simulated_group.in_child(lambda: gathers(reshard_after_forward=True), tmp_path)
    assert again == [("(root)", 2), ("0", 2)]


def test_the_plan_of_fully_shard(tmp_path: Path) -> None:
    found = checked(tmp_path, {"dp_shard": 4})
    assert found.problem == "" and found.experts == 8 and found.top_k == 2
    rows = {row.name: row for row in found.plan}
    query = rows["model.layers.*.self_attn.q_proj.weight"]
    assert (query.count, query.shape, query.most, query.least) == (2, [32, 32], 256, 256)
    assert [(one.axis, one.size, one.dim) for one in query.slices] == [("dp_shard", 4, 0)]
    assert rows["model.layers.*.mlp.gate.weight"].most == 2 * 32
    assert "modeling_qwen3_moe.py" in query.where
    assert [(u.module, u.count, u.shards, u.gathers) for u in found.units] == [
        ("(root)", 1, 4, 2),
        ("model.layers.*", 2, 4, 2),
    ]
    assert found.units[1].gathered == found.units[1].elements
    assert found.findings == [] and found.stage_layers == 0


PLANS: dict[str, dict[str, Any]] = {
    "four ranks": {"layout": {"dp_shard": 4}},
    "more ranks than rows": {"layout": {"dp_shard": 16}, "tie_word_embeddings": False},
    "replicas": {"layout": {"dp_replicate": 2, "dp_shard": 2}, "torch_dtype": "bfloat16"},
    "a batch": {"layout": {"dp_shard": 2}, "length": 16, "asked": {"batch": 2}},
    "a brief answer": {
        "layout": {"dp_shard": 2}, "length": 16,
        "asked": {"batch": 2, "recompute": "layers", "brief": True},
    },
}  # fmt: skip


@pytest.mark.skipif(
    (torch.__version__[:4], transformers.__version__) != ("2.13", "4.53.2"),
    reason="lines and bytes of these releases",
)
@pytest.mark.parametrize("name", PLANS)
def test_the_whole_plan(name: str, tmp_path: Path) -> None:
    found = dataclasses.asdict(checked(tmp_path, **PLANS[name]))
    del found["seconds"]
    golden_lines.hold("plans.json", name, filled(found), compact=True)


def filled(part: Any) -> Any:
    """Leaves out fields that are empty or 0."""
    if isinstance(part, dict):
        return {key: filled(one) for key, one in part.items() if one}
    return [*map(filled, part)] if isinstance(part, list) else part


def test_pieces_made_one_by_one_are_those_of_fully_shard() -> None:
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    released = _fsdp_param._chunk_with_empty
    for rows, ranks, dim in itertools.product((0, 1, 7, 8), (1, 2, 3, 8, 20), (0, 1)):
        tensor = torch.arange(rows * rows).reshape(rows, rows)
        with indexed_pieces.installed():
            found = list(_fsdp_param._chunk_with_empty(tensor, ranks, dim))
        expected = released(tensor, ranks, dim)
        assert len(found) == len(expected) == ranks
        for ours, theirs in zip(found, expected, strict=True):
            assert ours.shape == theirs.shape and torch.equal(ours, theirs)
            assert ours.stride() == theirs.stride() or not ours.numel()
    assert _fsdp_param._chunk_with_empty is released


def projection(name: str, rows: int, tp: int) -> PlannedParameter:
    slices = [MeshSlice("tp", tp, 0)]
    return PlannedParameter(
        f"model.layers.*.self_attn.{name}_proj.weight", 2, [rows, 32], "float32", 4, slices,
        most=rows * 32 // tp, least=rows * 32 // tp, routed=False, rule="tp_plan: colwise",
    )  # fmt: skip


def test_a_part_of_a_head_fails_only_where_attention_views_whole_heads() -> None:
    text = transformers.Qwen3MoeConfig(**{**SMALL, "num_key_value_heads": 1})
    query, key = projection("q", 32, 2), projection("k", 8, 2)
    (found,) = planned.partial_heads([query, key], text, lambda _: True)
    assert found.level == FAILS and "gives a rank 0.5 heads; the first forward raises" in found.text
    assert found.text.startswith(f"{key.name} has 8 rows, 1 head of 8: tp=2")
    (found,) = planned.partial_heads([query, key], text, lambda _: False)
    assert found.level == MAY_FAIL and "raises" not in found.text
    text.head_dim = None  # hidden size / heads
    assert len(list(planned.partial_heads([query, key], text, lambda _: True))) == 1
    whole = transformers.Qwen3MoeConfig(**SMALL)
    healthy = [query, projection("k", 16, 2), projection("v", 16, 2)]
    assert list(planned.partial_heads(healthy, whole, lambda _: True)) == []
    assert list(planned.partial_heads([projection("k", 24, 2)], text, lambda _: True)) == []


def test_whether_attention_views_whole_heads_is_read_from_its_source() -> None:
    with torch.device("meta"):
        model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**SMALL))
    plan = planned._Plan.__new__(planned._Plan)
    plan.model = model
    assert plan._views_heads("model.layers.*.self_attn.k_proj.weight")
    assert not plan._views_heads("model.layers.*.mlp.k_proj.weight")
    assert not plan._views_heads("model.absent.k_proj.weight")


def test_tied_parameters_with_other_placements_part(tmp_path: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    def found(one_tensor: bool) -> list[str]:
        with simulated_group.joined(0, 2):
            mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
            model = torch.nn.Module()
            weight = torch.nn.Parameter(distribute_tensor(torch.ones(4, 2), mesh))
            model.embed = weight
            model.head = weight if one_tensor else torch.nn.Parameter(torch.ones(4, 2))
            findings = planned.parted(model, [["embed", "head"], ["gone", "head"]])
            return [f"{one.level}: {one.text}" for one in findings]

    assert simulated_group.in_child(lambda: found(True), tmp_path) == []
    (told,) = simulated_group.in_child(lambda: found(False), tmp_path)
    assert told.startswith("fails: tied parameters part: embed, head have different placements")


def test_replicas_without_shards_are_not_planned(tmp_path: Path) -> None:
    assert "plain data parallelism" in checked(tmp_path, {"dp_replicate": 2}).problem


def test_a_release_that_divides_while_it_loads_is_not_seen(tmp_path: Path) -> None:
    found = checked(tmp_path, {"dp_shard": 2, "ep": 2}, wrapper=sharding.NATIVE)
    assert "transformers" in found.problem and not found.plan and not found.findings


def test_a_model_that_the_release_does_not_know_is_not_seen(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "of-tomorrow"}')
    trial = Trial(name="c", scenario="c", variant="c", task=CheckTask(str(folder)), world_size=2,
                  layout={"dp_shard": 2})  # fmt: skip
    assert "of-tomorrow" in check.run(trial, tmp_path).problem


def test_a_truncated_configuration_is_planned_and_said(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "qwen3_moe", "num_hidden_layers": 1}')
    task = CheckTask(str(folder), simulate=False)
    trial = Trial(name="c", scenario="c", variant="c", task=task, world_size=2,
                  layout={"dp_shard": 2}, wrapper=WrapperSpec(kind="fsdp2"))  # fmt: skip
    found = check.run(trial, tmp_path)
    assert found.plan and any("config.json does not give them" in one for one in found.not_seen)


def test_a_rule_of_the_fsdp_plan_holds_for_all_below_it() -> None:
    """A rule of another plan names the module of the parameter itself."""
    rules = Rules.__new__(Rules)
    rules.native, rules.line = True, lambda _plan, parent: f"line of {parent}"  # type: ignore[method-assign]
    rules.plans = {"tp_plan": {"layers.*": "a", "layers.*.q": "colwise"}, "fsdp_plan": {}}
    assert rules.of("layers.*.q.weight") == ("tp_plan layers.*.q: colwise", "line of layers.*.q")
    assert rules.of("layers.*.k.weight") == ("fsdp_plan: the root", "")
    rules.plans = {"fsdp_plan": {"layers.*": "unit"}}
    assert rules.of("layers.*.k.weight") == ("fsdp_plan layers.*: unit", "line of layers.*")


def test_the_line_of_a_rule_is_that_of_its_plan() -> None:
    class Text:
        pass

    rules = Rules.__new__(Rules)
    rules._text = 'base_model_pp_plan = {\n "norm": 1,\n}\nbase_model_tp_plan = {\n "norm": 2,\n}\n'
    folder = Path(transformers.__file__).parent
    rules.path = str(folder / "models" / "a" / "configuration_a.py")
    assert rules.line("tp_plan", "model.norm") == "transformers/models/a/configuration_a.py:5"
    assert rules.line("fsdp_plan", "model.norm") == rules.line("tp_plan", "model.other") == ""


def test_the_findings_about_rules_and_meshes(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**SMALL))
    rules = Rules.__new__(Rules)
    rules.model, rules.line = model, lambda _plan, pattern: f"line of {pattern}"  # type: ignore[method-assign]
    attention, mlp = "model.layers.*.self_attn", "model.layers.*.mlp"
    rules.plans = {
        "tp_plan": {
            f"{attention}.q_proj": "colwise", "model.*.*.self_attn.k_proj": "rowwise",
            f"{attention}.v_proj": "colwise", "model.layers.*.*.v_proj": "colwise",
            "model.layers.*.*.k_proj": "colwise", f"{mlp}.absent": "colwise",
            f"{mlp}.gate_proj": "rowwise",
        },
    }  # fmt: skip
    spared = "model.*.*.self_attn.k_proj, model.layers.*.*.v_proj, model.layers.*.*.k_proj"
    both = "model.*.*.self_attn.k_proj, model.layers.*.*.k_proj"
    assert [(one.level, one.text.partition(":")[0], one.where) for one in rules.findings()] == [
        (MAY_FAIL, f"tp_plan {mlp}.absent names no module or parameter of this model",
         f"line of {mlp}.absent"),
        (NOTE, f"tp_plan {spared}, {mlp}.gate_proj", "line of model.*.*.self_attn.k_proj"),
        (MAY_FAIL, "tp_plan", "line of model.*.*.self_attn.k_proj"),
    ]  # fmt: skip
    assert f"{both} both name {attention}.k_proj and ask" in [*rules.findings()][-1].text

    def mixed(*kinds: str) -> list[str]:
        plan = planned._Plan.__new__(planned._Plan)
        plan.parameters = [(f"layers.{at}.w", kind) for at, kind in enumerate(kinds)]
        return [f"{one.level}: {one.text}" for one in plan._mixed()]

    monkeypatch.setattr(planned, "axes", lambda parameter: parameter)
    assert mixed("dp", "dp") == mixed("", "") == []
    (text,) = mixed("dp", "", "ep", "dp")
    assert text.startswith("may fail") and "1 plain tensors (layers.*.w) are beside" in text
    assert "DTensors on dp and ep, which" in text
    (text,) = mixed("dp", "ep", "ep")
    assert text.startswith("note: parameters lie on 2 meshes (1 on dp, 2 on ep): clip")


# ------------------------------------------------------------------------ the checkpoint


def stored(folder: Path, **changes: list[int] | None) -> list[str]:
    """Writes a header for the small model, with these shapes (None: no tensor), and returns what is
    found."""
    with torch.device("meta"):
        model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**SMALL))
    header: dict[str, Any] = {name: {"dtype": "F32", "shape": list(tensor.shape)}
                              for name, tensor in model.state_dict().items()}  # fmt: skip
    for name, shape in changes.items():
        header.pop(name)
        if shape is not None:
            header[name] = {"dtype": "F32", "shape": shape}
    text = json.dumps({"__metadata__": {}, **header}).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    return [f"{one.level}: {one.text}" for one in checkpoint_names.findings(folder, model, [])]


def test_the_headers_of_a_checkpoint(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    assert stored(tmp_path) == []
    (lost,) = stored(tmp_path, **{name: None})
    assert lost.startswith("may fail: no file gives 1 parameters (model.layers.*.mlp.experts.*.up_")
    (wrong,) = stored(tmp_path, **{name: [8, 32]})
    assert wrong.startswith("fails: shapes") and f"{name} is [8, 32]" in wrong


def test_a_checkpoint_that_cannot_be_read_is_not_seen(tmp_path: Path) -> None:
    with pytest.raises(checkpoint_names.NotRead, match="no safetensors file"):
        checkpoint_names.shapes(tmp_path)
    file = tmp_path / "model.safetensors"
    nested = b"[" * 200_000
    for header in (nested, b'{"w": {"shape": [1e999]}}', b'{"w": {"shape": ["x"]}}', b'{"w": 1}'):
        file.write_bytes(len(header).to_bytes(8, "little") + header)
        with pytest.raises(checkpoint_names.NotRead, match=r"model\.safetensors"):
            checkpoint_names.shapes(tmp_path)
    file.write_bytes(b"\xff" * 20)
    with pytest.raises(checkpoint_names.NotRead, match=r"model\.safetensors"):
        checkpoint_names.shapes(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": 1, "b": "x"}}')
    with pytest.raises(checkpoint_names.NotRead, match="1, x of its index"):
        checkpoint_names.shapes(tmp_path)


# ------------------------------------------------------------------------ simulated ranks


def test_an_exception_in_a_child_says_where(tmp_path: Path) -> None:
    with pytest.raises(simulated_group.ChildRaised) as caught:
        simulated_group.in_child(lambda: torch.zeros(2).view(3), tmp_path)
    assert caught.value.args[0].kind == "RuntimeError"

    def refuse() -> None:
        raise NotApplicable("not here")

    with pytest.raises(simulated_group.ChildRaised) as caught:
        simulated_group.in_child(refuse, tmp_path)
    assert caught.value.args[0].refused and caught.value.args[0].words == "not here"
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------ dtypes


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_unit_of_two_dtypes_fails(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the release keeps in float32, beside what it loads in the configuration's dtype."""
    class_ = transformers.Qwen3MoeForCausalLM
    monkeypatch.setattr(class_, "_keep_in_fp32_modules_strict", ["gate"])
    found = checked(tmp_path, {"dp_shard": 2}, torch_dtype=dtype)
    texts = [one.text for one in found.findings if one.level == FAILS]
    kept = {row.name for row in found.plan if row.dtype == "float32"}
    assert (found.dtype, found.dtype_from) == (dtype, "the configuration's")
    if dtype == "float32":
        assert not texts and len(kept) == len(found.plan)
        return
    assert kept == {"model.layers.*.mlp.gate.weight"}
    (text,) = texts
    assert text.startswith("model.layers.*.mlp.gate.weight (float32) beside bfloat16 in one FSDP")
    assert text.endswith("AssertionError: FSDP expects uniform original parameter dtype")


def test_names_that_stay_in_float32_match_whole_parts() -> None:
    """Before 5.0 a name is whole parts of a parameter's name, and half precision decides."""
    model = SimpleNamespace(_keep_in_fp32_modules=["wo"], _keep_in_fp32_modules_strict=["gate"])
    if transformers.__version__ >= "5":
        pytest.skip("the release has rules of its own")
    strict = loaded_dtypes.kept(model, torch.bfloat16)
    assert strict is not None and strict.search("a.gate.weight")
    assert not strict.search("a.gate_proj.weight") and not strict.search("a.wo.weight")
    both = loaded_dtypes.kept(model, torch.float16)
    assert both is not None and both.search("a.wo.weight")
    assert loaded_dtypes.kept(model, torch.float32) is None


# ------------------------------------------------------------------------ the user's own structure

GROUPS: dict[str, Any] = dict(
    vocab_size=64, hidden_size=32, intermediate_size=32, moe_intermediate_size=16,
    num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, n_routed_experts=8,
    first_k_dense_replace=1, n_group=4, topk_group=2, num_experts_per_tok=4,
)  # fmt: skip
CHOICES = {
    "more than there are experts": ("qwen3_moe", dict(num_experts=4, num_experts_per_tok=8), True),
    "more than Mixtral has": ("mixtral", dict(num_local_experts=4, num_experts_per_tok=5), True),
    "more than OLMoE has": ("olmoe", dict(num_experts=2, num_experts_per_tok=3), True),
    "all of them": ("qwen3_moe", dict(num_experts=8, num_experts_per_tok=8), False),
    "groups that do not divide": ("deepseek_v3", {**GROUPS, "n_group": 3}, True),
    "five groups of eight": ("dots1", {**GROUPS, "n_group": 5}, True),
    "more groups than experts": ("deepseek_v3", {**GROUPS, "n_group": 16}, True),
    "more groups than there are": ("deepseek_v3", {**GROUPS, "topk_group": 5}, True),
    "more groups than dots.1 has": ("dots1", {**GROUPS, "n_group": 2, "topk_group": 3}, True),
    "groups": ("deepseek_v3", GROUPS, False),
    "groups of dots.1": ("dots1", GROUPS, False),
}


def of_fields(folder: Path, kind: str, fields: dict[str, Any]) -> Any:
    (folder / "config.json").write_text(json.dumps({"model_type": kind, **fields}))
    return configured.read(str(folder))


@pytest.mark.parametrize("name", CHOICES)
def test_a_forward_keeps_the_configurations_own_routing(name: str, tmp_path: Path) -> None:
    kind, fields, raises = CHOICES[name]
    found = own_structure.of_forward(of_fields(tmp_path, kind, fields), tmp_path)
    assert (tmp_path / "own-routing").is_file()  # it ran
    assert [one.level for one in found] == [FAILS] * raises
    if raises:
        assert "a forward raises RuntimeError" in found[0].text
        assert found[0].where.startswith("transformers/models/")
        assert str(fields["num_experts_per_tok"]) in found[0].text


@pytest.mark.parametrize(
    ("groups", "chosen", "top_k", "masked"),
    [(4, 2, 4, 0), (4, 2, 5, 1), (2, 1, 8, 4), (2, 2, 8, 0), (8, 2, 4, 2), (1, 1, 8, 0)],
)
def test_groups_must_have_the_experts_of_a_token(
    groups: int, chosen: int, top_k: int, masked: int, tmp_path: Path
) -> None:
    asked = dict(n_group=groups, topk_group=chosen, num_experts_per_tok=top_k)
    found = list(own_structure._capacity(of_fields(tmp_path, "deepseek_v3", {**GROUPS, **asked})))
    assert [f"{masked} of its experts" in one.text for one in found] == [True] * (masked > 0)


def test_groups_must_divide_the_experts(tmp_path: Path) -> None:
    (odd,) = own_structure._capacity(
        of_fields(tmp_path, "deepseek_v3", {**GROUPS, "n_routed_experts": 10})
    )
    assert "10 experts cannot be divided into n_group=4 equal groups" in odd.text
    other = of_fields(tmp_path, "qwen3_moe", {})
    assert not list(own_structure._capacity(other))


def test_a_routing_bias_that_nothing_updates_is_noted(tmp_path: Path) -> None:
    own = of_fields(tmp_path, "deepseek_v3", GROUPS)
    (found,) = own_structure._never_updated(own)
    assert "mlp.gate.e_score_correction_bias: no gradient" in found.text
    assert not list(own_structure._never_updated(of_fields(tmp_path, "qwen3_moe", SMALL)))


def test_a_composite_is_planned_as_the_model_of_its_text_part(tmp_path: Path) -> None:
    """Its tiny model, too, takes the text part's configuration class."""
    composite = transformers.Llama4Config()
    own = configured.of_config(composite)
    assert own.model is transformers.Llama4ForCausalLM and own.beside == ("vision_config",)
    assert own.family is not None and own.family.name == "llama4_text" and own.experts == 16
    assert "vision_config of the configuration" in check.checking._beside(own)[0]
    composite.architectures = ["Llama4ForConditionalGeneration"]
    whole = configured.of_config(composite)
    assert whole.model is transformers.Llama4ForConditionalGeneration and not whole.beside
    assert whole.family is not None and whole.family.name == "llama4_text"
    assert check.checking._beside(of_fields(tmp_path, "qwen3_moe", SMALL)) == []


def test_a_field_that_its_class_refuses_is_not_read() -> None:
    class ByLayer:
        num_attention_heads = 4

        @property
        def head_dim(self) -> int:
            raise ValueError("varies across layers")

    assert moe_configs.value(ByLayer(), "head_dim") is None
    assert moe_configs.value(ByLayer(), "num_attention_heads") == 4
    assert list(planned.partial_heads([projection("q", 32, 2)], ByLayer(), lambda _: True)) == []
    assert (
        list(divisions.unplanned(SimpleNamespace(get_text_config=ByLayer), Layout({"tp": 2}))) == []
    )


def test_code_in_the_models_own_folder_is_not_run(tmp_path: Path) -> None:
    fields = {"auto_map": {"AutoConfig": "own.Config"}}
    with pytest.raises(NotApplicable, match="the model's code is in its own folder"):
        of_fields(tmp_path, "of-its-own", fields)


def test_defaults_that_the_plan_takes_are_said(tmp_path: Path) -> None:
    (found,) = own_structure.defaults(of_fields(tmp_path, "qwen3_moe", {"hidden_size": 64}))
    assert found.startswith("your num_hidden_layers, num_attention_heads, vocab_size: config.json")
    assert not list(own_structure.defaults(of_fields(tmp_path, "qwen3_moe", SMALL)))
    own = {"n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 64}
    assert not list(own_structure.defaults(of_fields(tmp_path, "gpt2", own)))
