"""Rules for frames that a model is given, and for images beside clips."""

from __future__ import annotations

from collections.abc import Iterator

from frameloom.config.problems import Problem
from frameloom.config.schema import KnownSection, Recipe
from frameloom.config.yaml_values import KeyPath
from frameloom.core.spelling import suggest
from frameloom.diffusion.mask_kinds import MASK_KINDS
from frameloom.models.registry import DENOISERS


def check_known(recipe: Recipe) -> Iterator[Problem]:
    """What can be seen of inpaint training and of images beside clips before a model is built."""
    takes = DENOISERS[recipe.model.family].conditions if recipe.model.family in DENOISERS else ("known", "images")
    also: tuple[KeyPath, ...] = (("model", "family"),)
    if recipe.known is not None:
        if "known" not in takes:
            yield Problem(("known",), f"known is set, but {recipe.model.family} has no inpaint models; remove it", also)
        if recipe.data.cache.latents is not None or recipe.data.cache.foreign in ("sdxl", "open_sora2"):
            text = "known is set, but with a latent cache there are no pixels to take known parts from"
            yield Problem(("data", "cache", "latents"), f"{text}; remove the latent cache", (("known",),))
        share = KnownSection.model_fields["known_share"].default
        if recipe.known.law != "frames" and recipe.known.known_share != share:
            text = f"known.known_share is set, but only law frames draws by it, and known.law is {recipe.known.law}"
            yield Problem(("known", "known_share"), f"{text}; remove it", (("known", "law"),))
        kinds = MASK_KINDS[recipe.known.law]
        for key, allowed in (("shares", kinds[0]), ("image_shares", kinds[1])):
            for name in getattr(recipe.known, key):
                if name not in allowed:
                    text = f"known.{key} has '{name}', which law {recipe.known.law} does not know"
                    path = ("known", key, name)
                    yield Problem(path, f"{text}; {suggest(name, allowed, kind='kinds')}", (("known", "law"),))
    if recipe.data.use_image_num and "images" not in takes:
        text = f"data.use_image_num is {recipe.data.use_image_num}, but {recipe.model.family} takes no images beside"
        yield Problem(("data", "use_image_num"), f"{text} clips; use buckets of 1 frame for images instead", also)
    if recipe.data.use_img_from_vid and not recipe.data.use_image_num:
        text = "data.use_img_from_vid is true, but data.use_image_num is 0, so no images come beside clips"
        yield Problem(
            ("data", "use_img_from_vid"), f"{text}; set their number, or remove it", (("data", "use_image_num"),)
        )
