"""tool_service.py seen from outside: processes, sockets and its database."""
import codecs
import concurrent.futures
import contextlib
import json
import os
import platform
import re
import signal
import socket
import sqlite3
import struct
import subprocess
import sys
import time
import unittest

from support import (
    Case, Service, TIMEOUT, TOOL, integrity, killed_after, rows, run,
    write_lock)

BODY = b'{"title": "x"}'  # 14 bytes long: the tables below count on it
START = b"POST /tickets HTTP/1.1"
TYPE = b"Content-Type: application/json"
LENGTH = b"Content-Length: 14"
KEY = b"Idempotency-Key: k"
INTERNALS = re.compile(
    r"Traceback|sqlite|Error:|Error\(|\.py\b|Python|codec|tool\.db", re.I)


def request(*lines, body=BODY):
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def post(body=BODY, *lines):
    """A request that announces its body; the lines come below the rest."""
    return request(START, TYPE, b"Content-Length: %d" % len(body), *lines,
                   body=body)


def keyed(key, title="x", **options):
    return post(json.dumps({"title": title}, **options).encode("utf-8"),
                b"Idempotency-Key: " + key)


class Answer:
    """What came back: status, headers by lower-case name, body."""

    def __init__(self, raw):
        head, _, self.body = raw.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        if not re.match(r"HTTP/1\.[01] [2-5]\d\d ", first):
            raise AssertionError("no status line: %r" % raw[:200])
        self.raw = raw
        self.status = int(first.split()[1])
        self.headers = {}
        for line in lines:
            name, _, value = line.partition(": ")
            self.headers[name.lower()] = value
        self.replayed = self.headers.get("idempotent-replayed")


def received(peer):
    """Everything up to an orderly end. A reset raises: it loses answers."""
    return b"".join(iter(lambda: peer.recv(65536), b""))


def ask(tool, raw, half_close=False):
    with tool.connect() as peer:
        peer.sendall(raw)
        if half_close:
            peer.shutdown(socket.SHUT_WR)
        return Answer(received(peer))


def stored(tool):
    return rows(tool.database, "tickets"), rows(tool.database, "receipts")


def counted(tool):
    return len(rows(tool.database, "tickets")), len(
        rows(tool.database, "receipts"))


def launcher(code):
    """An interpreter that runs some code first, and then the program."""
    return (sys.executable, "-c", "import os, runpy, socket, sys, time\n"
            "sys.argv.pop(0)\n" + code +
            "\nrunpy.run_path(sys.argv[0], run_name='__main__')")


class ToolCase(Case):

    def created(self, answer, title="x"):
        """Check a 201; return the ticket's number."""
        self.assertEqual(answer.status, 201, answer.raw)
        self.assertRegex(answer.headers["content-type"], "^application/json")
        self.plain(answer)
        ticket = json.loads(answer.body.decode("utf-8"))
        self.assertEqual(ticket, {"ticket_id": ticket["ticket_id"],
                                  "title": title})
        self.assertIs(type(ticket["ticket_id"]), int)
        return ticket["ticket_id"]

    def plain(self, answer):
        self.assertEqual(answer.headers["content-length"],
                         str(len(answer.body)))
        head = answer.raw.partition(b"\r\n\r\n")[0].decode("latin-1")
        self.assertNotIn("Python", head)
        self.assertNotIn(platform.python_version(), head)

    def problem(self, answer, *statuses):
        """Check the form of a refusal."""
        self.assertIn(answer.status, statuses, answer.raw)
        self.assertEqual(answer.headers["content-type"],
                         "application/problem+json")
        self.plain(answer)
        problem = json.loads(answer.body.decode("utf-8"))
        self.assertIs(type(problem["title"]), str)
        self.assertEqual(problem["status"], answer.status)
        self.assertIs(type(problem["status"]), int)
        self.assertIs(type(problem["detail"]), str)
        self.assertNotRegex(answer.raw.decode("latin-1"), INTERNALS)
        if answer.status == 405:
            self.assertEqual(answer.headers["allow"], "POST")
        if answer.status == 503:
            self.assertRegex(answer.headers["retry-after"], "^[0-9]+$")

    def refused(self, tool, raw, *statuses, **options):
        """A refusal stores nothing."""
        before = stored(tool)
        self.problem(ask(tool, raw, **options), *statuses)
        self.assertEqual(stored(tool), before)

    def all_refused(self, table, **options):
        """Each row: a request and the statuses that will do."""
        tool = self.service()
        for raw, *statuses in table:
            with self.subTest(raw=raw[:300]):
                self.refused(tool, raw, *statuses, **options)
        self.assertEqual(self.created(ask(tool, post())), 1)

    def lost(self, tool, raw):
        """No byte comes back; Windows may reset where others close."""
        with tool.connect() as peer, contextlib.suppress(ConnectionError):
            peer.sendall(raw)
            self.assertEqual(peer.recv(1), b"")


