"""T5 text encoders: T5 v1.1 and mT5, token states without a pooled vector.

Open-Sora 2 (512 tokens) and CogVideoX (226) let T5 v1.1 XXL and their denoisers attend to the padding; Open-Sora-Plan
hides it from both (T5 v1.1 XXL, 300 tokens; mT5 XXL, 512). So `t5` attends and `mt5` masks unless a recipe says
otherwise. The empty caption is an end token and padding.

Shape letters: B batch, K text tokens, D width.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from frameloom.core.errors import ConfigError
from frameloom.models.text.base import TextOptions, choose_options
from frameloom.models.text.config import MT5, T5
from frameloom.models.text.pretrained import PretrainedEncoder
from frameloom.models.text.transformers_folder import find_folder, quiet_transformers

DEFAULTS = {
    "t5": TextOptions(padding="attend", precision="bf16"),
    "mt5": TextOptions(padding="mask", keep_chinese=True, precision="bf16"),
}
MAX_LENGTH = {spec.name: spec.max_length for spec in (T5, MT5)}
SUBFOLDERS = ("text_encoder", "text_encoder_2", "text_encoder_3")


class T5Encoder(PretrainedEncoder):
    batch_size = 16
    load_advice = "the folder must hold at least the encoder half of a T5"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.width, self.pooled_width = int(self._config.d_model), 0

    @property
    def model_class(self) -> Any:
        from transformers import MT5EncoderModel, T5EncoderModel

        return MT5EncoderModel if self.name == "mt5" else T5EncoderModel

    def sizes(self) -> dict[str, int]:
        """What processes that split its layers must divide."""
        return {"num_heads": int(self._config.num_heads), "feed_forward": int(self._config.d_ff)}

    def run(self, model: nn.Module, ids_BK: Tensor, mask_BK: Tensor | None) -> tuple[Tensor, Tensor]:
        tokens_BKD = model(input_ids=ids_BK, attention_mask=mask_BK).last_hidden_state
        return tokens_BKD, tokens_BKD.new_zeros(len(ids_BK), 0)


def build(name: str, max_length: int, path: Path | None, given: Mapping[str, Any]) -> T5Encoder:
    options = choose_options(DEFAULTS[name], given, encoder=name)
    if options.pooled != "none" or options.layer != "last":
        raise ConfigError(f"text encoder {name}: has last token states only; leave out layer and pooled")
    if not 2 <= max_length <= MAX_LENGTH[name]:
        raise ConfigError(f"text encoder {name}: max_length is {max_length}; choose 2 to {MAX_LENGTH[name]} tokens")
    folder = find_folder(path, encoder=name, kinds={name}, subfolders=SUBFOLDERS)
    with quiet_transformers():
        from transformers import MT5Config, T5Config

        config = (MT5Config if name == "mt5" else T5Config).from_pretrained(folder.weights, local_files_only=True)
    return T5Encoder(name, folder, config, options, max_length)
