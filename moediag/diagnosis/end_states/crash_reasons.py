"""Explains crashes whose message does not say what to change: models that DistributedDataParallel
found to differ, and a call of the optimizer or of clipping that got several kinds of tensors."""

from __future__ import annotations

import re
from collections.abc import Iterable

from moediag.diagnosis.end_states.failures import Failure
from moediag.evidence.model import Evidence
from moediag.result.wording import by_value, capital, on_each, ranks

_UNKNOWN = " It is not known which of them is wrong."
UNEQUAL_NEXT = "Make the same model on all ranks before DistributedDataParallel wraps it."
# From torch/csrc/distributed/c10d/reducer.cpp. Every rank raises it.
_COUNTS = re.compile(r"Rank (\d+) has (\d+) params, while rank (\d+) has inconsistent (\d+) params")
# The same file's; every rank that differs from the first one raises it.
_SIZES = re.compile(
    r"\[(\d+)\]: params\[\d+\] in this process with sizes (\[[^]]*\]) appears not to match sizes "
    r"of the same param in process (\d+)"
)
GROUP = "optimizer-group"
# From torch/distributed/tensor/_dispatch.py and _ops; the operator shows the caller.
_MIXED = re.compile(r"(?<!\S)(\S+) got mixed torch\.Tensor and DTensor")
_MESHES = re.compile(r"operands in (\S+) must have the same mesh", re.IGNORECASE)
# Operators that only clipping calls. An optimizer (decoupled weight decay) calls foreach_mul_ too.
_OF_CLIPPING = re.compile(r"foreach_norm|linalg_vector_norm|aten\.stack|clip_grad")


def unequal_models(alike: Iterable[Failure], world: int) -> tuple[tuple[int, ...], str] | None:
    """The ranks whose models are unlike those of more than half of all ranks, () if it is not known
    which are wrong, and how many parameters each has; None where another error was raised. A
    message names the first rank that differs: without those of the others it may be right.
    ``world``: the number of ranks, 0 if unknown."""
    counts: dict[int, int] = {}
    sizes: dict[int, str] = {}
    first = 0
    for failure in alike:
        for one, its, other in _SIZES.findall(failure.message):
            first, sizes[int(one)] = int(other), its
        for one, its, other, theirs in _COUNTS.findall(failure.message):
            counts |= {int(one): int(its), int(other): int(theirs)}
    if sizes and not counts:
        differ, same = len(sizes), len({*sizes.values()}) == 1
        odd = tuple(sorted(sizes)) if 0 < 2 * differ < world else ()
        odd = (first,) if same and 0 < world < 2 * differ else odd
        text = f"Its sizes are {', '.join(on_each(sizes))}, and others on rank {first}."
        return odd, text if odd else f"{text}{_UNKNOWN}"
    if not counts:
        return None
    most = max(by_value(counts).values(), key=len)
    sure = 0 < world < 2 * len(most)
    odd = tuple(sorted(counts.keys() - {*most})) if sure else ()
    unknown = "" if odd else _UNKNOWN
    return odd, f"The numbers of parameters are {', '.join(on_each(counts))}.{unknown}"


def mixed_group(evidence: Evidence, own: Iterable[Failure]) -> str:
    """Why one call got several kinds of tensors; "" where another error was raised."""
    for failure in own:
        mixed, meshes = _MIXED.search(failure.message), _MESHES.search(failure.message)
        if mixed is None and meshes is None:
            continue
        operator = (mixed or meshes)[1]  # type: ignore[index]
        if _OF_CLIPPING.search(operator):
            return _clipping(mixed is not None)
        if mixed is not None and (told := _groups(evidence)):
            return told
    return ""


def _groups(evidence: Evidence) -> str:
    """The findings of the ranks, each text with its ranks."""
    together: dict[str, list[int]] = {}
    for rank, seen in sorted(evidence.ranks.items()):
        for finding in seen.findings:
            if finding.what == GROUP and finding.details.get("raises"):
                together.setdefault(finding.text, []).append(rank)
    if not together:
        return ""
    everywhere = [text for text, who in together.items() if len(who) == len(evidence.ranks)]
    texts = everywhere or [f"on {ranks(who)} {text}" for text, who in together.items()]
    told = "; ".join(texts)
    return (
        f"{capital(told)}, and torch takes no plain tensor beside a DTensor. One parameter group "
        "per mesh, or foreach=False without fused, keeps them apart."
    )


def _clipping(plain: bool) -> str:
    what = "plain tensors and DTensors" if plain else "DTensors of several meshes"
    return (
        f"The gradient norm is taken over {what} in one call (torch.nn.utils.clip_grad_norm_). "
        "To avoid it, take the norm of each mesh's gradients separately, then combine the norms."
    )
