"""The names of parameters in the models that were seen running."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional, Tuple

from moediag.protocol.names import plain_name
from moediag.recorder.core import ByObject, Recorder


class ParameterNames:
    """Reads the names again when another model was seen, or other parameters are unknown."""

    def __init__(self, recorder: Recorder, wrapped: Callable[[], List[Any]] = list) -> None:
        self._recorder = recorder
        self._wrapped = wrapped  # models that were not seen running, but were wrapped
        self._names = ByObject()  # parameter -> FQN, number of the model
        self._roots = -1  # number of roots that the names were read from
        self._unknown = 0  # parameters that were in none of them

    def of(self, parameters: List[Any]) -> List[Optional[str]]:
        """Returns each parameter's name without wrappers; None if no observed model has it. Names
        that several models have are numbered in the order of ``parameters``: ``fc.weight (2)``. One
        rank may have called another model first."""
        recorder = self._recorder
        unknown = sum(self._names.get(parameter) is None for parameter in parameters)
        if (self._roots, self._unknown) != (len(recorder.roots), unknown):
            self._roots = len(recorder.roots)
            models: List[Any] = [(prefix, one()) for prefix, one in recorder.roots]
            models += [("", model) for model in self._wrapped()]
            models = [(prefix, root) for prefix, root in models if root is not None]
            have = [{*map(id, root.parameters())} for _, root in models]
            # A part that was called alone first, as at construction, has better names in the whole.
            parts = [any(own < other for other in have) for own in have]
            ordered = sorted(range(len(models)), key=parts.__getitem__)
            for at, (prefix, root) in enumerate(models[number] for number in ordered):
                for name, parameter in root.named_parameters():
                    known = plain_name(prefix + name), at
                    self._names.setdefault(parameter, known)
                    # Megatron's optimizer has a float32 copy instead.
                    copy = getattr(parameter, "main_param", None)
                    if copy is not None and not getattr(parameter, "main_param_sharded", False):
                        self._names.setdefault(copy, known)
            # Those that a program makes anew in every step are unknown again in the next one.
            self._unknown = sum(self._names.get(parameter) is None for parameter in parameters)
        return _told_apart([self._names.get(parameter) for parameter in parameters])

    def known(self, parameters: List[Any]) -> List[Tuple[str, Any]]:
        """The parameters that have a name, with it."""
        return [(n, p) for n, p in zip(self.of(parameters), parameters) if n]  # noqa: B905


def parameters_of(optimizer: Any) -> List[Any]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _told_apart(found: List[Optional[Tuple[str, int]]]) -> List[Optional[str]]:
    """The names, with a number where models in the list have the same."""
    models: Dict[str, Dict[int, int]] = {}
    for name, model in filter(None, found):
        own = models.setdefault(name, {})
        own.setdefault(model, len(own) + 1)

    def told(name: str, model: int) -> str:
        number = models[name][model]
        return name if number == 1 else f"{name} ({number})"

    return [None if one is None else told(*one) for one in found]
