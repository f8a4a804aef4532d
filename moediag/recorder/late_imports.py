"""Starts watchers of optional modules right after the job imports these modules. Importing FSDP
takes a second, which a job that does not use it should not pay."""

from __future__ import annotations

import contextlib
import sys
from typing import Any, Callable


class _Finder:
    def __init__(self, name: str, act: Callable[[], None]) -> None:
        self.name = name
        self.act = act

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != self.name or self not in sys.meta_path:
            return None
        # Python has asked those before it; one of the same module would ask it again.
        later = sys.meta_path[sys.meta_path.index(self) + 1 :]
        specs = (f.find_spec(name, path, target) for f in later if hasattr(f, "find_spec"))
        spec = next((spec for spec in specs if spec is not None), None)
        loader: Any = getattr(spec, "loader", None)
        original = getattr(loader, "exec_module", None)
        if original is None:
            return spec

        def exec_module(module: Any) -> None:
            loader.__dict__.pop("exec_module", None)
            self.remove()
            original(module)
            self.act()

        with contextlib.suppress(AttributeError):  # the loader allows no attributes
            loader.exec_module = exec_module
        return spec

    def remove(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)


def when_imported(name: str, act: Callable[[], None]) -> Callable[[], None]:
    """Calls ``act`` once module ``name`` is imported, or now if it already is. ``act`` must not
    raise. Returns a function that cancels this."""
    if name in sys.modules:
        act()
        return lambda: None
    finder = _Finder(name, act)
    sys.meta_path.insert(0, finder)
    return finder.remove
