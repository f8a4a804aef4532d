"""Reads the laws' log of a rank (``rank-N.laws.jsonl``). Its last line may be truncated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from moediag.evidence.law_model import (
    UNREADABLE,
    Cleared,
    ClipNorm,
    DeclaredTensor,
    LawCheck,
    LawPiece,
    Load,
    Mode,
    ModeChange,
    ModelInputs,
    ModelState,
    RankLaws,
    Shard,
)
from moediag.protocol import build, laws_file, older_laws_file, parse_json, read_stored
from moediag.protocol.names import plain_name


def read_laws(folder: Path, rank: int) -> tuple[RankLaws | None, tuple[str, ...]]:
    """The log of ``rank`` in ``folder``, and what is lost; None without a log."""
    paths = [folder / older_laws_file(rank), folder / laws_file(rank)]
    if not any(path.exists() for path in paths):
        return None, ()
    reader = _Reader()
    lost = 0
    for path in paths:
        try:
            lines = read_stored(path).splitlines()
        except OSError:
            continue
        for line in lines:
            try:
                reader.read(parse_json(line))
            except UNREADABLE:
                lost += 1
    not_seen = (f"rank {rank}: {lost} unreadable lines of its laws' log",) if lost > 1 else ()
    return reader.laws(), not_seen


# Events that have the fields of a record, and the field of RankLaws where they go.
_PLAIN: dict[str, tuple[str, Any]] = {
    "inputs": ("inputs", ModelInputs), "mode": ("modes", Mode),
    "mode_change": ("mode_changes", ModeChange), "load": ("loads", Load),
}  # fmt: skip
# A newer segment of the log repeats these.
_REPEATED = ("loads", "mode_changes")


class _Reader:
    def __init__(self) -> None:
        #: By field of RankLaws.
        self.found: dict[str, list[Any]] = {}
        self.shards: dict[str, Shard] = {}
        self.others: dict[str, list[Mapping[str, Any]]] = {}
        self.layouts: dict[int, tuple[str, str, tuple[LawPiece, ...]]] = {}

    def laws(self) -> RankLaws:
        found = {
            field: tuple(dict.fromkeys(values) if field in _REPEATED else values)
            for field, values in self.found.items()
        }
        allowed = self.others.pop("allow", ())
        return RankLaws(
            **found,
            shards=self.shards,
            allowed=tuple(str(event["law"]) for event in allowed if "law" in event),
            others={kind: tuple(events) for kind, events in self.others.items()},
        )

    def add(self, field: str, value: Any) -> None:
        self.found.setdefault(field, []).append(value)

    def read(self, event: Mapping[str, Any]) -> None:
        kind = str(event["e"])
        handler = {
            "pieces": self.pieces, "check": self.check, "kept": self.check,
            "cleared": self.clear, "norm": self.norm, "declared": self.declare,
            "model": self.model, "sharded": self.sharded,
        }.get(kind)  # fmt: skip
        if handler is not None:
            handler(event)
        elif kind in _PLAIN:
            field, record = _PLAIN[kind]
            self.add(field, build(record, event))
        else:  # of a law that reads its events itself, or of a later version
            self.others.setdefault(kind, []).append(event)

    def norm(self, event: Mapping[str, Any]) -> None:
        self.add("norms", build(ClipNorm, {**event, "norm": float(event["norm"])}))

    def clear(self, event: Mapping[str, Any]) -> None:
        names = [name for name in event["names"] if name is not None]
        self.add("cleared", build(Cleared, {**event, "names": names}))

    def pieces(self, event: Mapping[str, Any]) -> None:
        sets = [tuple(int(r) for r in ranks) for ranks in event["sets"]]
        columns = [event[name] for name in ("names", "parts", "hows", "in_set", "in_group")]
        shapes = map(_shape, event.get("shapes") or [""] * len(columns[0]))
        pieces = tuple(
            LawPiece(plain_name(name), str(part), str(how), sets[at], int(group), int(at), shape)
            for name, part, how, at, group, shape in zip(*columns, shapes, strict=True)
        )
        self.layouts[int(event["id"])] = str(event["key"]), str(event["optimizer"]), pieces

    def check(self, event: Mapping[str, Any]) -> None:
        key, optimizer, pieces = self.layouts[int(event["pieces"])]
        rows = [event["params"], event["grads"], *event["state"].values()]
        if any(len(row) != len(pieces) for row in rows):
            raise ValueError("another number of fingerprints than of pieces")
        if not all(type(one) is str or one is None for row in rows for one in row):
            raise ValueError("a fingerprint is text")
        hyper = [{name: str(one[name]) for name in one} for one in event["hyper"]]
        own = {"key": key, "optimizer": optimizer, "hyper": hyper, "scaled": event.get("scaler")}
        # The rows have an element for each parameter, and build() is ten times slower.
        none: dict[str, Any] = {"pieces": [], "params": [], "grads": [], "state": {}}
        params, grads, *states = map(tuple, rows)
        made = replace(
            build(LawCheck, {**event, **own, **none}), pieces=pieces, params=params, grads=grads,
            state=dict(zip(event["state"], states, strict=True)),
        )  # fmt: skip
        self.add("checks" if event["e"] == "check" else "kept", made)

    def declare(self, event: Mapping[str, Any]) -> None:
        for one in event["tensors"]:
            own = {"shape": "x".join(map(str, one["shape"])), "digest": one.get("print")}
            self.add("declared", build(DeclaredTensor, {**one, "step": event["step"], **own}))

    def model(self, event: Mapping[str, Any]) -> None:
        models = event["models"]
        buffers = [[one["over"], one["buffers"]] for one in models]
        routers = [name for one in models for name in one["frozen_routers"]]
        own = {"buffers": buffers, "frozen_routers": routers}
        self.add("models", build(ModelState, {**event, **own}))

    def sharded(self, event: Mapping[str, Any]) -> None:
        for name, (whole, loaded, unchanged) in event["shards"].items():
            own = {"step": event["step"], "whole": whole, "loaded": loaded, "unchanged": unchanged}
            self.shards[plain_name(name)] = build(Shard, own)


def _shape(text: str) -> str:
    return "x".join(str(int(size)) for size in text.split("x")) if text else ""
