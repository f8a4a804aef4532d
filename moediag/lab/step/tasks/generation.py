"""``generate`` on ranks that finish at different times, compared with one process.

Each rank continues one prompt greedily. The token that ends it is one that the single process
generates early or late, so ranks with different prompts stop after different numbers of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Dict, List

import torch
import torch.distributed as dist

from moediag.lab.step import data, preparation
from moediag.lab.step.collector import Collector
from moediag.lab.step.models import tiny
from moediag.protocol import GenerateTask, Trial
from moediag.protocol.tolerance import SAME_LOGIT
from moediag.recorder.not_applicable import NotApplicable

LENGTHS = (3, 9)  # tokens after which rank 0's prompt ends, and every other
PROMPTS = 12  # sets of prompts that are tried


@dataclass(frozen=True)
class Continued:
    """What one process generates for one prompt, up to the token that ends it."""

    prompt: torch.Tensor
    tokens: List[int]
    logits: torch.Tensor  # of each token, before it was chosen


def run(collector: Collector) -> None:
    """Generates once. Collective: it ends on all ranks, raises, or hangs, which the trial tests."""
    trial, rank = collector.trial, collector.rank
    assert isinstance(trial.task, GenerateTask)
    with collector.recorder.paused():
        expected = _expected(trial)[rank]
    wrapped = preparation.prepare(trial, collector.device)
    collector.note(*wrapped.notes)
    model: Any = wrapped.model
    model = getattr(model, "module", model).eval()  # DDP's wrapper
    synced: Dict[str, Any] = {"synced_gpus": True} if trial.task.synced else {}
    collector.begin(1)
    prompt = expected.prompt.to(collector.device)
    found = _generate(model, prompt, expected.tokens[-1], **synced)
    tokens = found.sequences[0, prompt.shape[1] :].tolist()
    collector.set(
        tokens=tokens,
        reference_tokens=expected.tokens,
        logit_error=_error(_logits(found), expected.logits),
        steps_done=1,
    )
    dist.barrier()


_known: Dict[str, List[Continued]] = {}  # for the other ways in this process


def _expected(trial: Trial) -> List[Continued]:
    key = repr((trial.model, trial.step, trial.skew, trial.world_size))
    if key not in _known:
        _known[key] = _chosen(trial)
    return _known[key]


def _chosen(trial: Trial) -> List[Continued]:
    """Returns what one process generates for each rank's prompt: the first prompts that end after
    different numbers of tokens, and of which rounding changes no token. Every rank computes all of
    them, so that all refuse alike. Raises NotApplicable."""
    model: Any = tiny.build(trial.model, trial.step.seed).eval()
    if not model.can_generate():
        raise NotApplicable("the model class does not generate")
    for number in range(1, PROMPTS + 1):
        prompts = [data.batch(trial, rank, number, 0)[:1] for rank in range(trial.world_size)]
        alike = [torch.equal(prompt, prompts[0]) for prompt in prompts]
        found = [
            _continued(model, prompt, LENGTHS[0 if same else 1])
            for prompt, same in zip(prompts, alike)  # noqa: B905 - Python 3.9
        ]
        lengths = {len(one.tokens) for one in found}
        if len(lengths) == len(set(alike)) and min(lengths) > 1 and all(map(_clear, found)):
            return found
    raise NotApplicable(
        f"of {PROMPTS} sets of prompts none ends after different numbers of tokens, each of them "
        "clearly the likeliest"
    )


def _continued(model: Any, prompt: torch.Tensor, length: int) -> Continued:
    found = _generate(model, prompt, None)
    tokens: List[int] = found.sequences[0, prompt.shape[1] :].tolist()
    ends = tokens.index(tokens[length - 1]) + 1
    return Continued(prompt, tokens[:ends], _logits(found)[:ends])


def _clear(one: Continued) -> bool:
    """Whether no other token is nearly as likely."""
    first, second = one.logits.topk(2).values.unbind(-1)
    return bool((first - second > SAME_LOGIT * one.logits.abs().max()).all())


def _logits(found: Any) -> torch.Tensor:
    """Returns the logits of each generated token, (tokens, vocabulary)."""
    return torch.cat([scores[:1] for scores in found.scores]).float().cpu()


def _error(found: torch.Tensor, right: torch.Tensor) -> float:
    """Returns the largest difference as a share of the largest logit, over the tokens of both."""
    common = min(len(found), len(right))
    difference = (found[:common] - right[:common]).abs().max()
    return float(difference / right.abs().max())


def _generate(model: Any, prompt: torch.Tensor, end: Any, **options: Any) -> Any:
    """Returns what greedy search finds, without anything that a family's own settings add."""
    with torch.no_grad():
        return model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=max(LENGTHS) + 3,
            do_sample=False, num_beams=1, eos_token_id=end, pad_token_id=0, use_cache=True,
            return_dict_in_generate=True, output_scores=True, **options,
        )  # fmt: skip
