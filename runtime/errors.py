"""Everything that can go wrong while configuring, reading jobs, scheduling and writing results.

One class per failure. The command maps `exit_code` to its own: 1 failed, 2 usage, 3 this machine
cannot, 4 artifact does not match. A failure that concerns one line of a job becomes an error record
instead, with the class name as code. The file is long because it is the whole catalogue.
"""

from graphs.errors import EngineError


class ServingError(EngineError):
    """Base of the errors of the serving layer."""


class UsageError(ServingError):
    """Base of what the caller can correct by calling differently."""

    exit_code = 2


class MachineError(ServingError):
    """Base of what this machine or installation cannot do."""

    exit_code = 3


# --- settings: flags, configuration files, environment, sampling parameters ---


class FieldTypeError(UsageError):
    """A setting of the wrong type; a Boolean is no integer and text is no number."""

    message = "FieldTypeError: {where}: '{field}' must be {expected}, got {value} ({got}). {hint}"


class FieldRangeError(UsageError):
    """A setting of the right type that breaks its rule."""

    message = "FieldRangeError: {where}: '{field}' is {value}, the rule is: {rule}. {hint}"


class FieldChoiceError(UsageError):
    """A setting that is none of the listed words."""

    message = "FieldChoiceError: {where}: '{field}' is {value}, expected one of: {choices}. {hint}"


class FieldConflict(UsageError):
    """Two settings that are fine alone and wrong together."""

    message = (
        "FieldConflict: {where}: '{field}' is {value} and '{other}' is {other_value}, the rule "
        "is: {rule}. {hint}"
    )


class UnknownField(UsageError):
    """A name that no setting has."""

    message = "UnknownField: {where}: nothing is named '{field}'. {nearest}"


class UnknownFlag(UsageError):
    """A command-line argument that no flag takes."""

    message = "UnknownFlag: {prog}: nothing takes '{argument}'. {nearest}See {prog} --help."


class BadArguments(UsageError):
    """A command line that cannot be read: a value is missing, or flags exclude each other."""

    message = "BadArguments: {prog}: {detail}. See {prog} --help."


class ConfigFileUnreadable(UsageError):
    """A configuration file that cannot be opened."""

    message = "ConfigFileUnreadable: {path}: {reason}. Give --config the path of a TOML file."


class ConfigFileSyntax(UsageError):
    """A configuration file that is not TOML."""

    message = (
        "ConfigFileSyntax: {path}: not valid TOML: {reason}. --dump-config prints a valid file."
    )


class UnknownVariable(UsageError):
    """An environment variable with our prefix that we do not know."""

    message = "UnknownVariable: environment variable {name} is not known. {nearest} Unset it."


class BadVariable(UsageError):
    """An environment variable whose value cannot be used."""

    message = (
        "BadVariable: environment variable {name} is {value}, expected {expected}. Correct or "
        "unset it."
    )


class BackendUnavailable(MachineError):
    """A device backend that this version does not run on."""

    message = (
        "BackendUnavailable: backend '{name}' was asked for by {source}: {reason}. Available: "
        "{available}."
    )


class MemoryTooSmall(MachineError):
    """State and caches that do not fit into the free memory."""

    message = (
        "MemoryTooSmall: {what} needs {needed_bytes} bytes ({detail}), {free_bytes} bytes are "
        "free for it. {hint}"
    )


# --- requests ---


class RequestError(UsageError):
    """Base of what makes one request impossible; the others of the job run."""


class EmptyPrompt(RequestError):
    """A prompt without a token."""

    message = (
        "EmptyPrompt: request '{request_id}': the prompt is empty. Give at least one character "
        "or token id."
    )


class PromptTooLong(RequestError):
    """A prompt that leaves no room for an output token."""

    message = (
        "PromptTooLong: request '{request_id}': the prompt has {num_tokens} tokens, the limit is "
        "{limit} (--max-model-len {max_model_len} less {reserved} for the output). Shorten it or "
        "raise --max-model-len."
    )


class TokenOutOfRange(RequestError):
    """A token id outside the vocabulary."""

    message = (
        "TokenOutOfRange: request '{request_id}': token {position} of the prompt is {token_id}, "
        "expected 0 <= id < {vocab_size}. Encode the prompt with the tokenizer of this "
        "checkpoint."
    )


