"""Text to token ids and back, and the map from token ids to the Engram's normalised vocabulary."""

from collections.abc import Sequence
from pathlib import Path

import tokenizers
import torch
from tokenizers import Regex, normalizers

from model.config import ModelConfig
from model.errors import (
    CompressedVocabMismatch,
    TokenIdOutOfRange,
    TokenizerNotFound,
    TokenizerUnreadable,
    UnencodableText,
    VocabSizeMismatch,
)

TOKENIZER_FILE = "tokenizer.json"

_REPLACEMENT = "\ufffd"  # stands for bytes that are no whole character
_SENTINEL = "\ue000"  # private use; keeps a lone space from being stripped


class Tokenizer:
    """The tokenizer of a checkpoint; every encoded text starts with one begin-of-sequence token.

    Args:
        tokenizer: the loaded tokenizer, without truncation and padding.
        bos_token_id: id that starts every sequence.
        path: file it came from, for messages.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, bos_token_id: int, path: Path) -> None:
        self._tokenizer = tokenizer
        self.bos_token_id = bos_token_id
        self.path = path
        self.vocab_size: int = tokenizer.get_vocab_size(with_added_tokens=True)

    @classmethod
    def from_dir(cls, path: str | Path, config: ModelConfig | None = None) -> "Tokenizer":
        """Load `tokenizer.json` of a checkpoint directory and compare it with the config.

        Args:
            path: checkpoint directory.
            config: its config; None reads `config.json` beside the tokenizer.
        Raises:
            TokenizerNotFound, TokenizerUnreadable: no usable file.
            VocabSizeMismatch: it is not the tokenizer of this model.
            ConfigError: `config.json` was needed and is faulty.
        """
        if config is None:
            config = ModelConfig.from_dir(path)
        file = Path(path) / TOKENIZER_FILE
        if not file.is_file():
            raise TokenizerNotFound(path=file, got="no such file")
        try:
            loaded = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # noqa: BLE001 - the library raises bare Exception for any fault
            raise TokenizerUnreadable(path=file, detail=str(error)) from error
        loaded.no_truncation()
        loaded.no_padding()
        tokenizer = cls(loaded, config.bos_token_id, file)
        expected = config.text_config.vocab_size
        highest = max(loaded.get_vocab(with_added_tokens=True).values(), default=-1)
        if tokenizer.vocab_size != expected or highest >= expected:
            got = f"{tokenizer.vocab_size}, ids up to {highest}"
            raise VocabSizeMismatch(path=file, expected=expected, got=got)
        return tokenizer

    def encode(self, text: str) -> list[int]:
        """Encode a text, with one begin-of-sequence token first.

        A text that spells the begin-of-sequence token at its start keeps that one; names of special
        tokens in the text become those tokens. The empty text gives the begin-of-sequence token
        alone.

        Raises:
            UnencodableText: the text holds a lone surrogate.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            got = f"U+{ord(text[error.start]):04X}"
            raise UnencodableText(position=error.start, got=got) from error
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        if ids and ids[0] == self.bos_token_id:
            return ids
        return [self.bos_token_id, *ids]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Decode token ids; bytes that are no whole character become U+FFFD.

        Raises:
            TokenIdOutOfRange: an id the vocabulary does not have.
        """
        for index, token_id in enumerate(ids):
            if not 0 <= token_id < self.vocab_size:
                raise TokenIdOutOfRange(got=token_id, index=index, last=self.vocab_size - 1)
        return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def vocabulary_texts(self) -> list[str]:
        """Decode every id on its own, special tokens kept; index = id."""
        singles = [[token_id] for token_id in range(self.vocab_size)]
        return self._tokenizer.decode_batch(singles, skip_special_tokens=False)

    def raw_token(self, token_id: int) -> str | None:
        """Return the spelling of an id in the vocabulary file, None for an id it does not have."""
        return self._tokenizer.id_to_token(token_id)


def engram_token_map(tokenizer: Tokenizer, config: ModelConfig) -> torch.Tensor:
    """Map every token id to its id in the Engram's normalised vocabulary.

    Tokens whose texts differ in case, accents, compatibility forms or white space share an id; a
    token that is a piece of a character is known by its raw spelling. New ids are handed out in
    order of first appearance.

    Args:
        tokenizer: the tokenizer of the checkpoint.
        config: its config.
    Returns:
        int32 [vocab_size], values 0 to engram_compressed_vocab_size - 1.
    Raises:
        CompressedVocabMismatch: the number of distinct keys is not that of the config.
    Source: DeepSeek-V4.1-Flash release, Engram token compression.
    """
    normalizer = _engram_normalizer()
    keys: dict[str, int] = {}
    mapped: list[int] = []
    for token_id, text in enumerate(tokenizer.vocabulary_texts()):
        if _REPLACEMENT in text:
            key = tokenizer.raw_token(token_id) or text
        else:
            key = normalizer.normalize_str(text) or text
        mapped.append(keys.setdefault(key, len(keys)))
    expected = config.text_config.engram_compressed_vocab_size
    if len(keys) != expected:
        raise CompressedVocabMismatch(path=tokenizer.path, expected=expected, got=len(keys))
    return torch.tensor(mapped, dtype=torch.int32)


def _engram_normalizer() -> normalizers.Sequence:
    # The library's own steps, not Python's: they differ in what counts as an accent, as lower case
    # and as white
    # space, and one differing key shifts the ids of all later ones.
    return normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"^ $"), _SENTINEL),
            normalizers.Strip(),
            normalizers.Replace(_SENTINEL, " "),
        ]
    )
