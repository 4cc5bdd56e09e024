"""What if it dies somewhere else? Every executed line is a crash point.

crash_map.py kills the programs and recovers them; here is what must be true
of every single death. A failure lists the deaths that break the claim, each
with its n and its source line.
"""
import platform
import re
import shutil
import tempfile
import unittest

import crash_map
from support import TOOL, WORKER, Case, run

AFTER_CALL = 72  # exit status of worker.py --crash after-call


class CrashSweep(unittest.TestCase):
    """One sweep of both programs, shared by all tests."""

    maxDiff = None

    @classmethod
    def setUpClass(cls):
        folder = tempfile.mkdtemp(prefix="lab sweep ")
        try:
            cls.sweeps = crash_map.sweep_all(WORKER, TOOL, folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        with open(WORKER, encoding="utf-8") as source:
            cls.source = source.read()

    def expect(self, deaths, claim):
        """Fail with the deaths of which the claim is not true."""
        self.assertGreater(len(deaths), 0)
        self.assertEqual([death for death in deaths if not claim(death)], [])

    def window(self):
        """The crash points from the request to the checkpoint's COMMIT."""
        opens, closes = crash_map.window(self.sweeps.naive, self.source)
        return range(opens.n, closes.n + 1)

    def test_every_death_was_one_and_one_run_got_through(self):
        naive, keyed, twice, tool = self.sweeps
        for sweep in (naive, keyed):
            self.expect(sweep.deaths,
                        lambda death: death.exits == [crash_map.DEAD, 0])
            self.assertEqual(sweep.through.exits, [0, 0])
        self.expect(twice.deaths, lambda death: death.exits
                    == [AFTER_CALL, crash_map.DEAD, 0])
        self.assertEqual(twice.through.exits, [AFTER_CALL, 0, 0])
        # The tool dies; its worker sees a lost answer or a whole one.
        self.expect(tool.deaths + [tool.through], lambda death: death.exits
                    == [0 if death.found == "done" else 5, 0])

    def test_every_recovery_ends_well(self):
        for sweep in self.sweeps:
            self.expect(sweep.deaths + [sweep.through], crash_map.recovered)

    def test_keyed_retry_leaves_one_ticket_and_one_receipt(self):
        for sweep in (self.sweeps.keyed, self.sweeps.twice, self.sweeps.tool):
            self.expect(sweep.deaths + [sweep.through], lambda death: (
                death.tickets, death.receipts) == (1, 1))

    def test_naive_retry_leaves_one_ticket_or_two(self):
        self.expect(self.sweeps.naive.deaths, lambda death: (
            death.tickets in (1, 2) and death.receipts == 0))
        self.assertEqual(self.sweeps.naive.through.tickets, 1)

    def test_naive_retry_duplicates_in_the_window_and_nowhere_else(self):
        self.assertEqual([death.n for death in self.sweeps.naive.deaths
                          if death.tickets == 2], list(self.window()))

    def test_outside_the_window_naive_and_keyed_agree(self):
        window = self.window()
        outside = [death for death in self.sweeps.naive.deaths
                   if death.n not in window]
        for deaths in (outside, self.sweeps.keyed.deaths):
            self.expect(deaths, lambda death: (
                death.tickets, death.checkpoint) == (1, "done"))

    def test_in_the_window_the_checkpoint_says_pending(self):
        window = self.window()
        self.expect(self.sweeps.naive.deaths, lambda death: (
            death.n not in window or death.found == "pending"))
        # The window alone cannot tell: pending is older than the request.
        self.assertEqual(self.sweeps.naive.deaths[window[0] - 2].found,
                         "pending")

    def test_no_request_leaves_before_its_intent_is_saved(self):
        for sweep in self.sweeps[:3]:
            self.expect(sweep.deaths, lambda death: (
                death.n < sweep.opens or death.found))

    def test_a_missing_landmark_is_no_window(self):
        naive = self.sweeps.naive
        for sweep, source in (
                (naive._replace(opens=None), self.source),
                (naive, self.source.replace("COMMIT", "END"))):
            with self.assertRaises(crash_map.SweepFailed):
                crash_map.window(sweep, source)

    def test_map_shows_the_window_in_one_piece(self):
        text = crash_map.draw(self.sweeps, WORKER).splitlines()
        opens, closes = [text.index(line) for line in text
                         if line.startswith("+---- the window ")]
        self.assertIn("opens", text[opens])
        self.assertIn("closes", text[closes])
        for number, line in enumerate(text):
            if opens < number < closes:
                self.assertRegex(line, r"^\| .* 2 +[1-]$")
            else:
                self.assertNotRegex(line, r"^\|| 2 +[0-9-]$")

    def test_map_quotes_the_lines_of_the_source(self):
        text = crash_map.draw(self.sweeps, WORKER)
        quoted = re.findall(r"^[ |] .{15} {1,4}(\d+)  (.*?) +[12-] +[12-]$",
                            text, re.MULTILINE)
        self.assertGreater(len(quoted), 0)
        source = self.source.splitlines()
        for number, code in quoted:
            start = code[:-3] if code.endswith("...") else code
            self.assertIn(start, source[int(number) - 1])

    def test_map_ends_with_the_totals_and_their_python(self):
        text = crash_map.draw(self.sweeps, WORKER).splitlines()[-5:]
        self.assertIn(platform.python_version(), text[0])
        window = len(self.window())
        for line, sweep, duplicates in zip(text[1:], self.sweeps,
                                           (window, 0, 0, 0)):
            swept = len(sweep.deaths)
            self.assertEqual([int(word) for word in line.split()[-3:]],
                             [swept, swept, duplicates])

    def test_map_fits_an_article(self):
        text = crash_map.draw(self.sweeps, WORKER)
        self.assertTrue(text.endswith("\n"))
        for line in text.splitlines():
            self.assertRegex(line, r"^([ -~]{0,78}[!-~])?$")


class Arguments(Case):
    """What crash_map.py says when it cannot begin."""

    def test_help(self):
        done = run(crash_map.HERE, "--help", cwd=self.folder)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertIn("--worker", done.stdout)

    def test_no_such_program(self):
        done = run(crash_map.HERE, "--tool", "nowhere.py", cwd=self.folder)
        self.assertEqual((done.returncode, done.stdout), (2, ""))
        self.assertIn("nowhere.py is not a file", done.stderr)

    def test_a_tool_that_does_not_start(self):
        with open(self.path("tool.py"), "w") as program:
            program.write("raise SystemExit(1)\n")
        done = run(crash_map.HERE, "--tool", "tool.py", cwd=self.folder)
        self.assertEqual((done.returncode, done.stdout), (1, ""))
        self.assertRegex(done.stderr, "^crash_map.py: .*\n$")


if __name__ == "__main__":
    unittest.main()
