"""From the recipe's `data` section to a bucket policy."""

from __future__ import annotations

from frameloom.config.bucket_policies import (
    FixedSection,
    GroupedSection,
    MultiAspectSection,
    RatioTokensSection,
    TokenBudgetSection,
)
from frameloom.config.schema import DataSection
from frameloom.data.buckets import BucketPolicy
from frameloom.data.policies.fixed import Fixed
from frameloom.data.policies.grid_parser import parse_grid
from frameloom.data.policies.grouped import Grouped
from frameloom.data.policies.lengths import LengthRule
from frameloom.data.policies.multi_aspect import MultiAspect
from frameloom.data.policies.ratio_tokens import RatioTokens
from frameloom.data.policies.token_budget import apply_token_budget


def build_bucket_policy(data: DataSection, *, stride: int, rule: LengthRule) -> BucketPolicy:
    """The policy that `data.policy` names; `stride` is pixels per token on a side, `rule` the lengths a model takes."""
    match data.policy:
        case "ratio_tokens":
            return RatioTokens(data.ratio_tokens or RatioTokensSection(), stride=stride, rule=rule)
        case "grouped":
            return Grouped(data.grouped or GroupedSection(), rule=rule)
        case "multi_aspect":
            return MultiAspect(data.multi_aspect or MultiAspectSection(), fps_max=data.fps_max)
        case "fixed":
            return Fixed(data.fixed or FixedSection(), fps_max=data.fps_max)
        case "token_budget":
            grid = parse_grid(data.buckets or {}, stride=stride, fps_max=data.fps_max)
            return apply_token_budget(grid, (data.token_budget or TokenBudgetSection()).tokens, rule)
        case "grid":
            return parse_grid(data.buckets or {}, stride=stride, fps_max=data.fps_max)