class Serving(ToolCase):

    def test_ready_line_and_log(self):
        tool = self.service()
        self.assertEqual(tool.url, "http://127.0.0.1:%d" % tool.port)
        self.created(ask(tool, post()))
        tool.process.stdin.close()
        self.assertEqual(tool.wait(), 0)
        self.assertEqual(tool.process.stdout.read(), b"")
        self.assertRegex(tool.log(), "POST /tickets.* 201")

    def test_listens_on_loopback_alone(self):
        tool = self.service()
        addresses = ["::1"]
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            # Nothing is sent: the system only says which address it has.
            with contextlib.suppress(OSError):
                probe.connect(("192.0.2.1", 9))
                addresses.append(probe.getsockname()[0])
        for address in addresses:
            with self.subTest(address=address):
                with self.assertRaises(OSError):
                    socket.create_connection((address, tool.port), 5).close()

    def test_tables(self):
        tool = self.service()
        with contextlib.closing(sqlite3.connect(tool.database)) as db:
            names = sorted(row[0] for row in db.execute(
                "SELECT name FROM sqlite_master WHERE type = 'table'"))
            columns = {name: [row[1:4] + row[5:] for row in db.execute(
                "PRAGMA table_info(%s)" % name)] for name in names}
        self.assertEqual(columns, {
            "receipts": [("operation_key", "TEXT", 0, 1),
                         ("payload", "TEXT", 1, 0),
                         ("response", "TEXT", 1, 0)],
            "tickets": [("id", "INTEGER", 0, 1), ("title", "TEXT", 1, 0)]})

    def test_asks_no_resolver(self):
        code = ("def slow(*args): time.sleep(600)\n"
                "for name in ('getfqdn', 'gethostbyname', 'gethostbyaddr',\n"
                "             'gethostbyname_ex', 'getaddrinfo',\n"
                "             'getnameinfo'):\n"
                "    setattr(socket, name, slow)")
        tool = self.service(interpreter=launcher(code))
        self.created(ask(tool, post()))

    def test_log_that_nobody_takes(self):
        closed_pipe = ("reader, writer = os.pipe()\n"
                       "os.dup2(writer, 2)\n"
                       "os.close(writer)\n"
                       "os.close(reader)")
        for code in closed_pipe, "sys.stderr = None":
            tool = self.service(interpreter=launcher(code))
            with self.subTest(code=code):
                self.created(ask(tool, post()))
                self.problem(ask(tool, post(b"x")), 400)
                self.problem(ask(tool, request(b"garbage")), 400)
                with contextlib.closing(sqlite3.connect(tool.database)) as db:
                    db.execute("DROP TABLE tickets")
                self.problem(ask(tool, post()), 500)
            tool.kill()
            os.remove(tool.database)

    def test_database_name(self):
        names = {"tool.db": launcher("del sys.argv[1:3]")}
        if os.name == "posix":
            for name in ":memory:", "file:x?mode=memory":
                names[name] = launcher("sys.argv[2] = %r" % name)
        for name, interpreter in names.items():
            with self.subTest(name=name):
                tool = self.service(interpreter=interpreter)
                self.created(ask(tool, post()))
                tool.kill()
                self.assertEqual(rows(self.path(name), "tickets"),
                                 [(1, "x")])


