"""What Triton's interpreter needs to run beside the installed NumPy."""

from __future__ import annotations

from typing import Any


def prepare() -> None:
    """Triton 3.6 keeps a scalar as an array of one element and makes a Python number of it by
    ``int(array)``, which NumPy 2.4 refuses; a loop with a bound that is known at run time needs
    it. ``item()`` means the same in every NumPy. Does nothing where that works as released."""
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
