"""Golden captions of Open-Sora-Plan's cleaning: every text must be equal, with Chinese kept and removed."""

from __future__ import annotations

from frameloom.core.parity import ParityCase, ParityOutput, compare_facts


def matches(case: ParityCase) -> bool:
    return case.config.get("function") == "v1.3 caption cleaning"


def run(case: ParityCase) -> list[ParityOutput]:
    from frameloom.models.text.cleaning import clean_caption

    return [
        compare_facts(
            name,
            # A list is written out, as the original does with it.
            [clean_caption(str(item["input"]), keep_chinese=keep_chinese) for item in case.config["cases"]],
            [item[name] for item in case.config["cases"]],
        )
        for name, keep_chinese in (("out_support_chinese_true", True), ("out_support_chinese_false", False))
    ]
