"""The documentation site: its sidebar, its API reference, and the check of its links.

`sphinx-build` (see docs/README.md) builds the site and fails at a broken link.
"""

import inspect
from pydoc import locate

import pytest

import jaxformer as jf
from tests.test_docs import script

pytest.importorskip("sphinx", reason='needs pip install -e ".[docs]"')

REFERENCE = script("reference")


def test_api_reference_has_one_entry_for_each_public_name():
    entries = REFERENCE.entries()
    described = [REFERENCE.home_of(path) for paths in entries.values() for path in paths]
    assert len(described) == len(set(described))
    for page in entries:
        for path in (f"{page}.{name}" for name in getattr(locate(page), "__all__", ())):
            assert inspect.getdoc(locate(path)), path
            assert REFERENCE.home_of(path) in described or path in entries, path


def test_site_has_a_reference_page_for_each_public_subpackage():
    public = {f"jaxformer.{name}" for name in jf.__all__ if inspect.ismodule(getattr(jf, name))}
    assert public | {"jaxformer", "jaxformer.models.config"} <= set(REFERENCE.pages())


def test_site_deletes_reference_pages_of_removed_subpackages(tmp_path):
    (tmp_path / "jaxformer.removed.md").touch()
    REFERENCE.write_pages(tmp_path)
    assert sorted(path.stem for path in tmp_path.iterdir()) == sorted(REFERENCE.pages())


def test_google_style_docstring_is_converted_to_restructured_text():
    lines = [
        "Computes x_<i of [*batch, dim] in *one* call of `f(*x)`:",
        "",
        "    code",
        "",
        "Returns:",
        "    Pairs: (a, b).",
    ]
    REFERENCE.convert_docstring(None, "function", "f", None, None, lines)
    assert lines == [
        r"Computes x\_<i of [\*batch, dim] in *one* call of ``f(*x)``::",
        "",
        "    code",
        "",
        ":Returns: Pairs: (a, b).",
    ]


def test_documented_signatures_show_shapes_but_no_flax_arguments():
    def shortened(what, value):
        signature = inspect.signature(value)
        text = str(signature.replace(return_annotation=signature.empty))
        return REFERENCE.shorten_signature(None, what, "", value, None, text, None)[0]

    assert "logits: jaxtyping.Float[Array, '*batch vocab']" in shortened(
        "function", jf.functional.cross_entropy
    )
    assert shortened("class", jf.DecoderConfig) == ""
    decoder = shortened("class", jf.Decoder)
    assert "= Execution()" in decoder and "parent" not in decoder


def test_site_link_check_finds_missing_files_and_remote_links(tmp_path):
    page = tmp_path / "page.html"
    page.write_text(
        '<a href="page.html#x"><a href="https://host/"><a href="#x"><img src="data:image/png,">'
        '<a href="gone.html"><script src="//host/x.js"></script><link href="https://host/x.css">'
    )
    assert script("conf").problems(page) == [
        "gone.html does not exist",
        "//host/x.js needs a network connection",
        "https://host/x.css needs a network connection",
    ]
