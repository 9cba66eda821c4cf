"""A fake Hub on localhost: enough of the protocol for huggingface_hub to push to it and pull from it.

Repos, branches, commits, LFS files and tokens are dicts in memory. `requests` records all requests; `fail` injects
errors.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import re
import secrets
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

TOKENS = {"hf_owner": "me", "hf_reader": "someone-else"}
"""Users by token. Each can write to repos under its own name."""


@dataclasses.dataclass(frozen=True)
class File:
    content: bytes
    large: bool

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    @property
    def oid(self) -> str:
        """The git object id; for an LFS file, that of its pointer."""
        pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{self.sha256}\nsize {len(self.content)}\n"
        content = pointer.encode() if self.large else self.content
        return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@dataclasses.dataclass
class Repo:
    private: bool
    commits: dict[str, dict[str, File]]
    branches: dict[str, str]
    messages: list[str] = dataclasses.field(default_factory=list)

    @classmethod
    def new(cls, private: bool) -> Repo:
        repo = cls(private, {}, {})
        repo.add("main", {".gitattributes": File(b"*.safetensors filter=lfs\n", False)}, "initial commit")
        return repo

    def add(self, branch: str, files: dict[str, File], message: str) -> str:
        self.messages.append(message)
        sha = secrets.token_hex(20)  # unique, so that it is in no client's cache
        self.commits[sha], self.branches[branch] = files, sha
        return sha

    def sha(self, revision: str) -> str | None:
        return self.branches.get(revision) or (revision if revision in self.commits else None)


class Refused(Exception):
    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code = status, code


class Hub:
    """Use as `with Hub() as hub:` and set HF_ENDPOINT to `hub.url`."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.large: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.fail: Callable[[str, str], Exception | None] = lambda method, path: None
        self.before_commit: Callable[[Repo], None] = lambda repo: None
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Hub:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def files(self, repo: str, revision: str = "main") -> dict[str, bytes]:
        stored = self.repos[repo]
        return {name: file.content for name, file in stored.commits[stored.sha(revision) or ""].items()}

    def repo(self, name: str, user: str | None, write: bool = False) -> Repo:
        repo = self.repos.get(name)
        is_owner = user is not None and name.startswith(f"{user}/")
        if repo is None or (repo.private and not is_owner):
            raise Refused(404 if user else 401, "Repository not found", "RepoNotFound")
        if write and not is_owner:
            raise Refused(403, "You don't have the rights to write to this repo")
        return repo

    def files_at(self, name: str, revision: str, user: str | None) -> tuple[str, dict[str, File], Repo]:
        repo = self.repo(name, user)
        sha = repo.sha(revision)
        if sha is None:
            raise Refused(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return sha, repo.commits[sha], repo


ID = r"(?P<id>[\w.-]+(?:/[\w.-]+)?)"
ROUTES = [
    ("GET", r"/api/whoami-v2", "whoami"),
    ("POST", r"/api/repos/create", "create"),
    ("POST", r"/api/validate-yaml", "validate"),
    ("POST", rf"/api/models/{ID}/branch/(?P<rev>[^/]+)", "branch"),
    ("POST", rf"/api/models/{ID}/preupload/(?P<rev>[^/]+)", "preupload"),
    ("POST", rf"/api/models/{ID}/commit/(?P<rev>[^/]+)", "commit"),
    ("GET", rf"/api/models/{ID}/revision/(?P<rev>[^/]+)", "info"),
    ("GET", rf"/api/models/{ID}/tree/(?P<rev>[^/]+)", "tree"),
    ("POST", rf"/{ID}\.git/info/lfs/objects/batch", "batch"),
    ("PUT", r"/lfs/(?P<oid>\w+)", "put"),
    ("POST", r"/lfs/(?P<oid>\w+)/verify", "verify"),
    ("HEAD", rf"/{ID}/resolve/(?P<rev>[^/]+)/(?P<file>.+)", "resolve"),
    ("GET", rf"/{ID}/resolve/(?P<rev>[^/]+)/(?P<file>.+)", "resolve"),
    ("GET", rf"/api/models/{ID}", "info"),
]


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Keep the output of pytest clean."""

    def _answer(self) -> None:
        url = urlsplit(self.path)
        self.hub.requests.append(f"{self.command} {url.path}")
        self.query = parse_qs(url.query)
        try:
            self.body = self._read()
            failure = self.hub.fail(self.command, url.path)
            if failure is not None:
                raise failure
            token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
            if token and token not in TOKENS and not url.path.startswith("/lfs/"):
                raise Refused(401, "Invalid credentials in Authorization header")
            self.user = TOKENS.get(token)
            for method, pattern, name in ROUTES:
                match = re.fullmatch(pattern, url.path)
                if method == self.command and match:
                    getattr(self, name)(**{key: unquote(value) for key, value in match.groupdict().items()})
                    return
            raise Refused(404, f"the fake Hub has no route {self.command} {url.path}")
        except Refused as refused:
            headers = {"X-Error-Message": str(refused)} | ({"X-Error-Code": refused.code} if refused.code else {})
            self._send({"error": str(refused)}, refused.status, headers)
        except ConnectionError:
            self.close_connection = True

    do_GET = do_POST = do_PUT = do_HEAD = _answer

    def _read(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _send(self, answer: Any = None, status: int = 200, headers: dict[str, str] | None = None) -> None:
        content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def whoami(self) -> None:
        if self.user is None:
            raise Refused(401, "Invalid username or password.")
        self._send({"name": self.user, "type": "user", "auth": {"accessToken": {"role": "write"}}})

    def create(self) -> None:
        request = json.loads(self.body)
        if self.user is None:
            raise Refused(401, "Invalid username or password.")
        owner = request.get("organization") or self.user
        if owner != self.user:
            raise Refused(403, f"You don't have the rights to create a model under the namespace {owner!r}")
        name = f"{owner}/{request['name']}"
        exists = name in self.hub.repos
        private = request.get("visibility") == "private" or bool(request.get("private"))
        self.hub.repos.setdefault(name, Repo.new(private))
        self._send({"url": f"{self.hub.url}/{name}"}, 409 if exists else 200)

    def validate(self) -> None:
        """The checks of the real Hub for the metadata that we write."""
        content = json.loads(self.body)["content"]
        match = re.match(r"---\n(.*?)\n---\n", content, re.DOTALL)
        errors = [] if match else ["no metadata"]
        try:
            metadata = yaml.safe_load(match[1]) if match else {}
        except yaml.YAMLError as error:
            metadata, errors = {}, [str(error)]
        for name, kind in (("base_model", str), ("library_name", str), ("pipeline_tag", str), ("tags", list)):
            if not isinstance(metadata.get(name, kind()), kind):
                errors.append(f'"{name}" must be a {kind.__name__}')
        if not re.fullmatch(r"([\w.-]+/)?[\w.-]+|", metadata.get("base_model", "")):
            errors.append('"base_model" is not a valid model id')
        self._send({"errors": [{"message": error} for error in errors], "warnings": []}, 400 if errors else 200)

    def branch(self, id: str, rev: str) -> None:
        repo = self.hub.repo(id, self.user, write=True)
        if rev in repo.branches:
            raise Refused(409, "Reference already exists")
        repo.branches[rev] = repo.branches["main"]
        self._send({})

    def preupload(self, id: str, rev: str) -> None:
        _, files, _ = self.hub.files_at(id, rev, self.user)
        self.hub.repo(id, self.user, write="create_pr" not in self.query)
        answers = []
        for request in json.loads(self.body)["files"]:
            path = request["path"]
            mode = "lfs" if path.endswith(".safetensors") else "regular"
            existing = files.get(path)
            oid = None if existing is None else existing.sha256 if existing.large else existing.oid
            answers.append({"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        self._send({"files": answers})

    def batch(self, id: str) -> None:
        objects = []
        for request in json.loads(self.body)["objects"]:
            href = f"{self.hub.url}/lfs/{request['oid']}"
            actions = {"actions": {"upload": {"href": href}, "verify": {"href": f"{href}/verify"}}}
            objects.append(request if request["oid"] in self.hub.large else request | actions)
        self._send({"transfer": "basic", "objects": objects})

    def put(self, oid: str) -> None:
        if hashlib.sha256(self.body).hexdigest() != oid:
            raise Refused(400, "the content does not match its hash")
        self.hub.large[oid] = self.body
        self._send(b"", headers={"ETag": oid})

    def verify(self, oid: str) -> None:
        if len(self.hub.large.get(oid, b"")) != json.loads(self.body)["size"]:
            raise Refused(404, "no such object")
        self._send({})

    def commit(self, id: str, rev: str) -> None:
        is_pull_request = "create_pr" in self.query
        repo = self.hub.repo(id, self.user, write=not is_pull_request)
        self.hub.before_commit(repo)
        sha, files, _ = self.hub.files_at(id, rev, self.user)
        files, message = dict(files), ""
        for line in self.body.splitlines():
            key, value = (entry := json.loads(line))["key"], entry["value"]
            if key == "header":
                message = value["summary"]
                if value.get("parentCommit", sha) != sha:
                    raise Refused(412, "A commit has happened since. Please refresh and try again.")
            elif key == "file":
                files[value["path"]] = File(base64.b64decode(value["content"]), False)
            elif key == "lfsFile":
                if value["oid"] not in self.hub.large:
                    raise Refused(400, f"the LFS file {value['path']} was not uploaded")
                files[value["path"]] = File(self.hub.large[value["oid"]], True)
            elif key == "deletedFile":
                del files[value["path"]]
        branch = f"refs/pr/{sum(name.startswith('refs/pr') for name in repo.branches) + 1}" if is_pull_request else rev
        new = repo.add(branch, files, message)
        number = branch.rpartition("/")[2]
        answer = {"success": True, "commitOid": new, "commitUrl": f"{self.hub.url}/{id}/commit/{new}"}
        self._send(
            answer | ({"pullRequestUrl": f"{self.hub.url}/{id}/discussions/{number}"} if is_pull_request else {})
        )

    def info(self, id: str, rev: str = "main") -> None:
        sha, files, repo = self.hub.files_at(id, rev, self.user)
        siblings = [{"rfilename": name} for name in sorted(files)]
        self._send({"id": id, "modelId": id, "sha": sha, "private": repo.private, "siblings": siblings, "tags": []})

    def tree(self, id: str, rev: str) -> None:
        _, files, _ = self.hub.files_at(id, rev, self.user)
        rows = []
        for name, file in sorted(files.items()):
            size = len(file.content)
            row = {"type": "file", "path": name, "size": size, "oid": file.oid}
            lfs = {"lfs": {"oid": file.sha256, "size": size, "pointerSize": 128}} if file.large else {}
            rows.append(row | lfs)
        self._send(rows)

    def resolve(self, id: str, rev: str, file: str) -> None:
        sha, files, _ = self.hub.files_at(id, rev, self.user)
        commit = {"X-Repo-Commit": sha}
        if file not in files:
            headers = commit | {"X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found"}
            self._send({"error": "Entry not found"}, 404, headers)
            return
        stored = files[file]
        size = str(len(stored.content))
        linked = {"X-Linked-Etag": f'"{stored.sha256}"', "X-Linked-Size": size} if stored.large else {}
        self._send(stored.content, headers={**commit, "ETag": f'"{stored.oid}"', "Accept-Ranges": "bytes", **linked})
