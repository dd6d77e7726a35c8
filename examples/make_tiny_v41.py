"""Write `examples/tiny-v41/`: a small checkpoint with every mechanism of DeepSeek-V4.1-Flash.

    python examples/make_tiny_v41.py [--output DIR]

The weights are random, the format is the official one: FP8 with 32x32 scales, FP4 experts, FP8
Engram tables, BF16 and F32 for the rest, an index and two shards. The tokenizer is a byte-level BPE
trained on `corpus.txt`. The same versions of tokenizers and safetensors write the same bytes on
every machine: numbers come from the integers of PCG64 and meet only operations that IEEE 754 rounds
in one way.
"""

import argparse
import json
import math
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
from safetensors.torch import save
from tokenizers import Regex, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor

import model

HERE = Path(__file__).resolve().parent
DEFAULT_OUTPUT = HERE / "tiny-v41"
CORPUS = HERE / "corpus.txt"

SEED = 41
NUM_SHARDS = 2
VOCAB_SIZE = 1024
FIRST_TOKENS = ("<|bos|>", "<|eos|>", "<|pad|>")  # ids 0, 1, 2 as in the release
LAST_TOKENS = ("<|noise|>", "<|image|>")
GROUP = 32  # side of an FP8 block, length of an FP4 or Engram group
FP8_MAX, FP4_MAX = 448.0, 6.0

TEXT_CONFIG: dict[str, Any] = {
    "model_type": "deepseek_v41_text",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "qk_rope_head_dim": 32,
    "q_lora_rank": 64,
    "o_groups": 2,
    "o_lora_rank": 32,
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "rms_norm_eps": 1e-20,
    "sliding_window": 16,
    "max_position_embeddings": 8192,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    # 8192 positions, of which plain rotary embedding would cover 512; the ramp is pairs 2 to 6.
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 16,
        "beta_fast": 16,
        "beta_slow": 1,
        "original_max_position_embeddings": 512,
    },
    # Two window layers, two ratio-2 sources, one ratio-1 source: layers 3 and 6 reuse a selection,
    # layer 7 selects inside the candidates of layer 5. The last entry is the draft block's.
    "compress_ratios": [0, 0, 2, 2, 2, 1, 1, 1, 0],
    "kv_source_layer_ids": [2, 4, 5],
    "index_source_layer_ids": [2, 4, 5, 7],
    "index_n_heads": 4,
    "index_head_dim": 64,
    "index_topk": 32,
    # 64 candidate entries: they bind beyond 64 tokens, and are enough for index_topk even when the
    # newest block holds a single entry.
    "candidate_source_layer_id": 5,
    "candidate_topk_blocks": 8,
    "candidate_block_size": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 2.0,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "engram_layer_ids": [1, 4],
    "engram_vocab_size": 256,
    "engram_max_ngram_size": 4,
    "engram_n_heads": 2,
    "engram_head_dim": 32,
    "engram_pad_token_id": 2,
    "num_nextn_predict_layers": 1,
    "dspark_block_size": 3,
    "dspark_noise_token_id": VOCAB_SIZE - 2,
    "dspark_target_layer_ids": [6, 7],
    "dspark_markov_rank": 16,
    "dspark_n_routed_experts": 4,
    "dspark_num_experts_per_tok": 2,
    "tie_word_embeddings": False,
    "use_cache": True,
}

CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV41ForCausalLM"],
    "model_type": "deepseek_v41",
    "dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "image_token_id": VOCAB_SIZE - 1,
    "tie_word_embeddings": False,
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [GROUP, GROUP],
        "scale_fmt": "ue8m0",
        "expert_dtype": "fp4",
    },
}

README = """\
# tiny-v41

A checkpoint of the DeepSeek-V4.1-Flash architecture with random weights, in the official quantised
format: FP8 with 32x32 scales, FP4 experts, FP8 Engram tables, BF16 and F32 for the rest, an index
and {num_shards} shards. Every mechanism of the architecture is on: compression ratios 0, 2 and 1,
several key-value and index sources, candidates, two Engram layers, four residual streams, a draft
block. Its text is noise; what it is for is running the whole path on any machine.

The tokenizer is a byte-level BPE of {vocab_size} tokens, trained on `examples/corpus.txt`.

Every file here is written by

    python examples/make_tiny_v41.py

and never edited by hand. Seed {seed}, {num_tensors} tensors, {num_parameters:,} parameters.
"""

