"""What other systems do, played here: errors by other names, other streams.

A launcher patches the standard library and then runs a program as a script,
unchanged.
"""
import errno
import os
import shutil
import socket
import sys
import unittest

from support import LOST, PROGRAMS, VERIFY, WORKER, Case, run

# What systems answer where the peer has closed or reset: macOS gives EINVAL
# and EPROTOTYPE, Windows an abort where others have a reset.
LOSSES = [("setsockopt", errno.EINVAL), ("sendall", errno.EPROTOTYPE),
          ("sendall", errno.EPIPE), ("sendall", errno.ECONNABORTED),
          ("recv", errno.ECONNRESET), ("recv", errno.ECONNABORTED),
          ("connect", errno.ECONNRESET), ("connect", errno.ECONNABORTED)]
RAISE = """
import os, platform, shutil, socket
def failing(*args, **options):
    raise OSError(%d, os.strerror(%d))
%s = failing
"""
RUN = """
import runpy, sys
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


class PlatformCase(Case):

    def patched(self, code, program, *flags, **options):
        """Run a program as a script, once that code has been executed."""
        options.setdefault("interpreter", [sys.executable, "-c", code + RUN])
        return run(program, *flags, cwd=self.folder, **options)

    def copy_of_verify(self):
        for program in PROGRAMS:
            shutil.copy(program, self.folder)
        temporary = self.path("temporary")
        os.mkdir(temporary)
        environment = dict(os.environ)
        environment.update(dict.fromkeys(("TMPDIR", "TEMP", "TMP"),
                                         temporary))
        return self.path(os.path.basename(VERIFY)), environment


class LossTest(PlatformCase):

    def lose(self, number, method, code):
        with socket.create_server(("127.0.0.1", 0)) as server:
            return self.patched(
                RAISE % (code, code, "socket.socket." + method), WORKER,
                "--db", "%d.db" % number, "--url",
                "http://127.0.0.1:%d" % server.getsockname()[1])

    def test_one_name_whatever_the_system_calls_it(self):
        for number, (method, code) in enumerate(LOSSES):
            with self.subTest(method=method, error=errno.errorcode[code]):
                done = self.lose(number, method, code)
                self.assertEqual((done.returncode, done.stdout), (5, ""))
                self.assertEqual(done.stderr.splitlines(), [LOST])

    def test_other_errors_keep_their_names(self):
        for number, name in enumerate(("ECONNREFUSED", "ENETUNREACH")):
            done = self.lose(number, "connect", getattr(errno, name))
            self.assertEqual((done.returncode, done.stdout), (5, ""))
            self.assertNotIn("RemoteDisconnected", done.stderr)
            self.assertNotIn("Traceback", done.stderr)


class VerifyTest(PlatformCase):

    def test_directory_that_cannot_be_removed(self):
        verify, environment = self.copy_of_verify()
        done = self.patched(
            RAISE % (errno.ENOTEMPTY, errno.ENOTEMPTY, "shutil.rmtree"),
            verify, "same_payload_different_keys", env=environment)
        self.assertEqual(
            (done.returncode, done.stdout),
            (0, "PASS same_payload_different_keys\n"), done.stderr)
        self.assertIn("a directory is left behind", done.stderr)
        self.assertNotIn("Traceback", done.stderr)

    def test_system_that_cannot_be_asked(self):
        # On Windows, platform.uname() may hang or crash in WMI.
        verify, environment = self.copy_of_verify()
        done = self.patched(RAISE % (1, 1, "platform.uname"), verify,
                            env=environment)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertEqual(sorted(os.listdir(self.path("evidence"))),
                         ["results.json", "versions.json"])

    def test_console_code_page(self):
        for page in ("cp936", "cp1252", "ascii"):
            done = run(VERIFY, "--list", cwd=self.folder, env=dict(
                os.environ, PYTHONIOENCODING=page))
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertEqual(len(done.stdout.splitlines()), 10)

    def test_stdout_that_is_no_text_file(self):
        # IDLE and notebooks put objects of their own there.
        done = self.patched(
            "import sys\n"
            "class Shell:\n"
            "    write = sys.__stdout__.write\n"
            "    flush = sys.__stdout__.flush\n"
            "sys.stdout = Shell()\n", VERIFY, "--list")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(len(done.stdout.splitlines()), 10)


if __name__ == "__main__":
    unittest.main()
