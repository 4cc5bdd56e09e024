"""worker.py from outside: what it sends, stores, prints and exits with.

The tool is tool_service.py, or a Tool of this file wherever the worker has
to meet an answer that tool_service.py would never give.
"""
import collections
import concurrent.futures
import contextlib
import glob
import json
import os
import re
import shutil
import signal
import socket
import socketserver
import sqlite3
import struct
import subprocess
import sys
import tempfile
import threading
import time
import unittest

from support import (LOST, PROGRAMS, TIMEOUT, WORKER, Case, integrity, rows,
                     run, write_lock)

POSIX = os.name == "posix"
RUN_ID = "demo-task-001"
KEY = RUN_ID + "/create_ticket/v1"
TITLE = "Paint the fence"
TICKET = {"ticket_id": 1, "title": TITLE}
CHINESE = "\u6574\u7406\u5de5\u5355"
NOWHERE = "http://127.0.0.1:1/closed"
CRASHES = {"before-call": 71, "after-call": 72, "after-checkpoint": 73}
COLUMNS = ("run_id", "payload", "operation_key", "mode", "status", "response")


def http(status, body=b"", *fields):
    head = ("HTTP/1.1 %d Whatever" % status,
            "Content-Length: %d" % len(body)) + fields
    return "\r\n".join(head).encode("utf-8") + b"\r\n\r\n" + body


def problem(status, detail):
    body = json.dumps({"title": "No", "status": status, "detail": detail})
    return http(status, body.encode("ascii"),
                "Content-Type: application/problem+json")


BODY = json.dumps(TICKET).encode("ascii")
CREATED = http(201, BODY)
REFUSED = problem(409, "The key was used with other parameters.")


# What may follow the bytes of an answer.

def close(connection):
    # On Windows, a close right behind the last byte may lose the answer.
    connection.shutdown(socket.SHUT_WR)
    while connection.recv(65536):  # until the worker has gone
        pass
    connection.close()


def reset(connection):
    # Linger for no time: the close becomes an RST in place of a FIN.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER,
                          struct.pack("ii" if POSIX else "hh", 1, 0))
    connection.close()


def hang(connection):
    connection.recv(1)  # until the worker has gone


def flood(piece):
    def ending(connection):
        while True:  # until the worker has gone: then sending fails
            connection.sendall(piece)
    return ending


class Request(collections.namedtuple("Request", "line fields body")):
    def values(self, name):
        """What each header line of that name holds."""
        fields = [field.partition(": ") for field in self.fields]
        return [value for found, _, value in fields
                if found.lower() == name.lower()]


def read_request(connection):
    raw = b""
    while True:
        head, end, body = raw.partition(b"\r\n\r\n")
        length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
        if end and (not length or len(body) >= int(length.group(1))):
            break
        piece = connection.recv(65536)
        if not piece:
            break
        raw += piece
    line, *fields = head.decode("latin-1").split("\r\n")
    return Request(line, fields, body)


class Tool(socketserver.TCPServer):
    """A tool by script, which keeps every request that it was sent.

    The first connection gets the first answer and so on, all later ones the
    last. An answer is bytes, or a pair of bytes and what follows them; None
    in place of the bytes does not even read the request.
    """

    request_queue_size = 16

    def __init__(self, *answers):
        super().__init__(("127.0.0.1", 0), None)
        self.answers = answers
        self.requests = []
        self.connections = 0
        self.url = "http://127.0.0.1:%d" % self.server_address[1]
        threading.Thread(target=self.serve_forever, args=(0.02,),
                         daemon=True).start()

    def process_request(self, connection, address):
        answer = self.answers[min(self.connections, len(self.answers) - 1)]
        self.connections += 1
        data, ending = (answer, close) if isinstance(answer, bytes) else answer
        connection.settimeout(TIMEOUT)
        with connection, contextlib.suppress(OSError):
            if data is not None:
                self.requests.append(read_request(connection))
                connection.sendall(data)
            ending(connection)

    def stop(self):
        self.shutdown()
        self.server_close()


def side_by_side(function, items):
    """Map; most of the calls wait for a process or for a timeout."""
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        return list(pool.map(function, items))


def environment(**changes):
    """This environment with some variables set, or unset by None."""
    names = {name.upper() for name in changes}
    env = {name: value for name, value in os.environ.items()
           if name.upper() not in names}
    env.update((name, value) for name, value in changes.items()
               if value is not None)
    return env


