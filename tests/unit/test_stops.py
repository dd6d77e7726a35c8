"""Stop strings and growing text, against a definition that decodes everything for every token."""

import random
import string
from pathlib import Path

import pytest

from model.tokenizer import Tokenizer
from runtime.config import SamplingParams
from runtime.stops import OutputText
from tests.helpers.goldens import golden_dir

TINY = Path(__file__).resolve().parents[2] / "examples" / "tiny-v41"
DIRECTORIES = {"golden": golden_dir("text-quant"), "tiny": TINY}
NUM_CASES = 500  # random ones of each tokenizer
REPLACEMENT = "\ufffd"
TEXTS = (
    "h\u00e9llo w\u00f6rld, na\u00efve caf\u00e9\n",
    "\u4f60\u597d\uff0c\u4e16\u754c\u3002\u4f60\u597d",
    "\U0001f389\U0001f1e9\U0001f1ea \U0001f469\u200d\U0001f4bb go",
    "abcabcabd\r\n\r\nabab",
    "the end. The end.\n\nUser: \u0939\u093f",
)


@pytest.fixture(scope="module", params=DIRECTORIES)
def tokenizer(request):
    return Tokenizer.from_dir(DIRECTORIES[request.param])


def whole_characters(text):
    return text[:-1] if text.endswith(REPLACEMENT) else text


def definition(tokenizer, ids, params):
    """Return text, number of tokens and stop string of an output that would be all of `ids`."""
    known = ""
    for count in range(1, len(ids) + 1):
        before = known
        known = whole_characters(tokenizer.decode(ids[:count], params.skip_special_tokens))
        if count < params.min_tokens:
            continue
        met = [
            (start + len(stop), start, stop)
            for stop in params.stop
            for start in range(len(known))
            if known.startswith(stop, start) and start + len(stop) > len(before)
        ]
        if met:
            end, start, stop = min(met)
            cut = end if params.include_stop_str_in_output else start
            return known[:cut], count, stop
    return tokenizer.decode(ids, params.skip_special_tokens), len(ids), None


def run(tokenizer, ids, params):
    """Return the same from OutputText, checking what a stream of it would show."""
    output = OutputText(tokenizer, params)
    streamed, count = "", 0
    for count, token_id in enumerate(ids, 1):
        ended = output.append(token_id)
        assert ended == (output.stop is not None)
        if ended:
            break
        decoded = tokenizer.decode(ids[:count], params.skip_special_tokens)
        assert output.text == whole_characters(decoded)
        if count % 3:
            streamed += output.take()
        assert output.text.startswith(streamed)
    output.finish()
    assert (streamed + output.take(), output.take()) == (output.text, "")
    output.finish()
    return output.text, count, output.stop


def random_ids(tokenizer, rng):
    """Return 1 to 30 ids: of text, cut anywhere, of lone bytes, of special tokens, of anything."""
    ids = []
    for _ in range(rng.randint(1, 4)):
        kind = rng.randrange(4)
        if kind < 2:
            piece = tokenizer.encode(rng.choice(TEXTS))[1:]
            begin = rng.randrange(len(piece))
            ids += piece[begin : begin + rng.randint(1, 9)]
        elif kind == 2:
            ids += [rng.randrange(tokenizer.vocab_size) for _ in range(rng.randint(1, 4))]
        else:
            ids += rng.choices((0, 1, 2, tokenizer.vocab_size - 1), k=rng.randint(1, 2))
    return ids[:30]


def random_stops(text, rng):
    """Return stop strings: pieces of the text, others that overlap them, others still."""
    stops = []
    for _ in range(rng.randint(1, 4)):
        begin = rng.randrange(len(text) or 1)
        piece = text[begin : begin + rng.choice((1, 2, 3, 5, 9, 14))].strip(REPLACEMENT)
        kind = rng.randrange(4)
        if kind == 0:
            piece += rng.choice("xe\u00e9\u4f60\n ")
        elif kind == 1:
            stops.append(piece[:-1])
            stops.append(piece[1:])
        elif kind == 2:
            stops.append("".join(rng.choices(string.ascii_lowercase, k=2)))
        stops.append(piece)
    return tuple(stop for stop in stops if stop)


