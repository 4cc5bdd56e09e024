#!/usr/bin/env python3
"""Every executed line as a crash point: the sweep, and a map of what it finds.

A program dies before the first line it executes, then before the second,
until one run gets through; after each death it recovers, and the databases
are opened. SQLite sweeps its I/O errors in this way
(https://www.sqlite.org/testing.html, 3.2).

    python3 .ci/crash_map.py    # sweeps both programs, then prints the map

The programs are not touched. A launcher runs them under a trace function
that counts the line events of the program's own frames and, before event n,
ends the process by os._exit. The deaths, the processes and the databases are
real; only the start is short: where there is os.fork, the launcher has
imported the standard library once and forks a child for each run.

Exit status: 0 the map is printed; 1 the sweep failed; 2 unusable arguments;
130 Ctrl-C.
"""
import argparse
import ast
import collections
import concurrent.futures
import contextlib
import encodings.idna  # for the worker: a forked child finds it imported
import functools
import http.client
import http.server
import json
import os
import platform
import queue
import select
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import traceback

from support import TIMEOUT, TOOL, WORKER, Service, integrity, rows

HERE = os.path.abspath(__file__)
DEAD = 99        # exit status of a death before a line; no program has it
UNANSWERED = 98  # exit status of a worker whose request got no answer
LANES = (os.cpu_count() or 1) + 1  # crash points that are tried side by side
ORDINARY = (sys.executable, "-I", "-S")

WIDTH = 79  # columns of the map
CODE = 43   # of them for the source
ROW = "%s %-15.15s %4s  %-43s %5s %5s"
TOTAL = "%-42s %11s %11s %11s"
HEAD = """\
Let worker.py die before any one of its lines, then run it again: how many
tickets have become of the one that was wanted?

""" + ROW % (" ", "function", "line", "in the order of execution", "naive",
             "keyed") + "\n" + "-" * WIDTH
MODULE = ("", 0)  # the place of all that is executed outside of functions

# One run of a program. log takes its stderr. n: die before line event n, 0:
# never. record: the file that takes the line events, "" for none. With n 0
# and no record nothing is traced: that is an ordinary run. per_request:
# count from the arrival of a request to the last byte of its answer.
Job = collections.namedtuple("Job", "program flags log n record per_request")

# One crash point. found: the checkpoint between the death and the recovery,
# None where no intent is saved. The rest is what recovery leaves: the exit
# statuses of the worker's runs, in order, the tickets and receipts of this
# operation, the checkpoint; sound: both databases pass integrity_check.
Death = collections.namedtuple(
    "Death", "n line found exits tickets receipts checkpoint sound")

# deaths has one entry for each n, in order. through is the run in which
# nothing died before a line. opens is the n of the first line event after
# the request was sent, None where the program sends none.
Sweep = collections.namedtuple("Sweep", "deaths through opens")
Sweeps = collections.namedtuple("Sweeps", "naive keyed twice tool")


class SweepFailed(Exception):
    """The sweep itself did not work, whatever the programs are worth."""


# In the child: one run of a program, and its death.

class Tracer:
    """Counts the line events of one program; dies before the n-th."""

    def __init__(self, job):
        self.program = job.program
        self.n = job.n
        self.count = 0
        self.connection = None  # to the tool, once something was sent
        # Line-buffered: what is recorded is in the file at once.
        self.record = open(job.record or os.devnull, "w", buffering=1)

    def enter(self, frame, event, arg):
        """The trace function: follow the program's own frames alone."""
        mine = frame.f_code.co_filename == self.program
        return self.step if mine else None

    def step(self, frame, event, arg):
        if event == "line":
            self.count += 1
            if self.count == self.n:
                self.die()
            self.record.write("%d\n" % frame.f_lineno)
        return self.step

    def sent(self, connection):
        """Note that the program has sent a request, or a part of it."""
        self.connection = connection
        self.record.write("sent\n")

    def die(self):
        """End the process here; a request that was sent is answered first.

        So a death after the sending falls after the tool's commit, every
        time, and nothing is in flight when the databases are read. Windows
        resets the connections of a process that ends: without the wait, the
        tool might lose the request.
        """
        if self.connection and self.connection.fileno() >= 0:
            if not select.select([self.connection], [], [], TIMEOUT)[0]:
                os._exit(UNANSWERED)
        os._exit(DEAD)


