"""The recorder's log, line by line, and its memory-mapped record of progress."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Optional, Union

from moediag.masking import masked
from moediag.protocol.stored import open_stored

# --------------------------------------------------------------------------------------
# Events, one JSON object a line. ``e`` is the kind, ``t`` the wall clock in seconds.
#
# start       rank world_size pid host python torch transformers accelerate backend
#             nccl(version of the NCCL that torch loaded|null)
#             libraries[folders of installed packages, of the standard library, torch and moediag]
#             restart(how often the elastic agent has started ranks again on its own store|null)
# versions    transformers|accelerate   a package that a watched job imported later
# file        path                  a file of the user's code, as frames name it
# group       group(name) desc axis(mesh axis name or null) ranks backend
# names       id fqns[]            interned list of parameter names; later events carry the id
# collective  n(per-rank index, from 0)  group  k(index of this op within its group, from 0)
#             op numel_in numel_out dtype splits_in|null splits_out|null peer|null reduce|null
#             phase(forward|backward|recompute|optimizer|other) module(FQN or "")
#             carries(names id|null: parameters on the wire)
#             of(names id|null: all parameters of that FSDP group)  sizes(numel of each carried)
#             site("file.py:12 function": innermost line outside torch)
#             callers(names id|null: the user's lines around it, the nearest first)
#             step(int) async(bool)  tag(of a send or receive, absent: 0)
#             members(global ranks of the group that new_group makes; absent for other calls)
# done        n                    the collective was waited for and completed
# failed      n type message       it raised, or its Work completed with an error; the program may
#             have swallowed that
# tokens      step layer(FQN of the MoE block) counts[experts]   one line per forward of it
# no_gradient step names(id)       parameters whose .grad is None when the optimizer steps
# phase       name(free text: "step 1", "imports", …) step
# weights     when(loaded|prepared|resumed) experts[ExpertRows…] unequal{FQN of another parameter
#             or buffer that differs from the checkpoint: what it holds; a list in older files}
#             compared(int: how many of those) asked(ep size asked for, 1: none) whole(experts of
#             a layer in the checkpoint) left_out(bool: sharding leaves the experts alone)
# experts_used rows{FQN of an expert parameter: how many experts a forward computes with}
# note        text                 a fact about how the trial was run (shims, how it was asked)
# decision    what value step      which branch the rank takes where others may take another one;
#             value: a number, the names of what it has, or words that follow "rank 1 "
# finding     what text step details{}  wrong, and found before it shows; what: optimizer-group
# batches     line("file.py:12 function": the user's line that asked for the first) number
#             ended(bool)          a data loader that ended, or that was in use when the rank ended
#             or was examined
# handling    type message where   the exception that the main thread handled when it was examined
# thread_error thread(its name) type message where   the exception that ended a thread
# conditions  tests[{file line holds(bool) values{name: as Python prints it}}]   each `if` that the
#             main thread had passed when it was examined, the innermost function first
# leaves      how("os._exit(0)") site callers   the program ends the process
# not_seen    text                 something this rank's recorder cannot observe here
# error       type message where   the exception that ends the rank
# end
# --------------------------------------------------------------------------------------
EVENT_KINDS = (
    "start", "versions", "file", "group", "names", "collective", "done", "failed", "tokens",
    "no_gradient", "phase",
    "weights", "experts_used", "decision", "finding", "note", "batches", "handling",
    "thread_error",
    "conditions", "leaves", "not_seen", "error", "end",
)  # fmt: skip

# --------------------------------------------------------------------------------------
# The log of the laws (``laws_file``), in the same form. Fingerprints are hexadecimal text, null
# where a tensor could not be read.
#
# pieces      id optimizer(class) key(the same on ranks whose optimizer has the same parameters)
#             names[] parts[] hows[] (see recorder.laws.replica_sets) in_set[] in_group[] shapes[]
#             sets[ranks…]          what an optimizer has, one entry per parameter
# check       pieces(id) step count(calls of step() before) clocks[calls on the group of each set]
#             age(updates that the state has counted; -1: none)
#             params[] grads[] ("": no gradient, "zero") state{name: []} hyper[one object per group]
#             nonfinite[names of parameters] nonfinite_grads[] scaler(bool: a GradScaler is used)
#             sketches{position: [sum with pseudo-random signs, norm]}   gradients that each rank
#             computes itself
#             line(the user's line that called step(), "file.py:12 function")
# kept        as check: the first step after a call of torch.save
# inputs      step forward(of that step, from 0) digest(of all tensors that the model is called
#             with) over[ranks between which its wrapper averages gradients; empty: unknown]
#             sampler(class) replicas number(num_replicas and rank of a DistributedSampler; else 0
#             and -1) line(the user's that asked for the batch) made(that made the data loader)
# same_order  line epoch sampler(class) step   a DistributedSampler with shuffle gave the same order
#             in two complete passes of training
# norm        step names[] norm max_norm line scale(the loss scale that gradients still have, or 0)
#                                               clip_grad_norm_ of torch on plain tensors
# declared    step tensors[{axes[] ranks[] part shape[] data(bool: an axis of data parallelism) line
#             print(of integers) sketch(of floats)}]   DTensor.from_local with Replicate placements
# model       step models[{over[] buffers{name: fingerprint} frozen_routers[]}]
#             left_out{name: fingerprint} replaced[names of these, if the optimizers have as many of
#             the same shapes that belong to no module] averages[updates of each AveragedModel]
#             idle(bool: no parameter of an optimizer that stepped had a gradient)
#             tied[names of a parameter that has several]
# cleared     step optimizer(class) names[] kept(bool) line times(that autograd added to them)
#                                               gradients between two calls of step()
# mode        step model(number) name(class) training(bool) kinds[classes of modules]
# mode_change step model training
# load        step line parameters(number loaded) missing[] unexpected[] counts[2]
#                                               Module.load_state_dict
# sharded     step shards{name: [fingerprint of the whole, loaded before(bool), unchanged(bool)]}
# optimizer_file   line                         torch.load of a file with an optimizer's state
# optimizer_load   line                         Optimizer.load_state_dict
# states_left      line names[] count           of an optimizer's state in a checkpoint of
#                                               torch.distributed.checkpoint, of which a load asked
#                                               for the groups only
#
# A law that records something of its own adds a kind, which its module describes.
# --------------------------------------------------------------------------------------

OPS = (
    "all_gather", "reduce_scatter", "all_reduce", "broadcast", "reduce", "gather", "scatter",
    "all_to_all", "send", "recv", "barrier",
)  # fmt: skip


class Heartbeat:
    """Layout of the memory-mapped progress record of one rank (64 bytes, little endian).

    ``progress`` grows with every recorded event; ``collective`` is the index of the collective
    the main thread is inside of, or -1; ``state`` is one of STATES; ``time`` is the wall clock
    of the last change in seconds; ``step`` the training step, from 1. ``turns`` counts batches and
    forwards, which are no progress: a rank may evaluate for ever.
    """

    MAGIC = b"MDHB0001"
    STATES = ("starting", "running", "in-collective", "finished")
    LAYOUT = struct.Struct("<8sQqQdq")  # magic, progress, collective, state, time, step
    TURNS = struct.Struct("<Q")  # after LAYOUT
    SIZE = 64

    def __init__(
        self, progress: int, collective: int, state: str, time: float, step: int, turns: int = 0
    ) -> None:
        self.progress = progress
        self.collective = collective
        self.state = state
        self.time = time
        self.step = step
        self.turns = turns

    @classmethod
    def read(cls, path: Union[str, Path]) -> Optional["Heartbeat"]:
        """The record at ``path``; None when it does not exist yet or is incomplete."""
        try:
            with open_stored(path) as file:
                raw = file.read(cls.SIZE)
        except OSError:
            return None
        if len(raw) < cls.SIZE or not raw.startswith(cls.MAGIC):
            return None
        _, progress, collective, state, time, step = cls.LAYOUT.unpack_from(raw)
        (turns,) = cls.TURNS.unpack_from(raw, cls.LAYOUT.size)
        name = cls.STATES[state] if state < len(cls.STATES) else "running"
        return cls(progress, collective, name, time, step, turns)


_LONGEST_MESSAGE = 8000  # characters


def error_text(error: BaseException) -> str:
    """The message of an exception, without secrets and without the middle of a long one: an error
    of another process stands at its end."""
    text, half = masked(str(error)), _LONGEST_MESSAGE // 2
    return text if len(text) <= _LONGEST_MESSAGE else f"{text[:half]}\n…\n{text[-half:]}"