class Creation(ToolCase):

    def test_without_a_key_every_request_makes_a_ticket(self):
        tool = self.service()
        for number in 1, 2:
            answer = ask(tool, post())
            self.assertEqual(self.created(answer), number)
            self.assertIsNone(answer.replayed)
        self.assertEqual(stored(tool), ([(1, "x"), (2, "x")], []))

    def test_replay(self):
        tool = self.service()
        first = ask(tool, keyed(b"k"))
        self.assertEqual(self.created(first), 1)
        self.assertIsNone(first.replayed)
        before = stored(tool)
        self.assertEqual(before[0], [(1, "x")])
        (key, payload, response), = before[1]
        self.assertEqual((key, json.loads(payload), response),
                         ("k", {"title": "x"}, first.body.decode("utf-8")))
        for _ in range(3):
            again = ask(tool, keyed(b"k"))
            self.created(again)
            self.assertEqual(again.replayed, "true")
            self.assertEqual(again.body, first.body)
        self.assertEqual(stored(tool), before)

    def test_parameters_are_compared_as_values(self):
        tool = self.service()
        title = "Az \u00e9/\U0001f39f"
        first = ask(tool, keyed(b"k", title))
        self.created(first, title)
        for text in (
                '{"title":"Az \u00e9/\U0001f39f"}',
                ' \t\r\n{ "title"\n:\t"Az \u00e9/\U0001f39f" }\r\n',
                r'{"title": "\u0041z \u00e9/\ud83c\udf9f"}',
                r'{"title": "A\u007A\u0020\u00E9\/\uD83C\uDF9F"}',
                r'{"\u0074itl\u0065": "Az \u00e9\u002f\ud83c\udf9f"}'):
            with self.subTest(text=text):
                again = ask(tool, post(text.encode("utf-8"), KEY))
                self.assertEqual((again.status, again.replayed, again.body),
                                 (201, "true", first.body))
        self.assertEqual(counted(tool), (1, 1))

    def test_other_parameters_conflict(self):
        tool = self.service()
        first = ask(tool, keyed(b"k", "caf\u00e9"))
        for title in ("cafe", "Caf\u00e9", "cafe\u0301", "caf\u00e9 ",
                      "caf\u00e9\u200b", "caf\\u00e9"):
            with self.subTest(title=title):
                self.refused(tool, keyed(b"k", title), 409)
        again = ask(tool, keyed(b"k", "caf\u00e9"))
        self.assertEqual((again.replayed, again.body), ("true", first.body))

    def test_keys(self):
        tool = self.service()
        names = (b"a", b"A", b"!", b"~", b"a,b", b'"a"', b"a/create/v1", b"0",
                 b"00", b"NULL", b"k" * 254, b"k" * 255)
        for number, key in enumerate(names, 1):
            with self.subTest(key=key):
                answer = ask(tool, keyed(key))
                self.assertEqual(self.created(answer), number)
                self.assertIsNone(answer.replayed)
        for line in (b"idempotency-key: a", b"IDEMPOTENCY-KEY:a",
                     b"Idempotency-Key:\t a \t"):
            with self.subTest(line=line):
                self.assertEqual(ask(tool, post(BODY, line)).replayed, "true")
        self.assertEqual([row[0] for row in stored(tool)[1]],
                         sorted(key.decode("ascii") for key in names))

    def test_titles(self):
        tool = self.service()
        titles = (
            "x", "\u521b\u5efa\u5de5\u5355", "\U0001f39f", "a" * 200,
            "\U0001f469\u200d\U0001f4bb", "\u5de5" * 200, "\U0001f39f" * 200,
            " kept ", "a\nb\tc", "\x01", "\x7f", '"\\/', "null", "</script>",
            "\u202eabc", "\ufeffx", "\uffff", "'); DROP TABLE tickets; --")
        for number, title in enumerate(titles, 1):
            with self.subTest(title=title):
                key = b"%d" % number
                first = ask(tool, keyed(key, title, ensure_ascii=False))
                again = ask(tool, keyed(key, title, ensure_ascii=True))
                self.assertEqual(self.created(first, title), number)
                self.assertEqual(again.replayed, "true")
                self.assertEqual(again.body, first.body)
        self.assertEqual(stored(tool)[0], list(enumerate(titles, 1)))

    def test_accepted_requests(self):
        tool = self.service()
        for raw in (
                request(START, b"content-type:APPLICATION/JSON", LENGTH),
                request(START, TYPE + b"; charset=utf-8", LENGTH),
                request(START, TYPE + b" ;x=y", b"CONTENT-LENGTH:\t14 "),
                request(b"POST /tickets HTTP/1.0", TYPE, LENGTH),
                request(START, b"From: a", TYPE, LENGTH, b"Empty:"),
                post(BODY.ljust(16 * 1024)),
                post() + b"x", post() + b"x" * (1 << 20)):
            with self.subTest(raw=raw[:200]):
                self.created(ask(tool, raw))

    def test_receipts_outlive_a_kill(self):
        tool = self.service()
        first = ask(tool, keyed(b"k"))
        tool.kill()
        tool = self.service()
        again = ask(tool, keyed(b"k"))
        self.assertEqual((again.replayed, again.body), ("true", first.body))
        self.problem(ask(tool, keyed(b"k", "y")), 409)
        self.assertEqual(counted(tool), (1, 1))
        self.assertEqual(integrity(tool.database), ["ok"])


