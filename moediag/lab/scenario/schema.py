"""The fields of a scenario file, as strict types.

The parts that reach the ranks are in ``sections``, rules about several fields in ``checks``.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import io
import itertools
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    Discriminator,
    Field,
    PrivateAttr,
    SerializationInfo,
    SerializerFunctionWrapHandler,
    Tag,
    model_serializer,
)
from ruamel.yaml import YAML
from ruamel.yaml.scalarstring import LiteralScalarString

from moediag.axes import AXES, DP_SHARD, Layout
from moediag.lab.content import is_own
from moediag.lab.scenario.sections import (
    SPECS,
    Backend,
    CostSection,
    Kebab,
    LayoutRequest,
    ModelSection,
    PackageName,
    ProgramSection,
    Rank,
    RecorderSection,
    ResumeSection,
    Section,
    SkewSection,
    StepSection,
    VerdictName,
    Versions,
    WrapperSection,
)

SCHEMA_VERSION = 1

# Sections in which a variant overrides the scenario field by field.
MERGED_SECTIONS = ("model", "wrapper", "step", "skew", "program", "resume", "recorder")


class WorldSection(Section, frozen=True):
    """The number of ranks of the scenario."""

    default: int = Field(default=2, ge=1)
    """Number of ranks without --cpu and --gpus."""
    min: int = Field(default=1, ge=1)
    """Minimum number of ranks."""
    max: int | None = Field(default=None, ge=1)
    """Maximum; null: no limit."""
    multiple_of: int = Field(default=1, ge=1)
    """The number of ranks must be a multiple of this."""


def _form(value: Any) -> str:
    """Returns which of the three forms of a verdict this is."""
    if isinstance(value, dict):
        return "by-backend"
    return "any-of" if isinstance(value, list) else "one"


AnyOf = Annotated[list[VerdictName], Field(min_length=1)]
VerdictChoice = Annotated[
    Annotated[VerdictName, Tag("one")] | Annotated[AnyOf, Tag("any-of")],
    Discriminator(_form),
]
VerdictRequest = Annotated[
    Annotated[VerdictName, Tag("one")]
    | Annotated[AnyOf, Tag("any-of")]
    | Annotated[dict[Backend, VerdictChoice], Field(min_length=1), Tag("by-backend")],
    Discriminator(_form),
]


class Expectation(Section, frozen=True):
    """The result that a trial of this variant must have."""

    verdict: VerdictRequest
    """One verdict, a list (any of them), or one of these per backend, e.g. {gloo:
    collective-mismatch, nccl: hang}."""
    culprits: list[Rank] | None = None
    """Exactly the ranks that must be named; null: not checked."""
    pattern: str | None = Field(default=None, pattern="^[^:]+$")
    """A part of the signature (between colons) that must occur, e.g. one-slice-sharded-again:
    another failure with the same verdict does not count."""
    shows: VerdictName | None = None
    """For a variant with repeats: at least one repeat must have this verdict, otherwise the failure
    was not reproduced."""
    judgement: Literal["correct", "wrong"] | None = None
    """For a fix: `wrong` if the run should show that it does not fix the failure. Default: correct.
    """

    def verdicts(self, backend: str) -> tuple[str, ...]:
        """Returns the verdicts that meet the expectation on ``backend``; empty if it does not name
        that backend."""
        choice: Any = self.verdict
        if isinstance(choice, dict):
            choice = choice.get(backend, [])
        return (choice,) if isinstance(choice, str) else tuple(choice)

    def words(self, backend: str | None = None) -> str:
        """Returns the verdicts as text; without a backend those of all backends."""
        if backend is None and isinstance(self.verdict, dict):
            return ", ".join(f"{' or '.join(self.verdicts(b))} ({b})" for b in self.verdict)
        return " or ".join(self.verdicts(backend or "gloo"))


class Variant(Section, frozen=True):
    """One code path of the scenario. Its sections override the scenario's field by field; its
    ``layout`` replaces the scenario's."""

    role: Literal["unfixed", "fix", "control"]
    """unfixed: the failure itself, one variant per symptom; fix: a fix to judge; control: must stay
    clean, otherwise the whole comparison proves nothing."""
    title: str = ""
    """One line that says what the variant does."""
    source: str | None = None
    """Where the fix comes from: URL or reference."""
    note: str | None = None
    """What a reader of the result must know about this variant."""
    fix: str | None = Field(default=None, min_length=1)
    """A fix of the catalogue, e.g. zero-fill, or the path of your own, relative to this file:
    ./my_fix.py."""
    repairs: Kebab | None = None
    """For a fix: the unfixed variant that it should fix and is compared with. Default: all of them.
    """
    expect: Expectation
    repeats: int = Field(default=1, ge=1)
    """Trials of this variant, for an intermittent failure; see --repeat."""
    requires: list[PackageName] = Field(default_factory=list)
    """Python packages without which the variant is not applicable."""
    stack: Versions = Field(default_factory=dict)
    """Versions that differ from the scenario's."""
    layout: LayoutRequest | None = None
    """A layout that replaces the scenario's."""
    model: ModelSection | None = None
    """Fields that differ from the scenario's."""
    wrapper: WrapperSection | None = None
    """Fields that differ from the scenario's."""
    step: StepSection | None = None
    """Fields that differ from the scenario's."""
    skew: SkewSection | None = None
    """Fields that differ from the scenario's."""
    program: ProgramSection | None = None
    """Fields and options that differ from the scenario's."""
    resume: ResumeSection | None = None
    """Fields that differ from the scenario's."""
    recorder: RecorderSection | None = None
    """Fields that differ from the scenario's."""

    @model_serializer(mode="wrap")
    def _only_what_differs(
        self, serialize: SerializerFunctionWrapHandler, info: SerializationInfo
    ) -> dict[str, Any]:
        """Writes only differences: defaults would override the scenario's values."""
        whole: dict[str, Any] = serialize(self)
        for name in ("layout", *MERGED_SECTIONS):
            if whole.get(name) is None:
                whole.pop(name, None)
        for name in MERGED_SECTIONS:
            section = getattr(self, name)
            if section is not None:
                whole[name] = section.model_dump(mode=info.mode, exclude_unset=True)
        return whole


