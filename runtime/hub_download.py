"""Ask the hub about a checkpoint, check that it can be used here, and fetch it.

Only `runtime.hub` uses this file. What the library raises becomes an error of ours at this border:
its exceptions come from three HTTP packages, one for each of its generations.
"""

import contextlib
import logging
import re
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from graphs.errors import EngineError
from runtime.errors import (
    DiskTooSmall,
    DownloadFailed,
    HubAccessDenied,
    HubModelNotFound,
    HubRevisionNotFound,
    HubUnreachable,
    MemoryTooSmall,
    NotACheckpoint,
)
from runtime.hub_cache import (
    CONFIG,
    INDEX,
    TOKENIZER,
    WANTED,
    HubFile,
    HubId,
    Listing,
    cache_folder,
    present_bytes,
    weight_files,
)

logger = logging.getLogger(__name__)

POLL_S = 1.0

DownloadProgress = Callable[[int, int], None]


def look_up(hub: HubId) -> Listing:
    """Ask the hub what a revision is.

    Raises:
        HubModelNotFound, HubRevisionNotFound, HubAccessDenied, HubUnreachable: no answer of use.
        NotACheckpoint: files are missing that no run can do without.
    """
    from huggingface_hub import HfApi, constants

    try:
        info = HfApi().model_info(
            hub.name,
            revision=hub.revision,
            files_metadata=True,
            timeout=constants.HF_HUB_ETAG_TIMEOUT,
        )
    except _library_errors() as error:
        raise _refusal(hub, error) from error
    siblings = {sibling.rfilename: sibling for sibling in info.siblings or ()}
    # Top level only: the star of a pattern also matches a slash.
    wanted = [n for n in siblings if "/" not in n and any(fnmatch(n, p) for p in WANTED)]
    missing = [name for name in (CONFIG, TOKENIZER) if name not in wanted]
    if not any(name.endswith(".safetensors") for name in wanted):
        missing.append("*.safetensors")
    if missing or info.sha is None:
        raise NotACheckpoint(
            model=hub.name,
            revision=hub.revision,
            missing=", ".join(missing) or "a commit",
            found=", ".join(sorted(siblings)[:5]) or "no files",
        )
    return Listing(info.sha, tuple(_hub_file(siblings[name]) for name in wanted))


def fetch_snapshot(hub: HubId, listing: Listing, progress: DownloadProgress | None) -> Path:
    """Bring the files that are read into the cache; what is there already is not fetched again.

    Raises:
        HubAccessDenied, HubModelNotFound: the hub lists the model and does not give it.
        ConfigError, NotACheckpoint: its config.json is not of this model, or its index names files
            that it does not have.
        MemoryTooSmall, DiskTooSmall: it cannot be used or kept here (exit code 3); only config and
            index were fetched.
        DownloadFailed: it broke off.
    """
    from huggingface_hub import hf_hub_download, snapshot_download

    with _translated(hub, listing), _bars(progress is None and sys.stderr.isatty()):
        # By the revision's name, so that the cache knows the name when there is no network.
        config = hf_hub_download(hub.name, CONFIG, revision=hub.revision)
        if any(file.name == INDEX for file in listing.files):
            hf_hub_download(hub.name, INDEX, revision=listing.commit)
        snapshot = cache_folder(hub) / "snapshots" / listing.commit
        listing = _needed_part(hub, listing, snapshot)
        if all((snapshot / file.name).is_file() for file in listing.files):
            return snapshot
        _check_memory(hub, Path(config).parent)
        _check_disk(hub, listing)
        with _watched(hub, listing, progress):
            names = [file.name for file in listing.files]
            return Path(snapshot_download(hub.name, revision=listing.commit, allow_patterns=names))


def fetch_tokenizer(hub: HubId, listing: Listing) -> Path:
    """Bring configuration and tokenizer into the cache and nothing else.

    Raises:
        HubAccessDenied, HubModelNotFound, DownloadFailed: see `fetch_snapshot`.
    """
    from huggingface_hub import hf_hub_download

    with _translated(hub, listing), _bars(False):
        hf_hub_download(hub.name, TOKENIZER, revision=hub.revision)
        return Path(hf_hub_download(hub.name, CONFIG, revision=hub.revision)).parent


def _needed_part(hub: HubId, listing: Listing, snapshot: Path) -> Listing:
    """Leave out weight files that the index does not name, such as another format's."""
    weights = weight_files(snapshot)
    names = {file.name for file in listing.files}
    if not weights <= names:
        raise NotACheckpoint(
            model=hub.name,
            revision=hub.revision,
            missing=", ".join(sorted(weights - names)[:5]),
            found=", ".join(sorted(names)[:5]),
        )
    kept = [f for f in listing.files if f.name in weights or not f.name.endswith(".safetensors")]
    return Listing(listing.commit, tuple(kept))


def _hub_file(sibling: Any) -> HubFile:
    lfs = sibling.lfs
    blob = sibling.blob_id if lfs is None else lfs.sha256
    return HubFile(sibling.rfilename, sibling.size or 0, blob or "")


