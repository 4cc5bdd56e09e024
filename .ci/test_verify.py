"""verify.py from outside: its lines, its exit status and its evidence.

It runs as a copy, because a full run rewrites the evidence beside it. Where
a child is to misbehave, the copy's worker.py or tool_service.py is changed
or replaced.
"""
import contextlib
import hashlib
import json
import os
import platform
import re
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import unittest

from support import (
    LOST, PROGRAMS, ROOT, TIMEOUT, Case, integrity, killed_after, rows, run)

OLD = {"results.json": b"the last good evidence\n",
       "versions.json": b"and where it comes from\n"}
MAIN = 'if __name__ == "__main__":\n'
RUNNING = (None, None)  # a service that verify.py itself stopped

# The table of the contract, written down again and independently. Workers:
# crash, exit status and, where there is an output, source, ticket, replayed.
# Services: crash, exit status. Snapshots: checkpoint, receipts, tickets.
WITH_WORKERS = {
    "naive_after_call": (
        "naive", [("after-call", 72), (None, 0, "tool", 2, False)],
        [RUNNING], ("pending", 0, 1), ("done", 0, 2)),
    "idempotent_after_call": (
        "idempotent", [("after-call", 72), (None, 0, "tool", 1, True)],
        [RUNNING], ("pending", 1, 1), ("done", 1, 1)),
    "worker_before_call": (
        "idempotent", [("before-call", 71), (None, 0, "tool", 1, False)],
        [RUNNING], ("pending", 0, 0), ("done", 1, 1)),
    "worker_after_checkpoint": (
        "idempotent",
        [("after-checkpoint", 73), (None, 0, "checkpoint", 1, None)],
        [RUNNING], ("done", 1, 1), ("done", 1, 1)),
    "tool_before_commit": (
        "idempotent", [(None, 5), (None, 0, "tool", 1, False)],
        [("before-commit", 86), RUNNING], ("pending", 0, 0), ("done", 1, 1)),
    "tool_after_commit_before_response": (
        "idempotent", [(None, 5), (None, 0, "tool", 1, True)],
        [("after-commit", 87), RUNNING], ("pending", 1, 1), ("done", 1, 1)),
    "changed_persisted_intent": (
        "idempotent", [("before-call", 71), (None, 3)],
        [RUNNING], ("pending", 0, 0), ("pending", 0, 0)),
}
# Requests: key, status, ticket, replayed. Then the one snapshot.
WITH_REQUESTS = {
    "same_key_changed_payload": (
        [("operation-a", 201, 1, False), ("operation-a", 409, None, False)],
        (None, 1, 1)),
    "eight_concurrent_requests": (
        [("operation-a", 201, 1, False)] + 7 * [("operation-a", 201, 1, True)],
        (None, 1, 1)),
    "same_payload_different_keys": (
        [("operation-a", 201, 1, False), ("operation-b", 201, 2, False)],
        (None, 2, 2)),
}
NAMES = list(WITH_WORKERS)[:-1] + list(WITH_REQUESTS) + [
    "changed_persisted_intent"]
PASSED = ["PASS " + name for name in NAMES]
SNAPSHOT = ["checkpoint", "receipts", "tickets"]
TABLES = {
    "steps": ["run_id", "payload", "operation_key", "mode", "status",
              "response"],
    "tickets": ["id", "title"],
    "receipts": ["operation_key", "payload", "response"]}


