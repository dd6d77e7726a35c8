"""Weight files: what is refused, and that what is loaded holds the stored bytes.

Long because it holds one small damaged file for each error of the catalogue.
"""

import json
import os
import time
from dataclasses import replace

import pytest
import torch

from model import errors
from model.checkpoint import Checkpoint
from model.config import ModelConfig
from model.load import load_plan, load_weights
from model.shards import read_header
from model.weights import official_tensors, tensor_table
from tests.helpers.goldens import CASES, copy_golden, golden_dir, golden_json
from tests.helpers.production import production_config
from tests.helpers.raw_safetensors import (
    RawTensor,
    read_raw,
    write_header,
    write_raw,
    write_shards,
)

TORCH_DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.uint8,
    "I8": torch.uint8,
}
ITEM_BYTES = {"F32": 4, "BF16": 2, "F8_E4M3": 1, "F8_E8M0": 1, "I8": 1}
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]


def config_of(case):
    return ModelConfig.from_dir(golden_dir(case))


def golden_raw(case):
    return read_raw(golden_dir(case) / "model.safetensors")


def raw_bytes(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def refuse(directory, config, error, *parts):
    """Check that a directory is refused with this error, and that its message holds the parts."""
    with pytest.raises(error) as caught:
        Checkpoint.open(directory).validate(config)
    assert type(caught.value) is error
    message = str(caught.value)
    for part in (error.__name__, *parts):
        assert part in message, f"{part!r} not in {message!r}"


def refuse_tensors(tmp_path, tensors, error, *parts, case="text-quant"):
    write_raw(tmp_path / "model.safetensors", tensors)
    refuse(tmp_path, config_of(case), error, *parts)


# ---- what is loaded ----------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_every_text_tensor_holds_the_stored_bytes(case):
    config = config_of(case)
    checkpoint = Checkpoint.open(golden_dir(case))
    checkpoint.validate(config)
    weights = load_weights(checkpoint, config, dtype_policy="reference")
    seen = set()
    for name, stored in golden_raw(case).items():
        if name.startswith(("mtp.", "vision.", "aligner.", "image_")):
            continue
        head, separator, tail = name.partition(".ffn.experts.")
        if separator:
            expert, _, part = tail.partition(".")
            result = weights[f"{head}.ffn.experts.{part}"]
            assert result.shape[0] == config.text_config.n_routed_experts
            seen.add(f"{head}.ffn.experts.{part}")
            result = result[int(expert)]
        else:
            result = weights[name]
            seen.add(name)
        assert list(result.shape) == stored.shape, name
        assert result.dtype == TORCH_DTYPES[stored.dtype], name
        assert raw_bytes(result) == stored.data, name
    assert seen == set(weights)


@pytest.mark.parametrize("case", CASES)
def test_summary_counts_every_tensor_by_feature_and_group(case):
    config = config_of(case)
    summary = Checkpoint.open(golden_dir(case)).validate(config)
    stored = golden_raw(case)
    assert summary.num_tensors == len(stored)
    assert summary.num_bytes == sum(len(tensor.data) for tensor in stored.values())
    for sizes in (summary.by_group, summary.by_feature):
        assert sum(size.num_tensors for size in sizes.values()) == summary.num_tensors
        assert sum(size.num_bytes for size in sizes.values()) == summary.num_bytes
    draft = [tensor for name, tensor in stored.items() if name.startswith("mtp.")]
    size = summary.by_feature.get("draft")
    found = (size.num_tensors, size.num_bytes) if size else (0, 0)
    assert found == (len(draft), sum(len(tensor.data) for tensor in draft))
    assert ("vision" in summary.by_feature) == (case == "vision")
    experts = [
        t for name, t in stored.items() if name.startswith("layers.") and ".experts." in name
    ]
    assert summary.by_group["experts"].num_tensors == len(experts)


def dequantize_fp8(weight, scale):
    rows = torch.arange(weight.shape[0]) // 32
    columns = torch.arange(weight.shape[1]) // 32
    return weight.float() * torch.exp2(scale.float() - 127)[rows][:, columns]


def dequantize_fp4(packed, scale):
    table = torch.tensor(E2M1)
    values = torch.stack([table[(packed & 15).long()], table[(packed >> 4).long()]], dim=-1)
    return values.flatten(-2) * torch.exp2(scale.float() - 127).repeat_interleave(32, dim=-1)


def test_check_vectors_of_the_formats(tmp_path):
    # Bytes of the released checkpoint with the values they stand for, put where a loader must find
    # them.
    tensors = golden_raw("text-quant")
    fp8, fp4 = "layers.0.attn.wq_a", "layers.0.ffn.experts.4.w2"
    fp8_bytes = bytes.fromhex("d871f2797069f0e5")
    fp4_bytes = bytes.fromhex("a0a8ec4aadaf42aa")
    for name, head, scale in ((fp8, fp8_bytes, b"\x73"), (fp4, fp4_bytes, b"\x78")):
        weight, factors = tensors[f"{name}.weight"], tensors[f"{name}.scale"]
        tensors[f"{name}.weight"] = replace(weight, data=head + weight.data[len(head) :])
        tensors[f"{name}.scale"] = replace(factors, data=scale + factors.data[1:])
    write_raw(tmp_path / "model.safetensors", tensors)
    config = config_of("text-quant")
    weights = load_weights(Checkpoint.open(tmp_path), config, dtype_policy="official")
    values = dequantize_fp8(weights[f"{fp8}.weight"], weights[f"{fp8}.scale"])
    assert values[0, :8].tolist() == [
        -0.00390625,
        0.03515625,
        -0.0390625,
        0.0703125,
        0.03125,
        0.017578125,
        -0.03125,
        -0.0126953125,
    ]
    stack = "layers.0.ffn.experts.w2"
    values = dequantize_fp4(weights[f"{stack}.weight"], weights[f"{stack}.scale"])
    # In units of 2^-7, two values a byte.
    units = [0, -1, -0.0, -1, -2, -4, -1, 2, -3, -1, -6, -1, 1, 2, -1, -1]
    assert values[4, 0, :16].tolist() == [unit * 2.0**-7 for unit in units]


def test_stored_scales_differ_from_block_to_block():
    config = config_of("text-quant")
    weights = load_weights(
        Checkpoint.open(golden_dir("text-quant")), config, dtype_policy="official"
    )
    assert weights["layers.0.attn.wq_b.scale"].unique().numel() > 1
    experts = weights["layers.0.ffn.experts.w1.scale"]
    assert not torch.equal(experts[0], experts[1])


@pytest.mark.parametrize("policy", ["official", "reference"])
def test_dtype_policy_of_a_plain_checkpoint(policy):
    config = config_of("text-fp32")
    checkpoint = Checkpoint.open(golden_dir("text-fp32"))
    weights = load_weights(checkpoint, config, dtype_policy=policy)
    exact = load_weights(checkpoint, config, dtype_policy="reference")
    for name, weight in weights.items():
        part = name.rpartition(".")[2]
        stays = part.startswith("hc_") or part in ("attn_sink", "bias") or "engram.embed" in name
        is_float32 = stays or policy == "reference"
        assert weight.dtype == (torch.float32 if is_float32 else torch.bfloat16), name
        assert torch.equal(weight, exact[name].to(weight.dtype)), name


def test_plain_bf16_streams_become_float32_where_the_format_says_so(tmp_path):
    tensors = golden_raw("text-fp32")
    name = "layers.3.hc_attn_fn"
    values = torch.frombuffer(bytearray(tensors[name].data), dtype=torch.float32).bfloat16()
    tensors[name] = RawTensor("BF16", tensors[name].shape, raw_bytes(values))
    write_raw(tmp_path / "model.safetensors", tensors)
    config = config_of("text-fp32")
    checkpoint = Checkpoint.open(tmp_path)
    checkpoint.validate(config)
    weights = load_weights(checkpoint, config, dtype_policy="official")
    assert weights[name].dtype == torch.float32
    assert torch.equal(weights[name].flatten(), values.float())


@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize("num_shards", [1, 5])
def test_prefix_and_shards_change_nothing(tmp_path, prefix, num_shards):
    tensors = {prefix + name: tensor for name, tensor in golden_raw("text-quant").items()}
    write_shards(tmp_path, tensors, num_shards)
    config = config_of("text-quant")
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.validate(config).num_tensors == len(tensors)
    weights = load_weights(checkpoint, config, dtype_policy="official")
    plain = Checkpoint.open(golden_dir("text-quant"))
    expected = load_weights(plain, config, dtype_policy="official")
    assert set(weights) == set(expected)
    for name, weight in weights.items():
        assert raw_bytes(weight) == raw_bytes(expected[name]), name


def test_progress_reaches_the_total():
    config = config_of("text-quant")
    checkpoint = Checkpoint.open(golden_dir("text-quant"))
    calls = []
    load_weights(
        checkpoint, config, dtype_policy="official", progress=lambda *args: calls.append(args)
    )
    totals = {total for _, total in calls}
    done = [count for count, _ in calls]
    assert len(totals) == 1
    assert done == sorted(done)
    assert done[-1] == totals.pop()
    plan = load_plan(checkpoint, config, "official")
    assert done[-1] == sum(item.num_bytes for item in plan if not item.is_mapped)


def test_plan_gives_the_bytes_of_the_result():
    config = config_of("text-fp32")
    checkpoint = Checkpoint.open(golden_dir("text-fp32"))
    plan = load_plan(checkpoint, config, "official")
    weights = load_weights(checkpoint, config, dtype_policy="official")
    assert sum(item.num_bytes for item in plan) == sum(w.nbytes for w in weights.values())
    mapped = {item.name for item in plan if item.is_mapped}
    assert mapped == {"layers.1.engram.embed.weight", "layers.4.engram.embed.weight"}


def test_experts_stored_plain_beside_quantised_ones(tmp_path):
    # Each tensor decides for itself: a layer may keep its shared expert in BF16.
    tensors = golden_raw("text-quant")
    name = "layers.2.ffn.shared_experts.w1"
    shape = tensors[f"{name}.weight"].shape
    del tensors[f"{name}.scale"]
    tensors[f"{name}.weight"] = RawTensor("BF16", shape, bytes(2 * shape[0] * shape[1]))
    write_raw(tmp_path / "model.safetensors", tensors)
    config = config_of("text-quant")
    checkpoint = Checkpoint.open(tmp_path)
    checkpoint.validate(config)
    weights = load_weights(checkpoint, config, dtype_policy="official")
    assert weights[f"{name}.weight"].dtype == torch.bfloat16
    assert f"{name}.scale" not in weights


def test_image_gate_bias_may_stay_in_a_text_checkpoint(tmp_path):
    tensors = golden_raw("text-quant")
    bias = tensors["layers.0.ffn.gate.bias"]
    tensors["layers.0.ffn.gate.bias_vl"] = bias
    write_raw(tmp_path / "model.safetensors", tensors)
    checkpoint = Checkpoint.open(tmp_path)
    summary = checkpoint.validate(config_of("text-quant"))
    assert summary.by_feature["vision"].num_bytes == len(bias.data)
    weights = load_weights(checkpoint, config_of("text-quant"), dtype_policy="official")
    assert "layers.0.ffn.gate.bias_vl" not in weights


def test_vision_model_loads_its_image_gate_bias():
    config = config_of("vision")
    weights = load_weights(Checkpoint.open(golden_dir("vision")), config, dtype_policy="official")
    stored = golden_raw("vision")["layers.3.ffn.gate.bias_vl"]
    assert raw_bytes(weights["layers.3.ffn.gate.bias_vl"]) == stored.data


# ---- memory ------------------------------------------------------------------------------------


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def write_sparse(path, forms):
    """Write a file of tensors without data; the holes take no disk."""
    header, position = {}, 0
    for name, (dtype, shape) in forms.items():
        size = ITEM_BYTES[dtype]
        for extent in shape:
            size *= extent
        header[name] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [position, position + size],
        }
        position += size
    write_header(path, json.dumps(header))
    os.truncate(path, path.stat().st_size + position)


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs /proc")
def test_engram_tables_are_mapped_not_read(tmp_path):
    # Tables as large as the production ones (100 GB each) in sparse files, all else tiny.
    raw = golden_json("text-quant")
    production = production_config()["text_config"]
    for key, value in production.items():
        if key.startswith("engram_") and key not in ("engram_layer_ids", "engram_pad_token_id"):
            raw["text_config"][key] = value
    raw["text_config"]["engram_compressed_vocab_size"] = 287
    config = ModelConfig.from_dict(raw)
    write_sparse(tmp_path / "model.safetensors", official_tensors(config))
    name = "layers.4.engram.embed.weight"
    before = resident_bytes()
    checkpoint = Checkpoint.open(tmp_path)
    checkpoint.validate(config)
    weights = load_weights(checkpoint, config, dtype_policy="official")
    table = weights[name]
    assert resident_bytes() - before < 64e6
    assert table.shape == (384016682, 256)
    assert table.nbytes > 98e9
    # A view of the file: what is written to the file afterwards is what a read finds.
    place = checkpoint.tensors[name]
    with open(place.file, "r+b") as file:
        file.seek(place.start + 384016681 * 256 + 7)
        file.write(b"\xd8")
        scale = checkpoint.tensors["layers.4.engram.embed.scale"]
        file.seek(scale.start + 384016681 * 8)
        file.write(b"\x73")
    rows = table.view(torch.uint8)[torch.tensor([0, 384016681])]
    assert rows[1].tolist() == [0] * 7 + [0xD8] + [0] * 248
    assert weights["layers.4.engram.embed.scale"][384016681].tolist() == [0x73] + [0] * 7
    assert resident_bytes() - before < 64e6


