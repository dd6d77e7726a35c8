"""All that can go wrong between a checkpoint directory and its tensors and token ids."""

from graphs.errors import EngineError


class ModelError(EngineError):
    """Base of the errors of the model layer."""


# ---- config.json ------------------------------------------------------------------------------


class ConfigError(ModelError):
    """Base of the errors of `config.json`."""


class ConfigNotFound(ConfigError):
    """A model directory without a readable `config.json`."""

    message = (
        "ConfigNotFound: cannot read {path}: {detail}. Give a checkpoint directory that holds "
        "config.json."
    )


class ConfigSyntax(ConfigError):
    """A `config.json` that is not one JSON object, or names a key twice."""

    message = (
        "ConfigSyntax: {source} is not a valid JSON object: {detail}. Repair or download the file "
        "again."
    )


class MissingConfigKey(ConfigError):
    """A key that the forward needs and the config does not have."""

    message = (
        "MissingConfigKey: {source}: {where} lacks {keys}. These keys have no default; take them "
        "from the config.json that belongs to the weights."
    )


class UnknownConfigKey(ConfigError):
    """A key without meaning here, perhaps a misspelling that would change the model."""

    message = (
        "UnknownConfigKey: {source}: {where} has {keys}. Correct the name, or remove the key if "
        "the forward does not depend on it."
    )


class WrongConfigType(ConfigError):
    """A config value of the wrong JSON type."""

    message = (
        "WrongConfigType: {source}: {key}: expected {expected}, got {got}. Write the value as "
        "{expected}."
    )


class UnsupportedConfigValue(ConfigError):
    """A config value of the right type that this engine does not implement."""

    message = "UnsupportedConfigValue: {source}: {key}: expected {expected}, got {got}. {hint}"


class IncompatibleSizes(ConfigError):
    """Two sizes of the config, or a size and a quantisation group, that do not fit together."""

    message = (
        "IncompatibleSizes: {source}: {key} = {got}: expected {expected}. Correct the value; it "
        "must match the weights."
    )


class LoadRuleError(ConfigError):
    """Base of the rules between config fields that refuse a checkpoint."""


class CompressRatiosLength(LoadRuleError):
    """Load rule 1: one ratio a layer, optionally also one a draft layer."""

    message = (
        "CompressRatiosLength: {source}: text_config.compress_ratios (load rule 1): expected "
        "{expected} entries, got {got}. Make it as long as num_hidden_layers ({layers}), or that "
        "plus num_nextn_predict_layers ({draft})."
    )


class DraftRatioNotZero(LoadRuleError):
    """Load rule 1: draft layers attend to their window only."""

    message = (
        "DraftRatioNotZero: {source}: text_config.compress_ratios[{index}] (load rule 1): "
        "expected 0 for a draft layer, got {got}. Set the entries after num_hidden_layers to 0."
    )


class SourceWithoutRatio(LoadRuleError):
    """Load rule 2: a source layer compresses, so its ratio is above 0."""

    message = (
        "SourceWithoutRatio: {source}: text_config.{key} names layer {layer} (load rule 2): "
        "expected a layer with compress_ratios above 0, got 0. Remove the layer from {key} or "
        "give it a ratio."
    )


class LayerWithoutSource(LoadRuleError):
    """Load rule 2: a layer with compressed attention needs both kinds of source at or before it."""

    message = (
        "LayerWithoutSource: {source}: layer {layer} has compress_ratios {ratio} (load rule 2): "
        "expected an entry of text_config.{key} at or before it, got {got}. Add a source layer or "
        "set the ratio to 0."
    )


class KvSourceWithoutIndexer(LoadRuleError):
    """Load rule 3: a compressor without an indexer is unsupported."""

    message = (
        "KvSourceWithoutIndexer: {source}: text_config.kv_source_layer_ids names layer {layer} "
        "(load rule 3): expected it in index_source_layer_ids too, got {got}. Add layer {layer} "
        "to index_source_layer_ids."
    )


class SegmentRatioMismatch(LoadRuleError):
    """Load rule 3: all layers that share a compressed cache have the ratio it was made with."""

    message = (
        "SegmentRatioMismatch: {source}: text_config.compress_ratios[{layer}] (load rule 3): "
        "expected {expected} as in its kv source layer {kv_source}, got {got}. Add a kv source "
        "where the ratio changes."
    )