class Checkout:
    """A copy of the programs, beside the evidence of an earlier run.

    Its runs make their temporary directories in a folder of its own, where
    a test sees whether one is left.
    """

    def __init__(self, folder):
        self.folder = folder
        self.temporary = folder + " temporary"
        self.evidence_folder = os.path.join(folder, "evidence")
        for name in (self.temporary, self.evidence_folder):
            os.makedirs(name)
        for program in PROGRAMS:
            shutil.copy(program, folder)
        for name, content in OLD.items():
            with open(os.path.join(self.evidence_folder, name), "wb") as file:
                file.write(content)

    def options(self, cwd=None, env=()):
        place = dict.fromkeys(("TMPDIR", "TEMP", "TMP"), self.temporary)
        # Buffered as it is by default, also where the tests' is not.
        return {"cwd": cwd or self.folder, "env": dict(
            os.environ, PYTHONUNBUFFERED="", **place, **dict(env))}

    def run(self, *flags, python=(), **options):
        return run(os.path.join(self.folder, "verify.py"), *flags,
                   interpreter=[sys.executable] + list(python),
                   **self.options(**options))

    def start(self, *flags, **options):
        return subprocess.Popen(
            [sys.executable, os.path.join(self.folder, "verify.py")]
            + list(flags), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, universal_newlines=True,
            **self.options(), **options)

    def write(self, program, text):
        path = os.path.join(self.folder, program)
        with open(path, "w", encoding="ascii", newline="\n") as file:
            file.write(text)

    def change(self, program, *changes):
        """Replace texts of a program, each of which must be there."""
        text = read_folder(self.folder)[program].decode("ascii")
        for old, new in changes:
            if old not in text:
                raise AssertionError("%s no longer holds %r: this test needs"
                                     " another text" % (program, old))
            text = text.replace(old, new)
        self.write(program, text)

    def evidence(self):
        return read_folder(self.evidence_folder)


def read_folder(folder):
    """Return the content of every file in a folder, by name."""
    return {entry.name: read(entry.path)
            for entry in os.scandir(folder) if entry.is_file()}


def read(path):
    with open(path, "rb") as file:
        return file.read()


class Leash:
    """Tells a test when a child of verify.py has started, and has ended.

    The child connects to it, and the system closes that connection however
    the child dies: no process id, no signal and no sleep is needed, and a
    child that waits for its leash ends with the test.
    """

    def __init__(self):
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.children = []
        self.tie = "import socket\nleash = socket.create_connection((" \
            "'127.0.0.1', %d))\n" % self.listener.getsockname()[1]
        self.hold = self.tie + "leash.recv(1)\n"

    def started(self):
        """Wait for a further child, and return the connection to it."""
        self.listener.settimeout(TIMEOUT)
        self.children.append(self.listener.accept()[0])
        return self.children[-1]

    def all_ended(self):
        self.listener.settimeout(0)
        with contextlib.suppress(BlockingIOError):
            while True:
                self.children.append(self.listener.accept()[0])
        return all(has_ended(child) for child in self.children)

    def close(self):
        for connection in self.children + [self.listener]:
            connection.close()


def has_ended(child):
    child.settimeout(TIMEOUT)
    try:
        return child.recv(1) == b""
    except socket.timeout:
        return False
    except OSError:
        return True  # on Windows, the end of a process may be a reset


class VerifyCase(Case):

    def setUp(self):
        super().setUp()
        self.lab = Checkout(self.path("lab"))
        self.leash = Leash()
        self.addCleanup(self.leash.close)

    def assert_lines(self, done, *expected):
        self.assertEqual((done.stdout.splitlines(), done.returncode),
                         (list(expected), 0), done.stderr)

    def assert_failed(self, done, scenario):
        """Assert one FAIL line, and return it."""
        self.assertEqual(done.returncode, 1, done)
        line, = done.stdout.splitlines()
        self.assertTrue(line.startswith("FAIL %s: " % scenario), line)
        self.assertIn("expected", line)
        self.assertIn("seen", line)
        return line

    def assert_unusable(self, *flags):
        done = self.lab.run(*flags)
        self.assertEqual((done.returncode, done.stdout), (2, ""), flags)
        self.assertNotIn("Traceback", done.stderr)
        self.assertNotEqual(done.stderr, "")

    def assert_nothing_left(self, lab=None):
        """The evidence is as it was; no file and no process remains."""
        lab = lab or self.lab
        self.assertEqual(lab.evidence(), OLD)
        self.assertEqual(os.listdir(lab.temporary), [])
        self.assertEqual(
            sorted(os.listdir(lab.folder)),
            ["evidence", "tool_service.py", "verify.py", "worker.py"])
        self.assertTrue(self.leash.all_ended())