def _check_disk(hub: HubId, listing: Listing) -> None:
    needed = listing.num_bytes - present_bytes(hub, listing)
    folder = cache_folder(hub) / "blobs"  # each part of the path may be a link to another disk
    while not folder.is_dir():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise DiskTooSmall(
            model=hub.name,
            total_bytes=listing.num_bytes,
            count=len(listing.files),
            needed_bytes=needed,
            free_bytes=free,
            lacking_bytes=needed - free,
            cache=cache_folder(hub).parent,
        )
    total = listing.num_bytes
    logger.info("fetching %d of %d bytes of %s into %s", needed, total, hub.name, folder)


def _check_memory(hub: HubId, directory: Path) -> None:
    """Refuse a model whose weights alone exceed the memory, in the smallest form they can have."""
    from backends.capability import probe_cpu
    from model.config import ModelConfig
    from model.weights import tensor_table

    config = ModelConfig.from_dir(directory)
    needed = 0
    for entry in tensor_table(config).values():
        if entry.feature != "text" or entry.kind == "engram":
            continue  # not loaded, or mapped
        if config.quantization_config is None and entry.is_quantized:
            rows, columns = entry.shape
            needed += 2 * rows * columns  # a plain checkpoint has BF16 or wider
        else:
            needed += entry.num_bytes
    free = probe_cpu().available_bytes
    if needed > free:
        raise MemoryTooSmall(
            what=f"the model '{hub.name}'",
            needed_bytes=needed,
            detail="text weights without Engram tables; they were not fetched",
            free_bytes=free,
            hint="Use a machine with more memory.",
        )


@contextlib.contextmanager
def _bars(is_shown: bool) -> Iterator[None]:
    """Let the library draw its bars, or keep it from that."""
    from huggingface_hub.utils.tqdm import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    if is_shown or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


@contextlib.contextmanager
def _watched(hub: HubId, listing: Listing, progress: DownloadProgress | None) -> Iterator[None]:
    """Report how much of a listing is on disk, about once a second.

    The files are looked at because the library's own bars differ from release to release.
    """
    if progress is None:
        yield
        return
    is_done = threading.Event()

    def poll() -> None:
        most = 0  # a part vanishes for a moment when it becomes whole
        while not is_done.wait(POLL_S):
            most = max(most, present_bytes(hub, listing, is_resumable=False))
            progress(most, listing.num_bytes)

    thread = threading.Thread(target=poll, name="hub progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_done.set()
        thread.join()
    progress(listing.num_bytes, listing.num_bytes)


def _library_errors() -> tuple[type[BaseException], ...]:
    """Return what the library raises about the network and the disk.

    The base of its HTTP error is that of requests, httpx or httpx2, whichever it uses; connection
    errors of the same package share it. The transfer library raises plain RuntimeErrors.
    """
    from huggingface_hub import errors

    return (OSError, RuntimeError, *errors.HfHubHTTPError.__bases__)


def _refusal(hub: HubId, error: BaseException) -> EngineError:
    """Translate what the hub, or nobody, answered to a question."""
    from huggingface_hub import constants, errors

    endpoint, error = constants.ENDPOINT, _cause(error)
    if isinstance(error, errors.GatedRepoError):
        return HubAccessDenied(endpoint=endpoint, model=hub.name, reason="it is gated")
    if isinstance(error, errors.RepositoryNotFoundError):
        return HubModelNotFound(model=hub.name, as_path=hub.as_path, endpoint=endpoint)
    if isinstance(error, errors.RevisionNotFoundError):
        return HubRevisionNotFound(model=hub.name, revision=hub.revision)
    if _status(error) in (401, 403):
        return HubAccessDenied(endpoint=endpoint, model=hub.name, reason=_reason(error))
    return HubUnreachable(
        model=hub.name,
        as_path=hub.as_path,
        endpoint=endpoint,
        reason=_reason(error),
        revision=hub.revision,
        cache=cache_folder(hub).parent,
    )


@contextlib.contextmanager
def _translated(hub: HubId, listing: Listing) -> Iterator[None]:
    """Turn what a download raises into one error with what is there so far."""
    try:
        yield
    except _library_errors() as error:
        refusal = _refusal(hub, error)
        if not isinstance(refusal, HubUnreachable):
            raise refusal from error
        raise DownloadFailed(
            model=hub.name,
            commit=listing.commit,
            reason=_reason(error),
            done_bytes=present_bytes(hub, listing),
            total_bytes=listing.num_bytes,
            cache=cache_folder(hub).parent,
        ) from error


def _reason(error: BaseException) -> str:
    """Return one line about an exception of the library, without its stop."""
    error = _cause(error)
    if status := _status(error):
        return f"HTTP status {status}"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    lines = re.split(r"[\r\n]", str(error).strip(), maxsplit=1)
    return f"{type(error).__name__}: {lines[0][:300].rstrip('. ')}".removesuffix(": ")


def _status(error: BaseException) -> int | None:
    """Return the status of an answer, None for an error without one."""
    return getattr(getattr(error, "response", None), "status_code", None)


def _cause(error: BaseException) -> BaseException:
    """Return what is behind the library's word that a file is neither here nor to be had."""
    from huggingface_hub import errors

    is_wrapped = isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__ is not None
    return error.__cause__ or error if is_wrapped else error
