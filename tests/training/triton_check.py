"""Compares the Triton kernels with their definitions in torch; run with TRITON_INTERPRET=1 where
there is no GPU. Prints one line per operator and fails by assertion."""

from __future__ import annotations

import torch

from draft_svc.training import kernels as k
from draft_svc.training import triton_kernels as t
from draft_svc.training import triton_loss as loss
from engine.models.rope import Rope, rope_tables
from tests.engine.interpreter import prepare

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def rand(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=dtype)


def close(name: str, got: torch.Tensor, wanted: torch.Tensor, limit: float = 1e-4) -> None:
    error = (got.double() - wanted.double()).norm() / wanted.double().norm().clamp(min=1e-12)
    print(f"{name}: {float(error):.2e}")
    assert float(error) < limit, (name, float(error))


def check_norm_and_mlp() -> None:
    residual, delta, weight = rand(5, 72), rand(5, 72), rand(72)
    other = residual.clone()
    got = t.add_rms_norm(residual, delta, weight, 1e-5, torch.float32)
    close("add_rms_norm", got, k.add_rms_norm(other, delta, weight, 1e-5, torch.float32))
    close("residual", residual, other)
    got = t.add_rms_norm(residual, None, weight, 1e-5, torch.float32)
    close("rms_norm", got, k.add_rms_norm(other, None, weight, 1e-5, torch.float32))
    both = rand(3, 2 * 2100)
    close("silu_mul", t.silu_mul(both), k.silu_mul(both))


def check_attention() -> None:
    heads = hq, hk, hd = 6, 2, 16
    cos, sin = (x.to(DEVICE) for x in rope_tables(Rope(500.0, 200), hd, 200))
    positions = torch.tensor([0, 7, 130, 64], device=DEVICE)
    for norms in (None, (rand(hd), rand(hd))):
        qkv = rand(4, (hq + 2 * hk) * hd)
        other = qkv.clone()
        caches = [[rand(4, hk, 160, hd) for _ in range(2)]]
        caches.append([c.clone() for c in caches[0]])
        t.rope_(qkv, positions, cos, sin, heads, norms, 1e-5, tuple(caches[0]))
        k.rope_(other, positions, cos, sin, heads, norms, 1e-5, tuple(caches[1]))
        close("rope", qkv, other)
        close("cache k", caches[0][0], caches[1][0])
        close("cache v", caches[0][1], caches[1][1])
    for window in (0, 50):
        got = t.decode_attention(qkv, *caches[0], positions, heads, window)
        for row, end in enumerate((positions + 1).tolist()):
            q = qkv[row, : hq * hd].view(hq, 1, hd)
            first = max(0, end - window) if window else 0
            keys, values = (c[row, :, first:end].repeat_interleave(3, 0) for c in caches[0])
            wanted = torch.nn.functional.scaled_dot_product_attention(q, keys, values)
            close(f"decode_attention window {window}", got[row], wanted.flatten())


def check_choose() -> None:
    logits = rand(8, 5000)
    logits[0, 17] = logits[0, 4000] = 50.0  # a tie goes to the lowest id
    zeros = torch.zeros(8, device=DEVICE)
    seeds = torch.arange(8, device=DEVICE)
    positions = torch.full((8,), 9, device=DEVICE)
    greedy = t.choose(logits, zeros, seeds, positions)
    assert greedy.tolist() == logits.argmax(-1).tolist() and int(greedy[0]) == 17
    # Draws follow the softmax: the mean log-probability of many draws is minus the entropy.
    row = torch.cat((rand(1, 8) * 2, torch.full((1, 92), -50.0, device=DEVICE)), 1)
    many = row.expand(160, -1).contiguous()
    seeds = torch.arange(160, device=DEVICE)
    drawn = t.choose(many, torch.full((160,), 0.8, device=DEVICE), seeds, seeds % 7)
    counts = torch.bincount(drawn, minlength=100)[:8].float() / 160
    wanted = (row[0, :8] / 0.8).softmax(-1)
    assert float((counts - wanted).abs().max()) < 0.13, (counts, wanted)
    again = t.choose(many, torch.full((160,), 0.8, device=DEVICE), seeds, seeds % 7)
    assert bool((drawn == again).all())
    print("choose: ok")


def check_loss() -> None:
    zq, zp = rand(6, 2500) * 3, rand(6, 2500) * 3
    zp[2] = zq[2]
    labels = torch.randint(0, 2500, (6,), device=DEVICE)
    labels[1] = zq[1].argmax()
    got, wanted = loss.loss_stats(zq, zp, labels), k.loss_stats(zq, zp, labels)
    for column, name in enumerate(k.STATS):
        if name == "sign":  # a sum of signs where p and q differ by rounding only
            rows = [0, 1, 3, 4, 5]
            close(name, got[rows, column], wanted[rows, column], 1e-3)
        else:
            close(name, got[:, column], wanted[:, column], 1e-3)
    rows = [0, 1, 3, 4, 5]
    weights = rand(6).abs()
    mix = k.LossMix(0.4, 0.5, 0.7)
    other = zq.clone()
    loss.loss_grad_(zq, zp, labels, wanted, weights, mix)
    k.loss_grad_(other, zp, labels, wanted, weights, mix)
    close("loss_grad", zq[rows], other[rows])


if __name__ == "__main__":
    if DEVICE == "cpu":
        prepare()
    torch.manual_seed(0)
    check_norm_and_mlp()
    check_attention()
    check_choose()
    check_loss()