class FullRun(unittest.TestCase):
    """Two full runs, as different as they may be, and what they leave."""

    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.mkdtemp(prefix="lab test ")
        cls.addClassCleanup(shutil.rmtree, cls.folder, ignore_errors=True)
        cls.kept = os.path.join(cls.folder, "kept")
        cls.lab = Checkout(os.path.join(cls.folder, "lab"))
        cls.done = cls.lab.run("--jobs", "1", "--keep", cls.kept)
        cls.other_lab = Checkout(os.path.join(cls.folder, "\u8def \u5f84"))
        cls.other_done = cls.other_lab.run(
            "--jobs", "10", "--evidence", "new", cwd=cls.folder)
        cls.results = json.loads(
            cls.lab.evidence()["results.json"].decode("utf-8"))

    def test_lines(self):
        for done in (self.done, self.other_done):
            self.assertEqual(
                (done.stdout, done.returncode),
                ("".join(line + "\n" for line in PASSED), 0), done.stderr)
            self.assertRegex(done.stderr, r"[0-9] ?s")

    def test_evidence_holds_exactly_two_files(self):
        new = os.path.join(self.folder, "new")
        for folder in (self.lab.evidence_folder, new):
            self.assertEqual(sorted(os.listdir(folder)), sorted(OLD))
        self.assertEqual(self.other_lab.evidence(), OLD)

    def test_no_temporary_directory_is_left(self):
        self.assertEqual(os.listdir(self.lab.temporary), [])
        self.assertEqual(os.listdir(self.other_lab.temporary), [])

    def test_results_are_the_same_everywhere(self):
        # The committed file comes from another machine and another day: what
        # equals it holds no time, port, path, process id, host or user.
        results = self.lab.evidence()["results.json"]
        for folder in (os.path.join(self.folder, "new"),
                       os.path.join(ROOT, "evidence")):
            self.assertEqual(
                read(os.path.join(folder, "results.json")), results)

    def test_form_of_the_files(self):
        for content in self.lab.evidence().values():
            text = json.dumps(json.loads(content.decode("utf-8")), indent=2,
                              ensure_ascii=False) + "\n"
            self.assertEqual(content, text.encode("utf-8"))

    def test_versions(self):
        content = self.lab.evidence()
        versions = json.loads(content["versions.json"].decode("ascii"))
        recorded_at = versions["recorded_at"]
        self.assertRegex(recorded_at, r"\A\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d"
                                      r"(\.\d+)?(Z|\+00:00)\Z")
        expected = {
            "recorded_at": recorded_at,
            "python": {"version": platform.python_version(),
                       "implementation": platform.python_implementation()},
            "sqlite": sqlite3.sqlite_version,
            "platform": {"system": platform.system(),
                         "release": platform.release(),
                         "machine": platform.machine()},
            "sources": {os.path.basename(path): sha256(read(path))
                        for path in PROGRAMS},
            "results_sha256": sha256(content["results.json"])}
        # As text, so that the order of the members is compared too.
        self.assertEqual(json.dumps(versions, indent=2),
                         json.dumps(expected, indent=2))

    def test_order_of_scenarios_and_members(self):
        self.assertEqual(list(self.results), NAMES)
        for name, record in self.results.items():
            members = "shows mode workers services before_resume" \
                " after_resume rows"
            if name in WITH_REQUESTS:
                members = "shows mode services requests after_requests rows"
            self.assertEqual(list(record), members.split(), name)
            self.assertRegex(record["shows"], r"\A[A-Z].*\.\Z")

    def test_order_inside_the_entries(self):
        members = {"workers": "crash exit_code output error",
                   "services": "crash exit_code",
                   "requests": "key title status replayed body"}
        for record in self.results.values():
            for kind, expected in members.items():
                for entry in record.get(kind, []):
                    self.assertEqual(list(entry), expected.split())
            for name in ("before_resume", "after_resume", "after_requests"):
                self.assertIn(list(record.get(name, {})), ([], SNAPSHOT))
            self.assertEqual(list(record["rows"]), list(TABLES))
            for table, columns in TABLES.items():
                for row in record["rows"][table]:
                    self.assertEqual(list(row), columns)

    def test_table_of_scenarios_with_workers(self):
        for name, expected in WITH_WORKERS.items():
            record = self.results[name]
            seen = (record["mode"],
                    [worker_as_tuple(entry) for entry in record["workers"]],
                    [tuple(entry.values()) for entry in record["services"]],
                    tuple(record["before_resume"].values()),
                    tuple(record["after_resume"].values()))
            self.assertEqual(seen, expected, name)

    def test_table_of_scenarios_with_requests(self):
        for name, expected in WITH_REQUESTS.items():
            record = self.results[name]
            seen = ([request_as_tuple(entry) for entry in record["requests"]],
                    tuple(record["after_requests"].values()))
            self.assertEqual(seen, expected, name)
            self.assertEqual(record["mode"], None, name)
            self.assertEqual([tuple(entry.values())
                              for entry in record["services"]], [RUNNING])

    def test_one_error_over_two_databases(self):
        for name, record in self.results.items():
            errors = [entry["error"] for entry in record.get("workers", [])]
            if name.startswith("tool_"):
                self.assertEqual(errors, [LOST, None])
            elif name == "changed_persisted_intent":
                self.assertEqual(errors[0], None)
                self.assertRegex(errors[1], r"\A[A-Za-z]+: .")
            else:
                self.assertEqual(set(errors) - {None}, set(), name)

    def test_requests_and_their_bodies(self):
        first, refused = self.results["same_key_changed_payload"]["requests"]
        self.assertNotEqual(first["title"], refused["title"])
        self.assertEqual(refused["body"]["status"], 409)
        for name in WITH_REQUESTS:
            for entry in self.results[name]["requests"]:
                if entry["status"] == 201:
                    self.assertEqual(entry["body"]["title"], first["title"])

    def test_rows_are_those_of_the_databases(self):
        self.assertEqual(sorted(os.listdir(self.kept)), sorted(NAMES))
        for name, record in self.results.items():
            for table, columns in TABLES.items():
                database = "worker.db" if table == "steps" else "tool.db"
                path = os.path.join(self.kept, name, database)
                seen = [dict(zip(columns, row)) for row in rows(path, table)]
                self.assertEqual(record["rows"][table], seen, name)
                if os.path.exists(path):
                    self.assertEqual(integrity(path), ["ok"])

    def test_rows_bear_out_the_last_snapshot(self):
        for name, record in self.results.items():
            last = record.get("after_resume", record.get("after_requests"))
            steps, tickets, receipts = record["rows"].values()
            self.assertEqual(last, {
                "checkpoint": steps[0]["status"] if steps else None,
                "receipts": len(receipts), "tickets": len(tickets)}, name)
            self.assertEqual(len({row["title"] for row in tickets}),
                             min(len(tickets), 1), name)


