"""The families of the installed transformers release: every model type that generates text.

Which of them have experts is read from their configuration classes, so that a family new in a
release needs no change here.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Tuple

from moediag.lab.step.models import moe_configs
from moediag.protocol import ListedFamily

CAUSAL = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"
MULTIMODAL = "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES"
_EXPERTS = re.compile("expert|moe", re.IGNORECASE)  # in the source of what may have experts


@dataclass(frozen=True)
class ReleaseFamily:
    """One model type of the release."""

    name: str  # its model type
    config: Any  # configuration class
    model: str  # name of the model class


def find(name: str) -> Optional[ReleaseFamily]:
    """Returns the family, None if the release lacks it. Raises what importing it raises."""
    from transformers import CONFIG_MAPPING

    known = _mapped().get(name)
    return None if known is None else ReleaseFamily(name, CONFIG_MAPPING[name], known[0])


def model_class(family: ReleaseFamily) -> Any:
    """Returns the class by its name. Raises what importing it raises."""
    import transformers

    return getattr(transformers, family.model)


def from_pretrained(model: Any, config: Any, folder: str, **options: Any) -> Any:
    """Returns ``model.from_pretrained(folder)`` with the configuration of class ``config``. A model
    class that several model types share names the configuration of one of them."""
    if config is not getattr(model, "config_class", None):
        options["config"] = config.from_pretrained(folder)
    return model.from_pretrained(folder, **options)


def load(name: str) -> None:
    """Imports the family's model. Does nothing if the release lacks the family."""
    family = find(name)
    if family is not None:
        model_class(family)


def listed() -> Iterator[ListedFamily]:
    """Yields each model type of the release. Of several with one model class, one stands for all:
    the one whose configuration that class names."""
    mapped = _mapped()
    for name in sorted(mapped):
        model, mapping = mapped[name]
        others = [n for n, (m, _) in mapped.items() if m == model]
        try:
            kind = "dense" if mapping == CAUSAL else "multimodal"
            if _may_have_experts(name) and _has_experts(name) and mapping == CAUSAL:
                kind = "moe"
            first = _chosen(others) if len(others) > 1 else name
            own_config = first != name and not built_from_a_part(name)
        except Exception as error:
            yield ListedFamily(name, "", f"{type(error).__name__}: {' '.join(str(error).split())}")
            continue
        if first == name:
            yield ListedFamily(name, kind)
        else:
            yield ListedFamily(name, kind, "", first, own_config)


def _mapped() -> Dict[str, Tuple[str, str]]:
    """Returns model type -> (name of the model class, mapping that has it), as the release's own
    automatic classes choose it. A text-only class goes before a multimodal one."""
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    found: Dict[str, Tuple[str, str]] = {}
    for mapping in (CAUSAL, MULTIMODAL):
        for name, model in getattr(auto, mapping, {}).items():
            found.setdefault(name, (model if isinstance(model, str) else model[0], mapping))
    return found


def _chosen(names: List[str]) -> str:
    found = [family for family in map(find, names) if family is not None]
    own = getattr(model_class(found[0]), "config_class", None)
    return next((family.name for family in found if family.config is own), found[0].name)


def built_from_a_part(name: str) -> bool:
    """Whether its model class takes a part of its configuration, which is another model type."""
    family = find(name)
    assert family is not None
    parts = getattr(family.config, "sub_configs", None) or {}
    return getattr(model_class(family), "config_class", None) in parts.values()


def _may_have_experts(name: str) -> bool:
    """Whether the source of its configuration names experts; spares the import of most families."""
    auto = importlib.import_module("transformers.models.auto.configuration_auto")
    module = auto.model_type_to_module_name(name)
    spec = importlib.util.find_spec("transformers")
    assert spec is not None and spec.origin is not None
    source = Path(spec.origin).parent / "models" / module / f"configuration_{module}.py"
    return not source.is_file() or bool(_EXPERTS.search(source.read_text(encoding="utf-8")))


def _has_experts(name: str) -> bool:
    """Whether the configuration, its text part or another part counts routed experts. False for a
    class that needs arguments."""
    from transformers import CONFIG_MAPPING

    try:
        made = CONFIG_MAPPING[name]()
    except Exception:
        return False
    parts = [value for value in vars(made).values() if hasattr(value, "model_type")]
    return any(moe_configs.experts_named(part) for part in (made, *parts))
