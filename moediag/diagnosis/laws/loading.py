"""All ranks load the same checkpoint, and all of it."""

from __future__ import annotations

from moediag.diagnosis.facts import Facts
from moediag.diagnosis.laws.law import Broken, Findings, Suspicious, law, recorded
from moediag.evidence.law_model import PART, LawCheck, RankLaws, plain_names
from moediag.result import Verdict
from moediag.result.wording import at_line, counted, listed, plural, ranks


@law(Verdict.WRONG_WEIGHTS)
def part_loaded(facts: Facts) -> Findings:
    """Ranks of a watched job loaded parameters before FSDP sharded them, and others did not."""
    # Before the first update, the whole parameter was one thing on the ranks that loaded it, other
    # things on those that did not, and every shard is still what it was made of.
    laws = facts.of(recorded)
    sets = {
        piece.name: piece.ranks
        for one in laws.values()
        for check in one.checks
        if check.count == 0
        for piece in check.pieces
        if piece.how == PART
    }
    for one in laws.values():  # FSDP1 shards over all ranks, under other names
        sets.update((name, tuple(laws)) for name in one.shards if name not in sets)
    found: dict[tuple[tuple[int, ...], tuple[int, ...]], list[str]] = {}
    step = 0
    for name, who in sets.items():
        shards = {rank: laws[rank].shards.get(name) for rank in who if rank in laws}
        known = {rank: shard for rank, shard in shards.items() if shard is not None}
        if set(known) != set(who) or not all(shard.unchanged for shard in known.values()):
            continue
        loaded = tuple(rank for rank, shard in known.items() if shard.loaded)
        others = tuple(rank for rank in known if rank not in loaded)
        of_loaded = {known[rank].whole for rank in loaded}
        of_others = {known[rank].whole for rank in others}
        apart = of_loaded.isdisjoint(of_others) and None not in of_loaded | of_others
        if len(of_loaded) == 1 and of_others and apart:
            found.setdefault((loaded, others), []).append(name)
            step = max(shard.step for shard in known.values())
    if not found:
        return
    (loaded, others), names = max(found.items(), key=lambda one: len(one[1]))
    line = next((load.line for load in laws[loaded[0]].loads if load.parameters), "")
    yield Broken(
        f"In step {step} the shards of {counted(names)} do not belong together: {ranks(loaded)} "
        f"loaded the whole parameter{at_line(line)} before FSDP sharded it, {ranks(others)} did "
        "not and had other values, and nothing changed the shards afterwards.",
        pattern="part loaded",
        next_step="Load on every rank before fully_shard, or afterwards with "
        "set_model_state_dict(…, options=StateDictOptions(full_state_dict=True, "
        "broadcast_from_rank0=True)). FSDP1 has sync_module_states=True.",
        lasting=True,
    )


@law(suspects=True)
def other_names(facts: Facts) -> Findings:
    """A load left out names of the model and names of the checkpoint."""
    loads = [load for own in facts.of(recorded).values() for load in own.loads]
    load = next((load for load in loads if load.missing and load.unexpected), None)
    if load is None:
        return
    text = (
        f"load_state_dict{at_line(load.line)} left out {plural(load.counts[0], 'name')} of the "
        f"model ({listed(load.missing)}) and {plural(load.counts[1], 'name')} of the "
        f"checkpoint ({listed(load.unexpected)}): the former keep their first values."
    )
    pairs = ((one, other) for one in load.missing for other in load.unexpected)
    same = any(f".{one}".endswith(f".{other}") or f".{other}".endswith(f".{one}")
               for one, other in pairs)  # fmt: skip
    # A program may try the names as they are first.
    later = loads[loads.index(load) + 1 :]
    again = any(one.parameters and one.counts[0] < load.counts[0] for one in later)
    if same and not again:
        text += " They are the same names but for a prefix, such as that of a wrapper."
    yield Suspicious(text, load.missing) if same and not again else text


@law(Verdict.RESUME_DRIFT)
def states_left_out(facts: Facts) -> Findings:
    """A load of torch.distributed.checkpoint asked for the groups of an optimizer and for none of
    its states, which the checkpoint has, and the optimizer began without state."""
    # It fills what it is given: the state_dict() of a new optimizer has no states to fill.
    for own in facts.of(recorded).values():
        left = next(iter(own.rows("states_left", line=str, names=plain_names, count=int)), None)
        begun = _begun_without_state(own)
        if left is not None and begun is not None:
            line, names, count = left
            yield Broken(
                f"The checkpoint loaded{at_line(line)} has {plural(count, 'value')} of an "
                f"optimizer's state ({listed(names)}), and the load asked for none of them: "
                f"{begun.optimizer} has its groups from the checkpoint and began without state.",
                pattern="states not loaded",
                next_step="Load into torch.distributed.checkpoint.state_dict.get_state_dict(model, "
                "optimizer), which makes the states first, and put them back with set_state_dict.",
                lasting=True,
            )
            return


def _begun_without_state(own: RankLaws) -> LawCheck | None:
    """The first check of an optimizer that keeps state, but began without."""
    fresh = {check.key: check for check in own.checks if check.count == 0 and not check.state}
    later = {check.key for check in own.checks if check.count and check.state}
    return next((check for key, check in fresh.items() if key in later), None)


@law()
def optimizer_forgotten(facts: Facts) -> Findings:
    """A checkpoint has the state of an optimizer, and no optimizer loaded it."""
    laws = facts.of(recorded)
    if any(own.rows("optimizer_load", line=str) for own in laws.values()):
        return
    for own in laws.values():
        files = own.rows("optimizer_file", line=str)
        begun = _begun_without_state(own)
        if files and begun is not None and any(load.parameters for load in own.loads):
            yield (
                f"The checkpoint loaded{at_line(files[0][0])} has the state of an "
                f"optimizer, which no optimizer loaded: {begun.optimizer} began without state, "
                "with the model's parameters loaded."
            )
            return