class WorkerCase(Case):
    def setUp(self):
        super().setUp()
        self.database = self.path("worker.db")

    def tool(self, *answers):
        tool = Tool(*answers)
        self.addCleanup(tool.stop)
        return tool

    def subfolder(self):
        return tempfile.mkdtemp(dir=self.folder)

    def steps(self, folder=None):
        """The rows of steps, with each payload as the object it stands for."""
        found = rows(os.path.join(folder or self.folder, "worker.db"), "steps")
        return [(row[0], json.loads(row[1])) + row[2:] for row in found]

    def pending(self, title=TITLE, mode="idempotent"):
        return [(RUN_ID, {"title": title}, KEY, mode, "pending", None)]

    def change(self, sql, *values):
        with contextlib.closing(sqlite3.connect(self.database)) as db, db:
            db.execute(sql, values)

    def succeeds(self, done, source="tool", replayed=False, mode="idempotent"):
        """Check the one line of output; return its ticket."""
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertRegex(done.stdout, r"\A[ -~]+\n\Z")
        line = json.loads(done.stdout)
        self.assertEqual(list(line), ["run_id", "operation_key", "mode",
                                      "source", "tool_replayed", "ticket"])
        self.assertEqual(list(line["ticket"]), ["ticket_id", "title"])
        self.assertEqual(line["operation_key"],
                         line["run_id"] + "/create_ticket/v1")
        self.assertEqual(
            (line["mode"], line["source"], line["tool_replayed"]),
            (mode, source, replayed))
        return line["ticket"]

    def fails(self, done, status):
        """Check how exits 3 to 6 look; return the last line of stderr."""
        self.assertEqual(done.returncode, status, done.stdout + done.stderr)
        self.assertEqual(done.stdout, "")
        self.assertNotIn("Traceback", done.stderr)
        self.assertTrue(done.stderr.endswith("\n"), done.stderr)
        line = done.stderr.splitlines()[-1]
        self.assertRegex(line, r"\A[A-Za-z_.]+: \S")
        return line


class AnswerCase(WorkerCase):
    """What an answer means, and that a later run works."""

    def tried(self, answers):
        """Give one step all these answers in turn, and then a good one."""
        folder = self.subfolder()
        tool = self.tool(*answers, CREATED)
        seen = []
        for _ in answers:
            done = run(WORKER, "--url", tool.url, "--title", TITLE, cwd=folder)
            seen.append((done, self.steps(folder), tool.connections))
        return seen, run(WORKER, "--url", tool.url, cwd=folder), tool.requests

    def check(self, status, table, line=None, lanes=3):
        """Each row: a name, an answer, what the last line must hold."""
        lanes = [table[lane::lanes] for lane in range(lanes)]
        results = side_by_side(self.tried, [[row[1] for row in lane]
                                            for lane in lanes])
        for lane, (seen, later, requests) in zip(lanes, results):
            for number, (row, observed) in enumerate(zip(lane, seen), 1):
                done, steps, connections = observed
                with self.subTest(row[0]):
                    last = self.fails(done, status)
                    for part in row[2:]:
                        self.assertIn(part, last)
                    if line:
                        self.assertEqual(last, line)
                    self.assertEqual(steps, self.pending())
                    # One more would be a retry, or a redirect followed.
                    self.assertEqual(connections, number)
            self.assertEqual(self.succeeds(later), TICKET)
            for request in requests:
                self.assertEqual(request.values("Idempotency-Key"), [KEY])
                self.assertEqual(request.body, requests[0].body)


