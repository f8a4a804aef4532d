"""Parameters of an optimizer train: they have gradients, change, and stay finite."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

from moediag.diagnosis.facts import Facts
from moediag.diagnosis.laws.large_calls import elements
from moediag.diagnosis.laws.law import Broken, Findings, Suspicious, law, recorded
from moediag.diagnosis.laws.unreduced_calls import lines_of
from moediag.evidence.law_model import (
    NO_GRADIENT,
    ZERO_GRADIENT,
    LawCheck,
    plain_names,
    trains,
)
from moediag.evidence.model import Collective, Evidence
from moediag.protocol.names import is_router, plain_name
from moediag.result import Verdict
from moediag.result.wording import at_line, counted, listed, plural, ranks

_ENOUGH = 3  # checked steps
_MOST_NAMES = 20  # that a check lists
_ADAPTER = re.compile(r"(^|\.)lora_(embedding_)?[AB](\.|$)")

_Checks = dict[int, list[LawCheck]]  # of one optimizer, by rank


def _optimizers(evidence: Evidence) -> tuple[_Checks, ...]:
    found: dict[str, _Checks] = defaultdict(lambda: defaultdict(list))
    for rank, own in recorded(evidence).items():
        for check in own.checks:
            if check.optimizer:
                found[check.key][rank].append(check)
    return tuple(found.values())


def _long(facts: Facts) -> list[_Checks]:
    """Optimizers that were checked often enough on every rank."""
    every = facts.of(_optimizers)
    return [of for of in every if all(len(checks) >= _ENOUGH for checks in of.values())]


def _name(of: _Checks) -> str:
    return next(iter(of.values()))[0].optimizer


@law(Verdict.NONFINITE)
def parameters_not_finite(facts: Facts) -> Findings:
    """Parameters of a watched job became nan or infinite."""
    every = [one for one in map(_not_finite, facts.of(_optimizers)) if one]
    if not every:
        return
    found = min(every, key=lambda rows: rows[0][2].step)
    of_ranks = [[n for n in new.nonfinite if n not in old.nonfinite] for _, old, new in found]
    names = dict.fromkeys(name for of in of_ranks for name in of)
    grads = dict.fromkeys(name for _, old, _ in found for name in old.nonfinite_grads)
    already = dict.fromkeys(name for _, old, _ in found for name in old.nonfinite)
    first, before = found[0][2], max(old.step for _, old, _ in found)
    text = (
        f"When the optimizer{at_line(first.line)} stepped in step {first.step}, {listed(names)} "
        f"had elements that are not finite, on {ranks(rank for rank, _, _ in found)}; in step "
        f"{before} they were finite."
    )
    if grads:
        text += f" In step {before} the gradient of {listed(grads)} was not finite."
    if already:
        text += f" {listed(already)} had elements that are not finite before that."
    rows = (checks for of in facts.of(_optimizers) for checks in of.values())
    later = [check for checks in rows for check in checks if check.step >= first.step]
    # A scaler that overflows once is healthy.
    overflows = {check.step for check in later if check.nonfinite_grads}
    spread = bool(grads) or overflows == {check.step for check in later}
    seen = any(grad not in (None, NO_GRADIENT) for check in later for grad in check.grads)
    if seen and not spread and len(names) < _MOST_NAMES:
        # An expert that is pruned by a bias of -inf, for example: no gradient is affected.
        yield Suspicious(f"{text} All gradients are finite, so it may be intended.", tuple(names))
        return
    yield Broken(
        text,
        pattern="parameters",
        next_step="Run again with `--laws-every 1` to see which gradient is the first one.",
        lasting=True,
        names=tuple(names),
    )


def _not_finite(of: _Checks) -> list[tuple[int, LawCheck, LawCheck]]:
    """The ranks on which it shows first, the last check at which parameters were finite, and the
    next one. Before the first check, they may be meant so."""
    found = []
    for rank, checks in of.items():
        for earlier, check in pairwise(checks):
            known = len(earlier.nonfinite) < _MOST_NAMES  # else some may be left out
            if known and set(check.nonfinite) - set(earlier.nonfinite):
                found.append((rank, earlier, check))
                break
    first = min((check.step for _, _, check in found), default=0)
    return [one for one in found if one[2].step == first]


@law(suspects=True)
def parameters_not_initialised(facts: Facts) -> Findings:
    """Parameters were not finite before the first update, or nothing was written into them or into
    buffers that `to_empty` made."""
    every = facts.of(recorded).values()
    rows = [own.rows("unwritten", line=str, names=plain_names) for own in every]
    if rows and all(rows):  # else other ranks may send them
        line, found = rows[0][0]
        unwritten = [name for name in found if all(name in of for ((_, of), *_) in rows)]
        if unwritten:
            yield Suspicious(
                f"Nothing was written into {listed(unwritten)} between to_empty{at_line(line)} and "
                "the first update, on any rank: they hold what the memory had before. Initialise "
                "or load all parameters, and compute buffers that are not saved again.",
                tuple(unwritten),
            )
    firsts = (checks[0] for of in facts.of(_optimizers) for checks in of.values())
    names = dict.fromkeys(n for check in firsts if check.count == 0 for n in check.nonfinite)
    if names:
        yield (
            f"Before the first update, {listed(names)} had elements that are not finite: "
            "they may never have been initialised."
        )


@law(Verdict.WRONG_GRADIENTS, suspects=True)
def adapters_untrained(facts: Facts) -> Findings:
    """None of the low-rank adapters that an optimizer of a watched job trains ever had a gradient,
    or both factors of all of them were zeros in the first steps, or routers had only zeros, or
    modules run without gradients inside a forward with gradients."""
    for of in _long(facts):
        gradients = _gradients(of)
        without = {n for n, seen in gradients.items() if seen == {NO_GRADIENT}}
        none = {n for n, seen in gradients.items() if seen <= {ZERO_GRADIENT, NO_GRADIENT}}
        zeros = {name for name in none if ZERO_GRADIENT in gradients[name]}
        adapters = {name for name in gradients if _ADAPTER.search(name)}
        dead = adapters if adapters <= without | zeros and not facts.of(_complete_later) else set()
        if adapters and all(_of_zeros(checks) >= adapters for checks in of.values()):
            yield Broken(
                f"{plural(len(adapters), 'adapter parameter')} of {_name(of)} "
                f"({listed(sorted(adapters))}) had only zeros, and gradients of zeros, in the "
                f"first {_ENOUGH} checked steps: both factors of each adapter begin with zeros, so "
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
                unsent = not zero and [one for one in lines_of(facts, "unsent") if one]
                if unsent:
                    yield Suspicious(
                        f"{text} FSDP2 computed some of them and reduced none before the updates "
                        f"at {unsent[0]}: set_requires_gradient_sync(False) was not undone.",
                        tuple(names),
                    )
                    continue
                nothing = Suspicious(f"{text} The updates train nothing.", tuple(names))
                others = (rows for one in facts.of(_optimizers) for rows in one.values())
                # This one has none, or only some of zeros.
                others_train = any(trains((g,)) for rows in others for c in rows for g in c.grads)
                every = len(names) == len(gradients) > 1
                yield nothing if every and (zero or others_train) else text


def _of_zeros(checks: Sequence[LawCheck]) -> set[str]:
    """Parameters of zeros that had gradients of zeros in the first checked steps."""
    rows = [
        {
            piece.name
            for piece, value, grad in zip(check.pieces, check.params, check.grads, strict=False)
            if piece.shape and value == f"{elements(piece.shape):x}" and grad == ZERO_GRADIENT
        }
        for check in checks[:_ENOUGH]
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
        if len({call.step for call in forward}) < _ENOUGH or len(forward) < len(calls):
            return
        found += forward[:1]
    of_names = (one for of in _long(facts) for one in _gradients(of).items())
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
    return frozenset.intersection(*rows) if len(rows) >= _ENOUGH else frozenset()


def _gradients(of: _Checks) -> dict[str, set[str | None]]:
    """All gradients of each parameter; None among them where one is unknown. A shard that is on
    other ranks is unknown on all steps of a rank, and left out there."""
    found: dict[str, set[str | None]] = defaultdict(set)
    for checks in of.values():
        for at, piece in enumerate(checks[0].pieces):
            own = {check.grads[at] for check in checks if at < len(check.grads)}
            found[piece.name] |= own if own != {None} else set()
    return found


def _starved(of: _Checks, names: Sequence[str], zero: bool, what: str = "parameter") -> str:
    kind = "only gradients of zeros" if zero else "no gradient"
    steps = min(map(len, of.values()))
    return (
        f"{plural(len(names), what)} of {_name(of)} ({listed(names)}) had {kind} in all {steps} "
        "checked steps, on every rank"
    )


@law(suspects=True)
def learning_rate_zero(facts: Facts) -> Findings:
    """The learning rates of an optimizer were 0 in all checked steps on all ranks; or from some
    step on, for at least half of the updates that were made. Or they changed for some of its
    groups only."""
    names: dict[str, None] = {}
    for of in _long(facts):
        moves, stays = _scheduled_in_part(of)
        if stays:
            check = next(iter(of.values()))[0]
            yield Suspicious(
                f"The learning rate of {_name(of)}{at_line(check.line)} changes in "
                f"{listed(moves)} over the checked steps, and stays the same in {listed(stays)}, "
                "which had the same rate and has the same options: a schedule sets it for some "
                "parameter groups only."
            )
        steps: dict[int, bool] = defaultdict(lambda: True)  # whether all rates are 0
        lines: dict[int, str] = {}
        for check in (check for checks in of.values() for check in checks if check.hyper):
            steps[check.step] &= all(group.get("lr") in ("0", "0.0") for group in check.hyper)
            lines[check.step] = check.line
        if steps and all(steps.values()):
            names[_name(of)] = None
        last = max((step for step, zero in steps.items() if not zero), default=0)
        since = sorted(step for step in steps if step > last)
        # Between two checks a rate that comes back to 0, as in cycles, would move parameters.
        kept = all(
            len({check.params for check in checks if check.step > last}) == 1
            for checks in of.values()
        )
        if last and len(since) > 1 and since[-1] >= 2 * since[0] and kept:
            yield Suspicious(
                f"The learning rate of {_name(of)} is 0 from step {since[0]} (of {since[-1]} or "
                f"more) on{at_line(lines[since[0]])}, on all ranks: updates change "
                "nothing any more. A schedule ends too early where it counts micro-batches, or the "
                "updates of all ranks, or gets a number of steps that is divided by them."
            )
    for name in names:
        yield f"The learning rate of {name} was 0 in all checked steps: its updates change nothing."


def _scheduled_in_part(of: _Checks) -> tuple[list[str], list[str]]:
    """The groups of an optimizer whose rates change, and those with parameters whose rates do not,
    although both had one rate at a check and have the same options. None of the latter if one of
    torch's schedulers sets them: it leaves a group alone only if it is asked to."""
    checks = next(iter(of.values()))
    rates = [[group.get("lr") for group in row] for row in zip(*(one.hyper for one in checks))]  # noqa: B905
    held = {piece.group for piece in checks[0].pieces}
    options = [{**group, "lr": "", "weight_decay": ""} for group in checks[0].hyper]
    moves = [at for at, own in enumerate(rates) if len(set(own)) >= _ENOUGH]
    stays = [
        at for at, own in enumerate(rates)
        if at in held and len(set(own)) == 1 and own[0] not in (None, "0", "0.0")
        and "initial_lr" not in options[at]
        and any(own[0] in rates[one] and options[at] == options[one] for one in moves)
    ]  # fmt: skip
    return [f"group {at}" for at in moves], [f"group {at}" for at in stays]


