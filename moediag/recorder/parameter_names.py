"""The names of parameters in the models that were seen running."""

from __future__ import annotations

from typing import Any, Callable, List, Optional

from moediag.protocol.names import plain_name
from moediag.recorder.core import ByObject, Recorder


class ParameterNames:
    """Reads the names again when another model was seen, or other parameters are unknown."""

    def __init__(self, recorder: Recorder, wrapped: Callable[[], List[Any]] = list) -> None:
        self._recorder = recorder
        self._wrapped = wrapped  # models that were not seen running, but were wrapped
        self._names = ByObject()  # parameter -> FQN
        self._roots = -1  # number of roots that the names were read from
        self._unknown = 0  # parameters that were in none of them

    def of(self, parameters: List[Any]) -> List[Optional[str]]:
        """Returns each parameter's name without wrappers; None if no observed model has it."""
        recorder = self._recorder
        unknown = sum(self._names.get(parameter) is None for parameter in parameters)
        if (self._roots, self._unknown) != (len(recorder.roots), unknown):
            self._roots = len(recorder.roots)
            for prefix, reference in recorder.roots:
                root = reference()
                for name, parameter in root.named_parameters() if root is not None else ():
                    self._names.setdefault(parameter, plain_name(prefix + name))
                    # Megatron's optimizer has a float32 copy instead.
                    copy = getattr(parameter, "main_param", None)
                    if copy is not None and not getattr(parameter, "main_param_sharded", False):
                        self._names.setdefault(copy, plain_name(prefix + name))
            for model in self._wrapped():
                for name, parameter in model.named_parameters():
                    self._names.setdefault(parameter, plain_name(name))
            # Those that a program makes anew in every step are unknown again in the next one.
            self._unknown = sum(self._names.get(parameter) is None for parameter in parameters)
        return [self._names.get(parameter) for parameter in parameters]
