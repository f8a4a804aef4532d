"""The YAML schema mirrors the protocol, knows the field's words, and its JSON Schema is current."""

from __future__ import annotations

import dataclasses
import json
import re
import textwrap
import typing
from pathlib import Path
from typing import Any

import pytest

from moediag import protocol
from moediag.errors import ScenarioError
from moediag.lab.families import FAMILIES
from moediag.lab.scenario import content, sections
from moediag.lab.scenario.catalogue import GROUPS, Summary, find, names, summaries
from moediag.lab.scenario.load import load
from moediag.lab.scenario.plan import plan
from moediag.lab.scenario.schema import Expectation, json_schema
from moediag.result import Role, Verdict

ROOT = Path(__file__).parent.parent.parent.parent


def test_a_section_has_the_fields_of_its_dataclass() -> None:
    """Choices are literals, a field whose type says more in a file keeps its text, and the plan
    writes `every` out."""
    fields = sections.ModelSection.model_fields
    assert list(fields) == [one.name for one in dataclasses.fields(protocol.ModelSpec)]
    assert typing.get_args(fields["dtype"].annotation) == ("float32", "bfloat16")
    assert fields["family"].annotation == sections.Family
    starve = sections.StarveSection.model_fields
    assert set(starve) - {one.name for one in dataclasses.fields(protocol.Starve)} == {"every"}
    assert [name for name, field in starve.items() if field.is_required()] == ["expert"]
    program = json_schema()["definitions"]["ProgramSection"]["properties"]
    assert "kind" not in program and program["name"]["description"].startswith("A program of")


def test_schema_values_match_the_results() -> None:
    assert typing.get_args(sections.VerdictName) == tuple(str(v) for v in Verdict)
    assert typing.get_args(sections.Family) == tuple(FAMILIES)
    assert set(json_schema()["definitions"]["Variant"]["properties"]["role"]["enum"]) == {
        str(r) for r in Role
    }


def test_the_json_schema_in_the_repository_is_current() -> None:
    kept = json.loads((ROOT / "schema" / "scenario.schema.json").read_text(encoding="utf-8"))
    assert kept == json_schema(), "run: moediag schema > schema/scenario.schema.json"


def nodes(node: Any) -> Any:
    if isinstance(node, dict):
        yield node
    for child in (
        node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    ):
        yield from nodes(child)


def test_the_json_schema_stays_within_draft_7() -> None:
    schema = json_schema()
    assert schema["$schema"].endswith("draft-07/schema#")
    for node in nodes(schema):
        assert not {"$defs", "prefixItems", "unevaluatedProperties", "dependentSchemas"} & set(node)
        if "$ref" in node:
            # Draft 7 ignores anything beside a reference.
            assert list(node) == ["$ref"]
            assert node["$ref"].rsplit("/", 1)[-1] in schema["definitions"]


def test_every_field_is_described_for_editors() -> None:
    schema = json_schema()
    for place in (schema, *schema["definitions"].values()):
        for name, field in place.get("properties", {}).items():
            described = "description" in field or name in ("expect", "verdict")
            assert described, name


@pytest.mark.parametrize("name", names())
def test_a_shipped_scenario_loads_and_is_named_after_its_file(name: str) -> None:
    path = find(name)
    scenario = load(path)
    assert scenario.name == name
    assert scenario.description
    for key, variant in scenario.variants.items():
        assert variant.title, key
    first = path.read_text(encoding="utf-8").splitlines()[0]
    prefix = "# yaml-language-server: $schema="
    assert first.startswith(prefix)
    assert (path.parent / first.removeprefix(prefix)).resolve().is_file()


@pytest.mark.parametrize("name", names())
def test_scenario_round_trips_through_yaml(name: str, tmp_path: Path) -> None:
    scenario = load(find(name), ["step.lr=0.01"])
    path = tmp_path / "as-run.yaml"
    path.write_text(scenario.to_yaml(), encoding="utf-8")
    again = load(path)
    assert again.model_dump() == scenario.model_dump()
    for variant in scenario.variants:
        assert again.merged(variant).model_dump() == scenario.merged(variant).model_dump()


def test_summaries_are_those_of_the_loaded_files() -> None:
    """The catalogue reads them without parsing the files."""
    for found in summaries():
        loaded = load(find(found.name))
        unfixed = [v.expect.verdict for v in loaded.variants.values() if v.role == Role.UNFIXED]
        told = [v.values() if isinstance(v, dict) else v for v in unfixed]
        shows = [word for v in told for word in ([v] if isinstance(v, str) else v)]
        stack = ", ".join(f"{package} {version}" for package, version in loaded.stack.items())
        assert found == Summary(
            loaded.name, loaded.title, loaded.world.default, stack, (*dict.fromkeys(shows),)
        )
        assert found.group in GROUPS


def test_a_fix_is_described_by_its_module_or_variant() -> None:
    variants = load(find("expert-starvation")).variants
    touch = content.fix("touch")
    assert content.described(variants["touch"]) == (touch.summary, touch.source)
    summary, source = content.described(variants["iterate-all"])
    assert summary == content.fix("iterate-all").summary
    assert source == "https://github.com/NovaSky-AI/SkyRL/pull/1370"
    upgrade = variants["upgrade"]
    assert content.described(upgrade) == (upgrade.title, "")  # it has no module


def test_expected_verdicts_depend_on_the_backend() -> None:
    def expect(verdict: Any) -> Expectation:
        return Expectation.model_validate({"verdict": verdict})

    assert expect("hang").verdicts("gloo") == ("hang",)
    assert expect(["hang", "crash"]).verdicts("nccl") == ("hang", "crash")
    both = expect({"gloo": ["crash", "collective-mismatch"], "nccl": "hang"})
    assert both.verdicts("gloo") == ("crash", "collective-mismatch")
    assert both.verdicts("nccl") == ("hang",)
    assert both.words() == "crash or collective-mismatch (gloo), hang (nccl)"
    assert expect({"gloo": "hang"}).verdicts("nccl") == ()


def test_a_variant_overrides_field_by_field() -> None:
    scenario = load(find("expert-starvation"))
    merged = scenario.merged("identical-sampler")
    assert merged.skew.batches == "identical"
    assert merged.skew.starve[0].rank is None
    assert merged.model == scenario.model
    assert scenario.merged("upgrade").stack["transformers"] == "5.0.0"
    assert scenario.merged("fused-family").model.hidden == scenario.model.hidden


def test_the_scenario_in_the_documentation_works(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "extending" / "add-a-scenario.md").read_text(encoding="utf-8")
    block = re.search(r"```yaml\n(.*?)```", text, re.DOTALL)
    assert block is not None
    path = tmp_path / "checkpointed.yaml"
    path.write_text(textwrap.dedent(block[1].replace("\n   ", "\n").strip(" ")), encoding="utf-8")
    given = [text for text in re.findall(r"--set (\S+)", text) if "=" in text]
    scenario = load(path, given)
    assert {p.trial.variant for p in plan(scenario, 2, "cpu").trials} == set(scenario.variants)
    path.write_text(
        path.read_text(encoding="utf-8").replace("checkpointing: non", "chekpointing: non"),
        encoding="utf-8",
    )
    with pytest.raises(ScenarioError) as caught:
        load(path)
    shown = re.search(r"error: (.*)", text)
    assert shown is not None
    assert caught.value.message.replace(f"{tmp_path}/", "") == shown[1]
