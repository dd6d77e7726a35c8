"""A hub of one model: as a cache on disk, or served on a local port by the hub's protocol."""

import hashlib
import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

NAME = "acme/tiny-model"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def lay_out_cache(cache: Path, directory: Path, names=None, *, name=NAME, commit=COMMIT) -> Path:
    """Make a cache of the library as a download of `directory` would have left it.

    Returns:
        the snapshot: links into the blobs.
    """
    folder = cache / f"models--{name.replace('/', '--')}"
    snapshot = folder / "snapshots" / commit
    for part in (folder / "refs", folder / "blobs", snapshot):
        part.mkdir(parents=True, exist_ok=True)
    (folder / "refs" / "main").write_text(commit)
    for path in sorted(directory.iterdir()):
        if names is None or path.name in names:
            data = path.read_bytes()
            blob = hashlib.sha256(data).hexdigest()
            (folder / "blobs" / blob).write_bytes(data)
            (snapshot / path.name).symlink_to(Path("..", "..", "blobs", blob))
    return snapshot


class HubServer:
    """What the hub would answer about one model.

    Args:
        files: name to content.
        fail: path prefix (without the model) to (status, X-Error-Code); "" is the model itself.
        requests: what was asked so far, as (method, path without the model).
        on_read: called with a file name before its content is sent.
    """

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files
        self.fail: dict[str, tuple[int, str]] = {}
        self.requests: Counter[tuple[str, str]] = Counter()
        self.on_read = lambda name: None

    def answer(self, method: str, path: str) -> tuple[int, dict[str, str], bytes]:
        """Return status, headers and body."""
        path = path.partition("?")[0].removeprefix("/").removeprefix("api/models/")
        if not path.startswith(NAME):
            return 401, {"X-Error-Code": "RepoNotFound"}, b""
        path = path.removeprefix(NAME).removeprefix("/")
        self.requests[method, path] += 1
        for prefix, (status, code) in self.fail.items():
            if path.startswith(prefix):
                return status, {"X-Error-Code": code, "X-Error-Message": "no"}, b""
        kind, _, rest = path.partition("/")
        if kind == "resolve":
            return self._file(method, rest.partition("/")[2])
        if rest.partition("/")[0] not in ("main", COMMIT):
            return 404, {"X-Error-Code": "RevisionNotFound"}, b""
        body = self._tree() if kind == "tree" else self._info()
        return 200, {"Content-Type": "application/json"}, json.dumps(body).encode()

    def _file(self, method: str, name: str) -> tuple[int, dict[str, str], bytes]:
        if name not in self.files:
            return 404, {"X-Error-Code": "EntryNotFound"}, b""
        data = self.files[name]
        if method == "GET":
            self.on_read(name)
        return 200, {"ETag": f'"{_digest(data)}"', "X-Repo-Commit": COMMIT}, data

    def _info(self) -> dict:
        siblings = [
            {
                "rfilename": name,
                "size": len(data),
                "blobId": "f" * 40,
                "lfs": {"sha256": _digest(data), "size": len(data), "pointerSize": 130},
            }
            for name, data in self.files.items()
        ]
        return {"id": NAME, "sha": COMMIT, "siblings": siblings}

    def _tree(self) -> list[dict]:
        return [
            {"type": "file", "path": name, "size": len(data), "oid": _digest(data)}
            for name, data in self.files.items()
        ]


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@contextmanager
def serve(server: HubServer) -> Iterator[str]:
    """Answer on a local port; yields the endpoint."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            status, headers, body = server.answer(self.command, self.path)
            self.send_response(status)
            for key, value in headers.items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, *_):
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{http.server_address[1]}"
    finally:
        http.shutdown()
        http.server_close()
        thread.join()
