"""One of two processes that make clips together; see `test_sequence_sampling`."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from frameloom.config.schema.sampling import SampleSection
from frameloom.core.errors import ConfigError
from frameloom.distributed.ranks import read_ranks
from frameloom.sampling.batch import divide_clips, join_ranks
from frameloom.sampling.block_cache import CacheCount
from frameloom.sampling.conditions import read_given
from frameloom.sampling.jobs import Order, fill_order
from frameloom.sampling.load import load_model
from frameloom.sampling.pipeline import Sampler, draw_noise, encode_prompts, prepare_batch, solve
from frameloom.sampling.request import Request, Row

PROMPT, SEED = "a red circle moves left", 5
THRESHOLD = 0.3
ROWS = (Row("a red circle", seed=1), Row("a blue square", seed=2), Row("a green star", seed=3))


def make_latent(sampler: Sampler, request: Request, count: CacheCount | None = None) -> Tensor:
    """What a request is decoded from."""
    settings = request.settings or sampler.settings
    given = [read_given(request, settings, stride=sampler.vae.strides[0], causal=sampler.vae.causal)]
    text, noise = encode_prompts(sampler, [request.prompt], settings), draw_noise(sampler, [request], settings)
    prepared = prepare_batch(sampler, [request], given, settings)
    return solve(sampler, text, noise, prepared, [request.seed], settings, count=count)


def make_latents(sampler: Sampler, picture: Path) -> dict[str, Tensor]:
    """Of a prompt, of a prompt with a given first frame where the model takes one, and with blocks skipped."""
    request = sampler.request(PROMPT, SEED)
    found = {"text": make_latent(sampler, request)}
    if sampler.denoiser.family.beside(sampler.denoiser.config) != "none":
        found["image"] = make_latent(sampler, replace(request, image=picture))
    count = CacheCount()
    chosen = SampleSection.model_validate({**sampler.settings.model_dump(), "cache_threshold": THRESHOLD, "steps": 6})
    found["skipping"] = make_latent(replace(sampler, settings=chosen), request, count)
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
        found = {"text": make_latent(split, sampler.request(PROMPT, SEED))}
        found["held"] = torch.tensor(sum(weight.numel() for weight in model.parameters()))
        save_file(found, out / f"t5-{rank}.safetensors")
        try:
            divide_clips(load_model(Path(job["sdxl"])), group.sequence)
        except ConfigError as error:
            (out / f"refused-{rank}").write_text(str(error))
    os.environ["MASTER_PORT"] = str(job["ports"][1])
    source = Source(Path(job["folders"]["latte"]), ("--sample.steps", "2", "--sample.frames", "5"))
    paths = fill_order(Order(source, ROWS, out / "together", sequence=2), tell=print)
    (out / f"paths-{rank}").write_text(json.dumps([str(path) for path in paths]))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2]))
