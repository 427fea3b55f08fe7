"""The catalogue of bugs, one file per area.

No file imports jaxformer at its top level: a broken module looks up its change while it is imported
itself.
"""

from functools import partial

from tests.mutation.bugs import (
    answers,
    artifacts,
    attention,
    bench,
    cache,
    chat,
    cli,
    core,
    data,
    edges,
    fused,
    generation,
    hub,
    interpret,
    layers,
    masks,
    mixers,
    model,
    notes,
    own_code,
    placement,
    recurrent,
    scores,
    source,
    subspaces,
    sweep,
    taint,
    training,
    tuning,
    verify,
)
from tests.mutation.changes import changed

BUGS = (
    *answers.BUGS,
    *masks.BUGS,
    *attention.BUGS,
    *cache.BUGS,
    *chat.BUGS,
    *core.BUGS,
    *fused.BUGS,
    *generation.BUGS,
    *model.BUGS,
    *notes.BUGS,
    *own_code.BUGS,
    *recurrent.BUGS,
    *source.BUGS,
    *interpret.BUGS,
    *edges.BUGS,
    *subspaces.BUGS,
    *training.BUGS,
    *placement.BUGS,
    *data.BUGS,
    *artifacts.BUGS,
    *sweep.BUGS,
    *taint.BUGS,
    *verify.BUGS,
    *scores.BUGS,
    *hub.BUGS,
    *tuning.BUGS,
    *bench.BUGS,
    *cli.BUGS,
    *layers.BUGS,
    *mixers.BUGS,
)


def change_of(name: str):
    """Returns a function from the original to the broken target of the bug with this name."""
    (change,) = (bug.change for bug in BUGS if bug.name == name)
    return partial(changed, change)
