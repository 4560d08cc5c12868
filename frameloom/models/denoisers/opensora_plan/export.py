"""OpenSoraT2V leaves under its published keys; diffusers has no such model."""

from __future__ import annotations

from frameloom.models.denoisers.export_forms import ExportForms, as_json
from frameloom.models.denoisers.opensora_plan.weights import export_config

EXPORT = ExportForms(describe_original=lambda config: as_json(export_config(config)))
