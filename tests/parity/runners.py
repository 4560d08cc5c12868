"""All runners of golden files; the first that knows a file gets it."""

from __future__ import annotations

from tests.parity.cases import Runner
from tests.parity.cogvideox_fun_data import RUNNERS as COGVIDEOX_FUN_DATA
from tests.parity.cogvideox_fun_masks import RUNNERS as COGVIDEOX_FUN_MASKS
from tests.parity.cogvideox_fun_pixels import RUNNERS as COGVIDEOX_FUN_PIXELS
from tests.parity.cogvideox_fun_sampling import RUNNERS as COGVIDEOX_FUN_SAMPLING
from tests.parity.cogvideox_fun_transformer import RUNNERS as COGVIDEOX_FUN_TRANSFORMER
from tests.parity.cogvideox_fun_vae import RUNNERS as COGVIDEOX_FUN_VAE
from tests.parity.noise_schedules import RUNNERS as NOISE_SCHEDULES
from tests.parity.opensora2_data import RUNNERS as OPENSORA2_DATA
from tests.parity.opensora2_sampling import RUNNERS as OPENSORA2_SAMPLING
from tests.parity.opensora2_training import RUNNERS as OPENSORA2_TRAINING
from tests.parity.opensora2_transformer import RUNNERS as OPENSORA2_TRANSFORMER
from tests.parity.opensora2_vaes import RUNNERS as OPENSORA2_VAES
from tests.parity.opensora_plan_adversarial import RUNNERS as OPENSORA_PLAN_ADVERSARIAL
from tests.parity.opensora_plan_data import RUNNERS as OPENSORA_PLAN_DATA
from tests.parity.opensora_plan_transformers import RUNNERS as OPENSORA_PLAN_TRANSFORMERS
from tests.parity.opensora_plan_vaes import RUNNERS as OPENSORA_PLAN_VAES
from tests.parity.optimization import RUNNERS as OPTIMIZATION
from tests.parity.state_dict_manifest import RUNNERS as STATE_DICT_MANIFEST

RUNNERS: tuple[Runner, ...] = (
    *COGVIDEOX_FUN_DATA,
    *COGVIDEOX_FUN_PIXELS,
    *OPENSORA2_DATA,
    *OPENSORA_PLAN_DATA,
    *OPENSORA_PLAN_VAES,
    *COGVIDEOX_FUN_VAE,
    *OPENSORA2_VAES,
    *COGVIDEOX_FUN_TRANSFORMER,
    *COGVIDEOX_FUN_SAMPLING,
    *OPENSORA2_TRANSFORMER,
    *OPENSORA_PLAN_TRANSFORMERS,
    *NOISE_SCHEDULES,
    *COGVIDEOX_FUN_MASKS,
    *OPTIMIZATION,
    *OPENSORA_PLAN_ADVERSARIAL,
    *STATE_DICT_MANIFEST,
    *OPENSORA2_TRAINING,
    *OPENSORA2_SAMPLING,
)
