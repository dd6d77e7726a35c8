"""Checkpoints whose tokenizers have the tokens of the chat format."""

import json
from pathlib import Path

from tests.helpers.goldens import copy_golden

# Token ids of the golden case that nothing but their names distinguishes.
_RENAMED = {
    2: "\uff5cDSML\uff5c",
    379: "<\uff5cSystem\uff5c>",
    382: "<think>",
    383: "</think>",
}
EOS = 1
THINKING_END = 383


def make_chat_model(directory: Path, *, without: tuple[int, ...] = ()) -> Path:
    """Write a golden checkpoint that can chat.

    Args:
        directory: new folder.
        without: ids of _RENAMED that keep their old names.
    """
    copy_golden("text-quant", directory)
    path = directory / "tokenizer.json"
    raw = json.loads(path.read_text("utf-8"))
    for token in raw["added_tokens"]:
        if token["id"] in _RENAMED and token["id"] not in without:
            old, token["content"] = token["content"], _RENAMED[token["id"]]
            vocab = raw["model"]["vocab"]
            if old in vocab:
                vocab[token["content"]] = vocab.pop(old)
    path.write_text(json.dumps(raw), "utf-8")
    return directory