class Refusals(ToolCase):

    def test_bodies(self):
        titles = [json.dumps(title) for title in (
            None, True, 1, 1.5, [], ["x"], {}, {"title": "x"}, "", " ",
            "\t\r\n", "\u3000", "\u00a0 \u2003", "a" * 201,
            "\U0001f39f" * 201, "\ud800", "x\udc00", "\udc00\ud800")]
        titles += ["NaN", "Infinity", "1" * 5000, "[" * 8000 + "]" * 8000,
                   "'x'", "x", '"\t"', '"\n"', r'"\x41"', '"x', '"x",',
                   '"x", "title": "x"', r'"x", "t\u0069tle": "y"',
                   '"x", "more": 1', '"x", "": NaN', '"x"}, {']
        bodies = [b'{"title": %s}' % title.encode("ascii")
                  for title in titles]
        bodies += [
            b"", b" ", b"x", b"null", b"true", b"1", b'"title"', b"[]", b"{}",
            b"[" + BODY + b"]", b'["title"]', b'[["title", "x"]]',
            b'{"Title": "x"}', b'{"title ": "x"}', b'{"": "x"}', b"NaN",
            b"-Infinity", b"1" * 5000, BODY[:-1], BODY + b"x", BODY + BODY,
            BODY + b"\0", b"\x0b" + BODY, BODY + b"\xc2\xa0", b"//\n" + BODY,
            b"{title: 'x'}", b"title=x", codecs.BOM_UTF8 + BODY,
            b'{"title": "\xe9"}', b'{"title": "\xc0\xaf"}',
            b'{"title": "\xf0\x9f"}', b'{"title": "\xed\xa0\x80"}',
            b'{"title": "\xed\xa0\xbc\xed\xbe\x9f"}', b'{"title": "\xff"}',
            b"[" * 16000, b"[" * 8000 + b"]" * 8000, b'{"title":' * 1800,
            b'{"title":' * 1500 + b'"x"' + b"}" * 1500]
        bodies += [BODY.decode("ascii").encode(name) for name in (
            "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-be")]
        self.all_refused([(post(body), 400) for body in bodies])

    def test_body_shorter_than_announced(self):
        self.all_refused(
            [(request(START, TYPE, LENGTH, KEY, body=BODY[:size]), 400)
             for size in (0, 5, 13)]
            + [(request(START, TYPE, b"Content-Length: 15"), 400)],
            half_close=True)

    def test_keys(self):
        values = (
            b"", b" ", b"\t", b"k" * 256, b"k" * 5000, b"a b", b"a\tb",
            b"k\x7f", b"k\x01", b"\0", b"k\x0b", b"k\x0c", b"k\x1f", b"k\x85",
            b"k\xa0", b"k\xe9", "\u4efb\u52a1".encode("utf-8"))
        self.all_refused(
            [(post(BODY, b"Idempotency-Key: " + value), 400)
             for value in values]
            + [(post(BODY, KEY, KEY), 400),
               (post(BODY, KEY, b"X: a", b"idempotency-key: other"), 400),
               (post(BODY, b"Idempotency-Key:", KEY), 400)])

    def test_lengths(self):
        values = (
            b"", b" ", b"+14", b"-14", b"1_4", b"0xe", b"0b1110", b"14.0",
            b"1.4e1", b"14, 14", b"14 14", b"14;", b"x", b"14\x0b", b"14\xa0",
            b"1\xb2", "\u0661\u0664".encode("utf-8"),
            "\uff11\uff14".encode("utf-8"))
        table = [(request(START, TYPE, b"Content-Length: " + value), 400)
                 for value in values]
        for value in b"1" * 20, b"9" * 5000, b"-" + b"9" * 5000:
            table.append((request(START, TYPE, b"Content-Length: " + value),
                          400, 413))
        for other in LENGTH, b"content-length: 0", b"Content-Length:":
            table.append((request(START, TYPE, LENGTH, other), 400))
            table.append((request(START, TYPE, other, LENGTH), 400))
        self.all_refused(table)

    def test_length_missing(self):
        chunked = b"Transfer-Encoding: chunked"
        chunks = b"e\r\n" + BODY + b"\r\n0\r\n\r\n"
        self.all_refused([
            (request(START, TYPE), 411),
            (request(START, TYPE, KEY, body=b""), 411),
            (request(START, TYPE, chunked, body=chunks), 411),
            (request(START, TYPE, chunked, KEY, body=chunks), 411),
            (request(START, TYPE, LENGTH, chunked, body=chunks), 400, 411),
            (request(START, TYPE, chunked, LENGTH), 400, 411),
            (request(START, TYPE, b"Transfer-Encoding: gzip, chunked",
                     body=chunks), 411, 501)])

    def test_large_bodies(self):
        self.all_refused([
            (post(BODY.ljust(16 * 1024 + 1)), 413),
            (post(BODY.ljust(1 << 20), KEY), 413),
            (request(START, TYPE, b"Content-Length: 999999999"), 413)])

    def test_content_types(self):
        lines = [b"Content-Type: " + value for value in (
            b"", b"text/plain", b"application/jsonx", b"application/x+json",
            b"application", b"json", b"text/json", b"*/*",
            b"application/x-www-form-urlencoded", b"multipart/mixed",
            b"multipart/form-data; boundary=x", b"message/rfc822",
            b"text/plain; application/json", b"application/json\xa0")]
        self.all_refused(
            [(request(START, line, LENGTH), 415) for line in lines]
            + [(request(START, LENGTH, KEY), 415)])

    def test_origins(self):
        self.all_refused(
            [(post(BODY, b"Origin: " + value), 403) for value in (
                b"null", b"http://127.0.0.1:8765", b"https://example.org",
                b"")]
            + [(post(BODY, KEY, b"origin:x"), 403),
               (request(b"OPTIONS /tickets HTTP/1.1", b"Origin: x", body=b""),
                403, 405),
               (request(b"POST / HTTP/1.1", b"Origin: x", body=b""),
                403, 404)])

    def test_paths(self):
        table = []
        for path in (
                b"/", b"//tickets", b"///tickets", b"/tickets/", b"/tickets?",
                b"/tickets?x=1", b"/tickets#x", b"/tickets;x", b"/Tickets",
                b"/ticket", b"/%74ickets", b"/./tickets", b"/x/../tickets",
                b"/tickets%00", b"/tickets\xff", b"tickets", b"*", b"\\",
                b"http://127.0.0.1/tickets", b"//127.0.0.1/tickets",
                b"/" + b"a" * 60000):
            start = b"POST " + path + b" HTTP/1.1"
            table.append((request(start, TYPE, LENGTH, KEY), 400, 404))
            table.append((request(b"GET " + path + b" HTTP/1.1", body=b""),
                          400, 404, 405))
        large = b"Content-Length: %d" % (1 << 20)
        table.append((request(b"POST /x HTTP/1.1", TYPE, large,
                              body=b"x" * (1 << 20)), 404))
        self.all_refused(table)

    def test_methods(self):
        table = []
        for method in b"GET", b"PUT", b"DELETE", b"PATCH", b"OPTIONS":
            start = method + b" /tickets HTTP/1.1"
            table.append((request(start, body=b""), 405))
            table.append((request(start, TYPE, LENGTH, KEY), 405))
        for method in (b"TRACE", b"CONNECT", b"BREW", b"post", b"POSTS",
                       b"__class__", b"error"):
            start = method + b" /tickets HTTP/1.1"
            table.append((request(start, TYPE, LENGTH), 405, 501))
        self.all_refused(table)

    def test_head(self):
        tool = self.service()
        answer = ask(tool, request(b"HEAD /tickets HTTP/1.1", body=b""))
        self.assertEqual(
            (answer.status, answer.headers["allow"], answer.body,
             answer.headers["content-type"]),
            (405, "POST", b"", "application/problem+json"))
        self.assertEqual(counted(tool), (0, 0))

    def test_request_lines(self):
        table = [(request(start, TYPE, LENGTH), 400) for start in (
            b"garbage", b"POST", b"POST /tickets", b"POST /tickets HTTP/x",
            b"POST /tickets HTTP/1", b"POST /tickets HTTP/1.1.1",
            b"POST /tickets FTP/1.1", b"POST HTTP/1.1",
            b"POST /tickets HTTP/1.1 x", b"POST /tick ets HTTP/1.1",
            b"\x16\x03\x01\x02", b"\xff\xfe", TYPE)]
        table += [
            (request(b"GET /tickets"), 400, 405),
            (request(b"GET /tickets HTTP/0.9"), 400, 405, 505),
            (request(b"POST /tickets HTTP/2.0", TYPE, LENGTH), 400, 505),
            (request(b"PRI * HTTP/2.0"), 400, 404, 405, 501, 505),
            (request(b"POST /" + b"a" * 70000 + b" HTTP/1.1"), 400, 404, 414),
            (request(b"a" * 70000), 400, 414)]
        self.all_refused(table)

    def test_heads_that_are_too_large(self):
        self.all_refused([
            (request(START, TYPE, LENGTH, *[b"X: a"] * 300, KEY), 400, 431),
            (request(START, *[b"X: a"] * 300, TYPE, LENGTH), 400, 431),
            (request(START, b"X: " + b"a" * 70000, TYPE, LENGTH, KEY),
             400, 431)])

    def test_header_lines_that_are_none(self):
        # The parser drops what follows such a line. With the key in it, a
        # keyed request would pass for one without: here 201 is a duplicate.
        lines = (b"no colon", b"X : a", b"X\t: a", b"X Y: a", b": a", b":",
                 b"From here", b"X: a\r", b"\r", b"\rX: a", b"X: a\r\r",
                 b"X: a\rno colon", b"X: a\rY: b", b"X\xe9: a", b"X\0: a",
                 b"\x0bX: a", b"Content-Length", START)
        table = []
        for line in lines:
            for place in range(1, 5):
                head = [START, TYPE, LENGTH, KEY, b"Last: x"]
                head.insert(place, line)
                table.append((request(*head), 400))
            table.append((request(START, b"Content-Type: multipart/mixed",
                                  line, LENGTH, KEY), 400, 415))
        for lines in ([b" continued", KEY], [b"\tcontinued", KEY],
                      [b" Idempotency-Key: k"], [b"X: a", b" " + KEY],
                      [b"X: a", b"\t" + KEY], [b"X:", b" " + KEY],
                      [b"Idempotency-Key:", b" k"], [KEY, b" l"],
                      [b"Idempotency-Key : k"], [b"Idempotency-Key\t: k"],
                      [b"Idempotency-Key"], [b"Idempotency-Key k"],
                      [b"X: a\r", KEY], [b"From k", KEY]):
            table.append((request(START, *lines, TYPE, LENGTH), 400))
            if lines[0][:1] > b" ":
                table.append((request(START, TYPE, LENGTH, *lines), 400))
        self.all_refused(table)


