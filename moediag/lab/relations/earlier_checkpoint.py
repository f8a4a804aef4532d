"""A checkpoint of the earlier release is loaded by this one.

The earlier release saves tiny models with their logits (:func:`save`), in a process of its own.
Only a hunt of two releases has such files.
"""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import Any, Dict, Sequence, Tuple

import torch

from moediag.lab.relations.relation import Case, Relation, Tensors, logits
from moediag.lab.step.models import release_families
from moediag.lab.step.models.checkpoint import dtype_argument
from moediag.lab.step.models.release_families import from_pretrained
from moediag.protocol import EARLIER_CHECKPOINT, SIZES
from moediag.recorder.not_applicable import NotApplicable

LOGITS = "logits.pt"


class EarlierCheckpoint(Relation):
    name = EARLIER_CHECKPOINT
    says = (
        "a checkpoint that the earlier release saved loads without a missing or unexpected name, "
        "and gives the same logits"
    )
    floor = 1e-3  # two releases may add up in another order
    route = "names are missing, or what is saved again differs from the earlier release's files"

    def ways(self, case: Case) -> Sequence[str]:
        if not case.earlier:
            raise NotApplicable("there is no earlier release (--against)")
        return ("from-pretrained",)

    def plain(self, case: Case, way: str) -> Tensors:
        return {"logits": torch.load(_folder(case) / LOGITS, weights_only=True)}

    def other(self, case: Case, way: str) -> Tensors:
        model, wrong = _loaded(case)
        with torch.no_grad():
            found = {"logits": logits(model.to(case.dtype), case.tokens())}
        return {**found, **{name: torch.ones(()) for name in wrong}}

    def second(self, case: Case, way: str, wrong: Sequence[str]) -> bool:
        model, names = _loaded(case)
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            again, before = _tensors(Path(folder)), _tensors(_folder(case))
        same = again.keys() == before.keys()
        return bool(names) or not (same and all(torch.equal(again[n], before[n]) for n in before))


def save(case: Case, folder: Path) -> None:
    """Saves what the relation needs on the later release: a model for each seed and size. Raises
    what building and saving raise."""
    for seed, size in ((0, SIZES[0]), (1, SIZES[0]), (0, SIZES[1])):
        one = dataclasses.replace(case, seed=seed, size=size, earlier=str(folder))
        model: Any = one.model()
        model.save_pretrained(str(_folder(one)))
        with torch.no_grad():
            torch.save(logits(model, one.tokens()), _folder(one) / LOGITS)


def _folder(case: Case) -> Path:
    return Path(case.earlier, f"{case.seed}-{SIZES.index(case.size)}")


def _loaded(case: Case) -> Tuple[Any, Sequence[str]]:
    """Returns the model, and what its loading reports, by name."""
    dtype: Dict[str, Any] = {dtype_argument(): torch.float32}
    loader = release_families.model_class(case.family)
    model, report = from_pretrained(
        loader, case.family.config, str(_folder(case)), output_loading_info=True, **dtype
    )
    kinds = ("missing_keys", "unexpected_keys", "mismatched_keys")
    wrong = [f"{kind.split('_')[0]} {name}" for kind in kinds for name in report.get(kind) or ()]
    return model.eval(), sorted(wrong)


def _tensors(folder: Path) -> Tensors:
    from safetensors.torch import load_file

    return {n: t for file in folder.glob("*.safetensors") for n, t in load_file(file).items()}
