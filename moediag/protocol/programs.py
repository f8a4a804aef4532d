"""The programs of ``moediag.lab.step.programs``, their options and the values these may have."""

from __future__ import annotations

from typing import Any, Dict

# Name -> option -> default; a tuple lists the values of a text option, its default first.
PROGRAMS: Dict[str, Dict[str, Any]] = {
    # One MoE block under tensor parallelism. expert_tp: routed experts are cut over the tp ranks
    # (tp) or whole on each (1); scores: routing scores scale what comes out of the experts (after)
    # or what goes in (before); fix: see moediag.lab.step.programs.router_block.plans.
    "tp-router": {
        "block": ("look-alike", "torchtitan"),
        "tensor_parallel": True,
        "expert_tp": ("tp", "1"),
        "scores": ("after", "before"),
        "fix": (
            "none",
            "weights-partial",
            "gate-partial",
            "gate-mean",
            "gate-sum",
            "boundary-twice",
            "merged",
            "boundary",
        ),
    },
    "fsdp1-nested-ep": {
        "wrap": (
            "ignored-modules", "auto-wrap", "without-assertions", "bottom-up", "custom-policy",
        ),
        "divide": ("nothing", "gradients", "postdivide-factor", "loss"),
    },
    "fsdp2-two-meshes": {
        "experts": ("own-mesh", "two-axes", "per-parameter"),
        "divide": ("nothing", "world", "world-premul", "ep", "gradients", "loss"),
        "norm": ("mesh", "mesh-and-ep"),
        # What a rank without tokens computes: the released experts on no rows; zeros that depend on
        # the tokens it sends and on its experts; the same of the tokens it received.
        "empty": ("released", "from-input", "from-dispatched"),
        # With step.checkpointing: as in checkpoint-recompute.
        "change": ("none", "metadata"),
        "router": ("inside", "outside"),
        "save": ("nothing", "top-k"),
        "mutate": False,
    },
    "checkpoint-recompute": {
        # How routing differs in the recomputation, see moediag.lab.step.models.rerouted.
        "change": ("count", "metadata", "permuted", "noise", "none"),
        "on_rank": 1,  # whose recomputation
        "pair": False,  # permuted: two tokens alone exchange their experts
        "router": ("inside", "outside"),  # of the checkpointed region
        "save": ("nothing", "top-k", "matmul"),  # selective checkpointing: what is not recomputed
        "mutate": False,  # selective checkpointing: what was saved may be written to
        # The released block; one whose router normalises into a new tensor; that, visiting each
        # expert.
        "block": ("released", "not-in-place", "every-expert"),
        "preserve_rng": True,  # checkpointing's own preserve_rng_state
        "unpack": ("strict", "scalar", "zeros"),  # what backward gets for what does not match
    },
    # A step with a gradient that is not finite: which ranks skip the optimizer, and how.
    "skipped-step": {
        "optimizer": ("adamw", "sgd", "muon"),  # sgd with momentum; muon: torch.optim.Muon
        # Where it overflows: rank 0's loss, one row of one parameter (its shard is the last
        # rank's), or nowhere.
        "overflow": ("loss", "one-row", "none"),
        "at": 2,  # in this step
        "norm": ("global", "own-shards"),  # which norm must be finite
        "agree": False,  # ranks skip when any of them found it not finite
        # Instead of the step: return; zero_grad() and step(); zero_grad(set_to_none=False) and
        # step(); nothing, the step as it is.
        "answer": ("return", "none-then-step", "zeros-then-step", "step"),
        "schedule": ("with-updates", "always"),  # when the scheduler advances
    },
    # Metrics that are all-reduced over the ranks, by name, beside gradient accumulation.
    "metrics": {
        "reduce": ("inside", "after"),  # each micro-batch's | their mean, after the last
        "micro_batches": 3,
        "fewer": 0,  # by so many on odd ranks
        # What FSDP2 does in all but the last micro-batch: reduces gradients; keeps them; keeps
        # them and the gathered parameters too, so that nothing is communicated.
        "accumulation": ("every", "no-sync", "no-sync-gathered"),
        "pad": False,  # ranks agree on the largest number; a padding micro-batch has weight 0
        "keys": ("same", "one-missing", "other-order"),  # of odd ranks
        # Order of the names: in each rank's own order; sorted; all known names, 0 where a rank has
        # none; the same with the number of ranks that have it.
        "names": ("own-order", "sorted", "zero-for-missing", "counted"),
    },
    # A model with a vision tower, which ranks without an image do not need.
    "vision-tower": {
        "text_only": ("odd", "all", "none"),  # ranks without an image
        # What they run instead: nothing; the tower on a blank image, whose output is not used; the
        # tower on an image of 0 patches, whose sum is added; the tower on a blank image, times 0.
        "instead": ("skip", "unused", "empty", "weight-0"),
        "unused_params": False,  # FSDP2 reduces parameters without a gradient as zeros
    },
    # The mean over tokens of which ranks and micro-batches have unequal numbers.
    "token-loss": {
        "tokens": ("unequal", "equal"),
        # What a rank's sum is divided by; gradients are then averaged over ranks: its own tokens;
        # those of each micro-batch; those of all ranks; the same, times the number of ranks.
        "divide": ("own-tokens", "micro-batch", "all-tokens", "all-tokens-times-ranks"),
        # An auxiliary loss that is a mean already: none; added before the factor; added after it.
        "aux": ("none", "with-the-loss", "apart"),
    },
    # Odd ranks have fewer batches, in the loop of a validation or as micro-batches of a pipeline.
    "uneven-batches": {
        "loop": ("validation", "pipeline"),
        "batches": 4,
        "fewer": 1,  # on odd ranks
        # When a rank ends its loop: after its own batches; when any rank has no more; when no rank
        # has any, and a rank without one runs an old one that does not count.
        "until": ("own", "any-ends", "all-end"),
    },
    # The gradient norm of a model whose dense matrices are cut over the tp ranks.
    "expert-norm": {
        "experts": ("whole", "cut"),  # each on one of those ranks; or a piece of each on every rank
        # Gradients that a rank counts before the sum over ranks: those that are cut, and all on the
        # first rank; all on every rank; each element on one of the ranks that have it.
        "counted": ("cut-or-first", "every-rank", "by-placement"),
    },
    # A bias per expert that moves towards an equal number of tokens after each step.
    "expert-bias": {
        "reduced": ("counts", "nothing", "bias"),  # counts are summed, or biases are averaged
        "rule": ("sign", "proportional"),  # of the difference to the mean count, or the difference
        # Activation checkpointing: no; the recomputation counts its tokens too; it does not.
        "recomputed": ("no", "counted", "not-counted"),
        "update": ("in-place", "new-tensor"),  # of what the checkpointer holds a reference to
        "saved_after": 0,  # the step after which the model is saved and loaded; 0: never
    },
    # A trainer under FSDP2 sends its weights to an inference engine after each step.
    "weight-sync": {
        # Of experts: as transformers 5 packs them; as the checkpoint has them; that, with the
        # halves of gate_up_proj taken for (up, gate).
        "names": ("per-expert", "packed", "per-expert-up-first"),
        "unknown": ("dropped", "refused"),  # by the engine: a name that it does not know
        # What the engine converts after an update: experts that were loaded, or all.
        "converted": ("loaded", "all"),
        # When rank 0 sends a tensor and the engine's rank receives it: as soon as it is gathered,
        # or after all are.
        "sends": ("at-once", "after-gathering"),
        "receives": ("at-once", "after-gathering"),
        "barrier": False,  # of all ranks, after each tensor
    },
    # PEFT's adapters of all experts of a layer, in one parameter.
    "expert-adapters": {
        "parameters": ("gate-up", "both", "none"),  # those of experts that have adapters
        # What reads them: PEFT; a forward that takes both by expert, as lora_A's rows are; one that
        # takes both by rank, as lora_B's columns are; the experts without their adapters; the same
        # with 0 times the adapters added.
        "forward": ("peft", "by-expert", "by-rank", "base-layer", "base-layer-touched"),
        # Whether training begins with adapters that were saved: no; yes, by from_pretrained; and
        # then a new one in the same place, or beside it.
        "resumed": ("no", "loaded", "wrapped-again", "second-adapter"),
        # The saved file: of this release; of PEFT up to 0.19.0, which takes the other axis of an
        # expert's matrix as input; that, with lora_A and lora_B exchanged; that, converted.
        "file": ("own", "old", "old-exchanged", "old-converted"),
    },
    # Attention over a sequence that ranks divide. keys: those that backward attends to, the part
    # that is due or the one saved in forward; owners: each rank's share of the gradients of keys
    # and values is sent to the ranks that have them, or only its own is kept; autograd: no ring, a
    # differentiable all-gather.
    "ring-attention": {
        "ring": ("by-hand", "autograd"),
        "keys": ("saved", "due"),
        "owners": ("sent", "kept"),
    },
    "tied-embeddings-meta": {
        # When the meta model gets memory; before sharding torch's to_empty gives each name its own.
        "empty": ("after-sharding", "before-sharding", "before-sharding-but-rank-0"),
        "retie": ("never", "before-sharding", "after-loading"),
        "checkpoint": ("both-names", "embedding-only"),
        "load": ("torch", "accelerate", "broadcasts"),
    },
    "router-logits-guard": {
        # The field of a configuration by which a trainer recognises a mixture of experts.
        "guard": (
            "always",
            "num_experts",
            "num_local_experts",
            "n_routed_experts",
            "any",
            "any-in-text-config",
            "own-switch",
        ),
    },
}  # fmt: skip


def program_options(name: str, given: Dict[str, Any]) -> Dict[str, Any]:
    """Every option of program ``name`` with its value. Raises KeyError for an unknown program or
    option, ValueError for a value that it cannot have."""
    known = PROGRAMS[name]
    values = {k: v[0] if isinstance(v, tuple) else v for k, v in known.items()}
    for option, value in given.items():
        may = known[option]
        if isinstance(may, tuple):
            if value not in may:
                raise ValueError(f"{option}: {value!r} is none of {', '.join(map(str, may))}")
        elif type(value) is not type(may) and not (isinstance(may, float) and type(value) is int):
            raise ValueError(f"{option}: {value!r}, but a {type(may).__name__} belongs there")
        values[option] = value
    return values
