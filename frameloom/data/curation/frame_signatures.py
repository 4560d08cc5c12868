"""Perceptual hashes of frames, and a search for clips that look alike.

A frame becomes 64 bits (the signs of its lowest frequencies around their median) and a 4 x 4 grid of mean colours; both
survive re-encoding and scaling. Two clips are alike when few bits differ over all their frames and the colours agree:
bits alone see no difference between a red and a blue ball.

Shape letters: N clips, K frames of a clip (3 for a video, 1 for an image), H height, W width, C colours, X bytes.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

SIDE_PX = 32
_LOW = 8
_GRID = 4
COLOUR_BYTES = _GRID * _GRID * 3
_BAND_BITS = 16
_BANDS = 64 // _BAND_BITS
_MAX_COLOUR_MEAN = 6.0
_MAX_COLOUR_CELL = 28
# A flat frame has no frequencies to speak of: below this, noise of the codec would decide the bits.
_FLAT = 4.0
# Clips in one band bucket (black frames, a channel's logo): compared with so many neighbours instead of all others.
_MAX_BUCKET = 256
_WINDOW = 32


# The first rows of the orthonormal DCT-II.
_ROWS, _COLUMNS = np.arange(_LOW)[:, None], np.arange(SIDE_PX)[None]
_WAVES = np.cos(np.pi * (2 * _COLUMNS + 1) * _ROWS / (2 * SIDE_PX)) * np.sqrt(2 / SIDE_PX)
_WAVES[0] /= np.sqrt(2)


def sign_frames(frames_KHWC: NDArray[np.uint8]) -> tuple[NDArray[np.uint64], bytes]:
    """How a clip looks: 64 bits and `COLOUR_BYTES` for each of its frames, which must be `SIDE_PX` squares."""
    cell = SIDE_PX // _GRID
    cells = frames_KHWC.reshape(-1, _GRID, cell, _GRID, cell, 3).mean(axis=(2, 4))
    hashes_K = np.array([hash_frame(frame_HWC) for frame_HWC in frames_KHWC], dtype=np.uint64)
    return hashes_K, cells.round().astype(np.uint8).tobytes()


def hash_frame(frame_HWC: NDArray[np.uint8]) -> int:
    """64 bits, one per low frequency: is it above the median? The constant part is left out of the median."""
    gray_HW = frame_HWC.astype(np.float64) @ np.array([0.299, 0.587, 0.114])
    waves = (_WAVES @ gray_HW @ _WAVES.T).ravel()
    waves[0] = 0.0
    bits = waves > max(float(np.median(waves[1:])), _FLAT)
    return int.from_bytes(np.packbits(bits).tobytes(), "big")


def find_duplicates(hashes_NK: NDArray[np.uint64], colours_NX: NDArray[np.uint8]) -> list[tuple[int, int, int]]:
    """(clip, the earlier one it looks like, bits that differ) of every duplicate; put the clips to prefer first.

    Clips that share no band of 16 bits are never compared, so the cost grows with the number of clips, not with its
    square; except in crowded buckets, alike clips always share one.
    """
    rows_NX = np.concatenate([np.ascontiguousarray(hashes_NK).view(np.uint8), colours_NX], axis=1)
    _, firsts, inverse = np.unique(rows_NX, axis=0, return_index=True, return_inverse=True)
    first_N = firsts[inverse.ravel()]  # for each clip the first one that is equal to it
    is_equal_N = first_N != np.arange(len(first_N))
    found = {clip: (clip, int(first_N[clip]), 0) for clip in np.flatnonzero(is_equal_N).tolist()}
    different = np.flatnonzero(~is_equal_N)
    for later, earlier, num_bits in _alike_pairs(hashes_NK[different], colours_NX[different]):
        clip, like = int(different[later]), int(different[earlier])
        if clip not in found and like not in found:
            found[clip] = (clip, like, num_bits)
    for clip, (_, like, _) in found.items():
        # A clip equal to one that turned out to be a copy is a copy of what that one is a copy of.
        if (other := found.get(like)) is not None:
            found[clip] = (clip, *other[1:])
    return [found[clip] for clip in sorted(found)]


def _alike_pairs(hashes_NK: NDArray[np.uint64], colours_NX: NDArray[np.uint8]) -> list[tuple[int, int, int]]:
    """(later clip, earlier clip, bits that differ) of every pair that is alike, by clip and then by nearness."""
    # One bit fewer than there are bands: then two alike clips must agree in a whole band, so the search misses none.
    limit = _BANDS * hashes_NK.shape[1] - 1
    found: set[tuple[int, int, int]] = set()
    for first, second in _candidate_pairs(hashes_NK):
        num_bits = np.bitwise_count(hashes_NK[first] ^ hashes_NK[second]).sum(axis=1, dtype=np.int64)
        near = np.flatnonzero(num_bits <= limit)
        gaps = np.abs(colours_NX[first[near]].astype(np.int16) - colours_NX[second[near]].astype(np.int16))
        near = near[(gaps.mean(axis=1) <= _MAX_COLOUR_MEAN) & (gaps.max(axis=1) <= _MAX_COLOUR_CELL)]
        later, earlier = np.maximum(first, second)[near], np.minimum(first, second)[near]
        found.update(zip(later.tolist(), earlier.tolist(), num_bits[near].tolist(), strict=True))
    return sorted(found, key=lambda pair: (pair[0], pair[2], pair[1]))


def _candidate_pairs(hashes_NK: NDArray[np.uint64]) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Pairs that agree in a band, many at once; a pair may come several times."""
    for frame in range(hashes_NK.shape[1]):
        for band in range(_BANDS):
            values = (hashes_NK[:, frame] >> np.uint64(band * _BAND_BITS)) & np.uint64(2**_BAND_BITS - 1)
            # Ties are broken by the whole hash, so that in a crowded bucket the nearest stand side by side.
            order = np.lexsort((hashes_NK[:, frame], values))
            yield from _pairs_within(order, values[order])


def _pairs_within(
    order: NDArray[np.int64], values: NDArray[np.uint64]
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Clips of equal value, at every distance in the order; in a crowded bucket only at small ones."""
    _, inverse, sizes = np.unique(values, return_inverse=True, return_counts=True)
    reach = np.where(sizes <= _MAX_BUCKET, sizes, _WINDOW)[inverse]
    starts = np.arange(len(order), dtype=np.int64)
    for distance in range(1, len(order)):
        starts = starts[(starts + distance < len(order)) & (reach[starts] >= distance)]
        starts = starts[values[starts] == values[np.minimum(starts + distance, len(order) - 1)]]
        if not len(starts):
            return
        yield order[starts], order[starts + distance]
