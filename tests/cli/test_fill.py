"""What `jaxformer fill` makes of a text with masks."""

import pytest

from jaxformer.artifacts.tokenizer import Tokenizer
from jaxformer.cli.fill import MASK, around
from tests.cli.conftest import TEXT

TOKENIZER = Tokenizer.train([TEXT], 300, mask=True)


@pytest.mark.parametrize("word", ["return", "x", "*", "+"])
def test_a_mask_stands_in_the_place_of_one_token(word):
    """The tokens around it are those of the whole text, as the model has learnt from texts: the
    space before a word is a part of its token."""
    text = "    return x * 4 + 3\n"
    whole = TOKENIZER.encode(text)
    (hidden,) = TOKENIZER.encode(f" {word}")
    before, after = map(TOKENIZER.encode, around(text.replace(f" {word}", f" {MASK}", 1)))
    place = whole.index(hidden)
    assert (before, after) == (whole[:place], whole[place + 1 :])


def test_masks_side_by_side_and_at_the_ends():
    assert around(f"{MASK} {MASK}a  {MASK}") == ["", "", "a ", ""]
