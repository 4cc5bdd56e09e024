#!/usr/bin/env python3
"""Ten fault scenarios, on real processes and real databases.

Each has a directory, two databases and processes of its own: worker.py and
tool_service.py are started, killed and started again. What is seen is
compared with what must be; when all ten pass, it is written to evidence/.

    python3 verify.py
    python3 verify.py -v naive_after_call

Exit status: 0 all passed; 1 one failed, or the evidence cannot be written;
2 unusable arguments; 130 Ctrl-C.
"""

import sys

if sys.version_info < (3, 8):
    sys.exit("verify.py needs Python 3.8 or later; this is Python %d.%d"
             % sys.version_info[:2])

import argparse
import concurrent.futures
import contextlib
import hashlib
import http.client
import json
import os
import platform
import select
import shutil
import signal
import sqlite3
import subprocess
import tempfile
import threading
import time

STARTED = time.monotonic()
HERE = os.path.dirname(os.path.abspath(__file__))
TIME_LIMIT = 25  # seconds for a scenario, then its processes are killed
# Not worker.py's default: what a resume sends must come from worker.db.
TITLE = "Check the evening export"
OTHER_TITLE = "Check the morning export"
FIRST = {"ticket_id": 1, "title": TITLE}
SECOND = {"ticket_id": 2, "title": TITLE}
KEY = "demo-task-001/create_ticket/v1"
PAYLOAD, OTHER_PAYLOAD = (
    json.dumps({"title": title}) for title in (TITLE, OTHER_TITLE))
LOST = "RemoteDisconnected: Remote end closed connection without response"
DIFFERS = "IntentDiffers: %s was saved, %s is asked for" % (
    PAYLOAD, OTHER_PAYLOAD)
EVIDENCE = ("results.json", "versions.json")  # in the order of writing
SCENARIOS = []  # (function, what it shows, how many processes it starts)


def scenario(shows, starts):
    def add(function):
        SCENARIOS.append((function, shows, starts))
        return function
    return add


# The scenarios, in the order of the evidence.

@scenario("A plain retry of a pending step makes a second ticket.", starts=3)
def naive_after_call(lab):
    lab.start_tool()
    lab.run_worker(TITLE, "naive", crash="after-call", exit_code=72)
    lab.snapshot("before_resume", "pending", receipts=0, tickets=1)
    lab.run_worker(source="tool", replayed=False, ticket=SECOND)
    lab.snapshot("after_resume", "done", receipts=0, tickets=2)


@scenario("A retry under the saved key gets the first ticket again.", starts=3)
def idempotent_after_call(lab):
    lab.start_tool()
    lab.run_worker(TITLE, "idempotent", crash="after-call", exit_code=72)
    lab.snapshot("before_resume", "pending", receipts=1, tickets=1)
    lab.run_worker(source="tool", replayed=True, ticket=FIRST)
    lab.snapshot("after_resume", "done", receipts=1, tickets=1)


@scenario("Pending may also mean that the tool was never called.", starts=3)
def worker_before_call(lab):
    lab.start_tool()
    lab.run_worker(TITLE, "idempotent", crash="before-call", exit_code=71)
    lab.snapshot("before_resume", "pending", receipts=0, tickets=0)
    lab.run_worker(source="tool", replayed=False, ticket=FIRST)
    lab.snapshot("after_resume", "done", receipts=1, tickets=1)


@scenario("A step that is done is answered by the checkpoint.", starts=3)
def worker_after_checkpoint(lab):
    lab.start_tool()
    lab.run_worker(TITLE, "idempotent", crash="after-checkpoint", exit_code=73)
    lab.snapshot("before_resume", "done", receipts=1, tickets=1)
    lab.stop_tool()
    lab.run_worker(source="checkpoint", replayed=None, ticket=FIRST)
    lab.snapshot("after_resume", "done", receipts=1, tickets=1)


@scenario("A tool that dies before its commit leaves nothing.", starts=4)
def tool_before_commit(lab):
    lab.start_tool(crash="before-commit")
    lab.run_worker(TITLE, "idempotent", exit_code=5, error=LOST)
    lab.tool_died(exit_code=86)
    lab.snapshot("before_resume", "pending", receipts=0, tickets=0)
    lab.start_tool()
    lab.run_worker(source="tool", replayed=False, ticket=FIRST)
    lab.snapshot("after_resume", "done", receipts=1, tickets=1)


