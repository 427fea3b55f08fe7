r"""Converts the character map of T5's normalizer `Precompiled` for a page.

SentencePiece stores the map as a trie of UTF-8 bytes, followed by the replacements. The
`tokenizers` library splits a text into grapheme clusters and looks up each cluster of fewer than
`_LONGEST` bytes. If the trie contains a prefix of the cluster, the replacement of the shortest such
prefix replaces the whole cluster. Otherwise, the library looks up each character of the cluster.

A page needs only the keys that these look-ups can reach: 5,684 of the 225,276 keys of the rule
"nmt_nfkc". They take 31 kB of a page, and the whole map would take 186 kB.
"""

import base64
from collections.abc import Iterator
from typing import Any

import numpy as np
from jaxtyping import UInt32

from jaxformer.interpret.page_file import pack_texts
from jaxformer.interpret.page_patterns import Unsupported

# The library looks up a grapheme cluster of this number of bytes or more only by its characters.
_LONGEST = 6
_BYTES = np.arange(1, 256, dtype=np.uint32)


def characters_step(charsmap: str) -> dict[str, Any]:
    """Returns the step "characters", which replaces characters and grapheme clusters.

    Args:
        charsmap: The map of a tokenizer.json, encoded with base64.

    Returns:
        The step with the packed texts "from" and "to".

    Raises:
        Unsupported: The map is damaged.
    """
    try:
        pairs = character_pairs(base64.b64decode(charsmap))
    except (IndexError, ValueError) as error:
        raise Unsupported(f"the character map of the normalizer is damaged: {error}") from None
    return {"type": "characters", "from": pack_texts([*pairs]), "to": pack_texts([*pairs.values()])}


def character_pairs(blob: bytes) -> dict[str, str]:
    """Returns {key: replacement} for the keys of a map that a look-up can reach.

    Args:
        blob: The size of the trie as 32 bits, the trie, and the replacements, each ended by a zero
            byte.

    Raises:
        IndexError: A node of the trie refers to a missing node.
        ValueError: A key or a replacement is not UTF-8, or a replacement has no end.
    """
    size = int.from_bytes(blob[:4], "little")
    trie = np.frombuffer(blob[4 : 4 + size], "<u4")
    texts = blob[4 + size :]
    return {
        key.decode(): texts[start : texts.index(b"\0", start)].decode()
        for key, start in _shortest_keys(trie)
    }


def _shortest_keys(trie: UInt32[np.ndarray, " nodes"]) -> Iterator[tuple[bytes, int]]:
    """Yields (key, start of its replacement) for each key that has no other key as a prefix.

    The trie is a double array in the format of the library Darts-clone.
    """
    waiting = [(b"", _children(trie, 0))]
    while waiting:
        key, base = waiting.pop()
        if len(key) == _LONGEST - 1:
            continue
        places = base ^ _BYTES
        places = np.where(places < len(trie), places, 0)
        # The highest bit of a node marks a value. The lowest 8 bits are the byte of its edge.
        for place in places[trie[places] & 0x8000_00FF == _BYTES]:
            unit, below = int(trie[place]), _children(trie, int(place))
            longer = key + bytes([unit & 0xFF])
            if unit & 0x100:  # A key ends here, and its value is the first child.
                yield longer, int(trie[below]) & 0x7FFF_FFFF
            else:
                waiting.append((longer, below))


def _children(trie: UInt32[np.ndarray, " nodes"], place: int) -> int:
    """Returns the base of a node: its child for byte b is at the place base ^ b."""
    unit = int(trie[place])
    return place ^ ((unit >> 10) << ((unit & 0x200) >> 6))