@law(Verdict.WRONG_WEIGHTS)
def updates_undone(facts: Facts) -> Findings:
    """An optimizer of a watched job updates a parameter, and the program writes the old value
    back."""
    names = _undone(facts)
    text = (
        f"The optimizer changed {counted(names)} in its updates, and before each next update "
        f"{'they' if len(names) > 1 else 'it'} had the first value again: after the update "
        "something writes old values into the model"
    )
    # A scale may be pressed against a bound, and a mask may prune a whole layer.
    if names and facts.of(_free).isdisjoint(names):
        yield Suspicious(f"{text}, or bounds or masks it.", names)
    elif names:
        yield Broken(
            f"{text}.",
            pattern="undone",
            next_step="Look for what writes parameters after the update: a copy from weights that "
            "are kept elsewhere and were not updated, or a broadcast or load of old values.",
            names=names,
        )


def _free(evidence: Evidence) -> frozenset[str]:
    """Matrices with elements other than zero."""
    return frozenset(
        piece.name
        for own in recorded(evidence).values()
        for check in own.checks
        for piece, value in zip(check.pieces, check.params, strict=False)
        if "x" in piece.shape and value != f"{elements(piece.shape):x}"
    )


def _undone(facts: Facts) -> tuple[str, ...]:
    """Parameters that changed in updates and never between checks, of an optimizer whose other
    parameters do."""
    found: dict[str, None] = {}
    for of in _long(facts):
        updates: dict[int, set[str]] = defaultdict(set)
        for rank in of:
            for step, changed in facts.of(recorded)[rank].rows(
                "updated", step=int, names=plain_names
            ):
                updates[step] |= {*changed}
        still = _still(of)
        if set(still) < {piece.name for checks in of.values() for piece in checks[0].pieces}:
            often = [n for n in still if sum(n in of for of in updates.values()) >= _ENOUGH - 1]
            found |= dict.fromkeys(often)
    return tuple(found)