def sha256(content):
    return hashlib.sha256(content).hexdigest()


def worker_as_tuple(entry):
    said = entry["output"]
    return (entry["crash"], entry["exit_code"]) + (() if said is None else (
        said["source"], said["ticket"]["ticket_id"], said["tool_replayed"]))


def request_as_tuple(entry):
    return (entry["key"], entry["status"], entry["body"].get("ticket_id"),
            entry["replayed"])


class Arguments(VerifyCase):

    def test_only_the_scenarios_that_are_named(self):
        # In the order of the table, whatever the order of the arguments.
        self.assert_lines(self.lab.run(NAMES[8], NAMES[0]),
                          PASSED[0], PASSED[8])
        self.assert_nothing_left()

    def test_all_ten_by_name_write_no_evidence(self):
        self.assert_lines(self.lab.run(*NAMES), *PASSED)
        self.assert_nothing_left()

    def test_unusable_arguments(self):
        for flags in (["no_such_scenario"], [NAMES[0], "no_such_scenario"],
                      ["--jobs", "0"], ["--jobs", "-1"], ["--jobs", "x"],
                      ["--jobs", ""], ["--no-such-flag"], [""]):
            self.assert_unusable(*flags)
        self.assert_nothing_left()

    def test_list_runs_nothing(self):
        for program in ("worker.py", "tool_service.py"):
            os.remove(os.path.join(self.lab.folder, program))
        done = self.lab.run("--list")
        listed = [line.split(None, 1) for line in done.stdout.splitlines()]
        self.assertEqual([name for name, _ in listed], NAMES)
        for _, sentence in listed:
            self.assertRegex(sentence, r"\A[A-Z].* .*\.\Z")
        self.assertEqual(done.returncode, 0)
        self.assertEqual(self.lab.evidence(), OLD)

    def test_stories_follow_their_lines(self):
        # At least: two services or one, two worker runs or requests, and
        # the snapshots.
        least = {NAMES[4]: 2 + 2 + 2, NAMES[6]: 1 + 2 + 1}
        done = self.lab.run("-v", *least)
        self.assertEqual(done.returncode, 0, done.stderr)
        lines = done.stdout.splitlines()
        second = lines.index("PASS " + NAMES[6])
        self.assertEqual(lines[0], "PASS " + NAMES[4])
        for name, story in ((NAMES[4], lines[1:second]),
                            (NAMES[6], lines[second + 1:])):
            self.assertGreaterEqual(len(story), least[name])
            for line in story:
                self.assertRegex(line, r"\A    \S")
        self.assert_nothing_left()

    def test_keep(self):
        done = self.lab.run("--keep", "kept", NAMES[0], cwd=self.folder)
        self.assert_lines(done, PASSED[0])
        kept = self.path(os.path.join("kept", NAMES[0]))
        for database, table, count in (("tool.db", "tickets", 2),
                                       ("worker.db", "steps", 1)):
            seen = rows(os.path.join(kept, database), table)
            self.assertEqual(len(seen), count)
        logs = [content for name, content in read_folder(kept).items()
                if not name.endswith(".db")]
        self.assertIn(b"POST /tickets", b"".join(logs))
        self.assert_nothing_left()

    def test_keep_joins_no_old_database(self):
        self.assert_lines(
            self.lab.run("--keep", self.path("kept"), NAMES[6]), PASSED[6])
        kept = self.path(os.path.join("kept", NAMES[6]))
        before = read_folder(kept)
        self.assert_unusable("--keep", self.path("kept"), NAMES[0], NAMES[6])
        self.assertEqual(os.listdir(self.path("kept")), [NAMES[6]])
        self.assertEqual(read_folder(kept), before)
        self.assert_nothing_left()


