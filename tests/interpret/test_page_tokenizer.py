"""The tokenizer in JavaScript gives the ids of the tokenizer in Python."""

import json
import re
import shutil
from pathlib import Path

import pytest
from tokenizers import Regex, pre_tokenizers

from jaxformer.artifacts.byte_tokenizer import ByteTokenizer
from jaxformer.interpret import page_file
from jaxformer.interpret.page_patterns import js_pattern
from jaxformer.interpret.page_tokenizer import page_tokenizer, tokenizer_reason
from tests.artifacts.test_patterns import PUBLISHED, SIMPLE
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


MOST_FILES = 1_600
SPLIT = """([step, texts]) => {
  const split = wordSplitter([step]);
  return texts.map((text) => split({ text, first: true }).map((piece) => piece.text));
}"""
TRANSLATED = [
    *(pattern for name in PUBLISHED for pattern in PUBLISHED[name] if "&&" not in pattern),
    *SIMPLE,
    r"\w+|\d",
    r"(?>a|ab)c|[^\S\r]++",
    r"(?i:'(?:s|ll)|keep|k)",
    r"(?<=o)d|(?<! )t(?!h)",
    r"x{,2}1|a{3}|.{7,9}\z",
    r"\x{e9}|\u00df|\x41|\P{^Lu}",
    r"\Athe|[\-a\]\[]+|[a-]",
]


@pytest.mark.slow
@pytest.mark.parametrize("pattern", [x for x in TRANSLATED if not x.endswith("$")])
@pytest.mark.parametrize("behavior", ["isolated", "merged_with_previous"])
def test_translated_pattern_splits_texts_as_the_tokenizers_library(pattern, behavior, tab):
    texts = [x for x in hard_texts(400) if len(x) < 5_000]
    texts += ["kK'S 'ſ'ſx'LL KEEP", "abc ac abac", "Éé ß A", "tthdd odd", "-a][ b-", "axx11aaaa"]
    for invert in (False, True):
        steps = pre_tokenizers.Split(Regex(pattern), behavior, invert)
        kinds = {"isolated": "Isolated", "merged_with_previous": "MergedWithPrevious"}
        step = {"type": "split", "pattern": js_pattern(pattern), "invert": invert}
        found = tab.evaluate(SPLIT, [step | {"behavior": kinds[behavior]}, texts])
        for text, pieces in zip(texts, found, strict=True):
            assert pieces == [piece for piece, _ in steps.pre_tokenize_str(text)], text


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["merges", "llama", "unigram bytes", "clip"])
def test_page_encodes_10_000_characters_in_well_under_a_second(kind, tab):
    tokenizer = KINDS[kind]()
    words = " ".join(hard_texts(1_000))[:10_000]
    texts = [words, "a" * 10_000, "ab" * 5_000, " " * 10_000, "🙂" * 5_000]
    times = [tab.evaluate(ENCODE, [page_tokenizer(tokenizer), [text]])["time"] for text in texts]
    print(kind, [round(x) for x in times], "ms")
    assert max(times) < 500  # the longest time on two shared cores was 94 ms


@pytest.mark.slow
def test_page_of_a_vocabulary_of_50_257_tokens_grows_by_at_most_600_kb():
    """The vocabulary is learned from the standard library of Python."""
    paths = sorted(Path(json.__file__).parents[1].glob("**/*.py"))[:MOST_FILES]
    tokenizer = ByteTokenizer.train((x.read_text(errors="replace") for x in paths), 50_257)
    assert tokenizer.vocab_size == 50_257
    size = len(page_file.embedded_json(page_tokenizer(tokenizer)))
    print(f"{size:,} bytes")
    assert size < 600_000
