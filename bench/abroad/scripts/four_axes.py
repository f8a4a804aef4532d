"""A small GPT with tensor, context, pipeline and data parallelism by hand.

torchrun --nproc-per-node N four_axes.py [--tp --cp --pp --dp --layout zigzag]; the environment
variable FAULT names a fault.
"""

import argparse
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

FAULT = os.environ.get("FAULT", "")


class PGM:
    def __init__(self, tp, cp, pp, dp):
        world = dist.get_world_size()
        rank = dist.get_rank()
        grid = torch.arange(world).view(dp, pp, cp, tp)
        self.dp_rank, self.pp_rank, self.cp_rank, self.tp_rank = [
            int(i) for i in (grid == rank).nonzero()[0]
        ]

        def make(dim):
            mine = None
            for ranks in grid.movedim(dim, -1).reshape(-1, grid.shape[dim]).tolist():
                g = dist.new_group(ranks)
                if rank in ranks:
                    mine, members = g, ranks
            return mine, members

        self.tp, self.tp_ranks = make(3)
        self.cp, self.cp_ranks = make(2)
        self.pp, self.pp_ranks = make(1)
        self.dp, self.dp_ranks = make(0)
        cpdp = None
        for p in range(pp):
            for t in range(tp):
                ranks = grid[:, p, :, t].flatten().tolist()
                g = dist.new_group(ranks)
                if rank in ranks:
                    cpdp = g
                    self.cpdp_size = len(ranks)
        self.cpdp = cpdp
        self.tp_size, self.cp_size, self.pp_size, self.dp_size = tp, cp, pp, dp
        self.rank = rank


class CopyToTP(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, g):
        if pgm.tp_size == 1 or FAULT == "tp_backward":
            return g
        g = g.contiguous()
        dist.all_reduce(g, group=pgm.tp)
        return g


