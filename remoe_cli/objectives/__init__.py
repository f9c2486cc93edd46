"""Objectives: what a gate is taught, as pure functions of routing. A new one is one file here, one line below and one in
`recipe.OBJECTIVES`, which says which heads it reads.

An objective is a module with these three functions (`remoe` is the model to copy):
- `weights(segments, settings, learned_BT) -> {term: weight}`: how many tokens or pairs a micro-batch brings to each term.
- `terms(settings) -> {term: function(routing, segments) -> sum}`: each sum divided by its weight is the term's mean;
  sums and weights of micro-batches add up, so that splitting a batch changes nothing.
- `scales(settings, step, steps) -> {term: factor}`: the factor of each term's mean in the loss at this step.
One that is ReMoE's with another term in the place of reuse gets the three from `remoe.in_place_of_reuse`.
Cross entropy (or, with `target: base`, distillation) belongs to every objective and is added by the trainer with factor 1.
"""

from types import ModuleType

from remoe_cli.objectives import (
    coverage_spatio_temporal,
    coverage_temporal,
    decayed_coverage,
    remoe,
    resident_mass,
    soft_misses,
    spatio_only,
)

OBJECTIVES: dict[str, ModuleType] = {
    "remoe": remoe,
    "resident-mass": resident_mass,
    "soft-misses": soft_misses,
    "coverage-temporal": coverage_temporal,
    "coverage-spatio-temporal": coverage_spatio_temporal,
    "spatio-only": spatio_only,
    "decayed-coverage": decayed_coverage,
}
