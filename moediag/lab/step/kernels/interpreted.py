"""Compatibility of Triton's interpreter with the installed NumPy."""

from __future__ import annotations

from typing import Any


def prepare() -> None:
    """Patches Triton 3.6, which keeps a scalar as an array of one element and converts it by
    ``int(array)``, which NumPy 2.4 refuses; a loop with a bound known at run time needs it.
    ``item()`` means the same in every NumPy. Does nothing if the released code works."""
    import numpy

    try:
        int(numpy.ones(1, dtype=numpy.int32))
    except (TypeError, DeprecationWarning):
        pass
    else:
        return
    from triton.runtime import interpreter

    module: Any = interpreter
    released = module._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        released(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    module._patch_lang_tensor = patched
