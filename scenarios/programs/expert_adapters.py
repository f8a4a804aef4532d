"""PEFT's adapters of experts: of the one parameter with all experts of a layer
(``target_parameters``). The correct result is one process's, by PEFT's own forward, with the
adapters as they were saved."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Sequence, Tuple

import torch
import torch.nn.functional as F
from torch import nn

from moediag.lab.step import data
from moediag.lab.step.collector import Collector
from moediag.lab.step.models import tiny
from moediag.protocol import Trial
from moediag.recorder.not_applicable import NotApplicable

from . import matrices

OPTIONS: Dict[str, Any] = {
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
}

_RANK = 2
_TARGETS = {
    "gate-up": ["experts.gate_up_proj"],
    "both": ["experts.gate_up_proj", "experts.down_proj"],
    "none": [],
}
_LOOK_ALIKE = "the forward of the adapters is a look-alike, PEFT made the adapters"
_REWRITTEN = (
    "the file is written by this release and then rewritten with the axes of PEFT up to 0.19.0"
)


def run(collector: Collector) -> None:
    """Runs all steps on this rank. Collective. Raises NotApplicable, and what PEFT raises."""
    trial, options = collector.trial, collector.options
    alone = _new(trial, options)
    resumed = options["resumed"] != "no"
    model = _resumed(collector, alone) if resumed else _new(trial, options)
    if options["forward"] != "peft":
        collector.note(_LOOK_ALIKE)
        _replace_forward(model, options["forward"])
    if resumed:
        collector.recorder.event("weights", keep=True, **_loaded(model, alone))
    wrapped = nn.parallel.DistributedDataParallel(
        model.to(collector.device), find_unused_parameters=True
    )

    def loss(of: nn.Module, rank: int, number: int) -> torch.Tensor:
        tokens = data.batch(trial, rank, number, 0).to(next(of.parameters()).device)
        logits = of(input_ids=tokens).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    def backward(of: nn.Module, rank: int, number: int) -> torch.Tensor:
        found = loss(of, rank, number)
        found.backward()
        return found.detach()

    def right(of: nn.Module, rank: int, number: int) -> torch.Tensor:
        found = loss(of, rank, number)
        (found / trial.world_size).backward()
        return found.detach()

    matrices.train(collector, wrapped, backward, alone, right)


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise NotApplicable("this stack has no peft") from error
    return peft


def _base(trial: Trial) -> nn.Module:
    return tiny.build(trial.model, trial.step.seed, experts="eager")


def _config(options: Dict[str, Any]) -> Any:
    # Attention has adapters too, so that there is something to train without those of experts.
    return _peft().LoraConfig(
        r=_RANK,
        lora_alpha=2 * _RANK,
        target_modules=["q_proj"],
        target_parameters=_TARGETS[options["parameters"]],
        init_lora_weights=False,  # otherwise half of the first gradients is zero
    )


def _new(trial: Trial, options: Dict[str, Any]) -> nn.Module:
    base = _base(trial)
    torch.manual_seed(trial.step.seed + 1)
    model: nn.Module = _peft().get_peft_model(base, _config(options))
    return model


# ------------------------------------------------------------------------ the resume


def _resumed(collector: Collector, saved: Any) -> nn.Module:
    """Saves the adapters of ``saved`` and resumes with them as the options say."""
    trial, options, peft = collector.trial, collector.options, _peft()
    with tempfile.TemporaryDirectory() as folder:
        saved.save_pretrained(folder)
        if options["file"] != "own":
            collector.note(_REWRITTEN)
            _rewrite(Path(folder), saved, FILES[options["file"]])
        model = peft.PeftModel.from_pretrained(_base(trial), folder, is_trainable=True)
    torch.manual_seed(trial.step.seed + 2)
    if options["resumed"] == "wrapped-again":
        model = peft.get_peft_model(model.get_base_model(), _config(options))
    elif options["resumed"] == "second-adapter":
        model.add_adapter("resumed", _config(options))
        model.set_adapter("resumed")
    result: nn.Module = model
    return result


Pair = Tuple[torch.Tensor, torch.Tensor]  # lora_A and lora_B of all experts of a layer


def _old(a: torch.Tensor, b: torch.Tensor, experts: int) -> Pair:
    """Returns the same adapter with the axes of PEFT up to 0.19.0: lora_A has the output features
    of the experts, lora_B their input features. Its own inverse."""
    by_expert = a.view(experts, -1, a.shape[1])  # (experts, rank, features)
    by_rank = b.view(b.shape[0], -1, experts)  # (features, rank, experts)
    return (
        by_rank.permute(2, 1, 0).reshape(a.shape[0], b.shape[0]).contiguous(),
        by_expert.permute(2, 1, 0).reshape(a.shape[1], b.shape[1]).contiguous(),
    )


def _exchanged(a: torch.Tensor, b: torch.Tensor, experts: int) -> Pair:
    """Returns lora_B as lora_A and the other way round, of an old adapter."""
    old_a, old_b = _old(a, b, experts)
    return old_b.T.contiguous(), old_a.T.contiguous()


FILES: Dict[str, Callable[..., Pair]] = {
    "old": _old,
    "old-exchanged": _exchanged,
    "old-converted": lambda a, b, experts: _old(*_old(a, b, experts), experts),
}


def _rewrite(folder: Path, saved: nn.Module, change: Callable[..., Pair]) -> None:
    from safetensors.torch import load_file, save_file

    (path,) = folder.rglob("adapter_model.safetensors")
    tensors = load_file(path)
    for name, wrapper in _wrappers(saved):
        names = [f"{name}.lora_{side}.weight" for side in "AB"]
        found = change(*(tensors[n] for n in names), wrapper.num_experts)
        tensors.update(dict(zip(names, found)))  # noqa: B905 - Python 3.9 has no strict
    save_file(tensors, path)


def _wrappers(model: nn.Module) -> Iterator[Tuple[str, Any]]:
    """Yields the name and PEFT's module of each adapted parameter, outer ones first."""
    from peft.tuners.lora.layer import ParamWrapper

    for name, module in model.named_modules():
        if isinstance(module, ParamWrapper):
            yield name, module