@pytest.mark.parametrize("shift", [1, 2, 3, 4])
def test_plain_table_at_any_address(tmp_path, shift):
    # The format does not align data: spaces that end the header may put it anywhere.
    content = (golden_dir("text-fp32") / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = content[8:start] + b" " * shift
    moved = len(header).to_bytes(8, "little") + header + content[start:]
    (tmp_path / "model.safetensors").write_bytes(moved)
    config = config_of("text-fp32")
    weights = load_weights(Checkpoint.open(tmp_path), config, dtype_policy="reference")
    stored = golden_raw("text-fp32")["layers.4.engram.embed.weight"]
    table = torch.frombuffer(bytearray(stored.data), dtype=torch.float32).view(stored.shape)
    rows = torch.tensor([605, 0, 17])
    mapped = weights["layers.4.engram.embed.weight"]
    assert torch.equal(torch.nn.functional.embedding(rows, mapped), table[rows])
    assert torch.equal(mapped, table)


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs /proc")
def test_loading_holds_no_more_than_one_tensor_beside_the_result(tmp_path):
    raw = golden_json("text-fp32")
    raw["text_config"] |= {"n_routed_experts": 512}
    config = ModelConfig.from_dict(raw)
    forms = {entry.name: ("F32", entry.shape) for entry in tensor_table(config).values()}
    write_sparse(tmp_path / "model.safetensors", forms)
    checkpoint = Checkpoint.open(tmp_path)
    before = resident_bytes()
    peak = 0

    def watch(done, total):
        nonlocal peak
        peak = max(peak, resident_bytes() - before)

    weights = load_weights(checkpoint, config, dtype_policy="official", progress=watch)
    result = sum(w.nbytes for name, w in weights.items() if ".engram.embed" not in name)
    largest = max(item.stored.num_bytes for item in load_plan(checkpoint, config, "official"))
    assert largest < 1e6
    assert result > 90e6
    assert peak < result + 16e6


def test_production_headers_are_quick_to_compare(tmp_path):
    config = ModelConfig.from_dict(production_config())
    forms = official_tensors(config)
    names = list(forms)
    weight_map = {}
    for shard in range(8):
        part = names[shard::8]
        file = f"model-{shard + 1:05d}-of-00008.safetensors"
        write_sparse(tmp_path / file, {name: forms[name] for name in part})
        weight_map |= dict.fromkeys(part, file)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    start = time.process_time()
    summary = Checkpoint.open(tmp_path).validate(config)
    assert time.process_time() - start < 5  # about 0.8 on the slowest machine tried
    assert (summary.num_tensors, summary.num_bytes) == (96_085, 510_286_023_000)
    assert summary.by_feature["draft"].num_tensors == 2401
    assert summary.by_group["engram_tables"].num_bytes == 202_758_032_400


# ---- files that are refused --------------------------------------------------------------------


def test_directory_without_weights(tmp_path):
    config = config_of("text-quant")
    refuse(tmp_path, config, errors.CheckpointNotFound, "no weight file", str(tmp_path))
    refuse(tmp_path / "absent", config, errors.CheckpointNotFound, "no such directory")
    write_raw(tmp_path / "model-00001-of-00002.safetensors", {})
    refuse(tmp_path, config, errors.CheckpointNotFound, "1 other shards without an index")


def test_missing_shard(tmp_path):
    paths = write_shards(tmp_path, golden_raw("text-quant"), 3)
    paths[1].unlink()
    refuse(tmp_path, config_of("text-quant"), errors.MissingShard, paths[1].name, "3 shards")


@pytest.mark.parametrize("cut", [1, 1000, 2_000_000])
def test_truncated_file(tmp_path, cut):
    directory = copy_golden("text-quant", tmp_path)
    file = directory / "model.safetensors"
    size = file.stat().st_size
    os.truncate(file, size - cut)
    numbers = (f"expected {size} bytes", f"got {size - cut}")
    refuse(directory, config_of("text-quant"), errors.TruncatedShard, str(file), *numbers)


@pytest.mark.parametrize("size", [0, 5, 8, 5000])
def test_file_cut_inside_its_header(tmp_path, size):
    directory = copy_golden("text-quant", tmp_path)
    os.truncate(directory / "model.safetensors", size)
    config = config_of("text-quant")
    refuse(directory, config, errors.TruncatedShard, "the header", f"got {size}")


def test_truncated_shard_is_named(tmp_path):
    paths = write_shards(tmp_path, golden_raw("text-quant"), 3)
    os.truncate(paths[2], paths[2].stat().st_size - 1)
    refuse(tmp_path, config_of("text-quant"), errors.TruncatedShard, paths[2].name, "tensor '")


def test_file_that_shrinks_after_it_was_opened(tmp_path):
    directory = copy_golden("text-fp32", tmp_path)
    config = config_of("text-fp32")
    checkpoint = Checkpoint.open(directory)
    place = checkpoint.tensors["layers.9.attn.wo_b.weight"]
    os.truncate(place.file, place.start + 10)
    with pytest.raises(errors.TruncatedShard, match=r"tensor 'layers\.9\.attn\.wo_b\.weight'"):
        load_weights(checkpoint, config, dtype_policy="reference")


def test_file_that_vanishes_after_it_was_opened(tmp_path):
    directory = copy_golden("text-fp32", tmp_path)
    checkpoint = Checkpoint.open(directory)
    (directory / "model.safetensors").unlink()
    with pytest.raises(errors.UnreadableShard, match="No such file"):
        load_weights(checkpoint, config_of("text-fp32"), dtype_policy="reference")


TENSOR = '{"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}'


@pytest.mark.parametrize(
    ("header", "data", "part"),
    [
        ("{", b"", "JSONDecodeError"),
        ("[1]", b"", "not an object"),
        ('{"a": 1}', b"", "no dtype, shape and offsets for 'a'"),
        ('{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 8]}}', b"", "for 'a'"),
        ('{"a": {"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]}}', b"", "for 'a'"),
        ('{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0]}}', b"", "1 data_offsets"),
        ('{"a": {"dtype": "F5", "shape": [2], "data_offsets": [0, 8]}}', b"", "unknown dtype 'F5'"),
        ('{"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}', b"", "8 bytes for 'a'"),
        ('{"a": {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]}}', b"0" * 16, "'a' at"),
        (f'{{"a": {TENSOR}, "b": {TENSOR}}}', b"0" * 8, "'b' at byte"),
        (f'{{"a": {TENSOR}}}', b"0" * 11, "3 bytes after the last tensor"),
    ],
)
def test_unreadable_header(tmp_path, header, data, part):
    write_header(tmp_path / "model.safetensors", header, data)
    refuse(tmp_path, config_of("text-quant"), errors.UnreadableHeader, "model.safetensors", part)


def test_file_of_another_format(tmp_path):
    content = b"version https://git-lfs.github.com/spec/v1\n"
    (tmp_path / "model.safetensors").write_bytes(content)
    refuse(tmp_path, config_of("text-quant"), errors.UnreadableHeader, "a header length of")


def test_file_that_cannot_be_opened(tmp_path):
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(errors.UnreadableShard, match="directory"):
        read_header(tmp_path / "model.safetensors")


def test_metadata_is_no_tensor(tmp_path):
    write_header(tmp_path / "x", f'{{"__metadata__": {{"format": "pt"}}, "a": {TENSOR}}}', b"0" * 8)
    assert [tensor.name for tensor in read_header(tmp_path / "x")] == ["a"]


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("{", "JSONDecodeError"),
        ("[]", "no weight_map"),
        ('{"weight_map": {}}', "no weight_map"),
        ('{"weight_map": {"a": 3}}', "3 as the shard of 'a'"),
        ('{"weight_map": {"a": "../model.safetensors"}}', "'../model.safetensors'"),
        ('{"weight_map": {"a": ".."}}', "'..'"),
        ('{"weight_map": {"a": ""}}', "''"),
    ],
)
def test_unreadable_index(tmp_path, text, part):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    refuse(tmp_path, config_of("text-quant"), errors.UnreadableIndex, part)


