"""Parameters of an optimizer have gradients."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence

from moediag.diagnosis.facts import Facts
from moediag.diagnosis.laws.large_calls import elements
from moediag.diagnosis.laws.law import Broken, Findings, Suspicious, law, recorded
from moediag.diagnosis.laws.optimizer_checks import ENOUGH, Checks, class_of, long, optimizers
from moediag.diagnosis.laws.unreduced_calls import lines_of
from moediag.evidence.law_model import NO_GRADIENT, ZERO_GRADIENT, LawCheck, plain_names, trains
from moediag.evidence.model import Collective, Evidence
from moediag.protocol.names import is_router
from moediag.result import Verdict
from moediag.result.wording import at_line, counted, listed, plural

_ADAPTER = re.compile(r"(^|\.)lora_(embedding_)?[AB](\.|$)")


@law(Verdict.WRONG_GRADIENTS, suspects=True)
def adapters_untrained(facts: Facts) -> Findings:
    """None of the low-rank adapters that an optimizer of a watched job trains ever had a gradient,
    or both factors of all of them were zeros in the first steps, or routers had only zeros, or
    modules run without gradients inside a forward with gradients, or units of FSDP2 keep theirs."""
    for of in long(facts):
        gradients = _gradients(of)
        without = {n for n, seen in gradients.items() if seen == {NO_GRADIENT}}
        none = {n for n, seen in gradients.items() if seen <= {ZERO_GRADIENT, NO_GRADIENT}}
        zeros = {name for name in none if ZERO_GRADIENT in gradients[name]}
        adapters = {name for name in gradients if _ADAPTER.search(name)}
        dead = adapters if adapters <= without | zeros and not facts.of(_complete_later) else set()
        if adapters and all(of_zeros(checks) >= adapters for checks in of.values()):
            yield Broken(
                f"{plural(len(adapters), 'adapter parameter')} of {class_of(of)} "
                f"({listed(sorted(adapters))}) had only zeros, and gradients of zeros, in the "
                f"first {ENOUGH} checked steps: both factors of each adapter begin with zeros, so "
                "neither gets a gradient from the other, and they train nothing until one is set.",
                pattern="adapters",
                next_step="Initialise one of the two factors (usually lora_A) with random numbers.",
            )
        elif dead:
            text = _starved(of, sorted(dead), not dead <= without, "adapter parameter")
            yield Broken(
                f"{text}: these adapters train nothing.",
                pattern="adapters",
                next_step="Look for what cuts the graph before the adapters: no_grad, detach, or "
                "gradient checkpointing whose inputs do not require gradients.",
            )
        cut = {name for name in without - dead if name.rpartition(".")[0] in facts.of(_cut)}
        if cut:
            idle = [n for n in gradients if n in cut]
            yield Suspicious(
                f"{_starved(of, idle, False)}. Their modules run without gradients inside a "
                "forward with gradients: under no_grad, or in an autograd.Function that returns no "
                "gradients for parameters, such as a checkpoint of the program's own.",
                tuple(idle),
            )
        experts = any("expert" in n.lower() for n in gradients.keys() - without - zeros)
        candidates = (zeros | without if experts else zeros) - dead - cut
        routers = {n for n in candidates if is_router(n) and n.endswith(".weight")}
        if routers and gradients.keys() - without - zeros:
            zero = not routers <= without
            yield Suspicious(
                f"{_starved(of, sorted(routers), zero, 'router weight')}: they learn nothing, as "
                "when a token has one expert whose weight is normalised to 1, or the weights of "
                "experts are detached, and no auxiliary loss reaches the router.",
                tuple(sorted(routers)),
            )
            zeros, without = zeros - routers, without - routers
        for names, zero in ((without - dead - cut, False), (zeros - dead, True)):
            if names:
                text = f"{_starved(of, [n for n in gradients if n in names], zero)}."
                unsent = not (zero or facts.of(_complete_later)) and lines_of(facts, "unsent")
                if unsent and unsent[0]:
                    yield Broken(
                        f"{text} FSDP2 computed some of them and reduced none before the updates "
                        f"at {unsent[0]}: set_requires_gradient_sync(False) was not undone.",
                        pattern="gradients unsent",
                        next_step="Call set_requires_gradient_sync(True) for all units before the "
                        "last backward of each update: it recurses unless recurse=False.",
                        names=tuple(names),
                    )
                    continue
                nothing = Suspicious(f"{text} The updates train nothing.", tuple(names))
                others = (rows for one in facts.of(optimizers) for rows in one.values())
                # This one has none, or only some of zeros.
                others_train = any(trains((g,)) for rows in others for c in rows for g in c.grads)
                every = len(names) == len(gradients) > 1
                yield nothing if every and (zero or others_train) else text


def of_zeros(checks: Sequence[LawCheck]) -> set[str]:
    """Parameters of zeros that had gradients of zeros in the first checked steps."""
    rows = [
        {
            piece.name
            for piece, value, grad in zip(check.pieces, check.params, check.grads, strict=False)
            if piece.shape and value == f"{elements(piece.shape):x}" and grad == ZERO_GRADIENT
        }
        for check in checks[:ENOUGH]
    ]
    return set.intersection(*rows)


def _complete_later(evidence: Evidence) -> bool:
    """Whether all parameters of a rank had gradients in its last steps, and not in earlier ones:
    parts of a model may train from a later step on than the last one that was checked."""
    ranks = [seen for seen in evidence.ranks.values() if seen.no_gradient]
    return any(max(seen.no_gradient) < seen.last_step - 1 for seen in ranks)


@law(suspects=True)
def exchanges_one_way(facts: Facts) -> Findings:
    """Ranks of a watched job send each other activations in the forward and nothing in the
    backward, and parameters never had a gradient."""
    found: list[Collective] = []
    for seen in facts.evidence.ranks.values():
        calls = [c for c in seen.collectives if c.op == "all_to_all" and "float" in c.dtype]
        forward = [call for call in calls if call.phase == "forward"]
        if len({call.step for call in forward}) < ENOUGH or len(forward) < len(calls):
            return
        found += forward[:1]
    of_names = (one for of in long(facts) for one in _gradients(of).items())
    names = [name for name, seen in of_names if seen == {NO_GRADIENT}]
    if found and names:
        yield Suspicious(
            f"{counted(names)} had no gradient in all checked steps, on every rank. The ranks send "
            f"each other activations by all_to_all in the forward{at_line(found[0].site)}, and in "
            "the backward nothing goes back: torch.distributed's all_to_all has no backward, so "
            "what comes before it gets no gradient. Use "
            "torch.distributed.nn.functional.all_to_all_single, or an autograd.Function that "
            "exchanges the gradients.",
            tuple(names),
        )


def _cut(evidence: Evidence) -> frozenset[str]:
    """Modules whose parameters had no gradient and that ran without gradients in the next forward,
    whenever they were looked at, on all ranks."""
    every = (own.rows("no_grad", modules=plain_names) for own in recorded(evidence).values())
    rows = [frozenset(names) for of in every for (names,) in of]
    return frozenset.intersection(*rows) if len(rows) >= ENOUGH else frozenset()


def _gradients(of: Checks) -> dict[str, set[str | None]]:
    """All gradients of each parameter; None among them where one is unknown. A shard that is on
    other ranks is unknown on all steps of a rank, and left out there."""
    found: dict[str, set[str | None]] = defaultdict(set)
    for checks in of.values():
        for at, piece in enumerate(checks[0].pieces):
            own = {check.grads[at] for check in checks if at < len(check.grads)}
            found[piece.name] |= own if own != {None} else set()
    return found


def _starved(of: Checks, names: Sequence[str], zero: bool, what: str = "parameter") -> str:
    kind = "only gradients of zeros" if zero else "no gradient"
    steps = min(map(len, of.values()))
    return (
        f"{plural(len(names), what)} of {class_of(of)} ({listed(names)}) had {kind} in all {steps} "
        "checked steps, on every rank"
    )
