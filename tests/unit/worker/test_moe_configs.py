"""Configuration classes that name experts, tiny models of them, and guards, in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

pytest.importorskip("transformers")

from transformers import MixtralConfig, Qwen3MoeConfig
from transformers.models.mixtral.modeling_mixtral import MixtralForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeForCausalLM

from moediag.lab.step.models import moe_configs, release_families, tiny_family
from moediag.lab.step.models.moe_configs import Found
from moediag.lab.step.models.release_families import ReleaseFamily
from moediag.protocol import SIZES
from scenarios.programs import router_logits_guard as guards

QWEN = Found(Qwen3MoeConfig, Qwen3MoeForCausalLM, has_loss=True)
MIXTRAL = Found(MixtralConfig, MixtralForCausalLM, has_loss=True)


class Config:
    """A configuration with other names for its experts."""

    def __init__(self, **fields: object) -> None:
        self.__dict__.update(fields)

    def get_text_config(self) -> object:
        return self.__dict__.get("text_config", self)


def takes(guard: str, config: Config) -> list[object]:
    return guards.GUARDS[guard](config)


def test_fields_that_count_routed_experts_are_found() -> None:
    config = Config(
        num_experts=8, n_routed_experts=8, moe_num_experts=8, num_experts_per_tok=2,
        n_shared_experts=1, num_shared_experts=1,
        attribute_map={"num_local_experts": "num_experts"},
    )  # fmt: skip
    assert moe_configs.experts_named(config) == [
        "moe_num_experts", "n_routed_experts", "num_experts", "num_local_experts",
    ]  # fmt: skip
    assert moe_configs.experts_named(Config(hidden_size=8)) == []


def test_each_guard_checks_its_field() -> None:
    local, dense = Config(num_local_experts=8), Config(num_local_experts=0, num_experts=None)
    assert takes("num_local_experts", local) == [local]
    assert takes("num_experts", local) == []
    assert takes("any", local) == [local]
    assert not any(takes(guard, dense) for guard in guards.GUARDS)
    hidden = Config(text_config=Config(n_routed_experts=8, output_router_logits=False))
    assert takes("any", hidden) == []
    assert takes("any-in-text-config", hidden) == [hidden.get_text_config()]
    assert takes("own-switch", hidden) == [hidden.get_text_config()]
    assert takes("own-switch", local) == []


@pytest.mark.parametrize("found", [QWEN, MIXTRAL], ids=lambda f: f.name)
def test_a_tiny_model_trains_its_router_by_the_loss(found: Found) -> None:
    seen = guards.Measured(found)
    assert seen.why_not == ""
    assert seen.proven
    assert all("gate" in fqn for fqn in seen.share)
    assert seen.largest is not None
    assert seen.largest > 1e-4


@pytest.mark.parametrize("found", [QWEN, MIXTRAL], ids=lambda f: f.name)
def test_a_guard_fails_if_the_release_has_another_name(found: Found) -> None:
    seen = guards.Measured(found)
    named = moe_configs.experts_named(found.config())
    for guard in guards.THREE:
        errors = seen.errors(guard)
        assert set(errors) == set(seen.share)
        assert all(error.wrong is (guard not in named) for error in errors.values()), guard
        assert seen.answer(guard) == ("on" if guard in named else "OFF")
    for guard in ("any", "any-in-text-config", "own-switch", "always"):
        assert not any(error.wrong for error in seen.errors(guard).values()), guard


def test_the_token_loss_does_not_show_the_auxiliary_loss() -> None:
    """A weaker detector: the logits, and so the loss of the tokens, are the same."""
    model = guards.build(QWEN)
    ids = torch.arange(3, 19)[None]
    with torch.no_grad():
        logits = [model(input_ids=ids, output_router_logits=on).logits for on in (True, False)]
    assert torch.equal(*logits)


def test_a_class_that_cannot_be_built_is_reported_and_not_judged() -> None:
    class Broken:
        def __init__(self, config: object) -> None:
            raise TypeError("no\nsuch thing")

    seen = guards.Measured(Found(Qwen3MoeConfig, Broken, has_loss=True))
    assert not seen.proven
    assert seen.why_not == "TypeError: no"
    assert seen.largest is None


def test_configuration_classes_of_the_release_are_found() -> None:
    with_loss = {found.name: found for found in moe_configs.find(with_loss=True)}
    assert with_loss["MixtralConfig"].model is MixtralForCausalLM
    assert all(found.has_loss for found in with_loss.values())
    assert "LlamaConfig" not in with_loss
    assert "DeepseekV3Config" not in with_loss, "it names experts, and has no such loss"


# ------------------------------------------------------------------------ families of the release


def family(name: str) -> ReleaseFamily:
    found = release_families.find(name)
    assert found is not None
    return found


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_a_family_is_built_at_two_sizes_the_same_each_time(name: str) -> None:
    states = []
    for size in SIZES:
        one, two = (tiny_family.build(family(name), size, seed=3).state_dict() for _ in range(2))
        assert all(torch.equal(one[key], two[key]) for key in one)
        assert sum(tensor.numel() for tensor in one.values()) < tiny_family.LARGEST
        states.append(one)
    gate = next(key for key in states[0] if key.endswith("gate.weight"))
    assert [state[gate].shape for state in states] == [(4, 32), (6, 64)]


def test_no_saved_tensor_keeps_its_initial_value() -> None:
    state = tiny_family.build(family("mixtral"), SIZES[0]).state_dict()
    assert not any((tensor == 1).any() or (tensor == 0).any() for tensor in state.values())


def test_a_family_that_the_rules_do_not_build_says_why() -> None:
    class Odd:
        def __init__(self, size: int = 1) -> None:
            raise TypeError("size is\nodd")

    with pytest.raises(tiny_family.NotBuilt, match="TypeError: size is odd"):
        tiny_family.build(ReleaseFamily("odd", Odd, "MixtralForCausalLM"), SIZES[0])


class Renamed:
    """A configuration that keeps the number of its experts under another name."""

    attribute_map: ClassVar = {"num_experts": "num_local_experts"}

    def __init__(self, num_experts: int = 128, hidden_size: int = 64, top_k: int = 8) -> None:
        self.num_local_experts, self.hidden_size, self.top_k = num_experts, hidden_size, top_k

    def get_text_config(self) -> object:
        return self


def test_a_renamed_field_gets_its_size() -> None:
    made = next(tiny_family.configurations(ReleaseFamily("renamed", Renamed, ""), SIZES[0]))
    assert (made.num_local_experts, made.hidden_size, made.top_k) == (4, 32, 2)


def test_a_family_that_keeps_its_many_experts_is_not_tiny() -> None:
    class Fixed(Renamed):
        def __init__(self, num_experts: int = 128, hidden_size: int = 64, top_k: int = 8) -> None:
            super().__init__(128, hidden_size, top_k)

    with pytest.raises(tiny_family.NotBuilt, match="changes its number of experts"):
        tiny_family.build(ReleaseFamily("fixed", Fixed, "MixtralForCausalLM"), SIZES[0])


def test_experts_that_are_off_by_default_are_built() -> None:
    """As in Flint (the first layers are dense), Doge and Gemma 4 of transformers 5.23.0."""

    class Off(Renamed):
        def __init__(
            self, num_experts: int = 128, hidden_size: int = 64, top_k: int = 8,
            enable_moe_block: bool = False, mlp_only_layers: tuple[int, ...] = (0, 1),
        ) -> None:  # fmt: skip
            super().__init__(num_experts, hidden_size, top_k)
            self.enable_moe_block, self.mlp_only_layers = enable_moe_block, mlp_only_layers

    made = next(tiny_family.configurations(ReleaseFamily("off", Off, ""), SIZES[0]))
    assert (made.enable_moe_block, made.mlp_only_layers) == (True, [0])


def test_an_encoder_that_generates_text_is_built_as_a_decoder() -> None:
    """As Bert and Electra; a nested configuration keeps its own word."""

    class Encoder(Renamed):
        def __init__(
            self, num_experts: int = 128, hidden_size: int = 64, top_k: int = 8,
            is_decoder: bool = False,
        ) -> None:  # fmt: skip
            super().__init__(num_experts, hidden_size, top_k)
            self.is_decoder = is_decoder

    made = next(tiny_family.configurations(ReleaseFamily("encoder", Encoder, ""), SIZES[0]))
    assert made.is_decoder is True


def test_a_model_without_a_layer_with_experts_is_not_built() -> None:
    from transformers import Qwen3MoeConfig

    class Dense(Qwen3MoeConfig):  # type: ignore[misc]
        def __init__(self, **fields: Any) -> None:
            fields["mlp_only_layers"] = list(range(48))
            super().__init__(**fields)

    with pytest.raises(tiny_family.NotBuilt, match="no layer of it has experts"):
        tiny_family.build(ReleaseFamily("dense", Dense, "Qwen3MoeForCausalLM"), SIZES[0])


def test_model_types_of_the_release_are_listed_with_their_kind() -> None:
    listed = {one.name: one for one in release_families.listed()}
    assert listed["mixtral"].kind == listed["qwen3_moe"].kind == "moe"
    assert listed["llama"].kind == "dense"
    assert not listed["mixtral"].same_as


class OwnMixtralConfig(MixtralConfig):  # type: ignore[misc]
    """Another model type for the class of mixtral, as sarvam_moe is for that of glm4_moe."""

    model_type = "own_mixtral"


@pytest.fixture
def own_mixtral(monkeypatch: pytest.MonkeyPatch) -> None:
    """A release with a few model types, one of them own_mixtral."""
    from transformers import CONFIG_MAPPING

    mapped = release_families._mapped()
    few = {name: mapped[name] for name in ("mixtral", "llama4", "llama4_text")}
    few["own_mixtral"] = few["mixtral"]
    monkeypatch.setattr(release_families, "_mapped", lambda: few)
    monkeypatch.setattr(release_families, "_may_have_experts", lambda _: True)
    monkeypatch.setitem(CONFIG_MAPPING._extra_content, "own_mixtral", OwnMixtralConfig)


@pytest.mark.usefixtures("own_mixtral")
def test_a_model_type_with_another_configuration_can_be_built_by_itself() -> None:
    listed = {one.name: (one.same_as, one.own_config) for one in release_families.listed()}
    assert listed == {
        "mixtral": ("", False),
        "own_mixtral": ("mixtral", True),
        "llama4_text": ("", False),
        "llama4": ("llama4_text", False),  # its class takes a part of its configuration
    }


@pytest.mark.usefixtures("own_mixtral")
def test_a_model_is_built_and_loaded_with_its_own_configuration(tmp_path: Path) -> None:
    family = release_families.find("own_mixtral")
    assert family is not None
    model: Any = tiny_family.build(family, SIZES[0])
    assert (type(model), type(model.config)) == (MixtralForCausalLM, OwnMixtralConfig)
    model.save_pretrained(tmp_path)
    again = release_families.from_pretrained(type(model), type(model.config), str(tmp_path))
    assert type(again.config) is OwnMixtralConfig
    alone = release_families.from_pretrained(MixtralForCausalLM, MixtralConfig, str(tmp_path))
    assert type(alone.config) is MixtralConfig