def execute(job):
    """Run the program as __main__; it ends the process, or returns."""
    sys.argv = [job.program] + job.flags
    if job.per_request:
        trace_requests(Tracer(job))
    elif not ordinary(job):
        tracer = Tracer(job)
        watch_sending(tracer)
        sys.settrace(tracer.enter)
    exec(load(job.program), {"__name__": "__main__", "__file__": job.program})


def ordinary(job):
    return not (job.n or job.record or job.per_request)


@functools.lru_cache()
def load(program):
    with open(program, "rb") as source:
        return compile(source.read(), program, "exec")


def watch_sending(tracer):
    # The audit event "http.client.send" would do, but Python 3.8 has none.
    connection = http.client.HTTPConnection
    send = connection.send

    def watched(self, data):
        send(self, data)
        tracer.sent(self.sock)

    connection.send = watched


def trace_requests(tracer):
    """Trace the handling of a request, and die behind it in any case.

    handle() is called when a connection has come, and returns when the last
    byte of the answer has been handed to the system.
    """
    handler = http.server.BaseHTTPRequestHandler
    handle = handler.handle

    def traced(self):
        sys.settrace(tracer.enter)
        handle(self)
        sys.settrace(None)
        tracer.die()

    handler.handle = traced


# The launcher: a process with one thread, which is safe to fork.

def launch():
    """For each job on stdin, a line of JSON, run it; say "exit STATUS"."""
    # Ctrl-C reaches the launchers too: they go without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    for line in sys.stdin:
        job = Job(*json.loads(line))
        print("exit %d" % (fork(job) if hasattr(os, "fork") else spawn(job)),
              flush=True)


def fork(job):
    """Run the job in a child; return its exit status, or minus a signal."""
    load(job.program)  # once, for all children
    child = os.fork()
    if child == 0:
        signal.alarm(TIMEOUT)  # a child that hangs is killed
        with open(job.log, "ab") as log:
            os.dup2(log.fileno(), 2)
        leave(job)
    status = os.waitpid(child, 0)[1]
    return (os.WEXITSTATUS(status) if os.WIFEXITED(status)
            else -os.WTERMSIG(status))


def leave(job):
    """Run the job, and end the process as the interpreter would.

    All but the tidying: to take the launcher's modules apart, in every
    child, would take three times as long as the run itself.
    """
    status = 1
    try:
        execute(job)
        status = 0
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        else:
            status = end.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def spawn(job):
    """Do what fork() does, where a process cannot be forked."""
    command = [sys.executable, "-S", HERE, "execute", json.dumps(job)]
    if ordinary(job):
        command = list(ORDINARY) + [job.program] + job.flags
    with open(job.log, "ab") as log:
        return subprocess.run(command, stderr=log, timeout=TIMEOUT).returncode


class Launcher:
    """A launcher process, seen from the sweep; it runs one job at a time."""

    def __init__(self):
        self.process = subprocess.Popen(
            [sys.executable, "-S", HERE, "launch"], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, universal_newlines=True)

    def start(self, job):
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()

    def line(self):
        """Return the next line: the program's, or the launcher's own."""
        line = self.process.stdout.readline().rstrip("\n")
        if not line:
            raise SweepFailed("a launcher has died")
        return line

    def finish(self):
        """Return the exit status of the job that was started."""
        line = self.line()
        while not line.startswith("exit "):
            line = self.line()
        return int(line.split()[1])

    def close(self):
        with contextlib.suppress(OSError):  # it may be gone
            self.process.stdin.close()
        self.process.wait(TIMEOUT)
        self.process.stdout.close()