class Surroundings(VerifyCase):
    """What a user's machine may bring along and must not matter."""

    def test_c_locale_and_a_path_it_cannot_spell(self):
        lab = Checkout(self.path("\u8def \u5f84"))
        done = lab.run("-v", NAMES[0], cwd=self.folder, env={
            "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"})
        self.assertEqual(done.stdout.splitlines()[0], PASSED[0], done.stderr)
        self.assertEqual(done.returncode, 0)
        self.assert_nothing_left(lab)

    def test_output_in_ascii_and_a_path_it_cannot_spell(self):
        lab = Checkout(self.path("\u8def \u5f84"))
        lab.change("worker.py", ('"after-call": 72', '"after-call": 70'))
        done = lab.run("-v", "--keep", os.path.join(lab.folder, "\u8def"),
                       NAMES[0], env={"PYTHONIOENCODING": "ascii"})
        self.assertEqual(done.returncode, 1)
        self.assertNotIn("Traceback", done.stderr)
        self.assertTrue(done.stdout.startswith("FAIL " + NAMES[0]))

    def test_proxies(self):
        nobody = "http://127.0.0.1:9"
        self.assert_lines(
            self.lab.run(NAMES[1], NAMES[6], env={
                "http_proxy": nobody, "HTTP_PROXY": nobody,
                "all_proxy": "socks5://127.0.0.1:9", "no_proxy": ""}),
            PASSED[1], PASSED[6])

    def test_children_are_isolated(self):
        # verify.py itself is started with -I: only its children can be hurt.
        for module in ("sqlite3", "sitecustomize", "json"):
            with open(self.path(module + ".py"), "w") as file:
                file.write("raise SystemExit('not this one')\n")
        done = self.lab.run(NAMES[1], python=["-I"], cwd=self.folder, env={
            "PYTHONPATH": self.folder, "PYTHONHOME": self.folder,
            "PYTHONIOENCODING": "utf-16", "PYTHONWARNINGS": "error"})
        self.assert_lines(done, PASSED[1])

    def test_no_warnings(self):
        done = self.lab.run(NAMES[0], NAMES[4], NAMES[7],
                            python=["-W", "error", "-X", "dev"])
        self.assert_lines(done, PASSED[0], PASSED[4], PASSED[7])
        self.assertNotIn("Warning", done.stderr)
        self.assertNotIn("Exception ignored", done.stderr)

    def test_without_asserts_and_docstrings(self):
        for flag in ("-O", "-OO"):
            self.assert_lines(self.lab.run(NAMES[7], python=[flag]),
                              PASSED[7])
        self.lab.change("worker.py", ('"after-call": 72', '"after-call": 70'))
        for flag in ("-O", "-OO"):
            self.assert_failed(self.lab.run(NAMES[0], python=[flag]),
                               NAMES[0])
        self.assert_nothing_left()


