#!/usr/bin/env python3
"""The tool: a ticket service over HTTP, with a database of its own.

A receipt (operation key, parameters, response) is committed together with
its ticket. A request that comes again under the same key gets the first
response again, byte for byte, and makes no second ticket.

    python3 tool_service.py
    python3 tool_service.py --crash-after-commit

Exit status: 0 stopped; 1 cannot serve; 2 unusable arguments; 86 and 87
injected crashes, before and after the commit.
"""

import sys

if sys.version_info < (3, 8):
    sys.exit("tool_service.py needs Python 3.8 or later; this is Python %d.%d"
             % sys.version_info[:2])

import argparse
import contextlib
import http.server
import io
import json
import os
import re
import signal
import socket
import socketserver
import sqlite3
import threading
import time

CRASH_POINTS = {"before-commit": 86, "after-commit": 87}
LOCK_TIMEOUT = 10     # seconds to wait for another connection's write lock
CLIENT_TIMEOUT = 10   # seconds of silence after which a client is dropped
LINGER = 5            # seconds that a client is given to take its answer
MAX_BODY = 16 * 1024  # bytes
MAX_TITLE = 200       # code points
OWS = " \t"           # optional white space around a header's value
HEADER = re.compile(br"[!-9;-~]+:[^\r\n]*\r?\n")  # RFC 9112, section 5

TICKETS = """CREATE TABLE IF NOT EXISTS tickets(
    id INTEGER PRIMARY KEY, title TEXT NOT NULL)"""
RECEIPTS = """CREATE TABLE IF NOT EXISTS receipts(
    operation_key TEXT PRIMARY KEY, payload TEXT NOT NULL,
    response TEXT NOT NULL)"""


class Refusal(Exception):
    """(status, detail): the request is refused, and nothing is stored."""


def refuse(when, status, detail):
    if when:
        raise Refusal(status, detail)


def open_database(path):
    # "./" makes every name a file: "" and ":memory:" would be databases
    # that vanish with their connection.
    return contextlib.closing(sqlite3.connect(
        os.path.join(".", path), timeout=LOCK_TIMEOUT, isolation_level=None))


def create_tables(database):
    with open_database(database) as db:
        db.execute("BEGIN IMMEDIATE")
        db.execute(TICKETS)
        db.execute(RECEIPTS)
        db.execute("COMMIT")


def create_ticket(database, key, title, crash=None):
    """Return (response, replayed). A key of None finds no receipt.

    The write lock comes before the look-up: of eight requests, seven find a
    receipt. A ticket committed apart from it would be a new window.
    """
    payload = json.dumps({"title": title})
    with open_database(database) as db:
        db.execute("BEGIN IMMEDIATE")
        known = db.execute("SELECT payload, response FROM receipts"
                           " WHERE operation_key = ?", (key,)).fetchone()
        if known:
            refuse(known[0] != payload, 409,
                   "this key was used with other parameters")
            return known[1], True
        ticket_id = db.execute(
            "INSERT INTO tickets (title) VALUES (?)", (title,)).lastrowid
        response = json.dumps({"ticket_id": ticket_id, "title": title})
        if key is not None:
            receipt = (key, payload, response)
            db.execute("INSERT INTO receipts VALUES (?, ?, ?)", receipt)
        crash_point("before-commit", crash)
        db.execute("COMMIT")
        crash_point("after-commit", crash)
    return response, False


def crash_point(name, chosen):
    """Die as a killed process does: no clean-up, no flush, no finally."""
    if name == chosen:
        os._exit(CRASH_POINTS[name])


def read_key(head):
    keys = [key.strip(OWS) for key in head.get_all("Idempotency-Key", [])]
    refuse(len(keys) > 1, 400, "there are two Idempotency-Key headers")
    refuse(keys and not re.fullmatch("[!-~]{1,255}", keys[0]), 400,
           "Idempotency-Key must be 1 to 255 visible ASCII characters")
    return keys[0] if keys else None


def read_length(head):
    lengths = head.get_all("Content-Length", [])
    refuse(not lengths or "Transfer-Encoding" in head, 411,
           "a Content-Length is needed")
    # int() would take "+5", "1_4" and the digits of other scripts, and
    # refuse more than 4300 digits.
    digits = lengths[0].strip(OWS)
    refuse(len(lengths) > 1 or not re.fullmatch("[0-9]+", digits), 400,
           "the Content-Length is no number")
    digits = digits.lstrip("0") or "0"
    refuse(len(digits) > 9 or int(digits) > MAX_BODY, 413,
           "the body is over %d bytes" % MAX_BODY)
    return int(digits)


def read_title(body):
    try:
        # As a tuple of pairs, an object cannot hide a repeated member.
        pairs = json.loads(body.decode("utf-8"), object_pairs_hook=tuple)
    except (ValueError, RecursionError):
        raise Refusal(400, "the body must be JSON in UTF-8")
    refuse(type(pairs) is not tuple or [name for name, _ in pairs]
           != ["title"], 400, 'the body must be an object with one "title"')
    title = pairs[0][1]
    refuse(type(title) is not str or not title.strip(), 400,
           "the title must be a string that is not blank")
    refuse(len(title) > MAX_TITLE, 400,
           "the title is over %d code points" % MAX_TITLE)
    refuse(re.search("[\ud800-\udfff]", title), 400,
           "the title holds a lone surrogate")
    return title


class HeadLines(io.BufferedReader):
    """Keeps the lines as they came: the parser hides what it cannot take.

    It stops at a line that is no header and drops the rest. With the
    Idempotency-Key in that rest, a keyed request would pass for one without.
    So it would with the key on a line that continues the line above, which a
    server may refuse (RFC 9112, section 5.2).
    """

    def __init__(self, raw):
        super().__init__(raw)
        self.lines = []

    def readline(self, size=-1):
        self.lines.append(super().readline(size))
        return self.lines[-1]

    def are_headers(self):
        # Without the request line, and the empty line that ends the head.
        return all(map(HEADER.fullmatch, self.lines[1:-1]))


