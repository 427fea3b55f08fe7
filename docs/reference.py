"""The pages of the API reference, generated from the package.

Each page describes a subpackage. The page contains the names in `__all__` of the subpackage, the
names of `jaxformer.__all__` that the subpackage defines, and the names that `docs/` imports from
the subpackage. The page `jaxformer` lists all names of `import jaxformer as jf`.
"""

import ast
import dataclasses
import inspect
import pkgutil
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from pydoc import locate

from sphinx.pycode import ModuleAnalyzer
from sphinx.util.inspect import DefaultValue, stringify_signature

import jaxformer as jf

DOCS = Path(__file__).parent
_ARRAY = re.compile(r"~?jax(lib)?\._?[\w.]*Array\b")


def pages() -> list[str]:
    """Returns the import paths of the package and of the subpackages that have a page.

    Each subpackage in `jaxformer.__all__` has a page. A package directly within one of these
    subpackages has a page if it defines `__all__`.
    """
    public = [value for name in jf.__all__ if inspect.ismodule(value := getattr(jf, name))]
    paths = [module.__name__ for module in public]
    for module in public:
        inner = pkgutil.iter_modules(module.__path__, f"{module.__name__}.")
        packages = (import_module(info.name) for info in inner if info.ispkg)
        paths += [package.__name__ for package in packages if hasattr(package, "__all__")]
    return ["jaxformer", *sorted(paths)]


def imported_names() -> Iterator[str]:
    """Yields the import path of each name that a page of docs/ imports from the package."""
    for page in sorted(DOCS.glob("*.md")):
        for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
            for node in ast.walk(ast.parse(block)):
                if isinstance(node, ast.ImportFrom) and node.module.startswith("jaxformer"):
                    yield from (f"{node.module}.{alias.name}" for alias in node.names)


def entries() -> dict[str, list[str]]:
    """Returns the import paths that each page describes. A page describes no object twice.

    The page of a public class also describes its base classes, which document the inherited
    members.
    """
    found = {page: [] for page in pages()}
    public = (f"{page}.{name}" for page in found for name in getattr(locate(page), "__all__", ()))
    paths, described = [*public, *imported_names()], set()
    # The loop appends base classes to `paths`.
    for path in paths:
        value, home = locate(path), home_of(path)
        if path in found or home in described:
            continue
        described.add(home)
        around = (page for page in found if f"{home}.".startswith(f"{page}."))
        found[max(around, key=len)].append(path)
        if isinstance(value, type):
            paths += [f"{base.__module__}.{base.__name__}" for base in _bases(value)]
    return found


def home_of(path: str) -> str:
    """Returns the import path that defines a class or function, or `path` for other objects."""
    value = locate(path)
    return f"{value.__module__}.{value.__qualname__}" if hasattr(value, "__qualname__") else path


def _bases(value: type) -> list[type]:
    """Returns the direct base classes that the package defines."""
    return [base for base in value.__bases__ if base.__module__.startswith("jaxformer.")]


def write_pages(folder: Path) -> None:
    """Replaces a folder by a new folder with a Markdown page for each entry of `pages`."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    found = entries()
    for page in found:
        (folder / f"{page}.md").write_text(_page(page, found))


def _page(page: str, found: dict[str, list[str]]) -> str:
    """Returns the text of a page."""
    parts = [f"# {page}", inspect.getdoc(locate(page))]
    if page == "jaxformer":
        parts += [_list_of_names(found), "## Outside the subpackages"]
    parts += [f"```{{eval-rst}}\n{_directive(path)}\n```" for path in found[page]]
    return "\n\n".join(parts) + "\n"


def _directive(path: str) -> str:
    """Returns the directive that describes an object."""
    value = locate(path)
    if inspect.ismodule(value):
        return f".. automodule:: {path}"
    if isinstance(value, type):
        options = "\n   :show-inheritance:" if _bases(value) else ""
        return f".. autoclass:: {path}{options}"
    if callable(value):
        return f".. autofunction:: {path}"
    keys = ", ".join(f"``{key}``" for key in value) if isinstance(value, Mapping) else repr(value)
    return f".. py:data:: {path}\n\n   {type(value).__name__}: {keys}"


def _list_of_names(found: dict[str, list[str]]) -> str:
    """Returns a Markdown list of the names in `jaxformer`, by page, with their summaries."""
    lines = ["## Names of `jf`"]
    for page, paths in found.items():
        public = [path for path in paths if path.count(".") == 1]
        lines += ["", f"### {page}", ""] if public else []
        for path in public:
            summary = inspect.getdoc(locate(path)).partition("\n\n")[0].replace("\n", " ")
            lines.append(f"- {{py:obj}}`jf.{path.partition('.')[2]} <{path}>`: {summary}")
    return "\n".join(lines)


def convert_docstring(app, what, name, value, options, lines: list[str]) -> None:
    """Converts the Markdown of a docstring to reStructuredText, in place.

    The sections Returns, Yields and Reference become fields such as `:Returns: …`.
    """
    text = "\n".join(lines)
    text = re.sub(r"^(\S.*):\n(?=\n {4})", r"\1::\n", text, flags=re.MULTILINE)
    # The strings at odd indices are code or emphasis.
    parts = re.split(r"(`+[^`]+`+|(?<!\S)\*\w+\*)", text)
    parts[::2] = [re.sub(r"\*|\||_(?!\w)", r"\\\g<0>", part) for part in parts[::2]]
    parts[1::2] = [re.sub("`+", "``", part) for part in parts[1::2]]
    text = re.sub(r"^(Returns|Yields|Reference):\n +", r":\1: ", "".join(parts), flags=re.MULTILINE)
    lines[:] = text.split("\n")
    # Without this prefix, napoleon would treat words before a colon in the first line as a type.
    if what in ("attribute", "property"):
        lines[:0] = ["..", ""]


def shorten_signature(app, what, name, value, options, signature, returns):
    """Returns a signature as (arguments, return type), with short types and defaults.

    For a dataclass whose fields have docstrings, the result is ("", None), because Sphinx describes
    the fields below the class.
    """
    if what == "class" and signature:
        fields = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
        if any((value.__name__, field.name) in _documented(value.__module__) for field in fields):
            return "", None
        signature = stringify_signature(_class_signature(value), unqualified_typehints=True)
    return tuple(text and _ARRAY.sub("Array", text) for text in (signature, returns))


@cache
def _documented(module: str) -> Collection[tuple[str, str]]:
    """Returns the pairs (class, attribute) of a module whose attribute has a docstring."""
    return ModuleAnalyzer.for_module(module).find_attr_docs()


def _class_signature(value: type) -> inspect.Signature:
    """Returns the signature of a class without the arguments that Flax adds."""
    is_plain = value.__init__ is object.__init__
    signature = inspect.signature(value if is_plain else value.__init__)
    parameters = [
        parameter.replace(default=DefaultValue(f"{type(parameter.default).__name__}()"))
        if dataclasses.is_dataclass(parameter.default)
        else parameter
        for name, parameter in signature.parameters.items()
        if name not in ("self", "parent", "name")
    ]
    return signature.replace(parameters=parameters, return_annotation=signature.empty)


def skip_member(app, what, name, value, skip, options) -> bool | None:
    """Returns True for modules and for fields of a NamedTuple, which Sphinx then skips.

    The docstring of a NamedTuple describes its fields.
    """
    return inspect.ismodule(value) or type(value).__name__ == "_tuplegetter" or None


def keep_own_bases(app, name, value, options, bases: list) -> None:
    """Removes base classes of other packages from the line "Bases"."""
    bases[:] = _bases(value)