COMMIT = '        db.execute("COMMIT")\n'
BEFORE_COMMIT = '        crash_point("before-commit", crash)\n'
AFTER_COMMIT = '        crash_point("after-commit", crash)\n'
# For each scenario a program that breaks what it shows, and no exit status
# where that can be helped. The eighth has a class of its own.
BROKEN = [
    # naive, with a key
    (NAMES[0], "worker.py", ('None if step.mode == "naive" else ', "")),
    # another key for every attempt
    (NAMES[1], "worker.py", ("else step.operation_key", "else str(id({}))")),
    # dies before the call, but after it
    (NAMES[2], "worker.py",
     ('    crash_point("before-call", args.crash)\n', ""),
     ('crash_point("after-call", args.crash)',
      'crash_point("before-call", args.crash)')),
    # calls again what is done
    (NAMES[3], "worker.py", ('if step.status == "done":', "if False:")),
    # dies on the wrong side of the commit
    (NAMES[4], "tool_service.py",
     (BEFORE_COMMIT + COMMIT, COMMIT + BEFORE_COMMIT)),
    (NAMES[5], "tool_service.py",
     (COMMIT + AFTER_COMMIT, AFTER_COMMIT + COMMIT)),
    # replays the answer to other parameters
    (NAMES[6], "tool_service.py", ("known[0] != payload", "False")),
    # takes two keys for one
    (NAMES[8], "tool_service.py", ("keys[0] if keys", '"one" if keys')),
    # follows the new plan
    (NAMES[9], "worker.py", ("    refuse_changes(step, wanted, args)\n", "")),
]
# One page more than belongs to anything: every row is as it was.
SPOIL = MAIN + """\
    status = main()
    name = [flag for flag in sys.argv if flag.endswith("worker.db")][0]
    with open(name, "r+b") as file:
        pages = int.from_bytes(file.read(32)[28:], "big")
        file.seek(28)
        file.write((pages + 1).to_bytes(4, "big"))
        file.seek(0, 2)
        file.write(bytes(file.tell() // pages))
    sys.exit(status)"""


class Failing(VerifyCase):

    def test_the_others_pass_and_the_evidence_stays(self):
        self.lab.change("worker.py", ('"after-call": 72', '"after-call": 70'))
        done = self.lab.run()
        lines = done.stdout.splitlines()
        for line, name in zip(lines, NAMES[:2]):
            self.assertRegex(line, r"\AFAIL %s: .*expected.*\b72\b" % name)
            self.assertRegex(line, r"seen.*\b70\b")
        self.assertEqual(lines[2:], PASSED[2:])
        self.assertEqual(done.returncode, 1)
        self.assert_nothing_left()

    def test_story_of_a_failure(self):
        self.lab.change("worker.py", ('"after-call": 72', '"after-call": 70'))
        first, *story = self.lab.run(
            "-v", NAMES[0]).stdout.splitlines()
        self.assertTrue(first.startswith("FAIL " + NAMES[0]), first)
        self.assertGreaterEqual(len(story), 2)
        for line in story:
            self.assertRegex(line, r"\A    \S")

    def test_each_scenario_can_fail(self):
        for number, (scenario, program, *changes) in enumerate(BROKEN):
            with self.subTest(scenario):
                lab = Checkout(self.path("lab %d" % number))
                lab.change(program, *changes)
                self.assert_failed(lab.run(scenario), scenario)
                self.assert_nothing_left(lab)

    def test_integrity_of_the_databases(self):
        self.lab.change("worker.py", (MAIN + "    sys.exit(main())", SPOIL))
        line = self.assert_failed(self.lab.run(NAMES[9]), NAMES[9])
        self.assertIn("worker.db", line)
        self.assert_nothing_left()


