"""What the library's cache on disk holds of a hub model, and what a checkpoint needs of it.

Nothing here asks the hub. The layout, `models--owner--name/{refs,blobs,snapshots/<commit>}` with
snapshots that link to blobs, is the one that `huggingface_hub` documents.
"""

import contextlib
import json
from dataclasses import dataclass
from pathlib import Path

from runtime.errors import HubCacheUnreadable

CONFIG, TOKENIZER = "config.json", "tokenizer.json"
SINGLE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
WANTED = (CONFIG, "tokenizer*.json", "*.safetensors", INDEX)  # at the top level


@dataclass(frozen=True, slots=True)
class HubId:
    """A model of the hub.

    Args:
        name: owner/name.
        revision: branch, tag or commit.
        as_path: why the same text is no folder, for messages.
    """

    name: str
    revision: str
    as_path: str


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a listing.

    Args:
        name: its name at the top level of the repository.
        num_bytes: its size, 0 where the hub does not say.
        blob: its name among the blobs of the cache.
    """

    name: str
    num_bytes: int
    blob: str


@dataclass(frozen=True, slots=True)
class Listing:
    """What a revision consists of, as far as it is read.

    Args:
        commit: the commit that the revision is now.
        files: the wanted files.
    """

    commit: str
    files: tuple[HubFile, ...]

    @property
    def num_bytes(self) -> int:
        """Size of all files."""
        return sum(file.num_bytes for file in self.files)


def cache_folder(hub: HubId) -> Path:
    """Return where the library's cache keeps a model, there or not."""
    from huggingface_hub import constants  # deferred, as everywhere here: it is slow to import

    return Path(constants.HF_HUB_CACHE) / f"models--{hub.name.replace('/', '--')}"


def cached_snapshot(hub: HubId) -> Path | None:
    """Return the snapshot of a revision in the cache, complete or not; nothing is asked.

    Raises:
        HubCacheUnreadable: the system refuses to read it.
    """
    from huggingface_hub import errors, snapshot_download

    try:
        found = snapshot_download(
            hub.name,
            revision=hub.revision,
            local_files_only=True,
        )
    except errors.LocalEntryNotFoundError as error:
        # Newer releases say that they know the snapshot to be incomplete, and where it is.
        partial = getattr(error, "snapshot_path", None)
        return None if partial is None else Path(partial)
    except OSError as error:
        raise HubCacheUnreadable(
            cache=cache_folder(hub), reason=error.strerror or type(error).__name__
        ) from error
    return Path(found)


def weight_files(snapshot: Path) -> set[str]:
    """Return the weight files of a checkpoint, there or not: what its index names, or the one file.

    An index that cannot be read names none; the loader explains it.
    """
    index = snapshot / INDEX
    if not index.is_file():
        return {SINGLE_FILE}
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
        return {str(name) for name in json.loads(index.read_bytes())["weight_map"].values()}
    return set()


def missing_files(snapshot: Path) -> list[str]:
    """Return the files that a checkpoint needs and a snapshot does not have.

    A link into the cache whose file is gone counts as missing.
    """
    needed = {CONFIG, TOKENIZER} | weight_files(snapshot)
    return sorted(name for name in needed if not (snapshot / name).is_file())


def present_bytes(hub: HubId, listing: Listing, *, is_resumable: bool = True) -> int:
    """Count the bytes of a listing that are in the cache.

    Args:
        hub: the model.
        listing: its files.
        is_resumable: count of a part only what the library goes on with, `<blob>.incomplete`; newer
            releases put a number into the name and fetch the file again from its start.
    """
    folder = cache_folder(hub)
    blobs = folder / "blobs"
    parts: dict[str, int] = {}
    for path in blobs.iterdir() if blobs.is_dir() else ():
        blob, dot, rest = path.name.partition(".")
        if not dot or rest == "incomplete" or not is_resumable:
            with contextlib.suppress(OSError):  # renamed just now, by the thread that fetches it
                parts[blob] = max(parts.get(blob, 0), path.stat().st_size)
    snapshot = folder / "snapshots" / listing.commit
    return sum(
        file.num_bytes
        if (snapshot / file.name).is_file()
        else min(file.num_bytes, parts.get(file.blob, 0))
        for file in listing.files
    )
