"""Features of frames, texts and clips from pretrained networks in local transformers folders.

Nothing is downloaded, no pickle is opened, no remote code is run.
Shape letters: B batch, C channels, F frames, H height, W width, K tokens, N pictures or texts, D width of a feature.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from frameloom.core.errors import CheckpointError, DataError
from frameloom.models.text.transformers_folder import (
    CONFIG,
    EncoderFolder,
    find_folder,
    load_model,
    load_tokenizer,
    quiet_transformers,
)

PREPROCESSOR = "preprocessor_config.json"
_BATCH_FRAMES = 16
# Networks of transformers that take a clip as [B, F, C, H, W] and say how many frames they take.
_KINDS = ("videomae", "timesformer", "vivit")


class _Network:
    """A frozen network with the preprocessing of its folder."""

    def __init__(self, name: str, model: nn.Module, processor: Any, device: torch.device | str = "cpu") -> None:
        self.name = name
        self._model: Any = model.to(device)
        self._processor = processor
        self._device = torch.device(device)


class FrameNetwork(_Network):
    """A frozen vision network."""

    @torch.no_grad()
    def encode_frames(self, pixels_CFHW: Tensor) -> Tensor:
        """A float32 vector of each uint8 frame: the image half's projection, the pooled state, or the class token."""
        frames_FHWC = pixels_CFHW.permute(1, 2, 3, 0).cpu().contiguous().numpy()
        parts = []
        for start in range(0, len(frames_FHWC), _BATCH_FRAMES):
            batch = list(frames_FHWC[start : start + _BATCH_FRAMES])
            values_NCHW = self._processor(batch, return_tensors="pt", input_data_format="channels_last")["pixel_values"]
            parts.append(self._run(values_NCHW.to(self._device)).float().cpu())
        return torch.cat(parts)

    def _run(self, values_NCHW: Tensor) -> Tensor:
        if hasattr(self._model, "get_image_features"):
            return _take_pooled(self._model.get_image_features(pixel_values=values_NCHW))
        output = self._model(pixel_values=values_NCHW)
        if getattr(output, "pooler_output", None) is not None:
            return _take_pooled(output)
        states: Tensor = output.last_hidden_state
        return states[:, 0] if states.ndim == 3 else states.flatten(2).mean(2)


class TextFrameNetwork(FrameNetwork):
    """CLIP: texts and frames in one space."""

    def __init__(self, name: str, model: Any, processor: Any, tokenizer: Any, device: torch.device | str) -> None:
        super().__init__(name, model, processor, device)
        self._tokenizer = tokenizer
        self._max_tokens = int(model.config.text_config.max_position_embeddings)

    @torch.no_grad()
    def encode_text(self, text: str) -> Tensor:
        """One float32 vector [D]; what does not fit into the position table is left out."""
        ids = self._tokenizer([text], truncation=True, max_length=self._max_tokens, return_tensors="pt")
        found_ND = _take_pooled(self._model.get_text_features(**ids.to(self._device)))
        return found_ND[0].float().cpu()


def _take_pooled(output: Any) -> Tensor:
    pooled: Tensor = output if isinstance(output, Tensor) else output.pooler_output
    return pooled.flatten(1)


class VideoNetwork(_Network):
    """A frozen video network."""

    @torch.no_grad()
    def encode_clip(self, pixels_CFHW: Tensor) -> Tensor:
        """A float32 vector [D] of uint8 pixels: the mean over the tokens of frames taken at even distances."""
        num_given = pixels_CFHW.shape[1]
        if num_given < 2:
            raise DataError("a picture has no place in FVD; leave it out, or ask for --metrics without a video network")
        num_frames = int(self._model.config.num_frames)
        chosen = np.linspace(0, num_given - 1, num_frames).round().astype(int)
        frames_FHWC = pixels_CFHW[:, chosen].permute(1, 2, 3, 0).cpu().contiguous().numpy()
        values = self._processor(list(frames_FHWC), return_tensors="pt", input_data_format="channels_last")
        values_BFCHW = values["pixel_values"].reshape(1, num_frames, *values["pixel_values"].shape[-3:])
        states_BKD: Tensor = self._model(pixel_values=values_BFCHW.to(self._device)).last_hidden_state
        return states_BKD.mean(1)[0].float().cpu()


def load_frame_network(folder: Path, device: torch.device | str = "cpu") -> FrameNetwork:
    """Any vision model that transformers knows: DINOv2, ViT, CLIP, ConvNeXt and so on."""
    model, processor = load_network(folder, "vision")
    return FrameNetwork(folder.name, model, processor, device)


def load_clip(folder: Path, device: torch.device | str = "cpu") -> TextFrameNetwork:
    """Both halves of a CLIP."""
    found = find_folder(folder, encoder="clip", kinds={"clip"}, subfolders=("clip",))
    with quiet_transformers():
        from transformers import CLIPModel
    model = load_model(CLIPModel, found, torch.float32, advice="both halves of CLIP are needed; copy the folder again")
    processor, tokenizer = _load_processor(found.weights), load_tokenizer(found.tokenizer)
    return TextFrameNetwork(folder.name, model, processor, tokenizer, device)


def load_video_network(folder: Path, device: torch.device | str = "cpu") -> VideoNetwork:
    """VideoMAE, TimeSformer or ViViT."""
    model, processor = load_network(folder, "video")
    if model.config.model_type not in _KINDS:
        raise CheckpointError(
            f"{folder}: holds '{model.config.model_type}', which does not take clips; name the folder of one of "
            f"{', '.join(_KINDS)}"
        )
    return VideoNetwork(folder.name, model, processor, device)


def load_network(folder: Path, kind: str) -> tuple[Any, Any]:
    """A model and its processor; `kind` (vision or video) goes into error messages."""
    if not (folder / CONFIG).is_file():
        raise CheckpointError(
            f"{folder}: has no {CONFIG}; name the folder of a {kind} network, as transformers saves it"
        )
    model = load_model(_find_class(folder), EncoderFolder(folder, (), None, folder), torch.float32)
    return model, _load_processor(folder)


def _find_class(folder: Path) -> Any:
    with quiet_transformers():
        from transformers import MODEL_MAPPING, AutoConfig

        try:
            config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            kind: Any = MODEL_MAPPING[type(config)]
        except (OSError, ValueError, KeyError) as error:
            reason = str(error).partition("\n")[0]
            raise CheckpointError(
                f"{folder / CONFIG}: no vision network that transformers knows ({reason}); name another folder"
            ) from error
    if config.model_type != "vit":
        return kind
    # Published ViT and DINO folders have no weights for the pooler; the class token is what they were trained for.
    load = partial(kind.from_pretrained, add_pooling_layer=False)
    return SimpleNamespace(from_pretrained=load, __name__=kind.__name__)


def _load_processor(folder: Path) -> Any:
    if not (folder / PREPROCESSOR).is_file():
        raise CheckpointError(f"{folder}: has no {PREPROCESSOR}, which says how pictures are scaled; copy it there")
    with quiet_transformers():
        from transformers import AutoImageProcessor

        try:
            return AutoImageProcessor.from_pretrained(  # type: ignore[no-untyped-call]
                folder, local_files_only=True, trust_remote_code=False, backend="pil"
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            reason = str(error).partition("\n")[0]
            raise CheckpointError(f"{folder / PREPROCESSOR}: cannot be read ({reason}); copy it again") from error