@scenario("A tool that dies after its commit leaves a ticket, and the"
          " worker sees the same error.", starts=4)
def tool_after_commit_before_response(lab):
    lab.start_tool(crash="after-commit")
    lab.run_worker(TITLE, "idempotent", exit_code=5, error=LOST)
    lab.tool_died(exit_code=87)
    lab.snapshot("before_resume", "pending", receipts=1, tickets=1)
    lab.start_tool()
    lab.run_worker(source="tool", replayed=True, ticket=FIRST)
    lab.snapshot("after_resume", "done", receipts=1, tickets=1)


@scenario("A used key is refused for other parameters.", starts=1)
def same_key_changed_payload(lab):
    lab.start_tool()
    lab.request("operation-a", TITLE, status=201, body=FIRST)
    lab.request("operation-a", OTHER_TITLE, status=409)
    lab.snapshot("after_requests", None, receipts=1, tickets=1)
    lab.expect("tickets", lab.rows("tickets"), [{"id": 1, "title": TITLE}])


@scenario("Eight requests at once under one key make one ticket.", starts=1)
def eight_concurrent_requests(lab):
    lab.start_tool()
    with lab.tool_db_locked():
        calls = [lab.send("operation-a", TITLE) for _ in range(8)]
        lab.wait_until_accepted(calls)
    bodies = {lab.receive(call) for call in calls}
    lab.requests.sort(key=lambda request: request["replayed"])
    lab.expect("status and replayed of each", [
        [request["status"], request["replayed"]] for request in lab.requests
    ], [[201, False]] + 7 * [[201, True]])
    lab.expect("different bodies", len(bodies), 1)
    lab.expect("body", lab.requests[0]["body"], FIRST)
    lab.snapshot("after_requests", None, receipts=1, tickets=1)


@scenario("The same parameters under two keys are two operations.", starts=1)
def same_payload_different_keys(lab):
    lab.start_tool()
    lab.request("operation-a", TITLE, status=201, body=FIRST)
    lab.request("operation-b", TITLE, status=201, body=SECOND)
    lab.snapshot("after_requests", None, receipts=2, tickets=2)


@scenario("A resumed worker cannot change the saved intent.", starts=3)
def changed_persisted_intent(lab):
    lab.start_tool()
    lab.run_worker(TITLE, "idempotent", crash="before-call", exit_code=71)
    lab.snapshot("before_resume", "pending", receipts=0, tickets=0)
    saved = lab.rows("steps")
    lab.run_worker(OTHER_TITLE, exit_code=3, error=DIFFERS)
    lab.snapshot("after_resume", "pending", receipts=0, tickets=0)
    lab.expect("saved step", lab.rows("steps"), saved)


class Failure(Exception):
    """What was expected, and what was seen."""


class Processes:
    """The programs of one scenario; stop() ends them from any thread.

    Nothing in here outlives its scenario, and nothing waits for a process
    longer than TIME_LIMIT: then a timer kills them all.
    """

    def __init__(self):
        self.children = []       # every process that was started
        self.waiting_for = None  # the program that is to answer or to end
        self.stopped = None      # why everything was killed

    def start(self, program, flags, folder, stdin):
        """Start a program without the user's PYTHON* variables and site.

        Its stdout is a pipe, its stderr a log. It gets a session or process
        group of its own, so that Ctrl-C reaches verify.py alone.
        """
        if self.stopped:
            raise Failure(self.stopped)
        log = os.path.join(folder, "%d-%s.log" % (
            len(self.children) + 1, program[:-len(".py")]))
        with open(log, "wb") as stderr:
            child = subprocess.Popen(
                [sys.executable, "-I", "-S", os.path.join(HERE, program)]
                + flags, cwd=folder, stdin=stdin, stdout=subprocess.PIPE,
                stderr=stderr, start_new_session=True,
                creationflags=getattr(
                    subprocess, "CREATE_NEW_PROCESS_GROUP", 0))
        child.log, self.waiting_for = log, program
        self.children.append(child)
        if self.stopped:  # by a stop() that came too early for this child
            kill(child)
        return child

    def stop(self, reason):
        self.stopped = reason
        for child in list(self.children):
            kill(child)

    def time_out(self):
        self.stop("expected %s to answer or end within %d s, seen it hang"
                  % (self.waiting_for, TIME_LIMIT))

    def close(self):
        # On Windows a file that a process or a pipe still holds cannot be
        # removed: the directory is free only after this.
        for child in self.children:
            kill(child)
            child.wait()
            for pipe in (child.stdin, child.stdout):
                if pipe:
                    pipe.close()


