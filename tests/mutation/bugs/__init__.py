"""The catalogue, room by room."""

from tests.mutation.bugs import (
    artifacts,
    attention,
    cache,
    generation,
    masks,
    model,
    recurrent,
    source,
    taint,
    training,
    verify,
)

BUGS = (
    *masks.BUGS,
    *attention.BUGS,
    *cache.BUGS,
    *generation.BUGS,
    *model.BUGS,
    *recurrent.BUGS,
    *source.BUGS,
    *training.BUGS,
    *artifacts.BUGS,
    *taint.BUGS,
    *verify.BUGS,
)
