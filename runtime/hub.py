"""Find a checkpoint by the name that a user gives: a folder, or an id of the Hugging Face hub.

A folder always wins. Protocol, cache and resuming are left to `huggingface_hub`, which also reads
its own variables (HF_HOME, HF_HUB_CACHE, HF_HUB_OFFLINE, HF_ENDPOINT, HF_TOKEN). What is added here
is what a checkpoint of 510 GB needs: only the files that are read, no download that cannot fit, and
a plain word about what went wrong.
"""

import contextlib
import dataclasses
import logging
import os
import re
from collections.abc import Callable
from pathlib import Path

from runtime.config import EngineConfig
from runtime.errors import (
    BadRevision,
    FieldConflict,
    HubUnreachable,
    ModelAmbiguous,
    ModelNotFound,
    NotInHubCache,
    SnapshotIncomplete,
)
from runtime.fields import nearest, show
from runtime.hub_cache import (
    CONFIG,
    TOKENIZER,
    HubId,
    cache_folder,
    cached_snapshot,
    missing_files,
)
from runtime.hub_download import fetch_snapshot, fetch_tokenizer, look_up

logger = logging.getLogger(__name__)

DEFAULT_REVISION = "main"

_PART = re.compile(r"[A-Za-z0-9_](?:[\w.-]*[A-Za-z0-9_])?", re.ASCII)
_REVISION = re.compile(r"[\w][\w.+/-]*", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_MAX_ID_CHARS = 96  # the hub's own limit


def resolve_model(
    model: str,
    *,
    revision: str | None = None,
    offline: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Return the folder of a checkpoint, fetching it from the hub where it is not here.

    Args:
        model: a folder, `owner/name` or `owner/name@revision`.
        revision: branch, tag or commit of a hub id; the same as `@revision`.
        offline: use the cache only, as HF_HUB_OFFLINE says for the whole process.
        progress: called with (bytes present, bytes in all) about once a second while files are
            fetched; without it the library shows its own bars where stderr is a terminal.
    Returns:
        the folder itself, or the snapshot in the hub cache, whose name is the commit.
    Raises:
        ModelNotFound, ModelAmbiguous, BadRevision, FieldConflict: the name.
        HubModelNotFound, HubRevisionNotFound, HubAccessDenied, NotACheckpoint: the hub's answer.
        HubUnreachable, NotInHubCache, SnapshotIncomplete, DiskTooSmall, MemoryTooSmall: what this
            machine lacks (exit code 3).
        DownloadFailed: it began and broke off.
        ConfigError: the hub's config.json, before any weights are fetched.
    """
    if os.path.isdir(model):  # pathlib would raise on a folder that may not be read
        if revision is not None:
            raise FieldConflict(
                where="EngineConfig",
                field="revision",
                value=show(revision),
                other="model",
                other_value=show(model),
                rule="a revision belongs to a hub id, and this is a folder",
                hint="Leave out --revision.",
            )
        return Path(model)
    hub = _read_id(model, revision)
    snapshot = _from_cache(hub) if offline or _is_offline() else _from_hub(hub, progress)
    logger.info(
        "model %s: revision %s is commit %s, in %s", hub.name, hub.revision, snapshot.name, snapshot
    )
    return snapshot


def locate_model(
    config: EngineConfig, progress: Callable[[int, int], None] | None = None
) -> tuple[Path, EngineConfig]:
    """Resolve the model of a configuration and write down which one it was.

    Args:
        config: its `model` is not None.
        progress: see `resolve_model`.
    Returns:
        the folder; the configuration, in which a hub id is pinned to the commit that was found, so
        that the report and `--dump-config` name it.
    Raises:
        EngineError: see `resolve_model`.
    """
    assert config.model is not None, "the engine knows where the built-in checkpoint is"
    directory = resolve_model(config.model, revision=config.revision, progress=progress)
    if os.path.isdir(config.model):
        return directory, config
    name, _, _ = config.model.partition("@")
    return directory, dataclasses.replace(config, model=name, revision=directory.name)


def locate_tokenizer(config: EngineConfig) -> Path:
    """Return a folder with configuration and tokenizer of a model; weights are not fetched.

    Args:
        config: its `model` is not None.
    Raises:
        EngineError: see `resolve_model`.
    """
    assert config.model is not None, "the engine knows where the built-in checkpoint is"
    if os.path.isdir(config.model):
        return resolve_model(config.model, revision=config.revision)
    hub = _read_id(config.model, config.revision)
    cached = cached_snapshot(hub)
    if cached is not None and all((cached / name).is_file() for name in (CONFIG, TOKENIZER)):
        return cached
    if _is_offline():
        return _from_cache(hub)  # says what is missing
    return fetch_tokenizer(hub, look_up(hub))


def _is_offline() -> bool:
    from huggingface_hub import constants  # deferred: it is slow to import, and folders need none

    return constants.HF_HUB_OFFLINE


def _read_id(model: str, revision: str | None) -> HubId:
    """Read a hub id, and refuse what is more likely a path."""
    name, at, own_revision = model.partition("@")
    problem = _id_problem(name)
    if problem is not None:
        raise ModelNotFound(model=_printable(model), as_path=_as_path(model), as_id=problem)
    if at and revision is not None and revision != own_revision:
        raise FieldConflict(
            where="EngineConfig",
            field="revision",
            value=show(revision),
            other="model",
            other_value=show(model),
            rule="they name the same revision",
            hint="Leave out one of the two.",
        )
    given = own_revision if at else revision
    chosen = DEFAULT_REVISION if given is None else given
    if not _REVISION.fullmatch(chosen) or ".." in chosen:
        reason = "names have letters, digits and . _ - + / only, and no '..'"
        raise BadRevision(
            model=name,
            revision=_printable(chosen),
            reason=reason if chosen else "it is empty",
        )
    hub = HubId(name, chosen, _as_path(model))
    parent = Path(model).parent
    if given is None and os.path.isdir(parent) and not cache_folder(hub).is_dir():
        folders = [str(parent / name) for name in _folders(parent)]
        hint = nearest(model, folders, prefix=f"{parent}{os.sep}", or_all=False)
        raise ModelAmbiguous(model=model, parent=parent.absolute(), nearest=hint)
    return hub


def _id_problem(name: str) -> str | None:
    """Return why a text cannot be owner/name, or None."""
    parts = name.split("/")
    if len(parts) != 2:
        return f"an id has one slash, this has {len(parts) - 1}"
    if not all(_PART.fullmatch(part) for part in parts):
        return "its two parts have letters, digits and . _ - only, and begin and end with neither"
    if "--" in name or ".." in name or name.endswith(".git"):
        return "an id has no '--', no '..' and no '.git' at its end"
    if len(name) > _MAX_ID_CHARS:
        return f"an id has at most {_MAX_ID_CHARS} characters, this has {len(name)}"
    return None


def _as_path(model: str) -> str:
    """Say what is wrong with the name as a path."""
    path = Path(model).absolute()
    text = _printable(str(path))
    if os.path.exists(path):
        return f"{text} is a file; a checkpoint is the folder around it"
    parent = next(folder for folder in path.parents if os.path.isdir(folder))
    if parent != path.parent:
        return f"{text} does not exist, the path ends at {parent}"
    hint = nearest(path.name, _folders(parent), or_all=False)
    return f"{text} does not exist" + (f"; d{hint[1:]}" if hint else "")


def _printable(text: str) -> str:
    """Keep a message on one line, whatever a shell passed on."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _folders(parent: Path) -> list[str]:
    with contextlib.suppress(OSError):  # names for a hint; the parent may be unreadable
        return [name for name in os.listdir(parent) if os.path.isdir(parent / name)]
    return []


def _from_cache(hub: HubId) -> Path:
    snapshot = cached_snapshot(hub)
    if snapshot is None:
        raise NotInHubCache(
            model=hub.name,
            as_path=hub.as_path,
            revision=hub.revision,
            cache=cache_folder(hub).parent,
        )
    missing = missing_files(snapshot)
    if missing:
        names = ", ".join(missing[:3])
        raise SnapshotIncomplete(
            model=hub.name,
            directory=snapshot,
            count=len(missing),
            missing=names if len(missing) <= 3 else f"{names}, ...",
        )
    return snapshot


def _from_hub(hub: HubId, progress: Callable[[int, int], None] | None) -> Path:
    cached = cached_snapshot(hub)
    if cached is not None and missing_files(cached):
        cached = None
    if cached is not None and _COMMIT.fullmatch(hub.revision):
        return cached  # a commit never changes: there is nothing to ask for
    try:
        listing = look_up(hub)
    except HubUnreachable as error:
        if cached is None:
            raise
        logger.warning(
            "%s was not reached (%s); using commit %s of %s from the cache. Set HF_HUB_OFFLINE=1 "
            "to use it without asking.",
            error.fields["endpoint"],
            error.fields["reason"],
            cached.name,
            hub.name,
        )
        return cached
    return fetch_snapshot(hub, listing, progress)