# Programs that take the place of worker.py or tool_service.py: what they do,
# after they were tied to a leash that holds them with leash.recv(1).
DEAF = """\
import signal
if hasattr(signal, "SIGTERM"):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
leash.recv(1)
"""
FLOOD = """\
import sys
for stream in sys.stderr, sys.stdout:
    stream.write("x" * (4 << 20))
"""
GARBAGE = """\
import sys
sys.stdout.buffer.write(b"\\xff\\n")
sys.stdout.flush()
"""
SILENT = """\
server = socket.create_server(("127.0.0.1", 0), backlog=64)
print("listening on http://127.0.0.1:%d" % server.getsockname()[1], flush=True)
"""
# No timeout of a socket ends this one: there is always another byte.
DRIPPING = SILENT + """\
client = server.accept()[0]
leash.settimeout(0.2)
while True:
    client.sendall(b"H")
    try:
        leash.recv(1)
        break
    except socket.timeout:
        pass
"""
MISBEHAVIOUR = [
    ("worker.py", NAMES[0], "leash.recv(1)"),
    ("worker.py", NAMES[0], DEAF),
    ("worker.py", NAMES[0], FLOOD),
    ("worker.py", NAMES[0], GARBAGE),
    ("worker.py", NAMES[0], "print([])"),
    ("tool_service.py", NAMES[0], "leash.recv(1)"),
    ("tool_service.py", NAMES[0], "raise SystemExit(9)"),
    ("tool_service.py", NAMES[0], GARBAGE + DEAF),
    ("tool_service.py", NAMES[0], FLOOD),
    ("tool_service.py", NAMES[6], SILENT + "leash.recv(1)"),
    ("tool_service.py", NAMES[6], DRIPPING),
    ("tool_service.py", NAMES[7], SILENT + "leash.recv(1)"),
]


class Misbehaving(VerifyCase):

    def test_a_fail_that_names_the_child(self):
        for trial in TRIALS:
            with self.subTest(program=trial.program, script=trial.script):
                done = subprocess.CompletedProcess(trial.verify.args, 0)
                done.stdout, done.stderr = trial.verify.communicate(
                    timeout=2 * TIMEOUT)
                done.returncode = trial.verify.returncode
                line = self.assert_failed(done, trial.scenario)
                self.assertIn(re.match("[a-z]+", trial.program).group(),
                              line.partition(": ")[2])
                self.assertLess(len(line), 2000)
                self.assertNotIn("Traceback", done.stderr)
                self.leash = trial.leash
                self.assert_nothing_left(trial.lab)


class Trial:
    """A run of verify.py with a child that misbehaves."""

    def __init__(self, program, scenario, script):
        self.program, self.scenario, self.script = program, scenario, script
        self.folder = tempfile.mkdtemp(prefix="lab test ")
        self.leash = Leash()
        self.lab = Checkout(os.path.join(self.folder, "lab"))
        self.lab.write(program, self.leash.tie + script)
        self.verify = self.lab.start(scenario)

    def close(self):
        end(self.verify)
        self.leash.close()
        shutil.rmtree(self.folder, ignore_errors=True)


TRIALS = []


def setUpModule():
    """Start what is to hang: it hangs while the other tests run."""
    TRIALS.extend(Trial(*case) for case in MISBEHAVIOUR)


def tearDownModule():
    for trial in TRIALS:
        trial.close()


def end(process):
    process.kill()
    process.wait()
    for stream in (process.stdout, process.stderr):
        stream.close()


