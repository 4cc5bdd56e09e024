"""The repository's own rules: its layout, its sources and its evidence."""
import ast
import glob
import hashlib
import json
import os
import shutil
import subprocess
import sys
import unittest

from support import PROGRAMS, ROOT, Case, run

NAMES = [os.path.basename(path) for path in PROGRAMS]
SOURCES = sorted(list(PROGRAMS) + glob.glob(
    os.path.join(glob.escape(ROOT), ".ci", "*.py")))
MAX_COLUMNS = 79
MAX_FUNCTION = 25  # lines: what an article can quote whole
# Runs a program as if under another Python: the file must be one that the
# old Python can parse, but that is for the tests of its text to say.
UNDER_PYTHON_3_5 = """\
import sys
sys.version_info = (3, 5, 2, "final", 0)
exec(compile(open(sys.argv[1], encoding="ascii").read(), "program", "exec"))
"""


def read(*names):
    with open(os.path.join(ROOT, *names), "rb") as file:
        return file.read()


def trees(paths):
    """Give the base name and the syntax tree of every source."""
    for path in paths:
        yield os.path.basename(path), ast.parse(read(path))


def modules(statement):
    """Return the top-level modules that an import statement names."""
    if isinstance(statement, ast.Import):
        return [alias.name.split(".")[0] for alias in statement.names]
    if isinstance(statement, ast.ImportFrom):
        return [(statement.module or ".").split(".")[0]]
    return []


def imported(tree):
    return {name for node in ast.walk(tree) for name in modules(node)}


def git(*arguments):
    """Return what git prints; skip where there is no git or no clone."""
    if not shutil.which("git") or not os.path.exists(
            os.path.join(ROOT, ".git")):
        raise unittest.SkipTest("needs git and a clone")
    # A clone in a container may belong to another user.
    return subprocess.run(
        ["git", "-c", "safe.directory=*"] + list(arguments), cwd=ROOT,
        stdout=subprocess.PIPE, check=True).stdout.decode("utf-8")


def tracked():
    return [name for name in git("ls-files", "-z").split("\0") if name]


class Layout(unittest.TestCase):

    def test_visible_top_level(self):
        top = {name.split("/")[0] for name in tracked()}
        self.assertEqual(
            sorted(name for name in top if not name.startswith(".")),
            ["LICENSE", "README.md", "evidence", "tool_service.py",
             "verify.py", "worker.py"])

    def test_evidence_folder(self):
        self.assertEqual(
            [name for name in tracked() if name.startswith("evidence/")],
            ["evidence/results.json", "evidence/versions.json"])

    def test_license(self):
        self.assertTrue(read("LICENSE").startswith(b"MIT License\n"))

    def test_ci_script_is_bash(self):
        first = read(".ci", "run").split(b"\n")[0]
        self.assertRegex(first.decode("ascii"), r"\A#!.*\bbash\b")

    def test_line_ends_stay_as_they_are(self):
        # The evidence holds hashes of these files, on Windows too.
        files = NAMES + ["evidence/results.json", "evidence/versions.json"]
        lines = git("check-attr", "text", "eol", "--", *files).splitlines()
        values = dict(line.rsplit(": ", 1) for line in lines)
        for name in files:
            self.assertEqual(values[name + ": eol"], "lf")
            self.assertIn(values[name + ": text"], ("set", "auto"))


class Sources(Case):

    def test_imports(self):
        own = {name[:-len(".py")] for name, _ in trees(SOURCES)}
        for name, tree in trees(SOURCES):
            others = imported(tree) - own
            if hasattr(sys, "stdlib_module_names"):
                self.assertEqual(others - sys.stdlib_module_names, set(), name)
        for name, tree in trees(PROGRAMS):
            self.assertEqual(imported(tree) & own, set(), name)

    def test_text(self):
        for path in SOURCES:
            text = read(path).decode("ascii")
            self.assertNotIn("\r", text, path)
            self.assertNotIn("\t", text, path)
            self.assertTrue(text.endswith("\n"), path)
            for number, line in enumerate(text.split("\n"), 1):
                where = "%s, line %d" % (path, number)
                self.assertLessEqual(len(line), MAX_COLUMNS, where)
                self.assertEqual(line, line.rstrip(), where)

    def test_functions_are_short(self):
        for name, tree in trees(PROGRAMS):
            for node in ast.walk(tree):
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    lines = node.end_lineno - node.lineno + 1
                    self.assertLessEqual(
                        lines, MAX_FUNCTION, "%s: %s" % (name, node.name))

    def test_no_assert(self):
        # Under -O they are gone.
        for name, tree in trees(SOURCES):
            for node in ast.walk(tree):
                self.assertNotIsInstance(node, ast.Assert, name)

    def test_an_older_python_can_parse_the_programs(self):
        # Else it would show a SyntaxError, and not the line that says which
        # version is needed. What 3.6 and later brought, as far as tempting.
        newer = (ast.JoinedStr, ast.AnnAssign, ast.NamedExpr)
        for name, tree in trees(PROGRAMS):
            for node in ast.walk(tree):
                self.assertNotIsInstance(node, newer, name)
                if isinstance(node, ast.arguments):
                    self.assertEqual(node.posonlyargs, [], name)

    def test_version_check_comes_first(self):
        for name, tree in trees(PROGRAMS):
            check = [isinstance(node, ast.If) and "version_info"
                     in ast.dump(node.test) for node in tree.body].index(True)
            before = [module for node in tree.body[:check]
                      for module in modules(node)]
            self.assertEqual(before, ["sys"], name)

    def test_line_for_an_older_python(self):
        for path in PROGRAMS:
            done = run("-c", UNDER_PYTHON_3_5, path, cwd=self.folder)
            self.assertEqual((done.returncode, done.stdout), (1, ""), path)
            self.assertRegex(done.stderr, r"\A.*\b3\.8\b.*\n\Z")


class Evidence(unittest.TestCase):
    """The committed evidence belongs to the committed code."""

    def setUp(self):
        self.versions = json.loads(
            read("evidence", "versions.json").decode("utf-8"))

    def test_sources(self):
        for name in NAMES:
            with self.subTest(name):
                self.assertEqual(self.versions["sources"].get(name),
                                 hashlib.sha256(read(name)).hexdigest())
        self.assertEqual(list(self.versions["sources"]), sorted(NAMES))

    def test_results(self):
        results = read("evidence", "results.json")
        self.assertEqual(self.versions["results_sha256"],
                         hashlib.sha256(results).hexdigest())


if __name__ == "__main__":
    unittest.main()
