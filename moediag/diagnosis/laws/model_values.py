"""Optimizers have the parameters that train, and what no optimizer changes is equal."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import dropwhile
from typing import Any

from moediag.diagnosis.facts import Facts
from moediag.diagnosis.laws.law import Broken, Findings, Suspicious, law, recorded
from moediag.diagnosis.laws.model_inputs import averaging
from moediag.diagnosis.numbers import agreement
from moediag.diagnosis.numbers.law_breaches import law_facts
from moediag.diagnosis.numbers.reduced_gradients import Sketch, sketch
from moediag.evidence.law_model import ModelState
from moediag.evidence.model import Evidence
from moediag.protocol.names import plain_name
from moediag.result import Verdict
from moediag.result.wording import agreeing, counted, few_on_each, listed, plural, ranks

_ENOUGH = 3  # checked steps
_APART = 1e-3  # of the norm of statistics, by which their last digits never differ


@law(Verdict.WRONG_WEIGHTS)
def model_without_optimizer(facts: Facts) -> Findings:
    """No optimizer of a watched job has the parameters that get gradients."""
    steps, names = facts.of(_untrained)
    if not names:
        return
    yield Broken(
        f"In all {steps} checked steps the parameters of every optimizer had no gradients, while "
        f"{plural(len(names), 'parameter')} of the model ({listed(names)}) had some and never "
        "changed: the optimizer was made from other parameters than those of the model that runs.",
        pattern="untrained",
        next_step="Make the optimizer from the parameters of the model that is trained, after it "
        "was wrapped, moved or replaced.",
    )


@law(Verdict.WRONG_GRADIENTS)
def gradients_absent(facts: Facts) -> Findings:
    """No parameter that an optimizer of a watched job has ever had a gradient."""
    steps, names = facts.of(_untrained)
    if names or not steps:
        return
    yield Broken(
        f"In all {steps} checked steps no parameter of any optimizer had a gradient when the "
        "optimizer stepped: the updates train nothing.",
        pattern="absent",
        next_step="Look for what cuts the graph between the model and the loss: no_grad, detach, "
        ".data, or a loss computed from copied values; or for a missing backward.",
    )


def _untrained(evidence: Evidence) -> tuple[int, tuple[str, ...]]:
    """How many steps were checked, in none of which a parameter of an optimizer had a gradient or
    changed; and parameters that no optimizer has, had gradients and never changed. (0, ()) if one
    trains."""
    found: tuple[int, tuple[str, ...]] = 0, ()
    for own in recorded(evidence).values():
        states, keys = own.models, {check.key for check in own.checks}
        moves = any(len({*v}) > 1 for key in keys for v in own.values(key).values())
        if moves or len(states) < _ENOUGH or not all(state.idle for state in states):
            return 0, ()  # moves: updates without gradients, or in the backward
        first = states[0].left_out
        if None in first.values() or any(state.left_out != first for state in states):
            return 0, ()
        found = found if found[0] else (len(states), tuple(first))
    return found


@law(Verdict.WRONG_WEIGHTS)
def ties_lost(facts: Facts) -> Findings:
    """Two names of a watched job's model were one parameter, and later one of them is another
    parameter, which no optimizer has."""
    lost: list[dict[tuple[str, str], int]] = []
    for states in facts.of(_states).values():
        own: dict[tuple[str, str], int] = {}
        for names in states[0].tied:
            for state in states[1:]:
                now = next((other for other in state.tied if names[0] in other), (names[0],))
                for name in set(names) - set(now):
                    if all(one.left_out.get(name) for one in states if one.step >= state.step):
                        own.setdefault((names[0], name), state.step)
        lost.append(own)
    for names, step in lost[0].items() if lost else ():
        if all(own.get(names) == step for own in lost):
            yield Broken(
                f"{names[0]} and {names[1]} were one parameter at first. Since step {step} "
                f"{names[1]} is a different one, which no optimizer has, so it does not train.",
                pattern="tie lost",
                next_step="Tie the two again after whatever replaces parameters (loading, moving, "
                "sharding), before the optimizer is made.",
                names=names[1:],
            )


@law(Verdict.WRONG_WEIGHTS)
def parameters_replaced(facts: Facts) -> Findings:
    """Parameters of a watched job's model were replaced after its optimizer was made, which has the
    old ones."""
    found = [own.models for own in facts.of(recorded).values()]
    names = found[0][-1].replaced if found and found[0] else ()
    # They may be replaced after some steps.
    found = [(*dropwhile(lambda s: names[0] not in s.left_out, of),) for of in found if names]
    every = (of for of in found if len(of) >= _ENOUGH and all(s.replaced == names for s in of))
    # An optimizer with copies of its own may read the gradients itself, and write back.
    values = {(r, n, s.left_out.get(n)) for r, of in enumerate(found) for s in of for n in names}
    if names and len(list(every)) == len(found) and len(values) == len(names) * len(found):
        yield Broken(
            f"In all checked steps since step {found[0][0].step} {counted(names)} had gradients "
            "and no optimizer has them; the optimizers have as many of the same shapes that belong "
            "to no module any more and have no gradient: these were replaced after the optimizer "
            "was made, and what replaced them does not train.",
            pattern="replaced",
            next_step="Make the optimizer, and the wrapper, after the last change of the model.",
            names=names,
        )


@law(suspects=True)
def buffers_apart(facts: Facts) -> Findings:
    """Buffers or frozen parameters differ between ranks that average their gradients, and they
    never changed, or changed on some of these ranks only; or statistics that follow each rank's own
    samples: of normalizers, of codebooks, or of a router's load."""
    if own := facts.of(_own_statistics):
        yield Suspicious(
            f"{counted(own, 'buffer')} {agreeing('follows', own)} each rank's own samples and "
            f"{agreeing('differs', own)} between ranks that average their gradients, so these "
            "compute with different models. Add up over the ranks what such statistics are made "
            "of, or send them from one rank to all.",
            own,
        )
    rows: dict[tuple[tuple[int, ...], str], dict[int, list[str | None]]] = defaultdict(dict)
    for rank, states in facts.of(_states).items():
        for state in states:
            for over, buffers in state.buffers:
                for name, value in buffers.items():
                    rows[over, name].setdefault(rank, []).append(value)
    found: dict[tuple[tuple[int, ...], tuple[int, ...]], list[str]] = defaultdict(list)
    for (over, name), of in rows.items():
        changed = tuple(rank for rank, values in of.items() if len(set(values)) > 1)
        known = all(len(v) >= _ENOUGH and None not in v for v in of.values())
        equal_first, equal_last = (
            len({values[at] for values in of.values()}) == 1 for at in (0, -1)
        )
        apart = not equal_last and equal_first == bool(changed)
        if set(of) == set(over) and known and apart and len(changed) < len(of):
            found[over, changed].append(name)
    for (over, changed), names in found.items():
        if not changed:
            yield (
                f"{counted(names, 'buffer')} never changed and {agreeing('differs', names)} "
                f"between {ranks(over)}, which average their gradients: each computes with "
                "different constants."
            )
            continue
        yield Suspicious(
            f"{counted(names, 'buffer or frozen parameter')} {agreeing('was', names)} equal on "
            f"{ranks(over)}, which average their gradients, and {agreeing('has', names)} since "
            f"changed on {ranks(changed)} only, as when one rank merges adapters to save a model "
            "and does not undo it.",
            tuple(names),
        )
        return