def _deltas(model: nn.Module) -> Dict[str, torch.Tensor]:
    """Returns what the active adapters add to each expert parameter, by its FQN."""
    found: Dict[str, torch.Tensor] = {}
    for name, wrapper in _wrappers(model):
        module = name.replace("base_model.model.", "").replace(".base_layer", "")
        fqn = f"{module}.{wrapper.parameter_name}"
        for adapter in wrapper.active_adapters:
            delta = wrapper.get_delta_weight(adapter).detach()
            found[fqn] = found[fqn] + delta if fqn in found else delta
    return found


def _loaded(model: nn.Module, saved: nn.Module) -> Dict[str, Any]:
    """Returns the fields of a ``weights`` event, see protocol."""
    expected, found = _deltas(saved), _deltas(model)
    apart = {fqn: float((delta - found[fqn]).abs().max()) for fqn, delta in expected.items()}
    largest = {fqn: float(delta.abs().max()) for fqn, delta in expected.items()}
    return {
        "when": "loaded",
        "experts": [],
        "unequal": {
            fqn: f"gets other adapters: their product differs by up to {far:.1e}, where that of "
            f"the saved ones is at most {largest[fqn]:.1e}"
            for fqn, far in apart.items()
            if far
        },
        "compared": len(expected),
        "asked": 1,
        "whole": 0,
        "left_out": False,
    }


# ------------------------------------------------------------------------ the forward


def _replace_forward(model: nn.Module, how: str) -> None:
    """Makes the experts of ``model`` use their adapters as ``how`` says, see ``OPTIONS``."""
    nested: Dict[int, List[Any]] = {}
    for _, wrapper in _wrappers(model):
        nested.setdefault(id(wrapper.get_base_layer()), []).append(wrapper)
    for wrappers in nested.values():
        wrappers[0].forward = _forward(wrappers, how)


def _forward(wrappers: Sequence[Any], how: str) -> Callable[..., Any]:
    experts = wrappers[0].get_base_layer()

    def forward(*args: Any, **kwargs: Any) -> Any:
        read = _READ.get(how)
        adapted = {w.parameter_name: w.get_param() + read(w) for w in wrappers} if read else {}
        output = torch.func.functional_call(experts, adapted, args, kwargs)
        if how == "base-layer-touched":
            output = output + sum(0.0 * p.sum() for w in wrappers for p in _pair(w))
        return output

    return forward


def _pair(wrapper: Any) -> Pair:
    (adapter,) = wrapper.active_adapters
    return wrapper.lora_A[adapter].weight, wrapper.lora_B[adapter].weight


def _by_expert(wrapper: Any) -> torch.Tensor:
    """Reads both with the experts outermost, as lora_A is packed."""
    (a, b), experts = _pair(wrapper), wrapper.num_experts
    rows, columns = a.view(experts, -1, a.shape[1]), b.view(b.shape[0], experts, -1)
    return _scaled(wrapper, columns.transpose(0, 1) @ rows)


def _by_rank(wrapper: Any) -> torch.Tensor:
    """Reads both with the experts innermost, as lora_B is packed."""
    (a, b), experts = _pair(wrapper), wrapper.num_experts
    rows, columns = a.view(-1, experts, a.shape[1]), b.view(b.shape[0], -1, experts)
    return _scaled(wrapper, columns.permute(2, 0, 1) @ rows.transpose(0, 1))


def _scaled(wrapper: Any, product: torch.Tensor) -> torch.Tensor:
    (adapter,) = wrapper.active_adapters
    return product * float(wrapper.scaling[adapter])


_READ: Dict[str, Callable[[Any], torch.Tensor]] = {"by-expert": _by_expert, "by-rank": _by_rank}
