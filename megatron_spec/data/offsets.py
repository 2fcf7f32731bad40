"""Characters of a text that each token covers: from byte lengths where possible, else from the tokenizer.

Tokenizers are faster when they do not track offsets.

N tokens, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import pre_tokenizers


def byte_lengths(tokenizer: Any) -> NDArray[Any] | None:
    """int64 [V]: bytes of text that each token encodes; None if the tokenizer is not byte-level.

    Byte-level tokenizers (GPT-2, Llama 3, Qwen) write each byte as one letter of an alphabet of 256.
    """
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    added = {i: token.content for i, token in tokenizer.added_tokens_decoder.items()}
    lengths = np.zeros(max(len(tokenizer), max(added, default=0) + 1), dtype=np.int64)
    for token, i in tokenizer.get_vocab().items():
        if i in added:
            lengths[i] = len(added[i].encode())
        elif alphabet.issuperset(token):
            lengths[i] = len(token)
        else:
            return None
    return lengths


class TokenPlaces:
    """Positions of the tokens of one text by their lengths in bytes, valid only if `fits`.

    Lengths and text disagree if the tokenizer normalises the text, or adds or drops spaces.
    """

    def __init__(self, text: str, ids_N: NDArray[Any], lengths_V: NDArray[Any]) -> None:
        self.text, self.is_ascii = text, text.isascii()
        self.raw = b"" if self.is_ascii else text.encode("utf-8", "surrogatepass")
        self.ends_N = lengths_V[ids_N].cumsum()
        size = len(text) if self.is_ascii else len(self.raw)
        self.fits = len(ids_N) > 0 and int(self.ends_N[-1]) == size

    def character_end(self, i: int) -> int:
        """End of token i, in characters."""
        end = int(self.ends_N[i])
        return end if self.is_ascii else len(self.raw[:end].decode("utf-8", "ignore"))

    def tokens_of(self, begin: int, end: int) -> tuple[int, int]:
        """Range of the tokens that hold any of the characters begin .. end-1 (end > begin)."""
        if not self.is_ascii:
            begin, end = (len(self.text[:x].encode("utf-8", "surrogatepass")) for x in (begin, end))
        # the first token that ends after `begin`, and the first that begins at `end` or after it
        first = int(np.searchsorted(self.ends_N, begin, side="right"))
        return first, int(np.searchsorted(self.ends_N, end, side="left")) + 1


class TokenOffsets:
    """Like `TokenPlaces`, from the tokenizer's own offsets: works for every tokenizer, but is slower."""

    fits = True

    def __init__(self, encoding: Any) -> None:
        self.offsets_N2 = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)

    def character_end(self, i: int) -> int:
        """End of token i, in characters."""
        return int(self.offsets_N2[i, 1])

    def tokens_of(self, begin: int, end: int) -> tuple[int, int]:
        """Range of the tokens that hold any of the characters begin .. end-1 (end > begin)."""
        first = int(np.searchsorted(self.offsets_N2[:, 1], begin, side="right"))
        return first, max(first, int(np.searchsorted(self.offsets_N2[:, 0], end, side="left")))
