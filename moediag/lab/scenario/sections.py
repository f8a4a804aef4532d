"""The parts of a scenario that reach the ranks, as strict types: made from the dataclasses of
``moediag.protocol``, whose fields have the limits and the descriptions that editors show."""

from __future__ import annotations

import dataclasses
import inspect
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_type_hints

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    WithJsonSchema,
    create_model,
)
from pydantic_core import PydanticKnownError

from moediag.axes import AXES
from moediag.lab.families import FAMILIES
from moediag.protocol import (
    CostTask,
    ModelSpec,
    ProgramTask,
    RecorderSpec,
    ResumeTask,
    SkewSpec,
    Starve,
    StepSpec,
    WrapperSpec,
)
from moediag.result.verdicts import Verdict

if TYPE_CHECKING:
    Family = str
    VerdictName = str
else:
    Family = Literal[tuple(FAMILIES)]
    VerdictName = Literal[tuple(str(verdict) for verdict in Verdict)]
Backend = Literal["gloo", "nccl"]
AxisSize = Annotated[int, Field(ge=1)] | Literal["world"]

# Lower-case kebab: names become folders, JUnit names and command-line arguments.
KEBAB = r"^[a-z0-9]+(-[a-z0-9]+)*$"
VERSION = r"^[0-9]+(\.[0-9]+)*([a-z0-9.+-]*)$"
Kebab = Annotated[str, StringConstraints(pattern=KEBAB, max_length=60)]
Version = Annotated[str, StringConstraints(pattern=VERSION)]
PackageName = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$")
]
Rank = Annotated[int, Field(ge=0)]
Versions = dict[PackageName, Version]


def _axis(name: str) -> str:
    """Returns the name of an axis; raises pydantic's error of a Literal for any other."""
    if name not in AXES:
        expected = ", ".join(f"'{axis}'" for axis in AXES)
        raise PydanticKnownError("literal_error", {"expected": expected})
    return name


AxisName = Annotated[
    str,
    AfterValidator(_axis),
    WithJsonSchema({"enum": [str(axis) for axis in AXES], "type": "string"}),
]
LayoutRequest = dict[AxisName, AxisSize]


class Section(BaseModel, frozen=True):
    """Base of every part of the file. Refuses unknown fields and type conversions."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


SPECS: dict[str, type] = {}
"""Name of a section -> the dataclass that has its fields."""


def _section(name: str, spec: type, **kinds: Any) -> Any:
    """The section with the fields of a dataclass of the protocol. ``kinds``: types of fields that
    say more in a file than on a rank, or a whole field."""
    fields: dict[str, Any] = {}
    hints = get_type_hints(spec)
    for one in dataclasses.fields(spec):
        if not one.init:
            continue
        limits = dict(one.metadata)
        kind = kinds.pop(one.name, None) or _kind(hints[one.name], limits.pop("choices", ()))
        if isinstance(kind, type) and issubclass(kind, Section):
            limits["default_factory"] = kind
        elif one.default_factory is not dataclasses.MISSING:
            limits["default_factory"] = one.default_factory
        elif one.default is not dataclasses.MISSING:
            limits["default"] = one.default
        fields[one.name] = (kind, Field(**limits))
    SPECS[name] = spec
    return create_model(name, __base__=Section, __doc__=inspect.getdoc(spec), **fields | kinds)


def _kind(hint: Any, choices: tuple[str, ...]) -> Any:
    """The type of a field, of one with choices their Literal."""
    if not choices:
        return hint
    return Literal[choices] | None if type(None) in get_args(hint) else Literal[choices]


if TYPE_CHECKING:

    class ModelSection(ModelSpec, Section, frozen=True): ...

    class WrapperSection(WrapperSpec, Section, frozen=True): ...

    class StepSection(StepSpec, Section, frozen=True): ...

    class StarveSection(Starve, Section, frozen=True):
        every: int | None = None

    class SkewSection(SkewSpec, Section, frozen=True):
        starve: list[StarveSection] = Field(default_factory=list)  # type: ignore[assignment]

    class CostSection(CostTask, Section, frozen=True):
        model: ModelSection = Field(default_factory=ModelSection)

    class ProgramSection(ProgramTask, Section, frozen=True): ...

    class ResumeSection(ResumeTask, Section, frozen=True): ...

    class RecorderSection(RecorderSpec, Section, frozen=True): ...

else:
    ModelSection = _section("ModelSection", ModelSpec, family=Family)
    WrapperSection = _section("WrapperSection", WrapperSpec, reshard_after_forward=bool)
    StepSection = _section("StepSection", StepSpec)
    StarveSection = _section(
        "StarveSection",
        Starve,
        rank=Rank | None,
        every=(
            int | None,
            Field(
                default=None,
                ge=2,
                description="Repeats the pattern: with `every: 2`, rank 0 means ranks 0, 2, 4, …, "
                "so the scenario means the same at any world size. null: this rank only.",
            ),
        ),
    )
    SkewSection = _section("SkewSection", SkewSpec, starve=list[StarveSection])
    CostSection = _section("CostSection", CostTask, model=ModelSection)
    ProgramSection = _section("ProgramSection", ProgramTask)
    ResumeSection = _section("ResumeSection", ResumeTask, layout=LayoutRequest)
    RecorderSection = _section("RecorderSection", RecorderSpec)