def edit_index(directory, change):
    file = directory / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    change(index["weight_map"])
    file.write_text(json.dumps(index))


def test_tensor_without_index_entry(tmp_path):
    write_shards(tmp_path, golden_raw("text-quant"), 2)
    edit_index(tmp_path, lambda weight_map: weight_map.pop("norm.weight"))
    refuse(tmp_path, config_of("text-quant"), errors.UnindexedTensor, "'norm.weight'", "0000")


def test_index_entry_without_tensor(tmp_path):
    paths = write_shards(tmp_path, golden_raw("text-quant"), 2)
    edit_index(tmp_path, lambda weight_map: weight_map.update(extra=paths[0].name))
    refuse(tmp_path, config_of("text-quant"), errors.IndexedTensorAbsent, "'extra'", paths[0].name)


def test_index_entry_of_another_shard(tmp_path):
    write_shards(tmp_path, golden_raw("text-quant"), 2)

    def swap(weight_map):
        first, second = sorted(set(weight_map.values()))
        old = weight_map["norm.weight"]
        weight_map["norm.weight"] = second if old == first else first

    edit_index(tmp_path, swap)
    refuse(tmp_path, config_of("text-quant"), errors.IndexedTensorAbsent, "'norm.weight'")


def test_single_file_beside_an_index(tmp_path):
    write_shards(tmp_path, golden_raw("text-quant"), 2)
    copy_golden("text-quant", tmp_path)
    refuse(tmp_path, config_of("text-quant"), errors.AmbiguousCheckpoint, "2 other files")


