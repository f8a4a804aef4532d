"""Context parallelism of the model under test by torch's ``context_parallel``, with FSDP2 over the
data-parallel axes and cp together."""

from __future__ import annotations

from typing import Any, List

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from moediag.axes import CP, DP_SHARD
from moediag.lab.step.shard.data_parallel import FSDP2, over
from moediag.lab.step.shard.wrapped import ROUTER_LOGITS, mesh_of
from moediag.recorder.not_applicable import NotApplicable

RING_ON_CPU = (
    "torch registers ring attention for CUDA kernels only: here the same ring, forward and "
    "backward, is registered for the flash attention of the CPU"
)
_IGNORED = -100  # cross_entropy's own


class ContextParallel(FSDP2):
    """Each rank of the cp axis computes its part of every sequence; keys and values travel around
    the ring (``wrapper.rotate``)."""

    def wrap(self, model: nn.Module) -> nn.Module:
        try:
            from torch.distributed.tensor.experimental import _attention
        except ImportError as error:
            raise NotApplicable("this torch has no context_parallel") from error
        if self.trial.model.config.get(ROUTER_LOGITS):
            raise NotApplicable("an auxiliary loss is a mean over other tokens on each rank")
        self.whole_mesh = self.root()
        self.cp = self.whole_mesh[str(CP)]
        if self.trial.step.seq_len % (2 * self.cp.size()):
            raise NotApplicable(f"step.seq_len must be a multiple of {2 * self.cp.size()}")
        _attention.set_rotate_method(self.trial.wrapper.rotate)
        if self.device.type == "cpu":
            ring_on_cpu()
            self.notes.append(RING_ON_CPU)
        whole: Any = model
        whole.config._attn_implementation = "sdpa"
        return super().wrap(model)

    def root(self) -> DeviceMesh:
        """Returns the mesh of all ranks."""
        return mesh_of(self.trial, CP)

    def mesh(self) -> DeviceMesh:
        return over(self.whole_mesh, DP_SHARD, CP)

    def forward_backward(self, batches: List[torch.Tensor]) -> float:
        from torch.distributed.tensor.experimental import context_parallel

        total = 0.0
        for number, batch in enumerate(batches):
            tokens, count = batch.clone(), batch[:, 1:].numel()
            labels = F.pad(tokens[:, 1:], (0, 1), value=_IGNORED)
            places = torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0)
            buffers = [tokens, labels, places]
            # Backward attends again: it has to run inside, too.
            with (
                self.accumulating(last=number == len(batches) - 1),
                context_parallel(
                    self.cp,
                    buffers=buffers,
                    buffer_seq_dims=[1, 1, 1],
                    no_restore_buffers=set(buffers),
                ),
            ):
                model: Any = self.model
                mask = torch.ones_like(tokens)
                logits = model(
                    input_ids=tokens, position_ids=places, attention_mask=mask, use_cache=False
                ).logits
                # The ranks hold unequal numbers of labels, and gradients are averaged over cp.
                loss = F.cross_entropy(
                    logits.flatten(0, 1).float(),
                    labels.flatten(),
                    ignore_index=_IGNORED,
                    reduction="sum",
                ) * (self.cp.size() / count / len(batches))
                self.backward(loss)
            total += float(loss.detach())
        return total


def ring_on_cpu() -> None:
    """Adds the flash attention of the CPU to the operators that context_parallel distributes.
    Raises NotApplicable."""
    try:
        from torch.distributed.tensor import DTensor
        from torch.distributed.tensor.experimental._context_parallel import _attention as ring
    except ImportError as error:
        raise NotApplicable(
            f"torch {torch.__version__} has no ring attention that the CPU can be added to"
        ) from error
    aten = torch.ops.aten
    forward = aten._scaled_dot_product_flash_attention_for_cpu.default
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default

    def attend(op_call: Any, args: Any, kwargs: Any) -> Any:
        q, k, v, *rest = args
        options = dict(zip(("dropout_p", "is_causal"), rest), **kwargs)  # noqa: B905 - Python 3.9
        group = q.device_mesh.get_group()
        found = ring._templated_ring_attention(group, 2, forward, *_local(q, k, v), **options)
        return tuple(DTensor.from_local(t, q.device_mesh, q.placements) for t in found)

    def attend_back(op_call: Any, args: Any, kwargs: Any) -> Any:
        grad, q, k, v, out, lse, dropout_p, is_causal = args
        found = ring._templated_ring_attention_backward(
            q.device_mesh.get_group(),
            2,
            backward,
            _local(grad)[0],
            "grad_out",
            *_local(q, k, v, out, lse),
            is_causal,
            dropout_p=dropout_p,
            **kwargs,
        )
        return tuple(DTensor.from_local(t, q.device_mesh, q.placements) for t in found[:3])

    ring.custom_ops.update({forward: attend, backward: attend_back})


def _local(*tensors: Any) -> List[torch.Tensor]:
    return [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