class AnswerTest(AnswerCase):
    def test_lost_before_the_first_byte(self):
        self.check(5, [
            ("closed at once", (None, close)),
            # Three times: it may come before connect() has returned, or not.
            ("reset at once", (None, reset)),
            ("reset at once", (None, reset)),
            ("reset at once", (None, reset)),
            ("closed after the request", (b"", close)),
            ("reset after the request", (b"", reset)),
        ], LOST)

    def test_lost_half_way(self):
        self.check(5, [
            ("%d bytes, %s" % (size, ending.__name__),
             (CREATED[:size], ending))
            for size in (11, 12, 30, len(CREATED) - len(BODY),
                         len(CREATED) - 1)
            for ending in (close, reset)])

    def test_a_refusal_lost_half_way_is_none(self):
        # In doubt an outcome is indefinite.
        self.check(5, [
            ("body cut, %s" % ending.__name__, (REFUSED[:-9], ending))
            for ending in (close, reset)])

    def test_incomplete_or_endless(self):
        chunked = (b"HTTP/1.1 201 Created\r\n"
                   b"Transfer-Encoding: chunked\r\n\r\n")
        chunk = b"%x\r\n%s\r\n" % (len(BODY), BODY)
        endless = b"HTTP/1.1 201 Created\r\n"
        self.check(5, [
            # The ticket is there, and still the answer is not whole.
            ("short body", CREATED.replace(b"Length: ", b"Length: 1")),
            ("no last chunk", chunked + chunk),
            ("a chunk that is cut", chunked + chunk[:-9]),
            ("a chunk without a size", chunked + b"size\r\n" + chunk),
            ("endless body", (endless + b"\r\n" + BODY, flood(b" " * 65536))),
            ("endless chunks", (chunked, flood(
                b"10000\r\n%s\r\n" % (b" " * 65536)))),
            ("endless head", (endless, flood(b"X-Filler: x\r\n" * 999))),
            ("endless header line", (endless, flood(b"x" * 65536))),
            ("endless status line", (endless[:-2], flood(b"x" * 65536))),
        ])

    def test_not_http(self):
        self.check(5, [(repr(data), data) for data in (
            b"\r\n",
            b"SSH-2.0-OpenSSH_9.6\r\n",
            b"<html><h1>201 Created</h1></html>\n",
            BODY,
            CREATED.replace(b"HTTP/1.1", b"HTTP/9.9"),
            CREATED.replace(b"201", b"twohundred"),
            CREATED.replace(b"201", b"20100"),
            CREATED.replace(b"201", b"-201"),
            CREATED.replace(b"201 Whatever", b"\xff\xfe\xfd"))])

    def test_created_without_a_ticket(self):
        self.check(5, [(repr(body)[:60], http(201, body)) for body in (
            b"",
            b"not JSON",
            BODY[:-1],
            BODY + BODY,
            b"\xff\xfe\xfd",
            BODY.replace(b"fence", b"f\xe9nce"),
            json.dumps(TICKET).encode("utf-16"),
            b"[1]", b"null", b"1", b"NaN",
            b'"ticket_id"',
            b'{"title": "x"}',
            b'{"ticket_id": 1}',
            b'{"ticket_id": 1, "title": null}',
            b'{"ticket_id": 1, "title": 1}',
            b'{"ticket_id": true, "title": "x"}',
            b'{"ticket_id": "1", "title": "x"}',
            b'{"ticket_id": 1.0, "title": "x"}',
            b'{"ticket_id": NaN, "title": "x"}',
            b'{"ticket_id": [1], "title": "x"}',
            b'[{"ticket_id": 1, "title": "x"}]',
            b"[" * 100000,
            b'{"ticket_id":' * 50000)])

    def test_other_successes_and_tool_errors(self):
        self.check(5, [(status, http(status, BODY), str(status))
                       for status in (200, 202, 204, 299)] + [
            (status, problem(status, "Try again later."), str(status))
            for status in (500, 503, 599)])

    def test_redirects_are_not_followed(self):
        elsewhere = self.tool(CREATED)
        self.check(5, [
            ("%d to %s" % (status, target),
             http(status, b"", "Location: " + target), str(status))
            for status, target in [
                (301, "/elsewhere"), (302, elsewhere.url + "/tickets"),
                (303, "/elsewhere"), (303, elsewhere.url + "/tickets"),
                (307, elsewhere.url + "/tickets"), (308, "/elsewhere")]])
        self.assertEqual(elsewhere.connections, 0)

    def test_refusals(self):
        self.check(4, [
            ("plain", problem(409, "Used before."), "409", "Used before."),
            ("unknown status", problem(499, "No."), "499", "No."),
            ("not a problem by type", http(422, b'{"detail": "Too odd."}'),
             "422", "Too odd."),
            ("line breaks", problem(400, "First\nsecond\r\nthird\rfourth"),
             "400", "First", "second", "third", "fourth"),
            ("rare line breaks", problem(
                400, "First\v\f\x1c\x85\u2028\u2029second"),
             "400", "First", "second"),
            ("lone surrogate", problem(400, "a\ud800z"), "400"),
            ("no status phrase", b"HTTP/1.1 404\r\nContent-Length: 0\r\n\r\n",
             "404"),
        ] + [(repr(body)[:60], http(404, body), "404") for body in (
            b"", b"<h1>Not\r\nFound</h1>\n", b"\xff\xfe", b"[]", b"NaN",
            b'"detail"', b"{}", b'{"detail": null}', b'{"detail": ""}',
            b'{"detail": {"a": ["b\\n"]}}', b"[" * 100000)])

    def test_a_refusal_in_chinese_on_an_ascii_console(self):
        tool = self.tool(problem(400, CHINESE + "\n" + CHINESE))
        done = self.worker("--url", tool.url, env=environment(
            LC_ALL="C", PYTHONIOENCODING="ascii"))
        self.assertIn("400", self.fails(done, 4))
        self.assertEqual(done.stderr.count("\n"), 1)

    def test_no_tool_at_all(self):
        # Bound but not listening: nobody else can take the port meanwhile.
        with socket.socket() as reserved:
            reserved.bind(("127.0.0.1", 0))
            self.fails(self.worker(
                "--url", "http://127.0.0.1:%d" % reserved.getsockname()[1],
                "--title", TITLE), 5)
        self.assertEqual(self.steps(), self.pending())
        self.succeeds(self.worker("--url", self.tool(CREATED).url))

    def test_urls_that_cannot_be_called(self):
        tool = self.tool(CREATED)
        port = tool.url.rpartition(":")[2]

        def tried(url):
            folder = self.subfolder()
            done = run(WORKER, "--url", url.replace("PORT", port),
                       "--title", TITLE, cwd=folder)
            return done, self.steps(folder)

        urls = [
            "", "http://", "http:///tickets", "http://:PORT",
            "127.0.0.1:PORT", "http:127.0.0.1:PORT",
            "https://127.0.0.1:PORT", "ftp://127.0.0.1:PORT",
            "http://127.0.0.1:port", "http://127.0.0.1:99999",
            "http://[::1", "http://127.0.0.1:PORT/a b",
            "http://127.0 .0.1:PORT", "http://127.0.0.1:PORT/a\nb",
            "http://127.0.0.1:PORT/ HTTP/1.1\r\nX-Smuggled: 1\r\n",
            "http://127.0.0.1:PORT/" + CHINESE,
            "http://" + CHINESE + ".invalid.:PORT",
            "http://no-such-host.invalid.:PORT",
            "http://" + "a" * 64 + ".invalid.:PORT"]
        for url, (done, steps) in zip(urls, side_by_side(tried, urls)):
            with self.subTest(url):
                self.fails(done, 5)
                self.assertEqual(steps, self.pending())
        self.assertEqual({request.line for request in tool.requests} - {""},
                         set())