class RequestNeverFits(RequestError):
    """A request that would not fit into the pool even alone."""

    message = (
        "RequestNeverFits: request '{request_id}': {num_prompt_tokens} prompt tokens and up to "
        "{max_tokens} outputs need {needed} blocks of {block_size} tokens, the pool has "
        "{usable}. Lower max_tokens or raise --kv-blocks to {kv_blocks}."
    )


class DuplicateRequest(RequestError):
    """A request id that is already in use."""

    message = (
        "DuplicateRequest: a request with id '{request_id}' is unfinished. Give every request "
        "its own id."
    )


class UnknownRequest(RequestError):
    """A request id that is not in the scheduler."""

    message = (
        "UnknownRequest: no unfinished request has id '{request_id}'. It may have finished already."
    )


# --- jobs: one line each, reported as an error record ---


class LineFailure(UsageError):
    """Base of what makes one line of a job unreadable."""


class LineNotText(LineFailure):
    """A line that is not UTF-8."""

    message = "LineNotText: line {line}: not UTF-8 at byte {position}. Save the file as UTF-8."


class LineNotJson(LineFailure):
    """A line that is not JSON."""

    message = (
        'LineNotJson: line {line}: {reason}. Write one object a line, such as {{"prompt": '
        '"Hello"}}.'
    )


class LineNotObject(LineFailure):
    """A line that is JSON but not an object."""

    message = (
        "LineNotObject: line {line}: expected an object, got {got}. Write one object a line, "
        'such as {{"prompt": "Hello"}}.'
    )


class PromptMissing(LineFailure):
    """A line with no prompt, or with both forms of it."""

    message = (
        "PromptMissing: line {line}: expected exactly one of {expected}, got {got}. Keep one of "
        "them."
    )


class BadPrompt(LineFailure):
    """A prompt of the wrong form."""

    message = "BadPrompt: line {line}: '{field}' must be {expected}, got {got}. Correct the line."


class BadId(LineFailure):
    """An id that is no usable text."""

    message = (
        "BadId: line {line}: 'id' must be a non-empty string, got {got}. Correct or leave out "
        "the id."
    )


class DuplicateId(LineFailure):
    """An id that an earlier line has."""

    message = (
        "DuplicateId: line {line}: id '{id}' was used on line {first_line}. Give every line its "
        "own id."
    )


# --- files ---


class InputUnreadable(UsageError):
    """A job file that cannot be opened or read."""

    message = "InputUnreadable: {path}: {reason}. Check the path given to {flag}."


class NoPrompts(UsageError):
    """A job without a source of prompts, or with more than one."""

    message = (
        "NoPrompts: expected prompts from exactly one of --prompt, --prompts and --input, got "
        "{got}."
    )


class OutputExists(UsageError):
    """A result file that is already there; results are never overwritten."""

    message = (
        "OutputExists: {path} exists and has {size_bytes} bytes. Remove it, or choose another "
        "path for {flag}."
    )


class OutputUnwritable(ServingError):
    """A result that cannot be written."""

    message = (
        "OutputUnwritable: {path}: {reason}. Check that the folder exists and has space, or "
        "change {flag}."
    )


class StdoutTaken(UsageError):
    """Two kinds of output for the same stream or file."""

    message = (
        "StdoutTaken: {first} and {second} both write to {target}. Give one of them another path."
    )


# --- invariants of ours, checked because they are cheap ---


class InvariantError(ServingError):
    """Base of the faults of this engine itself."""


class PoolExhausted(InvariantError):
    """More units asked of a pool than it has free."""

    message = (
        "PoolExhausted: request '{owner}' asked for {count} {unit}s, {free} of {total} are free. "
        "Please report it: the scheduler must check first."
    )


class PoolCorrupt(InvariantError):
    """A unit freed twice, or by another owner."""

    message = (
        "PoolCorrupt: request '{owner}' frees {unit} {index}, which belongs to {holder}. Please "
        "report it."
    )


class PoolLeak(InvariantError):
    """Units still held when nothing runs."""

    message = (
        "PoolLeak: {num_held} of {total} {unit}s are held while idle ({free} free); {unit}s by "
        "request: {held}. Please report it."
    )


class SchedulerStalled(InvariantError):
    """Unfinished requests, and none that can run."""

    message = (
        "SchedulerStalled: {num_waiting} waiting and {num_running} running requests, "
        "{free_blocks} free blocks, and no token can be scheduled. Please report it."
    )


class StalePlan(InvariantError):
    """Results for a plan that no longer matches its requests."""

    message = (
        "StalePlan: {what}: expected {expected}, got {got}. Retire each plan once, before the "
        "next schedule()."
    )


