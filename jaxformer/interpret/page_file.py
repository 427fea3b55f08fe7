"""Writes the page: joins the modules of `page/` and embeds the data, without a build step."""

import base64
import hashlib
import html
import re
from importlib.resources import files

from jaxformer.artifacts.files import json_text, without_surrogates

_IMPORT = re.compile(r'^import \{[^}]*\} from "\./([\w-]+\.js)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:function|const|class|let)\b)", re.MULTILINE)
_FOLDER = files("jaxformer.interpret") / "page"


def page_html(data: dict, title: str) -> str:
    """Returns the HTML of a page.

    Its content security policy allows one script and one style sheet, by their hashes, and no
    connection. `<` is escaped in the data, so no text can end the element that holds it.

    Args:
        data: The JSON that the script reads.
        title: The title of the document.
    """
    script, style = f"\n{joined_script()}", f"\n{asset('page.css')}"
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    parts = {
        "policy": policy,
        "title": html.escape(without_surrogates(title)),
        "style": style,
        "data": embedded_json(data),
        "script": script,
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], asset("page.html"))


def embedded_json(data: dict) -> str:
    r"""Returns JSON for a script element, with `<`, `>` and `&` as `\u003c` and so on."""
    text = json_text(data)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def joined_script() -> str:
    """Returns all modules as one script, each after the modules that it imports.

    The modules share one scope, so their top-level names must differ. An import must be of the form
    `import { a, b } from "./module.js";`.
    """
    order: list[str] = []

    def add(name: str) -> None:
        if name not in order:
            for imported in _IMPORT.findall(asset(name)):
                add(imported)
            order.append(name)

    add("main.js")
    modules = [_EXPORT.sub("", _IMPORT.sub("", asset(name))) for name in order]
    body = "\n".join(f"// {name}\n{text}" for name, text in zip(order, modules, strict=True))
    return f'(() => {{\n"use strict";\n{body}}})();\n'


def asset(name: str) -> str:
    """Returns the text of a file of `page/`."""
    return (_FOLDER / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