class Interrupted(VerifyCase):
    """Ended half-way: the first worker runs, and waits for its leash."""

    def half_way(self, *flags, **options):
        self.lab.change("tool_service.py", (MAIN, self.leash.tie + MAIN))
        self.lab.change("worker.py", (MAIN, self.leash.hold + MAIN))
        verify = self.lab.start(*flags, **options)
        self.addCleanup(end, verify)
        for _ in ("a service", "and a worker, or another service"):
            self.leash.started()
        return verify

    def assert_ended(self, verify):
        _, stderr = verify.communicate(timeout=TIMEOUT)
        self.assertNotIn("Traceback", stderr)
        self.assertNotIn("Exception ignored", stderr)
        self.assert_nothing_left()

    def heed_ctrl_c(self):
        # A background job is started with SIGINT ignored, and its children
        # would inherit that.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        self.addCleanup(signal.signal, signal.SIGINT, before)

    @unittest.skipIf(os.name == "nt", "Windows has no such signal to send")
    def test_ctrl_c(self):
        self.heed_ctrl_c()
        verify = self.half_way("--jobs", "1")
        verify.send_signal(signal.SIGINT)
        self.assert_ended(verify)
        self.assertEqual(verify.returncode, 130)

    @unittest.skipIf(os.name == "nt", "Windows has no such signal to send")
    def test_ctrl_c_to_the_whole_group(self):
        self.heed_ctrl_c()
        verify = self.half_way(start_new_session=True)
        os.killpg(verify.pid, signal.SIGINT)
        self.assert_ended(verify)
        self.assertEqual(verify.returncode, 130)

    @unittest.skipIf(os.name == "nt", "Windows has no such signal to send")
    def test_sigterm(self):
        verify = self.half_way()
        verify.terminate()
        self.assert_ended(verify)
        self.assertNotEqual(verify.returncode, 0)

    def test_killed(self):
        verify = self.half_way(NAMES[0])
        verify.kill()
        verify.wait(TIMEOUT)
        service, worker = self.leash.children
        self.assertTrue(has_ended(service))
        worker.sendall(b".")
        self.assertTrue(has_ended(worker))
        self.assertEqual(self.lab.evidence(), OLD)

    def test_reader_that_goes_away(self):
        # Two scenarios, the third and the last, wait until the reader is
        # gone. That it has a line before shows that lines come one by one.
        self.lab.change("worker.py", (
            MAIN, 'if "before-call" in sys.argv:\n    %s\n%s' % (
                self.leash.hold.strip().replace("\n", "\n    "), MAIN)))
        verify = self.lab.start("--jobs", "10")
        self.addCleanup(end, verify)
        held = [self.leash.started() for _ in range(2)]
        with killed_after(verify, TIMEOUT):
            self.assertEqual(verify.stdout.readline(), PASSED[0] + "\n")
            verify.stdout.close()
            for worker in held:
                with contextlib.suppress(OSError):  # it was killed already
                    worker.sendall(b".")
            stderr = verify.stderr.read()
        verify.wait(TIMEOUT)
        self.assertEqual(stderr, "")
        self.assert_nothing_left()

    @unittest.skipIf(os.name == "nt", "needs a POSIX shell")
    def test_no_standard_output(self):
        done = run("-c", 'exec "$0" "$1/verify.py" "$2" >&-', sys.executable,
                   self.lab.folder, NAMES[0], interpreter=["/bin/sh"],
                   **self.lab.options())
        self.assertNotRegex(done.stderr, "Traceback|Exception ignored")
        self.assert_nothing_left()


class EvidenceThatCannotBeWritten(VerifyCase):

    def assert_one_line(self, done):
        self.assertEqual((done.stdout.splitlines(), done.returncode),
                         (PASSED, 1))
        self.assertNotIn("Traceback", done.stderr)
        lines = [line for line in done.stderr.splitlines()
                 if "evidence" in line]
        self.assertEqual(len(lines), 1, done.stderr)

    def test_file_in_place_of_the_folder(self):
        with open(self.path("file"), "w") as file:
            file.write("kept")
        self.assert_one_line(self.lab.run("--evidence", self.path("file")))
        self.assertEqual(read(self.path("file")), b"kept")
        self.assert_nothing_left()

    def test_second_file_cannot_be_replaced(self):
        # results.json comes first, and has to be put back.
        path = os.path.join(self.lab.evidence_folder, "versions.json")
        os.remove(path)
        os.mkdir(path)
        self.assert_one_line(self.lab.run())
        os.rmdir(path)
        self.assertEqual(self.lab.evidence(),
                         {"results.json": OLD["results.json"]})

    def test_second_file_of_a_first_run_cannot_be_replaced(self):
        os.makedirs(self.path(os.path.join("new", "versions.json")))
        self.assert_one_line(self.lab.run("--evidence", self.path("new")))
        self.assertEqual(os.listdir(self.path("new")), ["versions.json"])


class EightAtOnce(VerifyCase):
    """A service that is wrong only sometimes must be caught every time."""

    TIMES = 4

    def assert_caught(self):
        for _ in range(self.TIMES):
            self.assert_failed(self.lab.run(NAMES[7]), NAMES[7])
        self.assert_nothing_left()

    def test_plain_begin(self):
        self.lab.change("tool_service.py", ("BEGIN IMMEDIATE", "BEGIN"))
        self.assert_caught()

    def test_receipt_looked_up_outside_the_transaction(self):
        begin = '        db.execute("BEGIN IMMEDIATE")\n'
        look_up = "        known = db.execute("
        insert = "        ticket_id = db.execute("
        self.lab.change("tool_service.py", (begin + look_up, look_up),
                        (insert, begin + insert))
        self.assert_caught()


if __name__ == "__main__":
    unittest.main()
