"""verify.py on copies of the lab that are wrong: exactly what must turn red
does, and the evidence stays as it was. With -v, why each scenario failed.
"""
import concurrent.futures
import glob
import os
import re
import shutil
import sys
import unittest

from broken_designs import DESIGNS, SCENARIOS, apply_edits, read_source
from support import PROGRAMS, ROOT, Case, run

SIDE_BY_SIDE = (os.cpu_count() or 1) + 1  # runs of verify.py
JOBS = "2"  # scenarios side by side in each
VERBOSE = "-v" in sys.argv or "--verbose" in sys.argv
# A design must fail for what it is, and not for a slip in its edit.
SLIP = re.compile("Traceback|(?:Name|UnboundLocal|Type|Attribute|Value)Error")


class BrokenDesigns(Case):
    def setUp(self):
        # Every copy is made from this one: a change to the lab while the
        # designs are being tried must not mix with theirs.
        super().setUp()
        self.lab = self.path("lab")
        os.mkdir(self.lab)
        for program in PROGRAMS:
            shutil.copy(program, self.lab)
        shutil.copytree(os.path.join(ROOT, "evidence"),
                        os.path.join(self.lab, "evidence"))

    def verify(self, folder):
        return run(os.path.join(folder, "verify.py"), "--jobs", JOBS,
                   "--keep", os.path.join(folder, "kept"))

    def try_design(self, number, design):
        """Run verify.py on a copy with the edits; return (folder, done)."""
        broken = apply_edits(read_source(self.lab, design.file), design)
        compile(broken, design.name, "exec")
        folder = self.path("design %d" % number)
        shutil.copytree(self.lab, folder)
        with open(os.path.join(folder, design.file), "w", encoding="utf-8",
                  newline="\n") as program:
            program.write(broken)
        return folder, self.verify(folder)

    def test_every_design_turns_exactly_its_scenarios_red(self):
        with concurrent.futures.ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
            runs = [pool.submit(self.try_design, *item)
                    for item in enumerate(DESIGNS)]
        for design, future in zip(DESIGNS, runs):
            with self.subTest(design.name):
                folder, done = future.result()
                if VERBOSE:
                    print("\n%s" % design.name,
                          *re.findall("FAIL.*", done.stdout), sep="\n  ")
                self.check(design, folder, done)

    def check(self, design, folder, done):
        self.assertEqual(verdicts(done.stdout), [
            ("FAIL" if name in design.red else "PASS", name)
            for name in SCENARIOS], done.stdout + done.stderr)
        self.assertEqual(done.returncode, 1)
        self.assertNotIn("Traceback", done.stderr)
        self.assertEqual(contents(os.path.join(folder, "evidence")),
                         contents(os.path.join(self.lab, "evidence")))
        for path in glob.glob(os.path.join(folder, "kept", "*", "*.log")):
            with open(path, encoding="utf-8", errors="replace") as log:
                self.assertNotRegex(log.read(), SLIP)

    def test_the_unbroken_copy_is_green(self):
        done = self.verify(self.lab)
        self.assertEqual(verdicts(done.stdout), [
            ("PASS", name) for name in SCENARIOS])
        self.assertEqual(done.returncode, 0)

    def test_a_text_that_is_not_found_once_is_an_error(self):
        design = DESIGNS[0]._replace(
            edits=[(DESIGNS[0].edits[0][0], "old", "new")])
        for text in ("", "old old"):
            with self.assertRaisesRegex(LookupError, design.name):
                apply_edits(text, design)

    def test_the_table_is_in_order(self):
        names = [design.name for design in DESIGNS]
        self.assertEqual(len(set(names)), len(names))
        for design in DESIGNS:
            self.assertNotEqual(design.red, [], design.name)
            self.assertEqual(
                design.red, sorted(set(design.red), key=SCENARIOS.index))


def verdicts(output):
    """Return the verdict and the name in each line, as pairs."""
    return [tuple(line.split(":")[0].split(" ", 1))
            for line in output.splitlines()]


def contents(folder):
    """Return what every file in a folder holds, by name."""
    found = {}
    for name in os.listdir(folder):
        with open(os.path.join(folder, name), "rb") as file:
            found[name] = file.read()
    return found


if __name__ == "__main__":
    unittest.main()