class Lab:
    """One scenario: what it does, and the record of what was seen."""

    def __init__(self, script, shows, starts):
        self.name, self.script = script.__name__, script
        self.shows, self.starts = shows, starts
        self.processes = Processes()
        self.tool = self.url = self.mode = self.failure = None
        self.story = []  # a line for each process run, request, snapshot
        self.workers, self.services, self.requests = [], [], []
        self.snapshots, self.final_rows = {}, {}

    def run(self, folder):
        """Play the scenario in a folder of its own; never raises."""
        self.folder = os.path.join(folder, self.name)
        timer = threading.Timer(TIME_LIMIT, self.processes.time_out)
        try:
            timer.start()
            os.mkdir(self.folder)
            self.script(self)
            self.finish()
        except Failure as error:
            self.failure = str(error)
        except Exception as error:
            self.failure = "expected no error, seen %s: %s" % (
                type(error).__name__, error)
        finally:
            timer.cancel()
            self.processes.close()
        self.failure = self.processes.stopped or self.failure

    def tell(self, form, *values):
        self.story.append(form % values)

    def expect(self, what, seen, expected):
        if seen != expected:
            raise Failure("%s: expected %s, seen %s" % (
                what, json.dumps(expected), json.dumps(seen)))

    def expect_members(self, what, seen, expected):
        self.expect(what, {name: seen[name] for name in expected}, expected)

    def start_tool(self, crash=None):
        flags = ["--db", "tool.db", "--port", "0", "--exit-on-stdin-eof"]
        if crash:
            flags.append("--crash-" + crash)
        # Nobody writes to its stdin: the pipe closes when verify.py dies, by
        # SIGKILL too, and then the tool ends.
        self.tool = self.processes.start(
            "tool_service.py", flags, self.folder, stdin=subprocess.PIPE)
        self.services.append({"crash": crash, "exit_code": None})
        line = self.tool.stdout.readline().decode("utf-8", "replace").strip()
        self.tell("tool_service.py %s: %s", " ".join(flags), line or "no line")
        if not line.startswith("listening on http://127.0.0.1:"):
            raise Failure("expected tool_service.py to be listening, seen %s"
                          % (line or last_line(self.tool.log) or "its end"))
        self.url = line[len("listening on "):]

    def stop_tool(self):
        self.expect("exit status of the running tool", self.tool.poll(), None)
        kill(self.tool)
        self.tool.wait()
        self.tell("tool_service.py: killed")
        self.tool = None

    def tool_died(self, exit_code):
        self.processes.waiting_for = "tool_service.py"
        seen = self.services[-1]["exit_code"] = self.tool.wait()
        self.tell("tool_service.py: exit %d", seen)
        self.expect("exit status of the tool", seen, exit_code)

    def run_worker(self, title=None, mode=None, crash=None, **expected):
        """Run the worker to its end; what is not expected must be null."""
        self.mode = mode or self.mode
        flags = []
        for name, value in (
                ("--title", title), ("--mode", mode), ("--crash", crash)):
            flags += [name, value] if value else []
        worker = self.processes.start(
            "worker.py", ["--db", "worker.db", "--url", self.url] + flags,
            self.folder, stdin=subprocess.DEVNULL)
        output = worker.communicate()[0].decode("utf-8", "replace")
        error = last_line(worker.log)
        self.tell("%s: exit %d; %s", " ".join(["worker.py"] + flags),
                  worker.returncode, output or error or "no output")
        said = parse("worker.py", output) if output else {}
        self.workers.append({"crash": crash, "exit_code": worker.returncode,
                             "output": said or None, "error": error})
        self.expect_members("worker run %d" % len(self.workers), {
            "exit_code": worker.returncode, "error": error,
            "source": said.get("source"), "ticket": said.get("ticket"),
            "replayed": said.get("tool_replayed"),
        }, dict({"exit_code": 0, "error": None, "source": None,
                 "ticket": None, "replayed": None}, **expected))

    def connect(self):
        # Where a tool hangs, it is the scenario's time limit that ends this.
        return http.client.HTTPConnection(
            self.url[len("http://"):], timeout=2 * TIME_LIMIT)

    def send(self, key, title):
        """Send a request to the tool; the call is received later."""
        self.processes.waiting_for = "tool_service.py"
        connection = self.connect()
        connection.request("POST", "/tickets", json.dumps({"title": title}), {
            "Content-Type": "application/json", "Idempotency-Key": key})
        return connection, key, title

    def receive(self, call):
        """Record the answer to a call; return its body, as bytes."""
        connection, key, title = call
        asked = "POST /tickets, key %s, title %s" % (key, title)
        self.tell("%s: no answer", asked)
        with contextlib.closing(connection):
            response = connection.getresponse()
            body = response.read()
        replayed = response.getheader("Idempotent-Replayed") == "true"
        self.story[-1] = "%s: %d %s%s" % (
            asked, response.status, body.decode("utf-8", "replace"),
            ", replayed" if replayed else "")
        self.requests.append({
            "key": key, "title": title, "status": response.status,
            "replayed": replayed, "body": parse("tool_service.py", body)})
        return body

    def request(self, key, title, **expected):
        self.receive(self.send(key, title))
        self.expect_members("request %d" % len(self.requests),
                            self.requests[-1], dict(expected, replayed=False))

    def wait_until_accepted(self, calls):
        """Wait until all calls are inside the service, none answered.

        Connections are accepted in order: once a further, harmless request
        has its answer, those before it have been accepted. A few more give
        the thread of each its turn to come as far as the lock.
        """
        for _ in range(8):
            with contextlib.closing(self.connect()) as connection:
                connection.request("GET", "/tickets")
                with connection.getresponse() as response:
                    self.expect("GET /tickets", response.status, 405)
        self.tell("GET /tickets, 8 times: 405, so the calls are all inside")
        sockets = [connection.sock for connection, _, _ in calls]
        self.expect("answers under the lock",
                    len(select.select(sockets, [], [], 0)[0]), 0)

    def path(self, database):
        return os.path.join(self.folder, database)

    @contextlib.contextmanager
    def tool_db_locked(self):
        with contextlib.closing(sqlite3.connect(
                self.path("tool.db"), isolation_level=None)) as db:
            db.execute("BEGIN IMMEDIATE")
            self.tell("tool.db: write lock taken")
            yield
        self.tell("tool.db: write lock released")

    def rows(self, table):
        """Return every row as an object, in the order of the key."""
        path = self.path("worker.db" if table == "steps" else "tool.db")
        if not os.path.exists(path):
            return []
        with contextlib.closing(sqlite3.connect(path)) as db:
            db.row_factory = sqlite3.Row
            if not db.execute("SELECT 1 FROM sqlite_master WHERE name = ?",
                              (table,)).fetchone():
                return []
            return [dict(row) for row in db.execute(
                "SELECT * FROM %s ORDER BY 1" % table)]

    def snapshot(self, name, checkpoint, receipts, tickets):
        steps = self.rows("steps")
        seen = {"checkpoint": steps[0]["status"] if steps else None,
                "receipts": len(self.rows("receipts")),
                "tickets": len(self.rows("tickets"))}
        self.snapshots[name] = seen
        self.tell("%s: %s", name, json.dumps(seen))
        self.expect(name, seen, {"checkpoint": checkpoint,
                                 "receipts": receipts, "tickets": tickets})

    def finish(self):
        """Look at what is left, when no process has it open any more."""
        if self.tool:
            self.stop_tool()
        for name in ("worker.db", "tool.db"):
            if os.path.exists(self.path(name)):
                with contextlib.closing(sqlite3.connect(
                        self.path(name))) as db:
                    seen = db.execute("PRAGMA integrity_check").fetchone()[0]
                self.expect("integrity of " + name, seen, "ok")
        for table in ("steps", "tickets", "receipts"):
            self.final_rows[table] = self.rows(table)
        for step in self.final_rows["steps"]:
            self.check_intent(step)

    def check_intent(self, step):
        """Both sides hold the intent and the key that were saved first."""
        intent = {"operation_key": KEY, "payload": PAYLOAD}
        self.expect_members("step", step, dict(intent, mode=self.mode))
        for receipt in self.final_rows["receipts"]:
            self.expect_members("receipt", receipt, dict(
                intent, response=step["response"]))
        for said in [run["output"] for run in self.workers if run["output"]]:
            self.expect_members("output", said, {
                "run_id": step["run_id"], "operation_key": KEY,
                "mode": self.mode})

    def record(self):
        """Return what was seen, its members in the order of the evidence."""
        steps = self.final_rows["steps"]
        record = {"shows": self.shows,
                  "mode": steps[0]["mode"] if steps else None}
        if self.workers:
            record["workers"] = self.workers
        record["services"] = self.services
        if self.requests:
            record["requests"] = self.requests
        record.update(self.snapshots, rows=self.final_rows)
        return record

    def report(self, verbose):
        verdict = "PASS " + self.name
        if self.failure:
            verdict = "FAIL %s: %s" % (self.name, one_line(self.failure))
        story = self.story if verbose else []
        return "\n    ".join([verdict] + [one_line(line) for line in story])


