"""Compares measurements in a process of its own, with the Python of the job: this file is run by
its path, because moediag need not be installed there.

    python compare.py TARGET JOB REFERENCE...
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path


def main(arguments: list[str]) -> None:
    _package(Path(__file__).parents[1])
    from moediag.ranks.verify.comparison import compare

    target, job, *references = map(Path, arguments)
    compare(job, references, target)


def _package(folder: Path) -> None:
    """Makes moediag importable without making its neighbours importable too."""
    if "moediag" in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(
        "moediag", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["moediag"] = module
    spec.loader.exec_module(module)


if __name__ == "__main__":
    sys.path[:] = [p for p in sys.path if p != os.path.dirname(os.path.abspath(__file__))]  # noqa: PTH100, PTH120
    main(sys.argv[1:])
