"""Metrics of pairs of clips against torchmetrics, closed forms and numbers worked out by hand."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torchmetrics.functional.image import multiscale_structural_similarity_index_measure as reference_ms_ssim
from torchmetrics.functional.image import peak_signal_noise_ratio as reference_psnr
from torchmetrics.functional.image import structural_similarity_index_measure as reference_ssim

from frameloom.core.errors import CheckpointError, ConfigError
from frameloom.core.random import stream
from frameloom.evaluate.pair_metrics import build_measures, load_perceptual, ms_ssim, psnr_db, ssim
from frameloom.models.vaes.lpips import LPIPS

RED_SHIFT, RED_SCALE = -0.030, 0.458


def draw(index: int, frames: int = 11, side: int = 32) -> Tensor:
    return torch.rand(1, 3, frames, side, side, generator=stream(0, "test measures", index)) * 2 - 1


def frame_mean(metric, ours: Tensor, reference: Tensor) -> float:  # type: ignore[no-untyped-def]
    pairs = zip(ours[0].unbind(1), reference[0].unbind(1), strict=True)
    return float(torch.stack([metric(a[None], b[None], data_range=2.0) for a, b in pairs]).double().mean())


def test_every_metric_is_the_mean_over_frames_of_the_published_one() -> None:
    ours, reference = draw(0, frames=19), draw(1, frames=19) * 0.5  # more frames than are compared at once
    found = build_measures(["psnr", "ssim"])(ours, reference)
    assert found["psnr_db"] == pytest.approx(frame_mean(reference_psnr, ours, reference), abs=1e-4)
    assert found["ssim"] == pytest.approx(frame_mean(reference_ssim, ours, reference), abs=1e-5)
    assert found != build_measures(["psnr", "ssim"])(ours, draw(2, frames=19))


def test_ms_ssim_equals_torchmetrics_frame_by_frame() -> None:
    ours = draw(0, frames=2, side=176)
    reference = (ours + 0.3 * draw(1, frames=2, side=176)).clamp(-1, 1)
    found = build_measures(["ms-ssim"])(ours, reference)["ms_ssim"]
    assert found == pytest.approx(frame_mean(reference_ms_ssim, ours, reference), abs=1e-5)
    assert found is not None and 0.1 < found < 0.999
    assert build_measures(["ms-ssim"])(ours, ours)["ms_ssim"] == pytest.approx(1.0, abs=1e-6)


def test_ms_ssim_of_two_constant_clips() -> None:
    # Contrast is equal at all scales; the luminance of the coarsest one has exponent 0.1333.
    a, b, c = 0.5, 0.1, (0.01 * 2) ** 2
    expected = ((2 * a * b + c) / (a**2 + b**2 + c)) ** 0.1333
    shape = (1, 3, 1, 176, 176)
    assert ms_ssim(torch.full(shape, a), torch.full(shape, b)).item() == pytest.approx(expected, abs=1e-4)


def write_lpips(path: Path) -> None:
    """Weights that look at red alone: features (red, 1) after both convolutions of the first slice."""
    model = LPIPS()
    tensors = {key: torch.zeros_like(value) for key, value in model.state_dict().items() if "scaling" not in key}
    tensors["net.slice1.0.weight"][0, 0, 1, 1] = 1
    tensors["net.slice1.0.bias"][1] = 1
    for channel in (0, 1):
        tensors["net.slice1.2.weight"][channel, channel, 1, 1] = 1
    tensors["lin0.model.1.weight"][0, 0] = 1
    save_file(tensors, path)


def test_lpips_has_its_closed_form(tmp_path: Path) -> None:
    write_lpips(tmp_path / "lpips.safetensors")
    measures = build_measures(None, lpips=tmp_path / "lpips.safetensors")
    assert measures.columns == ["psnr_db", "ssim", "ms_ssim", "lpips"]
    ours, reference = torch.zeros(1, 3, 2, 16, 16), torch.zeros(1, 3, 2, 16, 16)
    ours[:, 0, 0], reference[:, 0, 0] = 0.4, 0.9

    def unit(red: float) -> float:
        scaled = max(0.0, (red - RED_SHIFT) / RED_SCALE)
        return scaled / math.sqrt(1 + scaled**2)

    # The second frame is equal, so the clip has half the distance of its first.
    expected = (unit(0.4) - unit(0.9)) ** 2 / 2
    found = measures(ours, reference)
    assert found["lpips"] == pytest.approx(expected, rel=1e-4) and expected > 1e-3
    assert found["ms_ssim"] is None
    assert measures(ours, ours)["lpips"] == 0


def test_small_pictures_have_no_number_where_a_window_does_not_fit() -> None:
    assert build_measures(None)(draw(0, side=8), draw(1, side=8)) == {
        "psnr_db": pytest.approx(7.8, abs=0.5),
        "ssim": None,
        "ms_ssim": None,
    }


def test_lpips_without_weights_is_refused_with_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--lpips FILE"):
        build_measures(["lpips"])
    with pytest.raises(ConfigError, match="ssim"):
        build_measures(["sim"])
    with pytest.raises(CheckpointError, match="no such file"):
        build_measures(None, lpips=tmp_path / "gone.safetensors")
    save_file({"a": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(CheckpointError, match="LPIPS"):
        load_perceptual(tmp_path / "other.safetensors")


def make_video(index: int = 0, frames: int = 3) -> torch.Tensor:
    return torch.rand(2, 3, frames, 16, 20, generator=stream(0, "test-metrics", index)) * 2 - 1


def test_psnr_of_a_constant_difference() -> None:
    # Difference 0.2 in a range of 2: 20 log10(2 / 0.2) = 20 dB; 0.02 gives 40 dB.
    video = make_video() * 0.5
    shifted = video.clone()
    shifted[0] += 0.2
    shifted[1] += 0.02
    assert psnr_db(shifted, video).tolist() == pytest.approx([20.0, 40.0], abs=1e-3)


def test_equal_videos() -> None:
    video = make_video()
    assert psnr_db(video, video).tolist() == [math.inf, math.inf]
    assert ssim(video, video).tolist() == pytest.approx([1.0, 1.0], abs=1e-6)
    assert ssim(video, make_video(1)).max() < 0.2
    assert ssim(torch.stack([video[0], make_video(1)[1]]), video).tolist()[0] == pytest.approx(1.0, abs=1e-6)


def test_ssim_of_two_constant_videos() -> None:
    # Without variance only the luminance term is left: (2ab + c) / (a^2 + b^2 + c), c = (0.01 * 2)^2.
    a, b, c = 0.5, 0.1, (0.01 * 2) ** 2
    expected = (2 * a * b + c) / (a**2 + b**2 + c)
    shape = (1, 3, 2, 16, 16)
    assert ssim(torch.full(shape, a), torch.full(shape, b)).item() == pytest.approx(expected, abs=1e-5)


def test_half_precision_is_compared_in_full() -> None:
    video = make_video().to(torch.bfloat16)
    other = video + 0.25
    assert psnr_db(other, video).dtype == torch.float32
    torch.testing.assert_close(psnr_db(other, video), psnr_db(other.float(), video.float()), rtol=0, atol=0)


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="one shape"):
        psnr_db(make_video(), make_video(frames=2))
    with pytest.raises(ValueError, match="11 pixels"):
        ssim(torch.zeros(1, 3, 1, 8, 8), torch.zeros(1, 3, 1, 8, 8))