def kill(child):
    # Python 3.8 raises where the child was reaped a moment ago.
    with contextlib.suppress(OSError):
        child.kill()


def parse(program, text):
    """Return the object that a program has sent, or raise Failure."""
    with contextlib.suppress(ValueError):
        value = json.loads(text)
        if isinstance(value, dict):
            return value
    raise Failure("%s: expected a JSON object, seen %.200r" % (program, text))


def last_line(path):
    with open(path, encoding="utf-8", errors="replace") as log:
        lines = log.read().splitlines()
    return lines[-1] if lines else None


def one_line(text):
    return " ".join(text.split())[:1000]


class Run:
    """Scenarios side by side, and what can end them all early."""

    def __init__(self, labs):
        self.labs = labs
        self.ended = None  # exit status of a run that was ended early
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, _: self.end(128 + number))

    def end(self, status):
        self.ended = status
        for lab in self.labs:
            lab.processes.stop("the run was ended")

    def run_all(self, folder, jobs, verbose):
        """Run the scenarios; print each as soon as it is decided, in order."""
        # A long one that started last would leave processors idle.
        order = sorted(self.labs, key=lambda lab: -lab.starts)
        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            runs = {lab: pool.submit(lab.run, folder) for lab in order}
            for lab in self.labs:
                # In slices: on Windows, Ctrl-C does not interrupt a wait.
                while not concurrent.futures.wait([runs[lab]], 1).done:
                    pass
                runs[lab].result()  # raises what run() itself did not expect
                if self.ended:
                    break
                self.say(lab.report(verbose))

    def say(self, text):
        try:
            print(text, flush=True)
        except OSError:
            # The reader is gone; the flush at exit must not find that again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            self.end(1)