def random_case(tokenizer, rng):
    """Return the ids of a prompt's tail, of an output, and parameters."""
    ids = random_ids(tokenizer, rng)
    skips_special = rng.random() < 0.6
    cut = rng.randrange(len(ids)) if rng.random() < 0.4 else 0
    # From prompt and output together, so that some stop strings lie in the prompt or on the border.
    stops = random_stops(tokenizer.decode(ids, skips_special), rng)
    params = SamplingParams(
        stop=stops,
        min_tokens=rng.choice((0, 0, 0, 1, 2, 5)),
        include_stop_str_in_output=rng.random() < 0.3,
        skip_special_tokens=skips_special,
    )
    return ids[:cut], ids[cut:], params


def num_spanned(tokenizer, ids, count, stop, params):
    """Return over how many tokens the stop string that the last of `count` ones completes runs."""
    skips = params.skip_special_tokens
    for first in range(count - 1, -1, -1):
        if stop in tokenizer.decode(ids[first:count], skips):
            return count - first
    raise AssertionError(stop)


def test_random_outputs_end_where_the_definition_says(tokenizer):
    seen = dict.fromkeys(
        ("ended", "3 tokens", "split character", "prompt", "several", "late", "special"), 0
    )
    for seed in range(NUM_CASES):
        rng = random.Random(seed)
        prompt, ids, params = random_case(tokenizer, rng)
        expected = definition(tokenizer, ids, params)
        assert run(tokenizer, ids, params) == expected, seed
        text, count, stop = expected
        skips = params.skip_special_tokens
        shown = tokenizer.decode(ids, skips)
        joined = tokenizer.decode(prompt + ids, skips)
        seen["prompt"] += any(s in joined and s not in shown for s in params.stop)
        if stop is None:
            seen["late"] += any(s in shown for s in params.stop)
            assert text == shown
            continue
        seen["ended"] += 1
        seen["3 tokens"] += num_spanned(tokenizer, ids, count, stop, params) >= 3
        alone = "".join(tokenizer.decode([i], skips) for i in ids[:count])
        seen["split character"] += stop not in alone
        seen["several"] += sum(s in tokenizer.decode(ids[:count], skips) for s in params.stop) > 1
        seen["special"] += not skips and any("<" in s and s in shown for s in params.stop)
    assert min(seen.values()) >= 5, seen
    assert NUM_CASES - seen["ended"] >= 50, seen


def test_every_order_of_bytes_is_decoded_as_a_whole(tokenizer):
    """Lone bytes, valid or not, in random order; special tokens in between."""
    singles = [
        token_id
        for token_id in range(tokenizer.vocab_size)
        if len(tokenizer.raw_token(token_id) or "") == 1
    ]
    assert len(singles) == 256
    rng = random.Random(5)
    broken = [i for i in singles if tokenizer.decode([i]) == REPLACEMENT]
    for _ in range(150):
        ids = rng.choices(broken + singles + [1, 2], k=rng.randint(1, 40))
        run(tokenizer, ids, SamplingParams(skip_special_tokens=rng.random() < 0.5))


def test_the_window_stays_short(tokenizer):
    """The cost of a token does not grow with the output, whatever its bytes are."""
    sizes = []

    class Counting:
        def decode(self, ids, skip_special_tokens=True):
            sizes.append(len(ids))
            return tokenizer.decode(ids, skip_special_tokens)

    rng = random.Random(6)
    byte_ids = [i for i in range(tokenizer.vocab_size) if REPLACEMENT in tokenizer.decode([i])]
    outputs = [
        rng.choices(byte_ids, k=400),
        tokenizer.encode(REPLACEMENT)[1:] * 100,
        [byte_ids[-1], *[1] * 300],  # an unfinished character, then tokens without text
        tokenizer.encode("\u4f60\U0001f389" * 60)[1:],
    ]
    for ids in outputs:
        sizes.clear()
        run_on = OutputText(Counting(), SamplingParams())
        for token_id in ids:
            run_on.append(token_id)
        run_on.finish()
        assert run_on.text == tokenizer.decode(ids)
        assert max(sizes) <= 5
        assert len(sizes) <= 2 * len(ids)


