"""The folders of the libraries that this process uses, as its stack frames name them."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path
from typing import Any, List, Optional

_PACKAGES = ("site-packages", "dist-packages")


def library_folders() -> List[str]:
    """Returns each folder as imported and, if it differs, with symlinks resolved."""
    found = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    found |= {entry for entry in sys.path if Path(entry).name in _PACKAGES}
    package = Path(__file__).parents[1]
    found.add(str(package))
    # Of a checkout; a wheel has them in the package.
    beside = package.resolve().parent / "scenarios"
    found |= {str(beside / "programs"), str(beside / "fixes")}
    torch = _torch()
    if torch is not None:
        found.add(str(torch))
        if any(torch.parent.glob("torch-*.dist-info")):  # a packages folder with another name
            found.add(str(torch.parent))
    return sorted(found | {str(Path(folder).resolve()) for folder in found})


def _torch() -> Optional[Path]:
    module: Any = sys.modules.get("torch")
    return Path(module.__file__).parent if module is not None else None