class EngramLayerTooHigh(LoadRuleError):
    """Load rule 4, first half: Engram layers lie below the first ratio-1 layer."""

    message = (
        "EngramLayerTooHigh: {source}: text_config.engram_layer_ids names layer {layer} (load "
        "rule 4): expected layers below {limit}, the first with compress_ratios 1, got {layer}. "
        "Move the Engram layer down."
    )


class CandidateSourceNotIndexed(LoadRuleError):
    """Load rule 5: candidates come from the scores of an index source."""

    message = (
        "CandidateSourceNotIndexed: {source}: text_config.candidate_source_layer_id (load rule "
        "5): expected one of index_source_layer_ids {expected}, got {got}. Use -1 to disable the "
        "two-level selection."
    )


class CandidateRatioMismatch(LoadRuleError):
    """Load rule 5: a candidate set counts entries of one ratio."""

    message = (
        "CandidateRatioMismatch: {source}: index source layer {layer} reads the candidates of "
        "layer {candidate_source} (load rule 5): expected the same compress_ratios {expected}, "
        "got {got}. Move candidate_source_layer_id to a layer whose later index sources share its "
        "ratio."
    )


class TooFewCandidates(LoadRuleError):
    """Load rule 6, first sentence: the candidate set can fill the selection."""

    message = (
        "TooFewCandidates: {source}: candidate_topk_blocks * candidate_block_size = {got} (load "
        "rule 6): expected at least index_topk = {expected}. Raise candidate_topk_blocks or lower "
        "index_topk."
    )


class EngramRowsMismatch(LoadRuleError):
    """Load rule 8: the table rows are the sum of the layer's hash primes."""

    message = (
        "EngramRowsMismatch: {source}: text_config.engram_num_embeddings[{index}] for layer "
        "{layer} (load rule 8): expected {expected}, the sum of the layer's hash primes, got "
        "{got}. Check engram_vocab_size, engram_max_ngram_size, engram_n_heads and the order of "
        "engram_layer_ids."
    )


# ---- safetensors ------------------------------------------------------------------------------


class CheckpointError(ModelError):
    """Base of the errors of the weight files."""


class CheckpointNotFound(CheckpointError):
    """A directory without `model.safetensors` and without an index."""

    message = (
        "CheckpointNotFound: {directory}: expected model.safetensors or "
        "model.safetensors.index.json, got {got}. Give the checkpoint directory, or fetch the "
        "missing file."
    )


class AmbiguousCheckpoint(CheckpointError):
    """A directory with a single file and an index over other files."""

    message = (
        "AmbiguousCheckpoint: {directory} holds model.safetensors and an index over {got}: "
        "expected one of the two. Remove the one that does not belong to the model."
    )


class UnreadableIndex(CheckpointError):
    """An index that is not a map from tensor names to files of its directory."""

    message = (
        "UnreadableIndex: {file}: expected a weight_map of tensor name to shard file, got {got}. "
        "Fetch it again."
    )


class MissingShard(CheckpointError):
    """A shard named by the index that is not there."""

    message = (
        "MissingShard: {directory}: the index names {total} shards, missing: {missing} (holds for "
        "example tensor '{tensor}'). Fetch the missing shards again."
    )


class UnreadableShard(CheckpointError):
    """A weight file that the operating system refuses to read."""

    message = "UnreadableShard: {file}: {detail}. Check permissions and the disk."


class UnreadableHeader(CheckpointError):
    """A file that is not safetensors, or whose header contradicts itself."""

    message = (
        "UnreadableHeader: {file}: expected a safetensors header, got {detail}. The file is "
        "damaged or not safetensors (a version-control pointer, for instance); fetch it again."
    )


class TruncatedShard(CheckpointError):
    """A file that ends before the tensors its header promises."""

    message = (
        "TruncatedShard: {file}: expected {expected} bytes, got {got} (first incomplete: "
        "{tensor}). The download was cut short; fetch the file again."
    )


class UnindexedTensor(CheckpointError):
    """A shard that holds a tensor the index does not list."""

    message = (
        "UnindexedTensor: {file} holds tensor '{name}', which model.safetensors.index.json does "
        "not list. Shards and index are of different revisions; fetch both again."
    )


class IndexedTensorAbsent(CheckpointError):
    """An index entry whose shard does not hold the tensor."""

    message = (
        "IndexedTensorAbsent: model.safetensors.index.json places tensor '{name}' in {file}, "
        "whose header does not hold it. Shards and index are of different revisions; fetch both "
        "again."
    )


class DuplicateTensor(CheckpointError):
    """The same tensor stored twice."""

    message = (
        "DuplicateTensor: tensor '{name}' is stored twice, in {first} and in {second}: expected "
        "one. Remove the copy that does not belong to the model."
    )


