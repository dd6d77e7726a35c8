"""Tokenizer and Engram token map."""

import json

import pytest
import torch

from model import errors
from model.config import ModelConfig
from model.tokenizer import Tokenizer, engram_token_map
from tests.helpers.goldens import CASES, copy_golden, golden_dir, golden_expected, golden_json

BOS = "<\uff5cbegin\u2581of\u2581sentence\uff5c>"


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_dir(golden_dir("text-fp32"))


@pytest.mark.parametrize("case", CASES)
def test_golden_token_map(case):
    config = ModelConfig.from_dir(golden_dir(case))
    mapped = engram_token_map(Tokenizer.from_dir(golden_dir(case), config), config)
    assert mapped.dtype == torch.int32
    assert torch.equal(mapped.long(), golden_expected(case)["engram.token_map"])


def write_vocabulary(directory, texts):
    """Write a model directory whose tokens 3.. decode to the given texts, as added tokens."""
    raw = golden_json("text-fp32")
    raw["text_config"] |= {"vocab_size": len(texts) + 3}
    added = [
        {"id": index, "content": text, "special": index < 3}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        for index, text in enumerate(["<bos>", "<eos>", "<pad>", *texts])
    ]
    model = {"type": "BPE", "vocab": {}, "merges": []}
    body = {"version": "1.0", "added_tokens": added, "model": model}
    (directory / "tokenizer.json").write_text(json.dumps(body))
    return raw


# Pairs that fall together, and one that does not, in the order of ids 3...
VOCABULARY = [
    ("Caf\u00e9", 3),
    ("cafe", 3),
    ("CAFE\u0301", 3),
    ("\ufb01", 4),  # compatibility ligature
    ("fi", 4),
    (" fi\t", 4),  # outer white space is stripped
    ("f\t\n i", 5),
    ("f i", 5),
    (" ", 6),  # a lone space stays
    ("\n\t ", 6),
    ("\u00a0", 6),  # compatibility form of a space
    ("\u0301", 7),  # accents alone leave nothing, so the text itself is the key
    ("\u0488", 8),  # an enclosing mark is an accent too
    ("a\u0488", 9),
    ("a", 9),
    ("\u0391\u03a3", 10),  # no final-sigma rule
    ("\u03b1\u03c3", 10),
    ("\u03b1\u03c2", 11),
    ("\u001c", 12),  # Python would strip this, the rules do not
    ("x\u001c", 13),
    ("x", 14),
    ("<BOS>", 0),  # lower case of a special token's own spelling
]


def test_token_map_rules(tmp_path):
    texts = [text for text, _ in VOCABULARY]
    raw = write_vocabulary(tmp_path, texts)
    raw["text_config"]["engram_compressed_vocab_size"] = 15
    config = ModelConfig.from_dict(raw)
    mapped = engram_token_map(Tokenizer.from_dir(tmp_path, config), config)
    assert mapped.tolist() == [0, 1, 2, *(key for _, key in VOCABULARY)]


def test_pieces_of_a_character_keep_their_spelling(tokenizer):
    texts = tokenizer.vocabulary_texts()
    pieces = [index for index, text in enumerate(texts) if "\ufffd" in text]
    assert len(pieces) > 100
    mapped = engram_token_map(tokenizer, ModelConfig.from_dir(golden_dir("text-fp32")))
    assert mapped[pieces].unique().numel() == len({tokenizer.raw_token(i) for i in pieces})


def test_compressed_vocabulary_of_another_size():
    raw = golden_json("text-fp32")
    raw["text_config"]["engram_compressed_vocab_size"] = 288
    config = ModelConfig.from_dict(raw)
    tokenizer = Tokenizer.from_dir(golden_dir("text-fp32"), config)
    with pytest.raises(errors.CompressedVocabMismatch, match="to 287 .* expected 288"):
        engram_token_map(tokenizer, config)


@pytest.mark.parametrize("text", ["", "Hello World", "a\u00e9\U0001f600 \n\n x", " "])
def test_encode_puts_one_bos_first_and_decodes_back(tokenizer, text):
    ids = tokenizer.encode(text)
    assert ids[0] == 0
    assert ids.count(0) == 1
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode(BOS + text) == ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == BOS + text


def test_bos_is_the_one_of_the_config():
    raw = golden_json("text-fp32") | {"bos_token_id": 383}
    tokenizer = Tokenizer.from_dir(golden_dir("text-fp32"), ModelConfig.from_dict(raw))
    assert tokenizer.encode("ab")[0] == 383


def test_bos_of_the_file_is_not_added_twice(tmp_path):
    directory = copy_golden("text-fp32", tmp_path)
    file = directory / "tokenizer.json"
    body = json.loads(file.read_text("utf-8"))
    body["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": BOS, "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {BOS: {"id": BOS, "ids": [0], "tokens": [BOS]}},
    }
    body["truncation"] = {
        "direction": "Right",
        "max_length": 2,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    file.write_text(json.dumps(body), "utf-8")
    changed = Tokenizer.from_dir(directory)
    expected = Tokenizer.from_dir(golden_dir("text-fp32")).encode("Hello World")
    assert changed.encode("Hello World") == expected
    assert changed.encode(BOS + "Hello World") == expected
    assert len(expected) > 3


def test_special_tokens_in_text_are_tokens(tokenizer):
    assert tokenizer.encode("a<\uff5cUser\uff5c>b")[2] == 380


def test_lone_surrogate(tokenizer):
    with pytest.raises(errors.UnencodableText, match=r"character 2 .* U\+D83D"):
        tokenizer.encode("ab\ud83d")


@pytest.mark.parametrize("token_id", [-1, 384, 2**40])
def test_decode_refuses_ids_outside(tokenizer, token_id):
    with pytest.raises(errors.TokenIdOutOfRange, match=f"id {token_id} at index 1: .* 0 to 383"):
        tokenizer.decode([5, token_id])


def test_missing_file(tmp_path):
    config = ModelConfig.from_dir(golden_dir("text-fp32"))
    with pytest.raises(errors.TokenizerNotFound, match=r"tokenizer\.json"):
        Tokenizer.from_dir(tmp_path, config)


def test_unreadable_file(tmp_path):
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"}')
    config = ModelConfig.from_dir(golden_dir("text-fp32"))
    with pytest.raises(errors.TokenizerUnreadable, match=r"tokenizer\.json"):
        Tokenizer.from_dir(tmp_path, config)


def test_vocabulary_of_another_size():
    raw = golden_json("text-fp32")
    raw["text_config"]["vocab_size"] = 400
    with pytest.raises(errors.VocabSizeMismatch, match="expected 400 .* got 384"):
        Tokenizer.from_dir(golden_dir("text-fp32"), ModelConfig.from_dict(raw))
