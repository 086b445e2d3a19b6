"""The shipped model written as GGUF files and served from them: tokenizer, chat template, experts."""

import pathlib
import subprocess
import tempfile
import unittest

import gguf_io
import harness

TANDEM = str(harness.BIN / "tandem")


def run(model, *options):
    return subprocess.run([TANDEM, "run", f"--model={model}", "--temperature=0", *options, "What is 17 + 25?"],
                          stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=240)


class Gguf(unittest.TestCase):
    def setUp(self):
        directory = tempfile.TemporaryDirectory(prefix="tandem-gguf-")
        self.addCleanup(directory.cleanup)
        self.directory = pathlib.Path(directory.name)
        self.state = f"--state-dir={self.directory / 'state'}"

    def test_file_with_experts_of_two_types_answers(self):
        model = gguf_io.convert(harness.TINY, self.directory / "tiny", quantized_layers=(0, 3))
        done = run(model, self.state)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("42", done.stdout)

    def test_directory_of_a_split_model_answers_as_the_safetensors_do(self):
        gguf_io.convert(harness.TINY, self.directory / "tiny", files=3)
        answers = [run(model, self.state, "--parity").stdout for model in (self.directory, harness.TINY)]
        self.assertEqual(*answers)
        self.assertIn("42", answers[0])

    def test_missing_part_is_named(self):
        model = gguf_io.convert(harness.TINY, self.directory / "tiny", files=3)
        (self.directory / "tiny-00002-of-00003.gguf").unlink()
        done = run(model, self.state)
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("tiny-00002-of-00003.gguf", done.stderr)


if __name__ == "__main__":
    unittest.main()
