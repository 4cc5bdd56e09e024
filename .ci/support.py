"""What several tests need: the programs as processes, seen from outside.

Every wait in here is bounded by TIMEOUT, which is a bound and no measure:
no test depends on how fast a machine is.
"""
import contextlib
import os
import shutil
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
import unittest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
WORKER = os.path.join(ROOT, "worker.py")
TOOL = os.path.join(ROOT, "tool_service.py")
VERIFY = os.path.join(ROOT, "verify.py")
PROGRAMS = (TOOL, VERIFY, WORKER)
TIMEOUT = 60  # seconds after which a child counts as hung
LOST = "RemoteDisconnected: Remote end closed connection without response"


class Case(unittest.TestCase):
    """A test with a directory of its own, self.folder, removed at the end."""

    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="lab test ")
        self.addCleanup(shutil.rmtree, self.folder, ignore_errors=True)

    def path(self, name):
        return os.path.join(self.folder, name)

    def service(self, *flags, **options):
        """Start a tool_service that ends with the test."""
        service = Service(self.folder, *flags, **options)
        self.addCleanup(service.kill)
        return service

    def worker(self, *flags, **options):
        return run(WORKER, *flags, cwd=self.folder, **options)


def run(program, *flags, **options):
    """Run a program to its end: returncode, stdout and stderr as text."""
    options.setdefault("timeout", TIMEOUT)
    interpreter = options.pop("interpreter", [sys.executable])
    done = subprocess.run(
        interpreter + [program] + list(flags), stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)
    done.stdout = done.stdout.decode("utf-8").replace("\r\n", "\n")
    done.stderr = done.stderr.decode("utf-8", "replace").replace("\r\n", "\n")
    return done


class Service:
    """A running tool_service.py; its log is in tool.log."""

    def __init__(self, folder, *flags, program=TOOL, env=None,
                 interpreter=(sys.executable,)):
        self.log_path = os.path.join(folder, "tool.log")
        self.database = os.path.join(folder, "tool.db")
        with open(self.log_path, "ab") as log:
            self.process = subprocess.Popen(
                list(interpreter) + [program, "--db", self.database,
                                     "--port", "0", "--exit-on-stdin-eof"]
                + list(flags), stdin=subprocess.PIPE, cwd=folder, env=env,
                stdout=subprocess.PIPE, stderr=log)
        with killed_after(self.process, TIMEOUT):
            line = self.process.stdout.readline().decode("ascii").strip()
        if not line.startswith("listening on http://127.0.0.1:"):
            self.kill()
            raise AssertionError("no ready line but %r; log: %s" % (
                line, self.log()))
        self.url = line.split()[-1]
        self.port = int(line.rpartition(":")[2])

    def log(self):
        with open(self.log_path, encoding="utf-8", errors="replace") as log:
            return log.read()

    def wait(self):
        """Return the exit status of a service that ends by itself."""
        return self.process.wait(TIMEOUT)

    def kill(self):
        with contextlib.suppress(OSError):
            self.process.kill()
        self.process.wait(TIMEOUT)
        for stream in (self.process.stdin, self.process.stdout):
            stream.close()

    def connect(self):
        return socket.create_connection(("127.0.0.1", self.port), TIMEOUT)


@contextlib.contextmanager
def killed_after(process, seconds):
    """Bound a read from the process's pipe: after that time it is killed."""
    timer = threading.Timer(seconds, process.kill)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def rows(path, table):
    """Every row of a table, ordered by key, read by a connection that took
    no part in the run; none where the file or the table does not exist."""
    if not os.path.exists(path):
        return []
    with contextlib.closing(sqlite3.connect(path, timeout=TIMEOUT)) as db:
        if not db.execute("SELECT 1 FROM sqlite_master WHERE name = ?",
                          (table,)).fetchone():
            return []
        return db.execute(
            "SELECT * FROM %s ORDER BY 1" % table).fetchall()


def integrity(path):
    with contextlib.closing(sqlite3.connect(path, timeout=TIMEOUT)) as db:
        return [row[0] for row in db.execute("PRAGMA integrity_check")]


@contextlib.contextmanager
def write_lock(path):
    """Hold a database's write lock, as another process would."""
    with contextlib.closing(
            sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("BEGIN IMMEDIATE")
        yield db
