"""Published files of OpenSoraT2V in and out, and the inpaint model: its start from text to video, and its condition."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from frameloom.core.errors import CheckpointError, DataError
from frameloom.core.random import stream
from frameloom.models.denoisers.base import build_fresh
from frameloom.models.denoisers.opensora_plan.conditioning import fold_frames, pack_known, shrink_mask
from frameloom.models.denoisers.opensora_plan.config import SIZES, OpenSoraPlanConfig
from frameloom.models.denoisers.opensora_plan.model import OpenSoraT2V
from frameloom.models.denoisers.opensora_plan.weights import export_config, export_original, load_original, read_config
from frameloom.models.state_dict import strip_wrappers
from frameloom.models.text.base import TextStates

GOLDENS = Path(__file__).parents[2] / "goldens" / "open-sora-plan"
SMALL = OpenSoraPlanConfig(
    in_channels=4, context_in_dim=20, num_layers=3, num_attention_heads=2, attention_head_dim=12, sparse1d=True
)

build = partial(build_fresh, OpenSoraT2V)
INPAINT = replace(SMALL, inpaint=True)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=stream(seed, "test tensor", *shape))


def build_awake(config: OpenSoraPlanConfig, seed: int = 0) -> OpenSoraT2V:
    model = build(config, stream(seed, "test weights"))
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            parameter.add_(0.1 * draw(*parameter.shape, seed=1000 * seed + index))
    return model


def predict(model: OpenSoraT2V, beside: Tensor | None = None) -> Tensor:
    conditions = {"text": draw(2, 5, 20), "text_mask": torch.ones(2, 5)}
    conditions |= {} if beside is None else {"cond_latents": beside}
    with torch.no_grad():
        return model(draw(2, 4, 2, 4, 6), torch.tensor([0.007, 0.9]), conditions)


@pytest.mark.parametrize("config", [SMALL, INPAINT], ids=["text to video", "inpaint"])
def test_export_and_load_through_a_file_is_exact(config: OpenSoraPlanConfig, tmp_path: Path) -> None:
    model, other = build_awake(config), build_awake(config, seed=1)
    assert not torch.equal(predict(model), predict(other))
    save_file(export_original(model), tmp_path / "diffusion_pytorch_model.safetensors")
    load_original(other, load_file(tmp_path / "diffusion_pytorch_model.safetensors"))
    assert all(torch.equal(tensor, other.state_dict()[key]) for key, tensor in model.state_dict().items())
    assert torch.equal(predict(model), predict(other))


@pytest.mark.parametrize("prefix", ["module.", "_backbone.", "module._backbone."])
def test_prefixes_of_trainers_are_taken_off(prefix: str) -> None:
    model, other = build_awake(SMALL), build_awake(SMALL, seed=1)
    load_original(other, {prefix + key: tensor for key, tensor in model.state_dict().items()})
    assert torch.equal(predict(model), predict(other))
    assert strip_wrappers({"module.a": torch.ones(1), "b": torch.ones(1)}).keys() == {"module.a", "b"}


def test_a_model_without_storage_takes_the_tensors_as_they_are() -> None:
    source = build_awake(SMALL)
    with torch.device("meta"):
        model = build(SMALL)
    load_original(model, source.state_dict())
    assert torch.equal(predict(model), predict(source))


def test_what_does_not_fit_is_listed() -> None:
    tensors = dict(build(SMALL).state_dict())
    del tensors["transformer_blocks.1.attn2.to_q.bias"]
    tensors["motion_projection.weight"] = torch.ones(1)
    tensors["proj_out.bias"] = torch.ones(32)
    with pytest.raises(CheckpointError) as caught:
        load_original(build(SMALL), tensors)
    for part in ("1 missing (transformer_blocks.1.attn2.to_q.bias)", "1 unexpected (motion_projection.weight)"):
        assert part in str(caught.value)
    assert "proj_out.bias is 32, the model has 16" in str(caught.value)


def test_an_inpaint_checkpoint_is_no_text_to_video_model() -> None:
    with pytest.raises(CheckpointError, match="6 unexpected"):
        load_original(build(SMALL), build(INPAINT).state_dict())


class TestStartFromTextToVideo:
    def load(self, seed: int = 1) -> tuple[OpenSoraT2V, OpenSoraT2V]:
        source, model = build_awake(SMALL), build(INPAINT, stream(seed, "test weights"))
        load_original(model, source.state_dict())
        return source, model

    def test_prediction_is_that_of_the_text_to_video_model(self) -> None:
        source, model = self.load()
        beside = draw(2, 8, 2, 4, 6)
        assert torch.equal(predict(model, beside), predict(source))
        with torch.no_grad():
            model.pos_embed_mask[1].weight.add_(0.1)
        assert not torch.allclose(predict(model, beside), predict(source), atol=1e-3)

    def test_embedding_of_the_masked_latent_starts_as_a_copy(self) -> None:
        source, model = self.load()
        for name in ("weight", "bias"):
            copied = getattr(model.pos_embed_masked_hidden_states[0].proj, name)
            assert torch.equal(copied, getattr(source.pos_embed.proj, name))
            assert copied.data_ptr() != getattr(model.pos_embed.proj, name).data_ptr()

    def test_embedding_of_the_mask_stays_fresh(self) -> None:
        fresh = build(INPAINT, stream(1, "test weights")).pos_embed_mask[0].proj.weight
        assert torch.equal(self.load(seed=1)[1].pos_embed_mask[0].proj.weight, fresh)
        assert not torch.equal(self.load(seed=2)[1].pos_embed_mask[0].proj.weight, fresh)

    def test_trained_embeddings_are_kept(self) -> None:
        """The published loader overwrites that of the masked latent; here a trained one wins."""
        trained, model = build_awake(INPAINT), build(INPAINT)
        load_original(model, trained.state_dict())
        weight = model.pos_embed_masked_hidden_states[0].proj.weight
        assert torch.equal(weight, trained.pos_embed_masked_hidden_states[0].proj.weight)
        assert not torch.equal(weight, trained.pos_embed.proj.weight)

    def test_a_model_without_storage_starts_too(self) -> None:
        source = build_awake(SMALL)
        with torch.device("meta"):
            model = build(INPAINT)
        load_original(model, source.state_dict())
        assert torch.equal(predict(model, draw(2, 8, 2, 4, 6)), predict(source))
        assert 0 < float(model.pos_embed_mask[0].proj.weight.detach().abs().max()) <= 16**-0.5

    def test_a_file_of_another_model_is_refused(self) -> None:
        with pytest.raises(CheckpointError, match=r"pos_embed\.proj\.weight.*is missing"):
            load_original(build(INPAINT), {"img_in.weight": torch.ones(1)})


class TestPublishedConfig:
    @pytest.mark.parametrize("size", SIZES)
    def test_reading_undoes_writing(self, size: str) -> None:
        written = json.loads(json.dumps(export_config(SIZES[size])))
        assert read_config(written) == SIZES[size]
        assert written["_class_name"] == ("OpenSoraInpaint_v1_3" if "inpaint" in size else "OpenSoraT2V_v1_3")

    def test_sizes_of_the_training_data_are_ignored(self) -> None:
        manifest = json.loads((GOLDENS / "state_dict_manifest.json").read_text())
        assert read_config(manifest["OpenSoraT2V_v1_3-2B/122"]["config"]) == SIZES["2b"]

    def test_without_skiparse_the_published_code_needs_one_sub_sequence(self) -> None:
        assert export_config(replace(SMALL, sparse1d=False))["sparse_n"] == 1

    @pytest.mark.parametrize("change", [{"dropout": 0.1}, {"norm_eps": 1e-3}, {"attention_bias": False}])
    def test_values_that_the_published_code_computes_with_are_read_and_written(self, change: dict[str, Any]) -> None:
        config = read_config(export_config(SMALL) | change)
        assert config == replace(SMALL, **change)
        assert read_config(export_config(config)) == config
        keys = {key for key in build(SMALL).state_dict() if key.endswith(("to_q.bias", "to_k.bias", "to_v.bias"))}
        missing = build(SMALL).state_dict().keys() - build(config).state_dict().keys()
        assert missing == (set() if config.attention_bias else keys) and keys

    def test_a_setting_that_the_published_attention_does_not_read_changes_nothing(self) -> None:
        assert read_config(export_config(SMALL) | {"upcast_attention": True}) == SMALL

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"activation_fn": "geglu"}, "activation_fn is 'geglu'"),
            ({"patch_size_t": 2}, "patch_size_t is 2"),
            ({"out_channels": 8}, "out_channels is 8"),
            ({"caption_channels": None}, "caption_channels missing"),
        ],
    )
    def test_settings_of_another_model_are_refused(self, change: dict[str, Any], message: str) -> None:
        with pytest.raises(CheckpointError, match=message):
            read_config(export_config(SMALL) | change)


class TestKnownFrames:
    """The condition of image-to-video: masked latent, then four mask channels."""

    def encode(self, pixels: Tensor) -> Tensor:
        """Stands for a causal autoencoder of strides (4, 8, 8): means of frames 0, 1-4, 5-8 ... and of 8x8 pixels."""
        first = pixels[:, :, :1].expand(-1, -1, 3, -1, -1)
        means = torch.nn.functional.avg_pool3d(torch.cat([first, pixels], dim=2), (4, 8, 8))
        return torch.cat([means, means[:, :1]], dim=1)

    def pack(self, known_F: list[int], size: int = 16) -> tuple[Tensor, Tensor]:
        frames = len(known_F)
        clip = draw(1, 3, frames, size, size).clamp(-1, 1)
        known = torch.tensor(known_F).view(1, 1, frames, 1, 1).expand(1, 1, frames, size, size)
        return clip, pack_known(INPAINT, clip, known, self.encode)

    def test_mask_channels_are_the_frames_of_a_latent_frame(self) -> None:
        _, beside = self.pack([1, 0, 0, 1, 0, 0, 0, 0, 1])
        assert beside.shape == (1, 8, 3, 2, 2)
        # 1 is "to be made"; the first frame fills its latent frame.
        assert beside[0, 4:, :, 0, 0].T.tolist() == [[0, 0, 0, 0], [1, 1, 0, 1], [1, 1, 1, 0]]

    def test_hidden_frames_are_black_and_given_ones_are_not(self) -> None:
        clip, beside = self.pack([1, 0, 0, 0, 0])
        black = torch.cat([clip[:, :, :1], torch.full_like(clip[:, :, 1:], -1)], dim=2)
        assert torch.equal(beside[:, :4], self.encode(black))
        assert not torch.equal(beside[:, :4], self.encode(clip))

    def test_an_image_has_one_latent_frame(self) -> None:
        assert self.pack([1])[1][0, 4:].tolist() == torch.zeros(4, 1, 2, 2).tolist()
        assert self.pack([0])[1][0, 4:].tolist() == torch.ones(4, 1, 2, 2).tolist()

    def test_masks_of_regions_are_shrunk_bilinearly(self) -> None:
        mask = torch.zeros(1, 1, 1, 16, 16)
        mask[..., :4] = 1
        # The published resize looks at two pixels in the middle of a cell, not at their mean: columns 3 and 4.
        assert shrink_mask(mask, (2, 2))[0, 0, 0].tolist() == [[0.5, 0.0], [0.5, 0.0]]

    def test_frames_that_do_not_fold_name_the_rule(self) -> None:
        with pytest.raises(DataError, match=r"7 frames.*4n\+1 frames"):
            fold_frames(torch.ones(1, 1, 7, 2, 2), 4)

    def test_another_autoencoder_is_named(self) -> None:
        clip = draw(1, 3, 9, 16, 16)
        with pytest.raises(DataError, match="9 pixel frames became 9 latent frames"):
            pack_known(INPAINT, clip, torch.ones(1, 1, 9, 16, 16), lambda pixels: pixels[..., ::8, ::8])

    def test_the_family_takes_what_it_packs(self) -> None:
        model = build_awake(INPAINT)
        assert INPAINT.condition == "inpaint" and SMALL.condition == "none"
        _, given = self.pack([1, 0, 0, 0, 0])
        _, nothing = self.pack([0, 0, 0, 0, 0])
        noisy, text = draw(1, 4, 2, 2, 2), TextStates(draw(1, 5, 20), torch.ones(1, 5), draw(1, 3))
        predictions = [
            model(noisy, torch.tensor([0.5]), {**text.conditions(), **{"cond_latents": beside}}).detach()
            for beside in (given, nothing, None)
        ]
        assert (predictions[0] - predictions[1]).abs().max() > 1e-3
        assert predictions[2].shape == noisy.shape

    def test_without_a_condition_everything_is_to_be_made(self) -> None:
        model = build_awake(INPAINT)
        beside = torch.cat([torch.zeros(2, 4, 2, 4, 6), torch.ones(2, 4, 2, 4, 6)], dim=1)
        assert torch.equal(predict(model), predict(model, beside))
        assert not torch.equal(predict(model), predict(model, torch.zeros_like(beside)))
