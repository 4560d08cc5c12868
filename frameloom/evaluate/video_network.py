"""Features of whole clips for FVD, of a video network that the person has as a local folder of transformers.

Nothing is downloaded, no pickle is opened, no foreign code is run.
Shape letters: C channels, F frames, H height, W width, K tokens, D width of a feature.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from frameloom.core.errors import CheckpointError, DataError
from frameloom.evaluate.frame_network import load_network

# Networks of transformers that take a clip as [B, F, C, H, W] and say how many frames they take.
_KINDS = ("videomae", "timesformer", "vivit")


class VideoNetwork:
    """A frozen video network with the scaling of frames that its folder asks for."""

    def __init__(self, name: str, model: nn.Module, processor: Any, device: torch.device | str = "cpu") -> None:
        self.name = name
        self._model = model.to(device)
        self._processor = processor
        self._device = torch.device(device)

    @property
    def num_frames(self) -> int:
        model: Any = self._model
        return int(model.config.num_frames)

    @torch.no_grad()
    def encode_clip(self, pixels_CFHW: Tensor) -> Tensor:
        """A float32 vector [D] of uint8 pixels: the mean over the tokens of frames taken at even distances."""
        num_given = pixels_CFHW.shape[1]
        if num_given < 2:
            raise DataError("a picture has no place in FVD; leave it out, or ask for --metrics without a video network")
        chosen = np.linspace(0, num_given - 1, self.num_frames).round().astype(int)
        frames_FHWC = pixels_CFHW[:, chosen].permute(1, 2, 3, 0).cpu().contiguous().numpy()
        values = self._processor(list(frames_FHWC), return_tensors="pt", input_data_format="channels_last")
        values_BFCHW = values["pixel_values"].reshape(1, self.num_frames, *values["pixel_values"].shape[-3:])
        states_BKD: Tensor = self._model(pixel_values=values_BFCHW.to(self._device)).last_hidden_state
        return states_BKD.mean(1)[0].float().cpu()


def load_video_network(folder: Path, device: torch.device | str = "cpu") -> VideoNetwork:
    """VideoMAE, TimeSformer or ViViT."""
    model, processor = load_network(folder, "video")
    if model.config.model_type not in _KINDS:
        raise CheckpointError(
            f"{folder}: holds '{model.config.model_type}', which does not take clips; name the folder of one of "
            f"{', '.join(_KINDS)}"
        )
    return VideoNetwork(folder.name, model, processor, device)