def _own_statistics(evidence: Evidence) -> tuple[str, ...]:
    """Buffers with statistics that changed on a rank and differ in the last checked steps between
    ranks that average gradients, and that the program sends nowhere."""
    laws, found = recorded(evidence), dict[str, None]()
    sent = {
        call.numel_in
        for seen in evidence.ranks.values()
        for call in seen.collectives
        if call.step > 1 and call.numel_in > 1 and "float" in call.dtype and not call.parameters
    }  # some are made equal from time to time
    for over in sorted(averaging(evidence)):
        rows = {rank: laws[rank].of("statistics", _values) for rank in over if rank in laws}
        steps = [*agreement.together(rows).values()] if len(rows) == len(over) > 1 else []
        every = [set(of) for step in steps for of in step.values()]
        names = sorted(set.intersection(*every)) if len(steps) >= _ENOUGH else []
        sizes = [n for _, n in (steps[0][over[0]][name] for name in names)]
        for name in names if sent.isdisjoint((*sizes, sum(sizes))) else ():
            values = [[of[name][0] for of in step.values()] for step in steps]
            changed = any(len({*row}) > 1 for row in zip(*values, strict=True))
            if changed and all(agreement.far(row) > _APART for row in values[-_ENOUGH:]):
                found[name] = None
    return tuple(found)


def _values(event: Mapping[str, Any]) -> tuple[int, dict[str, tuple[Sketch, int]]]:
    """The step, and by name the sketch of a buffer and its elements."""
    rows = event["values"].items()
    return int(event["step"]), {plain_name(n): (sketch(of), int(many)) for n, (of, many) in rows}


@law(suspects=True)
def parameters_left_out(facts: Facts) -> Findings:
    """Parameters had gradients and never changed: no optimizer has them."""
    found: dict[str, int] = {}
    other: set[str] = set()
    thawed: set[str] = set()
    models = {one for states in facts.of(_states).values() for one in _unowned(states)}
    for states in facts.of(_states).values():
        for name in {name for state in states for name in state.left_out}:
            since = list(dropwhile(lambda state: name not in state.left_out, states))  # noqa: B023
            before = states[: len(states) - len(since)]
            if any(name in buffers for state in before for _, buffers in state.buffers):
                thawed.add(name)
            enough = len(since) >= _ENOUGH - (name in thawed)
            values = {s.left_out.get(name) for s in since} if enough else set()
            if len(values) != 1 or None in values:
                other.add(name)
            found[name] = min(found.get(name, len(since)), len(since))
    said = (model_without_optimizer, ties_lost, parameters_replaced)
    if not found.keys() - other or any(one.broken(facts) for one in said):
        return
    names = sorted(found.keys() - other)
    text = (
        f"{counted(names)} had gradients and never changed: no optimizer that stepped has "
        f"{'them' if len(names) > 1 else 'it'}."
    )
    if models:
        text += (
            f" These are all of {listed(sorted(models))}, whose gradients "
            "DistributedDataParallel averages in each step."
        )
    if any("[" in name for name in names):
        text += (
            " Modules in a plain list are no part of the model, and neither a wrapper nor "
            "parameters() sees them: use torch.nn.ModuleList."
        )
    plain = {n for of in facts.of(_states).values() for state in of for n in state.tensors}
    if told := [name for name in names if name in plain]:
        text += (
            f" A plain tensor ({listed(told)}) is no part of the model, and neither a wrapper nor "
            "parameters() sees it: use torch.nn.Parameter."
        )
    if thawed := thawed.intersection(names):
        text += (
            " They were frozen in the first steps, and have gradients since: add them to the "
            "optimizer when they are made trainable, or make it from all parameters."
        )
    # An optimizer may step first after some steps of another one.
    late = all(found[name] <= _ENOUGH for name in names) and not models and not thawed
    yield text if late else Suspicious(text, tuple(names))