def test_duplicate_tensor_in_two_shards(tmp_path):
    tensors = golden_raw("text-quant")
    paths = write_shards(tmp_path, tensors, 2)
    for path in paths:
        write_raw(path, read_raw(path) | {"norm.weight": tensors["norm.weight"]})
    names = [path.name for path in paths]
    refuse(tmp_path, config_of("text-quant"), errors.DuplicateTensor, "'norm.weight'", *names)


def test_duplicate_tensor_in_one_header(tmp_path):
    write_header(tmp_path / "model.safetensors", f'{{"a": {TENSOR}, "a": {TENSOR}}}', b"0" * 8)
    refuse(tmp_path, config_of("text-quant"), errors.DuplicateTensor, "'a'")


@pytest.mark.parametrize("is_first", [True, False])
def test_tensor_with_and_without_prefix(tmp_path, is_first):
    tensors = golden_raw("text-quant")
    double = {"model.norm.weight": tensors["norm.weight"]}
    both = double | tensors if is_first else tensors | double
    parts = ("'norm.weight'", "'model.norm.weight'")
    refuse_tensors(tmp_path, both, errors.AmbiguousPrefix, *parts)


# ---- tensors that are refused ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("layers.3.attn.wq_c.weight", "layers.N.attn.wq_a.weight"),
        ("layers.10.attn.wq_a.weight", "numbers for 'layers.N.attn.wq_a.weight' are lower"),
        ("layers.3.ffn.experts.6.w1.weight", "numbers for 'layers.N.ffn.experts.N.w1.weight'"),
        ("norm.scale", "nearest: norm.weight"),
        ("mtp.0.attn.wq_a.weight", "nearest: layers.N.attn.wq_a.weight"),
        ("vision.norm.weight", "nearest:"),
        ("model.model.norm.weight", "'model.model.norm.weight'"),
        ("layers.10.ffn.gate.bias_vl", "nearest:"),
    ],
)
def test_unknown_tensor(tmp_path, name, part):
    tensors = golden_raw("text-quant") | {name: RawTensor("F32", [1], bytes(4))}
    refuse_tensors(tmp_path, tensors, errors.UnknownTensor, f"'{name}'", "1 unknown", part)