class Crashes(ToolCase):

    def test_crash_points(self):
        for flag, status, tickets in (("--crash-before-commit", 86, 0),
                                      ("--crash-after-commit", 87, 1)):
            for raw, receipts in (post(), 0), (keyed(b"k"), tickets):
                with self.subTest(flag=flag, raw=raw):
                    tool = self.service(flag)
                    self.lost(tool, raw)
                    self.assertEqual(tool.wait(), status)
                    self.assertEqual(counted(tool), (tickets, receipts))
                    self.assertEqual(integrity(tool.database), ["ok"])
                    tool = self.service()
                    again = ask(tool, raw)
                    self.assertEqual(self.created(again),
                                     1 if receipts else tickets + 1)
                    self.assertEqual(again.replayed,
                                     "true" if receipts else None)
                    self.assertNotIn("Traceback", tool.log())
                    tool.kill()
                    os.remove(tool.database)

    def test_no_crash_where_nothing_is_created(self):
        tool = self.service()
        first = ask(tool, keyed(b"k"))
        tool.kill()
        for flag, status in (("--crash-before-commit", 86),
                             ("--crash-after-commit", 87)):
            with self.subTest(flag=flag):
                tool = self.service(flag)
                again = ask(tool, keyed(b"k"))
                self.assertEqual((again.replayed, again.body),
                                 ("true", first.body))
                self.problem(ask(tool, keyed(b"k", "y")), 409)
                self.problem(ask(tool, post(b"x")), 400)
                self.problem(ask(tool, request(b"GET / HTTP/1.1")), 404)
                self.lost(tool, post())
                self.assertEqual(tool.wait(), status)


