"""Checkpoints by name: folders, hub ids from the cache on disk, and downloads from a local server.

The real `huggingface_hub` runs in all of them; only the server and the amounts of free memory and
disk are made up.
"""

import dataclasses
import errno
import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants, file_download

import backends.capability
from model.errors import ConfigError, UnreadableIndex
from runtime import errors, hub_download
from runtime.config import EngineConfig
from runtime.engine import plan_engine
from runtime.hub import locate_model, resolve_model
from tests.helpers.goldens import copy_golden, golden_dir
from tests.helpers.hub import COMMIT, NAME, HubServer, lay_out_cache, serve
from tests.helpers.raw_safetensors import read_raw, write_shards

CASE = "text-quant"
FILES = ("config.json", "tokenizer.json", "model.safetensors")
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache; the library reads its variables once, when it is imported."""
    folder = tmp_path / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return folder


@pytest.fixture
def offline(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def set_endpoint(monkeypatch, endpoint):
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    for module in (constants, file_download):  # older releases keep a second name of it
        monkeypatch.setattr(module, "HUGGINGFACE_CO_URL_TEMPLATE", template, raising=False)


@pytest.fixture
def no_network(monkeypatch):
    set_endpoint(monkeypatch, "http://127.0.0.1:9")  # the discard port: refused at once


def sharded(directory):
    """A golden checkpoint in three shards with an index."""
    copy_golden(CASE, directory)
    write_shards(directory, read_raw(directory / "model.safetensors"), 3)
    (directory / "model.safetensors").unlink()
    return directory


@pytest.fixture
def server(tmp_path, monkeypatch):
    """A hub that serves the sharded checkpoint among files that no run reads."""
    directory = sharded(tmp_path / "origin")
    files = {path.name: path.read_bytes() for path in directory.iterdir()}
    extra = ("README.md", "consolidated.safetensors", "original/model.safetensors")
    hub = HubServer(files | dict.fromkeys(extra, b"not wanted"))
    with serve(hub) as endpoint:
        set_endpoint(monkeypatch, endpoint)
        yield hub


def fetched(server):
    """Return the names of the files whose content was asked for."""
    paths = [path for method, path in server.requests if method == "GET"]
    return sorted(path.split("/", 2)[2] for path in paths if path.startswith("resolve/"))


def refused(error, *parts, model=NAME, **arguments):
    """Check the class, that it is one line, and parts of it; return it."""
    with pytest.raises(error) as caught:
        resolve_model(model, **arguments)
    assert "\n" not in str(caught.value)
    for part in parts:
        assert part in str(caught.value)
    return caught.value


class TestNames:
    def test_a_folder_wins_over_an_id(self, no_network):
        folder = Path(NAME)
        folder.mkdir(parents=True)
        assert resolve_model(NAME) == folder
        config = EngineConfig(model=NAME)
        assert locate_model(config) == (folder, config)

    @pytest.mark.parametrize(
        ("model", "as_path", "as_id"),
        [
            ("/no/such/folder", "/no/such/folder does not exist, the path ends at /", "3"),
            ("./folder", "here/folder does not exist", "begin and end with neither"),
            ("../x", "x does not exist", "begin and end with neither"),
            ("a/b/c", "a/b/c does not exist", "one slash, this has 2"),
            ("a/b/", "a/b does not exist", "one slash, this has 2"),
            ("gpt2", "here/gpt2 does not exist", "one slash, this has 0"),
            ("hf://a/b", "does not exist", "one slash"),
            ("a b/c", "does not exist", "letters, digits"),
            ("a--b/c", "does not exist", "no '--'"),
            ("a/b.git", "does not exist", "'.git'"),
            (f"a/{'b' * 95}", "does not exist", "at most 96 characters, this has 97"),
            ("\u00e4/b", "does not exist", "letters, digits"),
            ("x" * 5000, "does not exist", "one slash"),
            ("a\0b", "does not exist", "one slash"),
        ],
    )
    def test_what_is_neither_is_told_in_both_readings(self, no_network, model, as_path, as_id):
        error = refused(errors.ModelNotFound, model=model)
        assert error.exit_code == 2
        assert as_path in error.fields["as_path"]
        assert as_id in error.fields["as_id"]

    def test_a_file_is_not_a_folder(self):
        Path("model.safetensors").touch()
        refused(errors.ModelNotFound, "is a file; a checkpoint is", model="model.safetensors")

    def test_a_mistyped_path_is_not_sent_to_the_hub(self, server):
        Path("checkpoints", "tiny").mkdir(parents=True)
        error = refused(
            errors.ModelAmbiguous,
            "here/checkpoints exists",
            "Did you mean checkpoints/tiny?",
            "write checkpoints/tinny@main",
            model="checkpoints/tinny",
        )
        assert error.exit_code == 2
        assert not server.requests
        refused(errors.HubModelNotFound, model="checkpoints/tinny@main")
        refused(errors.ModelNotFound, "did you mean checkpoints?", model="checkpoint")

    def test_an_owner_folder_does_not_hide_what_is_in_the_cache(self, cache, offline):
        snapshot = lay_out_cache(cache, golden_dir(CASE), FILES)
        Path(NAME).parent.mkdir()
        assert resolve_model(NAME) == snapshot

    @pytest.mark.parametrize("revision", ["", "../up", "a b", "-x", "\n"])
    def test_a_revision_that_cannot_be(self, no_network, revision):
        refused(errors.BadRevision, f"of hub id '{NAME}'", model=f"{NAME}@{revision}")

    def test_revisions_that_contradict(self):
        refused(errors.FieldConflict, "the same revision", model=f"{NAME}@a", revision="b")
        refused(errors.FieldConflict, "this is a folder", model=".", revision="b")
        with pytest.raises(errors.FieldConflict, match="belongs to a hub id"):
            EngineConfig(revision="b")


class TestCache:
    def test_a_model_is_planned_by_its_id(self, cache, offline):
        """As by its folder, and the configuration says which commit it was."""
        snapshot = lay_out_cache(cache, golden_dir(CASE), FILES)
        by_id = plan_engine(EngineConfig(model=NAME))
        by_folder = plan_engine(EngineConfig(model=str(golden_dir(CASE))))
        assert by_id.directory == snapshot
        assert (by_id.config.model, by_id.config.revision) == (NAME, COMMIT)
        assert by_folder.config.revision is None
        assert by_id.model == by_folder.model
        assert by_id.memory.rows == by_folder.memory.rows

    def test_the_command_runs_offline(self, tmp_path):
        """The library's own variables, in a process of its own."""
        lay_out_cache(tmp_path / "home" / "hub", golden_dir(CASE), FILES)
        environ = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
        environ |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
        words = ["--model", f"{NAME}@main", "--prompt", "a", "--max-tokens", "2"]
        words += ["--max-model-len", "64", "--json", "report.json", "--quiet"]
        done = subprocess.run(
            [sys.executable, "-m", "runtime.offline", *words],
            env=environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["completion_tokens"] == 2
        config = json.loads(Path("report.json").read_text())["config"]
        assert (config["model"], config["revision"]) == (NAME, COMMIT)

    def test_links_on_the_way_are_followed(self, cache, tmp_path, offline):
        """The cache, the model's folder in it and its blobs may lie on three disks."""
        disks = [tmp_path / name for name in ("disk1", "disk2", "disk3")]
        lay_out_cache(disks[0], golden_dir(CASE), FILES)
        folder = disks[0] / f"models--{NAME.replace('/', '--')}"
        shutil.move(folder, disks[1])
        folder.symlink_to(disks[1])
        shutil.move(folder / "blobs", disks[2])
        (folder / "blobs").symlink_to(disks[2])
        # A relative link is read where it lies, so it has to be made new after such a move.
        for link in (folder / "snapshots" / COMMIT).iterdir():
            blob = disks[2] / Path(os.readlink(link)).name
            link.unlink()
            link.symlink_to(blob)
        cache.symlink_to(disks[0])
        snapshot = resolve_model(NAME)
        assert snapshot.samefile(disks[1] / "snapshots" / COMMIT)
        assert (snapshot / "model.safetensors").read_bytes()

    def test_a_commit_needs_no_network(self, cache, server):
        snapshot = lay_out_cache(cache, golden_dir(CASE), FILES)
        for arguments in ({"revision": COMMIT}, {"offline": True}):
            assert resolve_model(NAME, **arguments) == snapshot
        assert resolve_model(f"{NAME}@{COMMIT}", revision=COMMIT) == snapshot
        assert not server.requests

    def test_what_is_not_there_cannot_be_used_offline(self, cache, offline):
        missing = refused(errors.NotInHubCache, "here/acme/tiny-model does not exist", str(cache))
        assert missing.exit_code == 3
        lay_out_cache(cache, golden_dir(CASE), FILES)
        refused(errors.NotInHubCache, "revision 'v2'", revision="v2")
        refused(errors.NotInHubCache, "f" * 40, revision="f" * 40)

    def test_half_a_snapshot(self, cache, tmp_path, offline):
        """The index names shards that are not there, or whose blob is gone."""
        snapshot = lay_out_cache(cache, sharded(tmp_path / "origin"))
        shards = sorted(snapshot.glob("*.safetensors"))
        shards[0].unlink()
        shards[2].resolve().unlink()
        error = refused(
            errors.SnapshotIncomplete,
            str(snapshot),
            "lacks 2 files",
            shards[0].name,
            shards[2].name,
        )
        assert error.exit_code == 3
        (snapshot / "tokenizer.json").unlink()
        (snapshot / "config.json").unlink()
        refused(errors.SnapshotIncomplete, "lacks 4 files: config.json", ", ...")

    @pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": [1]}', "\0"])
    def test_an_unreadable_index_is_left_to_the_loader(self, cache, tmp_path, offline, content):
        origin = sharded(tmp_path / "origin")
        (origin / "model.safetensors.index.json").write_text(content)
        assert lay_out_cache(cache, origin) == resolve_model(NAME)
        with pytest.raises(UnreadableIndex):
            plan_engine(EngineConfig(model=NAME))

    def test_a_cache_that_may_not_be_read(self, cache, offline, monkeypatch):
        def deny(*_, **__):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

        monkeypatch.setattr(huggingface_hub, "snapshot_download", deny)
        refused(errors.HubCacheUnreadable, str(cache), "Permission denied")


class TestDownload:
    def test_only_what_is_read_is_fetched_and_once(self, server, cache, capfd):
        snapshot = resolve_model(NAME)
        names = sorted(name for name in server.files if name.startswith(("model-", "model.", "t")))
        assert sorted(os.listdir(snapshot)) == fetched(server) == ["config.json", *names]
        assert snapshot.name == COMMIT
        assert capfd.readouterr() == ("", "")
        server.requests.clear()
        assert resolve_model(NAME) == snapshot
        assert fetched(server) == []
        assert resolve_model(NAME, offline=True) == snapshot  # the name main is known

    def test_the_commit_is_logged_and_written_down(self, server, caplog):
        with caplog.at_level(logging.INFO, "runtime"):
            directory, config = locate_model(EngineConfig(model=f"{NAME}@main", seed=3))
        assert config == EngineConfig(model=NAME, revision=COMMIT, seed=3)
        assert f"{NAME}: revision main is commit {COMMIT}, in {directory}" in caplog.text
        assert locate_model(config) == (directory, config)

    def test_progress_ends_at_the_total(self, server, monkeypatch):
        monkeypatch.setattr(hub_download, "POLL_S", 0.001)
        calls = []
        resolve_model(NAME, progress=lambda done, total: calls.append((done, total)))
        total = sum(len(server.files[name]) for name in fetched(server))
        assert calls == sorted(calls)
        assert calls[-1] == (total, total)
        assert {count for _, count in calls} == {total}

    @pytest.mark.parametrize(
        ("error", "failure", "parts"),
        [
            ("HubModelNotFound", (401, "RepoNotFound"), ("here/acme/tiny-model", "http://127")),
            ("HubModelNotFound", (404, "RepoNotFound"), ("for this login", "HF_TOKEN")),
            ("HubRevisionNotFound", (404, "RevisionNotFound"), ("'main'",)),
            ("HubAccessDenied", (403, "GatedRepo"), ("it is gated", "HF_TOKEN")),
            ("HubAccessDenied", (403, ""), ("HTTP status 403",)),
            ("HubUnreachable", (500, ""), ("500", "here/acme/tiny-model")),
        ],
    )
    def test_what_the_hub_refuses(self, server, error, failure, parts):
        server.fail[""] = failure
        caught = refused(getattr(errors, error), *parts)
        assert caught.exit_code == (3 if error == "HubUnreachable" else 2)

    def test_a_gated_model_shows_its_list_and_not_its_files(self, server):
        server.fail["resolve"] = (403, "GatedRepo")
        refused(errors.HubAccessDenied, "it is gated")
        assert fetched(server) == []

    def test_no_network(self, cache, no_network):
        error = refused(
            errors.HubUnreachable, "http://127.0.0.1:9", "refused", "'main'", str(cache)
        )
        assert error.exit_code == 3

    def test_without_a_network_a_complete_snapshot_does(self, cache, no_network, caplog):
        snapshot = lay_out_cache(cache, golden_dir(CASE), FILES)
        assert resolve_model(NAME) == snapshot
        (record,) = [r for r in caplog.records if r.levelno == logging.WARNING]
        assert COMMIT in record.getMessage()
        assert "HF_HUB_OFFLINE" in record.getMessage()
        (snapshot / "model.safetensors").unlink()
        refused(errors.HubUnreachable, "No complete snapshot")

    @pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
    def test_a_model_without_a_file_that_is_needed(self, server, name):
        del server.files[name]
        refused(errors.NotACheckpoint, f"lacks {name}; it has README.md")
        assert fetched(server) == []

    def test_a_model_without_weights(self, server):
        for name in [name for name in server.files if name.endswith(".safetensors")]:
            del server.files[name]
        refused(errors.NotACheckpoint, "lacks *.safetensors")

    def test_an_index_that_names_more_than_there_is(self, server):
        del server.files["model-00002-of-00003.safetensors"]
        refused(errors.NotACheckpoint, "lacks model-00002-of-00003.safetensors")
        assert fetched(server) == ["config.json", "model.safetensors.index.json"]

    def test_another_model_is_refused_by_its_config(self, server):
        server.files["config.json"] = b'{"model_type": "other"}'
        refused(ConfigError)
        assert fetched(server) == ["config.json", "model.safetensors.index.json"]

    def test_a_disk_that_is_too_small(self, server, cache, monkeypatch):
        present = len(server.files["config.json"]) + len(
            server.files["model.safetensors.index.json"]
        )
        total = present + sum(
            len(data) for name, data in server.files.items() if name.startswith(("model-", "tok"))
        )
        usage = shutil.disk_usage("/")._replace(free=total - present - 1)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
        error = refused(errors.DiskTooSmall, f"{total} bytes in 6 files", str(cache))
        assert error.exit_code == 3
        assert error.fields["needed_bytes"] == total - present
        assert error.fields["lacking_bytes"] == 1
        assert fetched(server) == ["config.json", "model.safetensors.index.json"]
        usage = usage._replace(free=total - present)
        assert resolve_model(NAME).is_dir()

    def test_a_memory_that_is_too_small(self, server, monkeypatch):
        """The weights in memory, by the configuration: what the loader would find too."""
        sizes = {name: len(data) for name, data in server.files.items()}
        probe = backends.capability.probe_cpu()

        def with_bytes(number):
            small = dataclasses.replace(probe, available_bytes=number)
            monkeypatch.setattr(backends.capability, "probe_cpu", lambda: small)

        with_bytes(1000)
        error = refused(errors.MemoryTooSmall, NAME, "1000 bytes are free")
        assert error.exit_code == 3
        weights = sum(size for name, size in sizes.items() if name.startswith("model-"))
        assert 0.3 * weights < error.fields["needed_bytes"] < weights  # Engram tables are mapped
        assert fetched(server) == ["config.json", "model.safetensors.index.json"]
        with_bytes(error.fields["needed_bytes"])
        assert resolve_model(NAME).is_dir()

    def test_a_download_that_broke_off_is_resumed(self, server, cache):
        last = "model-00003-of-00003.safetensors"
        server.fail[f"resolve/{COMMIT}/{last}"] = (400, "")
        error = refused(errors.DownloadFailed, COMMIT, "400", str(cache), "run the same command")
        assert error.exit_code == 1
        assert 0 < error.fields["done_bytes"] < error.fields["total_bytes"]
        refused(errors.SnapshotIncomplete, last, offline=True)
        kept = set(os.listdir(cache / f"models--{NAME.replace('/', '--')}" / "snapshots" / COMMIT))
        server.fail.clear()
        server.requests.clear()
        snapshot = resolve_model(NAME)
        assert last in fetched(server)
        assert not kept & set(fetched(server))
        assert (snapshot / last).read_bytes() == server.files[last]

    @pytest.mark.filterwarnings("ignore:Not enough free disk space")  # by the library, of config
    def test_a_part_counts_only_where_the_library_goes_on_with_it(self, server, cache, monkeypatch):
        """Older releases keep <blob>.incomplete; the disk must hold the rest alone."""
        free = []
        usage = shutil.disk_usage("/")
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=0))
        for suffix in ("", ".incomplete", ".0a1b.incomplete"):
            shutil.rmtree(cache, ignore_errors=True)
            blobs = cache / f"models--{NAME.replace('/', '--')}" / "blobs"
            blobs.mkdir(parents=True)
            listing = server._info()["siblings"]
            (sha,) = (
                s["lfs"]["sha256"] for s in listing if s["rfilename"].startswith("model-00001")
            )
            (blobs / f"{sha}{suffix}").write_bytes(b"x" * 1000)
            free.append(refused(errors.DiskTooSmall).fields["needed_bytes"])
        assert free[0] == free[1] == free[2] - 1000

    @pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES, errno.EROFS])
    def test_a_disk_that_fails_on_the_way(self, server, monkeypatch, code):
        def fail(*_, **__):
            raise OSError(code, os.strerror(code))

        resolve = huggingface_hub.snapshot_download

        def download(*words, local_files_only=False, **named):
            if local_files_only:
                return resolve(*words, local_files_only=True, **named)
            return fail()

        monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
        refused(errors.DownloadFailed, os.strerror(code))


def test_a_folder_costs_no_import_of_the_library():
    code = (
        "import sys; from runtime.hub import resolve_model; resolve_model('.');"
        "print({'huggingface_hub', 'torch'} & set(sys.modules))"
    )
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True)
    assert done.stdout == "set()\n", done.stderr
