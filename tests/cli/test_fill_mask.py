"""Tests of how `jaxformer fill-mask` splits a text at its masks."""

import pytest

from jaxformer.artifacts.byte_tokenizer import ByteTokenizer
from jaxformer.cli.fill_mask import MASK, around
from tests.cli.conftest import TEXT

TOKENIZER = ByteTokenizer.train([TEXT], 300, mask=True)


@pytest.mark.parametrize("word", ["return", "x", "*", "+"])
def test_fill_mask_replaces_each_mask_by_one_token(word):
    """The tokens around a mask are those of the original text, as in training.

    A token includes the space before its word.
    """
    text = "    return x * 4 + 3\n"
    whole = TOKENIZER.encode(text)
    (hidden,) = TOKENIZER.encode(f" {word}")
    before, after = map(TOKENIZER.encode, around(text.replace(f" {word}", f" {MASK}", 1)))
    place = whole.index(hidden)
    assert (before, after) == (whole[:place], whole[place + 1 :])


def test_fill_mask_fills_adjacent_masks_and_masks_at_the_ends():
    assert around(f"{MASK} {MASK}a  {MASK}") == ["", "", "a ", ""]