class RequestTest(WorkerCase):
    def sent(self, *flags, path=""):
        tool = self.tool(CREATED)
        done = self.worker("--url", tool.url + path, *flags)
        self.assertEqual(done.returncode, 0, done.stderr)
        request, = tool.requests
        self.assertEqual(request.values("Host"), [tool.url[len("http://"):]])
        self.assertEqual(request.values("Content-Type"), ["application/json"])
        self.assertEqual(request.values("Transfer-Encoding"), [])
        return request

    def test_idempotent(self):
        request = self.sent("--title", TITLE)
        self.assertEqual(request.line, "POST /tickets HTTP/1.1")
        self.assertEqual(request.values("Idempotency-Key"), [KEY])
        self.assertEqual(json.loads(request.body), {"title": TITLE})
        (_, payload, *_), = rows(self.database, "steps")
        self.assertEqual(request.body, payload.encode("utf-8"))

    def test_naive_sends_no_key(self):
        request = self.sent("--mode", "naive")
        self.assertEqual(request.line, "POST /tickets HTTP/1.1")
        self.assertEqual(request.values("Idempotency-Key"), [])
        self.assertNotIn("idempot", repr(request).lower())

    def test_the_path_follows_the_url(self):
        for path, line in [("/", "POST /tickets HTTP/1.1"),
                           ("/api", "POST /api/tickets HTTP/1.1"),
                           ("/api/", "POST /api/tickets HTTP/1.1")]:
            with self.subTest(path):
                request = self.sent("--run-id", "to" + path, path=path)
                self.assertEqual(request.line, line)

    def test_what_was_saved_is_sent(self):
        self.worker("--crash", "before-call")
        payload = '{"title" :\t"%s \\u5355"}' % CHINESE
        self.change("UPDATE steps SET operation_key = ?, payload = ?",
                    "another/key/v2", payload)
        request = self.sent()
        self.assertEqual(request.values("Idempotency-Key"), ["another/key/v2"])
        self.assertEqual(request.body, payload.encode("utf-8"))

    def test_the_run_id_makes_the_key(self):
        run_id = "!\"#$%&'()*+,/:;<=>?@[\\]^_`{|}~"
        request = self.sent("--run-id", run_id)
        self.assertEqual(request.values("Idempotency-Key"),
                         [run_id + "/create_ticket/v1"])

    def test_no_proxy_is_asked(self):
        proxy = self.tool(CREATED)
        tool = self.tool(CREATED)
        socks = proxy.url.replace("http", "socks5")
        clear = dict.fromkeys(("http_proxy", "all_proxy", "no_proxy"))
        for name, value in [("http_proxy", proxy.url), ("http_proxy", socks),
                            ("HTTP_PROXY", proxy.url), ("HTTP_PROXY", "::"),
                            ("all_proxy", proxy.url), ("ALL_PROXY", socks)]:
            with self.subTest("%s=%s" % (name, value)):
                env = environment(**clear)
                env[name] = value
                self.succeeds(self.worker(
                    "--url", tool.url, "--run-id", name + value, env=env))
        self.assertEqual({request.line for request in tool.requests},
                         {"POST /tickets HTTP/1.1"})
        self.assertEqual(proxy.connections, 0)