class Concurrency(ToolCase):

    def at_once(self, tool, requests):
        """Send all of them before one can be answered."""
        with contextlib.ExitStack() as peers:
            with write_lock(tool.database):
                waiting = []
                for raw in requests:
                    peer = peers.enter_context(tool.connect())
                    peer.sendall(raw)
                    waiting.append(peer)
                # Connections are accepted in order: an answer to one more
                # shows that these are in. A refusal needs no lock.
                self.problem(ask(tool, post(b"x")), 400)
            return [Answer(received(peer)) for peer in waiting]

    def test_one_key(self):
        tool = self.service()
        answers = self.at_once(tool, [keyed(b"k")] * 64)
        self.assertEqual({self.created(answer) for answer in answers}, {1})
        self.assertEqual(len({answer.body for answer in answers}), 1)
        self.assertEqual(
            sorted(str(answer.replayed) for answer in answers),
            ["None"] + ["true"] * 63)
        self.assertEqual(counted(tool), (1, 1))

    def test_many_keys(self):
        tool = self.service()
        answers = self.at_once(tool, [keyed(b"%d" % n) for n in range(64)])
        self.assertEqual(sorted(self.created(answer) for answer in answers),
                         list(range(1, 65)))
        self.assertEqual({answer.replayed for answer in answers}, {None})
        self.assertEqual(counted(tool), (64, 64))

    def test_clients_that_go_away(self):
        tool = self.service()
        half = post(BODY, KEY)[:-5]
        for raw in b"", START, half:
            for linger in None, struct.pack("hh" if os.name == "nt" else "ii",
                                            1, 0):
                with tool.connect() as peer:
                    peer.sendall(raw)
                    if linger:  # closing is a reset then
                        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER,
                                        linger)
        self.created(ask(tool, post()))
        self.assertEqual(counted(tool), (1, 0))
        tool.process.stdin.close()
        self.assertEqual(tool.wait(), 0)
        self.assertNotIn("Traceback", tool.log())


