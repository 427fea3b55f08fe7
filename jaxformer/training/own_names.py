"""Names of user-defined functions that replace parts of a run's model."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

from jaxformer.artifacts.own_code import check_name, import_named
from jaxformer.models.config.check import check_fields, shown
from jaxformer.models.config.model import ModelConfig
from jaxformer.models.config.needs import Needs, Spelling, is_one_of

Model = TypeVar("Model", bound=ModelConfig)
_NAME = Spelling(placeholder="MODULE:FUNCTION")
_TRANSFORMERS = ("decoder", "encoder", "encoder-decoder")
_ATTENDS = is_one_of("model", *_TRANSFORMERS)


@dataclass(frozen=True)
class OwnNames:
    """Names of user-defined functions that replace parts of the model that a config describes.

    A run stores the names in config.json. Reading config.json does not import the functions.
    """

    needs: ClassVar[Needs] = {
        "own_mask": (_ATTENDS,),
        "own_positions": (_ATTENDS,),
        "own_activation": (is_one_of("model", *_TRANSFORMERS, "convolutional"),),
        "activation": (is_one_of("own_activation", None),),
        "positions": (is_one_of("own_positions", None),),
        "window": (is_one_of("own_mask", None),),
        "prefix": (is_one_of("own_mask", None),),
    }

    own_activation: Annotated[str | None, _NAME] = None
    """your own activation in place of --activation, as MODULE:FUNCTION: an elementwise function of
    an array. The module is in the current directory or on the Python path"""
    own_positions: Annotated[str | None, _NAME] = None
    """your own position vectors in place of --positions: a function of the positions and of
    embed_dim that returns one vector for each position"""
    own_mask: Annotated[str | None, _NAME] = None
    """your own mask in place of --window and --prefix: a function of the positions of a query and
    of a key that returns whether the query attends to the key. In an encoder-decoder, it
    replaces the mask of the decoder"""

    def __post_init__(self) -> None:
        """Checks the form of the names."""
        check_fields(self)
        for part, name in self.parts.items():
            check_name(f"own_{part}", name)

    @property
    def parts(self) -> dict[str, str]:
        """The given names, by field of the model that the function replaces."""
        names = {name.removeprefix("own_"): getattr(self, name) for name in _FIELDS}
        return {part: name for part, name in names.items() if name is not None}

    def sections(self) -> dict[str, dict[str, str]]:
        """Returns the sections of config.json, as `jf.save` writes them."""
        return {part: {"function": name} for part, name in self.parts.items()}

    def without_replaced(self, config: Model) -> Model:
        """Removes the parts of a config that the functions replace.

        The resulting config describes the parameters that the model has: a user-defined activation
        is not gated, and user-defined positions have no learned table.
        """
        names = {x.name for x in fields(config)}
        return replace(config, **{x: y for x, y in self.unused.items() if x in names})

    @property
    def unused(self) -> dict[str, Any]:
        """New values of the config fields that the functions replace, by field."""
        values = {
            "own_activation": {"activation": "gelu_tanh"},
            "own_positions": {"positions": "none"},
            "own_mask": {"window": None, "prefix": 0},
        }
        given = (x for name, x in values.items() if getattr(self, name) is not None)
        return {name: value for x in given for name, value in x.items()}

    def load(self, config: ModelConfig) -> dict[str, Any]:
        """Imports the functions, and returns them by field of the model.

        Args:
            config: The config of the model.

        Raises:
            ValueError: A function cannot be imported or does not fit the config.
        """
        parts = self.parts
        found = {x: import_named("function", parts[x], f"own_{x}") for x in parts}
        if found:
            # check_own imports JAX, which is slow, so it is imported only if there are functions.
            from jaxformer.models.builders.check_own import check_functions

            check_functions(found, config)
        return found


# `jf.save` stores a mask function or a position function as this field of a dataclass.
_INNER = {"FunctionMask": "allows", "FunctionPositions": "compute"}
_FIELDS = tuple(x.name for x in fields(OwnNames))


def read_own_names(sections: Mapping[str, Any], where: Path) -> OwnNames:
    """Returns the names in the sections of config.json.

    Args:
        sections: The sections "mask", "activation" and "positions". Missing sections and other
            sections are ignored.
        where: The path of config.json, for error messages.

    Raises:
        ValueError: A section contains more than the name of a function, such as an array.
    """
    names = {}
    for field in _FIELDS:
        if (content := sections.get(part := field.removeprefix("own_"))) is None:
            continue
        content = content.get(_INNER.get(str(content.get("class")), ""), content)
        if not isinstance(content, dict) or set(content) != {"function"}:
            raise ValueError(
                f"{where}: {part} is {shown(content)}, which flags cannot describe; it must be "
                'an object with the key "function"'
            )
        names[field] = content["function"]
    try:
        return OwnNames(**names)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def require_trust(own: OwnNames, trusts: bool, where: Path) -> None:
    """Raises ValueError if a run has user-defined functions and --trust-code is missing.

    Args:
        own: The names in the run.
        trusts: Whether the user has given --trust-code.
        where: The path of config.json, for the error message.
    """
    for part, name in own.parts.items():
        if not trusts:
            raise ValueError(
                f"{where}: {part} is the function {name}, which is not part of jaxformer; if you "
                "trust the run, add --trust-code to import the function"
            )
