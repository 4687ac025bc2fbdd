"""How each operator may be split over one mesh axis: rules, where they come from, and the strategies they allow."""

from sennit.capture.rules.localize import local_kind, localize
from sennit.capture.rules.lookup import RuleBook, Source, rule_of
from sennit.capture.rules.rule import Chunks, Letters, Listed, Reshape, Row, Rule, Strategy, Types
from sennit.capture.rules.strategies import (
    carries_pending,
    decide,
    is_relabelling,
    making,
    map_split,
    propose,
    split_on,
    through_view,
)
from sennit.capture.rules.user import rule

__all__ = [
    "Chunks",
    "Letters",
    "Listed",
    "Reshape",
    "Row",
    "Rule",
    "RuleBook",
    "Source",
    "Strategy",
    "Types",
    "carries_pending",
    "decide",
    "is_relabelling",
    "local_kind",
    "localize",
    "making",
    "map_split",
    "propose",
    "rule",
    "rule_of",
    "split_on",
    "through_view",
]
