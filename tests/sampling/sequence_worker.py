"""One of two processes that make clips together; see `test_sequence_sampling`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from frameloom.config.schema.sampling import SampleRequest
from frameloom.core.errors import ConfigError
from frameloom.distributed.ranks import read_ranks
from frameloom.sampling.batch import divide_clips, join_ranks, run_job
from frameloom.sampling.block_cache import CacheCount
from frameloom.sampling.conditions import read_given
from frameloom.sampling.load import load_model
from frameloom.sampling.pipeline import Pipeline, draw_noise, encode_given, encode_prompts, solve

PROMPT, SEED = "a red circle moves left", 5
THRESHOLD = 0.3
ROWS = [
    SampleRequest(prompt=prompt, seed=seed)
    for seed, prompt in enumerate(("a red circle", "a blue square", "a green star"), 1)
]
SHORT = ("--sample.steps", "2", "--sample.frames", "5")


def make_latent(pipeline: Pipeline, request: SampleRequest, count: CacheCount | None = None) -> Tensor:
    """What a request is decoded from."""
    given = [read_given(request, pipeline.vae)]
    text, noise = encode_prompts(pipeline, [request]), draw_noise(pipeline, [request])
    return solve(pipeline, [request], text, noise, encode_given(pipeline, [request], given), count=count)


def make_latents(pipeline: Pipeline, picture: Path) -> dict[str, Tensor]:
    """Of a prompt, of a prompt with a given first frame where the model takes one, and with blocks skipped."""
    found = {"text": make_latent(pipeline, pipeline.request(PROMPT, SEED))}
    if pipeline.denoiser.config.condition != "none":
        found["image"] = make_latent(pipeline, pipeline.request(PROMPT, SEED, image=picture))
    count = CacheCount()
    skipping = pipeline.request(PROMPT, SEED, cache_threshold=THRESHOLD, steps=6)
    found["skipping"] = make_latent(pipeline, skipping, count)
    found["skipped"] = torch.tensor([count.calls, count.skipped])
    return found


def main(job: dict[str, Any], rank: int) -> None:
    torch.set_num_threads(1)
    out = Path(job["out"])
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ["MASTER_PORT"] = str(job["ports"][0])
    with join_ranks(read_ranks(), sequence=2) as group:
        for name, folder in job["folders"].items():
            sampler = divide_clips(load_model(Path(folder)), group.sequence)
            save_file(make_latents(sampler, Path(job["picture"])), out / f"{name}-{rank}.safetensors")
        split = divide_clips(load_model(Path(job["t5"]), tuple(job["split"])), group.sequence)
        model = split.text.encoders[0].load()
        assert model is not None
        found = {"text": make_latent(split, split.request(PROMPT, SEED))}
        found["held"] = torch.tensor(sum(weight.numel() for weight in model.parameters()))
        save_file(found, out / f"t5-{rank}.safetensors")
        try:
            divide_clips(load_model(Path(job["sdxl"])), group.sequence)
        except ConfigError as error:
            (out / f"refused-{rank}").write_text(str(error))
    os.environ["MASTER_PORT"] = str(job["ports"][1])
    paths = run_job(lambda: load_model(job["folders"]["latte"], SHORT), ROWS, out / "together", sequence=2)
    (out / f"paths-{rank}").write_text(json.dumps([str(path) for path in paths]))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2]))
