#!/usr/bin/env python3
"""One attempt at one step of an agent's task: have a tool create a ticket.

worker.db gets the intent and its operation key before the first call and
the answer after it. Between the two lies the window: a worker that dies in
it leaves "pending", whether or not the tool has committed a ticket. Recovery
is a second run, which sends what was saved, under the key that was saved.

    python3 worker.py --crash after-call    # dies, the answer is not saved
    python3 worker.py                       # sends the same key again

Exit status: 0 done; 2 unusable arguments; 3 the saved intent differs;
4 definite: the tool refused; 5 indefinite: no usable answer; 6 worker.db
cannot be used; 71, 72, 73 injected crashes. 4 and 5 leave it pending.
"""

import sys

if sys.version_info < (3, 8):
    sys.exit("worker.py needs Python 3.8 or later; this is Python %d.%d"
             % sys.version_info[:2])

import argparse
import collections
import contextlib
import http.client
import json
import os
import re
import signal
import socket
import sqlite3
import urllib.parse

CRASH_POINTS = {"before-call": 71, "after-call": 72, "after-checkpoint": 73}
DEFAULT_TITLE = "Check the nightly export"
CALL_TIMEOUT = 5    # seconds that the tool may be silent
LOCK_TIMEOUT = 10   # seconds to wait for another connection's write lock
MAX_BODY = 1 << 20  # bytes; an answer without end must not fill the memory

# What json.loads(text)[name] raises where there is no such JSON.
NOT_THERE = (ValueError, LookupError, TypeError, RecursionError)

STEPS = """CREATE TABLE IF NOT EXISTS steps(
    run_id TEXT PRIMARY KEY, payload TEXT NOT NULL,
    operation_key TEXT NOT NULL, mode TEXT NOT NULL,
    status TEXT NOT NULL,  -- 'pending' or 'done'
    response TEXT)         -- the tool's body, once known"""
Step = collections.namedtuple(
    "Step", "run_id payload operation_key mode status response")


class IntentDiffers(Exception):
    """What is asked for is not what was saved under this run id."""


class ToolRefused(Exception):
    """Definite: the operation did not happen, and this call never will."""


class UnusableAnswer(Exception):
    """Indefinite: the operation may have happened, or may not."""


def run_step(args):
    """Make one attempt at the step; return what to print, as a dict."""
    wanted = intent(args.run_id, args.title, args.mode)
    step = save_intent(args.db, wanted)
    refuse_changes(step, wanted, args)
    if step.status == "done":
        ticket = read_ticket(step.response, sqlite3.DataError)
        return outcome(step, "checkpoint", None, ticket)
    crash_point("before-call", args.crash)
    key = None if step.mode == "naive" else step.operation_key
    status, body, replayed = call_tool(args.url, step.payload, key)
    crash_point("after-call", args.crash)
    text, ticket = read_answer(status, body)
    save_result(args.db, args.run_id, text)
    crash_point("after-checkpoint", args.crash)
    return outcome(step, "tool", replayed, ticket)


def intent(run_id, title, mode):
    title = DEFAULT_TITLE if title is None else title
    return Step(run_id, json.dumps({"title": title}),
                run_id + "/create_ticket/v1", mode or "idempotent",
                "pending", None)


def open_database(path):
    # "./" makes every name a file: "" and ":memory:" would be databases
    # that vanish with the process.
    return contextlib.closing(sqlite3.connect(
        os.path.join(".", path), timeout=LOCK_TIMEOUT, isolation_level=None))


def save_intent(database, wanted):
    """Return the step as saved: by an earlier run, or else now, as wanted.

    It is saved before the first call, with its key, because the key names
    the business operation and not the attempt. BEGIN IMMEDIATE takes the
    write lock before the read: no two workers can both find no step.
    """
    with open_database(database) as db:
        db.execute("BEGIN IMMEDIATE")
        db.execute(STEPS)
        saved = db.execute(
            "SELECT run_id, payload, operation_key, mode, status, response"
            " FROM steps WHERE run_id = ?", (wanted.run_id,)).fetchone()
        if saved is None:
            db.execute("INSERT INTO steps VALUES (?, ?, ?, ?, ?, ?)", wanted)
        db.execute("COMMIT")
    return Step(*(saved or wanted))


def refuse_changes(step, wanted, args):
    """A resumed agent must not swap in a newly generated plan."""
    if args.title is not None and wanted.payload != step.payload:
        raise IntentDiffers("%s was saved, %s is asked for"
                            % (step.payload, wanted.payload))
    if args.mode is not None and wanted.mode != step.mode:
        raise IntentDiffers("mode %s was saved, %s is asked for"
                            % (step.mode, wanted.mode))


def crash_point(name, chosen):
    """Die as a killed process does: no clean-up, no flush, no finally."""
    if name == chosen:
        os._exit(CRASH_POINTS[name])


