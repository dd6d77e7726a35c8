"""The text of an output while it grows: decoded token by token, searched for stop strings.

What counts as met:

- The text is that of the output alone; no stop string begins in the prompt.
- Only whole characters are searched. A character whose bytes are spread over tokens is one once
  its last byte is there; a trailing U+FFFD may still become one and waits for the next token.
- The stop string that is complete first ends the output, and the longest of several that end at
  the same character. So it does not matter how the text is split into tokens.
- With `min_tokens` a stop string must end in the text that the token of that number adds, or later.
"""

import io
from typing import TYPE_CHECKING

from runtime.config import SamplingParams

if TYPE_CHECKING:
    from model.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"  # what decoders put for bytes that are no character, or not yet


class OutputText:
    """The decoded output of one request.

    The cost of a token depends on the length of the stop strings, not on that of the output.

    Args:
        tokenizer: a byte-level one: it decodes the bytes of its tokens put together.
        params: stop, include_stop_str_in_output, min_tokens and skip_special_tokens are used.

    Attributes:
        stop: the stop string that ended the output, None so far.
    """

    def __init__(self, tokenizer: "Tokenizer", params: SamplingParams) -> None:
        self.stop: str | None = None
        self._params = params
        self._decoder = _Decoder(tokenizer, params.skip_special_tokens)
        self._longest = max(map(len, params.stop), default=0)
        self._buffer = io.StringIO()  # written at its end
        self._length = 0
        self._num_tokens = 0
        self._num_taken = 0
        self._is_finished = False

    @property
    def text(self) -> str:
        """The text so far, whole characters only; the complete output once it is finished."""
        return self._buffer.getvalue()

    def append(self, token_id: int) -> bool:
        """Add a token.

        Returns:
            whether it completed a stop string; the text is cut and finished then.
        """
        assert not self._is_finished, "the output has ended"
        self._num_tokens += 1
        new = self._decoder.push(token_id)
        if not new:
            return False
        old_length = self._length
        self._write(new)
        if self._num_tokens < self._params.min_tokens or not self._longest:
            return False
        return self._cut_at_stop(old_length)

    def finish(self) -> None:
        """End the output; bytes that never became a character turn into U+FFFD. Again is fine."""
        if not self._is_finished:
            self._is_finished = True
            self._write(self._decoder.rest())

    def take(self) -> str:
        """Return the text that came since the last call, for streams.

        Text that may turn out to begin a stop string waits until that is known: what was returned
        is never taken back, and after `finish` all that was returned makes up `text`.
        """
        end = self._length if self._is_finished else self._length - self._num_withheld()
        taken = self._read(self._num_taken, end)
        self._num_taken = max(self._num_taken, end)
        return taken

    def _cut_at_stop(self, old_length: int) -> bool:
        """Search for stop strings that end behind the old text; cut the text at the first."""
        begin = max(0, old_length - self._longest + 1)
        text = self._read(begin, self._length)
        found = []
        for stop in self._params.stop:
            start = text.find(stop, max(0, old_length - begin - len(stop) + 1))
            if start >= 0:
                found.append((start + len(stop), start, stop))
        if not found:
            return False
        end, start, self.stop = min(found)
        self._length = begin + (end if self._params.include_stop_str_in_output else start)
        self._buffer.truncate(self._length)
        self._is_finished = True
        return True

    def _num_withheld(self) -> int:
        """Return the length of the longest end of the text that begins a stop string."""
        if self._params.include_stop_str_in_output or not self._longest:
            return 0
        text = self._read(max(0, self._length - self._longest + 1), self._length)
        lengths = (
            length
            for stop in self._params.stop
            for length in range(1, min(len(stop), len(text) + 1))
            if text.endswith(stop[:length])
        )
        return max(lengths, default=0)

    def _write(self, text: str) -> None:
        self._buffer.seek(self._length)
        self._length += self._buffer.write(text)

    def _read(self, begin: int, end: int) -> str:
        self._buffer.seek(begin)
        return self._buffer.read(max(0, end - begin))


class _Decoder:
    """Decode token by token, giving out characters that no later token can change.

    A window of recent tokens is decoded together with the new one. It begins with the token in
    which the last, perhaps unfinished character begins and holds at most the four tokens that its
    bytes can be spread over.
    """

    def __init__(self, tokenizer: "Tokenizer", skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skips_special = skip_special_tokens
        self._window: list[int] = []
        self._text = ""  # of the window; empty or ends in U+FFFD
        self._num_given = 0  # characters of it that are not new any more

    def push(self, token_id: int) -> str:
        """Add a token and return the characters that became certain."""
        window = [*self._window, token_id]
        text = self._decode(window)
        if text == self._text:  # more of the same unfinished character, or a token without text
            if text and self._decode([token_id]):
                self._window = window
            return ""
        new = text[self._num_given :]
        if not text.endswith(_REPLACEMENT):
            self._window, self._text, self._num_given = [], "", 0
            return new
        # The last character changed, so the one that is last now begins in this token. Bytes before
        # it may decode differently without their predecessors; they were given out.
        self._window, self._text = [token_id], self._decode([token_id])
        self._num_given = len(self._text) - 1
        return new[:-1]

    def rest(self) -> str:
        """Return what was held back."""
        return self._text[self._num_given :]

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, self._skips_special)
