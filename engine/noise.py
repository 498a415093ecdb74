"""Counter-based Gumbel noise: the torch reference of what every kernel must reproduce.

Philox4x32-10 with key (seed low, seed high) and counter (token_id // 4, index, choice, 0); lane
token_id % 4 belongs to the token. Noise is indexed by the *target's* token id and the position
drawn and depends on nothing else: not on the batch, the draft, or the size of a trimmed head.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10


def _multiply(value: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of value * factor; in 16-bit halves, since int64 has no unsigned
    product.
    """
    low, high = value & 0xFFFF, value >> 16
    bottom = low * factor
    middle = high * factor + (bottom >> 16)
    return middle >> 16, ((middle & 0xFFFF) << 16) | (bottom & 0xFFFF)


def philox(counter: Tensor, key: tuple[int, int]) -> Tensor:
    """counter int64 [..., 4] holding 32-bit words -> random words [..., 4]."""
    c0, c1, c2, c3 = counter.unbind(-1)
    k0, k1 = key
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(c0, _M0)
        high1, low1 = _multiply(c2, _M1)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    return torch.stack((c0, c1, c2, c3), dim=-1)


def gumbel(seed: int, choice: int, index: int, vocab_size: int) -> Tensor:
    """Gumbel noise fp32 [vocab_size] for drawing the token at position `index` of `choice`."""
    groups = -(-vocab_size // 4)
    counter = torch.zeros(groups, 4, dtype=torch.int64)
    counter[:, 0] = torch.arange(groups)
    counter[:, 1], counter[:, 2] = index & _MASK, choice & _MASK
    words = philox(counter, (seed & _MASK, (seed >> 32) & _MASK)).reshape(-1)[:vocab_size]
    uniform = ((words >> 9).float() + 0.5) * 2.0**-23
    return -torch.log(-torch.log(uniform))