@law(suspects=True)
def weights_returned(facts: Facts) -> Findings:
    """Parameters had again the values of a much earlier update, so what was trained in between is
    lost."""
    returns = dict.fromkeys(
        one
        for own in facts.of(recorded).values()
        for one in own.rows("returned", step=int, name=plain_name, since=int)
    )
    # Several tasks that begin from the same weights return to other ones later.
    if returns and len({since for _, _, since in returns}) == 1:
        step, _, since = next(iter(returns))
        names = tuple(dict.fromkeys(name for _, name, _ in returns))
        steps = dict.fromkeys(step for step, _, _ in returns)
        more = f" (and in {plural(len(steps) - 1, 'later step')})" if len(steps) > 1 else ""
        yield Suspicious(
            f"Before the update of step {step}{more} {listed(names)} had exactly the values of "
            f"step {since} again: something writes weights of an earlier time into the model, such "
            "as a backup that is not renewed, and what was trained in between is lost.",
            names,
        )


@law(suspects=True)
def parameters_still(facts: Facts) -> Findings:
    """Parameters never changed although they had gradients and a learning rate."""
    undone = _undone(facts)
    still = dict.fromkeys(name for of in _long(facts) for name in _still(of))
    # The gradient of a bias before a normalisation is a rounding error, whatever the dtype.
    with_weight = {f"{name.removesuffix('.weight')}.bias" for name in still}
    names = tuple(
        name
        for name in still
        if name not in undone and (name in with_weight or not name.endswith(".bias"))
    )
    if names:
        yield Suspicious(
            f"{counted(names)} did not change between the checked steps, though gradients and "
            "learning rate were not zero: updates may round to nothing in the parameters' dtype.",
            names,
        )