class CounterMismatch(InvariantError):
    """A counter that moved by another amount than expected."""

    message = (
        "CounterMismatch: counter '{name}' moved by {got}, expected {expected}. Look for an "
        "unplanned {name}."
    )


class BlockSizeMismatch(UsageError):
    """A block size that splits a group of compressed tokens."""

    message = (
        "BlockSizeMismatch: --block-size is {block_size}, the model compresses {ratio} tokens into "
        "one entry and needs a multiple of that. Choose a multiple of {ratio}."
    )


class BuiltInModelMissing(UsageError):
    """No --model, and the built-in checkpoint is not beside this installation."""

    message = (
        "BuiltInModelMissing: no --model was given and the built-in checkpoint is not at {path}. "
        "Run from a source checkout, or give --model DIR."
    )


class ParamsCountMismatch(UsageError):
    """Lists of prompts and parameters of different lengths."""

    message = (
        "ParamsCountMismatch: {num_prompts} prompts but {num_params} sampling parameters. Give one "
        "object for all prompts or one for each."
    )


class PromptTypeError(UsageError):
    """A prompt that is neither text nor token ids."""

    message = (
        "PromptTypeError: prompt {index}: expected a string or a list of token ids, got {got}. "
        "Pass text, or ids as integers."
    )


class SamplingFieldInScore(UsageError):
    """A line to score that asks for sampling."""

    message = (
        "SamplingFieldInScore: line {line}: sampling fields mean nothing where given tokens are "
        "scored. "
        "Remove them, or use python -m runtime.offline."
    )


class NoTokenLeft(RequestError):
    """A request whose constraints forbid every token."""

    message = (
        "NoTokenLeft: request '{request_id}': its allowed, banned and bad tokens leave none for "
        "output position {position}. Loosen one of them."
    )


# --- checkpoints by name: folders and the Hugging Face hub ---


class ModelNotFound(UsageError):
    """A model that is neither a folder nor has the form of a hub id."""

    message = (
        "ModelNotFound: '{model}' is neither a checkpoint folder ({as_path}) nor a hub id "
        "({as_id}). Correct the path, or give owner/name or owner/name@revision."
    )


class ModelAmbiguous(UsageError):
    """A path with one wrong end that reads like a hub id."""

    message = (
        "ModelAmbiguous: '{model}' is no folder, but the folder {parent} exists, so it may be a "
        "mistyped path as well as a hub id. {nearest} Correct the path, or write {model}@main if "
        "the hub is meant."
    )


class BadRevision(UsageError):
    """A revision that no branch, tag or commit can have as its name."""

    message = (
        "BadRevision: '{revision}' of hub id '{model}' is no revision: {reason}. Give a branch, a "
        "tag or a full commit hash."
    )


class HubModelNotFound(UsageError):
    """A hub id that the hub does not have, or not for this login."""

    message = (
        "HubModelNotFound: '{model}' is no folder ({as_path}), and {endpoint} has no model of that "
        "name for this login. Correct the path or the id; for a private model set HF_TOKEN."
    )


class HubRevisionNotFound(UsageError):
    """A hub id that exists, at a revision that does not."""

    message = (
        "HubRevisionNotFound: the hub model '{model}' has no revision '{revision}'. Give a branch, "
        "a tag or a full commit hash of it."
    )


class HubAccessDenied(UsageError):
    """A hub model that this login may not read."""

    message = (
        "HubAccessDenied: {endpoint} refuses to give the model '{model}': {reason}. Ask for access "
        "on its page and set HF_TOKEN to a token that has it."
    )


class NotACheckpoint(UsageError):
    """A hub model without the files that a checkpoint needs."""

    message = (
        "NotACheckpoint: the hub model '{model}' at revision '{revision}' lacks {missing}; it has "
        "{found}. Give one with config.json, tokenizer.json and safetensors files."
    )


class HubUnreachable(MachineError):
    """A hub that does not answer, and no complete snapshot to use instead."""

    message = (
        "HubUnreachable: '{model}' is no folder ({as_path}), and the hub {endpoint} cannot be "
        "asked for it: {reason}. No complete snapshot of revision '{revision}' is in {cache}. "
        "Check the network, or give a folder."
    )


class NotInHubCache(MachineError):
    """A hub id in offline mode, of which nothing is on this machine."""

    message = (
        "NotInHubCache: '{model}' is no folder ({as_path}), and revision '{revision}' of that hub "
        "id is not in {cache}; offline mode forbids to fetch it. Correct the path or the id, set "
        "HF_HUB_CACHE to the right cache, or unset HF_HUB_OFFLINE."
    )


