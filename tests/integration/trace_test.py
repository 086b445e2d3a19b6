"""`tandem trace` records a running server: both sides of every layer, on one clock, in a file that viewers take."""

import collections
import json
import os
import pathlib
import subprocess
import tempfile
import threading
import time
import unittest

import harness

TANDEM = str(harness.BIN / "tandem")
LAYERS = json.loads((harness.TINY / "config.json").read_text())["num_hidden_layers"]


def trace(*arguments, timeout=90):
    return subprocess.run([TANDEM, "trace", *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True,
                          timeout=timeout)


class Load:
    """Answers are generated as long as it lives."""

    def __init__(self, server):
        self.server = server
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self.run)

    def run(self):
        while not self.stopped.is_set():
            self.server.post("/v1/chat/completions", harness.chat("Tell me a story.", ignore_eos=True, max_tokens=64))

    def __enter__(self):
        self.thread.start()

    def __exit__(self, *_):
        self.stopped.set()
        self.thread.join()


class Timeline:
    """A trace file, with what viewers rely on checked."""

    def __init__(self, test, path):
        self.test = test
        self.events = harness.strict_json(pathlib.Path(path).read_bytes())["traceEvents"]
        names = {e["pid"]: e["args"]["name"].split(" ")[0] for e in self.events if e["name"] == "process_name"}
        self.tracks = {}  # (process, track) -> events
        threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in self.events if e["name"] == "thread_name"}
        for event in self.events:
            if event["ph"] == "X":
                self.tracks.setdefault((names[event["pid"]], threads[event["pid"], event["tid"]]), []).append(event)
        self.processes = set(names.values())

    def check_nesting(self):
        """Events of a track lie beside or within each other; times have three decimals of a microsecond."""
        for track, events in self.tracks.items():
            open_ends = []
            for event in sorted(events, key=lambda e: (ns(e["ts"]), -ns(e["dur"]))):
                begin, end = ns(event["ts"]), ns(event["ts"]) + ns(event["dur"])
                self.test.assertGreaterEqual(begin, 0)
                self.test.assertGreaterEqual(end, begin)
                while open_ends and open_ends[-1] <= begin:
                    open_ends.pop()
                if open_ends:
                    self.test.assertLessEqual(end, open_ends[-1], (track, event))
                open_ends.append(end)

    def check_arrows(self):
        begins = {e["id"]: e for e in self.events if e["ph"] == "s"}
        ends = {e["id"]: e for e in self.events if e["ph"] == "f"}
        self.test.assertEqual(begins.keys(), ends.keys())
        self.test.assertGreater(len(begins), 0)
        for key, begin in begins.items():
            self.test.assertNotEqual(begin["pid"], ends[key]["pid"])

    def whole(self, events):
        """Those that began and ended while every process was recorded."""
        spans = {}  # process -> first begin, last end
        for (process, _), of_track in self.tracks.items():
            first, last = spans.get(process, (1 << 62, 0))
            spans[process] = (min([first] + [ns(e["ts"]) for e in of_track]),
                              max([last] + [ns(e["ts"]) + ns(e["dur"]) for e in of_track]))
        first, last = max(s[0] for s in spans.values()), min(s[1] for s in spans.values())
        return [e for e in events if ns(e["ts"]) >= first and ns(e["ts"]) + ns(e["dur"]) <= last]

    def named(self, process, name):
        return [e for (of, _), events in self.tracks.items() if of == process for e in events if e["name"] == name]


def ns(microseconds):
    return round(microseconds * 1000)