class AmbiguousPrefix(CheckpointError):
    """A tensor with and without the `model.` prefix."""

    message = (
        "AmbiguousPrefix: both '{name}' ({first}) and 'model.{name}' ({second}) are stored: "
        "expected one. Two checkpoints were mixed; keep one."
    )


class UnknownTensor(CheckpointError):
    """A tensor that the config does not describe."""

    message = (
        "UnknownTensor: {file}: tensor '{name}' ({count} unknown in all): expected only tensors "
        "of this config, {nearest}. Check that config.json belongs to these weights."
    )


class MissingTensor(CheckpointError):
    """A tensor that the config describes and no file holds."""

    message = (
        "MissingTensor: {directory}: expected {total} weights, {count} missing: {names} (feature: "
        "{features}). Fetch the checkpoint again, or check that config.json belongs to these "
        "weights."
    )


class MissingScale(CheckpointError):
    """A quantised weight without its scale."""

    message = (
        "MissingScale: {file}: weight '{weight}' is stored as {dtype} and needs its scale: "
        "expected '{scale}' (F8_E8M0 {shape}), got none. Fetch the checkpoint again; a weight "
        "without scale cannot be used."
    )


class UnexpectedScale(CheckpointError):
    """A scale beside a weight that is not quantised."""

    message = (
        "UnexpectedScale: {file}: scale '{scale}' stands beside '{weight}', stored as {dtype}: "
        "expected a scale only beside {expected}. Remove the scale, or restore the quantised "
        "weight."
    )


class WrongDtype(CheckpointError):
    """A tensor of a storage type that its place does not allow."""

    message = (
        "WrongDtype: {file}: tensor '{name}': expected {expected}, got {got}. Convert the tensor, "
        "or fetch the checkpoint again."
    )


class WrongShape(CheckpointError):
    """A tensor of another shape than the config demands."""

    message = (
        "WrongShape: {file}: tensor '{name}' ({dtype}): expected shape {expected}, got {got}. "
        "Check that config.json belongs to these weights."
    )


class MixedExperts(CheckpointError):
    """Experts of one layer stored in different types, so that they cannot share one tensor."""

    message = (
        "MixedExperts: {file}: tensor '{name}' is stored as {got}: expected {expected} as in "
        "expert 0 of its layer. Store all experts of a layer in one type."
    )


# ---- tokenizer.json ---------------------------------------------------------------------------


class NotANumberScale(CheckpointError):
    """A scale byte that stands for no number."""

    message = (
        "NotANumberScale: {file}: tensor '{name}' holds the byte 255, which is no scale. The file "
        "is damaged: fetch it again."
    )


class TokenizerError(ModelError):
    """Base of the errors of the tokenizer and the token ids."""


class TokenizerNotFound(TokenizerError):
    """A directory without `tokenizer.json`."""

    message = (
        "TokenizerNotFound: {path}: expected tokenizer.json, got {got}. Fetch it from the model's "
        "repository."
    )


class TokenizerUnreadable(TokenizerError):
    """A `tokenizer.json` that the tokenizers library refuses."""

    message = (
        "TokenizerUnreadable: {path}: expected a tokenizers file, got: {detail}. Fetch the file "
        "again."
    )


class VocabSizeMismatch(TokenizerError):
    """A tokenizer of another size than the model's vocabulary."""

    message = (
        "VocabSizeMismatch: {path}: expected {expected} tokens (text_config.vocab_size), got "
        "{got}. Use the tokenizer.json that belongs to the weights."
    )


class CompressedVocabMismatch(TokenizerError):
    """A tokenizer whose normalised vocabulary is not that of the Engram tables."""

    message = (
        "CompressedVocabMismatch: the tokenizer of {path} compresses to {got} distinct keys: "
        "expected {expected} (text_config.engram_compressed_vocab_size). Every Engram row would "
        "be wrong; use the tokenizer.json that belongs to the weights."
    )


class UnencodableText(TokenizerError):
    """Text that has no UTF-8 form (a lone surrogate)."""

    message = (
        "UnencodableText: character {position} of the text is the lone surrogate {got}: expected "
        "text that UTF-8 can hold. Remove it, or decode the input with the right encoding."
    )


class TokenIdOutOfRange(TokenizerError):
    """A token id that the vocabulary does not have."""

    message = (
        "TokenIdOutOfRange: token id {got} at index {index}: expected 0 to {last}. Use ids of "
        "this model's tokenizer."
    )