def _unowned(states: Sequence[ModelState]) -> set[str]:
    """Models in a wrapper of which no optimizer had a parameter in any checked step."""
    since = list(dropwhile(lambda state: not state.unowned, states))
    many = len(since) > _ENOUGH  # an optimizer may step first after some steps of another one
    return set.intersection(*(set(one.unowned) for one in since)) if many else set()


@law()
def routers_frozen(facts: Facts) -> Findings:
    """Routers do not train although their experts do."""
    every = (state for states in facts.of(_states).values() for state in states)
    names = dict.fromkeys(name for state in every for name in state.frozen_routers)
    if names:
        yield (
            f"The router's {listed(names)} does not require gradients, though the experts "
            "do: it keeps its first values."
        )


@law(suspects=True)
def averages_apart(facts: Facts) -> Findings:
    """An averaged model was not updated the same number of times on all ranks, or a model that
    follows the one that trains, as a teacher does, has other values on each rank."""
    states, trained = facts.of(_states), facts.of(law_facts)
    if trained.checked and trained.breach is None and trained.apart is None:
        running = next(iter(states.values()), (ModelState(0),))[-1].followers
        for (kind, _), copies in facts.of(_followers).items():
            each = copies.values()
            moved = {r for rows in each for r in states if len({row[r] for row in rows}) > 1}
            every = {n: [len(set(row.values())) > 1 for row in rows] for n, rows in copies.items()}
            long = {name: apart for name, apart in every.items() if len(apart) > _ENOUGH}
            names = tuple(n for n, of in long.items() if not of[0] and all(of[-_ENOUGH:]))
            began = "began equal on all ranks, now"
            # One that changes on each rank follows another model of its class, which trains.
            if (kind, {}) in running and len(moved) == len(states) and not names:
                names = tuple(name for name, apart in long.items() if all(apart))
                began = "began with other values on each rank, still"
            if names and moved:
                still = f" and only changes on {ranks(moved)}" if len(moved) < len(states) else ""
                yield Suspicious(
                    f"{counted(names)} of {kind}, which runs in each step and is in no optimizer, "
                    f"{began} {agreeing('differs', names)} between them{still}, though the model "
                    "that trains is equal: begin with the same values on all ranks, and update it "
                    "in the same steps.",
                    names,
                )
                return
    rows = {rank: [(state.step, state.averages) for state in of] for rank, of in states.items()}
    steps = agreement.together(rows).items()
    whole = {step: of for step, of in steps if len(set(map(len, of.values()))) == 1}
    apart = [step for step, of in whole.items() if len(set(of.values())) > 1]
    if len(apart) < 2 or apart[-1] != max(whole):
        return
    last = whole[apart[-1]]
    one = next(at for at, row in enumerate(zip(*last.values(), strict=True)) if len(set(row)) > 1)
    told = few_on_each({rank: f"{numbers[one]} times" for rank, numbers in last.items()})
    yield (
        f"An AveragedModel was not updated the same number of times on all ranks ({told}), since "
        f"step {apart[0]}: the average is complete on some ranks only."
    )


def _followers(evidence: Evidence) -> dict[tuple[str, int], dict[str, list[dict[int, str]]]]:
    """The values of models that do not train by rank, in each step, where all ranks have them."""
    found: dict[tuple[str, int], dict[str, list[dict[int, str]]]] = defaultdict(dict)
    own = _states(evidence)
    for together in zip(*own.values(), strict=False):
        if len(own) < max(evidence.world_size, 2) or len({one.step for one in together}) > 1:
            return {}
        for number, models in enumerate(zip(*(one.followers for one in together), strict=False)):
            for name in set.intersection(*(set(values) for _, values in models)):
                row = {r: values[name] for r, (_, values) in zip(own, models, strict=True)}
                rows = found[models[0][0], number].setdefault(name, [])
                rows += [row] if None not in row.values() else []
    return found


def _states(evidence: Evidence) -> dict[int, tuple[ModelState, ...]]:
    return {rank: own.models for rank, own in recorded(evidence).items() if own.models}
