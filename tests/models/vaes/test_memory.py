"""Long clips in bounded memory: the peak of a real process, measured in one of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.harness import can_measure_peak

ROOT = Path(__file__).parents[3]
MEASURE = """
import json, sys
import torch
from benchmarks.harness import measure_peak_bytes
from frameloom.models.registry import get_vae
from frameloom.models.vaes.base import EncodePolicy

torch.set_num_threads(1)
name, direction, is_cut = sys.argv[1], sys.argv[2], sys.argv[3] == "pieces"
family = get_vae(name)
vae = family.build(family.sizes["tiny"]).eval().requires_grad_(False)
if is_cut:
    vae.use(EncodePolicy(chunk_frames=8))
peaks = []
for frames in (17, 65, 257):
    if direction == "encode":
        clip = torch.zeros(1, 3, frames, 48, 48)
        peaks.append(measure_peak_bytes(lambda: vae.encode(clip)))
    else:
        latent = torch.zeros(1, vae.latent_channels, vae.latent_frames(frames), 6, 6)
        peaks.append(measure_peak_bytes(lambda: vae.decode(latent)) - frames * 3 * 48 * 48 * 4)
print(json.dumps(peaks))
"""


def measure(name: str, direction: str, way: str) -> list[int]:
    command = [sys.executable, "-W", "error", "-c", MEASURE, name, direction, way]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.skipif(not can_measure_peak(), reason="this system does not tell the peak of a process")
def test_the_peak_of_encoding_does_not_grow_with_the_clip() -> None:
    pieces, whole = measure("wfvae", "encode", "pieces"), measure("wfvae", "encode", "whole")
    assert max(pieces) < 1.5 * pieces[0]
    assert whole[2] > 3 * whole[0] and whole[2] > 3 * pieces[2]


@pytest.mark.slow
@pytest.mark.skipif(not can_measure_peak(), reason="this system does not tell the peak of a process")
def test_the_peak_of_decoding_grows_by_its_result_alone() -> None:
    # The pieces of the result are joined at the end, so it is there twice.
    pieces, whole = measure("wfvae", "decode", "pieces"), measure("wfvae", "decode", "whole")
    assert pieces[2] - pieces[0] < 1.5 * 240 * 3 * 48 * 48 * 4
    assert whole[2] > 2 * pieces[2]
