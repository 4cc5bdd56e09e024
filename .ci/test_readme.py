"""README.md cannot rot: it says what the code and the evidence say.

Its snippets and excerpts are found where they come from, its tables hold
the values of the code and the evidence, and its walk by hand is executed.
A comment above a block, <!-- from worker.py: save_intent -->, names the
origin.
"""
import ast
import collections
import contextlib
import json
import os
import platform
import re
import shlex
import shutil
import socket
import subprocess
import sys
import unittest

import crash_map
from support import (LOST, PROGRAMS, ROOT, TIMEOUT, WORKER, Case,
                     killed_after, run)

CHINESE = "\u4e2d\u6587\u8bf4\u660e"
NONE = "none"       # how a table writes the checkpoint of no step
MAX_SNIPPET = 25    # lines
MAX_ENGINE = 30     # lines
MAX_STORY = 2200    # words: ten minutes
PORT = 8765         # of the walk, unless it is in use

# marks: the comments on the lines above the fence.
Block = collections.namedtuple("Block", "marks language text")
BLOCK = re.compile(r"^((?:<!-- [^\n]* -->\n)*)```(\w*)\n(.*?)^```$",
                   re.MULTILINE | re.DOTALL)


def read(*names):
    with open(os.path.join(ROOT, *names), encoding="utf-8") as file:
        return file.read()


README = read("README.md")
RESULTS = read("evidence", "results.json")
EVIDENCE = json.loads(RESULTS)
SOURCES = {os.path.basename(path): read(os.path.basename(path))
           for path in PROGRAMS}


def blocks(text=README):
    return [Block(re.findall("<!-- (.*) -->", marks), language, body)
            for marks, language, body in BLOCK.findall(text)]


def marked(prefix):
    """Give (the rest of the mark, the block) for each mark so begun."""
    for block in blocks():
        for mark in block.marks:
            if mark.startswith(prefix):
                yield mark[len(prefix):], block


def only(found):
    """Return the one thing that was found."""
    (one,) = found
    return one


def sections():
    """Return {heading: text} of the second level."""
    parts = re.split(r"^## (.*)\n", prose_marked(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2]))


def prose_marked():
    """The README, in which no line of a block can pass for a heading."""
    return BLOCK.sub(lambda found: re.sub(
        "^#", "\0#", found.group(), flags=re.MULTILINE), README)


def prose(text=README):
    return BLOCK.sub("", text)


def rows(text, head):
    """Return the cells of the table whose head row begins so."""
    lines = iter(text.splitlines())
    for line in lines:
        if line.startswith("| %s |" % head):
            break
    next(lines, None)
    table = []
    for line in lines:
        if not line.startswith("|"):
            break
        table.append([cell.strip() for cell in line.strip("|").split("|")])
    return table


def ticks(cell):
    return re.findall("`([^`]*)`", cell)


def constants(program):
    """Return {name: value} of what a program assigns at its top level."""
    values = {}
    for node in ast.parse(SOURCES[program]).body:
        if isinstance(node, ast.Assign):
            with contextlib.suppress(Exception):
                values[node.targets[0].id] = eval(compile(
                    ast.Expression(node.value), program, "eval"), {})
    return values


def function(program, name):
    """Return the lines of a function, whole."""
    source = SOURCES[program]
    node = only(node for node in ast.walk(ast.parse(source))
                if isinstance(node, ast.FunctionDef) and node.name == name)
    lines = source.splitlines(True)[node.lineno - 1:node.end_lineno]
    return "".join(lines)


def record(name):
    """Return the text of a scenario's record, as results.json has it."""
    return only(re.findall(r'^  "%s": \{\n.*?^  \}' % name, RESULTS,
                           re.MULTILINE | re.DOTALL))


def whole_lines(text, excerpt):
    return ("\n" + excerpt) in ("\n" + text + "\n")