# The sweeps.

class Lab:
    """The two programs, and what is needed to kill them many times.

    One service serves the worker's sweeps: each crash point has a run id and
    a title of its own, and both are the same text.
    """

    def __init__(self, worker, tool, folder):
        self.worker, self.tool, self.folder = worker, tool, folder
        self.idle = queue.Queue()  # of launchers

    def __enter__(self):
        with contextlib.ExitStack() as started:
            self.service = Service(self.folder, program=self.tool,
                                   interpreter=ORDINARY)
            started.callback(self.service.kill)
            # Two for each lane: one runs a service, one its worker.
            for _ in range(2 * LANES):
                launcher = Launcher()
                started.callback(launcher.close)
                self.idle.put(launcher)
            self.cleanup = started.pop_all()
        return self

    def __exit__(self, *_):
        self.cleanup.close()

    @contextlib.contextmanager
    def launcher(self):
        launcher = self.idle.get(timeout=TIMEOUT)
        try:
            yield launcher
        finally:
            self.idle.put(launcher)

    def attempt(self, folder, url, mode, *flags, n=0, record=""):
        """Run the worker once; return its exit status."""
        name = os.path.basename(folder)
        job = Job(self.worker, [
            "--db", os.path.join(folder, "worker.db"), "--url", url,
            "--run-id", name, "--title", name, "--mode", mode] + list(flags),
            os.path.join(folder, "worker.log"), n, record, False)
        with self.launcher() as launcher:
            launcher.start(job)
            return launcher.finish()

    def kill_worker(self, name, mode, earlier, n, record=""):
        """Let the worker die before line event n and run again.

        earlier: the crash points of the runs before the one that is killed.
        """
        folder = self.case(name, n)
        attempt = functools.partial(
            self.attempt, folder, self.service.url, mode)
        exits = [attempt("--crash", point) for point in earlier]
        exits.append(attempt(n=n, record=record))
        if n and exits[-1] != DEAD:
            raise SweepFailed("exit status %d of the worker in place of a"
                              " death before line event %d" % (exits[-1], n))
        found = peek(folder)
        exits.append(attempt())
        return look(folder, self.service.database, found, exits)

    def kill_tool(self, n, record=""):
        """Let the tool die before line event n of a keyed POST, restart it,
        and run the worker again; with n 0 the tool dies after the answer."""
        folder = self.case("tool", n)
        database = os.path.join(folder, "tool.db")
        log = os.path.join(folder, "tool.log")
        with self.launcher() as launcher:
            launcher.start(Job(self.tool, ["--db", database, "--port", "0",
                                           "--exit-on-stdin-eof"],
                               log, n, record, True))
            ready = launcher.line()
            if not ready.startswith("listening on "):
                raise SweepFailed("the tool does not start, see " + log)
            exits = [self.attempt(folder, ready.split()[-1], "idempotent")]
            if launcher.finish() != DEAD:
                raise SweepFailed("the tool is not dead at line event %d" % n)
        found = peek(folder)
        service = Service(folder, program=self.tool, interpreter=ORDINARY)
        try:
            exits.append(self.attempt(folder, service.url, "idempotent"))
        finally:
            service.kill()
        return look(folder, database, found, exits)

    def case(self, name, n):
        folder = os.path.join(self.folder, "%s-%d" % (name, n))
        os.mkdir(folder)
        return folder


def peek(folder):
    """Return the checkpoint that a death has left.

    Read from a copy: SQLite rolls a broken transaction back when the file is
    next opened, and that has to be left to the worker's recovery.
    """
    for suffix in ("", "-journal"):
        with contextlib.suppress(FileNotFoundError):
            shutil.copy(os.path.join(folder, "worker.db" + suffix),
                        os.path.join(folder, "found.db" + suffix))
    return read_checkpoint(os.path.join(folder, "found.db"))


