"""Bugs of importing and exporting foreign model folders."""

from tests.mutation.bug import Bug
from tests.mutation.changes import Replace, gives

BROKEN = "hub/test_malformed.py::test_a_broken_folder_is_refused"
ROUND_TRIP = "hub/test_folders.py"

BUGS = (
    Bug(
        "an unknown option is ignored",
        "hub.options:Options.nothing_left",
        gives(None),
        f"{BROKEN}[an-option-is-unknown]",
    ),
    Bug(
        "a duplicate JSON key is accepted",
        "artifacts.files:_once",
        Replace("len(found) < len(pairs)", "False"),
        f"{BROKEN}[config-has-a-key-twice]",
    ),
    Bug(
        "a link may leave the folder",
        "artifacts.links:stays",
        gives(True),
        f"{BROKEN}[a-file-of-the-index-leads-away]",
    ),
    Bug(
        "an unused tensor is ignored",
        "hub.foreign:found_names",
        Replace("name not in used and not family.is_ignored(name)", "False"),
        f"{BROKEN}[a-layer-fewer-than-weights]",
    ),
    Bug(
        "a tensor's dtype is not checked",
        "artifacts.tensors:Tensor.check",
        Replace("self.dtype not in DTYPES", "False"),
        f"{BROKEN}[a-type-is-of-integers]",
    ),
    Bug(
        "a tokenizer may have more ids than the model",
        "hub.foreign:foreign_folder",
        Replace("tokenizer.own_size > config.vocab_size", "False"),
        f"{BROKEN}[tokenizer-is-of-another-model]",
    ),
    Bug(
        "a tokenizer may grow a text without limit",
        "artifacts.backend:_growth",
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
        "artifacts.backend:_try_out",
        gives(False),
        f"{BROKEN}[tokenizer-has-a-slow-pattern]",
    ),
    Bug(
        "an export overwrites existing files",
        "artifacts.files:require_new",
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
        "the family that a model came from is forgotten",
        "hub.export:preferred",
        Replace("name != family", "False"),
        "hub/test_family.py::test_an_imported_model_is_exported_as_what_it_was[phi3]",
    ),
    Bug(
        "an original length outside the rotary options is dropped",
        "hub.rotary:Entry.scaling",
        Replace(
            'length or fields.get("original_length", longest)',
            'fields.get("original_length", longest)',
        ),
        "hub/test_options.py::test_the_original_length_outside_has_priority",
    ),
    Bug(
        "an adapter beside a model is ignored",
        "hub.adapter:read_adapter_beside",
        gives(None),
        "hub/test_adapter.py::test_the_scale_of_an_update",
    ),
    Bug(
        "every layer is read into the first",
        "hub.table:fill",
        Replace("... if entry.layer is None else entry.layer", "... if entry.layer is None else 0"),
        ROUND_TRIP,
    ),
)
