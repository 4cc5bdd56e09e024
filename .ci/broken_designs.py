"""Would verify.py notice if the lab were wrong? A table of broken designs.

Each is a small edit to a copy of worker.py or tool_service.py, with the
scenarios that must turn red for it. test_broken_designs.py tries them all.

    python3 .ci/broken_designs.py    # the table, as Markdown
"""
import collections
import os
import re

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
WORKER, TOOL = "worker.py", "tool_service.py"

# The scenarios, in the order of verify.py.
SCENARIOS = (
    NAIVE, IDEMPOTENT, BEFORE_CALL, CHECKPOINT, BEFORE_COMMIT, AFTER_COMMIT,
    SAME_KEY, EIGHT, TWO_KEYS, CHANGED) = (
    "naive_after_call", "idempotent_after_call", "worker_before_call",
    "worker_after_checkpoint", "tool_before_commit",
    "tool_after_commit_before_response", "same_key_changed_payload",
    "eight_concurrent_requests", "same_payload_different_keys",
    "changed_persisted_intent")

# edits: (place, old, new). In the place, a function or a constant of the file,
# old occurs exactly once. The lines of new after its first are indented like
# the line where old begins.
Design = collections.namedtuple("Design", "name file edits red")

# Places and lines that several designs move, repeat or take apart.
STEP, CREATE = "run_step", "create_ticket"
CRASH_BEFORE_CALL = 'crash_point("before-call", args.crash)'
CRASH_AFTER_CALL = 'crash_point("after-call", args.crash)'
CRASH_AFTER_CHECKPOINT = 'crash_point("after-checkpoint", args.crash)'
CRASH_BEFORE_COMMIT = 'crash_point("before-commit", crash)'
CRASH_AFTER_COMMIT = 'crash_point("after-commit", crash)'
SAVE_INTENT = "step = save_intent(args.db, wanted)"
CALL = "status, body, replayed = call_tool(args.url, step.payload, key)"
SAVE_RESULT = "save_result(args.db, args.run_id, text)"
BEGIN, COMMIT = 'db.execute("BEGIN IMMEDIATE")', 'db.execute("COMMIT")'
REPLAY = "return known[1], True"
REPLAY_HEADER = '{"Idempotent-Replayed": "true"} if replayed else {}'
INSERT_TICKET = '"INSERT INTO tickets (title) VALUES (?)", (title,))'
INSERT_RECEIPT = 'db.execute("INSERT INTO receipts VALUES (?, ?, ?)", receipt)'


def on_loss(*handler):
    """Return the edit that handles a lost connection in run_step."""
    return (STEP, CALL, "\n".join(
        ("try:", "    " + CALL,
         "except http.client.RemoteDisconnected as error:") + handler))


# After save_intent, because before it there may be no table to write to.
WRITE_OVER = (
    SAVE_INTENT + "\n"
    "if args.title is not None:\n"
    "    with open_database(args.db) as db:\n"
    '        db.execute("UPDATE steps SET payload = ?", (wanted.payload,))\n')