def test_renamed_tensor_is_reported_as_unknown(tmp_path):
    tensors = golden_raw("text-quant")
    tensors["layers.3.attn.q_nrom.weight"] = tensors.pop("layers.3.attn.q_norm.weight")
    part = "nearest: layers.N.attn.q_norm.weight"
    refuse_tensors(tmp_path, tensors, errors.UnknownTensor, part)


@pytest.mark.parametrize(
    ("case", "name", "feature"),
    [
        ("text-quant", "embed.weight", "text"),
        ("text-quant", "layers.3.ffn.experts.5.w2.weight", "text"),
        ("text-quant", "layers.4.engram.embed.weight", "text"),
        ("vision", "layers.0.ffn.gate.bias_vl", "text"),
        ("vision", "image_newline", "vision"),
        ("dspark", "mtp.2.markov_head.head.weight", "draft"),
    ],
)
def test_missing_tensor(tmp_path, case, name, feature):
    tensors = golden_raw(case)
    del tensors[name]
    parts = ("1 missing", f"'{name}'", f"feature: {feature}")
    refuse_tensors(tmp_path, tensors, errors.MissingTensor, *parts, case=case)


def test_many_missing_tensors_are_counted(tmp_path):
    tensors = {k: v for k, v in golden_raw("text-quant").items() if not k.startswith("layers.7.")}
    refuse_tensors(tmp_path, tensors, errors.MissingTensor, "missing: ", "'layers.7.", ", ...")


