"""Ranks that average their gradients draw the same samples in the same order, and compute alike."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations, pairwise
from typing import Any

from moediag.diagnosis.facts import Facts
from moediag.diagnosis.laws.large_calls import splits_samples
from moediag.diagnosis.laws.law import Findings, Suspicious, law, recorded
from moediag.diagnosis.laws.model_inputs import averaging, same_part
from moediag.diagnosis.numbers import agreement
from moediag.evidence.law_model import ModelInputs, RankLaws
from moediag.evidence.model import Evidence
from moediag.result.wording import at_line, few_on_each, ranks

_ENOUGH = 2  # steps
_LAST = 3  # compared steps
_FEW = 8  # ranks
_UPDATES = 4  # of all optimizers, for one batch
_SAME = 8  # samples that two ranks drew
_PART = 0.1  # of the samples of a rank, more than what fills the last batch


@law(suspects=True)
def samplers_apart(facts: Facts) -> Findings:
    """The samplers of ranks that average their gradients do not divide one order of the samples:
    they have different seeds or epochs, all ask for the same part, each draws all samples, one is
    of another dataset, they are divided twice, or each divides the samples of one loader and not
    those of another. Or in one pass ranks drew the same samples in different batches."""
    for over, steps in facts.of(_steps).items():
        twice = [s for s, of in steps.items() if min(x.divided for x in of.values()) > len(over)]
        if len(twice) >= _ENOUGH:
            one = next(iter(steps[twice[0]].values()))
            yield Suspicious(
                f"The {_named(steps[twice[0]])} gives each rank one of {one.divided} parts of the "
                f"samples, and there are {len(over)} ranks: they are divided twice, such as by a "
                "DistributedSampler and again by accelerate's `prepare`, so a pass over the data "
                "leaves samples out. Divide them once."
            )
            return
        single = {s: of for s, of in steps.items() if all(one.replicas for one in of.values())}
        for what in ("seed", "epoch"):
            told = {s: {r: getattr(one, what) for r, one in of.items()} for s, of in single.items()}
            found = [step for step, of in told.items() if len(set(of.values())) > 1]
            if len(found) >= _ENOUGH:
                yield Suspicious(
                    f"In step {found[0]} the {_named(single[found[0]])} shuffled with a different "
                    f"{what} on each of these ranks ({few_on_each(told[found[0]])}): their parts "
                    "belong to different orders, so some samples come twice in a pass and others "
                    "never." + (" Call set_epoch on every rank." if what == "epoch" else "")
                )
                return
        same = [step for step, of in single.items() if _one_part(list(of.values()))]
        if len(same) >= _ENOUGH and not same_part.broken(facts):
            one = next(iter(single[same[0]].values()))
            yield Suspicious(
                f"All ranks ask the {_named(single[same[0]])} for part {one.number} of "
                f"{one.replicas}, though they average their gradients: they train on the same "
                "samples, and nobody on the others. Give it each rank's own `rank`."
            )
            return
        split = facts.of(splits_samples)
        whole = [step for step, of in steps.items() if _undivided(list(of.values()), split)]
        if len(whole) >= _ENOUGH and not same_part.broken(facts):
            every = steps[whole[0]]
            one = next(iter(every.values()))
            alike = len({of.order for of in every.values()}) == 1
            yield Suspicious(
                f"Each rank draws all {one.given} samples of the same dataset in "
                f"{'the same order' if alike else 'an order of its own'}, though the ranks average "
                f"their gradients: the {_named(every)} does not divide them, so ranks also train "
                "on each other's samples and a pass over the data is as long as on one rank. Use a "
                "DistributedSampler, or prepare the loader."
            )
            return
        other = [s for s, of in single.items() if any(_foreign(one) for one in of.values())]
        if len(other) >= _ENOUGH:
            one = next(one for one in single[other[0]].values() if _foreign(one))
            yield Suspicious(
                f"The {_named(single[other[0]])} was made for a dataset of {one.drawn} samples, "
                f"and its loader has another one of {one.given}: it draws the wrong samples."
            )
            return
    if again := facts.of(_drawn_again):
        line, who, many, known = again
        yield Suspicious(
            f"In one pass over the loader{at_line(line)} {ranks(who)}, which average their "
            f"gradients, drew {many} of the same samples (of {known} that are known of each rank), "
            "in different batches, and no rank drew a sample twice: they do not divide one order "
            "of the samples. Shuffle with the same seed and epoch on every rank before each takes "
            "its part, and let the parts not overlap."
        )
        return
    yield from _divided_in_part(facts)


@law(suspects=True)
def ranks_unlike(facts: Facts) -> Findings:
    """Ranks that average their gradients compute in different ways in several steps: other
    settings of modules, modes, frozen parameters, autocast, or numbers of backwards."""
    for over in sorted(facts.of(averaging)):
        laws = facts.of(recorded)
        if len(over) < 2 or not set(over) <= laws.keys():
            continue
        rows = {rank: _settings(laws[rank], over) for rank in over}
        steps = [*agreement.together({rank: row.items() for rank, row in rows.items()})][-_LAST:]
        if len(steps) < _ENOUGH:
            continue
        last = {rank: [row[step] for step in steps] for rank, row in rows.items()}
        whats = dict.fromkeys(what for of in last.values() for one in of for what in one)
        # One that changes from step to step, as the numbers of tokens do, is not compared.
        kept = [w for w in whats if all(_kept(w, of) for of in last.values())]
        known = {rank: {w: of[0].get(w, {}) for w in kept} for rank, of in last.items()}
        apart = [w for w in kept if len({repr(_numbers(found[w])) for found in known.values()}) > 1]
        if apart:
            told = "; ".join(_setting(what, known) for what in apart[:4])
            more = f" and {len(apart) - 4} more" if len(apart) > 4 else ""
            yield Suspicious(
                f"In steps {', '.join(map(str, steps))} {ranks(over)} average gradients that they "
                f"compute in different ways: {told}{more}."
            )


_Settings = dict[str, dict[str, tuple[int, str]]]  # what -> value -> how many, the first one's name


def _settings(own: RankLaws, over: tuple[int, ...]) -> dict[int, _Settings]:
    """By step, of the models whose gradients a wrapper averages over these ranks, if there is
    one."""
    every = own.rows("settings", step=int, over=tuple, of=_texts)
    found: dict[int, _Settings] = {}
    for step, averages, texts in every:
        if averages == (over if any(one for _, one, _ in every) else ()):
            of = found.setdefault(step, defaultdict(dict))
            for text, (number, name) in texts.items():
                what, _, value = text.rpartition(" = ")
                before, first = of[what].get(value, (0, name))
                of[what][value] = before + number, first
    for step, weights in own.of("losses", _weights):
        if step in found and weights:
            found[step]["weight of a mean in the loss"] = weights
    for norm in own.norms:
        if norm.step in found:
            found[norm.step]["max_norm of clipping"][f"{norm.max_norm:g}"] = 1, norm.line
    return found


def _texts(settings: Mapping[str, Any]) -> dict[str, tuple[int, str]]:
    return {str(text): (int(number), str(name)) for text, (number, name) in settings.items()}


def _weights(event: Mapping[str, Any]) -> tuple[int, dict[str, tuple[int, str]]]:
    every = Counter(f"{float(one):.4g}" for of in event["backwards"] for one in of["means"])
    return int(event["step"]), {value: (n, str(event["line"])) for value, n in every.items()}


def _kept(what: str, steps: Sequence[_Settings]) -> bool:
    """Whether it is the same in all of these steps of a rank."""
    return len({repr(_numbers(one.get(what, {}))) for one in steps}) == 1


def _numbers(values: Mapping[str, tuple[int, str]]) -> list[tuple[str, int]]:
    """How many have each value, by value: ranks may have other experts, with other names."""
    return sorted((value, number) for value, (number, _) in values.items())


def _setting(what: str, known: Mapping[int, _Settings]) -> str:
    """One setting on each rank, with the first module that has a value which others have not."""
    rows = {rank: found[what] for rank, found in known.items()}
    same = set.intersection(*(set(_numbers(row)) for row in rows.values()))
    told, names = [], dict[str, None]()
    for rank, row in list(rows.items())[:4]:
        own = {value: of for value, of in row.items() if (value, of[0]) not in same}
        values = ", ".join(v + (f" of {n}" if n > 1 else "") for v, (n, _) in own.items())
        told.append(f"{values or 'none'} on rank {rank}")
        names |= dict.fromkeys(name for _, name in own.values() if name)
    where = f" ({', '.join(list(names)[:3])})" if names else ""
    return f"{what}{where} is {', '.join(told)}"


def _steps(evidence: Evidence) -> dict[tuple[int, ...], dict[int, dict[int, ModelInputs]]]:
    """By set of ranks that average their gradients, step and rank; only steps that all ranks of the
    set recorded."""
    found: dict[tuple[int, ...], dict[int, dict[int, ModelInputs]]] = {}
    for over in sorted(averaging(evidence)):
        steps: dict[int, dict[int, ModelInputs]] = defaultdict(dict)
        for rank, own in recorded(evidence).items():
            for one in own.inputs if rank in over and len(over) > 1 else ():
                if not one.forward and one.over in (over, ()):
                    steps[one.step][rank] = one
                elif rank in steps[one.step] and one.rows == one.batch > 1:
                    # The first call may be one without samples, which only prepares a wrapper.
                    steps[one.step][rank] = replace(steps[one.step][rank], rows=one.rows)
        found[over] = {s: of for s, of in sorted(steps.items()) if of.keys() == set(over)}
    return found


def _divided_in_part(facts: Facts) -> Findings:
    """Two loaders of the same updates, of which only one is divided among the ranks."""
    laws = facts.of(recorded)
    for over in sorted(facts.of(averaging)):
        rows = {rank: laws[rank].of("beside", _beside) for rank in over if rank in laws}
        steps = agreement.together(rows)
        if len(rows) == len(over) > 1 and len(steps) >= _ENOUGH:
            loader, divided = next(iter(steps.values()))[over[0]]
            yield Suspicious(
                f"For the same updates each rank draws from all samples of one dataset (the "
                f"{loader}), and from its part of those of another, which a sampler divides"
                f"{divided}: ranks also train on each other's samples. Give both loaders a "
                "DistributedSampler."
            )
            return


def _beside(event: Mapping[str, Any]) -> tuple[int, tuple[str, str]]:
    """The step, and in words which loader divides nothing, and which one divides."""
    at = f" of the loader{at_line(str(event['made']))}, {int(event['given'])} samples"
    of = f" (loader{at_line(str(event['divided']))})" if event["divided"] else ""
    return int(event["step"]), (f"{event['sampler']}{at}", of)


def _drawn_again(evidence: Evidence) -> tuple[str, tuple[int, int], int, int] | None:
    """The line that made a loader of training, two ranks of those that average their gradients, how
    many samples both drew in one pass in batches that do not follow each other, and of how many.
    Ranks that read parts of one text which repeats itself have them in the same order."""
    found = {rank: _passes(own) for rank, own in recorded(evidence).items()}
    for over in sorted(averaging(evidence)):
        for key in dict.fromkeys(key for rank in over for key in found.get(rank, {})):
            drawn = [found[rank][key] for rank in over if key in found.get(rank, {})]
            if len(drawn) < len(over) or not all(drawn):
                continue
            for one, other in combinations(over[:_FEW], 2):
                mine, its = found[one][key], found[other][key]
                rows = mine.keys() & its.keys()
                far = [r for r in rows if abs(mine[r][0] - its[r][0]) > 1]
                apart, every = Counter(mine[r][1] - its[r][1] for r in far), min(map(len, drawn))
                ordered = 2 * max(apart.values(), default=0) > len(far)
                if len(far) >= _SAME and len(far) >= _PART * every and not ordered:
                    return key[0], (one, other), len(far), every
    return None


def _passes(own: RankLaws) -> dict[tuple[str, int], dict[str, tuple[int, int]]]:
    """The batch and the place of each sample, by the line that made the loader and its passes with
    several updates; empty where a sample came twice, as if each was drawn at random."""
    passes: dict[tuple[str, int], list[tuple[int, int, str]]] = defaultdict(list)
    for (batches,) in own.rows("drawn", batches=list):
        for made, number, batch, updates, rows in batches:
            passes[made, number] += [(updates, batch, row) for row in rows]
    found: dict[tuple[str, int], dict[str, tuple[int, int]]] = {}
    numbers = Counter[str]()
    for (made, _), rows in sorted(passes.items()):
        steps = sorted({updates for updates, _, _ in rows})
        # A batch of an evaluation comes after many updates.
        if len(steps) > _ENOUGH and all(b - a <= _UPDATES for a, b in pairwise(steps)):
            numbers[made] += 1
            known = {row: (batch, at) for at, (_, batch, row) in enumerate(rows)}
            found[made, numbers[made]] = known if len(known) == len(rows) else {}
    return found


def _foreign(one: ModelInputs) -> bool:
    return one.drawn > 0 and one.given > 0 and one.drawn != one.given


def _one_part(of: Sequence[ModelInputs]) -> bool:
    """Whether ranks ask for the same part of one order, of several."""
    asked = {(one.replicas, one.number, one.seed, one.epoch, one.made, one.given) for one in of}
    return len(asked) == 1 and of[0].replicas > 1


def _undivided(of: Sequence[ModelInputs], split: bool) -> bool:
    """Whether ranks draw all of one dataset, each in another order. From one order a program may
    take the samples of its rank, unless the model gets as many rows as a batch has, and ranks do
    not ``split`` samples."""
    datasets = {(one.sampler, one.data, one.given) for one in of}
    orders = {one.order for one in of}
    known = all(one.data and one.order for one in of)
    whole = not split and len(orders) == 1 and all(one.rows == one.batch > 1 for one in of)
    return known and len(datasets) == 1 and (len(orders) == len(of) or whole)


def _named(of: Mapping[int, ModelInputs]) -> str:
    first = next(iter(of.values()))
    line = first.made or first.line
    return first.sampler + (f" of the loader at {line}" if line else "")