def _still(of: _Checks) -> list[str]:
    """Parameters that kept their bytes over all checked steps, on every rank that holds them."""
    moved: set[str] = set()
    held: dict[str, bool] = {}
    for checks in of.values():
        for at, piece in enumerate(checks[0].pieces):
            rows = [(check.params[at], check.grads[at], _rate(check, at)) for check in checks]
            if any(grad is None for _, grad, _ in rows):
                continue
            trained = all(
                grad not in (NO_GRADIENT, ZERO_GRADIENT) and rate for _, grad, rate in rows[:-1]
            )
            held.setdefault(piece.name, True)
            if not trained or len({param for param, _, _ in rows}) != 1 or rows[0][0] is None:
                moved.add(piece.name)
    return [name for name in held if name not in moved]


def _rate(check: LawCheck, at: int) -> float:
    """The learning rate of a piece; 0 if it is unknown."""
    group = check.pieces[at].group
    text = check.hyper[group].get("lr", "0") if group < len(check.hyper) else "0"
    try:
        return float(text)
    except ValueError:
        return 0.0


@law(Verdict.WRONG_WEIGHTS)
def copies_apart(facts: Facts) -> Findings:
    """An optimizer of a watched job updates its copy of a parameter, and the model keeps the first
    value; or the first update writes such copies over the weights of the model."""
    yield from _overwritten(facts)
    found: dict[str, None] = {}
    for own in facts.of(recorded).values():
        of_model: dict[str, list[LawCheck]] = defaultdict(list)
        for check in own.checks:
            if check.copies:
                of_model[check.key].append(check)
        for checks in of_model.values():
            found |= dict.fromkeys(_not_copied(checks))
    if found:
        names = tuple(found)
        yield Broken(
            f"The optimizer updated its copies of {counted(names)}, and the model kept the first "
            f"{'values' if len(names) > 1 else 'value'} in all checked steps, though it computes "
            "gradients with them: the updates were never copied into the model.",
            pattern="copies",
            next_step="Copy each updated parameter of the optimizer into the model.",
            lasting=True,
            names=names,
        )


def _overwritten(facts: Facts) -> Findings:
    """Whether parameters differed from DeepSpeed's copies of them before the first update only."""
    rows = [own.rows("copied", step=int, apart=plain_names) for own in facts.of(recorded).values()]
    every = [check for of in facts.of(_optimizers) for checks in of.values() for check in checks]
    first = {check.step for check in every if not check.count}
    known = all(len(own) >= _ENOUGH and own[0][0] in first for own in rows)
    names = tuple(dict.fromkeys(name for own in rows for _, of in own[:1] for name in of))
    if names and known and not any(of for own in rows for _, of in own[1:]):
        yield Broken(
            f"Before the first update {plural(len(names), 'parameter')} ({listed(names)}) had "
            "other values than DeepSpeed's copies in float32, and in later steps the same ones: "
            "the update wrote the copies over what was loaded after the engine was made.",
            pattern="overwritten",
            next_step="Load the weights before `deepspeed.initialize`, or call "
            "`engine.optimizer.refresh_fp32_params()` after loading.",
            lasting=True,
            names=names,
        )


def _not_copied(checks: Sequence[LawCheck]) -> list[str]:
    """Parameters that never changed and had gradients, while their copies did; nothing if all of
    the model is so: it may be another model than the one that trains."""
    trained = [
        (piece.name, {check.params[at] for check in checks}, [c.copies.get(at) for c in checks])
        for at, piece in enumerate(checks[0].pieces)
        if trains(check.grads[at] for check in checks)
    ]
    still = [
        name
        for name, params, copies in trained
        if len(params) == 1 and params == {copies[0]} and len(set(copies)) == len(copies) >= _ENOUGH
    ]
    return still if any(len(params) > 1 for _, params, _ in trained) else []