class ResultTest(WorkerCase):
    def test_a_new_ticket_then_the_saved_one(self):
        service = self.service()
        first = self.worker("--url", service.url, "--title", TITLE)
        self.assertEqual(self.succeeds(first), TICKET)
        service.kill()
        again = self.worker("--url", service.url)
        self.assertEqual(self.succeeds(again, "checkpoint", None), TICKET)

    def test_the_table(self):
        self.worker("--crash", "before-call")
        with contextlib.closing(sqlite3.connect(self.database)) as db:
            found = db.execute("PRAGMA table_info(steps)").fetchall()
        self.assertEqual(
            [row[1:4] + row[5:] for row in found],
            [(name, "TEXT", int(name not in ("run_id", "response")),
              int(name == "run_id")) for name in COLUMNS])

    def test_done_never_contacts_the_tool(self):
        for mode in ("idempotent", "naive"):
            tool = self.tool(CREATED)
            flags = ("--run-id", mode, "--title", TITLE, "--mode", mode)
            self.succeeds(self.worker("--url", tool.url, *flags), mode=mode)
            saved = rows(self.database, "steps")
            # Done is done: a step that is over reaches no crash point.
            runs = [(tool.url,), (NOWHERE, "--crash", "before-call"),
                    ("nonsense", "--crash", "after-checkpoint")]
            for end in runs:
                with self.subTest(mode=mode, end=end):
                    done = self.worker(*flags + ("--url",) + end)
                    self.assertEqual(
                        self.succeeds(done, "checkpoint", None, mode), TICKET)
                    self.assertEqual(rows(self.database, "steps"), saved)
            self.assertEqual(tool.connections, 1)

    def test_the_response_is_stored_unchanged(self):
        body = '\r\n{ "title":\t"%s" , "more": [1.50],\n"ticket_id" :7 }\n '
        body %= CHINESE
        tool = self.tool(http(201, body.encode("utf-8"),
                              "Content-Type: application/json"))
        ticket = {"ticket_id": 7, "title": CHINESE}
        done = self.worker("--url", tool.url, "--title", TITLE)
        self.assertEqual(self.succeeds(done), ticket)
        self.assertEqual(self.steps(), [
            (RUN_ID, {"title": TITLE}, KEY, "idempotent", "done", body)])
        done = self.worker("--url", NOWHERE)
        self.assertEqual(self.succeeds(done, "checkpoint", None), ticket)

    def test_other_whole_answers(self):
        chunks = b"9\r\n%s\r\n%x;x=y\r\n%s\r\n0\r\n\r\n" % (
            BODY[:9], len(BODY) - 9, BODY[9:])
        replayed = "Idempotent-Replayed: true"
        for name, answer, seen in [
                ("chunked", b"HTTP/1.1 201 Created\r\nTransfer-Encoding: "
                 b"chunked\r\n\r\n" + chunks, False),
                ("no length", b"HTTP/1.0 201 Created\r\n\r\n" + BODY, False),
                ("after 100", b"HTTP/1.1 100 Continue\r\n\r\n" + CREATED,
                 False),
                ("replayed", http(201, BODY, replayed), True),
                ("lower case", http(201, BODY, replayed.lower()), True)]:
            with self.subTest(name):
                done = self.worker("--url", self.tool(answer).url,
                                   "--run-id", name.replace(" ", "-"))
                self.assertEqual(self.succeeds(done, replayed=seen), TICKET)

    def test_titles(self):
        service = self.service()
        titles = [TITLE, CHINESE, "\U0001f3ab \U0001f469\u200d\U0001f4bb",
                  "it's \"so\" \\ {\"title\": 1}", "first\nsecond\ttab",
                  "--mode", "x" * 200]
        for number, title in enumerate(titles, 1):
            with self.subTest(title):
                done = self.worker("--url", service.url, "--title=" + title,
                                   "--run-id", "run-%d" % number)
                self.assertEqual(self.succeeds(done),
                                 {"ticket_id": number, "title": title})
        self.assertEqual(rows(service.database, "tickets"),
                         list(enumerate(titles, 1)))

    def test_titles_that_the_tool_refuses(self):
        service = self.service()
        titles = ["", "   ", "x" * 1000]
        if POSIX:
            titles.append("not UTF-8: \udcff")
        for title in titles:
            with self.subTest(title):
                run_id = "run-%d" % len(title)
                done = self.worker("--url", service.url, "--title", title,
                                   "--run-id", run_id)
                self.assertIn("400", self.fails(done, 4))
                self.assertIn(
                    (run_id, {"title": title}, run_id + "/create_ticket/v1",
                     "idempotent", "pending", None), self.steps())
        self.assertEqual(rows(service.database, "tickets"), [])

    def test_an_ascii_console(self):
        service = self.service()
        changes = dict(LC_ALL=None, LANG=None, PYTHONIOENCODING=None,
                       PYTHONUTF8=None)
        for number, setting in enumerate([
                dict(LC_ALL="C"), dict(PYTHONIOENCODING="ascii"),
                dict(LC_ALL="C", PYTHONIOENCODING="ascii")], 1):
            with self.subTest(setting):
                done = self.worker(
                    "--url", service.url, "--title", CHINESE,
                    "--run-id", "run-%d" % number,
                    env=environment(**dict(changes, **setting)))
                self.assertEqual(self.succeeds(done),
                                 {"ticket_id": number, "title": CHINESE})

    def test_other_ways_to_start_python(self):
        tool = self.tool(http(500), CREATED)
        for number, flags in enumerate([("-OO",), ("-I", "-S"),
                                        ("-X", "dev", "-W", "default")]):
            with self.subTest(flags):
                tool.connections = 0
                call = ("--url", tool.url, "--run-id", "run-%d" % number)
                options = {"interpreter": [sys.executable] + list(flags)}
                done = self.worker(*call, **options)
                self.fails(done, 5)
                self.assertNotIn("Warning", done.stderr)
                done = self.worker(*call, **options)
                self.succeeds(done)
                self.assertEqual(done.stderr, "")

    def test_several_workers_at_once(self):
        service = self.service()
        flags = ("--url", service.url, "--title", TITLE)
        with concurrent.futures.ThreadPoolExecutor(6) as pool:
            # Behind a lock they gather, and then all go for it at once.
            with write_lock(self.database):
                runs = [pool.submit(self.worker, *flags) for _ in range(6)]
                time.sleep(2)
        for done in [each.result() for each in runs]:
            self.assertEqual(done.returncode, 0, done.stderr)
            line = json.loads(done.stdout)
            self.assertEqual(self.succeeds(
                done, line["source"], line["tool_replayed"]), TICKET)
        self.assertEqual(len(self.steps()), 1)
        self.assertEqual(rows(service.database, "tickets"), [(1, TITLE)])


