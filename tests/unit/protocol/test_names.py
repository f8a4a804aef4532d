"""Names without what wrappers add."""

from __future__ import annotations

import pytest

from moediag.protocol.names import clean_fqn, is_router, plain_name


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("_fsdp_wrapped_module.layers.0._fsdp_wrapped_module.w", "layers.0.w"),
        ("_orig_mod.layers.0._checkpoint_wrapped_module.w", "layers.0.w"),
        ("a._fsdp_wrapped_module._checkpoint_wrapped_module.w", "a.w"),
        ("a._fsdp_wrapped_module._orig_mod", "a"),
        ("a._fsdp_wrapped_module.", "a."),
        ("_fsdp_wrapped_module.", ""),
        ("_orig_mod", ""),
        ("", ""),
        ("_forward_module.module.w", "module.w"),
        ("_original_module.w", "w"),
        ("a._flat_param", "a._flat_param"),
        ("my_orig_mod.w", "my_orig_mod.w"),
        ("module.w", "module.w"),
        ("model.module.weight", "model.module.weight"),
        (None, "None"),
    ],
)
def test_plain_names_have_no_parts_of_wrappers(name: object, expected: str) -> None:
    assert plain_name(name) == expected


def test_only_below_a_forwarding_wrapper_is_module_a_part_of_it() -> None:
    forwarding = ["", "rest._orig_mod", "_forward_module"]
    assert plain_name("module.module.w", forwarding) == "module.w"
    assert plain_name("rest._orig_mod.module.w", forwarding) == "rest.w"
    assert plain_name("other.module.w", forwarding) == "other.module.w"
    assert plain_name("_forward_module.module.w", forwarding) == "w"


def test_a_clean_fqn_has_no_module_at_any_level() -> None:
    name = "module._fsdp_wrapped_module.model.layers.0._checkpoint_wrapped_module.mlp.gate.weight"
    assert clean_fqn(name) == "model.layers.0.mlp.gate.weight"
    assert clean_fqn("_orig_mod.module.a.module.w") == "a.w"
    assert clean_fqn("my_module.weight") == "my_module.weight"


@pytest.mark.parametrize(
    ("name", "is_one"),
    [("layers.0.mlp.gate.weight", True), ("block.moe.gate.wg.weight", True), ("top_router", True),
     ("layers.0.mlp.gate_proj.weight", False), ("mlp.experts.3.gate.weight", False),
     ("shared_expert_gate.weight", False), ("aggregate.weight", False)],
)  # fmt: skip
def test_names_of_routers(name: str, is_one: bool) -> None:
    assert is_router(name) == is_one