DESIGNS = [
    # worker.py: the key and the mode
    Design("a new key at each attempt", WORKER,
           [(STEP, "else step.operation_key", "else os.urandom(8).hex()")],
           [IDEMPOTENT, BEFORE_CALL, CHECKPOINT, BEFORE_COMMIT,
            AFTER_COMMIT]),
    Design("a key made of the parameters instead of the run", WORKER,
           [(STEP, "else step.operation_key",
             "else step.payload.encode().hex()")],
           [IDEMPOTENT, BEFORE_CALL, CHECKPOINT, BEFORE_COMMIT,
            AFTER_COMMIT]),
    Design("the key left out of the request", WORKER,
           [("call_tool", 'headers["Idempotency-Key"] = key', "pass")],
           [IDEMPOTENT, BEFORE_CALL, CHECKPOINT, BEFORE_COMMIT,
            AFTER_COMMIT]),
    Design("the key sent in mode naive, too", WORKER,
           [(STEP, 'None if step.mode == "naive" else step', "step")],
           [NAIVE]),
    Design("a resume in the default mode, not in the saved one", WORKER,
           [(STEP, 'step.mode == "naive"', 'wanted.mode == "naive"')],
           [NAIVE]),

    # worker.py: what is saved, and when
    Design("the intent saved only after the call", WORKER,
           [("save_intent", "if saved is None:",
             "if saved is None and wanted.response:"),
            (STEP, SAVE_RESULT,
             "save_intent(args.db, wanted._replace(\n"
             '    status="done", response=text))')],
           [NAIVE, IDEMPOTENT, BEFORE_CALL, BEFORE_COMMIT, AFTER_COMMIT,
            CHANGED]),
    Design("'done' saved before the call", WORKER,
           [(STEP, CALL, "save_result(args.db, args.run_id, None)\n" + CALL)],
           [NAIVE, IDEMPOTENT, BEFORE_COMMIT, AFTER_COMMIT]),
    Design("'done' never saved", WORKER,
           [("save_result", "status = 'done',", "status = 'pending',")],
           [NAIVE, IDEMPOTENT, BEFORE_CALL, CHECKPOINT, BEFORE_COMMIT,
            AFTER_COMMIT]),
    Design("'done' saved without the tool's answer", WORKER,
           [("save_result", "(text, run_id)", "(None, run_id)")],
           [IDEMPOTENT, BEFORE_CALL, CHECKPOINT, BEFORE_COMMIT,
            AFTER_COMMIT]),
    Design("the intent saved anew together with the answer", WORKER,
           [("save_result", "status = 'done',",
             "status = 'done', payload = '{}',")],
           [NAIVE, IDEMPOTENT, BEFORE_CALL, CHECKPOINT, BEFORE_COMMIT,
            AFTER_COMMIT]),

    # worker.py: a resume
    Design("a done step that calls the tool all the same", WORKER,
           [(STEP, 'if step.status == "done":', "if False:")],
           [CHECKPOINT]),
    Design("a pending step skipped on resume", WORKER,
           [("save_intent", "return Step(*(saved or wanted))",
             "if saved:\n"
             '    none = \'{"ticket_id": 0, "title": ""}\'\n'
             '    saved = saved[:4] + ("done", saved[5] or none)\n'
             "return Step(*(saved or wanted))")],
           [NAIVE, IDEMPOTENT, BEFORE_CALL, BEFORE_COMMIT, AFTER_COMMIT]),
    Design("a resume with the default parameters, not the saved ones", WORKER,
           [(STEP, "step.payload, key)", "wanted.payload, key)")],
           [NAIVE, IDEMPOTENT, BEFORE_CALL, BEFORE_COMMIT, AFTER_COMMIT]),
    Design("new parameters accepted on resume", WORKER,
           [("refuse_changes", "args.title is not None", "False"),
            (STEP, "step.payload, key)",
             "(wanted if args.title else step).payload, key)")],
           [CHANGED]),
    Design("new parameters silently ignored on resume", WORKER,
           [("refuse_changes", "args.title is not None", "False")],
           [CHANGED]),
    Design("new parameters written over the saved ones", WORKER,
           [(STEP, SAVE_INTENT, WRITE_OVER
             + "    step = step._replace(payload=wanted.payload)")],
           [CHANGED]),
    Design("new parameters refused, but written over the saved ones", WORKER,
           [(STEP, SAVE_INTENT, WRITE_OVER)],
           [CHANGED]),
    # worker.py: a lost connection
    Design("a lost connection taken for success", WORKER,
           [on_loss("    status, replayed = 201, False",
                    '    body = b\'{"ticket_id": 1, "title": ""}\'')],
           [BEFORE_COMMIT, AFTER_COMMIT]),
    Design("a lost connection taken for a refusal", WORKER,
           [on_loss("    raise ToolRefused(str(error))")],
           [BEFORE_COMMIT, AFTER_COMMIT]),
    Design("a lost connection ends the step", WORKER,
           [on_loss("    save_result(args.db, args.run_id, None)",
                    "    raise")],
           [BEFORE_COMMIT, AFTER_COMMIT]),

    # worker.py: the crash points
    Design("crash point before-call moved before the saved intent", WORKER,
           [(STEP, SAVE_INTENT, CRASH_BEFORE_CALL + "\n" + SAVE_INTENT)],
           [BEFORE_CALL, CHANGED]),
    Design("crash point after-call moved behind the saved answer", WORKER,
           [(STEP, CRASH_AFTER_CALL, "pass"),
            (STEP, SAVE_RESULT, SAVE_RESULT + "\n" + CRASH_AFTER_CALL)],
           [NAIVE, IDEMPOTENT]),
    Design("crash point after-checkpoint moved before the saved answer",
           WORKER,
           [(STEP, SAVE_RESULT, CRASH_AFTER_CHECKPOINT + "\n" + SAVE_RESULT)],
           [CHECKPOINT]),

    # tool_service.py: the ticket, its receipt and their transaction
    # The exclusive lock lasts from one transaction to the next: whether
    # another request gets in between must not be left to chance here.
    Design("the ticket committed before its receipt", TOOL,
           [(CREATE, "if key is not None:",
             'db.execute("PRAGMA locking_mode = EXCLUSIVE")\n'
             + COMMIT + "\n" + BEGIN + "\nif key is not None:")],
           [BEFORE_COMMIT]),
    Design("the receipt committed before its ticket", TOOL,
           [(CREATE, INSERT_TICKET + ".lastrowid",
             '"SELECT count(*) + 1 FROM tickets").fetchone()[0]'),
            (CREATE, CRASH_BEFORE_COMMIT,
             COMMIT + "\n" + BEGIN + "\n"
             'db.execute("INSERT INTO tickets VALUES (?, ?)",\n'
             "           (ticket_id, title))\n" + CRASH_BEFORE_COMMIT)],
           [BEFORE_COMMIT]),
    Design("no transaction: each statement commits by itself", TOOL,
           [(CREATE, BEGIN, "pass"), (CREATE, COMMIT, "pass")],
           [BEFORE_COMMIT, EIGHT]),
    Design("an answer without a commit", TOOL,
           [(CREATE, COMMIT, "pass")],
           [NAIVE, IDEMPOTENT, BEFORE_CALL, CHECKPOINT, BEFORE_COMMIT,
            AFTER_COMMIT, SAME_KEY, EIGHT, TWO_KEYS]),
    Design("the look-up outside the write transaction", TOOL,
           [(CREATE, BEGIN, "pass"),
            (CREATE, "ticket_id = ", BEGIN + "\nticket_id = ")],
           [EIGHT]),
    Design("a plain BEGIN", TOOL,
           [(CREATE, BEGIN, 'db.execute("BEGIN")')],
           [EIGHT]),
    Design("receipts kept in memory", TOOL,
           [(CREATE, "crash=None):", "crash=None, receipts={}):"),
            (CREATE, "if known:", "known = receipts.get(key)\nif known:"),
            (CREATE, INSERT_RECEIPT, "receipts[key] = receipt[1:]")],
           [IDEMPOTENT, BEFORE_CALL, CHECKPOINT, BEFORE_COMMIT, AFTER_COMMIT,
            SAME_KEY, EIGHT, TWO_KEYS]),
    # tool_service.py: which requests are the same operation
    Design("deduplication by parameters instead of by key", TOOL,
           [(CREATE, '" WHERE operation_key = ?", (key,)',
             '" WHERE payload = ?", (payload,)')],
           [SAME_KEY, TWO_KEYS]),
    Design("another payload under a known key: the old ticket", TOOL,
           [(CREATE, "refuse(known[0] != payload,", "refuse(False,")],
           [SAME_KEY]),
    Design("another payload under a known key: a new ticket", TOOL,
           [(CREATE, "if known:", "if known and known[0] == payload:"),
            (CREATE, "INTO receipts", "OR REPLACE INTO receipts")],
           [SAME_KEY]),
    Design("another payload under a known key: 200 and nothing", TOOL,
           [(CREATE, "!= payload, 409,", "!= payload, 200,")],
           [SAME_KEY]),
    # tool_service.py: the replay
    Design("the replay header missing", TOOL,
           [("answer", REPLAY_HEADER, "{}")],
           [IDEMPOTENT, AFTER_COMMIT, EIGHT]),
    Design("the replay header always there", TOOL,
           [("answer", REPLAY_HEADER, '{"Idempotent-Replayed": "true"}')],
           [NAIVE, BEFORE_CALL, BEFORE_COMMIT, SAME_KEY, EIGHT, TWO_KEYS]),
    Design("a replay with a fresh body", TOOL,
           [(CREATE, REPLAY,
             "return json.dumps(json.loads(known[1]), indent=1), True")],
           [IDEMPOTENT, AFTER_COMMIT, EIGHT]),
    Design("a replay that makes a second ticket all the same", TOOL,
           [(CREATE, REPLAY, "db.execute(" + INSERT_TICKET + "\n" + COMMIT
             + "\n" + REPLAY)],
           [IDEMPOTENT, AFTER_COMMIT, EIGHT]),

    # tool_service.py: the crash points
    Design("crash point before-commit moved behind the commit", TOOL,
           [(CREATE, CRASH_BEFORE_COMMIT, "pass"),
            (CREATE, CRASH_AFTER_COMMIT,
             CRASH_BEFORE_COMMIT + "\n" + CRASH_AFTER_COMMIT)],
           [BEFORE_COMMIT]),
    Design("crash point after-commit moved before the commit", TOOL,
           [(CREATE, CRASH_BEFORE_COMMIT,
             CRASH_BEFORE_COMMIT + "\n" + CRASH_AFTER_COMMIT)],
           [AFTER_COMMIT]),
    Design("crash point after-commit moved behind the response", TOOL,
           [(CREATE, CRASH_AFTER_COMMIT, "pass"),
            ("send_json", 'self.wfile.write(text.encode("ascii"))',
             'self.wfile.write(text.encode("ascii"))\n'
             "if status == 201:\n"
             "    self.wfile.flush()\n"
             '    crash_point("after-commit", self.server.crash)')],
           [AFTER_COMMIT]),
]