class Waiting(ToolCase):
    """What takes ten seconds, side by side; nine forgive a coarse clock."""

    def test_waiting(self):
        parts = (self.stalled_clients, self.short_lock, self.long_lock,
                 self.long_reader)
        tools = []
        for part in parts:
            folder = self.path(part.__name__)
            os.mkdir(folder)
            tools.append(Service(folder))
            self.addCleanup(tools[-1].kill)
        with concurrent.futures.ThreadPoolExecutor(len(parts)) as pool:
            futures = list(map(pool.submit, parts, tools))
        for part, future in zip(parts, futures):
            with self.subTest(part.__name__):
                future.result()

    def stalled_clients(self, tool):
        raw = post(BODY, KEY)
        start = time.monotonic()
        with contextlib.ExitStack() as peers:
            silent = []
            for part in (b"", START, START + b"\r\n" + KEY + b"\r\n",
                         raw[:-14], raw[:-1]):
                silent.append(peers.enter_context(tool.connect()))
                silent[-1].settimeout(30)
                silent[-1].sendall(part)
            self.created(ask(tool, post()))
            for peer in silent:
                with contextlib.suppress(ConnectionError):
                    self.assertNotIn(b" 201 ", received(peer))
                self.assertGreater(time.monotonic() - start, 9)
        self.assertEqual(counted(tool), (1, 0))
        self.created(ask(tool, post()))
        self.assertNotIn("Traceback", tool.log())

    def short_lock(self, tool):
        with tool.connect() as peer:
            with write_lock(tool.database):
                peer.sendall(keyed(b"k"))
                peer.settimeout(3)
                with self.assertRaises(socket.timeout):
                    peer.recv(1)
            peer.settimeout(30)
            self.assertEqual(self.created(Answer(received(peer))), 1)
        self.assertEqual(counted(tool), (1, 1))

    def long_lock(self, tool):
        with tool.connect() as one, tool.connect() as other:
            with write_lock(tool.database):
                start = time.monotonic()
                for peer, raw in (one, post()), (other, keyed(b"k")):
                    peer.settimeout(30)
                    peer.sendall(raw)
                self.problem(ask(tool, post(b"x")), 400)
                for peer in one, other:
                    answer = Answer(received(peer))
                    self.assertGreater(time.monotonic() - start, 9)
                    self.problem(answer, 503)
        self.nothing_left(tool)

    def long_reader(self, tool):
        # Whoever reads holds up the COMMIT alone, with the ticket inserted.
        with contextlib.closing(sqlite3.connect(
                tool.database, isolation_level=None)) as db:
            db.execute("BEGIN")
            db.execute("SELECT * FROM tickets").fetchall()
            with tool.connect() as peer:
                peer.settimeout(30)
                peer.sendall(keyed(b"k"))
                self.problem(Answer(received(peer)), 503)
        self.nothing_left(tool)

    def nothing_left(self, tool):
        self.assertEqual(counted(tool), (0, 0))
        answer = ask(tool, keyed(b"k"))
        self.assertEqual(self.created(answer), 1)
        self.assertIsNone(answer.replayed)