@contextlib.contextmanager
def workspace(keep):
    """Give the folder in which every scenario makes its own."""
    if keep is not None:
        os.makedirs(keep, exist_ok=True)
        yield os.path.abspath(keep)
        return
    folder = tempfile.mkdtemp(prefix="agent-recovery-lab-")
    try:
        yield folder
    finally:
        try:
            patiently(shutil.rmtree, folder)
        except OSError as error:
            note("verify.py: a directory is left behind: %s" % error)


def patiently(action, *paths):
    # On Windows, a virus scanner or an indexer may hold a file for a moment.
    for _ in range(30 if os.name == "nt" else 0):
        try:
            return action(*paths)
        except OSError:
            time.sleep(0.1)
    return action(*paths)


def json_bytes(value):
    text = json.dumps(value, indent=2, ensure_ascii=False)
    return (text + "\n").encode("utf-8")


def sha256(content):
    return hashlib.sha256(content).hexdigest()


def hash_sources():
    hashes = {}
    for name in ("tool_service.py", "verify.py", "worker.py"):
        with open(os.path.join(HERE, name), "rb") as source:
            hashes[name] = sha256(source.read())
    return hashes


def system():
    # Not by platform.uname(): on Windows it asks WMI, which may hang.
    if hasattr(os, "uname"):
        name = os.uname()
        return name.sysname, name.release, name.machine
    release = "%d.%d.%d" % sys.getwindowsversion().platform_version
    return "Windows", release, os.environ.get("PROCESSOR_ARCHITECTURE", "")


