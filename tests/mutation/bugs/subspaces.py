"""Bugs of neurons, circuits, autoencoders and subspaces: wrong sums, scales and rotations."""

from tests.mutation.bug import Bug
from tests.mutation.changes import Replace

NEURONS = "interpret/test_neurons.py"
UNITS = f"{NEURONS}::test_unit_attribution_equals_projected_unit_output"

BUGS = (
    # ---- neurons
    Bug(
        "the bias of a feed-forward layer is not attributed",
        "interpret.neurons:_attribute_neurons",
        Replace('"bias" in down', "False"),
        UNITS,
    ),
    Bug(
        "the activations of units are those of another position",
        "interpret.neurons:_attribute_neurons",
        Replace(
            "found.passed.captured[HIDDEN][:, :, read.position]",
            "found.passed.captured[HIDDEN][:, :, 0]",
        ),
        UNITS,
    ),
    Bug(
        "the derivative of a logit is that of another layer",
        "interpret.neurons:_attribute_neurons",
        Replace('found.slopes["feedforward"]', 'found.slopes["feedforward"][::-1]'),
        f"{UNITS}[sandwich]",
    ),
    Bug(
        "units with negative contributions are never among the largest",
        "interpret.neurons:NeuronAttribution.top",
        Replace("jnp.abs(flat)", "flat"),
        f"{NEURONS}::test_top_units_are_those_with_the_largest_absolute_contributions",
    ),
)
