"""Every configuration class of the installed transformers release with experts, found by their
fields, not from a list, so that later releases work."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterator, List, Optional

# Enables the auxiliary loss in every family that has one.
_LOSS = "load_balancing_loss_func("
_NAMES_EXPERTS = re.compile(r"^(num|n|moe_num)_.*experts$")
_OTHER_EXPERTS = re.compile(r"shared|per_tok|zero|group|null")
_GENERATES = re.compile(r"ForCausalLM$|ForConditionalGeneration$")


@dataclass(frozen=True)
class Found:
    """``model``: the text generation class of this configuration, None without one. ``has_loss``:
    its module calls an auxiliary loss."""

    config: Any
    model: Optional[Any]
    has_loss: bool

    @property
    def name(self) -> str:
        text: str = self.config.__name__
        return text


def experts_named(config: Any) -> List[str]:
    """Returns the fields of ``config``, aliases included, with the number of routed experts."""
    names = {*vars(config), *(getattr(config, "attribute_map", None) or {})}
    return sorted(n for n in names if counts_experts(n))


def value(config: Any, name: str) -> Any:
    """Returns a field; None if there is none, or if its class raises, as for a size that differs by
    layer (Gemma 4)."""
    try:
        return getattr(config, name, None)
    except Exception:
        return None


def text_of(config: Any) -> Any:
    """Returns the text model's part, or the configuration itself if it has no parts."""
    return config.get_text_config()


def find(with_loss: bool = False) -> Iterator[Found]:
    """Yields all of the release, by module and name, or only those whose module has an auxiliary
    loss. Skips classes that need arguments."""
    import transformers.models

    folder = Path(str(transformers.models.__file__)).parent
    for module in sorted(entry.name for entry in pkgutil.iter_modules([str(folder)])):
        source = folder / module / f"modeling_{module}.py"
        if not source.exists():
            continue
        text = source.read_text(encoding="utf-8")
        if (_LOSS if with_loss else "expert") in text:
            yield from _of_module(module, _LOSS in text)


def _of_module(module: str, has_loss: bool) -> Iterator[Found]:
    package = f"transformers.models.{module}"
    configurations = importlib.import_module(f"{package}.configuration_{module}")
    models = importlib.import_module(f"{package}.modeling_{module}")
    for _, config in inspect.getmembers(configurations, inspect.isclass):
        if config.__module__ != configurations.__name__ or not hasattr(config, "model_type"):
            continue
        made = _made(config)
        if made is not None and any(
            experts_named(part) for part in (made, text_of(made), *_parts(made))
        ):
            yield Found(config, _model_of(models, config), has_loss)


def _made(config: Any) -> Any:
    """Returns the instance; None for composite ones that need their parts."""
    try:
        return config()
    except Exception:
        return None


def _parts(config: Any) -> List[Any]:
    return [value for value in vars(config).values() if hasattr(value, "model_type")]


def _model_of(module: Any, config: Any) -> Optional[Any]:
    """Returns the module's class with this configuration; text generation before other heads."""
    fitting = [
        model
        for name, model in inspect.getmembers(module, inspect.isclass)
        if model.__module__ == module.__name__
        and getattr(model, "config_class", None) is config
        and _GENERATES.search(name)
    ]
    return fitting[0] if fitting else None


def counts_experts(name: str) -> bool:
    return bool(_NAMES_EXPERTS.match(name)) and not _OTHER_EXPERTS.search(name)
