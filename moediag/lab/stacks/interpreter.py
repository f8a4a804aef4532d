"""Lists the parts of an interpreter's torch without importing torch.

moediag imports this module for its own interpreter and runs it as a script under another one
(``MOEDIAG_BASE_PYTHON``). That one may lack moediag and packaging, so this needs only the standard
library and Python >= 3.9.
"""

from __future__ import annotations

import json
import os
import platform
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.metadata import Distribution

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def canonical(name: str) -> str:
    """Normalises a name as in PEP 503."""
    return re.sub(r"[-_.]+", "-", name).lower()


def identity() -> dict[str, Any]:
    """Returns the versions and places of Python and torch, in under a millisecond.

    ``torch`` and ``torch_info`` (the .dist-info folder) are None if torch is not installed.
    """
    found: dict[str, Any] = {
        "executable": os.path.realpath(sys.executable),
        "python": platform.python_version(),
        "torch": None,
        "torch_info": None,
    }
    for folder in sys.path:
        try:
            entries = os.listdir(folder or ".")  # noqa: PTH208 - a tenth of iterdir's time
        except OSError:
            continue
        for entry in entries:
            if entry.startswith("torch-") and entry.endswith((".dist-info", ".egg-info")):
                found["torch"] = entry[len("torch-") :].rsplit(".", 1)[0].split("-py")[0]
                found["torch_info"] = str(Path(folder or ".", entry).resolve())
                return found
    return found


def torch_parts() -> dict[str, Any]:
    """Returns torch and all its requirements as installed here.

    ``requires`` has torch's own requirement lines without extras. ``parts`` has one entry per
    distribution: canonical ``name``, ``version``, ``links`` (name in site-packages -> target).
    """
    import importlib.metadata

    torch = importlib.metadata.distribution("torch")
    parts: list[dict[str, Any]] = []
    waiting, seen = ["torch"], {"torch"}
    while waiting:
        try:
            distribution = importlib.metadata.distribution(waiting.pop())
        except importlib.metadata.PackageNotFoundError:
            continue  # a requirement of another platform
        name = canonical(distribution.metadata["Name"])
        links = _links(distribution, name)
        parts.append({"name": name, "version": distribution.version, "links": links})
        for line in _requirements(distribution):
            match = _NAME.match(line)
            required = canonical(match.group()) if match else ""
            if required and required not in seen:
                seen.add(required)
                waiting.append(required)
    return {"requires": _requirements(torch), "parts": parts}


def _requirements(distribution: Distribution) -> list[str]:
    lines = distribution.requires or []
    return [line for line in lines if "extra ==" not in line.replace("extra==", "extra ==")]


def _links(distribution: Distribution, name: str) -> dict[str, str]:
    """Returns the entries of this distribution in its site-packages folder."""
    links: dict[str, str] = {}
    root = Path(str(distribution.locate_file(""))).resolve()
    for file in distribution.files or ():
        top = file.parts[0]
        if top not in {"..", "__pycache__"} and not top.endswith(".pth"):
            target = root / top
            if top not in links and target.exists():
                links[top] = str(target)
    tops = (distribution.read_text("top_level.txt") or name.replace("-", "_")).split()
    if not any(top in links for top in tops):
        import importlib.util

        # An editable install or a Linux distribution's package: use the import system.
        for top in tops:
            spec = importlib.util.find_spec(top)
            if spec is not None and spec.origin:
                origin = Path(spec.origin)
                target = origin.parent if origin.stem == "__init__" else origin
                links[target.name] = str(target)
        info = Path(str(getattr(distribution, "_path", root)))
        if info != root and info.exists():
            links[info.name] = str(info)
    return links


if __name__ == "__main__":
    answer = identity()
    answer["path"] = [p for p in sys.path[1:] if Path(p).is_dir()]
    if answer["torch"]:
        answer.update(torch_parts())
    json.dump(answer, sys.stdout)