def _whole_world() -> LayoutRequest:
    return {str(DP_SHARD): "world"}


class Scenario(Section, frozen=True):
    """A named failure: its model, layout, skew, stack, variants and expectations."""

    schema_version: Literal[1]
    """Version of this file format: 1."""
    name: Kebab
    """The name given to `moediag run`; equals the file's name."""
    title: str = Field(min_length=1)
    """One line for `moediag list`."""
    description: str = ""
    """What fails, why, and what the variants show."""
    sources: list[str] = Field(default_factory=list)
    """Reports: URLs or references."""
    world: WorldSection = Field(default_factory=WorldSection)
    """Number of ranks."""
    layout: LayoutRequest = Field(
        default_factory=_whole_world,
        description='Mesh axes and sizes; the axis with "world" takes the remaining ranks. '
        + " ".join(f"{axis} is {axis.about}." for axis in AXES),
    )
    stack: Versions = Field(default_factory=dict)
    """Versions to run on, e.g. {transformers: "4.53.2"}."""
    timeout: float = Field(default=120.0, gt=0)
    """Limit of one launch in seconds; not the hang detector."""
    model: ModelSection = Field(default_factory=ModelSection)
    """The tiny model."""
    wrapper: WrapperSection = Field(default_factory=WrapperSection)
    """Sharding."""
    step: StepSection = Field(default_factory=StepSection)
    """The training step."""
    skew: SkewSection = Field(default_factory=SkewSection)
    """How routing is skewed."""
    cost: CostSection | None = None
    """Timing of the fixes; null: none."""
    program: ProgramSection | None = None
    """A program that replaces the training step of a whole model; null: none."""
    resume: ResumeSection | None = None
    """Saving and loading between the steps; null: none."""
    recorder: RecorderSection = Field(default_factory=RecorderSection)
    """Extra tasks of the recorder."""
    variants: dict[Kebab, Variant] = Field(min_length=1)
    """The code paths, in the order in which they run."""

    # Not a field: the overrides of the command line, as typed.
    _overrides: tuple[str, ...] = PrivateAttr(default=())

    @property
    def overrides(self) -> tuple[str, ...]:
        """Returns every override as typed, e.g. ``--set model.experts=16``."""
        return self._overrides

    def with_overrides(self, texts: Sequence[str]) -> Scenario:
        """Returns the same scenario with the overrides that were applied to it."""
        copy = self.model_copy()
        copy._overrides = tuple(texts)  # type: ignore[misc]  # pydantic allows it
        return copy

    def to_yaml(self, with_defaults: bool = True, beside: Path | None = None) -> str:
        """Returns the scenario as YAML; loading it gives an equal scenario. ``beside``: the folder
        of the file, to which the paths of the user's own programs and fixes are relative."""
        text = io.StringIO()
        yaml = YAML(typ="rt", pure=True)
        yaml.width = 100
        fields = self.model_dump(mode="json", exclude_unset=not with_defaults)
        if beside is not None:
            paths = {own: os.path.relpath(own, beside) for own in self.own_files()}
            fields = _renamed(fields, paths)
        yaml.dump(_blocks(fields), text)
        return text.getvalue()

    def identity(self) -> str:
        """Returns all that decides what its trials do: its fields, and the content of the user's
        own programs and fixes."""
        return self.to_yaml() + "".join(f"{file} {_digest(file)}\n" for file in self.own_files())

    def own_files(self) -> list[str]:
        """Returns the paths of the user's own programs and fixes."""
        fixes = [*(self.cost.fixes if self.cost else ()), *(v.fix for v in self.variants.values())]
        programs = [self.program, *(v.program for v in self.variants.values())]
        names = {*fixes, *(program.name for program in programs if program is not None)}
        return sorted(name for name in names if name and is_own(name))

    def layout_for(self, world_size: int) -> Layout:
        """Returns the mesh of ``world_size`` ranks. Raises LayoutError with every factor."""
        return Layout.resolve(self.layout, world_size)

    @property
    def unfixed(self) -> Variant:
        """Returns the first unfixed variant; every loaded file has one."""
        return next(v for v in self.variants.values() if v.role == "unfixed")

    def merged(self, variant: str) -> Scenario:
        """Returns the scenario with this variant's sections applied."""
        over = self.variants[variant]
        changes: dict[str, Any] = {}
        for name in MERGED_SECTIONS:
            section = getattr(over, name)
            if section is not None:
                own = getattr(self, name)
                fields = {f: getattr(section, f) for f in section.model_fields_set}
                if name == "program" and own is not None and "options" in fields:
                    fields["options"] = {**own.options, **section.options}
                changes[name] = section if own is None else own.model_copy(update=fields)
        if over.layout is not None:
            changes["layout"] = over.layout
        changes["stack"] = {**self.stack, **over.stack}
        return self.model_copy(update=changes)