class Trace(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.server = harness.Server()
        cls.run_dir = cls.server.run_directory()

    @classmethod
    def tearDownClass(cls):
        cls.server.stop()

    def setUp(self):
        directory = tempfile.TemporaryDirectory(prefix="tandem-trace-")
        self.addCleanup(directory.cleanup)
        self.out = os.path.join(directory.name, "trace.json")

    def record(self, seconds):
        done = trace(f"--seconds={seconds}", f"--out={self.out}", f"--run-dir={self.run_dir}")
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout

    def test_both_sides_of_every_layer_are_in_it(self):
        for seconds in (0.5, 2, 8):  # a busy machine has few steps in half a second
            with Load(self.server):
                printed = self.record(seconds)
            timeline = Timeline(self, self.out)
            if len(timeline.whole(timeline.named("gpu_worker", "step"))) > 8:
                break
        self.assertEqual(timeline.processes, {"gateway", "gpu_worker", "expert_worker"})
        timeline.check_nesting()
        timeline.check_arrows()
        recorded = timeline.named("gpu_worker", "step")
        self.assertIn(f"{len(recorded)} steps", printed)
        steps = {e["args"]["step"]: e for e in timeline.whole(recorded)}
        self.assertGreater(len(steps), 3)
        self.assertIn("expert_worker", printed)
        for name in ("attention", "router", "submit", "shared experts", "wait", "experts"):
            process = "expert_worker" if name == "experts" else "gpu_worker"
            layers = collections.defaultdict(set)
            for event in timeline.named(process, name):
                step = steps.get(event["args"]["step"])
                if step is None:
                    continue
                layers[event["args"]["step"]].add(event["args"]["layer"])
                if name == "experts":
                    # One clock: the experts of a step compute while it runs.
                    self.assertGreaterEqual(ns(event["ts"]), ns(step["ts"]))
                    self.assertLessEqual(ns(event["ts"] + event["dur"]), ns(step["ts"] + step["dur"]))
            if name == "shared experts" and not layers:
                continue  # the model has none
            self.assertEqual(set(layers), set(steps), name)
            self.assertEqual({len(of) for of in layers.values()}, {LAYERS}, name)
        for name in ("head", "sampling"):
            self.assertGreater(len(set(steps) & {e["args"]["step"] for e in timeline.named("gpu_worker", name)}), 3)
        gateway_steps = {e["args"]["step"] for e in timeline.named("gateway", "step out")}
        self.assertGreater(len(gateway_steps & {e["args"]["gateway_step"] for e in steps.values()}), 3)
        for name in ("schedule", "send step", "detokenize"):
            self.assertGreater(len(timeline.named("gateway", name)), 0, name)

    def test_an_idle_server_gives_an_empty_timeline(self):
        self.assertIn("0 steps", self.record(0.05))
        Timeline(self, self.out).check_nesting()

    def test_one_trace_at_a_time(self):
        first = subprocess.Popen([TANDEM, "trace", "--seconds=60", f"--out={self.out}", f"--run-dir={self.run_dir}"],
                                 stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        try:
            self.assertIn("recording 3 processes", first.stderr.readline())
            second = trace("--seconds=0.001", f"--out={self.out}.other", f"--run-dir={self.run_dir}")
            self.assertEqual(second.returncode, 1)
            self.assertIn("already", second.stderr)
            self.assertIn(self.run_dir, second.stderr)
        finally:
            first.terminate()
            first.wait()
            first.stderr.close()
        # Its recording ends with it.
        self.assertEqual(self.until(lambda done: done.returncode == 0).returncode, 0)

    def until(self, accepts):
        """Traces shortly, again and again, until `accepts` does; the last outcome."""
        deadline = time.monotonic() + 30
        while True:
            done = trace("--seconds=0.001", f"--out={self.out}.other", f"--run-dir={self.run_dir}")
            if accepts(done) or time.monotonic() > deadline:
                return done

    def test_what_cannot_be_done_is_named(self):
        empty = os.path.dirname(self.out)
        there = f"--run-dir={self.run_dir}"
        for arguments, code, words in (
                (("--seconds=0", there), 2, "--seconds"),
                (("--seconds=-1", there), 2, "--seconds"),
                (("--seconds=61", there), 2, "60"),
                (("--seconds=nan", there), 2, "--seconds"),
                (("--seconds=long", there), 2, "seconds"),
                ((f"--run-dir={empty}",), 1, empty),
                ((f"--addresses=unix:{empty}/no.sock",), 1, "no.sock"),
                ((there, f"--out={empty}/absent/trace.json"), 1, "absent")):
            done = trace(*arguments, timeout=20)
            self.assertEqual(done.returncode, code, (arguments, done.stdout, done.stderr))
            self.assertIn(words, done.stderr)
        self.assertEqual(os.listdir(empty), [])


if __name__ == "__main__":
    unittest.main()
