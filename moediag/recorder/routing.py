"""Counts the tokens of each expert from the router's own top-k.

Every family of routers calls ``torch.topk`` over a dimension as long as the number of experts.
Group-limited routers call it several times; the last call of that length counts.
"""

from __future__ import annotations

import sys
from typing import Any, Callable, List, Tuple

import torch

from moediag.protocol.names import is_router
from moediag.recorder.core import Block, Recorder
from moediag.recorder.step.numbers import traced
from moediag.recorder.step.pieces import held

WATCHER = "tokens per expert"
_COUNTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
_MAX_DEFERRED = 4096


def expert_counts(module: Any) -> Tuple[int, ...]:
    """Returns the possible lengths of a top-k over this block's experts; empty: not a MoE block.

    A MoE block has experts and a router. Model families name the number of experts differently,
    and under expert parallelism the list has only the local experts, so all candidates count.
    """
    children = module._modules
    experts = children.get("experts")
    routers = [one for name, one in children.items() if one is not None and is_router(name)]
    if experts is None and not (routers and _named_moe(module)):
        return ()
    found: List[int] = []
    for holder in (module, experts, *routers):
        found += [_integer(getattr(holder, name, None)) for name in _COUNTS]
    if isinstance(experts, (torch.nn.ModuleList, torch.nn.ModuleDict)):
        found.append(len(experts))
    for router in routers:
        weight = getattr(router, "weight", None)
        if isinstance(weight, torch.Tensor) and weight.dim() == 2:
            found.append(int(weight.shape[0]))
    return tuple(sorted({number for number in found if number > 1}))


def _named_moe(module: Any) -> bool:
    name = type(module).__name__.lower()
    return "moe" in name or "mixture" in name or "sparse" in name


def _integer(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def install(recorder: Recorder) -> None:
    """Replaces ``torch.topk`` and ``Tensor.topk`` with versions that keep the indices."""
    recorder.deferred_tokens = Deferred(recorder)
    recorder.on_flush.append(lambda: _flush_running(recorder))
    recorder.on_flush.append(recorder.deferred_tokens.write)
    recorder.on_stop.append(recorder.deferred_tokens.write)
    for owner in (torch, torch.Tensor):
        recorder.patches.replace(owner, "topk", _topk(recorder))
    _tell_torchscript()
    recorder.after_uninstall.append(_tell_dynamo)


def _topk(recorder: Recorder) -> Callable[[Any], Any]:
    def make(original: Any) -> Any:
        def topk(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if traced():
                return result
            blocks = recorder.thread.blocks
            if blocks and recorder.active:
                try:
                    _remember(blocks, args[0] if args else kwargs.get("input"), result)
                except Exception as error:
                    recorder.fault(WATCHER, error)
            return result

        topk.__doc__ = getattr(original, "__doc__", None)
        return topk

    return make


def _tell_torchscript() -> None:
    """Registers our topk: ``torch.jit.script`` finds builtins by identity, in a cached table."""
    builtins = getattr(torch.jit, "_builtins", None)
    if getattr(builtins, "_builtin_table", None):
        torch.jit._builtins._register_builtin(torch.topk, "aten::topk")


def _tell_dynamo() -> None:
    """Clears Dynamo's function table: if it was built with our ``torch.topk``, Dynamo would not
    recognise torch's own."""
    rules = sys.modules.get("torch._dynamo.trace_rules")
    clear = getattr(getattr(rules, "get_torch_obj_rule_map", None), "cache_clear", None)
    if clear is not None:
        clear()


def _remember(blocks: List[Block], scores: Any, result: Any) -> None:
    block = blocks[-1]
    if block.recompute or not block.experts:
        return
    length = int(scores.shape[-1])
    if length in block.experts:
        block.routed = (result[1], length)


def tokens_of(recorder: Recorder, block: Block) -> None:
    """Writes the ``tokens`` event of a block's forward if it routed tokens."""
    if block.routed is None:
        return
    (indices, experts), block.routed = block.routed, None
    indices = held(indices)
    if indices.device.type == "meta" or type(indices).__name__ == "FakeTensor":
        return
    with torch._C._DisableTorchDispatch(), torch.no_grad():  # no dispatch mode may see this
        flat = indices.detach().reshape(-1)
        if indices.device.type == "cpu":
            counts = torch.bincount(flat, minlength=experts).tolist()
            recorder.event("tokens", step=recorder.current_step, layer=block.fqn, counts=counts)
        else:
            recorder.deferred_tokens.add(block.fqn, flat, experts)


def _flush_running(recorder: Recorder) -> None:
    for block in recorder.thread.blocks:
        tokens_of(recorder, block)


class Deferred:
    """Counts still being computed on an accelerator: reading them immediately would make every MoE
    block wait for its device."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._pending: List[Tuple[int, str, Any, Any]] = []  # step, layer, counts, event

    def add(self, layer: str, flat: Any, experts: int) -> None:
        if torch.cuda.is_current_stream_capturing() or len(self._pending) >= _MAX_DEFERRED:
            return
        ones = torch.ones_like(flat)
        counts = torch.zeros(experts, dtype=flat.dtype, device=flat.device)
        host = torch.empty(experts, dtype=flat.dtype, pin_memory=True)
        host.copy_(counts.scatter_add_(0, flat, ones), non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._pending.append((self._recorder.current_step, layer, host, event))
        self.write()

    def write(self) -> None:
        """Writes the counts that have arrived, in order. The recorder's thread calls it, too, once
        the rank has stopped: the last counts show who routed no token to an expert."""
        captures = self._recorder.captures
        if not self._pending or captures is None:
            return
        with captures.question() as allowed:
            while allowed and self._pending and self._pending[0][3].query():
                step, layer, host, _ = self._pending.pop(0)
                self._recorder.event("tokens", step=step, layer=layer, counts=host.tolist())
