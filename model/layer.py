"""LayerSpec: the facts that tell one kind of layer from another; layers of equal facts share a
family."""

from dataclasses import dataclass

from model.config import TextConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSpec:
    """Kind of a backbone layer.

    Args:
        ratio: tokens per compressed entry; 0 = sliding window only.
        has_engram: an Engram memory is added at the layer's entry.
        is_kv_source: the layer compresses its input into the shared cache.
        is_index_source: the layer selects entries; others use the last selection.
        makes_candidates: the layer restricts later selections to its candidate blocks.
        reads_candidates: the layer selects inside those blocks.
    """

    ratio: int
    has_engram: bool
    is_kv_source: bool
    is_index_source: bool
    makes_candidates: bool
    reads_candidates: bool

    @property
    def name(self) -> str:
        """Readable family name, for example `layer.r2.source.engram`."""
        parts = ["layer", f"r{self.ratio}" if self.ratio else "window"]
        flags = {
            "source": self.is_kv_source,
            "index": self.is_index_source and not self.is_kv_source,
            "makes_candidates": self.makes_candidates,
            "reads_candidates": self.reads_candidates,
            "engram": self.has_engram,
        }
        return ".".join(parts + [flag for flag, on in flags.items() if on])


def layer_specs(config: TextConfig) -> list[LayerSpec]:
    """Return the kind of every backbone layer (model.md 3.8)."""
    source = config.candidate_source_layer_id
    has_candidates = source >= 0
    specs = []
    for layer in range(config.num_hidden_layers):
        is_index = layer in config.index_source_layer_ids
        specs.append(
            LayerSpec(
                ratio=config.layer_ratio(layer),
                has_engram=layer in config.engram_layer_ids,
                is_kv_source=layer in config.kv_source_layer_ids,
                is_index_source=is_index,
                makes_candidates=has_candidates and layer == source,
                reads_candidates=has_candidates and is_index and layer > source,
            )
        )
    return specs
