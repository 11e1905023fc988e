"""Randomness without state: every number is a function of (seed, words), the same on every engine and device.

On the host a stream of words names a numpy generator. On the device a key (an int64 tensor, one per slot) is hashed
with a counter, so that noise needs no generator, can be drawn under vmap, and resuming needs nothing stored.
"""

import os
import zlib
from collections.abc import Sequence
from functools import lru_cache
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Key = TypeVar("Key", Tensor, NDArray[np.int64])
"""on a device, or on the host, where numpy is quicker for few numbers; the same bits"""

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


_FIRST, _SECOND, _STEP = (_signed(w) for w in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB, _GOLDEN))


def _word(word: int | str) -> int:
    return zlib.crc32(word.encode()) if isinstance(word, str) else word


def stream(seed: int, *words: int | str) -> np.random.Generator:
    """The numpy generator of these words: stream(seed, round, client, "batches")."""
    return np.random.default_rng([seed & _MASK, *(_word(w) for w in words)])


def _shift(x: Key, bits: int) -> Key:
    return (x >> bits) & ((1 << (64 - bits)) - 1)  # int64 shifts keep the sign; a hash needs zeros


def _hash(x: Key) -> Key:
    """The splitmix64 finaliser."""
    x = (x ^ _shift(x, 30)) * _FIRST
    x = (x ^ _shift(x, 27)) * _SECOND
    return x ^ _shift(x, 31)


def fold(key: Key, *words: int | str | Key) -> Key:
    """A new key from a key and words; shapes broadcast."""
    for word in words:
        key = _hash(key + (_constant(_word(word)) if isinstance(word, int | str) else _STEP + _hash(word)))
    return key


@lru_cache(maxsize=4096)
def _constant(word: int) -> int:
    """What a word known beforehand adds to a key."""
    return _signed((_STEP + int(_hash(np.array([word], np.int64))[0])) & _MASK)


def uniform(key: Tensor, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Uniform numbers in [0, 1) with 24 random bits each. The key is a scalar; under vmap, one a slot."""
    counter = torch.arange(int(np.prod(shape)), device=key.device) * _STEP
    return (_shift(_hash(key + counter), 40).to(dtype) * 2.0**-24).reshape(tuple(shape))


def chance(key: Tensor, shape: Sequence[int], p: float) -> Tensor:
    """Booleans that are true with probability p < 1, to 16 bits: four are drawn at once, since a hash is dear."""
    size = int(np.prod(shape))
    words = _hash(key + torch.arange(-(-size // 4), device=key.device) * _STEP)
    quarters = words[:, None] << torch.arange(0, 64, 16, device=key.device)  # each in turn has the highest bits
    return (quarters < (round(p * 2**16) - 2**15) << 48).flatten()[:size].reshape(tuple(shape))


def normal(key: Tensor, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard normal numbers (Box-Muller)."""
    radius = torch.sqrt(-2.0 * torch.log1p(-uniform(fold(key, 1), shape, dtype)))
    return radius * torch.cos(2.0 * torch.pi * uniform(fold(key, 2), shape, dtype))


def system_normal(size: int) -> NDArray[np.float64]:
    """Standard normal numbers from the operating system's entropy, which nobody can repeat (Box-Muller, 53 bits)."""
    words = np.frombuffer(os.urandom(16 * size), np.uint64).reshape(2, size) >> np.uint64(11)
    radius, angle = (words + np.array([[1], [0]], np.uint64)) * 2.0**-53
    drawn: NDArray[np.float64] = np.sqrt(-2.0 * np.log(radius)) * np.cos(2.0 * np.pi * angle)
    return drawn
