"""The packages that one Python has installed, found without importing them.

Runs as a script under the Python of a stack, which need not have moediag: standard library only,
Python >= 3.9. torch says how it was built in a file of assignments, so torch itself (seconds, and
a GPU perhaps) is not imported.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import json
import platform
import re
import sys
from pathlib import Path
from typing import Any

# As they stand in reports; the first ones are named also where they are missing.
NEEDED = ("torch", "transformers", "accelerate")
_OTHERS = (
    "torchtitan", "trl", "peft", "deepspeed", "torchao", "triton", "flash-attn", "kernels",
    "datasets", "tokenizers", "huggingface-hub", "safetensors", "numpy",
)  # fmt: skip
_OF_CUDA = re.compile(r"^nvidia-(nccl|cudnn|cuda-runtime|nvshmem)(-cu\d+)?$")


def packages() -> dict[str, str | None]:
    """Canonical name -> version, None for a package that is missing."""
    have: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"]
        if name:
            have.setdefault(re.sub(r"[-_.]+", "-", name).lower(), distribution.version)
    found: dict[str, str | None] = {name: have.get(name) for name in NEEDED}
    found.update({name: have[name] for name in _OTHERS if name in have})
    found.update({name: have[name] for name in sorted(have) if _OF_CUDA.match(name)})
    return found


def torch_build() -> dict[str, str]:
    """``cuda``, ``hip``, ``git_version`` and ``debug`` from torch's ``version.py``.

    Empty without torch.
    """
    try:
        spec = importlib.util.find_spec("torch")
        if spec is None or spec.origin is None:
            return {}
        tree = ast.parse(Path(spec.origin).with_name("version.py").read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError, ImportError):
        return {}
    found = {}
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names, value = [node.target.id], node.value
        elif isinstance(node, ast.Assign):
            names = [t.id for t in node.targets if isinstance(t, ast.Name)]
            value = node.value
        else:
            continue
        for name in names:
            if name in ("cuda", "hip", "git_version", "debug") and isinstance(value, ast.Constant):
                found[name] = "none" if value.value is None else str(value.value)
    return found


def answer() -> dict[str, Any]:
    return {
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "packages": packages(),
        "torch_build": torch_build(),
    }


if __name__ == "__main__":
    json.dump(answer(), sys.stdout)
