"""Foreign folders, in and out."""

from tests.mutation.bug import Bug
from tests.mutation.changes import Replace, gives

BROKEN = "hub/test_malformed.py::test_a_broken_folder_is_refused"
ROUND_TRIP = "hub/test_folders.py"

BUGS = (
    Bug(
        "an option that is not known is passed over",
        "artifacts.options:Options.nothing_left",
        gives(None),
        f"{BROKEN}[an-option-is-unknown]",
    ),
    Bug(
        "a key of two is taken",
        "artifacts.tensors:_once",
        Replace("len(found) < len(pairs)", "False"),
        f"{BROKEN}[config-has-a-key-twice]",
    ),
    Bug(
        "a shard may lie anywhere",
        "artifacts.tensors:_stays",
        gives(True),
        f"{BROKEN}[a-file-of-the-index-leads-away]",
    ),
    Bug(
        "a tensor without a place is passed over",
        "hub.load:found_names",
        Replace("name not in used and not family.is_ignored(name)", "False"),
        f"{BROKEN}[a-layer-fewer-than-weights]",
    ),
    Bug(
        "a tensor's type is not looked at",
        "artifacts.tensors:Tensor.check",
        Replace("self.dtype not in DTYPES", "False"),
        f"{BROKEN}[a-type-is-of-integers]",
    ),
    Bug(
        "a tokenizer may have more ids than the model",
        "hub.load:foreign_folder",
        Replace("tokenizer.own_size > config.vocab_size", "False"),
        f"{BROKEN}[tokenizer-is-of-another-model]",
    ),
    Bug(
        "a text may grow without end",
        "artifacts.subwords:_growth",
        Replace("sum(map(_growth, parts))", "max(map(_growth, parts), default=0.0)"),
        f"{BROKEN}[tokenizer-makes-a-text-longer-by-steps]",
    ),
    Bug(
        "a second head is dropped",
        "artifacts.tensors:Tensor.equals",
        gives(True),
        f"{BROKEN}[a-head-of-its-own-beside-tied-embeddings]",
    ),
    Bug(
        "a pattern may take exponential time",
        "artifacts.subwords:_refuse_slow_patterns",
        gives(None),
        f"{BROKEN}[tokenizer-has-a-slow-pattern]",
    ),
    Bug(
        "an export is written over what is there",
        "artifacts.tensors:require_new",
        Replace("path.exists() and (not path.is_dir() or any(path.iterdir()))", "False"),
        "hub/test_malformed.py::test_what_is_not_there_is_refused",
    ),
    Bug(
        "the kind of a saved model is forgotten",
        "artifacts.run:parse_kind",
        Replace('sections.get("kind", "decoder")', '"decoder"'),
        ROUND_TRIP,
    ),
    Bug(
        "every layer is read into the first",
        "artifacts.table:fill",
        Replace("... if entry.layer is None else entry.layer", "... if entry.layer is None else 0"),
        ROUND_TRIP,
    ),
)
