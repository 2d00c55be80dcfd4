# ruff: noqa: ARG001 - all routes are called with the same arguments
"""A server on the loopback interface that speaks the part of the Hub's HTTP API which pushing and pulling need."""

import base64
import hashlib
import json
import os
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlparse

import pytest


class Server(ThreadingHTTPServer):
    """Repositories in memory: name -> branch -> path -> bytes."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.forget()

    def forget(self):
        self.repositories, self.private, self.commits, self.objects = {}, {}, [], {}
        #: Paths of requests for which the server answers 500.
        self.broken = None

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        """Print nothing."""

    def answer(self, value=None, status=200, body=None, **headers):
        body = json.dumps(value).encode() if body is None else body
        self.send_response(status)
        for name, text in {"Content-Length": str(len(body)), "Content-Type": "application/json", **headers}.items():
            self.send_header(name.replace("_", "-"), text)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def handle_request(self):
        path = unquote(urlparse(self.path).path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        if self.server.broken and re.search(self.server.broken, path):
            return self.answer({"error": "out of order"}, 500)
        for method, pattern, action in ROUTES:
            if method == self.command and (match := re.fullmatch(pattern, path)):
                if action not in (create, upload, validate) and match[1] not in self.server.repositories:
                    return self.answer({"error": "Repository not found"}, 404, X_Error_Code="RepoNotFound")
                return action(self, body, *match.groups())
        return self.answer({"error": f"no such route: {self.command} {path}"}, 404)

    do_GET = do_HEAD = do_POST = do_PUT = handle_request  # noqa: N815 - names of the standard library

    def branch(self, name, revision):
        return self.server.repositories[name].get(revision, self.server.repositories[name]["main"])


def create(handler, body):
    asked = json.loads(body)
    name = f"{asked['organization']}/{asked['name']}"
    if handler.headers.get("Authorization") != "Bearer hf_test":
        return handler.answer({"error": "Invalid username or password."}, 401)
    url = {"url": f"{handler.server.url}/{name}", "id": name}
    if name in handler.server.repositories:
        return handler.answer(url | {"error": "exists"}, 409)
    handler.server.repositories[name] = {"main": {}}
    handler.server.private[name] = asked.get("visibility") == "private" or asked.get("private", False)
    return handler.answer(url)


def create_branch(handler, body, name, branch):
    branches = handler.server.repositories[name]
    if branch in branches:
        return handler.answer({"error": "Reference already exists"}, 409)
    branches[branch] = dict(branches["main"])
    return handler.answer({})


def validate(handler, body):
    handler.answer({"errors": [], "warnings": []})


def preupload(handler, body, name, revision):
    def mode(file):
        return "regular" if file["path"].endswith((".md", ".json", ".txt")) else "lfs"

    files = json.loads(body)["files"]
    handler.answer({"files": [{"path": f["path"], "uploadMode": mode(f), "shouldIgnore": False} for f in files]})


def batch(handler, body, name):
    objects = []
    for each in json.loads(body)["objects"]:
        upload = {"upload": {"href": f"{handler.server.url}/lfs/{each['oid']}"}}
        known = each["oid"] in handler.server.objects
        objects.append({"oid": each["oid"], "size": each["size"]} | ({} if known else {"actions": upload}))
    handler.answer({"transfer": "basic", "objects": objects})


def upload(handler, body, oid):
    assert hashlib.sha256(body).hexdigest() == oid
    handler.server.objects[oid] = body
    handler.answer({})


def commit(handler, body, name, revision):
    added, message = {}, ""
    for line in map(json.loads, body.decode().splitlines()):
        value = line["value"]
        if line["key"] == "header":
            message = value["summary"]
        elif line["key"] == "file":
            added[value["path"]] = base64.b64decode(value["content"])
        elif line["key"] == "lfsFile":
            added[value["path"]] = handler.server.objects[value["oid"]]
    handler.server.repositories[name][revision].update(added)
    handler.server.commits.append((revision, message, sorted(added)))
    oid = sha(handler, name, revision)
    handler.answer({"success": True, "commitOid": oid, "commitUrl": f"{handler.server.url}/{name}/commit/{oid}"})


def sha(handler, name, revision):
    return hashlib.sha256(repr((revision, sorted(handler.branch(name, revision)))).encode()).hexdigest()


def info(handler, body, name, revision="main"):
    handler.answer({"id": name, "modelId": name, "sha": sha(handler, name, revision), "siblings": []})


def tree(handler, body, name, revision):
    for branch in handler.server.repositories[name]:
        revision = branch if revision == sha(handler, name, branch) else revision
    files = handler.branch(name, revision).items()
    handler.answer(
        [
            {"type": "file", "path": path, "size": len(data), "oid": hashlib.sha256(data).hexdigest()}
            for path, data in files
        ]
    )


def resolve(handler, body, name, revision, path):
    for branch in handler.server.repositories[name]:
        revision = branch if revision == sha(handler, name, branch) else revision
    files = handler.branch(name, revision)
    if path not in files:
        return handler.answer({"error": "Entry not found"}, 404, X_Error_Code="EntryNotFound")
    etag = f'"{hashlib.sha256(files[path]).hexdigest()}"'
    return handler.answer(body=files[path], X_Repo_Commit=sha(handler, name, revision), ETag=etag)


_NAME = r"([\w.-]+/[\w.-]+)"
ROUTES = [
    ("POST", r"/api/repos/create", create),
    ("POST", rf"/api/models/{_NAME}/branch/(.+)", create_branch),
    ("POST", r"/api/validate-yaml", validate),
    ("POST", rf"/api/models/{_NAME}/preupload/(.+)", preupload),
    ("POST", rf"/{_NAME}\.git/info/lfs/objects/batch", batch),
    ("PUT", r"/lfs/(\w+)", upload),
    ("POST", rf"/api/models/{_NAME}/commit/(.+)", commit),
    ("GET", rf"/api/models/{_NAME}/revision/(.+)", info),
    ("GET", rf"/api/models/{_NAME}/tree/([^/]+)", tree),
    ("GET", rf"/api/models/{_NAME}", info),
    ("HEAD", rf"/{_NAME}/resolve/([^/]+)/(.+)", resolve),
    ("GET", rf"/{_NAME}/resolve/([^/]+)/(.+)", resolve),
]


SERVER = Server()
threading.Thread(target=SERVER.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
# The client reads these when it is imported; programs that the tests start inherit them.
os.environ |= {"HF_ENDPOINT": SERVER.url, "HF_HUB_DISABLE_XET": "1"}


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """Return the server, empty; the client knows it as the Hub."""
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    SERVER.forget()
    return SERVER