def call_tool(url, payload, key):
    """POST the payload; return (status, body, replayed) once all is read.

    http.client asks no proxy and follows no redirect. Raises OSError,
    http.client.HTTPException or ValueError where no whole answer came.
    """
    target = urllib.parse.urlsplit(url)
    if (target.scheme != "http" or not target.hostname or target.query
            or target.fragment or re.search("[^!-~]", url)):
        raise http.client.InvalidURL("not an http:// address: %s" % url)
    port = 80 if target.port is None else target.port
    headers = {"Content-Type": "application/json"}
    if key is not None:
        headers["Idempotency-Key"] = key
    with contextlib.closing(http.client.HTTPConnection(
            target.hostname, port, timeout=CALL_TIMEOUT)) as tool:
        send(tool, target.path.rstrip("/") + "/tickets",
             payload.encode("utf-8"), headers)
        with tool.getresponse() as response:
            body = response.read(MAX_BODY)
            # After read(n), length is what a body cut short still lacks.
            if response.length or len(body) == MAX_BODY:
                raise http.client.IncompleteRead(body, response.length)
            replayed = response.getheader("Idempotent-Replayed") == "true"
            return response.status, body, replayed


def send(tool, path, body, headers):
    """Send the request and wait for the first byte of the response.

    Until it comes, a close, a reset, an abort and a broken pipe are the same
    loss under the names of different systems. Here it has one name.
    """
    try:
        tool.connect()
        tool.request("POST", path, body, headers)
        answered = tool.sock.recv(1, socket.MSG_PEEK)
    except OSError as error:
        lost = tool.sock or isinstance(
            error, (ConnectionResetError, ConnectionAbortedError))
        if isinstance(error, socket.timeout) or not lost:
            raise
        answered = b""
    if not answered:
        raise http.client.RemoteDisconnected(
            "Remote end closed connection without response")


def read_answer(status, body):
    """Return (text, ticket), or raise what the answer means.

    Only a 4xx is definite. Anything else but a 201 with a ticket leaves
    open whether there is one, and to call that definite would be a claim.
    """
    if 400 <= status <= 499:
        raise ToolRefused("HTTP %d: %s" % (status, detail(body)))
    if status != 201:
        raise UnusableAnswer("HTTP %d: %s" % (status, detail(body)))
    text = body.decode("utf-8")
    return text, read_ticket(text, UnusableAnswer)


def read_ticket(text, error):
    """Return the ticket in a response body; raise error if there is none."""
    with contextlib.suppress(*NOT_THERE):
        value = json.loads(text)
        ticket = {"ticket_id": value["ticket_id"], "title": value["title"]}
        if [type(value) for value in ticket.values()] == [int, str]:
            return ticket
    raise error("no ticket in the response %.80r" % text)


def detail(body):
    """Return the detail of a problem (RFC 9457), or else the body itself."""
    with contextlib.suppress(*NOT_THERE):
        return json.loads(body)["detail"]
    return body.decode("utf-8", "replace")


def save_result(database, run_id, text):
    with open_database(database) as db:
        db.execute("BEGIN IMMEDIATE")
        db.execute("UPDATE steps SET status = 'done', response = ?"
                   " WHERE run_id = ?", (text, run_id))
        db.execute("COMMIT")


def outcome(step, source, replayed, ticket):
    return {"run_id": step.run_id, "operation_key": step.operation_key,
            "mode": step.mode, "source": source, "tool_replayed": replayed,
            "ticket": ticket}


def visible_ascii(text):
    if re.fullmatch("[!-~]{1,200}", text):
        return text
    raise argparse.ArgumentTypeError(
        "1 to 200 characters of visible ASCII without spaces are needed")


def parse_arguments():
    parser = argparse.ArgumentParser(
        description="Make one attempt at the step create_ticket.",
        allow_abbrev=False)
    parser.add_argument("--db", default="worker.db")
    parser.add_argument("--url", default="http://127.0.0.1:8765")
    parser.add_argument("--run-id", default="demo-task-001",
                        type=visible_ascii)
    parser.add_argument("--mode", choices=["idempotent", "naive"],
                        help="with a key, or without; saved by the first run")
    parser.add_argument("--title", help="saved by the first run")
    parser.add_argument("--crash", choices=list(CRASH_POINTS),
                        help="die there, by os._exit")
    return parser.parse_args()


def main():
    # Ctrl-C, too, is a crash: it ends the worker where it stands.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    args = parse_arguments()
    try:
        line = json.dumps(run_step(args))
    except IntentDiffers as error:
        return fail(3, error)
    except ToolRefused as error:
        return fail(4, error)
    except (UnusableAnswer, OSError, http.client.HTTPException,
            ValueError) as error:
        return fail(5, error)
    except sqlite3.Error as error:
        return fail(6, error, " (--db %s)" % args.db)
    print(line)
    return 0


def fail(exit_code, error, hint=""):
    # Python 3.8 and 3.9 call it timeout.
    timed_out = isinstance(error, socket.timeout)
    name = "TimeoutError" if timed_out else type(error).__name__
    text = str(error).strip() or repr(error)
    # One line, whatever the system or the tool has put into its message.
    line = " ".join(("%s: %.500s%s" % (name, text, hint)).split())
    # Not by print: where there is no stderr, that would use stdout.
    with contextlib.suppress(OSError, AttributeError):
        sys.stderr.write(line + "\n")
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
