"""Making a file again from its own metadata, to the bit on the same machine with as many threads."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from frameloom.config.schema.sampling import MODEL_SETTINGS
from frameloom.core.errors import CheckpointError, DataError
from frameloom.core.files import digest_file
from frameloom.distributed.ranks import read_ranks
from frameloom.sampling.batch import divide_clips, join_ranks, sample_many
from frameloom.sampling.load import load_model
from frameloom.sampling.outputs import STORED_MEDIA, read_about, read_request


def reproduce(file: Path, out: Path, *, model: Path | None = None, sequence: int = 1) -> list[Path]:
    """Make a file again; `model` is where its model lies now, if it was moved.

    With another number of processes to a clip than it was made with, it is equal up to the last bits.
    """
    about = read_about(file)
    if "model" not in about and model is None:
        raise DataError(f"{file}: does not say its model; name the run in front: frameloom sample RUN --like {file}")
    request = read_request(about, where=str(file))
    for name, stored in STORED_MEDIA.items():
        path = getattr(request, name)
        if path is not None and (not path.is_file() or digest_file(path) != about.get(f"{stored}.sha256")):
            raise DataError(
                f"{file}: was made with {path} as its {name}, which is not there or has changed; bring it back"
            )
    where = model or Path(about["model"])
    try:
        overrides, step = json.loads(about.get("overrides", "[]")), about.get("step")
        chosen: dict[str, Any] = {"step": None if step is None else int(step)}
    except ValueError as error:
        raise DataError(f"{file}: its metadata cannot be read ({error})") from error
    for name, value in request.model_dump(mode="json", include=set(MODEL_SETTINGS)).items():
        # Words of files of the first version are among their overrides.
        if name != "words" or value:
            overrides += [f"--sample.{name}", value if isinstance(value, str) else json.dumps(value)]
    pipeline = load_model(
        where, overrides=overrides, family=about.get("family"), recipe=about.get("recipe_name"), **chosen
    )
    # Files without a version were made before recipes could be compared between versions.
    compared = ("recipe", "weights") if "version" in about else ("weights",)
    different = [name for name in compared if about.get(name) != pipeline.origin.get(name)]
    if different:
        raise CheckpointError(
            f"{file}: was made with another model: {' and '.join(different)} of {where} are not the same any more; "
            "name the model that it was made with, or sample with its prompt and seed"
        )
    # The words for the model as the file has them, so that the new file is equal as a whole.
    of_request = ("prompt", "seed", "name", *STORED_MEDIA.values())
    words = {name: text for name, text in about.items() if name.partition(".")[0] not in (*of_request, "sample")}
    pipeline = replace(pipeline, origin=words)
    with join_ranks(read_ranks(), sequence=sequence) as group:
        return sample_many(divide_clips(pipeline, group.sequence), [request], out, group, again=True)