def versions_json(sources, results):
    """Return what says: this code, on this machine, gave these results."""
    return json_bytes({
        "recorded_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "python": {"version": platform.python_version(),
                   "implementation": platform.python_implementation()},
        "sqlite": sqlite3.sqlite_version,
        "platform": dict(zip(("system", "release", "machine"), system())),
        "sources": sources,
        "results_sha256": sha256(results)})


def write_evidence(folder, *contents):
    """Replace both files or, where that fails, neither. Raises OSError."""
    os.makedirs(folder, exist_ok=True)
    results, versions = (os.path.join(folder, name) for name in EVIDENCE)
    with tempfile.TemporaryDirectory(prefix=".new-", dir=folder) as new:
        for name, content in zip(EVIDENCE, contents):
            with open(os.path.join(new, name), "wb") as file:
                file.write(content)
        old = os.path.join(new, "old")
        if os.path.exists(results):
            shutil.copyfile(results, old)
        patiently(os.replace, os.path.join(new, EVIDENCE[0]), results)
        try:
            patiently(os.replace, os.path.join(new, EVIDENCE[1]), versions)
        except OSError:
            if os.path.exists(old):
                patiently(os.replace, old, results)
            else:
                os.remove(results)
            raise


def note(text):
    # Not by print: without a stderr, it would write to stdout.
    with contextlib.suppress(OSError, AttributeError):
        sys.stderr.write("%s\n" % text)


def positive(text):
    if text.isascii() and text.isdigit() and int(text) > 0:
        return int(text)
    raise argparse.ArgumentTypeError("a number from 1 on is needed")


def parse_arguments(parser):
    parser.add_argument("scenario", nargs="*", metavar="SCENARIO",
                        help="only these, and without evidence")
    parser.add_argument("--list", action="store_true",
                        help="name the scenarios, and what each shows")
    parser.add_argument("-v", "--verbose", action="store_true",
                        help="tell each scenario's story after its line")
    parser.add_argument("--jobs", type=positive, metavar="N",
                        default=(os.cpu_count() or 1) + 1,
                        help="scenarios side by side (here %(default)s)")
    parser.add_argument("--keep", metavar="DIR",
                        help="leave databases and logs in DIR/SCENARIO")
    parser.add_argument("--evidence", metavar="DIR",
                        default=os.path.join(HERE, "evidence"),
                        help="write the evidence there, not to evidence/")
    return parser.parse_args()


def choose(parser, args):
    """Return the scenarios to run, or end with status 2."""
    labs = [Lab(*entry) for entry in SCENARIOS]
    for name in set(args.scenario) - {lab.name for lab in labs}:
        parser.error("no scenario is called %s; --list names them" % name)
    labs = [lab for lab in labs
            if not args.scenario or lab.name in args.scenario]
    for lab in labs if args.keep else []:
        folder = os.path.join(args.keep, lab.name)
        if os.path.lexists(folder):
            parser.error("%s exists, and no old database may join a new run"
                         % folder)
    return labs


def main():
    parser = argparse.ArgumentParser(
        description="Run fault scenarios; a full run that passes renews the"
        " evidence.", allow_abbrev=False)
    args = parse_arguments(parser)
    labs = choose(parser, args)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")
    run = Run(labs)
    if args.list:
        for lab in labs:
            run.say("%-33s  %s" % (lab.name, lab.shows))
        return run.ended or 0
    try:
        sources = hash_sources()
        with workspace(args.keep) as folder:
            run.run_all(folder, args.jobs, args.verbose)
    except (OSError, RuntimeError) as error:  # RuntimeError: no more threads
        return "verify.py: the scenarios cannot run: %s" % error
    return run.ended or conclude(run, args, sources)


def conclude(run, args, sources):
    """Write the evidence of a full run that passed; return the status."""
    failed = sum(1 for lab in run.labs if lab.failure)
    status = 1 if failed else 0
    if not failed and not args.scenario:
        results = json_bytes({lab.name: lab.record() for lab in run.labs})
        versions = versions_json(sources, results)
        if run.ended:
            return run.ended
        try:
            write_evidence(args.evidence, results, versions)
        except OSError as error:
            note("verify.py: the evidence cannot be written and is as it was:"
                 " %s; --evidence DIR names another place" % error)
            status = 1
    note("%d passed, %d failed, %.2f s" % (
        len(run.labs) - failed, failed, time.monotonic() - STARTED))
    return status


if __name__ == "__main__":
    sys.exit(main())