class Excerpts(unittest.TestCase):

    maxDiff = None

    def test_every_block_has_an_origin(self):
        for block in blocks():
            if block.language in ("python", "json"):
                self.assertTrue(block.marks, block.text)

    def test_snippets_are_whole_functions(self):
        count = 0
        for program in SOURCES:
            for name, block in marked("from %s: " % program):
                with self.subTest(name):
                    self.assertEqual(block.text, function(program, name))
                    self.assertIn(block.text, SOURCES[program])
                    self.assertLessEqual(
                        len(block.text.splitlines()), MAX_SNIPPET)
                count += 1
        self.assertGreaterEqual(count, 6)

    def test_excerpts_of_the_results(self):
        found = list(marked("from evidence/results.json: "))
        self.assertGreaterEqual(len(found), 3)
        for name, block in found:
            self.assertTrue(whole_lines(record(name), block.text),
                            "%s has no\n%s" % (name, block.text))

    def test_lines_that_verify_prints(self):
        _, block = only(marked("prints: verify.py"))
        self.assertEqual(block.text.splitlines(),
                         ["PASS " + name for name in EVIDENCE])
        self.assertIn("`%d passed, 0 failed`" % len(EVIDENCE), README)

    def test_engines(self):
        found = list(marked("engine: "))
        self.assertEqual([name for name, _ in found],
                         ["langgraph_window.py", "dbos_window.py"])
        for name, block in found:
            compile(block.text, name, "exec")
            self.assertLessEqual(len(block.text.splitlines()), MAX_ENGINE)
            self.assertTrue(block.text.startswith("# %s " % name))
            self.assertIn('"http://127.0.0.1:%d/tickets"' % PORT, block.text)


def snapshot(of):
    """Return a snapshot as a cell; the empty cell where there is none."""
    return of and "%s, %d, %d" % (of["checkpoint"] or NONE, of["receipts"],
                                  of["tickets"]) or ""


class Scenarios(unittest.TestCase):

    def check(self, table, shows):
        self.assertEqual([ticks(row[0]) for row in table],
                         [[name] for name in EVIDENCE])
        for row, (name, seen) in zip(table, EVIDENCE.items()):
            with self.subTest(name):
                self.assertEqual(row[2:4], [
                    snapshot(seen.get("before_resume")),
                    snapshot(seen.get("after_resume")
                             or seen.get("after_requests"))])
                self.assertEqual(numbers_in(row[1]), numbers_of(seen))
                if shows:
                    self.assertEqual(row[4], seen["shows"])

    def test_english_table(self):
        self.check(rows(README, "scenario | what happens"), True)

    def test_chinese_table(self):
        self.check(rows(README, "\u573a\u666f"), False)

    def test_naive_against_keyed(self):
        table = rows(
            README, "the worker died after the call; then it runs again")
        self.assertEqual(len(table), 2)
        for label, before, after in table:
            seen = EVIDENCE[only(ticks(label))]
            self.assertEqual([int(before), int(after)], [
                seen["before_resume"]["tickets"],
                seen["after_resume"]["tickets"]])

    def test_numbers_in_the_diagrams(self):
        plain, lost = [block.text for block in blocks()
                       if block.language == "mermaid"][1:]
        for name in ("naive_after_call", "idempotent_after_call"):
            for when in ("before_resume", "after_resume"):
                self.assertIn(": " + counted(EVIDENCE[name][when], True),
                              plain)
        for name in ("tool_before_commit",
                     "tool_after_commit_before_response"):
            seen = EVIDENCE[name]
            self.assertIn(": " + counted(seen["before_resume"]), lost)
            self.assertIn("exit %d\n" % seen["services"][0]["exit_code"],
                          lost)
            self.assertIn("exit %d, checkpoint pending"
                          % seen["workers"][0]["exit_code"], lost)
            self.assertIn(seen["workers"][0]["error"], lost)
        self.assertIn(LOST, lost)


def counted(of, checkpoint=False):
    """Return a snapshot in words: pending, 0 receipts, 1 ticket."""
    words = ["%d %s%s" % (of[name], name[:-1], "s" * (of[name] != 1))
             for name in ("receipts", "tickets")]
    return ", ".join([of["checkpoint"]] * checkpoint + words)


def numbers_in(cell):
    """The exit codes and HTTP statuses that a cell speaks of."""
    return sorted({int(number) for number in re.findall(r"\d+", cell)})


def numbers_of(seen):
    entries = seen.get("workers", []) + seen["services"]
    numbers = {entry["exit_code"] for entry in entries} - {0, None}
    return sorted(numbers | {
        entry["status"] for entry in seen.get("requests", [])})


