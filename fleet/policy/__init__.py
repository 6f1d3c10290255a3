"""What a guarded agent may do: rules, and the judgement of one tool call by them (protocol §4, Policy).

rules     the vocabulary: a policy block becomes a validated `Policy`
effects   which effect a tool has, and the command and the paths in its input
patterns  glob patterns, also against text that is known in part only
shell     a command line becomes the commands that it would run; `bash`, `words` and `wrappers` are its parts
paths     whether a path leaves a folder
engine    the judgement, and its explanation
"""

from fleet.policy.effects import effect_of
from fleet.policy.engine import Verdict, evaluate, explain
from fleet.policy.rules import Action, Effect, Policy, Rule, parse_policy, parse_rules

__all__ = [
    "Action",
    "Effect",
    "Policy",
    "Rule",
    "Verdict",
    "effect_of",
    "evaluate",
    "explain",
    "parse_policy",
    "parse_rules",
]
