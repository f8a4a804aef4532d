"""Process groups by name: their ranks, backend and mesh axis."""

from __future__ import annotations

import weakref
from typing import Any, Dict, FrozenSet, List, Optional, Tuple

import torch
import torch.distributed as dist

from moediag.recorder.log import EventLog
from moediag.recorder.patches import Patches


class Makers:
    """Stands for the ranks that must make a process group together, in one order: all ranks, or
    under local synchronization its members."""

    def __init__(self, ranks: List[int]) -> None:
        self.ranks = ranks
        all_ranks = ranks == _ranks(dist.group.WORLD)
        self.group_name = "new_group" if all_ranks else f"new_group {ranks}"
        self.group_desc = "all ranks" if all_ranks else ""


class GroupInfo:
    """One process group as written to the log."""

    __slots__ = ("axis", "issued", "json_name", "mesh_version", "name", "ranks")

    def __init__(self, name: str, json_name: str, ranks: List[int]) -> None:
        self.name = name
        self.json_name = json_name
        self.ranks = ranks
        self.issued = 0  # operations so far
        self.axis: Optional[str] = None
        self.mesh_version = -1


class Groups:
    """Names groups and writes a ``group`` event at first use, and again when the axis is known (a
    mesh may be built on a group already in use)."""

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self._by_name: Dict[str, GroupInfo] = {}
        self._meshes: List[Any] = []  # weak references, in order of creation
        self._mesh_version = 0

    def install(self, patches: Patches) -> None:
        """Tracks new DeviceMeshes, including submeshes and flattened ones, which also use
        ``__init__``."""
        from torch.distributed.device_mesh import DeviceMesh

        groups = self

        def make(init: Any) -> Any:
            def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
                init(self, *args, **kwargs)
                groups._meshes.append(weakref.ref(self))
                groups._mesh_version += 1

            return __init__

        patches.replace(DeviceMesh, "__init__", make)

    def info(self, group: Any) -> GroupInfo:
        """Returns the entry of ``group``; writes it to the log if it is new or has changed."""
        name = str(group.group_name)
        info = self._by_name.get(name)
        if info is None:
            import json

            info = self._by_name[name] = GroupInfo(name, json.dumps(name), _ranks(group))
            info.axis, info.mesh_version = self._axis(name), self._mesh_version
            self._write(info, group)
        elif info.axis is None and info.mesh_version != self._mesh_version:
            info.axis, info.mesh_version = self._axis(name), self._mesh_version
            if info.axis is not None:
                self._write(info, group)
        return info

    def only(self) -> Optional[Any]:
        """The default group if it is the only one; C++ calls of old torch do not name theirs."""
        return dist.group.WORLD if len(dist.distributed_c10d._world.pg_map) == 1 else None

    def axes(self) -> FrozenSet[str]:
        """The names of all axes of the meshes that exist, but for axes of one rank."""
        meshes = (mesh for reference in self._meshes for mesh in [reference()] if mesh is not None)
        rows = (zip(_dims(mesh), mesh.shape) for mesh in meshes)  # noqa: B905 - Python 3.9
        return frozenset(axis for row in rows for (axis, _), size in row if size > 1)

    def _write(self, info: GroupInfo, group: Any) -> None:
        desc = str(getattr(group, "group_desc", "") or "")
        if group is dist.group.WORLD and desc in ("", "default_pg", "undefined"):
            desc = "world"
        self._log.event(
            "group", keep=True, group=info.name, desc=desc, axis=info.axis, ranks=info.ranks,
            backend=_backend(group),
        )  # fmt: skip

    def _axis(self, name: str) -> Optional[str]:
        """Returns the mesh axis of group ``name``. The first mesh that names it wins: a flattened
        or reused group keeps its original axis."""
        alive = []
        found: Optional[str] = None
        for reference in self._meshes:
            mesh = reference()
            if mesh is None:
                continue
            alive.append(reference)
            if found is None:
                found = next((axis for axis, group in _dims(mesh) if group == name), None)
        self._meshes = alive
        return found


def _dims(mesh: Any) -> List[Tuple[str, str]]:
    """Returns (axis name, group name) of each dimension. torch >= 2.9 has ``_dim_group_names``;
    older torch has ``_dim_group_infos``: (tag, ranks, group name)."""
    names = getattr(mesh, "mesh_dim_names", None) or ()
    groups = getattr(mesh, "_dim_group_names", None)
    if groups is None:
        groups = [info[2] for info in getattr(mesh, "_dim_group_infos", ())]
    return [(str(axis), str(group)) for axis, group in zip(names, groups)]  # noqa: B905 - Python 3.9


def _ranks(group: Any) -> List[int]:
    if isinstance(group, Makers):
        return group.ranks
    try:
        return [int(rank) for rank in dist.get_process_group_ranks(group)]
    except (KeyError, ValueError, RuntimeError):
        return list(range(group.size()))


def _backend(group: Any) -> str:
    """The backend for this machine's tensors: without a name, a group has one for each device."""
    try:
        which = None if isinstance(group, Makers) else group
        found = str(dist.get_backend(which))
        if found == "undefined":
            pairs = (pair.split(":") for pair in dist.get_backend_config(which).split(","))
            of = dict(pairs)
            found = of.get("cuda" if torch.cuda.is_available() else "cpu", found)
        return found
    except (KeyError, ValueError, AssertionError, RuntimeError):
        return str(group.name())