def paths(value, path=""):
    """Give the path of every member, without the numbers of lists."""
    if isinstance(value, list):
        for item in value:
            yield from paths(item, path)
    elif isinstance(value, dict):
        for name, item in value.items():
            deeper = path + "." + name if path else name
            yield deeper
            if name != "sources":
                yield from paths(item, deeper)


class Members(unittest.TestCase):

    def check(self, seen, table):
        told = [path for row in table for path in ticks(row[0])]
        self.assertEqual(sorted(told), sorted(set(seen)))

    def test_every_member_of_the_results(self):
        tables = sections()["Reading the evidence"].split("`versions.json`:")
        self.check((path for name in EVIDENCE
                    for path in paths(EVIDENCE[name])),
                   rows(tables[0], "member"))

    def test_every_member_of_the_versions(self):
        tables = sections()["Reading the evidence"].split("`versions.json`:")
        self.check(paths(json.loads(read("evidence", "versions.json"))),
                   rows(tables[1], "member"))

    def test_columns(self):
        seen = {}
        for scenario in EVIDENCE.values():
            for table, lines in scenario["rows"].items():
                seen.update((table, list(line)) for line in lines)
        self.assertEqual(
            {only(ticks(row[1])): ticks(row[2])
             for row in rows(README, "database | table")}, seen)