def _digest(file: str) -> str:
    """Returns "" for a file that cannot be read: the ranks will say so."""
    try:
        return hashlib.sha256(Path(file).read_bytes()).hexdigest()
    except OSError:
        return ""


def _renamed(value: Any, names: Mapping[str, str]) -> Any:
    """Returns the fields with these texts in place of others."""
    if isinstance(value, dict):
        return {key: _renamed(one, names) for key, one in value.items()}
    if isinstance(value, list):
        return [_renamed(one, names) for one in value]
    return names.get(value, value) if isinstance(value, str) else value


def _blocks(node: Any) -> Any:
    """Turns text of several lines into YAML blocks instead of one long quoted line."""
    if isinstance(node, dict):
        return {key: _blocks(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_blocks(item) for item in node]
    return LiteralScalarString(node) if isinstance(node, str) and "\n" in node else node


def json_schema() -> dict[str, Any]:
    """Returns the JSON Schema of a scenario file, in the subset that draft-7 readers understand."""
    schema = Scenario.model_json_schema(ref_template="#/definitions/{model}")
    definitions = schema.pop("$defs", {})
    _describe({"Scenario": schema, **definitions})
    schema = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        **schema,
        "definitions": definitions,
    }
    plain: dict[str, Any] = _draft7(schema)
    plain["title"] = "moediag scenario"
    return plain


def _describe(definitions: Mapping[str, Any]) -> None:
    """Gives each field the text below it in the source, where it has none."""
    of = {name: SPECS.get(name) or globals()[name] for name in definitions}
    texts = {module: _texts(module) for module in {one.__module__ for one in of.values()}}
    for name, one in of.items():
        for field, told in definitions[name]["properties"].items():
            if text := texts[one.__module__].get((one.__name__, field)):
                told.setdefault("description", text)


def _texts(module: str) -> dict[tuple[str, str], str]:
    """The text below each field of each class of a module."""
    return {
        (of.name, one.target.id): " ".join(str(below.value.value).split())
        for of in ast.parse(inspect.getsource(sys.modules[module])).body
        if isinstance(of, ast.ClassDef)
        for one, below in itertools.pairwise(of.body)
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
    }  # fmt: skip


def _draft7(node: Any) -> Any:
    """Wraps each ``$ref`` that has siblings: draft 7 would ignore them, descriptions included."""
    if isinstance(node, list):
        return [_draft7(item) for item in node]
    if not isinstance(node, dict):
        return node
    node = {key: _draft7(value) for key, value in node.items()}
    if "$ref" in node and len(node) > 1:
        return {**{k: v for k, v in node.items() if k != "$ref"}, "allOf": [{"$ref": node["$ref"]}]}
    return node
