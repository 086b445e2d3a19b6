"""`tandem quantize` writes models that are served, and `tandem eval` measures them."""

import json
import pathlib
import subprocess
import tempfile
import unittest

import harness

TANDEM = str(harness.BIN / "tandem")
# The share of questions that a quantized model may lose, of 280; measured: see the README's table.
MOST_LOST = {"int8": 0.02, "int4": 0.05}


def run(*arguments, timeout=240):
    return subprocess.run([TANDEM, *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True,
                          timeout=timeout)


class Quantize(unittest.TestCase):
    def setUp(self):
        directory = tempfile.TemporaryDirectory(prefix="tandem-quantize-")
        self.addCleanup(directory.cleanup)
        self.directory = pathlib.Path(directory.name)

    def quantize(self, name, *options):
        output = self.directory / name
        done = run("quantize", f"--output={output}", *options)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("error", done.stdout)
        return output

    def test_int4_model_answers_a_prompt(self):
        model = self.quantize("int4", "--format=int4", "--group=32")
        answer = run("run", f"--model={model}", "--temperature=0", "What is 17 + 25?")
        self.assertEqual(answer.returncode, 0, answer.stderr)
        self.assertIn("42", answer.stdout)

    def test_eval_measures_bytes_perplexity_and_accuracy(self):
        results = {}
        for name in ("bf16", "int8", "int4"):
            model = harness.TINY if name == "bf16" else self.quantize(name, f"--format={name}")
            report = self.directory / f"{name}.json"
            done = run("eval", f"--model={model}", f"--json={report}", "--speed-tokens=16")
            self.assertEqual(done.returncode, 0, done.stderr)
            results[name] = json.loads(report.read_text())
            print(done.stdout)
            for speed in ("prompt_tokens_per_second", "answer_tokens_per_second", "tokens_per_second"):
                self.assertGreater(results[name][speed], 0)
            self.assertGreaterEqual(results[name]["threads"], 1)
            self.assertIn(f'{results[name]["kernels"]} kernels', done.stdout)
        stated = json.loads((harness.TINY / "eval.json").read_text())["reference_perplexity"]
        self.assertAlmostEqual(results["bf16"]["perplexity"], stated, delta=0.002)
        self.assertGreater(results["bf16"]["expert_bytes"], 1.9 * results["int8"]["expert_bytes"])
        self.assertGreater(results["bf16"]["expert_bytes"], 3.4 * results["int4"]["expert_bytes"])
        for name, most in MOST_LOST.items():
            self.assertLess(results[name]["perplexity"], stated * (1 + most), name)
            self.assertGreater(results[name]["accuracy"], results["bf16"]["accuracy"] - most, name)

    def test_eval_of_a_running_server(self):
        tasks = self.directory / "tasks"
        tasks.mkdir()
        lines = (harness.TINY / "eval.jsonl").read_text().splitlines()
        (tasks / "eval.jsonl").write_text("\n".join(lines[40:44]))
        with harness.Server() as server:
            url = f"http://127.0.0.1:{server.http_port}"
            done = run("eval", f"--url={url}", f"--tasks={tasks}", "--speed-tokens=4")
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertIn("100.0 %", done.stdout)
        done = run("eval", f"--url={url}", f"--tasks={tasks}")
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertIn(url, done.stderr)


class Refusals(unittest.TestCase):
    def test_what_cannot_be_done_is_named(self):
        with tempfile.TemporaryDirectory() as directory:
            taken = pathlib.Path(directory, "taken")
            taken.mkdir()
            (taken / "file").write_text("mine")
            empty = pathlib.Path(directory, "empty")
            empty.mkdir()
            output = f"--output={directory}/new"
            for arguments, code, words in (
                    (("quantize", output, "--format=q4_k"), 2, "q4_k"),
                    (("quantize", output, "--format=mxfp4", "--group=64"), 2, "--group=64"),
                    (("quantize",), 2, "output"),
                    (("quantize", f"--output={taken}"), 1, "exists"),
                    (("quantize", f"--output={taken}", "--overwrite"), 1, "not a model"),
                    (("quantize", output, f"--model={empty}"), 4, "empty"),
                    (("quantize", output, f"--model={directory}/absent"), 4, "absent"),
                    (("eval", f"--tasks={empty}"), 4, "eval.json")):
                done = run(*arguments)
                self.assertEqual(done.returncode, code, (arguments, done.stderr))
                self.assertIn(words, done.stderr)
            self.assertEqual((taken / "file").read_text(), "mine")
            self.assertFalse(pathlib.Path(directory, "new").exists())


if __name__ == "__main__":
    unittest.main()