def read_checkpoint(database):
    steps = rows(database, "steps")
    return steps[0][4] if len(steps) == 1 else None


def look(folder, tool_db, found, exits):
    """Open both databases and return the Death they tell of."""
    name = os.path.basename(folder)
    worker_db = os.path.join(folder, "worker.db")
    titles = [title for _, title in rows(tool_db, "tickets")]
    keys = [receipt[0] for receipt in rows(tool_db, "receipts")]
    return Death(None, None, found, exits, titles.count(name),
                 keys.count(name + "/create_ticket/v1"),
                 read_checkpoint(worker_db),
                 integrity(worker_db) == integrity(tool_db) == ["ok"])


def recovered(death):
    """Whether the last run ended well; duplicates are another question."""
    return (death.exits[-1] == 0 and death.checkpoint == "done"
            and death.sound)


def sweep(folder, kill):
    """Call kill(n) for each line event n that a full run executes."""
    record = os.path.join(folder, "record")
    through = kill(0, record)
    lines, opens = read_record(record)
    numbers = range(1, len(lines) + 1)
    with concurrent.futures.ThreadPoolExecutor(LANES) as lanes:
        deaths = [death._replace(n=n, line=line) for n, line, death
                  in zip(numbers, lines, lanes.map(kill, numbers))]
    return Sweep(deaths, through, opens)


def read_record(path):
    """Return (the lines in the order of their events, opens)."""
    lines, opens = [], None
    with open(path) as record:
        for entry in record.read().split():
            if entry == "sent":
                opens = len(lines) + 1
            else:
                lines.append(int(entry))
    if not lines:
        raise SweepFailed("a full run executes no line")
    return lines, opens


def sweep_all(worker, tool, folder):
    """Sweep both programs, given by their paths; folder is for databases."""
    with Lab(worker, tool, folder) as lab:
        def worker_sweep(name, mode, *earlier):
            return sweep(folder, functools.partial(
                lab.kill_worker, name, mode, earlier))
        return Sweeps(worker_sweep("naive", "naive"),
                      worker_sweep("keyed", "idempotent"),
                      worker_sweep("twice", "idempotent", "after-call"),
                      sweep(folder, lab.kill_tool))


def window(naive, source):
    """Return (opens, closes), the deaths in which the window must begin and
    end: the first after the request was sent, and the last before a COMMIT.

    Raises SweepFailed where the worker has not these landmarks.
    """
    if naive.opens is None:
        raise SweepFailed("the worker sends no request by http.client")
    text = source.splitlines()
    commits = [death.n for death in naive.deaths
               if "COMMIT" in text[death.line - 1]]
    if not commits or commits[-1] < naive.opens:
        raise SweepFailed("the worker has no COMMIT after its request")
    return naive.deaths[naive.opens - 1], naive.deaths[commits[-1] - 1]


# The map.

def draw(sweeps, worker):
    """Return the map of the worker's lines, and the totals, as text."""
    with open(worker, encoding="utf-8") as file:
        source = file.read()
    opens, closes = window(sweeps.naive, source)
    places = find_places(source)
    naive = find_visits(sweeps.naive, places)
    keyed = find_visits(sweeps.keyed, places)
    text = [HEAD]
    function = None
    for visit in merge(naive, keyed):
        events = naive.get(visit, ())
        if opens in events:
            text.append(ruler("the window opens: the request has been sent"))
            function = None
        text.append(row(visit, function, source.splitlines(),
                        naive.get(visit), keyed.get(visit)))
        function = visit[0]
        if closes in events:
            text.append(ruler("the window closes: the checkpoint is"
                              " committed"))
            function = None
    return "\n".join(text + totals(sweeps)) + "\n"


