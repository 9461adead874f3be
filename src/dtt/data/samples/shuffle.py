"""The shuffle of one source: `sample = f(seed, k)`, a keyed permutation of each epoch.

It needs no index file and no state: the sample at position k is computed in O(1) memory. So the
order is the same for any number of ranks, and one integer is enough to resume.
"""

from __future__ import annotations

import hashlib

import numpy as np

from dtt.data.samples.protocol import SampleNumbers

ROUNDS = 8
DIGEST_BYTES = 16
BLOCK = 2**13
"""Positions computed together: numpy takes several times as long per position for a few hundred."""


def permutation(index: SampleNumbers, size: int, key: bytes) -> SampleNumbers:
    """Return the images of `index` (all below `size`) under a permutation of range(size).

    `key` selects the permutation: a balanced Feistel network (Luby & Rackoff 1988) over the
    smallest even number of bits that can represent range(size), with cycle walking (Black & Rogaway
    2002): images outside the range are permuted again. This takes at most 4 evaluations per index
    on average.
    """
    # An even number of bits, as both halves of a balanced network have the same width.
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    digest = hashlib.blake2b(key, digest_size=8 * ROUNDS).digest()
    keys = np.frombuffer(digest, dtype="<u8")
    image = _feistel(index, half, mask, keys)
    outside = np.flatnonzero(image >= size)
    # The range is at least a quarter of the domain, so few indices need another walk.
    while outside.size:
        image[outside] = _feistel(image[outside], half, mask, keys)
        outside = outside[image[outside] >= size]
    return image


def _feistel(
    x: SampleNumbers, half: np.uint64, mask: np.uint64, keys: SampleNumbers
) -> SampleNumbers:
    left, right = x >> half, x & mask
    for key in keys:
        left, right = right, left ^ (mix(right ^ key) & mask)
    return (left << half) | right


def mix(x: SampleNumbers) -> SampleNumbers:
    """Apply the finalizer of splitmix64 (Steele, Lea & Flood 2014); wraps modulo 2**64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class Order:
    """The infinite shuffled sequence of one source's samples; each occurs once per epoch."""

    def __init__(self, key: str, samples: int) -> None:
        """Shuffle range(samples) with `key`, which consists of the seed and the source."""
        self._key, self._samples = key, samples
        # The last block is kept: consecutive steps lie in the same one.
        self._latest = -1, -1, np.empty(0, dtype=np.uint64)

    def order(self, first: int, count: int) -> SampleNumbers:
        """Return the samples at positions first … first + count - 1, counted across epochs."""
        parts = [np.empty(0, dtype=np.uint64)]
        while count:
            epoch, place = divmod(first, self._samples)
            block, offset = divmod(place, BLOCK)
            of_epoch, of_block, samples = self._latest
            if (of_epoch, of_block) != (epoch, block):
                stop = min((block + 1) * BLOCK, self._samples)
                index = np.arange(block * BLOCK, stop, dtype=np.uint64)
                # The epoch is in the key, so each epoch has its own order without any state.
                samples = permutation(index, self._samples, f"{self._key}/{epoch}".encode())
                self._latest = epoch, block, samples
            part = samples[offset : offset + count]
            parts.append(part)
            first, count = first + len(part), count - len(part)
        return np.concatenate(parts)


def extend_data_hash(before: bytes, samples: SampleNumbers) -> bytes:
    """Return the sample hash chain after one more step, in which `samples` were trained on.

    `before` is the hash before the step. The chain identifies all samples of a run and their order.
    """
    # Little-endian on every machine: the chain is compared across machines.
    content = before + samples.astype("<u8").tobytes()
    return hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest()


EMPTY_DATA_HASH = bytes(DIGEST_BYTES)
