"""Golden cases of training autoencoders: the discriminator, LPIPS and the loss terms, with their gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from frameloom.models.vaes.base import Moments
from frameloom.models.vaes.discriminator import Discriminator, DiscriminatorConfig, load_discriminator
from frameloom.models.vaes.losses import (
    AdversarialSettings,
    balance_gradients,
    discriminator_loss,
    generator_term,
    hinge_loss,
    kl_divergence,
    reconstruction_nll,
    vanilla_loss,
    wavelet_loss,
)
from frameloom.models.vaes.lpips import LPIPS, load_lpips
from tests.parity.cases import ParityCase, ParityOutput, golden, pair_outputs, relative_to_largest
from tests.parity.weights import draw_weights

Tensors = dict[str, Tensor]
_ADAPTIVE_WEIGHT = 0.7


def _build_discriminator(config: Mapping[str, Any], weights: Tensors) -> Discriminator:
    sizes = DiscriminatorConfig(config["input_nc"], config["ndf"], config["n_layers"])
    model = Discriminator(sizes)
    load_discriminator(model, weights)
    return model


def _running(model: nn.Module) -> Tensors:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


@golden(lambda case: str(case.config.get("cls", "")).startswith("NLayerDiscriminator3D"))
def _run_discriminator(case: ParityCase) -> list[ParityOutput]:
    ours: Tensors = {}
    with torch.no_grad():
        for name, pixels in case.inputs.items():
            model = _build_discriminator(case.config["model"], case.weights)
            ours[f"{name}.eval"] = model.eval()(pixels)
            ours[f"{name}.train"] = model.train()(pixels)
            ours |= {f"{name}.after_train.{key}": value for key, value in _running(model).items()}
    return pair_outputs(case, ours, 1e-5)


@golden(lambda case: str(case.config.get("cls", "")).startswith("LPIPS ("))
def _run_lpips(case: ParityCase) -> list[ParityOutput]:
    model = LPIPS().eval()
    load_lpips(model, draw_weights(case, leave_out=lambda key: key.startswith("scaling_layer.")))
    state = model.state_dict()
    stored = [ParityOutput(f"weights.{key}", state[key], tensor, 0.0) for key, tensor in case.weights.items()]
    with torch.no_grad():
        first, second = case.inputs["input"], case.inputs["target"]
        features = model.features(first)
        ours = {
            "lpips": model(first, second),
            "lpips_self": model(first, first),
            "relu1_2_mean": features[0].mean((2, 3)),
            "relu5_3": features[-1],
        }
    return stored + pair_outputs(case, ours, lambda name, _: 1e-6 if name.startswith("lpips") else 1e-4)


@golden(lambda case: str(case.config.get("cls", "")).startswith("LPIPSWithDiscriminator3D"))
def _run_losses(case: ParityCase) -> list[ParityOutput]:
    ours = {**_measure_gaussians(case), **_measure_discriminator_losses(case)}
    reconstruction, last_layer = _reconstruct(case)
    ours["reconstructions"] = reconstruction.detach()
    ours["adaptive_weight"] = torch.stack(
        [
            _ADAPTIVE_WEIGHT
            * balance_gradients(
                (reconstruction - case.inputs["inputs"]).abs().sum(),
                scale * (reconstruction * case.inputs["inputs"]).mean(),
                last_layer,
            )
            for scale in case.config["adaptive_scales"]
        ]
    )
    gates = [AdversarialSettings(start=start, factor=factor) for factor, _, start in case.config["adopt_weight_args"]]
    steps = [step for _, step, _ in case.config["adopt_weight_args"]]
    ours["adopt_weight"] = torch.tensor([gate.factor_at(step) for gate, step in zip(gates, steps, strict=True)])
    for entry in case.config["run"]:
        found = _train_generator(case, entry) if entry["optimizer_idx"] == 0 else _train_discriminator(case, entry)
        ours |= {f"{entry['name']}.{name}": value for name, value in found.items()}
    # The published sums leave the width of the latent standing, which its loss then sums over as well.
    summed = {name: case.outputs[name].sum(-1) for name in ("kl_elementwise", "clamp.kl") if name in case.outputs}
    between = dict.fromkeys(("kl_between", "nll"), "terms-of-no-loss")
    return pair_outputs(replace(case, outputs=case.outputs | summed), ours, relative_to_largest(1e-5), between)


def _reconstruct(case: ParityCase) -> tuple[Tensor, Tensor]:
    last_layer = case.inputs["last_layer"].clone().requires_grad_()
    return F.conv3d(case.inputs["features"], last_layer, padding=(0, 1, 1)), last_layer


def _measure_gaussians(case: ParityCase) -> Tensors:
    moments, clamped = (Moments.from_raw(case.inputs[name]) for name in ("moments", "moments_clamp"))
    return {
        "mode": moments.mode(),
        "std": torch.exp(0.5 * moments.logvar_BCFHW),
        "var": torch.exp(moments.logvar_BCFHW),
        "kl_elementwise": moments.kl_B(),
        "clamp.logvar": clamped.logvar_BCFHW,
        "clamp.std": torch.exp(0.5 * clamped.logvar_BCFHW),
        "clamp.var": torch.exp(clamped.logvar_BCFHW),
        "clamp.kl": clamped.kl_B(),
    }


def _measure_discriminator_losses(case: ParityCase) -> Tensors:
    logits = case.inputs["logits_real"], case.inputs["logits_fake"]
    # The published weighted form takes pictures: the first frame of these logits.
    real, made = (clip[:, :, 0] for clip in logits)
    return {
        "hinge_d_loss": hinge_loss(*logits),
        "hinge_d_loss_exemplar": hinge_loss(real, made, case.inputs["exemplar_weights"]),
        "vanilla_d_loss": vanilla_loss(*logits),
    }


def _settings(entry: Mapping[str, Any]) -> AdversarialSettings:
    given = entry["kwargs"]
    names = {"disc_start": "start", "disc_weight": "weight", "disc_factor": "factor", "disc_loss": "loss"}
    return AdversarialSettings(**{ours: given[theirs] for theirs, ours in names.items() if theirs in given})


def _train_generator(case: ParityCase, entry: Mapping[str, Any]) -> Tensors:
    given, inputs = entry["kwargs"], case.inputs["inputs"]
    model = _build_discriminator(case.config["disc"], case.weights).train()
    reconstruction, last_layer = _reconstruct(case)
    raw = case.inputs["moments"].clone().requires_grad_()
    likelihood = {"logvar": given["logvar_init"], "kind": given["loss_type"]}
    nll = reconstruction_nll(inputs, reconstruction, **likelihood)
    weighted = nll
    if entry.get("weights"):
        weight_BF = case.inputs["nll_weights"].reshape(inputs.shape[0], inputs.shape[2])
        weighted = reconstruction_nll(inputs, reconstruction, weight_BF=weight_BF, **likelihood)
    kl = kl_divergence(Moments.from_raw(raw))
    wavelet = torch.zeros(())
    if entry.get("wavelet"):
        levels = [case.inputs[name] for name in sorted(case.inputs) if name.startswith("wavelet_")]
        wavelet = wavelet_loss(levels[::2], levels[1::2])
    term = generator_term(model(reconstruction), nll, last_layer, _settings(entry), entry["global_step"])
    loss = weighted + given["kl_weight"] * kl + term.loss + given["wavelet_weight"] * wavelet
    grad_last, grad_raw = torch.autograd.grad(loss, [last_layer, raw])
    logged = {
        "total_loss": loss,
        "logvar": torch.tensor(given["logvar_init"]),
        "kl_loss": kl,
        "nll_loss": nll,
        "rec_loss": weighted,
        "wl_loss": wavelet,
        "d_weight": term.weight,
        "disc_factor": torch.tensor(term.factor),
        "g_loss": term.made,
    }
    return {
        "loss": loss.detach(),
        "grad_last_layer": grad_last,
        "grad_moments": grad_raw,
        **{f"log.train/{name}": value.detach() for name, value in logged.items()},
        **{f"after.{name}": value for name, value in _running(model).items()},
    }


def _train_discriminator(case: ParityCase, entry: Mapping[str, Any]) -> Tensors:
    model = _build_discriminator(case.config["disc"], case.weights).train()
    real = model(case.inputs["inputs"])
    made = model(_reconstruct(case)[0].detach())
    loss = discriminator_loss(real, made, _settings(entry), entry["global_step"])
    convolutions = [module.weight for module in model.modules() if isinstance(module, nn.Conv3d)]
    grads = torch.autograd.grad(loss, [convolutions[0], convolutions[-1]])
    logged = {"disc_loss": loss, "logits_real": real.mean(), "logits_fake": made.mean()}
    return {
        "loss": loss.detach(),
        "grad_disc_first_conv": grads[0],
        "grad_disc_last_conv": grads[1],
        **{f"log.train/{name}": value.detach() for name, value in logged.items()},
        **{f"after.{name}": value for name, value in _running(model).items()},
    }
