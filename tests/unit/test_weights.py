"""The name table against the released checkpoint and against the golden files."""

import pytest

from model.config import ModelConfig
from model.weights import TensorEntry, official_tensors, stacked_name, tensor_table
from tests.helpers.goldens import CASES, golden_dir
from tests.helpers.production import production_config
from tests.helpers.raw_safetensors import read_raw

# Bytes of the released checkpoint by what they are for.
PRODUCTION_BYTES = {
    "attention": 5_069_721_600,
    "compressor": 36_704_256,
    "indexer": 45_130_752,
    "experts": 288_777_830_400,
    "shared_experts": 1_416_960_000,
    "gate": 157_409_280,
    "hyper_connection": 157_295_040,
    "norm": 819_200 + 10_240,
    "engram_tables": 202_758_032_400,
    "engram": 315_043_840,
    "embed": 1_323_827_200,
    "head": 1_323_827_200,
    "draft": 7_219_445_760 + 502_294_920 + 211_133_952,
    "vision": 823_685_120 + 146_851_840,
}
PRODUCTION_PARAMETERS = 763_205_315_794


@pytest.fixture(scope="module")
def table():
    return tensor_table(ModelConfig.from_dict(production_config()))


def test_production_names_and_bytes(table):
    stored = official_tensors(ModelConfig.from_dict(production_config()))
    assert len(stored) == 96_085
    item_bytes = {"F32": 4, "BF16": 2, "F8_E4M3": 1, "F8_E8M0": 1, "I8": 1}
    total = 0
    for dtype, shape in stored.values():
        num_bytes = item_bytes[dtype]
        for size in shape:
            num_bytes *= size
        total += num_bytes
    assert total == 510_286_023_000
    assert sum(entry.num_bytes for entry in table.values()) == 510_286_023_000


def test_production_bytes_of_groups(table):
    sizes = dict.fromkeys(PRODUCTION_BYTES, 0)
    for entry in table.values():
        sizes[entry.group] += entry.num_bytes
    assert sizes == PRODUCTION_BYTES


def test_production_parameters(table):
    total = 0
    for entry in table.values():
        num_elements = 1
        for size in entry.shape:
            num_elements *= size
        total += num_elements
    assert total == PRODUCTION_PARAMETERS


def test_production_features(table):
    draft = [entry for entry in table.values() if entry.name.startswith("mtp.")]
    assert {entry.feature for entry in draft} == {"draft"}
    num_stored = sum(2 if entry.is_quantized else 1 for entry in draft)
    assert num_stored == 2394 + 7
    assert table["layers.0.ffn.gate.bias_vl"].feature == "text"
    assert table["image_start"].feature == "vision"


@pytest.mark.parametrize(
    ("name", "dtype", "shape", "scale"),
    [
        ("layers.0.hc_attn_fn", "F32", (24, 20480), None),
        ("layers.39.hc_ffn_scale", "F32", (3,), None),
        ("layers.3.attn.attn_sink", "F32", (64,), None),
        ("layers.3.attn.wq_b.weight", "F8_E4M3", (32768, 1280), (1024, 40)),
        ("layers.3.attn.wo_a.weight", "F8_E4M3", (8192, 4096), (256, 128)),
        ("layers.3.attn.wo_b.weight", "F8_E4M3", (5120, 8192), (160, 256)),
        ("layers.14.attn.compressor.wgate.weight", "BF16", (512, 5120), None),
        ("layers.36.attn.indexer.wq_b.weight", "F8_E4M3", (4096, 1280), (128, 40)),
        ("layers.20.attn.indexer.wk.weight", "BF16", (128, 512), None),
        ("layers.3.ffn.experts.383.w1.weight", "I8", (2304, 2560), (2304, 160)),
        ("layers.3.ffn.experts.0.w2.weight", "I8", (5120, 1152), (5120, 72)),
        ("layers.3.ffn.shared_experts.w2.weight", "F8_E4M3", (5120, 2304), (160, 72)),
        ("layers.14.engram.embed.weight", "F8_E4M3", (384016682, 256), (384016682, 8)),
        ("layers.1.engram.wkv.weight", "F8_E4M3", (25600, 6144), (800, 192)),
        ("layers.1.engram.q_weight", "BF16", (4, 5120), None),
        ("mtp.0.main_proj.weight", "F8_E4M3", (5120, 15360), (160, 480)),
        ("mtp.2.confidence_head.proj.weight", "BF16", (1, 5376), None),
        ("mtp.1.ffn.gate.bias", "F32", (128,), None),
        ("vision.patch_embed.proj.weight", "BF16", (1024, 588), None),
        ("vision.blocks.31.mlp.w1.weight", "BF16", (5632, 1024), None),
        ("aligner.w1.weight", "BF16", (5120, 9216), None),
    ],
)
def test_production_entries(table, name, dtype, shape, scale):
    entry = table[name]
    assert (entry.storage_dtype, entry.storage_shape) == (dtype, shape)
    assert entry.is_quantized == (scale is not None)
    if scale is not None:
        assert entry.scale_shape == scale


@pytest.mark.parametrize(
    "name",
    [
        "layers.20.attn.compressor.wgate.weight",  # a ratio-1 compressor pools nothing
        "layers.24.attn.compressor.wkv.weight",
        "layers.24.attn.indexer.wk.weight",  # keys come from the kv source
        "layers.3.attn.indexer.wq_b.weight",
        "layers.2.engram.q_weight",
        "mtp.1.norm.weight",
        "mtp.0.ffn.experts.128.w1.weight",
    ],
)
def test_production_lacks(table, name):
    assert name not in table


@pytest.mark.parametrize("case", CASES)
def test_golden_files_hold_exactly_the_table(case):
    config = ModelConfig.from_dir(golden_dir(case))
    stored = read_raw(golden_dir(case) / "model.safetensors")
    shapes = {name: tuple(tensor.shape) for name, tensor in stored.items()}
    if config.quantization_config is None:
        expected = {entry.name: entry.shape for entry in tensor_table(config).values()}
        assert shapes == expected
    else:
        forms = {name: (tensor.dtype, shapes[name]) for name, tensor in stored.items()}
        assert forms == official_tensors(config)


def test_scale_rounds_up_to_whole_blocks():
    fp8 = TensorEntry("a.weight", "text", "attention", "fp8", (33, 65))
    fp4 = TensorEntry("a.weight", "text", "experts", "fp4", (33, 66))
    assert (fp8.scale_name, fp8.scale_shape) == ("a.scale", (2, 3))
    assert (fp4.scale_shape, fp4.storage_shape) == ((33, 3), (33, 33))
    assert fp8.num_bytes == 33 * 65 + 6
    assert fp4.num_bytes == 33 * 33 + 33 * 3


def test_stacked_name():
    assert stacked_name("layers.3.ffn.experts.71.w1.weight") == (
        "layers.3.ffn.experts.w1.weight",
        71,
    )
    assert stacked_name("layers.3.ffn.experts.0.w2.scale") == ("layers.3.ffn.experts.w2.scale", 0)
    assert stacked_name("layers.3.ffn.shared_experts.w1.weight") is None