class ReduceFromTP(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        if pgm.tp_size == 1:
            return x
        x = x.contiguous()
        dist.all_reduce(x, group=pgm.tp)
        return x

    @staticmethod
    def backward(ctx, g):
        return g


class ColumnLinear(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        full = torch.empty(o, i)
        nn.init.normal_(full, std=0.02)
        n = o // pgm.tp_size
        self.weight = nn.Parameter(full[pgm.tp_rank * n : (pgm.tp_rank + 1) * n].clone())
        self.bias = nn.Parameter(torch.zeros(n))

    def forward(self, x):
        return F.linear(CopyToTP.apply(x), self.weight, self.bias)


class RowLinear(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        full = torch.empty(o, i)
        nn.init.normal_(full, std=0.02)
        n = i // pgm.tp_size
        self.weight = nn.Parameter(full[:, pgm.tp_rank * n : (pgm.tp_rank + 1) * n].clone())
        self.bias = nn.Parameter(torch.zeros(o))

    def forward(self, x):
        if FAULT == "row_bias":
            return ReduceFromTP.apply(F.linear(x, self.weight, self.bias))
        return ReduceFromTP.apply(F.linear(x, self.weight)) + self.bias


class Ring:
    def __init__(self):
        n = pgm.cp_size
        i = pgm.cp_rank
        self.to, self.frm = pgm.cp_ranks[(i + 1) % n], pgm.cp_ranks[(i - 1) % n]
        if FAULT == "ring_neighbour" and dist.get_rank() == 1:
            self.to = pgm.cp_ranks[(i + 2) % n]
        self.ops = []

    def send_recv(self, t, shape):
        t = t.contiguous()
        out = torch.empty(shape)
        self.ops += [dist.P2POp(dist.isend, t, self.to), dist.P2POp(dist.irecv, out, self.frm)]
        return out

    def go(self):
        reqs = dist.batch_isend_irecv(self.ops)
        self.ops = []
        for r in reqs:
            r.wait()


def chunk_positions(rank, S):
    """positions of this rank's tokens in the whole sequence"""
    n = pgm.cp_size
    if LAYOUT == "zigzag":
        c = S // (2 * n)
        return torch.cat(
            [
                torch.arange(rank * c, rank * c + c),
                torch.arange((2 * n - 1 - rank) * c, (2 * n - rank) * c),
            ]
        )
    if LAYOUT == "striped":
        return torch.arange(rank, S, n)
    if LAYOUT == "uneven":
        cut = [0] + [S * (i + 1) // (n + 1) for i in range(n - 1)] + [S]
        return torch.arange(cut[rank], cut[rank + 1])
    c = S // n
    return torch.arange(rank * c, rank * c + c)


def allowed(qi, ki):
    m = ki[None, :] <= qi[:, None]
    if FAULT == "ring_mask":
        m = torch.arange(len(ki))[None, :] <= torch.arange(len(qi))[:, None]
    if FAULT == "ring_future" and ki[0] != qi[0]:
        m = torch.ones_like(m)
    if FAULT == "ring_diag" and ki[0] == qi[0]:
        m = ki[None, :] < qi[:, None]
        m[:, 0] |= ~m.any(1)
    return m


class RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v):
        scale = 1 / math.sqrt(q.shape[-1])
        n = pgm.cp_size
        me = chunk_positions(pgm.cp_rank, SEQ)
        if FAULT == "ring_scale":
            scale = 1 / q.shape[-1]
        kk, vv = k, v
        outs, lses = [], []
        for s in range(n):
            src = (pgm.cp_rank - s) % n
            m = allowed(me, chunk_positions(src, SEQ))
            if m.any() and not (FAULT == "ring_block" and s == n - 1):
                sc = (q @ kk.transpose(-1, -2) * scale).masked_fill(~m, float("-inf"))
                lse = sc.logsumexp(-1, keepdim=True)
                outs.append((sc - lse).exp().nan_to_num() @ vv)
                lses.append(lse)
            if s + 1 != n:
                ring = Ring()
                ks = kk.shape[:-2] + (len(chunk_positions((src - 1) % n, SEQ)), kk.shape[-1])
                kk, vv = ring.send_recv(kk, ks), ring.send_recv(vv, ks)
                ring.go()
        L = torch.stack(lses).logsumexp(0)
        out = sum(o * (one - L).exp() for o, one in zip(outs, lses))
        if FAULT == "ring_lse":
            out = sum(outs) / len(outs)
        if FAULT == "ring_lse2":
            out = sum(o * ((one - L) * 0.5).exp() for o, one in zip(outs, lses))
        ctx.save_for_backward(q, k, v, out, L)
        return out

    @staticmethod
    def backward(ctx, do):
        q, k, v, out, L = ctx.saved_tensors
        n = pgm.cp_size
        me = chunk_positions(pgm.cp_rank, SEQ)
        scale = 1 / math.sqrt(q.shape[-1])
        D = (do * out).sum(-1, keepdim=True)
        dq = torch.zeros_like(q)
        dk = torch.zeros_like(k)
        dv = torch.zeros_like(v)
        kk, vv = k, v
        for s in range(n):
            src = (pgm.cp_rank - s) % n
            m = allowed(me, chunk_positions(src, SEQ))
            if m.any():
                sc = (q @ kk.transpose(-1, -2) * scale).masked_fill(~m, float("-inf"))
                p = (sc - L).exp()
                dv = dv + p.transpose(-1, -2) @ do
                ds = p * (do @ vv.transpose(-1, -2) - D) * scale
                dq = dq + ds @ kk
                dk = dk + ds.transpose(-1, -2) @ q
            ring = Ring()
            ks = kk.shape[:-2] + (len(chunk_positions((src - 1) % n, SEQ)), kk.shape[-1])
            kk, vv, dk, dv = [ring.send_recv(t, ks) for t in (kk, vv, dk, dv)]
            ring.go()
        if FAULT == "ring_dk":
            dk = k.detach() * 0 + dk.flip(0)
        if FAULT == "ring_dv":
            dv = dv * 0 + (p.transpose(-1, -2) @ do if dv.shape[-2] == p.shape[-1] else 0)
        return dq, dk, dv


class Block(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h = h // pgm.tp_size
        self.ln1, self.ln2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.q, self.k, self.v = ColumnLinear(d, d), ColumnLinear(d, d), ColumnLinear(d, d)
        self.o = RowLinear(d, d)
        self.up = ColumnLinear(d, 4 * d)
        self.down = RowLinear(4 * d, d)

    def forward(self, x):
        y = self.ln1(x)
        B, S, _ = y.shape
        q, k, v = (at(y).view(B, S, self.h, -1).transpose(1, 2) for at in (self.q, self.k, self.v))
        a = (
            RingAttention.apply(q, k, v)
            if pgm.cp_size > 1
            else F.scaled_dot_product_attention(q, k, v, is_causal=True)
        )
        x = x + self.o(a.transpose(1, 2).reshape(B, S, -1))
        return x + self.down(F.gelu(self.up(self.ln2(x))))


class Stage(nn.Module):
    def __init__(self, vocab, d, h, layers, seq):
        super().__init__()
        per = layers // pgm.pp_size
        first, last = pgm.pp_rank == 0, pgm.pp_rank == pgm.pp_size - 1
        blocks, emb, pos, head = [], None, None, None
        torch.manual_seed(1)
        emb = nn.Embedding(vocab, d)
        pos = nn.Embedding(seq, d)
        for i in range(layers):
            torch.manual_seed(10 + i)
            b = Block(d, h)
            if i // per == pgm.pp_rank:
                blocks.append(b)
        torch.manual_seed(2)
        head = nn.Linear(d, vocab, bias=False)
        self.emb, self.pos = (emb, pos) if first else (None, None)
        self.blocks = nn.ModuleList(blocks)
        self.norm, self.head = (nn.LayerNorm(d), head) if last else (None, None)

    def forward(self, x):
        if self.emb is not None:
            at = (
                chunk_positions(pgm.cp_rank, SEQ)
                if FAULT != "cp_positions"
                else torch.arange(x.shape[1])
            )
            x = self.emb(x) + self.pos(at)
        for b in self.blocks:
            x = b(x)
        return self.head(self.norm(x)) if self.head is not None else x


class DP(nn.Module):
    """Averages gradients over data and context parallel ranks, by hooks."""

    def __init__(self, m):
        super().__init__()
        self.module = m
        self.sync = False
        self.works = []
        for n, p in m.named_parameters():
            if FAULT == "dp_forgets" and n.endswith("ln2.weight"):
                continue
            p.register_post_accumulate_grad_hook(self.hook)

    def hook(self, p):
        if self.sync:
            p.grad.div_(pgm.dp_size if FAULT == "dp_divides" else pgm.cpdp_size)
            self.works.append(
                dist.all_reduce(
                    p.grad, group=pgm.dp if FAULT == "dp_group" else pgm.cpdp, async_op=True
                )
            )

    def finish(self):
        for w in self.works:
            w.wait()
        self.works = []

    def forward(self, x):
        return self.module(x)


def pp_comm(op, t=None, shape=None):
    peer = pgm.rank + (1 if op in ("send_fwd", "recv_bwd") else -1) * pgm.tp_size * pgm.cp_size
    if op.startswith("send"):
        dist.send(t.contiguous(), peer)
        return None
    out = torch.empty(shape, requires_grad=True)
    dist.recv(out.data, peer)
    return out


def main():
    global pgm, step, SEQ, LAYOUT
    ap = argparse.ArgumentParser()
    for a in ("tp", "cp", "pp", "dp"):
        ap.add_argument("--" + a, type=int, default=1)
    ap.add_argument("--layout", default="contiguous")
    ap.add_argument("--steps", type=int, default=6)
    a = ap.parse_args()
    dist.init_process_group("gloo")
    step = 0
    pgm = PGM(a.tp, a.cp, a.pp, a.dp)
    V, D, H, L, S, B, M = 64, 32, 4, 4, 32, 4, 2
    model = DP(Stage(V, D, H, L, S))
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    g = torch.Generator().manual_seed(0)
    data = torch.randint(0, V, (256, S + 1), generator=g)
    SEQ = S
    LAYOUT = a.layout
    sl = chunk_positions(pgm.cp_rank, S)
    s = len(sl)
    for step in range(a.steps):
        opt.zero_grad()
        total = 0.0
        saved = []
        dpr = 0 if FAULT == "same_data" else pgm.dp_rank

        def batch(m):
            i = ((step * M + m) * pgm.dp_size + dpr) * B % 256  # noqa: B023
            t = data[i : i + B]
            return t[:, :-1][:, sl], t[:, 1:][:, sl]

        def fwd(m):
            x, y = batch(m)
            inp = x if pgm.pp_rank == 0 else pp_comm("recv_fwd", shape=(B, s, D))
            out = model(inp)
            if pgm.pp_rank < pgm.pp_size - 1:
                pp_comm("send_fwd", out.detach())
            else:
                out = (
                    F.cross_entropy(out.flatten(0, 1), y.flatten())
                    / (1 if FAULT == "micro" else M)
                    * (s * pgm.cp_size / S)
                )
                nonlocal total
                total += float(out)
            return inp, out

        def bwd(m, inp, out):
            model.sync = m == M - 1 if FAULT != "sync_every" else True
            if pgm.pp_rank == pgm.pp_size - 1:
                out.backward()
            else:
                out.backward(pp_comm("recv_bwd", shape=out.shape))
            if pgm.pp_rank > 0:
                pp_comm("send_bwd", inp.grad * (2 if FAULT == "pp_scale" else 1))

        if pgm.pp_size == 1:
            for m in range(M):
                bwd(m, *fwd(m))
        else:  # all forward, all backward
            n = M - 1 if FAULT == "pp_micro" and dist.get_rank() == 2 and step == 4 else M
            saved = [fwd(m) for m in range(n)]
            for m in range(n):
                bwd(m, *saved[n - 1 - m if FAULT == "pp_swap" and pgm.pp_rank == 0 else m])
        model.finish()
        if FAULT == "tp_skip" and dist.get_rank() == 3 and step == 3:
            total = 0
        if FAULT != "clip_off":
            norm = sum(p.grad.pow(2).sum() for p in model.parameters())
            if FAULT != "clip_local":
                dist.all_reduce(norm, group=pgm.tp)
                dist.all_reduce(norm, group=pgm.pp)
            c = min(1.0, 1.0 / (float(norm.sqrt()) + 1e-6))
            for p in model.parameters():
                p.grad.mul_(c)
        opt.step()
        t = torch.tensor(total)
        if FAULT == "log_one" and step == 3:
            if pgm.pp_rank == pgm.pp_size - 1 and pgm.rank != 3:
                dist.all_reduce(t, group=pgm.cpdp)
        elif pgm.pp_rank == pgm.pp_size - 1:
            dist.all_reduce(t, group=pgm.cpdp)
        if pgm.rank == dist.get_world_size() - 1:
            print(f"step {step} loss {float(t) / pgm.cpdp_size:.4f}", flush=True)
    dist.destroy_process_group()


main()