class Damage(ToolCase):

    def test_damaged_database(self):
        tool = self.service()
        with contextlib.closing(sqlite3.connect(tool.database)) as db:
            db.execute("DROP TABLE tickets")
        for raw in post(), keyed(b"k"):
            self.problem(ask(tool, raw), 500)
        self.assertEqual(counted(tool), (0, 0))
        with open(tool.database, "r+b") as file:
            file.write(b"garbage " * 512)
        for raw in post(), keyed(b"k"):
            answer = ask(tool, raw)
            self.problem(answer, 500)
            self.assertNotIn(b"not a database", answer.body)
        self.problem(ask(tool, post(b"x")), 400)
        self.assertRegex(tool.log(), "no such table(?s:.*)not a database")


class StartAndEnd(ToolCase):

    def cannot_serve(self, *flags):
        done = run(TOOL, "--exit-on-stdin-eof", *flags, cwd=self.folder)
        self.assertEqual((done.returncode, done.stdout), (1, ""), done.stderr)
        self.assertEqual(done.stderr.count("\n"), 1, done.stderr)
        self.assertGreater(len(done.stderr), 20)
        self.assertNotIn("Traceback", done.stderr)

    def test_database_that_cannot_be_opened(self):
        os.mkdir(self.path("folder"))
        with open(self.path("garbage"), "wb") as file:
            file.write(b"garbage " * 512)
        for name in "folder", "garbage", os.path.join("missing", "x"), "":
            with self.subTest(name=name):
                self.cannot_serve("--port", "0", "--db", name)
        with open(self.path("garbage"), "rb") as file:
            self.assertEqual(file.read(), b"garbage " * 512)
        self.assertEqual(sorted(os.listdir(self.folder)),
                         ["folder", "garbage"])

    def test_port_in_use(self):
        tool = self.service()
        self.cannot_serve("--port", str(tool.port), "--db", "other.db")
        self.created(ask(tool, post()))

    def test_restart_on_the_same_port(self):
        tool = self.service()
        self.created(ask(tool, post()))
        tool.kill()
        again = self.service("--port", str(tool.port))
        self.assertEqual(again.port, tool.port)
        self.created(ask(again, post()))

    def test_unusable_arguments(self):
        for flags in (
                ["--port", "65536"], ["--port", "-1"], ["--port", "x"],
                ["--port", ""], ["--port", "8_0"], ["--port", "1.5"],
                ["--port"], ["--db"], ["--port", "0", "more"], ["--more"],
                ["--crash-before-commit", "--crash-after-commit"],
                ["--crash-after-commit=1"]):
            with self.subTest(flags=flags):
                done = run(TOOL, "--exit-on-stdin-eof", *flags,
                           cwd=self.folder)
                self.assertEqual((done.returncode, done.stdout), (2, ""))
                self.assertNotIn("Traceback", done.stderr)
        self.assertEqual(os.listdir(self.folder), [])

    def test_end_of_standard_input(self):
        for raw in b"", post()[:-5]:
            with self.subTest(raw=raw):
                tool = self.service()
                with tool.connect() as peer:
                    peer.sendall(raw)
                    self.created(ask(tool, post()))
                    tool.process.stdin.write(b"no end yet")
                    tool.process.stdin.flush()
                    self.created(ask(tool, post()))
                    tool.process.stdin.close()
                    self.assertEqual(tool.wait(), 0)
                self.assertNotIn("Traceback", tool.log())

    def test_standard_input_does_not_matter_otherwise(self):
        process = subprocess.Popen(
            [sys.executable, TOOL, "--port", "0"], cwd=self.folder,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL)
        self.addCleanup(process.stdout.close)
        self.addCleanup(process.wait, TIMEOUT)
        self.addCleanup(process.kill)
        with killed_after(process, TIMEOUT):
            self.assertRegex(process.stdout.readline(), b"^listening on ")
        with self.assertRaises(subprocess.TimeoutExpired):
            process.wait(1)

    @unittest.skipUnless(os.name == "posix", "Windows sends no such signals")
    def test_signals(self):
        for number in signal.SIGINT, signal.SIGTERM:
            for raw in b"", post()[:-5], post():
                with self.subTest(number=number, raw=raw):
                    tool = self.service()
                    with tool.connect() as peer, write_lock(tool.database):
                        peer.sendall(raw)
                        self.problem(ask(tool, post(b"x")), 400)
                        tool.process.send_signal(number)
                        self.assertEqual(tool.wait(), 0)
                    self.assertEqual(counted(tool), (0, 0))
                    self.assertNotIn("Traceback", tool.log())


if __name__ == "__main__":
    unittest.main()
