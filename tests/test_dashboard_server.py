"""The dashboard's server, asked as a browser would and as an attacker would: who is let in, what can be read, what can be changed."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from email.message import Message
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from lockstep.dashboard import assets
from lockstep.dashboard.routes import MOST_STREAMS, Request, Stream
from lockstep.dashboard.security import Refused
from lockstep.dashboard.server import Server
from support import Cli, wait_for
from test_report import ALONE, BOTH, RECIPE, Folders, isolated, step_rows, study_folder

HOSTILE = '<img src=x onerror=alert(1)> & "q" {{script}} ünï'
SECRET = "a secret that lies outside of the runs"


class Asked:
    """A server of its own, and questions to it with any header."""

    def __init__(self, root: Path, host: str = "127.0.0.1") -> None:
        self.server = Server(root, host, 0)
        self.thread = threading.Thread(target=self.server.serve)
        self.thread.start()
        self.port, self.token = self.server.server_port, self.server.app.guard.token

    def end(self) -> None:
        self.server.shutdown()
        self.thread.join()

    def open(
        self, path: str, method: str = "GET", body: str = "", hosts: tuple[str, ...] | None = None, **headers: str
    ) -> HTTPResponse:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=20)
        connection.putrequest(method, path, skip_host=True)
        for host in (f"127.0.0.1:{self.port}",) if hosts is None else hosts:
            connection.putheader("Host", host)
        for name, value in headers.items():
            connection.putheader(name.replace("_", "-"), value)
        if method == "POST":
            connection.putheader("Content-Length", str(len(body)))
        connection.endheaders(body.encode())
        return connection.getresponse()

    def __call__(self, path: str, *words: Any, **more: Any) -> tuple[int, str]:
        answer = self.open(path, *words, **more)
        text = answer.read().decode()
        assert "frame-ancestors 'none'" in answer.headers["Content-Security-Policy"], "on every answer"
        assert "unsafe" not in answer.headers["Content-Security-Policy"]
        assert SECRET not in text
        return answer.status, text

    def stop(self, run: str, **headers: str | None) -> tuple[int, str]:
        usual: dict[str, str | None] = {
            "Origin": f"http://127.0.0.1:{self.port}",
            "Content_Type": "application/json",
            "X_Lockstep_Token": self.token,
        }
        kept = {name: value for name, value in {**usual, **headers}.items() if value is not None}
        return self("/api/stop", "POST", json.dumps({"id": run}), **kept)


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folders:
    made = isolated(tmp_path, monkeypatch)
    made.run("one")
    (tmp_path / "secret").write_text(SECRET)
    return made


@pytest.fixture
def ask(folders: Folders) -> Iterator[Asked]:
    asked = Asked(folders.root)
    yield asked
    asked.end()


def raw_post(ask: Asked, lengths: list[str]) -> int:
    """The status of a POST whose body never comes: a server that waits for it would not answer."""
    with socket.create_connection(("127.0.0.1", ask.port), timeout=20) as connection:
        head = ["POST /api/stop HTTP/1.1", "Host: elsewhere", *(f"Content-Length: {length}" for length in lengths)]
        connection.sendall("\r\n".join([*head, "", "x"]).encode())
        return int(connection.recv(4096).split()[1])


def states(ask: Asked) -> dict[str, str]:
    return {row["id"]: row["state"] for row in json.loads(ask("/api/runs")[1])["rows"]}


def events(answer: HTTPResponse, upto: str) -> list[tuple[str, Any]]:
    """What a stream says until it has said this."""
    found, name = [], ""
    while line := answer.readline().decode():
        if line.startswith("event: "):
            name = line[7:].strip()
        elif line.startswith("data: "):
            found.append((name, json.loads(line[6:])))
            if name == upto:
                break
    return found


# ---------------------------------------------------------------- pages


def test_pages_reports_and_streams(ask: Asked, folders: Folders) -> None:
    folders.run("two", placement=ALONE)
    study_folder(folders, {"a": (RECIPE, ALONE), "b": (RECIPE, BOTH)}, 2)
    for path in (
        "/",
        "/run?id=one",
        "/compare?id=one&id=two",
        "/study?id=mine",
        "/assets/run.js",
        "/assets/dashboard.css",
    ):
        assert ask(path)[0] == 200, path
    assert json.loads(ask("/api/runs?sort=id&down=0")[1])["rows"][0]["id"] == "one"
    for path, kind, name in (
        ("/api/report?id=one", "run", "one"),
        ("/api/report?id=one&id=two", "runs", "2 runs"),
        ("/api/report?study=mine", "study", "mine"),
    ):
        status, text = ask(path)
        assert status == 200, text
        (part,) = json.loads(text)["parts"]
        assert (part["kind"], part["name"]) == (kind, name)
    assert ask("/api/report")[0] == 400
    assert ask("/nothing")[0] == 404


def test_a_stream_follows_a_run_to_its_end(ask: Asked, folders: Folders) -> None:
    run = folders.run("live", state="running")
    (run.rank_folder(1) / "log.txt").write_text("rank 1 says <b>\n")
    answer = ask.open("/events/run?id=live&rank=1")
    found = events(answer, "log")
    assert found[0][0] == "state"
    assert found[0][1]["state"] == "running"
    assert [data["id"] for name, data in found if name == "plot"] == [
        "loss-by-step",
        "rate",
        "step",
        "accuracy",
        "loss",
    ]
    assert found[-1][1] == {"rank": 1, "text": "rank 1 says <b>\n", "again": True}
    run.write_status("done")
    rest = events(answer, "ended")
    assert [data["state"] for name, data in rest if name in ("state", "ended")] == ["done", "done"]
    assert answer.read() == b"\n", "the stream ends with the run"
    assert [name for name, _ in events(ask.open("/events/run?id=live"), "ended")] == ["state", "ended"]
    assert ask("/events/run?id=live&rank=2")[0] == 400


def test_a_folder_that_is_cut_off_breaks_nothing(ask: Asked, folders: Folders) -> None:
    for name, content in (("empty", ""), ("half", '{"id": "half", "recipe"')):
        (folders.root / name).mkdir()
        (folders.root / name / "run.json").write_text(content)
    run = folders.run("bare", state="running")
    for path in run.folder.rglob("*"):
        if path.is_file() and path.name != "run.json":
            path.unlink()
    with (folders.root / "one" / "epochs.jsonl").open("ab") as file:
        file.write(b'{"epoch": 11, "tra')
    expected = {"one": "done", "bare": "planned", "empty": "damaged", "half": "damaged"}
    wait_for(lambda: states(ask) == expected, what="the list")
    for path in ("/run?id=half", "/events/run?id=half"):
        assert ask(path)[0] == 409
    assert ask("/api/report?id=one")[0] == 200
    assert events(ask.open("/events/run?id=bare"), "state")[0][1]["state"] == "planned"


# ---------------------------------------------------------------- who may ask


def test_only_the_dashboards_own_names_are_answered(ask: Asked) -> None:
    for host in (f"127.0.0.1:{ask.port}", f"localhost:{ask.port}", "localhost", "LOCALHOST:9999", f"[::1]:{ask.port}"):
        assert ask("/", hosts=(host,))[0] == 200, host
    bad = (
        "evil.example",
        f"evil.example:{ask.port}",
        "",
        "127.0.0.1.evil.example",
        "10.0.0.1",
        "127.0.0.1@evil.example",
        "localhost:x",
        "[::1",
    )
    for host in bad:
        assert ask("/", hosts=(host,))[0] == 421, host
        assert ask("/api/runs", hosts=(host,))[0] == 421, host
    assert ask("/", hosts=())[0] in (400, 421)
    assert ask("/", hosts=("localhost", "evil.example"))[0] == 421
    assert ask("/api/runs", Sec_Fetch_Site="cross-site")[0] == 403
    assert ask("/events/list", Sec_Fetch_Site="same-site")[0] == 403


def test_stopping_needs_the_token_and_the_own_page(ask: Asked, folders: Folders) -> None:
    folders.run("live", state="running")
    for headers, status in (
        ({"X_Lockstep_Token": None}, 403),
        ({"X_Lockstep_Token": ""}, 403),
        ({"X_Lockstep_Token": "x" * 32}, 403),
        ({"X_Lockstep_Token": "ünï"}, 403),
        ({"Origin": None}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": f"http://localhost:{ask.port}"}, 403),
        ({"Content_Type": "text/plain"}, 415),
        ({"Content_Type": "application/x-www-form-urlencoded"}, 415),
    ):
        assert ask.stop("live", **headers)[0] == status, headers  # type: ignore[arg-type]
    status, text = ask.stop("live")
    assert status == 409
    assert "does not say which process" in text
    assert ask.stop("../one")[0] == 404
    assert ask("/api/stop")[0] == 404, "nothing is changed by looking"
    assert ask("/api/report", "POST", "{}")[0] == 404
    assert ask.open("/api/stop", "POST", "x" * 5000).status == 413
    for lengths in (["0000000000200000000"], ["00005"], ["+5"], ["5", "5"], ["-1"], ["0x5"], ["٣"], [" 5 5"], []):
        assert raw_post(ask, lengths) == 413, lengths


def test_another_machine_needs_the_token_to_look(folders: Folders) -> None:
    ask = Asked(folders.root, "0.0.0.0")
    try:
        status, text = ask("/")
        assert status == 401
        assert "one" not in json.dumps(text.partition('id="given">')[2].partition("<")[0])
        for path in ("/api/runs", "/api/report?id=one", "/events/list"):
            assert ask(path)[0] == 401, path
        own = {"Origin": f"http://127.0.0.1:{ask.port}", "Content_Type": "application/json"}
        assert ask("/api/enter", "POST", "{}", X_Lockstep_Token="wrong", **own)[0] == 403
        answer = ask.open("/api/enter", "POST", "{}", X_Lockstep_Token=ask.token, **own)
        cookie = answer.headers["Set-Cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=Strict" in cookie
        assert ask.token not in cookie, "who has the cookie may look, not stop"
        value = cookie.partition(";")[0]
        assert ask("/api/runs", Cookie=value)[0] == 200
        assert ask("/api/runs", Cookie=value[:-1])[0] == 401
        assert ask("/", hosts=("evil.example",), Cookie=value)[0] == 421
        assert ask.stop("one", X_Lockstep_Token=None, Cookie=value)[0] == 403
    finally:
        ask.end()


# ---------------------------------------------------------------- what can be read


@pytest.mark.parametrize(
    "name",
    [
        "../secret",
        "..",
        ".",
        "",
        "/etc",
        "one/../../secret",
        "%2e%2e/secret",
        "..%2fsecret",
        "one%00",
        "studies/mine",
        "%ff%fe",
        ".index.sqlite",
    ],
)
def test_no_path_is_made_of_what_is_asked(ask: Asked, name: str) -> None:
    for path in (
        f"/run?id={name}",
        f"/api/report?id={name}",
        f"/events/run?id={name}",
        f"/study?id={name}",
        f"/api/report?study={name}x",
        f"/compare?id=one&id={name}",
    ):
        assert ask(path)[0] == 404, path
    assert ask(f"/assets/{name}")[0] in (400, 404)
    assert ask(f"/{name}")[0] in (200, 400, 404), "'/' and './' are the list"


def test_links_out_of_the_runs_are_not_followed(ask: Asked, folders: Folders, tmp_path: Path) -> None:
    elsewhere = Folders(tmp_path / "elsewhere").run("outside")
    (folders.root / "outside").symlink_to(elsewhere.folder)
    assert "outside" not in ask("/")[1]
    assert ask("/api/report?id=outside")[0] == 404
    run = folders.run("live", state="running")
    (run.rank_folder(0) / "log.txt").symlink_to(tmp_path / "secret")
    for path in ("/api/report?id=live", "/events/run?id=live"):
        status, text = ask(path)
        assert status == 403
        assert "leads out" in text
    (run.rank_folder(0) / "log.txt").unlink()
    os.mkfifo(run.rank_folder(0) / "log.txt")
    assert ask("/events/run?id=live")[0] == 403, "a pipe would block whoever reads it"
    (run.rank_folder(0) / "log.txt").unlink()
    # A link that is put there while somebody looks.
    answer = ask.open("/events/run?id=live")
    assert events(answer, "plot")
    (run.rank_folder(0) / "log.txt").symlink_to(tmp_path / "secret")
    time.sleep(1.5)
    run.write_status("done")
    assert SECRET not in json.dumps(events(answer, "ended"))


def test_names_are_no_markup_in_the_page_itself(ask: Asked, folders: Folders) -> None:
    folders.run(HOSTILE)
    wait_for(lambda: HOSTILE in states(ask), what="the list")
    text = ask("/")[1]
    assert "<img" not in text
    given = json.loads(text.partition('id="given">')[2].partition("</script>")[0])
    assert {row["id"] for row in given["rows"]} == {HOSTILE, "one"}
    status, text = ask(f"/run?id={quote(HOSTILE)}")
    assert status == 200
    assert "<img" not in text
    assert json.loads(ask(f"/api/report?id={quote(HOSTILE)}")[1])["title"] == HOSTILE


# ---------------------------------------------------------------- the command


def test_the_command_serves_until_it_is_interrupted(cli: Cli) -> None:
    Folders(cli.runs).run("one")
    # Without torch: a laptop that looks at a cluster's runs need not have it.
    code = "import sys; sys.modules['torch'] = None\nsys.argv = ['lockstep', *sys.argv[1:]]\nfrom lockstep.cli import main\nmain()"
    words = ["dashboard", "--port", "0", "--no-open", "--json"]
    started = subprocess.Popen(
        [sys.executable, "-c", code, *words], env=cli.environment, cwd=cli.folder, text=True, stdout=-1, stderr=-1
    )
    assert started.stdout is not None
    text = ""
    while not text.endswith("}\n"):
        line = started.stdout.readline()
        assert line, started.communicate()
        text += line
    said = json.loads(text)
    assert said["address"] == f"http://127.0.0.1:{said['port']}/#token={said['token']}"
    connection = HTTPConnection("127.0.0.1", said["port"], timeout=20)
    connection.request("GET", "/api/runs")
    assert json.loads(connection.getresponse().read())["all"] == 1
    connection.close()
    assert "choose another port" in cli.error("dashboard", "--port", str(said["port"]), code=2)
    started.send_signal(signal.SIGINT)
    out, err = started.communicate(timeout=20)
    assert (started.returncode, out) == (0, "")
    assert "runs go on" in err


def test_wrong_words_are_one_line(cli: Cli) -> None:
    assert "--runs" in cli.error("dashboard", "--runs", "nowhere", code=2)
    cli.runs.mkdir()
    assert "--host no.such.host" in cli.error("dashboard", "--host", "no.such.host.invalid", code=2)


def peak_kb(anew: bool = False) -> int:
    """The most memory that this process had at once since the peak was last set back to what it has now (`anew`)."""
    if anew:
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0])


def test_neither_a_long_run_nor_the_library_makes_the_server_large(ask: Asked, folders: Folders) -> None:
    run = folders.run("long")
    for rank in (0, 1):
        step_rows(300_000, rank).tofile(run.rank_folder(rank) / "steps.bin")
    before = peak_kb(anew=True)
    assert ask("/api/report?id=long")[0] == 200
    assert peak_kb() - before < 20_000, "kB, of 58 MB that were read"
    # Nor does the library that draws the plots, which is put together here for the first time.
    assets.library.cache_clear()
    assert ask("/assets/vega.js")[0] == 200
    assert peak_kb() - before < 30_000


def test_streams_that_nobody_reads_give_their_permits_back(ask: Asked) -> None:
    app = ask.server.app
    headers = Message()
    headers["Host"] = f"127.0.0.1:{ask.port}"
    request = Request("GET", "/events/list", {}, headers)
    for _ in range(2 * MOST_STREAMS):
        stream = app.answer(request)
        assert isinstance(stream, Stream)
        stream.close()  # the connection was reset while the head of the answer was written
    held = [app.answer(request) for _ in range(MOST_STREAMS)]
    with pytest.raises(Refused, match="pages are open"):
        app.answer(request)
    for each in held:
        assert isinstance(each, Stream)
        assert next(iter(each))
        each.close()
        each.close()
    assert ask.open("/events/list").status == 200


def test_a_study_whose_name_is_not_text_does_not_hide_the_others(ask: Asked, folders: Folders) -> None:
    study_folder(folders, {"a": (RECIPE, ALONE), "b": (RECIPE, BOTH)}, 1)
    odd = folders.root / "studies" / os.fsdecode(b"not \xff text")
    odd.mkdir()
    (odd / "study.json").write_text("{}")
    assert [study["name"] for study in json.loads(ask("/api/runs")[1])["studies"]] == ["mine"]