class Handler(http.server.BaseHTTPRequestHandler):
    """One connection, one request, one answer."""

    timeout = CLIENT_TIMEOUT
    wbufsize = -1  # head and body leave together

    def setup(self):
        super().setup()
        self.rfile = HeadLines(self.rfile.detach())

    def answer(self):
        try:
            key, title = self.read_request()
            response, replayed = create_ticket(
                self.server.database, key, title, self.server.crash)
        except Refusal as refusal:
            self.send_error(*refusal.args)
        except OSError:
            raise  # the client is silent or gone: nobody is left to answer
        except Exception as error:
            self.log_error("%s: %s", type(error).__name__, error)
            # SQLite's own code is there only from Python 3.11 on.
            locked = (isinstance(error, sqlite3.OperationalError)
                      and "locked" in str(error))
            self.send_error(503 if locked else 500)
        else:
            self.send_json(201, "application/json", response,
                           {"Idempotent-Replayed": "true"} if replayed else {})

    do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = answer
    do_DELETE = do_OPTIONS = do_TRACE = do_CONNECT = answer

    def read_request(self):
        """Return (key, title), or raise Refusal."""
        # Newer Pythons turn "//tickets" into "/tickets" in self.path.
        refuse(self.requestline.split()[1] != "/tickets", 404,
               "there is nothing here but /tickets")
        refuse(self.command != "POST", 405, "a ticket is created by POST")
        refuse("Origin" in self.headers, 403, "no browser page may write here")
        refuse(not self.rfile.are_headers(), 400,
               "a line of the head is no header")
        kind = self.headers.get("Content-Type", "").partition(";")[0]
        refuse(kind.strip(OWS).lower() != "application/json", 415,
               "the body must be application/json")
        key = read_key(self.headers)
        length = read_length(self.headers)
        body = self.rfile.read(length)
        refuse(len(body) < length, 400, "the body is shorter than announced")
        return key, read_title(body)

    def send_error(self, code, message=None, explain=None):
        """Answer with a problem (RFC 9457); http.server calls this too."""
        title = self.responses[code][0]
        problem = {"title": title, "status": code,
                   "detail": message or title}
        headers = {405: {"Allow": "POST"}, 503: {"Retry-After": "1"}}
        self.send_json(code, "application/problem+json", json.dumps(problem),
                       headers.get(code, {}))

    def send_json(self, status, kind, text, headers):
        self.request_version = "HTTP/1.0"  # 0.9 would get no status line
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(text)))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(text.encode("ascii"))

    def version_string(self):
        return "tool_service"  # and not the version of Python

    def log_message(self, *args):
        # A log that nobody takes must not cost a client its answer.
        with contextlib.suppress(OSError, AttributeError):
            super().log_message(*args)
            sys.stderr.flush()  # before 3.9, a log file waits for a full block


class Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """Not http.server's: that one asks the resolver for the host's name."""

    daemon_threads = True
    request_queue_size = 128  # of 5, the default, macOS resets the sixth
    allow_reuse_address = os.name == "posix"  # Windows would share the port

    def shutdown_request(self, request):
        """Close, but first read what a refusal has left unread.

        A socket closed with unread input resets the connection, and a client
        that is still sending loses its answer.
        """
        end = time.monotonic() + LINGER
        with contextlib.suppress(OSError):
            request.shutdown(socket.SHUT_WR)
            request.settimeout(LINGER)
            while request.recv(1 << 16) and time.monotonic() < end:
                pass
        self.close_request(request)

    def handle_error(self, request, client_address):
        with contextlib.suppress(OSError, AttributeError):
            sys.stderr.write("connection ended: %r\n" % sys.exc_info()[1])


def exit_on_stdin_eof():
    # os.read, because a thread inside sys.stdin can abort the shutdown.
    with contextlib.suppress(OSError):
        while os.read(0, 4096):
            pass
    os._exit(0)


def port_number(text):
    if re.fullmatch("[0-9]{1,5}", text) and int(text) < 65536:
        return int(text)
    raise argparse.ArgumentTypeError("a port is a number from 0 to 65535")


def parse_arguments():
    parser = argparse.ArgumentParser(
        description="Serve POST /tickets on 127.0.0.1.", allow_abbrev=False)
    parser.add_argument("--db", default="tool.db", metavar="FILE")
    parser.add_argument("--port", default=8765, type=port_number,
                        help="%(default)s if not given; 0 takes a free one")
    crash = parser.add_mutually_exclusive_group()
    for name in CRASH_POINTS:
        crash.add_argument("--crash-" + name, action="store_const",
                           dest="crash", const=name,
                           help="die there, where a ticket is created")
    parser.add_argument("--exit-on-stdin-eof", action="store_true",
                        help="end when the standard input closes")
    return parser.parse_args()


def main():
    args = parse_arguments()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: os._exit(0))
    try:
        create_tables(args.db)
        server = Server(("127.0.0.1", args.port), Handler)
    except sqlite3.Error as error:
        return "tool_service.py: cannot use %s: %s" % (args.db, error)
    except OSError as error:
        return "tool_service.py: cannot listen on port %d: %s; --port 0" \
            " takes a free one" % (args.port, error)
    server.database, server.crash = args.db, args.crash
    print("listening on http://127.0.0.1:%d" % server.server_address[1],
          flush=True)
    if args.exit_on_stdin_eof:
        threading.Thread(target=exit_on_stdin_eof, daemon=True).start()
    server.serve_forever()


if __name__ == "__main__":
    sys.exit(main())