@pytest.mark.parametrize(
    "name",
    [
        "layers.0.attn.wo_a",
        "layers.5.attn.indexer.wq_b",
        "layers.9.ffn.experts.3.w1",
        "layers.1.engram.embed",
        "layers.1.engram.wkv",
    ],
)
def test_missing_scale_names_both(tmp_path, name):
    tensors = golden_raw("text-quant")
    del tensors[f"{name}.scale"]
    parts = (f"'{name}.weight'", f"'{name}.scale'")
    refuse_tensors(tmp_path, tensors, errors.MissingScale, *parts)


def test_missing_scale_of_the_draft_and_with_prefix(tmp_path):
    tensors = {f"model.{name}": tensor for name, tensor in golden_raw("dspark").items()}
    del tensors["model.mtp.0.main_proj.scale"]
    parts = ("'model.mtp.0.main_proj.weight'", "'model.mtp.0.main_proj.scale'")
    refuse_tensors(tmp_path, tensors, errors.MissingScale, *parts, case="dspark")


def test_quantised_weight_without_scale_in_a_plain_checkpoint(tmp_path):
    tensors = golden_raw("text-fp32")
    name = "layers.0.attn.wq_a"
    shape = tensors[f"{name}.weight"].shape
    tensors[f"{name}.weight"] = RawTensor("F8_E4M3", shape, bytes(shape[0] * shape[1]))
    parts = (f"'{name}.weight'", f"'{name}.scale'")
    refuse_tensors(tmp_path, tensors, errors.MissingScale, *parts, case="text-fp32")


