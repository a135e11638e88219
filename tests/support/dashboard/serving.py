"""``shoal dash`` as a real process, and clients of it."""

import http.client
import json
import re
import signal
import socket
import time
from dataclasses import dataclass


@dataclass
class Dash:
    """A dashboard that serves a folder.

    Args:
        process: of the command.
        host: that it listens on.
        port: that it listens on.
        code: that lets one browser in.
        said: the lines that it printed before its address.
    """

    process: object
    host: str
    port: int
    code: str
    said: list[str]
    cookie: str = ""

    def ask(self, path, *, method="GET", headers=None, keyed=True, timeout=30):
        """Status, headers and body of one answer."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout)
        own = {"cookie": self.cookie} if keyed and self.cookie else {}
        try:
            connection.putrequest(method, path, skip_host="host" in (headers or {}), skip_accept_encoding=True)
            for name, value in {**own, **(headers or {})}.items():
                connection.putheader(name, value)
            connection.endheaders()
            answer = connection.getresponse()
            return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
        finally:
            connection.close()

    def enter(self):
        """Come in with the code."""
        status, headers, _ = self.ask(f"/enter?code={self.code}", keyed=False)
        assert status == 303, status
        self.cookie = headers["set-cookie"].partition(";")[0]
        return headers

    def get(self, path):
        """The content of an answer."""
        status, _, body = self.ask(path)
        assert status == 200, (path, status, body[:300])
        return json.loads(body)

    def runs(self):
        """The table, by the names of runs."""
        return {row["name"]: row for row in self.get("/api/runs")["runs"]}

    def wait_for_runs(self, condition, what, seconds=30.0):
        """The table, when it is so."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            found = self.runs()
            if condition(found):
                return found
            time.sleep(0.05)
        raise AssertionError(f"waited {seconds:g} s for {what}: {found}")

    def end(self):
        """Ask it to stop, and see that it does so well."""
        self.process.send_signal(signal.SIGTERM)
        self.process.communicate(timeout=30)
        assert self.process.returncode == 0


def wait_for_dash(process):
    """A dashboard whose command was started, when it has printed its address."""
    said = []
    while True:
        line = process.stdout.readline()
        assert line, f"no address; it said {said}\n{process.stderr.read() if process.poll() is not None else ''}"
        said.append(line.rstrip())
        if found := re.search(r"http://([0-9.]+):([0-9]+)/enter\?code=(\S+)", line):
            return Dash(process, found[1], int(found[2]), found[3], said)


class Listener:
    """A client of ``/api/stream``, which reads as messages come."""

    def __init__(self, dash, since=None):
        self._socket = socket.create_connection((dash.host, dash.port), timeout=30)
        asked = f"/api/stream{'' if since is None else f'?since={since}'}"
        head = f"GET {asked} HTTP/1.1\r\nhost: {dash.host}:{dash.port}\r\ncookie: {dash.cookie}\r\n\r\n"
        self._socket.sendall(head.encode())
        self._file = self._socket.makefile("rb")
        self.status = int(self._file.readline().split()[1])
        while self._file.readline().strip():
            pass

    def messages(self, seconds=30.0):
        """Id, kind and content of messages, until nothing came for so long."""
        self._socket.settimeout(seconds)
        fields = {}
        for line in self._file:
            name, _, value = line.decode().rstrip("\n").partition(": ")
            if name:
                fields[name] = value
            elif "data" in fields:
                yield int(fields["id"]), fields["event"], json.loads(fields["data"])
                fields = {}

    def wait_for(self, condition, seconds=30.0):
        """The first message that is so."""
        for number, kind, content in self.messages(seconds):
            if condition(kind, content):
                return number, kind, content
        raise AssertionError("the server has ended the stream")

    def close(self):
        """Go away."""
        self._file.close()
        self._socket.close()