# A linear keeps the size of its input, times its factor here. Found by trial: loud branches make a
# token depend on all before it, but then a rounding that falls the other way in one fake quantiser
# changes the text, and no two implementations agree. The n-gram memory is exact, so it may be loud.
GAINS = {"wq_b": 1.5, "wo_b": 0.7, "w2": 0.5, "gate": 1.5}
# Mean and spread of what is no linear, by the end of the name; the first match counts.
VECTORS = {
    "engram.embed.weight": (0.0, 4.0),
    "embed.weight": (0.0, 2.0),
    "norm.weight": (1.0, 0.2),
    "q_weight": (1.0, 0.2),
    "k_weight": (1.0, 0.2),
    "attn_sink": (0.0, 1.0),
    "gate.bias": (0.0, 0.1),
    "hc_attn_scale": (0.8, 0.2),
    "hc_ffn_scale": (0.8, 0.2),
}
BLOCK_FACTORS = (0.25, 0.5, 0.75, 1.25, 1.75)  # spread the scales over several powers of two
LOGIT_SPREAD = 3.0
RARE_FACTOR = 0.3  # on logits of tokens that are no text by themselves, so that few are chosen


def train_tokenizer(text: str) -> tokenizers.Tokenizer:
    """Train a byte-level BPE of VOCAB_SIZE tokens."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}{1,3}"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(LAST_TOKENS),
        special_tokens=list(FIRST_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text], trainer)
    tokenizer.add_special_tokens(list(LAST_TOKENS))
    bos = FIRST_TOKENS[0]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, 0)]
    )
    return tokenizer


def tokenizer_config() -> dict[str, Any]:
    """Return what other programs need to know to use the tokenizer as this engine does."""
    bos, eos, pad = FIRST_TOKENS
    return {
        "add_bos_token": True,
        "add_eos_token": False,
        "bos_token": bos,
        "clean_up_tokenization_spaces": False,
        "eos_token": eos,
        "model_max_length": TEXT_CONFIG["max_position_embeddings"],
        "pad_token": pad,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def complete_config(directory: Path) -> dict[str, Any]:
    """Add the Engram fields that follow from the others and from the tokenizer in `directory`."""
    primes = model.hash_primes(
        len(TEXT_CONFIG["engram_layer_ids"]),
        TEXT_CONFIG["engram_vocab_size"],
        TEXT_CONFIG["engram_max_ngram_size"],
        TEXT_CONFIG["engram_n_heads"],
    )
    rows = [sum(sum(heads) for heads in sizes) for sizes in primes]
    text = TEXT_CONFIG | {"engram_num_embeddings": rows, "engram_compressed_vocab_size": VOCAB_SIZE}
    config = model.ModelConfig.from_dict(CONFIG | {"text_config": text})
    tokenizer = model.Tokenizer.from_dir(directory, config)
    try:
        model.engram_token_map(tokenizer, config)
    except model.CompressedVocabMismatch as mismatch:  # it counts the keys, which is what we ask
        text["engram_compressed_vocab_size"] = mismatch.fields["got"]
    return CONFIG | {"text_config": text}


def random_words(name: str, count: int) -> np.ndarray:
    """Return uniform uint16 numbers that depend on the seed and the tensor's name alone."""
    source = np.random.PCG64([SEED, zlib.crc32(name.encode())])
    raw = source.random_raw(-(-count // 4)).astype("<u8")
    return raw.view("<u2")[:count].astype(np.int32)


def normal(name: str, shape: tuple[int, ...]) -> Tensor:
    """Return nearly normal float32 numbers of mean 0 and deviation 1: sums of four uniform ones."""
    count = math.prod(shape)
    total = random_words(name, 4 * count).reshape(count, 4).sum(1) - 2 * 0xFFFF
    return torch.from_numpy(total).float().mul(math.sqrt(3.0) / 2**16).view(shape)


def block_factors(name: str, shape: tuple[int, ...], is_square: bool) -> Tensor:
    """Draw one of BLOCK_FACTORS for each quantisation block, in the shape of the weight."""
    rows, columns = shape[0] // GROUP if is_square else shape[0], shape[1] // GROUP
    words = torch.from_numpy(random_words(f"{name} blocks", rows * columns)).view(rows, columns)
    factors = torch.tensor(BLOCK_FACTORS)[words % len(BLOCK_FACTORS)]
    factors = factors.repeat_interleave(GROUP, 1)
    return factors.repeat_interleave(GROUP, 0) if is_square else factors


def hyper_connection_base(noise: Tensor) -> Tensor:
    """Return base logits of pre, post and comb: streams differ, and each mostly stays itself."""
    streams = TEXT_CONFIG["hc_mult"]
    stay = 2.0 * torch.eye(streams).flatten()
    return torch.cat([torch.zeros(2 * streams), stay]) + noise


def values_of(entry: model.TensorEntry, rare_ids: list[int]) -> Tensor:
    """Return the float32 values of a weight before quantisation."""
    noise = normal(entry.name, entry.shape)
    if entry.name.endswith("_base"):
        return hyper_connection_base(noise)
    if entry.name == "head.weight":
        noise[rare_ids] *= RARE_FACTOR
        return noise * (LOGIT_SPREAD / math.sqrt(entry.shape[1]))
    for ending, (mean, spread) in VECTORS.items():
        if entry.name.endswith(ending):
            return mean + spread * noise
    part = entry.name.removesuffix(".weight").rpartition(".")[2]
    return noise * (GAINS.get(part, 1.0) / math.sqrt(entry.shape[-1]))


def quantize(entry: model.TensorEntry, values: Tensor) -> dict[str, Tensor]:
    """Return the stored tensors of a quantised weight: codes and E8M0 scales."""
    is_square = entry.kind == "fp8"
    values = values * block_factors(entry.name, entry.shape, is_square)
    height = GROUP if is_square else 1
    blocks = values.abs().unflatten(0, (-1, height)).unflatten(2, (-1, GROUP)).amax((1, 3))
    limit = FP4_MAX if entry.kind == "fp4" else FP8_MAX
    mantissa, exponent = torch.frexp(blocks / limit)
    exponent = exponent - (mantissa == 0.5).int() + 127  # the power of two above, biased
    scale = (exponent << 23).view(torch.float32)
    scaled = values / scale.repeat_interleave(height, 0).repeat_interleave(GROUP, 1)
    if entry.kind == "fp4":
        codes = fp4_codes(scaled)
    else:
        codes = scaled.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    stored_scale = exponent.to(torch.uint8).view(torch.float8_e8m0fnu)
    return {entry.name: codes, entry.scale_name: stored_scale}


def fp4_codes(values: Tensor) -> Tensor:
    """Round to E2M1 and pack two codes a byte, the even channel in the low half."""
    middles = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])  # of 0, .5, 1, 1.5, 2, 3, 4, 6
    codes = torch.bucketize(values.abs(), middles) + 8 * (values < 0)
    low, high = codes.unflatten(-1, (-1, 2)).unbind(-1)
    return (low | high << 4).to(torch.uint8).view(torch.int8)