def test_scale_beside_a_plain_weight(tmp_path):
    tensors = golden_raw("text-fp32")
    name = "layers.0.attn.wq_a"
    tensors[f"{name}.scale"] = RawTensor("F8_E8M0", [2, 3], bytes(6))
    parts = (f"'{name}.scale'", f"'{name}.weight'", "F32", "F8_E4M3")
    refuse_tensors(tmp_path, tensors, errors.UnexpectedScale, *parts, case="text-fp32")


@pytest.mark.parametrize(
    ("case", "name", "dtype", "expected"),
    [
        ("text-quant", "embed.weight", "F16", "BF16 or F32"),
        ("text-quant", "layers.0.hc_attn_fn", "BF16", "expected F32, got BF16"),
        ("text-quant", "layers.0.ffn.gate.bias", "BF16", "expected F32, got BF16"),
        ("text-quant", "layers.0.attn.wq_a.weight", "I8", "F8_E4M3 or BF16 or F32"),
        ("text-quant", "layers.0.attn.wq_a.weight", "F8_E5M2", "F8_E4M3 or BF16 or F32"),
        ("text-quant", "layers.0.attn.wq_a.scale", "U8", "expected F8_E8M0, got U8"),
        ("text-quant", "layers.0.ffn.experts.0.w1.weight", "F8_E4M3", "I8 or BF16 or F32"),
        ("text-quant", "layers.0.ffn.experts.0.w1.scale", "I8", "expected F8_E8M0, got I8"),
        ("text-quant", "layers.1.engram.embed.weight", "I8", "F8_E4M3 or BF16 or F32"),
        ("text-fp32", "norm.weight", "F64", "BF16 or F32"),
        ("dspark", "mtp.1.attn.attn_sink", "BF16", "expected F32, got BF16"),
        ("vision", "vision.norm.weight", "F16", "BF16 or F32"),
    ],
)
def test_wrong_dtype(tmp_path, case, name, dtype, expected):
    tensors = golden_raw(case)
    item_bytes = {"F64": 8, "F16": 2, "BF16": 2}.get(dtype, 1)
    shape = tensors[name].shape
    num_elements = 1
    for size in shape:
        num_elements *= size
    tensors[name] = RawTensor(dtype, shape, bytes(num_elements * item_bytes))
    refuse_tensors(tmp_path, tensors, errors.WrongDtype, f"'{name}'", expected, case=case)


