"""The tokenizer in JavaScript gives the ids of the tokenizer in Python."""

import re
import shutil

import pytest

from jaxformer.interpret import page_file
from jaxformer.interpret.page_tokenizer import page_tokenizer, tokenizer_reason
from tests.interpret.page_tokenizers import KINDS, hard_texts
from tests.slow import mostly_slow

sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


def script():
    """Returns the modules of the tokenizer as one script."""
    modules = re.findall(r"^// ([\w-]+\.js)$", page_file.joined_script(), re.MULTILINE)
    used = {"arrays.js"}

    def add(name):
        used.add(name)
        for imported in page_file._IMPORT.findall(page_file.asset(name)):
            add(imported)

    add("tokenizer.js")
    texts = [
        page_file._EXPORT.sub("", page_file._IMPORT.sub("", page_file.asset(name)))
        for name in modules
        if name in used
    ]
    return "\n".join(texts)


@pytest.fixture(scope="module")
def tab():
    with sync_api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = opened.new_page()
        page.add_script_tag(content=script())
        yield page
        opened.close()


ENCODE = """async ([data, texts]) => {
  const tokenizer = createTokenizer(await unpackAll(data));
  const begin = performance.now();
  const ids = texts.map((text) => tokenizer.encode(text));
  return { ids, time: performance.now() - begin, texts: ids.map((list) => tokenizer.decode(list)) };
}"""


@pytest.mark.parametrize("kind", mostly_slow(KINDS, "merges", slow=KINDS))
def test_page_encodes_texts_to_the_ids_of_the_python_tokenizer(kind, tab):
    tokenizer = KINDS[kind]()
    assert tokenizer_reason(tokenizer) is None
    texts = hard_texts(1_000)
    found = tab.evaluate(ENCODE, [page_tokenizer(tokenizer), texts])
    expected = [tokenizer.encode(text) for text in texts]
    wrong = [
        (text, x, y) for text, x, y in zip(texts, found["ids"], expected, strict=True) if x != y
    ]
    assert not wrong, (len(wrong), min(wrong, key=lambda item: len(item[0])))
    decoded = [tokenizer.decode(ids) for ids in expected]
    wrong = [(x, y) for x, y in zip(found["texts"], decoded, strict=True) if x != y]
    assert not wrong, (len(wrong), min(wrong, key=lambda item: len(item[0])))