def stored_tensors(entry: model.TensorEntry, rare_ids: list[int]) -> dict[str, Tensor]:
    """Return what the files hold for one weight."""
    values = values_of(entry, rare_ids)
    if entry.is_quantized:
        return quantize(entry, values)
    return {entry.name: values.to(torch.bfloat16 if entry.kind == "bf16" else torch.float32)}


def rare_tokens(tokenizer: model.Tokenizer) -> list[int]:
    """Return the ids of special tokens, control characters and pieces of characters."""
    texts = tokenizer.vocabulary_texts()
    special = {*FIRST_TOKENS, *LAST_TOKENS}
    return [i for i, text in enumerate(texts) if text in special or not is_plain(text)]


def is_plain(text: str) -> bool:
    """Tell whether a token is text that a terminal shows as it is."""
    return "\ufffd" not in text and text.replace("\n", " ").isprintable()


def write_weights(directory: Path, config: model.ModelConfig, rare_ids: list[int]) -> str:
    """Write the shards and their index; return the README, which counts what they hold."""
    table = model.tensor_table(config).values()
    shard_bytes = -(-sum(entry.num_bytes for entry in table) // NUM_SHARDS)
    shards: list[dict[str, Tensor]] = [{} for _ in range(NUM_SHARDS)]
    done = 0
    for entry in table:
        shards[done // shard_bytes] |= stored_tensors(entry, rare_ids)
        done += entry.num_bytes
    weight_map = {}
    for number, tensors in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{NUM_SHARDS:05d}.safetensors"
        (directory / name).write_bytes(save(tensors, metadata={"format": "pt"}))
        weight_map |= dict.fromkeys(tensors, name)
    index = {"metadata": {"total_size": done}, "weight_map": dict(sorted(weight_map.items()))}
    write_json(directory / "model.safetensors.index.json", index)
    return README.format(
        seed=SEED,
        num_shards=NUM_SHARDS,
        vocab_size=VOCAB_SIZE,
        num_tensors=len(weight_map),
        num_parameters=sum(math.prod(entry.shape) for entry in table),
    )


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write JSON as people read it, the same bytes on every system."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8", newline="\n")


def write_checkpoint(directory: Path) -> None:
    """Write all files of the checkpoint, replacing what is there."""
    directory.mkdir(parents=True, exist_ok=True)
    text = CORPUS.read_text(encoding="utf-8")
    serialized = train_tokenizer(text).to_str()
    path = directory / "tokenizer.json"
    path.write_text(serialized + "\n", encoding="utf-8", newline="\n")
    write_json(directory / "tokenizer_config.json", tokenizer_config())
    write_json(directory / "config.json", complete_config(directory))
    config = model.ModelConfig.from_dir(directory)
    tokenizer = model.Tokenizer.from_dir(directory, config)
    readme = write_weights(directory, config, rare_tokens(tokenizer))
    (directory / "README.md").write_text(readme, encoding="utf-8", newline="\n")
    model.Checkpoint.open(directory).validate(config)


def main() -> None:
    """Read the arguments and write the checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT, metavar="DIR")
    directory = parser.parse_args().output
    write_checkpoint(directory)
    size = sum(path.stat().st_size for path in directory.iterdir())
    print(f"{directory}: {size:,} bytes")


if __name__ == "__main__":
    main()