@pytest.mark.parametrize(
    ("case", "name"),
    [
        ("text-quant", "embed.weight"),
        ("text-quant", "layers.0.attn.wq_a.weight"),
        ("text-quant", "layers.0.attn.wq_a.scale"),
        ("text-quant", "layers.0.ffn.experts.0.w1.weight"),
        ("text-quant", "layers.0.ffn.experts.0.w1.scale"),
        ("text-quant", "layers.1.engram.embed.scale"),
        ("text-fp32", "layers.0.hc_ffn_base"),
        ("dspark", "mtp.0.main_proj.weight"),
        ("vision", "aligner.w1.weight"),
    ],
)
def test_wrong_shape(tmp_path, case, name):
    tensors = golden_raw(case)
    old = tensors[name]
    shape = list(reversed(old.shape)) if len(set(old.shape)) > 1 else [*old.shape, 1]
    tensors[name] = RawTensor(old.dtype, shape, old.data)
    parts = (f"'{name}'", f"expected shape {old.shape}", f"got {shape}")
    refuse_tensors(tmp_path, tensors, errors.WrongShape, *parts, case=case)


def test_experts_of_one_layer_stored_in_two_types(tmp_path):
    tensors = golden_raw("text-quant")
    name = "layers.3.ffn.experts.4.w1"
    del tensors[f"{name}.scale"]
    tensors[f"{name}.weight"] = RawTensor("BF16", [32, 96], bytes(2 * 32 * 96))
    parts = (f"'{name}.weight'", "BF16", "expected I8")
    refuse_tensors(tmp_path, tensors, errors.MixedExperts, *parts)


def test_a_scale_that_is_no_number_is_refused(tmp_path):
    """The byte 255 of E8M0 stands for NaN: it would spread through the whole model."""
    directory = copy_golden("text-quant", tmp_path / "model")
    stored = Checkpoint.open(directory).tensors["layers.2.attn.wkv.scale"]
    with (directory / "model.safetensors").open("r+b") as file:
        file.seek(stored.start)
        file.write(b"\xff")
    config = ModelConfig.from_dir(directory)
    with pytest.raises(errors.NotANumberScale, match=r"layers\.2\.attn\.wkv\.scale"):
        load_weights(Checkpoint.open(directory), config, dtype_policy="official")


def test_each_checkpoint_error_has_a_test():
    with open(__file__) as file:
        text = file.read()
    for error in errors.CheckpointError.__subclasses__():
        assert f"errors.{error.__name__}" in text, error.__name__