class Reference(Case):

    def test_flags(self):
        table = rows(README, "program | flag")
        for program in SOURCES:
            done = run(os.path.join(ROOT, program), "--help")
            flags = set(re.findall(r"--[a-z][a-z-]*", done.stdout))
            self.assertEqual({flag for row in table if row[0] == program
                              for flag in re.findall("--[a-z-]+", row[1])},
                             flags - {"--help"}, program)

    def test_defaults(self):
        table = {(row[0], flag): row[2]
                 for row in rows(README, "program | flag")
                 for flag in re.findall("--[a-z-]+", row[1])}
        for program, source in SOURCES.items():
            for flag, default in defaults(source):
                self.assertEqual(table[program, flag], "`%s`" % default)
        worker = constants("worker.py")
        self.assertIn("`%s`" % worker["DEFAULT_TITLE"],
                      table["worker.py", "--title"])
        self.assertEqual(ticks([row for row in rows(README, "program | flag")
                                if "--crash POINT" in row[1]][0][3]),
                         list(worker["CRASH_POINTS"]))

    def test_exit_codes(self):
        table = rows(README, "program | exit")
        for program, source in SOURCES.items():
            told = re.findall(r"\d+", re.split(
                "Exit status:", ast.get_docstring(ast.parse(source)))[1])
            codes = {int(row[1]): row[2] for row in table
                     if row[0] == program}
            self.assertEqual(sorted(codes), sorted(set(map(int, told))))
            points = constants(program).get("CRASH_POINTS", {})
            for point, code in points.items():
                self.assertEqual(codes[code], "crash point `%s`" % point)

    def test_checkpoint_after_an_exit(self):
        table = {int(row[1]): row[4]
                 for row in rows(README, "program | exit")
                 if row[0] == "worker.py"}
        for seen in EVIDENCE.values():
            before = None
            for attempt, when in zip(seen.get("workers", ()),
                                     ("before_resume", "after_resume")):
                told = table[attempt["exit_code"]]
                after = seen[when]["checkpoint"]
                self.assertEqual(after, before if told == "untouched"
                                 else told, attempt)
                before = after

    def test_statuses(self):
        tree = ast.parse(SOURCES["tool_service.py"])
        seen = {node.value for part in ast.walk(tree)
                if isinstance(part, ast.FunctionDef)
                for node in ast.walk(part) if isinstance(node, ast.Constant)
                and type(node.value) is int and 200 <= node.value <= 599}
        self.assertEqual(sorted(seen), [
            int(row[0]) for row in rows(README, "status | when")])

    def test_quantities(self):
        text = " ".join(README.split())
        tool, worker, verify = map(constants, (
            "tool_service.py", "worker.py", "verify.py"))
        for form, value in (
                ("over %d KiB", tool["MAX_BODY"] // 1024),
                ("over %d code points", tool["MAX_TITLE"]),
                ("locked for about %d s; with", tool["LOCK_TIMEOUT"]),
                ("locked for about %d s, not", worker["LOCK_TIMEOUT"]),
                ("silent for %d s is dropped", tool["CLIENT_TIMEOUT"]),
                ("worker waits %d s", worker["CALL_TIMEOUT"]),
                ("takes over %d s", verify["TIME_LIMIT"])):
            self.assertIn(form % value, text)
        for program, words in (
                ("worker.py", "[!-~]{1,200}"),
                ("tool_service.py", "[!-~]{1,255}"),
                ("tool_service.py", "cannot listen on port %d"),
                ("worker.py", "worker.py needs Python 3.8 or later; this is"
                              " Python %d.%d")):
            self.assertIn(words, SOURCES[program])
        self.assertIn("`cannot listen on port %d`" % PORT, text)
        self.assertIn("`worker.py needs Python 3.8 or later; this is Python"
                      " 3.6`", text)


def defaults(source):
    """Give (flag, default) where the default is written out as a constant."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and "add_argument" in ast.dump(
                node.func):
            for keyword in node.keywords:
                if keyword.arg == "default" and isinstance(
                        keyword.value, ast.Constant):
                    yield node.args[0].value, keyword.value.value


# What the walk has: the commands of a terminal, with their exit status and
# their output, or the end of the service.
STEP = re.compile(
    r"^Terminal (?P<terminal>[12])(?P<look>, the same look at both"
    r" databases)?(?:, exit status (?P<status>\d+))?:\n\n"
    r"(?:```sh\n(?P<commands>.*?)^```\n\n)?"
    r"(?:```text\n(?P<output>.*?)^```$)?"
    r"|Terminal 1 has ended, exit status (?P<ended>\d+)\."
    r"|Stop the service", re.MULTILINE | re.DOTALL)
BY_HAND = sections()["By hand, in two terminals"]


def port():
    """Return the walk's port or, if it is in use, another one."""
    for number in (PORT, 0):
        with contextlib.closing(socket.socket()) as probe:
            if os.name == "posix":  # as the service does it
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", number))
                return probe.getsockname()[1]
    raise unittest.SkipTest("no port is free")


class ByHand(Case):
    """The walk, executed as written, block after block."""

    def setUp(self):
        super().setUp()
        for program in PROGRAMS:
            shutil.copy(program, self.folder)
        self.cwd = {"1": self.folder, "2": self.folder}
        self.port = port()
        self.tool = self.looks = None
        self.addCleanup(self.stop)

    def stop(self):
        if self.tool:
            self.tool.kill()
            self.tool.wait(TIMEOUT)
            self.tool.stdout.close()
        self.tool = None

    def arguments(self, command):
        """Return the command as a list: this Python, and a free port."""
        words = shlex.split(command)
        self.assertEqual(words[0], "python3", command)
        extra = []
        if self.port != PORT and "tool_service" in words[1]:
            extra = ["--port", str(self.port)]
        elif self.port != PORT and "worker" in words[1]:
            extra = ["--url", "http://127.0.0.1:%d" % self.port]
        return [sys.executable] + words[1:] + extra

    def start(self, command, output):
        self.assertIsNone(self.tool, "the service is still running")
        with open(self.path("log"), "ab") as log:
            self.tool = subprocess.Popen(
                self.arguments(command), cwd=self.cwd["1"],
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log)
        with killed_after(self.tool, TIMEOUT):
            line = self.tool.stdout.readline().decode("ascii")
        self.assertEqual(line.rstrip(), output.rstrip().replace(
            str(PORT), str(self.port)))

    def execute(self, terminal, commands, status):
        """Run commands one by one; return what they print."""
        printed = ""
        for command in commands.splitlines():
            place = os.path.join(self.cwd[terminal], command.split()[1])
            if command.startswith("mkdir "):
                os.mkdir(place)
            elif command.startswith("cd "):
                self.cwd[terminal] = place
            else:
                words = self.arguments(command)
                done = run(words[1], *words[2:], cwd=self.cwd[terminal])
                self.assertEqual(done.returncode, status, done.stderr)
                printed += done.stdout + done.stderr
        return printed

    def take(self, step):
        if step["ended"]:
            self.assertEqual(self.tool.wait(TIMEOUT), int(step["ended"]))
            self.stop()
        elif not step["terminal"]:
            self.assertIsNone(self.tool.poll())
            self.stop()
        elif "tool_service.py" in (step["commands"] or ""):
            self.start(step["commands"], step["output"])
        else:
            commands = step["commands"]
            if step["look"]:
                commands = self.looks
            elif " -c " in commands:
                self.looks = commands
            self.assertEqual(self.execute(
                step["terminal"], commands, int(step["status"] or 0)),
                step["output"] or "")

    def test_the_walk(self):
        for step in STEP.finditer(BY_HAND):
            with self.subTest(step.group()):
                self.take(step.groupdict())
        self.assertIsNone(self.tool)

    def test_no_block_is_left_out(self):
        steps = list(STEP.finditer(BY_HAND))
        for name, language in (("commands", "sh"), ("output", "text")):
            self.assertEqual(
                [block.text for block in blocks(BY_HAND)
                 if block.language == language],
                [step[name] for step in steps if step[name] is not None])

    def test_commands_mean_the_same_in_four_shells(self):
        for block in blocks(BY_HAND):
            if block.language == "sh":
                self.assertNotRegex(block.text, r"[$`\\!%^&|<>~#]")
                for line in block.text.splitlines():
                    outside = re.sub('"[^"]*"', "", line)
                    self.assertNotRegex(outside, "['\"]")

    def test_the_hashes(self):
        after = README.split("<!-- run in the checkout -->\n")[1]
        command, output = [block.text for block in blocks(after)[:2]]
        words = self.arguments(command)
        done = run(words[1], *words[2:], cwd=ROOT)
        self.assertEqual(done.stdout, output)

    def test_chinese_commands_are_those_of_the_walk(self):
        ours = {line for heading, text in sections().items()
                if heading != CHINESE
                for block in blocks(text) for line in block.text.splitlines()}
        for block in blocks(sections()[CHINESE]):
            for line in block.text.splitlines():
                self.assertIn(line, ours)


class Breaking(Case):

    maxDiff = None

    def test_own_break(self):
        old, new = re.search(r"change `(.*?)` to\s+`(.*?)`", README).groups()
        for name, source in SOURCES.items():
            if name == "worker.py":
                self.assertEqual(source.count(old), 1)
                source = source.replace(old, new)
            with open(self.path(name), "w", encoding="utf-8") as file:
                file.write(source)
        _, block = only(marked("prints: the broken copy"))
        done = run(self.path("verify.py"), "idempotent_after_call")
        self.assertEqual(done.stdout, block.text)
        self.assertEqual(done.returncode, 1)

    def test_table_of_broken_designs(self):
        done = run(os.path.join(ROOT, ".ci", "broken_designs.py"))
        self.assertEqual(done.returncode, 0, done.stderr)
        after = README.split("<!-- table: .ci/broken_designs.py -->\n")[1]
        self.assertEqual(after.split("\n\n")[0] + "\n", done.stdout)


ROW = re.compile(r"^(\|?) +(\w*) +(\d+)  (.*?) +([12-]) +([12-])$")


class CrashMap(unittest.TestCase):
    """The excerpt, held to the source and, where the sweep has been made in
    this process, to what it found. A sweep for this alone takes too long."""

    maxDiff = None

    def setUp(self):
        self.window, self.totals = [
            block.text for _, block in marked(
                "from the output of .ci/crash_map.py")]

    def test_rows_are_those_of_the_source(self):
        source = SOURCES["worker.py"].splitlines()
        opens, *lines, closes = self.window.splitlines()
        self.assertRegex(opens, "window opens")
        self.assertRegex(closes, "window closes")
        for line in lines:
            _, name, number, code, naive, keyed = ROW.match(line).groups()
            start = code[:-3] if code.endswith("...") else code
            text = source[int(number) - 1].strip()
            self.assertTrue(text.startswith(start), line)
            self.assertEqual((naive, keyed), ("2", "1"), line)
            if name:
                self.assertIn(text, function("worker.py", name))

    def test_keyed_retry_has_no_duplicate(self):
        _, naive, *others = self.totals.splitlines()
        self.assertRegex(naive, r"naive.* [1-9]\d*$")
        for line in others:
            self.assertRegex(line, r"keyed.* 0$")

    def test_excerpt_is_what_the_sweep_gives(self):
        sweep = getattr(sys.modules.get("test_crash_sweep"), "CrashSweep", 0)
        if not hasattr(sweep, "sweeps"):
            self.skipTest("test_crash_sweep.py has not run before")
        python = re.match(r"CPython 3\.\d+", self.totals).group()
        version = platform.python_version()
        here = "%s %s" % (platform.python_implementation(), version)
        if not (here + ".").startswith(python + "."):
            self.skipTest("the README's map is of " + python)
        given = crash_map.draw(sweep.sweeps, WORKER).splitlines()
        opens, closes = [number for number, line in enumerate(given)
                         if line.startswith("+----")]
        self.assertEqual(self.window.splitlines(), given[opens:closes + 1])
        first, *others = self.totals.splitlines()
        self.assertEqual(first.split()[2:], given[-5].split()[2:])
        self.assertEqual(others, given[-4:])


# The part of Mermaid's sequence diagrams that is used here.
MERMAID = (
    r"    (box) [\w ,]+",
    r"    (end)",
    r"    participant (?P<name>\w) as [\w.]+",
    r"    (?P<from>\w)(->>|-->>|--x)(?P<to>\w): [^;#:]+",
    r"    Note over (?P<over>\w(,\w)?): [^;#]+")


class Form(unittest.TestCase):

    def test_diagrams(self):
        found = [block.text for block in blocks()
                 if block.language == "mermaid"]
        self.assertEqual(len(found), 3)
        for text in found:
            first, *lines = text.splitlines()
            self.assertEqual(first, "sequenceDiagram")
            self.parse(lines)

    def parse(self, lines):
        names, depth = [], 0
        for line in lines:
            match = only(match for match in (
                re.match(form + "$", line) for form in MERMAID) if match)
            depth += {"box": 1, "end": -1}.get(match.group(1), 0)
            self.assertIn(depth, (0, 1), line)
            parts = match.groupdict()
            if parts.get("name"):
                self.assertNotIn(parts["name"], names)
                names.append(parts["name"])
            for used in ("from", "to", "over"):
                for name in (parts.get(used) or "").split(","):
                    self.assertIn(name, names + [""], line)
        self.assertEqual(depth, 0)

    def test_links(self):
        text = prose()
        slugs = {slug(heading) for heading in re.findall(
            r"^#+ (.*)$", prose(), re.MULTILINE)}
        links = re.findall(r"\]\(([^)\s]+)\)", text)
        self.assertGreater(len(links), 20)
        for link in links:
            if link.startswith("#"):
                self.assertIn(link[1:], slugs)
            elif not link.startswith("https://"):
                self.assertTrue(os.path.exists(os.path.join(ROOT, link)),
                                link)

    def test_named_files_exist(self):
        for name in re.findall(r"python3 (\.?[a-z][\w./]*\.py)", README):
            self.assertTrue(os.path.exists(os.path.join(ROOT, name)), name)

    def test_details(self):
        # Without the blank line, GitHub shows Markdown as text.
        text = prose()
        parts = re.findall(r"^<details>\n<summary>[^\n]+</summary>\n\n"
                           r"(?:(?!</?details>).)*\n\n</details>$",
                           README, re.MULTILINE | re.DOTALL)
        self.assertEqual(len(parts), text.count("<details>"))
        self.assertEqual(len(parts), text.count("</details>"))

    def test_sections_end_with_the_chinese_one(self):
        self.assertEqual(list(sections())[-1], CHINESE)

    def test_length_of_the_story(self):
        story = README.split("\n## Snippets")[0]
        story = re.sub("(?s)<details>.*?</details>", "", story)
        self.assertLess(len(prose(story).split()), MAX_STORY)

    def test_tables_are_even(self):
        for table in re.findall(r"(?:^\|.*\n)+", prose(), re.MULTILINE):
            widths = {line.count("|") for line in table.splitlines()}
            self.assertEqual(len(widths), 1, table)


def slug(heading):
    """Return the anchor that GitHub gives to a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


if __name__ == "__main__":
    unittest.main()
