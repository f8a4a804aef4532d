"""Reads the laws' log of a rank (``rank-N.laws.jsonl``). Its last line may be truncated."""

from __future__ import annotations

from collections.abc import Mapping
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
    SameOrder,
    Shard,
)
from moediag.protocol import laws_file, older_laws_file, parse_json, read_stored
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
    found = RankLaws(
        tuple(reader.checks),
        tuple(reader.inputs),
        tuple(dict.fromkeys(reader.orders)),  # a newer segment of the log repeats them
        tuple(reader.norms),
        tuple(reader.declared),
        tuple(reader.models),
        tuple(dict.fromkeys(reader.loads)),
        tuple(dict.fromkeys(reader.optimizer_files)),
        tuple(dict.fromkeys(reader.optimizer_loads)),
        reader.shards,
        tuple(reader.cleared),
        tuple(reader.modes),
        tuple(dict.fromkeys(reader.mode_changes)),
        tuple(str(event["law"]) for event in reader.others.pop("allow", ()) if "law" in event),
        {kind: tuple(events) for kind, events in reader.others.items()},
        tuple(reader.kept),
    )
    return found, not_seen


class _Reader:
    def __init__(self) -> None:
        self.checks: list[LawCheck] = []
        self.kept: list[LawCheck] = []
        self.inputs: list[ModelInputs] = []
        self.orders: list[SameOrder] = []
        self.norms: list[ClipNorm] = []
        self.declared: list[DeclaredTensor] = []
        self.models: list[ModelState] = []
        self.loads: list[Load] = []
        self.optimizer_files: list[str] = []
        self.optimizer_loads: list[str] = []
        self.shards: dict[str, Shard] = {}
        self.cleared: list[Cleared] = []
        self.modes: list[Mode] = []
        self.mode_changes: list[ModeChange] = []
        self.others: dict[str, list[Mapping[str, Any]]] = {}
        self.layouts: dict[int, tuple[str, str, tuple[LawPiece, ...]]] = {}

    def read(self, event: Mapping[str, Any]) -> None:
        handler = {
            "pieces": self.pieces, "check": self.check, "kept": self.keep,
            "inputs": self.called_with, "same_order": self.same_order,
            "norm": self.norm, "declared": self.declare,
            "model": self.model, "load": self.load, "sharded": self.sharded,
            "optimizer_file": self.optimizer_file, "optimizer_load": self.optimizer_load,
            "cleared": self.clear, "mode": self.mode, "mode_change": self.change_mode,
        }.get(event["e"])  # fmt: skip
        if handler is not None:
            handler(event)
        else:  # of a law that reads its events itself, or of a later version
            self.others.setdefault(str(event["e"]), []).append(event)

    def pieces(self, event: Mapping[str, Any]) -> None:
        sets = [tuple(int(r) for r in ranks) for ranks in event["sets"]]
        rows = zip(
            event["names"],
            event["parts"],
            event["hows"],
            event["in_set"],
            event["in_group"],
            event.get("shapes") or [""] * len(event["names"]),
            strict=True,
        )
        self.layouts[int(event["id"])] = (
            str(event["key"]),
            str(event["optimizer"]),
            tuple(
                LawPiece(
                    plain_name(name), str(part), str(how), sets[at], int(group), int(at), str(shape)
                )
                for name, part, how, at, group, shape in rows
            ),
        )

    def check(self, event: Mapping[str, Any]) -> None:
        self.checks.append(self._check_of(event))

    def keep(self, event: Mapping[str, Any]) -> None:
        self.kept.append(self._check_of(event))

    def _check_of(self, event: Mapping[str, Any]) -> LawCheck:
        key, optimizer, pieces = self.layouts[int(event["pieces"])]
        rows = [event["params"], event["grads"], *event["state"].values()]
        if any(len(row) != len(pieces) for row in rows):
            raise ValueError("another number of fingerprints than of pieces")
        if not all(type(one) is str or one is None for row in rows for one in row):
            raise ValueError("a fingerprint is text")
        if not all(type(clock) is int or clock is None for clock in event["clocks"]):
            raise ValueError("a clock is a number")
        return LawCheck(
            key=key,
            optimizer=optimizer,
            step=int(event["step"]),
            count=int(event["count"]),
            pieces=pieces,
            clocks=tuple(event["clocks"]),
            params=tuple(event["params"]),
            grads=tuple(event["grads"]),
            sketches={
                int(at): (float(total), float(norm))
                for at, (total, norm) in (event.get("sketches") or {}).items()
            },
            state={str(name): tuple(row) for name, row in event["state"].items()},
            hyper=tuple({name: str(one[name]) for name in one} for one in event["hyper"]),
            nonfinite=tuple(map(plain_name, event.get("nonfinite") or ())),
            nonfinite_grads=tuple(map(plain_name, event.get("nonfinite_grads") or ())),
            scaled=bool(event.get("scaler")),
            line=str(event.get("line") or ""),
            owned=tuple(map(plain_name, event.get("owned") or ())),
            copies={int(at): one for at, one in (event.get("copies") or {}).items()},
        )

    def called_with(self, event: Mapping[str, Any]) -> None:
        self.inputs.append(
            ModelInputs(
                step=int(event["step"]),
                forward=int(event["forward"]),
                digest=str(event["digest"]),
                over=tuple(int(rank) for rank in event["over"]),
                sampler=str(event["sampler"]),
                replicas=int(event["replicas"]),
                number=int(event["number"]),
                line=str(event["line"]),
            )
        )

    def same_order(self, event: Mapping[str, Any]) -> None:
        line, sampler = str(event["line"]), str(event["sampler"])
        self.orders.append(SameOrder(line, int(event["epoch"]), sampler, int(event["step"])))

    def norm(self, event: Mapping[str, Any]) -> None:
        self.norms.append(
            ClipNorm(
                step=int(event["step"]),
                names=tuple(map(plain_name, event["names"])),
                norm=float(event["norm"]),
                max_norm=float(event["max_norm"]),
                line=str(event["line"]),
                scale=float(event.get("scale") or 0.0),
            )
        )

    def clear(self, event: Mapping[str, Any]) -> None:
        self.cleared.append(
            Cleared(
                step=int(event["step"]),
                optimizer=str(event["optimizer"]),
                names=tuple(plain_name(name) for name in event["names"] if name is not None),
                kept=bool(event["kept"]),
                line=str(event["line"]),
            )
        )

    def mode(self, event: Mapping[str, Any]) -> None:
        self.modes.append(
            Mode(
                step=int(event["step"]),
                model=int(event["model"]),
                name=plain_name(event["name"]),
                training=bool(event["training"]),
                kinds=tuple(map(plain_name, event["kinds"])),
            )
        )

    def change_mode(self, event: Mapping[str, Any]) -> None:
        step, model = int(event["step"]), int(event["model"])
        self.mode_changes.append(ModeChange(step, model, bool(event["training"])))

    def declare(self, event: Mapping[str, Any]) -> None:
        for one in event["tensors"]:
            sketch, digest = one.get("sketch"), one.get("print")
            self.declared.append(
                DeclaredTensor(
                    step=int(event["step"]),
                    axes=tuple(map(str, one["axes"])),
                    ranks=tuple(map(int, one["ranks"])),
                    part=str(one["part"]),
                    shape="x".join(map(str, one["shape"])),
                    data=bool(one["data"]),
                    digest=None if digest is None else str(digest),
                    sketch=None if sketch is None else (float(sketch[0]), float(sketch[1])),
                    line=str(one["line"]),
                )
            )

    def model(self, event: Mapping[str, Any]) -> None:
        models = event["models"]
        self.models.append(
            ModelState(
                step=int(event["step"]),
                buffers=tuple(
                    (tuple(map(int, one["over"])), _by_name(one["buffers"])) for one in models
                ),
                left_out=_by_name(event["left_out"]),
                frozen_routers=tuple(
                    plain_name(name) for one in models for name in one["frozen_routers"]
                ),
                averages=tuple(map(int, event["averages"])),
                idle=bool(event.get("idle")),
            )
        )

    def load(self, event: Mapping[str, Any]) -> None:
        missing, unexpected = event["counts"]
        self.loads.append(
            Load(
                line=str(event["line"]),
                parameters=int(event["parameters"]),
                missing=tuple(map(plain_name, event["missing"])),
                unexpected=tuple(map(plain_name, event["unexpected"])),
                counts=(int(missing), int(unexpected)),
            )
        )

    def optimizer_file(self, event: Mapping[str, Any]) -> None:
        self.optimizer_files.append(str(event["line"]))

    def optimizer_load(self, event: Mapping[str, Any]) -> None:
        self.optimizer_loads.append(str(event["line"]))

    def sharded(self, event: Mapping[str, Any]) -> None:
        for name, (whole, loaded, unchanged) in event["shards"].items():
            self.shards[plain_name(name)] = Shard(
                int(event["step"]),
                None if whole is None else str(whole),
                bool(loaded),
                bool(unchanged),
            )


def _by_name(raw: Mapping[str, str | None]) -> dict[str, str | None]:
    return {plain_name(n): None if value is None else str(value) for n, value in raw.items()}