class Spelled:
    """A tokenizer whose tokens are written out; ids count them."""

    def __init__(self, *tokens):
        self.tokens = [t if isinstance(t, bytes) else t.encode() for t in tokens]

    def decode(self, ids, skip_special_tokens=True):
        return b"".join(self.tokens[i] for i in ids).decode("utf-8", "replace")


@pytest.mark.parametrize(
    ("tokens", "stop", "text", "met"),
    [
        (["a", "b", "c"], ("abc",), "", "abc"),
        (["xa", "b", "cd"], ("abc",), "x", "abc"),
        (["abcd"], ("bc", "abcd"), "a", "bc"),  # complete first, though it begins later
        (["a", "bc", "d"], ("bc", "abcd"), "a", "bc"),  # and in whatever tokens
        (["abc"], ("c", "bc", "abc"), "", "abc"),  # complete together: the longest
        (["aa", "ab"], ("aab",), "a", "aab"),  # overlaps itself
        (["ab", "ab", "ac"], ("abac",), "ab", "abac"),
        (["a", b"\xe4\xbd", b"\xa0"], ("\u4f60",), "a", "\u4f60"),
        ([b"\xf0\x9f", b"\x8e", b"\x89!", "?"], ("!",), "\U0001f389", "!"),
        ([b"\xe4", "b"], ("b",), "\ufffd", "b"),
        (["e", "\u0301"], ("\u00e9",), "e\u0301", None),  # characters, not their looks
        (["A"], ("a",), "A", None),
        (["a", "\ufffd", "b"], ("\ufffdb",), "a", "\ufffdb"),
        (["end", "\r", "\n", "x"], ("\r\n",), "end", "\r\n"),
        (["end\r\nx\ry\n"], ("z",), "end\r\nx\ry\n", None),
    ],
)
def test_small_cases(tokens, stop, text, met):
    tokenizer, ids = Spelled(*tokens), list(range(len(tokens)))
    params = SamplingParams(stop=stop)
    found = run(tokenizer, ids, params)
    assert (found[0], found[2]) == (text, met)
    assert found == definition(tokenizer, ids, params)


def test_text_behind_the_stop_string_is_cut_even_if_that_is_kept():
    params = SamplingParams(stop="bc", include_stop_str_in_output=True)
    assert run(Spelled("ab", "cd"), [0, 1], params) == ("abc", 2, "bc")


@pytest.mark.parametrize(
    ("min_tokens", "text", "count"),
    [(0, "", 1), (1, "", 1), (2, "x", 2), (3, "xx", 4), (4, "xx", 4), (5, "xxbxy", 6)],
)
def test_before_min_tokens_a_stop_string_is_text(min_tokens, text, count):
    params = SamplingParams(stop=("x", "bx"), min_tokens=min_tokens)
    tokenizer, ids = Spelled("x", "x", "b", "x", "y", "x"), list(range(6))
    found = run(tokenizer, ids, params)
    assert found[:2] == (text, count)
    assert found == definition(tokenizer, ids, params)


def test_a_stream_waits_where_a_stop_string_may_begin():
    output = OutputText(Spelled("say s", "t", "ep", " st", "op"), SamplingParams(stop="stop"))
    taken = []
    for token_id in range(5):
        output.append(token_id)
        taken.append(output.take())
    assert taken == ["say ", "", "step", " ", ""]
    assert (output.text, output.stop) == ("say step ", "stop")


def test_a_stream_does_not_wait_for_a_stop_string_that_is_kept():
    params = SamplingParams(stop="stop", include_stop_str_in_output=True)
    output = OutputText(Spelled("say s", "t"), params)
    output.append(0)
    assert output.take() == "say s"


def test_what_never_became_a_character_shows_only_at_the_end():
    output = OutputText(Spelled("a", b"\xe4\xbd"), SamplingParams())
    assert not output.append(0)
    assert not output.append(1)
    assert output.text == "a"
    output.finish()
    assert output.text == "a\ufffd"


def test_without_a_token_the_text_is_empty():
    output = OutputText(Spelled(), SamplingParams(stop="a"))
    assert (output.text, output.take()) == ("", "")
    output.finish()
    assert output.text == ""
