"""Seeded permutations that never change with a library's version: a resumed run must find the order it
left."""

import numpy as np
import numpy.typing as npt

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def splitmix64(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The output function of SplitMix64 (Steele, Lea, Flood 2014): a bijection of 64-bit integers."""
    with np.errstate(over="ignore"):
        mixed = values + _GOLDEN
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return mixed ^ (mixed >> np.uint64(31))


def random_bits(count: int, *salt: int) -> npt.NDArray[np.uint64]:
    """`count` 64-bit numbers, a function of the salt alone."""
    state = np.zeros(1, np.uint64)
    for part in salt:
        state = splitmix64(state ^ np.uint64(part & 0xFFFFFFFFFFFFFFFF))
    return splitmix64(splitmix64(np.arange(count, dtype=np.uint64)) ^ state)


def permutation(count: int, *salt: int) -> npt.NDArray[np.int64]:
    """A permutation of 0..count-1, a function of the salt alone."""
    return np.argsort(random_bits(count, *salt), kind="stable").astype(np.int64)
