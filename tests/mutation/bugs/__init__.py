"""The catalogue, room by room. None of it imports jaxformer at its top: what a bug breaks asks for
its change while it is imported itself."""

from functools import partial

from tests.mutation.bugs import (
    artifacts,
    attention,
    cache,
    core,
    data,
    generation,
    hub,
    masks,
    model,
    placement,
    recurrent,
    scores,
    source,
    taint,
    training,
    tuning,
    verify,
)
from tests.mutation.changes import changed

BUGS = (
    *masks.BUGS,
    *attention.BUGS,
    *cache.BUGS,
    *core.BUGS,
    *generation.BUGS,
    *model.BUGS,
    *recurrent.BUGS,
    *source.BUGS,
    *training.BUGS,
    *placement.BUGS,
    *data.BUGS,
    *artifacts.BUGS,
    *taint.BUGS,
    *verify.BUGS,
    *scores.BUGS,
    *hub.BUGS,
    *tuning.BUGS,
)


def change_of(name: str):
    """original → broken, for the bug of that name."""
    (change,) = (bug.change for bug in BUGS if bug.name == name)
    return partial(changed, change)