def read_source(folder, name):
    with open(os.path.join(folder, name), encoding="utf-8") as source:
        return source.read()


def apply_edits(text, design):
    """Return the text with the design's edits in it.

    Raises LookupError, which names design and text, where an old text is
    not there exactly once.
    """
    for place, old, new in design.edits:
        start, end = find_place(text, place)
        if text.count(old, start, end) != 1:
            raise LookupError("%s: %s in %s holds %d times and not once: %s"
                              % (design.name, place, design.file,
                                 text.count(old, start, end), old))
        at = text.index(old, start, end)
        line = text[text.rfind("\n", 0, at) + 1:]
        indent = line[:len(line) - len(line.lstrip(" "))]
        text = (text[:at] + new.replace("\n", "\n" + indent)
                + text[at + len(old):])
    return text


def find_place(text, name):
    """Return where a function or a constant begins and ends; 0, 0 if none.

    It ends before the next line that is indented no deeper.
    """
    found = re.search(r"^( *)(?:def %s\(|%s = ).*\n(?:\1 +.*\n|\n)*"
                      % (name, name), text, re.MULTILINE)
    return found.span() if found else (0, 0)


def print_markdown():
    print("| design | what is changed | scenarios that turn red |")
    print("| --- | --- | --- |")
    for design in DESIGNS:
        # A dict keeps the order, and each place once.
        places = dict.fromkeys(place for place, _, _ in design.edits)
        print("| %s | %s: %s | %s |" % (
            design.name, design.file,
            ", ".join("`%s`" % place for place in places),
            ", ".join("`%s`" % name for name in design.red)))


if __name__ == "__main__":
    print_markdown()