def find_places(source):
    """Return {line: (function, first line of the statement)}.

    A statement over several lines is one place, and so is all that is
    executed outside of functions.
    """
    places = {}

    def find(node, function):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.stmt):
                # What is inside comes later and has the last word.
                place = (function, child.lineno) if function else MODULE
                places.update(dict.fromkeys(
                    range(child.lineno, child.end_lineno + 1), place))
            inside = isinstance(child, ast.FunctionDef)
            find(child, child.name if inside else function)

    find(ast.parse(source), "")
    return places


def find_visits(sweep, places):
    """Return {(function, line, k): [Death, ...]} in the order of execution:
    the k-th visit to a statement, and its crash points."""
    visits, counts, previous = {}, collections.Counter(), None
    for death in sweep.deaths:
        place = places.get(death.line, MODULE)
        if place != previous:
            counts[place] += 1
        previous = place
        visits.setdefault(place + (counts[place],), []).append(death)
    return visits


def merge(naive, keyed):
    """Return the visits of both in one order of execution."""
    order, at = list(keyed), 0
    for visit in naive:
        if visit not in keyed:
            order.insert(at, visit)
        at = order.index(visit) + 1
    return order


def row(visit, previous, source, naive, keyed):
    """Return the row of one visit; previous: the function of the row above."""
    function, line, _ = visit
    text = (source[line - 1].strip() if line else
            "imports, constants, definitions: %d lines" % len(naive or keyed))
    text = text.encode("ascii", "replace").decode("ascii")
    if len(text) > CODE:
        text = text[:CODE - 3] + "..."
    return ROW % ("|" if cost(naive) not in "-1" else " ",
                  function if function != previous else "", line or "", text,
                  cost(naive), cost(keyed))


def cost(deaths):
    """Return the tickets that a death in this visit leaves, at worst."""
    return str(max(death.tickets for death in deaths)) if deaths else "-"


def ruler(text):
    return ("+---- %s " % text).ljust(WIDTH, "-")


def totals(sweeps):
    """Return the lines of the table of totals."""
    python = "%s %s" % (platform.python_implementation(),
                        platform.python_version())
    table = ["-" * WIDTH, "", TOTAL % (
        python, "lines swept", "recovered", "duplicates")]
    for name, swept in (
            ("worker.py, naive retry", sweeps.naive),
            ("worker.py, keyed retry", sweeps.keyed),
            ("worker.py, keyed, its second death", sweeps.twice),
            ("tool_service.py, keyed retry", sweeps.tool)):
        table.append(TOTAL % (
            name, len(swept.deaths),
            sum(recovered(death) for death in swept.deaths),
            sum(death.tickets - 1 for death in swept.deaths)))
    return table


def program(path):
    if os.path.isfile(path):
        return os.path.abspath(path)
    raise argparse.ArgumentTypeError("%s is not a file" % path)


def parse_arguments():
    parser = argparse.ArgumentParser(
        description="Kill both programs before every line they execute, "
                    "recover, and print what each death costs.",
        allow_abbrev=False)
    parser.add_argument("--worker", default=WORKER, metavar="FILE",
                        type=program, help="the worker.py to sweep")
    parser.add_argument("--tool", default=TOOL, metavar="FILE",
                        type=program, help="the tool_service.py to sweep")
    return parser.parse_args()


def main():
    args = parse_arguments()
    with tempfile.TemporaryDirectory(prefix="crash map ") as folder:
        try:
            sweeps = sweep_all(args.worker, args.tool, folder)
            print(draw(sweeps, args.worker), end="")
        except KeyboardInterrupt:
            return 130
        except (SweepFailed, AssertionError, OSError, sqlite3.Error,
                subprocess.SubprocessError) as error:
            return "crash_map.py: %s" % error
    return 0


if __name__ == "__main__":
    # Two commands for the launcher, which is this file as well.
    if sys.argv[1:] == ["launch"]:
        launch()
    elif sys.argv[1:2] == ["execute"]:
        execute(Job(*json.loads(sys.argv[2])))
    else:
        sys.exit(main())