class RecoveryTest(WorkerCase):
    # mode, crash: the tickets before the second run, its source, its
    # tool_replayed, its ticket.
    TABLE = {
        ("idempotent", "before-call"): (0, "tool", False, 1),
        ("idempotent", "after-call"): (1, "tool", True, 1),
        ("idempotent", "after-checkpoint"): (1, "checkpoint", None, 1),
        ("naive", "before-call"): (0, "tool", False, 1),
        ("naive", "after-call"): (1, "tool", False, 2),
        ("naive", "after-checkpoint"): (1, "checkpoint", None, 1),
    }

    def test_crash_points(self):
        for (mode, crash), expected in self.TABLE.items():
            with self.subTest(mode=mode, crash=crash):
                self.crash_and_recover(mode, crash, *expected)

    def crash_and_recover(self, mode, crash, before, source, replayed, last):
        for name in ("tool.db", "worker.db"):
            with contextlib.suppress(FileNotFoundError):
                os.remove(self.path(name))
        service = self.service()
        url = ("--url", service.url)
        done = self.worker("--title", TITLE, "--mode", mode, "--crash", crash,
                           *url)
        self.assertEqual(done.returncode, CRASHES[crash], done.stderr)
        self.assertEqual(done.stdout, "")
        (*_, status, response), = self.steps()
        if crash == "after-checkpoint":
            self.assertEqual(status, "done")
            self.assertEqual(json.loads(response), TICKET)
        else:
            self.assertEqual(self.steps(), self.pending(mode=mode))
        self.assertEqual(len(rows(service.database, "tickets")), before)
        ticket = self.succeeds(self.worker(*url), source, replayed, mode)
        self.assertEqual(ticket, {"ticket_id": last, "title": TITLE})
        self.assertEqual(len(rows(service.database, "tickets")), last)
        self.assertEqual(self.steps()[0][4], "done")
        self.assertEqual(integrity(self.database), ["ok"])
        service.kill()

    @unittest.skipUnless(POSIX, "no SIGINT can be sent to one process")
    def test_ctrl_c(self):
        # A handler here, whatever it is, makes SIGINT the default in the
        # child; ignored here, as in a background job, it would stay ignored.
        self.addCleanup(signal.signal, signal.SIGINT, signal.signal(
            signal.SIGINT, signal.default_int_handler))
        asked = threading.Event()

        def ending(connection):
            asked.set()
            hang(connection)

        tool = self.tool((b"", ending), CREATED)
        process = subprocess.Popen(
            [sys.executable, WORKER, "--url", tool.url, "--title", TITLE],
            cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        try:
            self.assertTrue(asked.wait(TIMEOUT))
            process.send_signal(signal.SIGINT)
            output, error = process.communicate(timeout=TIMEOUT)
        finally:
            process.kill()
            process.communicate()
        self.assertNotEqual(process.returncode, 0)
        # 5 would mean that the signal was slept through.
        self.assertNotEqual(process.returncode, 5)
        self.assertEqual(output, b"")
        self.assertNotIn(b"Traceback", error)
        self.assertEqual(self.steps(), self.pending())
        self.succeeds(self.worker("--url", tool.url))


class IntentTest(WorkerCase):
    def refused(self, tool, *flags):
        saved = rows(self.database, "steps")
        connections = tool.connections
        with self.subTest(flags, saved=saved):
            self.fails(self.worker("--url", tool.url, *flags), 3)
            self.assertEqual(rows(self.database, "steps"), saved)
            self.assertEqual(tool.connections, connections)

    def test_what_was_saved_wins(self):
        tool = self.tool(http(500), CREATED)
        same = ("--title", TITLE, "--mode", "naive")
        others = [("--title", "Another"), ("--mode", "idempotent"),
                  ("--title", ""), ("--title", TITLE + " "),
                  ("--title", "Another", "--mode", "naive"),
                  ("--title", TITLE, "--mode", "idempotent"),
                  ("--title", "Another", "--crash", "before-call")]
        self.worker("--run-id", "bystander", "--crash", "before-call")
        self.worker("--crash", "before-call", *same)
        for flags in others:
            self.refused(tool, *flags)
        self.fails(self.worker("--url", tool.url, *same), 5)
        for flags in others[:2]:
            self.refused(tool, *flags)
        done = self.worker("--url", tool.url)
        self.assertEqual(self.succeeds(done, mode="naive"), TICKET)
        for flags in others[:2]:
            self.refused(tool, *flags)
        done = self.worker("--url", NOWHERE, *same)
        self.succeeds(done, "checkpoint", None, "naive")
        first, second = tool.requests
        self.assertEqual(first.body, second.body)
        self.assertEqual(second.values("Idempotency-Key"), [])
        self.assertEqual(self.steps()[0][:5], (
            "bystander", self.steps()[0][1], "bystander/create_ticket/v1",
            "idempotent", "pending"))

    def test_an_empty_title_is_a_title(self):
        tool = self.tool(CREATED)
        self.worker("--crash", "before-call", "--title", "")
        self.assertEqual(self.steps(), self.pending(""))
        self.refused(tool, "--title", TITLE)
        self.succeeds(self.worker("--url", tool.url))
        self.assertEqual(json.loads(tool.requests[0].body), {"title": ""})

    def test_the_defaults_by_name(self):
        tool = self.tool(CREATED)
        self.worker("--crash", "before-call")
        (_, payload, _, mode, *_), = self.steps()
        self.assertEqual(mode, "idempotent")
        self.assertTrue(payload["title"].strip())
        self.refused(tool, "--title", "")
        self.refused(tool, "--mode", "naive")
        self.succeeds(self.worker("--url", tool.url, "--mode", "idempotent",
                                  "--title", payload["title"]))

    def test_a_chinese_title_again(self):
        self.worker("--crash", "before-call", "--title", CHINESE)
        done = self.worker("--crash", "before-call", "--title", CHINESE)
        self.assertEqual(done.returncode, 71)
        self.assertEqual(self.steps(), self.pending(CHINESE))


class ArgumentTest(WorkerCase):
    def refused(self, table, *words):
        def tried(flags):
            folder = self.subfolder()
            return run(WORKER, *flags, cwd=folder), os.listdir(folder)

        for flags, seen in zip(table, side_by_side(tried, table)):
            done, files = seen
            with self.subTest(flags):
                self.assertEqual(done.returncode, 2, done.stderr)
                self.assertEqual(done.stdout, "")
                self.assertNotIn("Traceback", done.stderr)
                for word in words:
                    self.assertIn(word, done.stderr)
                self.assertEqual(files, [])

    def test_run_ids(self):
        self.refused([("--run-id=" + run_id,) for run_id in (
            "", " ", "a b", "a\tb", "a\nb", "a\n", "a\r", CHINESE,
            "caf\u00e9", "\uff11", "a\x7f", "a\x1f", "x" * 201)],
            "--run-id", "ASCII")

    def test_a_run_id_of_200_characters(self):
        run_id = "~" * 199 + "!"
        done = self.worker("--run-id", run_id, "--url", self.service().url)
        self.succeeds(done)
        self.assertEqual(self.steps()[0][0], run_id)

    def test_other_arguments(self):
        self.refused([
            ("--mode", "careful"), ("--mode", ""), ("--mode", "naiv"),
            ("--mode",), ("--crash", "always"), ("--crash", ""),
            ("--crash", "before"), ("--unknown",), ("--titl", "x"),
            ("--run", "x"), ("--m", "naive"), ("--title",), ("extra",)])


class WaitingTest(AnswerCase):
    def test_silence_and_locks(self):
        # One test, because they all wait and so can wait side by side.
        silence = [("%d bytes, hang" % len(data), (data, hang))
                   for data in (b"", CREATED[:11], CREATED[:30],
                                CREATED[:-1], REFUSED[:-1])]
        with concurrent.futures.ThreadPoolExecutor(3) as pool:
            checks = [pool.submit(check) for check in (
                self.locked_all_along, self.locked_for_a_while,
                self.locked_too_long)]
            self.check(5, silence, lanes=len(silence))
            for check in checks:
                check.result()

    def locked_all_along(self):
        folder = self.subfolder()
        database = os.path.join(folder, "worker.db")
        tool = self.tool(CREATED)
        run(WORKER, "--crash", "before-call", cwd=folder)
        saved = rows(database, "steps")
        with write_lock(database):
            done = run(WORKER, "--url", tool.url, cwd=folder)
            self.fails(done, 6)
            self.assertEqual(rows(database, "steps"), saved)
        self.assertEqual(tool.connections, 0)
        self.succeeds(run(WORKER, "--url", tool.url, cwd=folder))

    def locked_during_the_call(self, seconds):
        """Run once while the tool locks worker.db, answers, and unlocks it
        after that many seconds, or once the worker has ended."""
        folder = self.subfolder()
        over = threading.Event()

        def ending(connection):
            with write_lock(os.path.join(folder, "worker.db")):
                connection.sendall(CREATED)
                over.wait(seconds)

        tool = self.tool((b"", ending), CREATED)
        try:
            done = run(WORKER, "--url", tool.url, "--title", TITLE, cwd=folder)
            return done, self.steps(folder), tool, folder
        finally:
            over.set()

    def locked_for_a_while(self):
        done, *_ = self.locked_during_the_call(3)
        self.succeeds(done)

    def locked_too_long(self):
        done, steps, tool, folder = self.locked_during_the_call(TIMEOUT)
        self.fails(done, 6)
        self.assertEqual(steps, self.pending())
        self.succeeds(run(WORKER, "--url", tool.url, cwd=folder))
        for request in tool.requests:
            self.assertEqual(request.values("Idempotency-Key"), [KEY])


class DatabaseTest(WorkerCase):
    def unusable(self, database):
        tool = self.tool(CREATED)
        self.fails(self.worker("--db", database, "--url", tool.url), 6)
        self.assertEqual(tool.connections, 0)

    def test_not_a_database(self):
        for content in (b"This is not a database.\n" * 999,
                        b"SQLite format 3\0" + b"\xff" * 4096):
            with self.subTest(content[:16]):
                with open(self.database, "wb") as file:
                    file.write(content)
                self.unusable("worker.db")
                with open(self.database, "rb") as file:
                    self.assertEqual(file.read(), content)

    def test_no_file(self):
        for name in ("", ".", self.folder, os.path.join("missing", "x.db")):
            with self.subTest(name):
                self.unusable(name)
                self.assertEqual(os.listdir(self.folder), [])

    def test_a_table_without_a_column(self):
        for old, new in [("response", ""), ("mode", ""), ("run_id", "id"),
                         ("operation_key", "key"), ("status", "state")]:
            names = [name.replace(old, new) for name in COLUMNS]
            columns = ", ".join(filter(None, names))
            with self.subTest(columns):
                self.change("DROP TABLE IF EXISTS steps")
                self.change("CREATE TABLE steps(%s)" % columns)
                self.unusable("worker.db")
                self.assertEqual(rows(self.database, "steps"), [])

    @unittest.skipIf(POSIX and os.geteuid() == 0, "root may write anything")
    def test_read_only(self):
        self.worker("--crash", "before-call")
        saved = rows(self.database, "steps")
        os.chmod(self.database, 0o444)
        self.addCleanup(os.chmod, self.database, 0o644)
        self.fails(self.worker("--url", self.tool(CREATED).url), 6)
        self.assertEqual(rows(self.database, "steps"), saved)

    def test_always_a_file(self):
        names = ["an empty file", CHINESE + " worker.db"]
        if POSIX:
            names += [":memory:", "file:x?mode=memory", "~", "a%20b?c#d"]
        open(self.path(names[0]), "wb").close()
        for name in names:
            with self.subTest(name):
                self.succeeds(self.worker("--db", name, "--url",
                                          self.tool(CREATED).url))
                done = self.worker("--db", name, "--url", NOWHERE)
                self.assertEqual(self.succeeds(done, "checkpoint", None),
                                 TICKET)
        self.assertEqual(sorted(os.listdir(self.folder)), sorted(names))


def old_interpreters():
    """Each Python 3 before 3.8 that is found here and starts."""
    found = [shutil.which("python3.%d" % minor) for minor in range(8)]
    found += glob.glob(os.path.expanduser(
        "~/.pyenv/versions/3.[0-7].*/bin/python3"))
    for path in filter(None, found):
        with contextlib.suppress(OSError):
            # A shim of pyenv may be there without its Python.
            if run("-c", "pass", interpreter=[path]).returncode == 0:
                yield path


class OldPythonTest(Case):
    def test_one_line_says_which_version_is_needed(self):
        interpreters = list(old_interpreters())
        if not interpreters:
            self.skipTest("no Python 3 before 3.8 was found")
        for interpreter in interpreters:
            for program in PROGRAMS:
                with self.subTest(interpreter + " " + program):
                    done = run(program, interpreter=[interpreter],
                               cwd=self.folder)
                    self.assertEqual(done.returncode, 1, done.stderr)
                    self.assertRegex(done.stdout + done.stderr,
                                     r"\A.*3\.8.*\n\Z")


if __name__ == "__main__":
    unittest.main()
