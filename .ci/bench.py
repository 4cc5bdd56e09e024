#!/usr/bin/env python3
"""How long verify.py takes beside its floor, and how the tool's answers grow.

    python3 .ci/bench.py               # both tables; some minutes
    python3 .ci/bench.py --rounds 3 verify

The floor is what verify.py cannot avoid: the same number of interpreters,
as many at a time, started with the same flags and the imports that each
program needs, and nothing to do. Every figure is a median, in seconds or in
milliseconds as the head of its column says.
"""
import argparse
import ast
import concurrent.futures
import contextlib
import http.client
import json
import os
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
STARTS = {"worker.py": 14, "tool_service.py": 12}  # in a run of all ten
JOBS = (1, 2, 4, 8)
RECEIPTS = (100, 10000, 100000)
CLIENTS = (1, 8, 32)
REQUESTS = 320  # for each figure, shared by the clients


def timed(action, *args):
    """Return how long a call takes, in seconds."""
    before = time.perf_counter()
    action(*args)
    return time.perf_counter() - before


def imports(program):
    """Return the program's import statements as one line of code."""
    with open(os.path.join(ROOT, program), encoding="utf-8") as source:
        tree = ast.parse(source.read())
    return "; ".join("import " + alias.name for node in tree.body
                     if isinstance(node, ast.Import) for alias in node.names)


def start(code):
    subprocess.run([sys.executable, "-I", "-S", "-c", code],
                   stdin=subprocess.DEVNULL, check=True)


def floor(jobs):
    codes = [imports(program) for program in STARTS
             for _ in range(STARTS[program])]
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        list(pool.map(start, codes))


def verify(jobs):
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [sys.executable, os.path.join(ROOT, "verify.py"), "--evidence",
             folder, "--jobs", str(jobs)], stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)


def bench_verify(rounds):
    default = (os.cpu_count() or 1) + 1
    print("verify.py, %d rounds, %d processors, Python %s" % (
        rounds, os.cpu_count() or 1, sys.version.split()[0]))
    print("%-14s %10s %10s %8s" % ("--jobs", "verify s", "floor s", "ratio"))
    for jobs in sorted(set(JOBS + (default,))):
        pairs = [(timed(verify, jobs), timed(floor, jobs))
                 for _ in range(rounds)]
        ours, least = (statistics.median(times) for times in zip(*pairs))
        print("%-14s %10.2f %10.2f %8.2f" % (
            "%d%s" % (jobs, " (default)" if jobs == default else ""),
            ours, least, ours / least), flush=True)


@contextlib.contextmanager
def service(database):
    """Give the port of a service on that database."""
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", os.path.join(ROOT, "tool_service.py"),
         "--db", database, "--port", "0", "--exit-on-stdin-eof"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL)
    with process:
        yield int(process.stdout.readline().rpartition(b":")[2])
        process.stdin.close()


def fill(database, receipts):
    """Make a tool.db that holds so many tickets and receipts."""
    with service(database):
        pass
    with contextlib.closing(sqlite3.connect(database)) as db, db:
        for number in range(1, receipts + 1):
            title = "ticket %d" % number
            response = json.dumps({"ticket_id": number, "title": title})
            db.execute("INSERT INTO tickets VALUES (?, ?)", (number, title))
            db.execute("INSERT INTO receipts VALUES (?, ?, ?)", (
                "old-%d" % number, json.dumps({"title": title}), response))


def post(port, key, title):
    tool = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    with contextlib.closing(tool):
        tool.request("POST", "/tickets", json.dumps({"title": title}), {
            "Content-Type": "application/json", "Idempotency-Key": key})
        with tool.getresponse() as response:
            response.read()
            if response.status != 201:
                raise SystemExit("status %d" % response.status)


def transact(database, key, title):
    """The transaction of a keyed create, with no HTTP around it."""
    with contextlib.closing(sqlite3.connect(
            database, timeout=60, isolation_level=None)) as db:
        db.execute("BEGIN IMMEDIATE")
        if not db.execute("SELECT response FROM receipts WHERE"
                          " operation_key = ?", (key,)).fetchone():
            number = db.execute("INSERT INTO tickets (title) VALUES (?)",
                                (title,)).lastrowid
            db.execute("INSERT INTO receipts VALUES (?, ?, ?)",
                       (key, title, json.dumps({"ticket_id": number})))
        db.execute("COMMIT")


def answer_time(clients, call, arguments):
    """Return the median time of a call, in ms, with so many clients."""
    with concurrent.futures.ThreadPoolExecutor(clients) as pool:
        times = list(pool.map(lambda args: timed(call, *args), arguments))
    return 1000 * statistics.median(times)


def bench_tool():
    print("\ntool_service.py, median ms of %d requests" % REQUESTS)
    print("%9s %8s %8s %8s %18s" % (
        "receipts", "clients", "create", "replay", "create, no HTTP"))
    with tempfile.TemporaryDirectory() as folder:
        for receipts in RECEIPTS:
            database = os.path.join(folder, "%d.db" % receipts)
            fill(database, receipts)
            with service(database) as port:
                for clients in CLIENTS:
                    print("%9d %8d %8.2f %8.2f %18.2f" % (
                        (receipts, clients) + tool_row(
                            database, port, clients)), flush=True)


def tool_row(database, port, clients):
    new = [("new-%d-%d" % (clients, number), "a new one")
           for number in range(REQUESTS)]
    old = [("old-%d" % number, "ticket %d" % number)
           for number in (1 + n % 100 for n in range(REQUESTS))]
    bare = [("bare-%d-%d" % (clients, number), "a bare one")
            for number in range(REQUESTS)]
    return (answer_time(clients, post, [(port,) + pair for pair in new]),
            answer_time(clients, post, [(port,) + pair for pair in old]),
            answer_time(clients, transact,
                        [(database,) + pair for pair in bare]))


def main():
    parser = argparse.ArgumentParser(description="Print the two tables.")
    parser.add_argument("table", nargs="?", choices=["verify", "tool"],
                        help="only this one")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    if args.table != "tool":
        bench_verify(args.rounds)
    if args.table != "verify":
        bench_tool()


if __name__ == "__main__":
    main()