class HubCacheUnreadable(MachineError):
    """A hub cache that the system refuses to read."""

    message = (
        "HubCacheUnreadable: {cache}: {reason}. Correct its permissions, or set HF_HUB_CACHE to "
        "another cache."
    )


class SnapshotIncomplete(MachineError):
    """A hub id in offline mode, of which only a part is on this machine."""

    message = (
        "SnapshotIncomplete: the snapshot {directory} of '{model}' lacks {count} files: "
        "{missing}. Unset HF_HUB_OFFLINE and run again to fetch the rest."
    )


class DiskTooSmall(MachineError):
    """A download that does not fit on the disk of the hub cache."""

    message = (
        "DiskTooSmall: '{model}' has {total_bytes} bytes in {count} files, {needed_bytes} of them "
        "are still to be fetched, and {free_bytes} are free in {cache}. Free "
        "{lacking_bytes} bytes, or set HF_HUB_CACHE to a folder on a larger disk."
    )


class DownloadFailed(ServingError):
    """A download that broke off."""

    message = (
        "DownloadFailed: '{model}' at commit {commit}: {reason}, with {done_bytes} of "
        "{total_bytes} bytes in {cache}. Complete files are kept; run the same command again to "
        "go on."
    )


class ParamTokenOutOfRange(RequestError):
    """A sampling parameter with a token id outside the vocabulary."""

    message = (
        "ParamTokenOutOfRange: request '{request_id}': '{field}' names token {token_id}, expected "
        "0 <= id < {vocab_size}. Use ids of the tokenizer of this checkpoint."
    )


class EngineBusy(ServingError):
    """A second run on an engine whose first one was left in the middle."""

    message = (
        "EngineBusy: {num_requests} requests of another call still run. Finish that call's "
        "iterator, or close it, before the next call."
    )


class ParamsTypeError(UsageError):
    """Sampling parameters of another type."""

    message = (
        "ParamsTypeError: sampling parameters {index}: expected SamplingParams, got {got}. Use "
        "SamplingParams(...), or SamplingParams.from_mapping for a dict."
    )


class NonFiniteLogits(ServingError):
    """Logits that are not numbers."""

    message = (
        "NonFiniteLogits: request '{request_id}': logits at position {position} are not finite. "
        "A weight of the checkpoint is damaged, or overflows: try --numerics reference."
    )


# --- batch files and chat ---


class LineTooLong(LineFailure):
    """A line of more bytes than any prompt of the model needs."""

    message = (
        "LineTooLong: line {line}: {num_bytes} bytes, the limit is {limit}. Shorten the line, or "
        "check that the file has one object a line."
    )


class BadBatchField(LineFailure):
    """A field of an OpenAI batch line, or of its body, of the wrong form."""

    message = (
        "BadBatchField: line {line}: '{field}' must be {expected}, got {got}. Correct the line."
    )


class BatchFieldUnsupported(LineFailure):
    """A field of the OpenAI API, or a value of it, that this version has nothing for."""

    message = (
        "BatchFieldUnsupported: line {line}: '{field}' of the body is {value}: {reason}. Leave it "
        "out."
    )


class BadChat(RequestError):
    """Messages, tools or thinking fields that are no conversation."""

    message = "BadChat: {where}: {reason}. Correct the messages, or the fields beside them."


class ChatUnsupported(RequestError):
    """A conversation that asks for more than text in, text and tool calls out."""

    message = "ChatUnsupported: {where}: {what} is not supported yet. {hint}"


class ChatNotEncodable(RequestError):
    """A conversation that the tokenizer of the checkpoint has no tokens for."""

    message = (
        "ChatNotEncodable: request '{request_id}': the tokenizer {path} cannot encode the chat "
        "format: {reason}. Use a checkpoint with the chat tokens, or give 'prompt'."
    )


class ReplyUnreadable(ServingError):
    """An output that the parser of chat replies gives up on."""

    message = (
        "ReplyUnreadable: request '{request_id}': the output is no chat reply: {reason}. Please "
        "report it."
    )


class ChatExtraMissing(MachineError):
    """A conversation where the package that knows the chat format is not installed."""

    message = (
        "ChatExtraMissing: {where}: chat needs the package deepseek-recipe, which cannot be "
        "imported: {reason}. Install the extra: pip install 'flashreplay[chat]'."
    )
