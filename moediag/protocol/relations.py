"""What a hunt measured: one relation on a tiny model of one family, and the list of both."""

from __future__ import annotations

import dataclasses
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, List, Optional, Union

from moediag.protocol.files import FAMILIES_FILE, RELATION_FILE
from moediag.protocol.stored import build, read_json, write_json

# What must hold before a difference counts as a finding, in the order in which it is checked.
CONDITIONS: Dict[str, str] = {
    "control": "the plain way agrees with itself",
    "twice": "it shows twice",
    "other-seed": "it shows with another seed",
    "other-size": "it shows at another size",
    "float64": "float64 does not remove it",
    "second-route": "a second route agrees",
}


# The relation that needs files of an earlier release.
EARLIER_CHECKPOINT = "earlier-checkpoint"


@dataclass(frozen=True)
class WayOutcome:
    """One way to compute what the plain way computes, compared with it."""

    way: str
    # null: not decided, for the reason in `text`.
    holds: Optional[bool] = None
    # "wrong": another value; "crash": an exception where the plain way has none.
    kind: str = ""
    # What is the same wherever this cause shows: the quantity, or the exception and its place.
    what: str = ""
    text: str = ""  # the numbers, or the exception, in words
    error: Optional[float] = None  # the largest difference as a share of the tensor's largest value
    tolerance: Optional[float] = None  # of that share
    # By name in CONDITIONS: whether it is met; null: it does not apply. Those after the first that
    # is not met were not checked.
    conditions: Dict[str, Optional[bool]] = field(default_factory=dict)

    @property
    def confirmed(self) -> bool:
        """Whether every condition is met that applies."""
        if self.holds is not False or set(self.conditions) != set(CONDITIONS):
            return False
        return all(met is not False for met in self.conditions.values())

    @property
    def repeated(self) -> bool:
        """Whether it was seen twice."""
        return bool(self.conditions.get("twice"))

    @property
    def failed(self) -> str:
        """The condition that is not met; "" if none was found."""
        return next((name for name, met in self.conditions.items() if met is False), "")


@dataclass(frozen=True)
class RelationOutcome:
    """One cell of a hunt."""

    family: str
    relation: str
    ways: List[WayOutcome] = field(default_factory=list)
    # Why the relation does not apply to the family, else null.
    applicable: Optional[str] = None
    lacks: str = ""  # the package for which the relation does not apply: the stack lacks it
    built: bool = True  # false: no tiny model was built, for the reason in `problem`
    problem: str = ""  # why nothing was checked
    # Of a single way: the model class, and its configuration as the library saves it.
    model: str = ""
    config: Dict[str, Any] = field(default_factory=dict)

    def write(self, folder: Union[str, Path]) -> Path:
        return write_json(Path(folder) / RELATION_FILE, dataclasses.asdict(self))

    @classmethod
    def read(cls, folder: Union[str, Path]) -> "RelationOutcome":
        return typing.cast("RelationOutcome", build(cls, read_json(Path(folder) / RELATION_FILE)))


@dataclass(frozen=True)
class ListedFamily:
    """A model type of the release."""

    name: str
    kind: str  # moe | dense | multimodal; "": it could not be read
    problem: str = ""  # why it could not be read
    same_as: str = ""  # the family with the same model class that stands for it in its kind
    own_config: bool = False  # with same_as: it differs, and is built by itself if it is named


@dataclass(frozen=True)
class ReleaseListing:
    """The families of a release, and the relations that this moediag knows."""

    families: List[ListedFamily] = field(default_factory=list)
    relations: Dict[str, str] = field(default_factory=dict)  # name -> what must hold

    def write(self, folder: Union[str, Path]) -> Path:
        return write_json(Path(folder) / FAMILIES_FILE, dataclasses.asdict(self))

    @classmethod
    def read(cls, folder: Union[str, Path]) -> "ReleaseListing":
        return typing.cast("ReleaseListing", build(cls, read_json(Path(folder) / FAMILIES_FILE)))
